"""What benchmarks/engine_traces.py makes of traces, with events that a profiler could have written."""

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from engine_tpot import traced
from engine_traces import NAME_LENGTH, busy, busy_us, events_in


def event(name: str, ts: float, dur: float, device: int = 0, cat: str = "kernel") -> dict[str, Any]:
    return {"name": name, "ts": ts, "dur": dur, "cat": cat, "args": {"device": device}}


def test_kernels_that_overlap_count_once() -> None:
    events = [event("b", 30, 5), event("a", 0, 10), event("a", 4, 2), event("c", 8, 7), event("d", 31, 1)]
    assert busy_us(events) == 20
    assert busy_us([]) == 0


def test_a_step_of_one_card_by_kernel() -> None:
    long = "k" * (NAME_LENGTH + 9)
    events = [
        event(long, 0, 3000), event("copy", 3000, 500, cat="gpu_memcpy"), event(long, 4000, 3000),
        event("launch", 0, 9000, cat="cuda_runtime"), event("other card", 0, 9000, device=1), {"name": "process_name"},
    ]  # fmt: skip
    assert busy(events, 2) == {"busy_ms": 3.25, "kernels_ms": {long[:NAME_LENGTH]: 3.0, "copy": 0.25}}


def test_traces_are_read_once(tmp_path: Path) -> None:
    (tmp_path / "rank0.pt.trace.json").write_text(json.dumps({"traceEvents": [event("a", 0, 1000)]}))
    below = tmp_path / "below"
    below.mkdir()
    packed = gzip.compress(json.dumps({"traceEvents": [event("b", 1000, 3000)]}).encode())
    (below / "rank1.trace.json.gz").write_bytes(packed)
    (tmp_path / "table.txt").write_text("not a trace")
    assert sorted(each["name"] for each in events_in(tmp_path)) == ["a", "b"]
    assert traced(tmp_path, 4) == {"busy_ms": 1.0, "kernels_ms": {"b": 0.75, "a": 0.25}}
    with pytest.raises(RuntimeError, match="wrote no trace of whole steps: leave out --busy"):
        traced(tmp_path, 4)
