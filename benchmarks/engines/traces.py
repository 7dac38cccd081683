"""What PyTorch's profiler wrote of an engine's steps on a GPU."""

import gzip
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ON_CARD = ("kernel", "gpu_memcpy", "gpu_memset")  # kinds of events
ON_HOST = ("cuda_runtime", "cuda_driver")
LISTED, NAME_LENGTH = 12, 80
Event = Mapping[str, Any]


def events_in(folder: Path) -> list[dict[str, Any]]:
    """Events of all traces in a folder."""
    found = []
    for path in folder.rglob("*.json*"):
        content = path.read_bytes()
        events = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
        found += events.get("traceEvents", [])
    return found


def on_first_card(events: Iterable[Event]) -> list[Event]:
    """What one card did: of several, that with the lowest number."""
    found = [event for event in events if event.get("cat") in ON_CARD]
    first = min((event["args"]["device"] for event in found), default=0)
    return [event for event in found if event["args"]["device"] == first]


def busy_us(events: Iterable[Event]) -> float:
    """How long at least one of these events went on, which may overlap."""
    total, end = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: float(event["ts"])):
        begin, until = float(event["ts"]), float(event["ts"]) + float(event["dur"])
        total += max(0.0, until - max(begin, end))
        end = max(end, until)
    return total


def busy(events: Sequence[Event], steps: int) -> dict[str, Any]:
    """Milliseconds of one card in a step: those in which anything runs; those of each kernel, the longest first, which
    may overlap; and those that the host is in each of CUDA's calls. Names that begin alike count as one.

    Raises:
        RuntimeError: nothing was done on a card.
    """
    of_card = on_first_card(events)
    if not of_card:
        raise RuntimeError("the engine's profiler saw no kernel of a card")
    calls = (event for event in events if event.get("cat") in ON_HOST)
    return {
        "busy_ms": round(busy_us(of_card) / steps / 1e3, 3),
        "kernels_ms": longest(of_card, steps),
        "calls_ms": longest(calls, steps),
    }


def longest(events: Iterable[Event], steps: int) -> dict[str, float]:
    """Milliseconds in a step by name, of those that take longest."""
    names = Counter[str]()
    for event in events:
        names[event["name"][:NAME_LENGTH]] += event["dur"]
    return {name: round(us / steps / 1e3, 4) for name, us in names.most_common(LISTED)}
