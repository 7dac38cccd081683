"""What counts as harm in the benchmark of hostile clients, and that the committed results have none."""

from typing import Any

import pytest

from benchmarks.engines.serve_hostile import LOAD, NOTHING, bad_kinds
from benchmarks.lib.report import read_result

FIRST = {
    **{"kind": NOTHING, "witness_answers": 1, "held_pages": 0.0, "answers": "-"},
    **{"pause_s": 0.6, "health_s": 0.01, "memory_mb": 1000.0},
}
FINE = FIRST | {"kind": "brackets", "pause_s": 0.4, "memory_mb": 3000.0, "answers": "400"}
HARM: list[dict[str, Any]] = [
    {"witness_answers": 2},
    {"held_pages": 1.0},
    {"pause_s": 0.51},
    {"health_s": 0.21},
    {"memory_mb": 3049.0},
    {"answers": "400,503"},
    {"answers": "good: differs 1"},
    {"answers": "500 held, 1 still open"},
]


@pytest.mark.parametrize("change", HARM, ids=str)
def test_harm_is_seen(change: dict[str, Any]) -> None:
    assert bad_kinds([FIRST, FINE]) == []
    assert bad_kinds([FIRST, FINE, FINE | {"kind": LOAD} | change]) == [LOAD]


@pytest.mark.parametrize("name", ["serve-hostile-cpu", "serve-hostile-h200"])
def test_nobody_was_harmed_in_the_committed_results(name: str) -> None:
    rows = read_result(name)["rows"]
    assert rows[0]["kind"] == NOTHING and LOAD in [row["kind"] for row in rows]
    assert bad_kinds(rows) == []
