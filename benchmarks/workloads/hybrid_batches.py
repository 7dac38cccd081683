"""The batches of benchmarks/kernels/hybrid.py, and what its times come to: POD-Attention §5.1."""

from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Any

import numpy as np

from benchmarks.kernels.decode import HEAD_DIM, PAGE_SIZE
from trunkattn.analysis.batch import PagedBatch, pages_for

MODELS = {"Yi-6B": (32, 4), "Llama-3-8B": (32, 8), "Llama-2-7B": (32, 32)}  # heads, as POD-Attention has them
EXECUTIONS = {"trunkattn": "auto", "trunkattn_serial": "serial", "trunkattn_overlapped": "overlapped"}
COUNTED_SHARE = 0.2  # of the serial time, of prefill and of decode
NEAR = 1.1  # of max(prefill, decode): "within 10 %"
# What the sweep expects, to choose decodes: FLOP and bytes per µs of FlashAttention-3 on an H200
FLOP_PER_US, BYTES_PER_US = 520e6, 4.2e6
DRAWN_SHARES = (0.27, 0.73)  # of prefill, as expected: far enough from the limits that most batches count
MOST_DECODES, MOST_BYTES = 256, 8_000_000_000  # of the sweep's batches; K and V then have below 2**31 elements each


@dataclass(frozen=True)
class HybridBatch:
    """A prompt chunk of `chunk` query tokens that ends at `context`, and decodes of `decode_context` tokens each."""

    heads: tuple[int, int]
    chunk: int
    context: int
    decodes: int
    decode_context: int

    def __str__(self) -> str:
        hq, hkv = self.heads
        return f"{hq}/{hkv}: {self.chunk} @ {self.context} + {self.decodes} × {self.decode_context}"

    @property
    def pages(self) -> int:
        """Pages in use."""
        return pages_for(self.context, PAGE_SIZE) + self.decodes * pages_for(self.decode_context, PAGE_SIZE)

    @property
    def elements(self) -> int:
        """Elements of the keys, in whole pages; as many of the values."""
        return self.pages * PAGE_SIZE * self.heads[1] * HEAD_DIM

    @property
    def expected_us(self) -> tuple[float, float]:
        """Expected time of prefill and of decode, one after the other."""
        pairs = self.chunk * (self.context - self.chunk) + self.chunk * (self.chunk + 1) // 2
        size = 4 * HEAD_DIM * self.heads[1] * self.decode_context * self.decodes
        return 4 * HEAD_DIM * self.heads[0] * pairs / FLOP_PER_US, size / BYTES_PER_US

    def paged(self) -> PagedBatch:
        """The block table; the chunk is row 0, every page is used once."""
        lens = np.array([self.context] + self.decodes * [self.decode_context], np.int32)
        used = -(-lens // PAGE_SIZE)
        table = np.zeros((len(lens), int(used.max())), np.int32)
        table[np.arange(table.shape[1]) < used[:, None]] = np.random.default_rng(0).permutation(self.pages)
        query_lens = np.array([self.chunk] + self.decodes * [1], np.int32)
        return PagedBatch(table, lens, query_lens, PAGE_SIZE, self.pages)


TABLE = (
    HybridBatch((16, 4), 1024, 12288, 80, 12288),
    HybridBatch((16, 4), 12288, 12288, 220, 12288),
    HybridBatch((16, 4), 16384, 16384, 250, 12288),
    HybridBatch((32, 8), 1024, 8192, 64, 8192),
    HybridBatch((32, 8), 2048, 16384, 64, 8192),
    HybridBatch((32, 4), 512, 16384, 54, 16384),
)
SPLITS = (  # chunks of 768 fill the slots of 132 multiprocessors only when they are cut, those of 512 as they are
    HybridBatch((32, 8), 512, 15872, 64, 16384),
    HybridBatch((32, 8), 512, 16384, 64, 16384),
    HybridBatch((32, 8), 768, 16384, 64, 16384),
    HybridBatch((32, 8), 768, 8192, 64, 8192),
    HybridBatch((32, 4), 512, 16384, 54, 16384),
    HybridBatch((32, 4), 768, 16384, 54, 16384),
)


def sweep_batches(count: int) -> list[HybridBatch]:
    """Always the same: the models take turns; prefill's share of the expected time is drawn uniformly, as far as the
    limits on decodes allow."""
    rng, found = np.random.default_rng(0), list[HybridBatch]()
    while len(found) < count:
        heads = list(MODELS.values())[len(found) % len(MODELS)]
        chunk, context = int(rng.choice([512, 1024, 1536, 2048])), 256 * int(rng.integers(16, 81))
        one = HybridBatch(heads, chunk, context, 1, int(rng.integers(4096, 20481)))
        prefill_us, decode_us = one.expected_us
        share = rng.uniform(*DRAWN_SHARES)
        batch = replace(one, decodes=round(prefill_us * (1 - share) / share / decode_us))
        reached = prefill_us / sum(batch.expected_us)
        fits = 1 <= batch.decodes <= MOST_DECODES and 4 * batch.elements <= MOST_BYTES
        if fits and DRAWN_SHARES[0] <= reached <= DRAWN_SHARES[1] and batch not in found:
            found.append(batch)
    return found


def chunk_batches(num_sms: int) -> list[HybridBatch]:
    """Chunks of 512 of a 16k prompt, beside decodes with a CTA per KV head that fill two waves, and one more."""
    heads = MODELS["Yi-6B"]
    full = 2 * num_sms // heads[1]
    return [
        HybridBatch(heads, 512, end, decodes, 16384)
        for decodes in (full, full + 1)
        for end in range(512, 16384 + 1, 512)
    ]


def limits(us: dict[str, float]) -> dict[str, Any]:
    """max(prefill, decode) by whose halves; shares of FlashAttention-3's serial time, and whether the batch counts."""
    found: dict[str, Any] = {"oracle_us": {}, "counted": False}
    for owner in ("fa3", "trunkattn"):
        parts = [us[name] for name in (f"{owner}_prefill", f"{owner}_decode") if name in us]
        if len(parts) < 2:
            continue
        found["oracle_us"][owner] = max(parts)
        if owner == "fa3" and "fa3_serial" in us:
            found["shares"] = [round(part / us["fa3_serial"], 3) for part in parts]
            found["counted"] = min(found["shares"]) >= COUNTED_SHARE
    return found


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Summary of the batches that count, all and by heads; times as `measure` has them."""
    counted = [row for row in rows if row["counted"]]
    groups = {"all": counted} | {
        heads: [row for row in counted if row["heads"] == heads] for heads in dict.fromkeys(r["heads"] for r in counted)
    }
    return {"batches": len(rows), "counted": len(counted)} | {name: figures(group) for name, group in groups.items()}


def ratios(rows: list[dict[str, Any]], over: str, under: str) -> list[float]:
    """Ratios of two times, in the rows that have both."""
    return [row["us"][over] / row["us"][under] for row in rows if over in row["us"] and under in row["us"]]


def figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Speed-ups over FlashAttention-3 serial, how near max(prefill, decode), and what `auto` chose wrong."""
    found: dict[str, Any] = {"batches": len(rows)}
    for name in (*EXECUTIONS, "fa3_streams", "flashinfer_pod"):
        if gains := ratios(rows, "fa3_serial", name):
            found[name] = {
                "cells": len(gains), "mean": round(mean(gains), 3), "median": round(median(gains), 3),
                "best": round(max(gains), 3), "worst": round(min(gains), 3),
            }  # fmt: skip
            for owner in ("fa3", "trunkattn"):
                have = [row for row in rows if name in row["us"] and owner in row["oracle_us"]]
                near = [row["us"][name] <= NEAR * row["oracle_us"][owner] for row in have]
                found[name][f"near_oracle_of_{owner}"] = round(mean(near), 3) if near else None
    for name in ("trunkattn", "trunkattn_overlapped"):
        if slower := ratios(rows, name, "trunkattn_serial"):
            own = {"best_over_own_serial": round(min(slower), 3), "worst_over_own_serial": round(max(slower), 3)}
            found[name] = found.get(name, {}) | own
    if gains := ratios(rows, "flashinfer_pod", "trunkattn"):
        wins = sum(gain < 1 for gain in gains)
        found["over_flashinfer_pod"] = {"cells": len(gains), "mean": round(mean(gains), 3), "cells_pod_wins": wins}
    return found
