"""Arrays of plans: what a reserved plan has room for, in which order its launches are, and where arrays begin."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from trunkattn.gpu.arrays import Arrays, Lists
from trunkattn.gpu.kernel import Work
from trunkattn.gpu.portable.spec import prefill_tile
from trunkattn.gpu.portable.spec import tiles_of as decode_tiles
from trunkattn.planner.work_list import ChunkLimits, ChunkList, TileLimits, TileList

from .hopper_cases import CARD, GEOMETRY
from .kernel_cases import CPU, kernels_with, refilled, reserved

TILES = decode_tiles(2, 128, 4)
LIMITS = TileLimits(items=3, segments=5, queries=7, merged=6, slots=9, query_tokens=11)
ROOM = ChunkLimits(items=3, queries=13, rows=2, columns=5)


def numbers(*shape: int) -> np.ndarray:
    return np.arange(1, 1 + np.prod(shape), dtype=np.int32).reshape(shape)


def largest() -> Lists:
    """Lists that fill their limits."""
    tiles = TileList(
        items=numbers(3, 5), segments=numbers(5, 3), queries=numbers(7), partial_slots=numbers(7) + 10,
        merge_slots=numbers(7, 2), counts=np.array([0, 1, 2, 3, 3], np.int32), merge_queries=numbers(6),
        merge_ranges=numbers(6, 2), num_slots=9, merges_taller=False,
    )  # fmt: skip
    chunks = ChunkList(numbers(3, 5), numbers(13), numbers(13) + 20, numbers(2, 5))
    return Lists(tiles, numbers(11), chunks)


def test_a_reserved_plan_holds_the_largest_lists_within_its_limits() -> None:
    lists = largest()
    plan = refilled(reserved(LIMITS, GEOMETRY, TILES, CARD, (ROOM, prefill_tile(2, 128), False)), lists)
    assert not LIMITS.broken_by(lists.tiles) and plan.chunks and lists.chunks
    for name in ("items", "segments", "queries", "partial_slots", "merge_slots", "merge_queries", "merge_ranges"):
        array = getattr(lists.tiles, name)
        assert plan.arrays[name].tolist()[: array.size] == array.ravel().tolist(), name
    assert plan.arrays["positions"].tolist()[:11] == lists.positions.tolist()
    assert plan.arrays["counts"].tolist()[:6] == [0, 1, 2, 3, 3, 6], "and the number of merged queries"
    assert plan.arrays["chunk_count"].tolist()[0] == 3
    for name in ("items", "queries", "partial_slots", "block_table"):
        array = getattr(lists.chunks, name)
        assert plan.chunks.arrays[name].tolist()[: array.size] == array.ravel().tolist(), name
    assert plan.chunks.table_stride == ROOM.columns


def test_chunks_are_launched_first() -> None:
    """The merge reads their partial results, too."""
    plan = reserved(LIMITS, GEOMETRY, TILES, CARD, (ROOM, prefill_tile(2, 128), False))
    own = Arrays(kernels_with(TILES, GEOMETRY, prefill_tile(2, 128)), CARD, CPU).place(largest(), GEOMETRY)
    for launches in (plan.launches, own.launches):
        first, *others = [launch.work for launch in launches]
        assert (first, others[-1]) == (Work.PREFILL, Work.MERGE) and Work.PREFILL not in others


def test_arrays_begin_at_whole_16_bytes() -> None:
    """By which Triton chooses the variant that it compiles, and which copies of 16 bytes need."""
    plan = reserved(LIMITS, GEOMETRY, TILES, CARD, (ROOM, prefill_tile(2, 128), False))
    own = Arrays(kernels_with(TILES, GEOMETRY, prefill_tile(2, 128)), CARD, CPU).place(largest(), GEOMETRY)
    for packed in (plan, plan.chunks, own, own.chunks):
        assert packed is not None
        assert all(array.data_ptr() % 16 == 0 for array in packed.arrays.values())


@pytest.mark.parametrize(
    ("merges_taller", "streams", "num_overlapped", "together"),
    [(True, False, 0, True), (False, False, 0, False), (True, True, 0, False), (True, False, 1, False)],
)
def test_items_that_merge_share_a_launch_only_if_what_they_merge_has_ended(
    merges_taller: bool, streams: bool, num_overlapped: int, together: bool
) -> None:
    arrays = Arrays(kernels_with(TILES, GEOMETRY), CARD, CPU, streams)
    tiles = replace(largest().tiles, merges_taller=merges_taller, counts=np.array([0, 2, 2, 3, 3], np.int32))
    plan = arrays.place(Lists(tiles, numbers(11), None, num_overlapped), GEOMETRY)
    assert ((0, 2) in [launch.buckets for launch in plan.launches]) is together


def test_a_plan_that_was_reserved_in_inference_mode_is_filled_outside_of_it() -> None:
    with torch.inference_mode():
        plan = reserved(LIMITS, GEOMETRY, TILES, CARD, (ROOM, prefill_tile(2, 128), False))
    assert plan.chunks and plan.summary is not None
    assert not any(tensor.is_inference() for tensor in (plan.flat, plan.chunks.flat, plan.summary))
    plan.forget_tiles()
    plan.forget_chunks()
