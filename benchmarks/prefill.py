"""Prompt chunks on a GPU: one request's chunks, short chunks behind one prefix, and the peers that import.

    python benchmarks/prefill.py                     # results/prefill-CARD.json
    python benchmarks/prefill.py --tiles             # results/prefill-tiles-CARD.json: candidates for PREFILL_TILE

bf16, head_dim 128, 32/8 heads, pages of 16. A cell is a chunk of so many query tokens behind so many cached tokens, or
so many requests with a short chunk each behind one shared prefix. `trunkattn` is what a card gets, `trunkattn_portable`
the kernel for any card. Time is that of a CUDA graph of several runs, median
of the replays. Some tokens of every output are checked against float64.
"""

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import numpy as np
import torch
from inside import backend_of
from kernels import HEAD_DIM, PAGE_SIZE, TOLERANCE, microseconds
from report import short_name, write_result

import trunkattn
from trunkattn.gpu.chunk_planner import ChunkPlanner
from trunkattn.gpu.tuning.prefill import PREFILL_TILE, PrefillTile
from trunkattn.workloads.trees import PrefixTree, tree_batch

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from gpu_kernels import Case, Run
from gpu_prefill import PREFILL_PEERS

HEADS = (32, 8)
CHUNKS = (512, 1024, 2048, 4096, 8192, 16384)
CACHED = (0, 2048, 8192, 32768)
SHARED = [(requests, tokens, prefix) for prefix in (2048, 8192) for requests in (8, 64) for tokens in (24, 40, 64)]
SWEPT = ((512, 8192), (2048, 2048), (4096, 32768), (8192, 0))
SHAPES = ((64, 32, 4), (64, 64, 4), (128, 64, 4), (128, 64, 8), (128, 128, 8))  # rows, keys, warps
RUN_US = 2000  # of a graph, at least: what starts and ends one is then little


def make_case(requests: int, tokens: int, cached: int) -> Case:
    """Requests with a chunk of `tokens` each behind `cached` tokens that all share; pages shuffled."""
    levels = [(1, cached), (requests, tokens)] if cached else [(requests, tokens)]
    nodes, lengths = zip(*levels, strict=True)
    batch = tree_batch(PrefixTree(nodes, lengths), PAGE_SIZE, page_seed=1)
    batch = replace(batch, query_lens=np.full(requests, tokens, np.int32))
    torch.manual_seed(0)
    shape = (batch.num_pages, PAGE_SIZE, HEADS[1], HEAD_DIM)
    kv = [tuple(torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))]
    q = torch.randn(requests * tokens, HEADS[0], HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    return Case(batch, q, kv, [])


def flops(case: Case) -> int:
    """Of the pairs that a query token sees."""
    pairs = sum(
        query_len * (length - query_len) + query_len * (query_len + 1) // 2
        for length, query_len in zip(case.batch.seq_lens.tolist(), case.batch.query_lens.tolist(), strict=True)
    )
    return 4 * HEAD_DIM * HEADS[0] * pairs


def largest_error(case: Case, out: torch.Tensor) -> float:
    """Against float64, on the first, middle and last tokens of the first and last request; NaN is an infinite error."""
    if out.isnan().any():
        return math.inf
    batch, worst = case.batch, 0.0
    for row in {0, len(batch.seq_lens) - 1}:
        first, last = batch.query_start_loc[row : row + 2].tolist()
        for token in {first, (first + last) // 2, last - 1}:
            seen = int(batch.seq_lens[row]) - last + token + 1
            pages = torch.from_numpy(batch.block_table[row, : -(-seen // PAGE_SIZE)]).cuda().long()
            k, v = (cache[pages].flatten(0, 1)[:seen].double() for cache in case.kv[0])
            q = case.q[token].double().view(HEADS[1], -1, HEAD_DIM)
            weights = (torch.einsum("hgd,lhd->hgl", q, k) / math.sqrt(HEAD_DIM)).softmax(-1)
            found = out[token].double().view_as(q)
            worst = max(worst, float((torch.einsum("hgl,lhd->hgd", weights, v) - found).abs().max()))
    return worst


def ours(case: Case, tile: PrefillTile | None = None) -> tuple[Run, trunkattn.Plan]:
    """This project, `auto`. tile: of the portable kernel, also where a card has its own."""
    config = trunkattn.AttentionConfig(*HEADS, HEAD_DIM, PAGE_SIZE, case.q.dtype)
    attention = trunkattn.BatchAttention(config, "cuda")
    if tile:
        num_sms = torch.cuda.get_device_properties(0).multi_processor_count
        executor = backend_of(attention)
        executor._chunks = ChunkPlanner(config, tile, num_sms)
        executor._device_info = replace(executor._device_info, hopper=False)
    batch = case.batch
    plan = attention.plan(*(torch.from_numpy(it) for it in (batch.block_table, batch.seq_lens, batch.query_start_loc)))
    out = torch.full_like(case.q, math.nan)
    return lambda copy: attention.run(plan, case.q, *case.kv[copy], out=out), plan


def measure(case: Case, make: Callable[[Case], Run]) -> dict[str, Any]:
    """Time, rate and error, or why there are none."""
    try:
        run = make(case)
        error = largest_error(case, run(0))
    except Exception as reason:  # a peer or a tile that cannot run here is reported, not fatal
        return {"missing": f"{type(reason).__name__}: {str(reason)[:200]}"}
    if error > TOLERANCE:
        return {"wrong": f"error {error:.3g}"}
    work = flops(case)
    runs = max(1, min(20, int(RUN_US / (work / 5e8))))  # at some 500 TFLOP/s
    us = microseconds(lambda _: run(0), runs)
    return {"us": round(us, 2), "tflops": round(work / us / 1e6, 1), "error": error}


def cell(requests: int, tokens: int, cached: int, peers: list[str]) -> dict[str, Any]:
    """One row of the result."""
    case = make_case(requests, tokens, cached)
    _, plan = ours(case)
    stats = plan.stats
    row: dict[str, Any] = {"requests": requests, "tokens": tokens, "cached": cached}
    described = {"tiles": stats.tiles, "policy": stats.policy, "kv_tokens_read": stats.kv_tokens_read}
    row["trunkattn"] = measure(case, lambda case: ours(case)[0]) | described
    row["trunkattn_portable"] = measure(case, lambda case: ours(case, PREFILL_TILE)[0])
    for name in peers:
        row[name] = measure(case, PREFILL_PEERS[name])
    return row


def show(row: dict[str, Any]) -> None:
    """One line."""
    cells = {name: (it.get("us"), it.get("tflops")) if "us" in it else it for name, it in row.items() if _measured(it)}
    print(f"{row['requests']} x {row['tokens']} @ {row['cached']}: {cells}", flush=True)


def _measured(value: object) -> bool:
    return isinstance(value, dict)


def speedups(rows: list[dict[str, Any]], peers: list[str]) -> dict[str, float]:
    """Geometric mean of a peer's time over ours, where both were measured."""
    found = {}
    for name in peers:
        ratios = [
            row[name]["us"] / row["trunkattn"]["us"] for row in rows if "us" in row[name] and "us" in row["trunkattn"]
        ]
        if ratios:
            found[name] = round(geometric_mean(ratios), 3)
    return found


def sweep(card: str) -> None:
    """Every candidate tile on a few cells."""
    rows = []
    cases = {each: make_case(1, *each) for each in SWEPT}
    for m, n, warps in SHAPES:
        for stages in (2, 3, 4):
            tile = PrefillTile(m, n, warps, stages, ctas_per_sm=2 if warps == 4 else 1)
            row: dict[str, Any] = {"tile": f"{m}x{n}, {warps} warps, {stages} stages"}
            for (tokens, cached), case in cases.items():
                row[f"{tokens} @ {cached}"] = measure(case, lambda case, tile=tile: ours(case, tile)[0])
                if "missing" in row[f"{tokens} @ {cached}"]:
                    break  # so it will be in the other cells
            rows.append(row)
            print(row["tile"], {name: it.get("tflops", it) for name, it in row.items() if _measured(it)}, flush=True)
    write_result(f"prefill-tiles-{card}", {"card": torch.cuda.get_device_name(), "rows": rows}, "triton")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", nargs="*", default=list(PREFILL_PEERS), choices=list(PREFILL_PEERS))
    parser.add_argument("--chunks", nargs="+", type=int, default=CHUNKS, help="query tokens of the one request")
    parser.add_argument("--cached", nargs="+", type=int, default=CACHED, help="tokens before them")
    parser.add_argument("--tiles", action="store_true", help="time candidate tiles instead")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "prefill.py: torch finds no CUDA device: expected an NVIDIA GPU\n")
    name = torch.cuda.get_device_name()
    card = short_name(name)
    if arguments.tiles:
        return sweep(card)
    chunks, shared = [], []
    for tokens in arguments.chunks:
        for cached in arguments.cached:
            chunks.append(cell(1, tokens, cached, arguments.peers))
            show(chunks[-1])
            torch.cuda.empty_cache()
    for requests, tokens, prefix in SHARED:
        shared.append(cell(requests, tokens, prefix, arguments.peers))
        show(shared[-1])
    figures = {
        "card": name, "heads": "32/8", "head_dim": HEAD_DIM, "page_size": PAGE_SIZE, "dtype": "bfloat16",
        "speedup_chunks": speedups(chunks, arguments.peers), "speedup_shared": speedups(shared, arguments.peers),
        "chunks": chunks, "shared": shared,
    }  # fmt: skip
    print(figures["speedup_chunks"], figures["speedup_shared"])
    write_result(f"prefill-{card}", figures, "triton")


if __name__ == "__main__":
    main()
