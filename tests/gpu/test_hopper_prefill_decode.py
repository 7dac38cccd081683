"""Which plans the kernel for chunks and decodes at once gets, and its arguments; on a card:
tests/on_gpu/test_hopper_prefill_decode.py."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from trunkattn import AttentionConfig
from trunkattn.gpu.arrays import GpuPlan, Lists
from trunkattn.gpu.hopper import decode as hopper_decode
from trunkattn.gpu.hopper import prefill as hopper_prefill
from trunkattn.gpu.hopper import prefill_decode
from trunkattn.gpu.hopper.common import PRODUCER_REGISTERS
from trunkattn.gpu.hopper.prefill_arguments import (
    PrefillDecodeArguments,
    PrefillDecodeConstants,
    prefill_decode_arguments,
)
from trunkattn.gpu.hopper.spec import BOTH, BOTH_KEYS, BOTH_ROWS, refuses_both
from trunkattn.gpu.hopper.spec import tiles_of as hopper_tiles
from trunkattn.gpu.kernel import Work
from trunkattn.gpu.launch import execute
from trunkattn.gpu.launch_order import Launch, LaunchOptions
from trunkattn.gpu.layer import Geometry, Pdl
from trunkattn.gpu.portable import decode, merge, prefill
from trunkattn.gpu.portable.spec import tiles_of as decode_tiles
from trunkattn.gpu.tiles import GpuTile
from trunkattn.planner.work_list import UNLIMITED, ChunkList, TileList

from .hopper_cases import CARD, GEOMETRY, Recorder, make_tensors, prefill_tile
from .kernel_cases import plan_with, refilled

pytestmark = pytest.mark.slow

TILES = decode_tiles(2, 128, 4)


def make_lists() -> tuple[TileList, ChunkList]:
    """Decodes of one segment each, three low items and a tall one whose query is in two pieces, and a chunk of 20 query
    tokens."""
    ints = np.arange(4, dtype=np.int32)
    segment = np.array([16, 4 << 8 | 16 << 16, 0], np.int32)
    tiles = TileList(
        items=np.stack([ints, ints, ints + 1, ints, ints + 1], 1), segments=np.tile(segment, (4, 1)), queries=ints,
        partial_slots=np.array([-1, -1, 0, 1], np.int32), merge_slots=np.zeros((4, 2), np.int32),
        counts=np.array([0, 3, 4, 4, 4], np.int32), merge_queries=ints[2:3], merge_ranges=np.array([[0, 2]], np.int32),
        num_slots=2, merges_taller=False,
    )  # fmt: skip
    queries = np.arange(4, 24, dtype=np.int32)
    listed = ChunkList(
        np.array([[0, 0, 36, 0, 20]], np.int32), queries, np.full(20, -1, np.int32), np.arange(3)[None].astype("i4")
    )
    return tiles, listed


def make_mixed(geometry: Geometry, tiles: tuple[GpuTile, ...] = TILES) -> GpuPlan:
    """Two of the low items overlap the chunk."""
    positions = np.append(np.full(4, 15, np.int32), np.arange(16, 36, dtype=np.int32))
    decodes, chunks = make_lists()
    lists = Lists(decodes, positions, chunks, num_overlapped=2)
    return plan_with(lists, geometry, tiles, CARD, prefill_tile(geometry.head_dim))


@pytest.mark.parametrize("window, masked", [(UNLIMITED, False), (UNLIMITED, True), (40, True)])
def test_it_is_launched_with_every_argument(monkeypatch: pytest.MonkeyPatch, window: int, masked: bool) -> None:
    kernel = Recorder(PrefillDecodeArguments._fields)
    monkeypatch.setattr(prefill_decode, "hopper_prefill_decode_kernel", kernel)
    plan, tensors = make_mixed(replace(GEOMETRY, window=window, masked=masked)), make_tensors()
    launch, *_ = plan.launches
    assert launch == Launch(BOTH, Work.BOTH, CARD.num_sms)
    prefill_decode.bind(plan, tensors, launch, LaunchOptions(Pdl(True, False), return_lse=False))(tensors)
    ((num_programs, args, options),) = kernel.calls
    assert num_programs == CARD.num_sms and set(options) == {"num_warps", "maxnreg"}
    given = PrefillDecodeArguments(*args)
    work, chunks, tiles = given.work, given.work.chunks, given.work.tiles
    assert work.num_chunk_items.tolist()[0] == 1 and work.item_range.tolist()[:3] == [0, 2, 1]
    assert chunks.items.tolist()[:5] == [0, 0, 36, 0, 20]
    assert chunks.queries.tolist() == list(range(4, 24)) and set(chunks.partial_slots.tolist()) == {-1}
    assert chunks.block_table.tolist()[:3] == [0, 1, 2] and chunks.table_stride == 16
    assert tiles.items.tolist()[5:10] == [1, 1, 2, 1, 2] and tiles.segments.tolist()[:3] == [16, 4 << 8 | 16 << 16, 0]
    assert tiles.queries.tolist() == [0, 1, 2, 3] and tiles.partial_slots.tolist() == [-1, -1, 0, 1]
    assert tiles.positions.tolist()[3:6] == [15, 16, 17]
    assert (given.layer.q_token_stride, given.layer.out_head_stride) == (8 * 128, 128)
    constants = PrefillDecodeConstants(
        *(8, 2, 4, 128, 16, 16), masked, window != UNLIMITED, 0.0, False, return_lse=False, pdl_trigger=True
    )
    assert constants == given.C and work.window == window
    for desc, cache in ((given.k_desc, tensors.k_cache), (given.v_desc, tensors.v_cache)):
        assert desc.base is cache and desc.block_shape == [1, 16, 1, 64]


def test_the_arguments_are_the_parameters_of_the_kernel() -> None:
    names = prefill_decode.hopper_prefill_decode_kernel.arg_names
    assert list(PrefillDecodeArguments._fields) == names


@pytest.mark.parametrize("num_overlapped, most", [(3, 3), (2, 2), (1, 1), (0, 0)])
def test_it_is_told_the_most_queries_of_an_overlapped_item(num_overlapped: int, most: int) -> None:
    """By which it takes tiles of 8 rows or of 16: too few would lose queries."""
    tiles, chunks = make_lists()
    ends = np.array([1, 3, 6, 7], np.int32)  # items of 1, 2, 3 and 1 queries
    tiles.items[:, 3], tiles.items[:, 4] = ends - [1, 2, 3, 1], ends
    positions = np.arange(24, dtype=np.int32)
    lists = Lists(tiles, positions, chunks, num_overlapped)
    plan = plan_with(lists, GEOMETRY, TILES, CARD, prefill_tile(128))
    assert plan.arrays["overlapped"].tolist()[:3] == [0, num_overlapped, most]
    refilled(plan, Lists(tiles, positions, None, num_overlapped=1))
    assert plan.arrays["overlapped"].tolist()[:3] == [0, 1, 1]


def test_registers_suffice_for_its_warps() -> None:
    """Two groups of 4 warps for chunks, one for decodes; three producers are given out as the 4 warps that they start.
    Registers go to a group by 8 a thread."""
    chunks, decodes = prefill_decode.CHUNK_REGISTERS.value, prefill_decode.DECODE_REGISTERS.value
    groups = (chunks, chunks, decodes, PRODUCER_REGISTERS.value)
    assert all(registers % 8 == 0 for registers in groups)
    assert sum(groups) * 128 <= prefill_decode.REGISTERS * 512 <= 65536


@pytest.mark.parametrize(
    "change",
    [{"head_dim": 64}, {"head_dim": 256}, {"head_dim_v": 64}, {"page_size": 8}, {"num_qo_heads": 6}, {"policy": "pat"},
     {"dtype": torch.float32}, {"kv_dtype": torch.float8_e4m3fn}, {"batch_invariant": True}, {"execution": "serial"}],
)  # fmt: skip
def test_attentions_that_it_does_not_compute(change: dict[str, Any]) -> None:
    config = AttentionConfig(8, 2, 128, 16, torch.bfloat16)
    assert not refuses_both(config, CARD)
    assert refuses_both(replace(config, **change), CARD)


@pytest.mark.parametrize("options", [{"soft_cap": 30.0}, {"sinks": True}, {"soft_cap": 5.0, "sinks": True}])
def test_soft_caps_and_sinks_reach_the_kernel(options: dict[str, Any]) -> None:
    plan, tensors = make_mixed(replace(GEOMETRY, **options)), make_tensors()
    found = prefill_decode_arguments(tensors, plan, pdl_trigger=True, return_lse=False).C
    assert (found.soft_cap, found.sinks) == (options.get("soft_cap", 0.0), options.get("sinks", False))


@pytest.mark.parametrize("group", [1, 2, 4, 8, 16])
def test_the_low_tile_of_every_group_that_it_takes_is_its_own(group: int) -> None:
    for low in (decode_tiles(2, 128, group)[0], hopper_tiles(2, 128, 16)[0]):
        assert (low.block_m, low.block_n, low.subtiles) == (BOTH_ROWS, BOTH_KEYS, 1)


@pytest.mark.parametrize("readable", [True, False])
def test_other_items_follow_it_or_the_launches_in_its_place(monkeypatch: pytest.MonkeyPatch, readable: bool) -> None:
    """TMA cannot read every cache: then chunks, and the items that overlap them, are launches of their own."""
    places = {
        "hopper_prefill_decode_kernel": prefill_decode,
        "prefill_kernel": prefill,
        "decode_kernel": decode,
        "merge_kernel": merge,
    }
    kernels = {name: Recorder() for name in places}
    for name, module in places.items():
        monkeypatch.setattr(module, name, kernels[name])
    plan, tensors = make_mixed(GEOMETRY), make_tensors()
    if not readable:
        tensors = replace(tensors, v_cache=torch.nn.functional.pad(tensors.v_cache, (1, 0))[..., 1:])
    execute(plan, tensors, False)
    assert [len(kernel.calls) for kernel in kernels.values()] == ([1, 0, 2, 1] if readable else [0, 1, 3, 1])
    decodes = kernels["decode_kernel"].calls
    if not readable:
        num_ctas, _, options = decodes.pop(0)
        assert num_ctas == CARD.num_sms * TILES[0].ctas_per_sm > CARD.num_sms
        assert options["work"].counts.tolist()[:2] == [0, 2]
        assert options["BUCKETS"].first == 0 and options["PDL"].wait
    for _, _, options in decodes:
        assert options["work"].counts.tolist()[:5] == [2, 3, 4, 4, 4] and options["PDL"].wait
    assert [options["BUCKETS"].first for _, _, options in decodes] == [1, 0]


def test_a_device_planned_step_overlaps_nothing() -> None:
    plan = make_mixed(GEOMETRY)
    plan.forget_chunks()
    assert plan.arrays["overlapped"].tolist()[:3] == [0, 0, 0] and plan.arrays["chunk_count"].tolist()[0] == 0


def test_hopper_tiles_may_follow_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hopper decode kernel computes what follows the items that overlap chunks."""
    places = {
        "hopper_prefill_decode_kernel": prefill_decode,
        "hopper_prefill_kernel": hopper_prefill,
        "decode_kernel": decode,
        "hopper_decode_kernel": hopper_decode,
    }
    kernels = {name: Recorder() for name in places}
    for name, module in places.items():
        monkeypatch.setattr(module, name, kernels[name])
    monkeypatch.setattr(merge, "merge_kernel", Recorder())
    tiles, tensors = hopper_tiles(2, 128, 16)[::2], make_tensors()
    execute(make_mixed(GEOMETRY, tiles), tensors, False)
    assert [len(kernel.calls) for kernel in kernels.values()] == [1, 0, 0, 2]
    launched = [options for _, _, options in kernels["hopper_decode_kernel"].calls]
    assert [(options["first_bucket"], options["last_bucket"]) for options in launched] == [(1, 1), (0, 0)]
    assert all(options["work"].counts.tolist()[:3] == [2, 3, 4] for options in launched)
