"""Latent attention (MLA): decoding beside its peers, and the most that reading a trunk once can give."""

import re
from collections.abc import Mapping, Sequence
from statistics import geometric_mean
from typing import Any, Final

from benchmarks.page.common import Loss, Section, card_of, exists, folded, load, note_loss, sources, table
from benchmarks.page.names import use_of

NAMES: Final = ("mla-h100", "mla-h200")
NARROW: Final = ("mla-fp8-h100", "mla-fp8-h200")
PEERS: Final = {"flashmla": "FlashMLA", "fa3": "FlashAttention-3"}
OURS: Final = ("trunkattn_one_graph", "trunkattn")  # the first that was measured is shown
LATENT, ROPE = 512, 64  # columns of a cached row, 2 bytes each
_ALONE: Final = re.compile(r"\d+ x \(\d+\)")  # the name of a batch that shares nothing
Row = Mapping[str, Any]


def latent() -> Section | None:
    """The section; None: no card has been measured."""
    names = [name for name in NAMES if exists(name)]
    if not names:
        return None
    head = ["card", "batch", "workload", "heads", "once", *PEERS.values(), "TrunkAttention", "speed-up"]
    rows = [cells_of(card_of(name), row) for name in names for row in by_heads(name)]
    means = [mean_row for name in names for mean_row in mean_rows(name)]
    means_head = ["card", "heads", "shared, mean", "shared, worst", "nothing shared, mean", "nothing shared, worst"]
    text = f"""## Decoding over a latent cache

Rows of {LATENT} + {ROPE} numbers, bf16, queries absorbed, pages of 64, cold L2 cache; µs. "Once" is the speed of light:
what the bytes take that are read once, or the arithmetic. A speed-up is over the faster of FlashMLA and
FlashAttention-3 in the same run; below 1 it is a loss. Means are geometric.
[Latent attention](../guide/latent-attention.md) says when it pays.

{table(means_head, means, 1)}

{folded(f"{len(rows)} batches", table(head, rows, 3))}

{sources("python -m benchmarks.kernels.mla", *names)}
"""
    return Section(text, [loss for name in names for loss in losses_of(name)])


def narrow() -> Section | None:
    """The section of caches of 8 bits; None: no card has been measured."""
    names = [name for name in NARROW if exists(name)]
    if not names:
        return None
    rows, losses, errors = list[list[object]](), list[Loss](), list[tuple[float, float]]()
    for name in names:
        for row in by_heads(name):
            wide, ours, peer = (row[cache]["us"] for cache in ("bf16", "fp8", "flashmla_fp8"))
            errors.append((row["fp8"]["error"], row["flashmla_fp8"]["error"]))
            shown = [f"{time:.0f}" for time in (wide, ours, peer)]
            ratios = [f"{ours / wide:.2f}×", f"{peer / ours:.2f}×"]
            rows.append([card_of(name), row["batch"], use_of(row["batch"]), row["heads"], *shown, *ratios])
            where = f"{card_of(name)}, latent cache in fp8, {row['heads']} heads: {use_of(row['batch'])}"
            note_loss(losses, where, "the same with a bf16 cache", ours / wide)
            note_loss(losses, where, "FlashMLA with an fp8 cache", ours / peer)
    error, peer_error = (max(of_one) for of_one in zip(*errors, strict=True))
    head = [
        "card",
        "batch",
        "workload",
        "heads",
        "bf16",
        "fp8",
        "FlashMLA, fp8",
        "fp8 over bf16",
        "speed-up over FlashMLA",
    ]
    text = f"""## A latent cache in fp8

Our decoding with a cache of e4m3, whose rows are widened to float16 on their way to the tensor cores, beside the same
with a bf16 cache and beside FlashMLA over e4m3; queries in bf16, pages of 64, cold L2 cache; µs. FlashMLA rounds
queries and probabilities to e4m3, too, and multiplies 8-bit numbers. Its largest error is {100 * peer_error:.0f}% of
the largest output, ours {100 * error:.1f}%. It is faster where nothing is shared, and slower where few heads share
much.

{folded(f"{len(rows)} batches", table(head, rows, 3))}

{sources("python -m benchmarks.kernels.mla --fp8", *names)}
"""
    return Section(text, losses)


def by_heads(name: str) -> list[Row]:
    """The rows of a result, those of few heads first."""
    return sorted(load(name)["rows"], key=lambda row: row["heads"])


def mean_rows(name: str) -> list[list[object]]:
    """Speed-ups by number of heads of batches that share and of batches that do not: mean and worst."""
    found: dict[int, tuple[list[float], list[float]]] = {}
    for row in by_heads(name):
        if gain := speed_up(row):
            found.setdefault(row["heads"], ([], []))[bool(_ALONE.fullmatch(row["batch"]))].append(gain)
    return [
        [
            card_of(name),
            heads,
            *(f"{of(gains):.2f}×" if gains else "" for gains in both for of in (geometric_mean, min)),
        ]
        for heads, both in found.items()
    ]


def cells_of(card: str, row: Row) -> list[object]:
    """A row of the table; what was not measured is empty."""
    times = [time_of(row, (way,)) for way in PEERS]
    ours, gain = time_of(row, OURS), speed_up(row)
    shown = [f"{time:.0f}" if time else "" for time in (*times, ours)]
    cells = [card, row["batch"], use_of(row["batch"]), row["heads"], f"{row['sol_us']:.0f}", *shown]
    return [*cells, f"{gain:.2f}×" if gain else ""]


def losses_of(name: str) -> list[Loss]:
    """Batches on which a peer is faster."""
    found: list[Loss] = []
    for row in load(name)["rows"]:
        for way, peer in PEERS.items():
            ours, theirs = time_of(row, OURS), time_of(row, (way,))
            if ours and theirs:
                where = f"{card_of(name)}, latent cache, {row['heads']} heads: {use_of(row['batch'])}"
                note_loss(found, where, peer, ours / theirs)
    return found


def speed_up(row: Row) -> float | None:
    """The faster peer's time over ours; None: one is missing."""
    peers = [time for way in PEERS if (time := time_of(row, (way,)))]
    ours = time_of(row, OURS)
    return min(peers) / ours if ours and peers else None


def time_of(row: Row, ways: Sequence[str]) -> float | None:
    """Microseconds of the first of some ways that was measured."""
    return next((row[way]["us"] for way in ways if "us" in row.get(way, {})), None)


def most_gain(heads: int, sharers: int, result: Mapping[str, Any]) -> float:
    """The most that reading a trunk once gives, by the rates of a result: the time of a cached row that is read for
    each sharer, over that of a row that is read once. Neither takes less than its arithmetic."""
    read_us = 2 * (LATENT + ROPE) / (result["read_tb_per_s"] * 1e6)
    compute_us = 2 * (2 * LATENT + ROPE) * heads * sharers / (result["bf16_tflops"] * 1e6)
    return max(sharers * read_us, compute_us) / max(read_us, compute_us)
