"""What tpot_answers.py keeps of back ends' answers as they come, with processes that stand for engines."""

import json
from collections.abc import Sequence
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engines import tpot
from benchmarks.engines.adapters import ENGINES
from benchmarks.engines.tpot_answers import Answers, Results, outcome, run_backends
from benchmarks.workloads.decode_batches import Workload
from benchmarks.workloads.model_shapes import write_config

from . import fake_engines

BOTH = (Workload(2, ((1, 32),)), Workload(1, ((1, 16),)))
NAMES = tuple(map(str, BOTH))


class Kept(list[dict[str, Any]]):
    """What a result says, each time that it is written."""

    def __call__(self, results: Results, lost: Sequence[str]) -> None:
        self.append(outcome(results, BOTH, True, lost))
        for row in self[-1]["rows"]:
            assert list(row) == ["workload", *results]
        rows = [row["workload"] for row in self[-1]["rows"]]
        assert rows and rows + self[-1].get("unfinished", []) == list(NAMES)

    def brief(self) -> list[tuple[int, str, list[str]]]:
        """The number of rows, back ends, in capitals if they have finished, and the lost."""
        return [
            (
                len(said["rows"]),
                " ".join(name.upper() if "counters" in facts else name for name, facts in said["runs"].items()),
                said.get("lost", []),
            )
            for said in self
        ]


def test_back_ends_that_take_turns_start_at_once() -> None:
    barrier = get_context("spawn").Barrier(2)
    kept = Kept()
    runs = {name: (barrier, NAMES) for name in ("ours", "theirs")}
    results = run_backends(fake_engines.meet, runs, 2, True, kept)
    assert list(results) == ["ours", "theirs"] and results["theirs"].keys() == {*NAMES, ""}
    figures = {"tpot_ms": 10.0, "tpot_ms_each": [10.0]}
    compared = {**figures, "equal_tokens": 1.0, "parted_in_steps": [], "speedup": 1.0}
    assert kept[-1] == {
        "turns": True, "runs": {"ours": fake_engines.FACTS, "theirs": fake_engines.FACTS},
        "rows": [{"workload": name, "ours": figures, "theirs": compared} for name in NAMES],
    }  # fmt: skip


def test_others_run_one_after_the_other(tmp_path: Path) -> None:
    kept = Kept()
    runs = {name: (tmp_path / "marker", NAMES) for name in ("ours", "theirs")}
    run_backends(fake_engines.alone, runs, 2, False, kept)
    assert kept.brief() == [
        (1, "ours", []), (2, "ours", []), (2, "OURS", []),
        (1, "OURS theirs", []), (2, "OURS theirs", []), (2, "OURS THEIRS", []),
    ]  # fmt: skip


def test_a_back_end_that_is_lost_ends_those_after_it(tmp_path: Path) -> None:
    kept, marker = Kept(), tmp_path / "marker"
    marker.touch()  # the first dies of it
    runs: dict[str, tuple[Any, ...]] = {"ours": (marker, NAMES), "theirs": (tmp_path / "other", NAMES)}
    with pytest.raises(RuntimeError, match=r"^ours: the process ended after 0 of 2 workloads$"):
        run_backends(fake_engines.alone, runs, 2, False, kept)
    assert kept == []


@pytest.mark.parametrize("lost", ["first", "second"])
def test_beside_others_their_figures_are_kept(lost: str) -> None:
    kept, names = Kept(), ["first", "second", "third"]
    runs: dict[str, tuple[Any, ...]] = {name: (name == lost, NAMES) for name in names}
    with pytest.raises(RuntimeError, match=f"^{lost}: the process ended after 2 of 2 workloads$"):
        run_backends(fake_engines.die_or_answer, runs, 2, True, kept)
    assert kept.brief()[-1] == (2, " ".join(name.upper() for name in names if name != lost), [lost])


def tell(answers: Answers, events: str) -> None:
    """events: back ends, each with what it answers: its card, a workload by number, facts at its end; or it is lost."""
    said = {"card": ("card", {"card": "cpu"}), "end": ("", fake_engines.FACTS), "lost": None}
    said |= {str(number): (name, fake_engines.FIGURES) for number, name in enumerate(NAMES)}
    for event in events.split():
        name, what = event.split(":")
        answers.receive(name, said[what])


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ("a:0 b:0 b:1 a:1 b:end a:end", [(1, "a b", []), (2, "a b", []), (2, "a B", []), (2, "A B", [])]),
        ("b:0 b:1 b:end", []),  # what it is compared with is missing
        ("a:0 a:1 a:end b:0", [(2, "A", []), (1, "A b", [])]),
        ("a:0 b:0 b:lost a:1", [(1, "a b", []), (2, "a", ["b"])]),
        ("b:0 b:1 a:lost b:end", [(2, "B", ["a"])]),
        ("b:0 b:1 b:end a:lost", [(2, "B", ["a"])]),
        ("a:0 b:0 a:1 a:lost b:lost", [(1, "a b", [])]),  # what both had stays
    ],
)
def test_what_all_have_answered_is_kept(events: str, expected: list[tuple[int, str, list[str]]]) -> None:
    kept = Kept()
    answers = Answers(2, kept, {"a": {}, "b": {}})
    tell(answers, f"a:card b:card {events}")
    assert kept.brief() == expected


@pytest.mark.parametrize("engine", ENGINES)
def test_a_result_is_written_before_a_back_end_has_finished(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(write_config("qwen2.5-7b", tmp_path))
    monkeypatch.setattr("benchmarks.lib.report.RESULTS", tmp_path / "results")
    arguments = tpot.read_arguments(["--engine", engine, "--model", model, "--backends", "a", "b"])
    plan = tpot.plan_of(arguments)._replace(workloads=BOTH)
    answers = Answers(2, partial(tpot.save, arguments, plan, "qwen"), {"a": {}, "b": {}})
    tell(answers, "a:card b:card a:0 b:0")
    path = tmp_path / "results" / f"{engine}-tpot-cpu.json"
    partly = json.loads(path.read_text())
    assert partly["unfinished"] == [NAMES[1]] and partly["runs"] == {"a": {"card": "cpu"}, "b": {"card": "cpu"}}
    tell(answers, "a:1 b:1 a:end b:end")
    whole = json.loads(path.read_text())
    assert list(whole) == [key for key in partly if key != "unfinished"]
    assert whole["runs"] == {"a": fake_engines.FACTS, "b": fake_engines.FACTS} and len(whole["rows"]) == 2


def test_a_result_says_who_was_lost_and_whether_they_took_turns() -> None:
    workload = Workload(1, ((1, 32),))
    results: Results = {"CUSTOM": {str(workload): fake_engines.FIGURES, "": {"card": "cpu"}}}
    assert outcome(results, [workload], True, ["FLASH_ATTN"]) == {
        "turns": True, "lost": ["FLASH_ATTN"], "runs": {"CUSTOM": {"card": "cpu"}},
        "rows": [{"workload": "1 x (32)", "CUSTOM": {"tpot_ms": 10.0, "tpot_ms_each": [10.0]}}],
    }  # fmt: skip
    assert "lost" not in outcome(results, [workload], False, [])
