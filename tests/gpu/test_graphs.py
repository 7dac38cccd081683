"""Graphs of work that comes again, with captures that only note what they are told."""

from functools import partial

import pytest
import torch

from trunkattn.gpu import graphs
from trunkattn.gpu.graphs import GraphCache


class Graph:
    """Notes when it is replayed."""

    def __init__(self, events: list[str], pool: str) -> None:
        self.events, self.memory = events, pool

    def pool(self) -> str:
        return self.memory

    def replay(self) -> None:
        self.events.append("replay")


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens."""
    found: list[str] = []

    def capture(work: object, stream: str, pool: str | None) -> Graph:
        found.append(f"capture on {stream} in {pool}")
        return Graph(found, pool or "a new pool")

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: "a stream")
    monkeypatch.setattr(graphs, "capture", capture)
    return found


def test_work_runs_once_as_it_is_and_is_captured_when_it_comes_again(events: list[str]) -> None:
    cache = GraphCache(torch.device("cpu"), 2)
    for key in ("first", "second", "first", "second", "first"):
        cache.run(key, partial(events.append, key))
    assert events == [
        "first",
        "second",
        "capture on a stream in None",
        "replay",
        "capture on a stream in a new pool",
        "replay",
        "replay",
    ]


def test_the_graph_used_least_recently_is_dropped(events: list[str]) -> None:
    cache = GraphCache(torch.device("cpu"), 2)
    for key in ("first", "second", "first", "third", "first", "second"):
        cache.run(key, partial(events.append, key))
    assert events == ["first", "second", "capture on a stream in None", "replay", "third", "replay", "second"]


def test_one_graph_may_be_all_that_is_kept(events: list[str]) -> None:
    cache = GraphCache(torch.device("cpu"), 1)
    for key in ("first", "second", "second", "first"):
        cache.run(key, partial(events.append, key))
    assert events == ["first", "second", "capture on a stream in None", "replay", "first"]


def test_what_fails_is_not_kept(events: list[str]) -> None:
    cache = GraphCache(torch.device("cpu"), 2)

    def fails() -> None:
        raise ValueError("refused")

    for _ in range(2):
        with pytest.raises(ValueError, match="refused"):
            cache.run("key", fails)
    assert events == []
