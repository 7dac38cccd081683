"""Time per token of a back end on a batch, what its card does in a step, and the table of all back ends."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.engines.interface import Offline, Span
from benchmarks.engines.traces import busy, events_in
from benchmarks.workloads.decode_batches import WORKLOADS, Workload

SHORT, LONG, COMPARED = 8, 136, 16
LEAST = 32  # tokens of a request that give its pace
TRACED = 24  # tokens of a request whose steps are traced, within those


def pace(arrivals: Sequence[Sequence[tuple[float, int]]]) -> float:
    """Milliseconds per token while all requests decode: of the request that has its SHORT-th token last, from then on
    until the first request ends.

    Raises:
        ValueError: all decode at once for less than LEAST tokens.
    """
    starts = [next(time for time, tokens in request if tokens >= SHORT) for request in arrivals]
    start, end = max(starts), min(request[-1][0] for request in arrivals)
    window = [arrival for arrival in arrivals[starts.index(start)] if start <= arrival[0] <= end]
    tokens = window[-1][1] - window[0][1] if window else 0
    if tokens < LEAST:
        raise ValueError(
            f"all requests decoded at once for {tokens} tokens: expected {LEAST} or more; lower the batch's tokens, or "
            "give the cache room for its prompts"
        )
    return (window[-1][0] - window[0][0]) / tokens * 1e3


def measure(engine: Offline, prompts: Sequence[list[int]], repeats: int) -> dict[str, Any]:
    """Figures of one back end on one batch."""
    engine.generate(prompts, SHORT)
    found = [engine.generate(prompts, LONG) for _ in range(repeats)]
    times = [pace(each.arrivals) for each in found]
    figures = {"tpot_ms": round(median(times), 3), "tpot_ms_each": [round(time, 3) for time in times]}
    return figures | {"tokens": [sequence[:COMPARED] for sequence in found[-1].tokens]}


def traced(folder: Path, steps: int) -> dict[str, Any]:
    """What the card did in a step, from the traces of `steps` steps in a folder, which are removed.

    Raises:
        RuntimeError: there are none.
    """
    events = events_in(folder)
    if not (events and steps):
        raise RuntimeError("the engine's profiler wrote no trace of whole steps")
    for path in folder.rglob("*"):
        if path.is_file():
            path.unlink()
    return busy(events, steps)


def traced_or_why(engine: Offline, prompts: Sequence[list[int]], folder: Path) -> dict[str, Any]:
    """What the card does in a step in which all requests decode, or why that is not known: what was timed stays in the
    result. folder: of the engine's profiler."""
    try:
        engine.generate(prompts, SHORT)  # its prefixes may have left the cache
        return traced(folder, engine.trace(prompts, Span(SHORT, TRACED, LONG), folder).steps)
    except Exception as error:
        return {"busy_missing": f"{type(error).__name__}: {error}"}


def compare(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Compares the first tokens, before the first that differs."""
    parted = [
        next((step for step, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), COMPARED)
        for x, y in zip(ours, theirs, strict=True)
    ]
    steps = sorted(step for step in parted if step < COMPARED)
    return {"equal_tokens": round(sum(parted) / (COMPARED * len(parted)), 4), "parted_in_steps": steps}


def table(results: Mapping[str, Mapping[str, Any]], workloads: Sequence[Workload] = WORKLOADS) -> list[dict[str, Any]]:
    """A row per workload that all have answered: each back end, and how the others compare with the first."""
    first, *others = results
    rows = []
    for name in map(str, workloads):
        if any(name not in found for found in results.values()):
            continue
        row: dict[str, Any] = {"workload": name}
        for backend, found in results.items():
            row[backend] = {key: value for key, value in found[name].items() if key != "tokens"}
        for backend in others:
            row[backend] |= compare(results[backend][name]["tokens"], results[first][name]["tokens"])
            row[backend]["speedup"] = round(results[first][name]["tpot_ms"] / results[backend][name]["tpot_ms"], 3)
        rows.append(row)
    return rows
