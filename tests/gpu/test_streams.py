"""Launches on separate streams (PAT §6): what runs at the same time, what waits, and for what. Streams and kernels only
note what they are told; on a card: tests/on_gpu/test_capacity.py."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from trunkattn.gpu.arrays import Arrays, GpuPlan
from trunkattn.gpu.launch import execute
from trunkattn.gpu.portable import decode, merge
from trunkattn.gpu.portable.spec import tiles_of as decode_tiles

from .hopper_cases import CARD, GEOMETRY, LIMITS, make_list, make_tensors
from .kernel_cases import CPU, kernels_with, plan_with

pytestmark = pytest.mark.slow

TILES = decode_tiles(2, 128, 4)


@dataclass
class Stream:
    """Notes for whom it waits."""

    name: str
    events: list[str]

    def wait_stream(self, other: "Stream") -> None:
        self.events.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens, in order: launches with their buckets, streams and PDL."""
    found: list[str] = []
    current, made = [Stream("main", found)], iter("abc")

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def launch(**given: Any) -> None:
                buckets, pdl = given.get("BUCKETS"), given["PDL"]
                what = "the merge" if buckets is None else f"bucket {buckets.first}"
                asks = [name for name, is_on in zip(("triggers", "waits"), pdl, strict=True) if is_on]
                found.append(" ".join([what, "on", current[-1].name, *asks]))

            return launch

    monkeypatch.setattr(torch.cuda, "Stream", lambda: Stream(next(made), found))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(decode, "decode_kernel", Kernel())
    monkeypatch.setattr(merge, "merge_kernel", Kernel())
    return found


def make_plan(streams: bool) -> GpuPlan:
    """Two low items and a tall one that merge nothing, and a low one that merges."""
    listed = replace(make_list(), counts=np.array([0, 2, 3, 4, 4], np.int32))
    return plan_with((listed, np.full(3, 15, np.int32)), GEOMETRY, TILES, CARD, streams=streams)


def test_launches_that_merge_nothing_run_side_by_side(events: list[str]) -> None:
    plan, t = make_plan(streams=True), make_tensors()
    expected = [
        "a waits for main",
        "bucket 1 on main",
        "bucket 0 on a",
        "main waits for a",
        "bucket 2 on main triggers",
        "the merge on main waits",
    ]
    for _ in range(2):
        execute(plan, t, False)
    assert events == 2 * expected


def test_a_plan_of_fixed_size_keeps_the_lowest_tile_off_what_merges() -> None:
    """A launch that may merge would wait for all others."""
    arrays = Arrays(kernels_with(TILES, GEOMETRY), CARD, CPU, streams=True)
    assert [launch.buckets for launch in arrays.reserve(LIMITS, GEOMETRY).launches] == [(1,), (0,), ()]


def test_in_order_every_launch_may_begin_while_the_one_ahead_ends(events: list[str]) -> None:
    execute(make_plan(streams=False), make_tensors(), False)
    assert events == ["bucket 1 on main triggers", "bucket 0 on main triggers waits", "the merge on main waits"]


def test_no_launch_begins_early_on_a_card_that_cannot(events: list[str]) -> None:
    plan = make_plan(streams=False)
    plan = replace(plan, card=replace(CARD, facts=CARD.facts._replace(capability=80)))
    execute(plan, make_tensors(), False)
    assert events == ["bucket 1 on main", "bucket 0 on main", "the merge on main"]
