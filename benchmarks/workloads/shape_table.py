"""The models' shapes and the batches of shapes.py, what is to be reached on them, and what a result comes to."""

import re
from collections.abc import Iterator, Mapping, Sequence
from statistics import geometric_mean
from typing import Any, Final

import torch

from benchmarks.kernels.decode_cases import Shape
from trunkattn.analysis.trees import TreeLevels

_FP8: Final = torch.float8_e4m3fn

SHAPES: Final = (
    Shape("llama3-8b 32/8x128", 32, 8, 128),
    Shape("llama3-70b/TP8 8/1x128", 8, 1, 128),
    Shape("qwen3-30b 32/4x128", 32, 4, 128),
    Shape("qwen3-235b/TP4 16/1x128", 16, 1, 128),
    Shape("qwen2.5-7b 28/4x128", 28, 4, 128),
    Shape("phi4 40/10x128", 40, 10, 128),
    Shape("mistral-large 96/8x128", 96, 8, 128),
    Shape("gpt-oss full 64/8x64 sinks", 64, 8, 64, sinks=True),
    Shape("gpt-oss window 64/8x64 sinks", 64, 8, 64, sinks=True, window=128),
    Shape("llama3.2-1b 32/8x64", 32, 8, 64),
    Shape("gemma3-12b 16/8x256", 16, 8, 256),
    Shape("gemma3-12b window 16/8x256", 16, 8, 256, window=1024),
    Shape("gemma2-9b cap 16/8x256", 16, 8, 256, soft_cap=50.0),
    Shape("qwen3-next 16/2x256", 16, 2, 256),
    Shape("phi3 32/32x96", 32, 32, 96),
    Shape("llama3-8b fp8 32/8x128", 32, 8, 128, kv_dtype=_FP8),
    Shape("qwen3-30b fp8 32/4x128", 32, 4, 128, kv_dtype=_FP8),
    Shape("gemma3-12b fp8 16/8x256", 16, 8, 256, kv_dtype=_FP8),
    Shape("mistral window 32/8x128", 32, 8, 128, window=4096),
    Shape("llama3-8b page 1 32/8x128", 32, 8, 128, page_size=1),
    Shape("gpt-oss page 1 64/8x64 sinks", 64, 8, 64, sinks=True, page_size=1),
)

# Latent attention in its absorbed form: all query heads read the same rows
LATENT_SHAPES: Final = tuple(
    Shape(f"latent {heads}/1x576", heads, 1, 576, page_size=64, latent_dim=512)
    for heads in (8, 12, 16, 20, 32, 64, 96, 128)
)

# Requests x (tokens of each level, from what all share to what is a request's own)
SHARED: Final = (
    "64 x (8192 + 512)",
    "64 x (1024 + 8 groups x 3072 + 256)",
    "256 x (1024 + 128)",
    "16 x (4096 + 256)",
)
UNSHARED: Final = ("64 x (4096)", "8 x (8192)")
BATCHES: Final = (*SHARED, *UNSHARED, "128 x (640 + 64)", "1 x (2048)")

# Times of SOL with one graph for any batch, geometric mean over SHARED
GOALS: Final = {
    "llama3-8b 32/8x128": 1.4,
    "llama3-8b fp8 32/8x128": 2.0,
    "qwen3-30b 32/4x128": 1.7,
    "qwen3-30b fp8 32/4x128": 3.0,
    "qwen2.5-7b 28/4x128": 1.9,
    "llama3-70b/TP8 8/1x128": 3.0,
    "gemma3-12b fp8 16/8x256": 2.0,
    "gpt-oss full 64/8x64 sinks": 2.0,
    "llama3.2-1b 32/8x64": 1.8,
    "gemma3-12b 16/8x256": 1.35,
    "qwen3-next 16/2x256": 2.0,
    "mistral-large 96/8x128": 2.0,
    "qwen3-235b/TP4 16/1x128": 3.0,
    "gpt-oss window 64/8x64 sinks": 2.0,
}
# Speed over FlashAttention-3's: a loss of 2 % at most; more on SHARED, but for the last, which is bound by launches
SPEED: Final = round(1 / 1.02, 3)
SHARED_SPEED: Final = dict.fromkeys(SHARED, 1.3) | {"16 x (4096 + 256)": 1.0}
# Speed over that of a bf16 cache: the mean over SHARED, and on each of UNSHARED; elsewhere at least as fast
FP8_SHARED, FP8_UNSHARED = 1.3, 1.75
FP8_GOALS: Final = ("llama3-8b fp8 32/8x128", "qwen3-30b fp8 32/4x128")

OURS: Final = {"trunkattn": "plan of its own", "trunkattn_one_graph": "one graph"}
OURS_BFLOAT16: Final = {"trunkattn": "trunkattn_bfloat16", "trunkattn_one_graph": "trunkattn_one_graph_bfloat16"}
FA3, FLASHINFER = "flash_attention_3", "flashinfer_decode"
WAYS: Final = (*OURS, FA3, FLASHINFER, *OURS_BFLOAT16.values())

Row = Mapping[str, Any]


def parse_batch(text: str) -> TreeLevels:
    """The tree of a batch, written as those above.

    Raises:
        ValueError: it has another form, or its counts are no tree.
    """
    whole = re.fullmatch(r"\s*(\d+)\s*x\s*\(([^()]+)\)\s*", text)
    parts = whole[2].split("+") if whole else []
    levels = [re.fullmatch(r"\s*(?:(\d+)\s*groups\s*x\s*)?(\d+)\s*", part) for part in parts]
    found = [level for level in levels if level]
    if not (whole and len(found) == len(levels) and found[-1][1] is None):
        raise ValueError(f"batch {text!r}: expected a batch such as '64 x (1024 + 8 groups x 3072 + 256)'")
    nodes = [int(level[1] or 1) for level in found[:-1]]
    return TreeLevels((*nodes, int(whole[1])), tuple(int(level[2]) for level in found))


def batch_name(tree: TreeLevels) -> str:
    """The name of a batch, as `parse_batch` reads it."""
    above = zip(tree.nodes[:-1], tree.tokens[:-1], strict=True)
    levels = [f"{nodes} groups x {tokens}" if nodes > 1 else f"{tokens}" for nodes, tokens in above]
    return f"{tree.num_requests} x ({' + '.join([*levels, str(tree.tokens[-1])])})"


def shapes_named(text: str) -> tuple[Shape, ...]:
    """Shapes whose name contains the text.

    Raises:
        ValueError: there is none.
    """
    shapes = (*SHAPES, *LATENT_SHAPES)
    found = tuple(shape for shape in shapes if text in shape.name)
    if not found:
        names = ", ".join(repr(shape.name) for shape in shapes)
        raise ValueError(f"no shape has {text!r} in its name: expected a part of one of {names}")
    return found


def order_of(row: Row) -> tuple[int, int]:
    """Where a row stands: as in the tables above, all others after them."""
    names = [shape.name for shape in SHAPES]
    places = ((names, row["shape"]), (BATCHES, row["batch"]))
    shape, batch = (table.index(name) if name in table else len(table) for table, name in places)
    return shape, batch


def us_of(row: Row, way: str) -> float | None:
    """µs, if it was measured."""
    return row.get(way, {}).get("us")


def why_not(row: Row, way: str) -> str:
    """Why there is no time."""
    cell = row.get(way) or row.get("case") or {"missing": "another way of the cell was lost before it"}
    return "; ".join(f"{kind}: {why}" for kind, why in cell.items() if kind in ("wrong", "missing"))


def speeds(rows: Sequence[Row], way: str, other: str) -> dict[str, float]:
    """Speeds by batch: the time of the other way over that of `way`, where both were measured."""
    times = {row["batch"]: (us_of(row, way), us_of(row, other)) for row in rows}
    return {batch: theirs / us for batch, (us, theirs) in times.items() if us and theirs}


def shared_mean(found: Mapping[str, float]) -> float | None:
    """Geometric mean over SHARED; None: one of them is missing."""
    return round(geometric_mean(found[batch] for batch in SHARED), 3) if set(SHARED) <= found.keys() else None


def extremes(found: Mapping[str, float]) -> dict[str, Any]:
    """The slowest and the fastest batch, with their speeds."""
    slowest, fastest = (choose(found, key=found.__getitem__) for choose in (min, max))
    return {name: [batch, round(found[batch], 3)] for name, batch in (("slowest", slowest), ("fastest", fastest))}


def times_sol(rows: Sequence[Row], way: str) -> float | None:
    """Geometric mean over SHARED of the time, in those of SOL."""
    times = {row["batch"]: (us_of(row, way) or 0) / row["sol_us"] for row in rows}
    return shared_mean({batch: times_of_sol for batch, times_of_sol in times.items() if times_of_sol})


def misses(name: str, rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Goals that a shape's rows miss. measured: a number, or why there is none."""
    mean, goal = times_sol(rows, "trunkattn_one_graph"), GOALS.get(name)
    if mean and goal and mean > goal:
        yield {"what": "times SOL, one graph, mean of the shared batches", "goal": goal, "measured": mean}
    for way, label in OURS.items():
        for row in rows:
            if us_of(row, way) is None:
                yield {"what": f"{row['batch']}, {label}", "goal": "a right output", "measured": why_not(row, way)}
        found = {batch: (speed, SHARED_SPEED.get(batch, SPEED)) for batch, speed in speeds(rows, way, FA3).items()}
        fp8 = speeds(rows, way, OURS_BFLOAT16[way])
        least = dict.fromkeys(fp8, 1.0) | (dict.fromkeys(UNSHARED, FP8_UNSHARED) if name in FP8_GOALS else {})
        of_fp8 = {batch: (speed, least[batch]) for batch, speed in fp8.items()}
        if name in FP8_GOALS and (speed := shared_mean(fp8)):
            of_fp8["mean of the shared batches"] = (speed, FP8_SHARED)
        for other, compared in (("FlashAttention-3's", found), ("a bf16 cache's", of_fp8)):
            for where, (speed, wanted) in compared.items():
                if speed < wanted:
                    what = f"{where}, {label}: speed over {other}"
                    yield {"what": what, "goal": wanted, "measured": round(speed, 3)}


def summary(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """What is said of each shape: times of SOL of every way, its goal, speeds over FlashAttention-3 and over a bf16
    cache, and misses."""
    found: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(row["shape"] for row in rows):
        cells = [row for row in rows if row["shape"] == name]
        means = {way: mean for way in WAYS if (mean := times_sol(cells, way))}
        entry: dict[str, Any] = {"cells": len(cells), "times_sol": means, "goal": GOALS.get(name)}
        over_fa3 = {way: speeds(cells, way, FA3) for way in OURS}
        over_bf16 = {way: speeds(cells, way, OURS_BFLOAT16[way]) for way in OURS}
        entry["over_flash_attention_3"] = {way: extremes(each) for way, each in over_fa3.items() if each}
        if any(over_bf16.values()):
            entry["over_bfloat16"] = {
                way: {"shared_mean": shared_mean(each)} | extremes(each) for way, each in over_bf16.items() if each
            }
        found[name] = entry | {"misses": list(misses(name, cells))}
    return found
