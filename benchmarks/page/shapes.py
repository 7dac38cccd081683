"""Decode attention of the models that people serve."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.page.common import NOTICEABLE, Loss, Section, card_of, exists, folded, load, sources, table
from benchmarks.page.names import use_of

NAMES = ("shapes-h100", "shapes-h200")
OURS = {"trunkattn": "plan of its own", "trunkattn_one_graph": "one graph for any batch"}
PEERS = {"flash_attention_3": "FlashAttention-3", "flashinfer_decode": "FlashInfer"}
ON_BFLOAT16 = {
    "trunkattn_bfloat16": "plan of its own, bf16 cache",
    "trunkattn_one_graph_bfloat16": "one graph for any batch, bf16 cache",
}
LABELS = {**OURS, **PEERS, **ON_BFLOAT16, "case": "all"}
FA3 = "flash_attention_3"

Row = Mapping[str, Any]


def shapes() -> Section | None:
    """The section; None: no card has been measured."""
    names = [name for name in NAMES if exists(name)]
    if not names:
        return None
    head = ["card", "model: query / KV heads x head_dim", *PEERS.values()]
    head += [*(f"TrunkAttention, {label}" for label in OURS.values()), "goal", "reached"]
    by_card = {card_of(name): goal_rows([name]) for name in names}
    tables = "\n\n".join(folded(f"{card}: {len(rows)} models", table(head, rows, 2)) for card, rows in by_card.items())
    text = f"""## Time over the speed of light

Decode attention of one layer, of the models that people serve. Time as a multiple of the speed of light (SOL), which
counts only what a window lets the queries see; geometric mean over the four batches that share most, lower is better.
A goal is for one graph for any batch, which is what an engine replays. FlashAttention-3 reads fp8 caches with fp8
queries, as in vLLM; TrunkAttention rounds no queries.

{tables}

{missed_text(names)}

{"".join(speed_text(name) for name in names)}{fp8_text(names)}{without_time_text(names)}\
{sources("python -m benchmarks.kernels.shapes", *names)}
"""
    return Section(text, [loss for name in names for loss in losses(name)])


def goal_rows(names: Sequence[str]) -> list[list[object]]:
    rows: list[list[object]] = []
    for name in names:
        for shape, found in load(name)["summary"].items():
            means, goal = found["times_sol"], found["goal"]
            cells = [f"{means[way]:.2f}" if way in means else "" for way in (*PEERS, *OURS)]
            verdict = verdict_on(means.get("trunkattn_one_graph"), goal) if goal else ""
            rows.append([card_of(name), shape, *cells, f"{goal:.2f}" if goal else "", verdict])
    return rows


def verdict_on(reached: float | None, goal: float) -> str:
    if reached is None:
        return "not measured"
    return "met" if reached <= goal else "**missed**"


def missed_text(names: Sequence[str]) -> str:
    """All goals that are missed, those for single batches, too."""
    missed = [
        [card_of(name), shape, each["what"], each["goal"], each["measured"]]
        for name in names
        for shape, found in load(name)["summary"].items()
        for each in found["misses"]
    ]
    aims = """Further goals: no batch is slower than FlashAttention-3 by more than 2 %. The four shared batches have 1.3
times its speed, but for 16 x (4096 + 256), which is bound by launches: 1.0. With an fp8 cache no batch is slower than
with a bf16 one; at 32/8 and 32/4 it has 1.3 times the speed where batches share and 1.75 times where they do not."""
    if not missed:
        return f"{aims}\nNo goal is missed."
    head = ["card", "model", "batch, plan: figure", "goal", "measured"]
    return f"{aims}\n\n{folded(f'{len(missed)} goals that are missed', table(head, missed, 3))}"


def speed_text(name: str) -> str:
    """Speed over FlashAttention-3 on every batch."""
    result = load(name)["rows"]
    batches = list(dict.fromkeys(row["batch"] for row in result))
    by_cell = {(row["shape"], row["batch"]): row for row in result}
    rows: list[list[object]] = []
    for shape in dict.fromkeys(row["shape"] for row in result):
        cells = [by_cell.get((shape, batch), {}) for batch in batches]
        rows.append([shape, *(" / ".join(speed_or_why(row, way) for way in OURS) for row in cells)])
    counts = []
    for way, label in OURS.items():
        ratios = [us(row, FA3) / us(row, way) for row in result if us(row, FA3) and us(row, way)]
        counts.append(f"{sum(ratio > 1 for ratio in ratios)} of {len(ratios)} with {label.replace('plan', 'a plan')}")
    head = ["model", *(f"{use_of(batch)}<br>`{batch}`" for batch in batches)]
    return f"""## Speed over FlashAttention-3, {card_of(name)}

Each cell is the speed with a plan of its own / with one graph for any batch. Less than 1 is slower. Faster are
{" and ".join(counts)}.

{folded(f"{len(rows)} models", table(head, rows))}

"""


def us(row: Row, way: str) -> float:
    """0: it was not measured."""
    return row.get(way, {}).get("us", 0)


def speed_or_why(row: Row, way: str) -> str:
    if us(row, way) and us(row, FA3):
        return f"{us(row, FA3) / us(row, way):.2f}"
    return "wrong" if "wrong" in row.get(way, {}) else "?"


def over_bfloat16(name: str) -> list[float]:
    """Speed of each shape with an fp8 cache over a bf16 cache: mean of the shared batches, one graph."""
    found = (shape.get("over_bfloat16", {}).get("trunkattn_one_graph", {}) for shape in load(name)["summary"].values())
    return [speeds["shared_mean"] for speeds in found if speeds.get("shared_mean")]


def fp8_text(names: Sequence[str]) -> str:
    """Speed of an fp8 cache over that of a bf16 cache."""
    rows: list[list[object]] = []
    for name in names:
        for shape, found in load(name)["summary"].items():
            for way, speeds in found.get("over_bfloat16", {}).items():
                mean = speeds["shared_mean"]
                ends = [f"{speed:.2f}: {use_of(batch)}" for batch, speed in (speeds["slowest"], speeds["fastest"])]
                rows.append([card_of(name), shape, OURS[way], f"{mean:.2f}" if mean else "", *ends])
    if not rows:
        return ""
    head = ["card", "model", "plan", "four shared batches, mean", "slowest", "fastest"]
    return f"## fp8 caches\n\nSpeed over that of a bf16 cache.\n\n{table(head, rows, 3)}\n\n"


def without_time_text(names: Sequence[str]) -> str:
    """What was wrong or could not run."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for name in names:
        for row in load(name)["rows"]:
            for way, label in LABELS.items():
                for kind, why in row.get(way, {}).items():
                    if kind in ("wrong", "missing"):
                        text = f"{kind}: {why}".replace("|", "/").replace("\n", " ")
                        counts[card_of(name), label, text] += 1
    if not counts:
        return ""
    rows = [[card, label, count, why] for (card, label, why), count in counts.items()]
    return folded("What has no time, and why", table(["card", "what", "cells", "why"], rows, 2)) + "\n\n"


def losses(name: str) -> Iterator[Loss]:
    """The worst batch of each shape and plan."""
    rows, card = load(name)["rows"], card_of(name)
    for shape in dict.fromkeys(row["shape"] for row in rows):
        of_shape = [row for row in rows if row["shape"] == shape]
        for (way, label), on_bfloat16 in zip(OURS.items(), ON_BFLOAT16, strict=True):
            for others in (PEERS, {on_bfloat16: "the same with a bf16 cache"}):
                found = [ratio for row in of_shape if (ratio := over_fastest(row, way, others))]
                slow = [each for each in found if each[0] > NOTICEABLE]
                if slow:
                    worst, other, batch = max(slow)
                    where = (
                        f"decode, {card}, {shape}, {label}: {len(slow)} of {len(found)} batches, worst {use_of(batch)}"
                    )
                    yield Loss(where, others[other], worst)


def over_fastest(row: Row, way: str, others: Mapping[str, str]) -> tuple[float, str, str] | None:
    """Time over that of the fastest of the others, which one it is, and the batch."""
    times = {other: us(row, other) for other in others if us(row, other)}
    if not times or not us(row, way):
        return None
    fastest = min(times, key=times.__getitem__)
    return us(row, way) / times[fastest], fastest, row["batch"]
