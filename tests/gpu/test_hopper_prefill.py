"""Which prompt chunks the kernel for Hopper gets, and its arguments; on a card: tests/on_gpu/test_prefill.py."""

import math
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from trunkattn import AttentionConfig
from trunkattn.gpu.arrays import Arrays, GpuPlan, Lists
from trunkattn.gpu.hopper import prefill as hopper_prefill
from trunkattn.gpu.hopper.common import PRODUCER_REGISTERS
from trunkattn.gpu.hopper.prefill_arguments import PrefillArguments, PrefillConstants
from trunkattn.gpu.launch import execute
from trunkattn.gpu.layer import Geometry
from trunkattn.gpu.portable import prefill
from trunkattn.gpu.portable.spec import tiles_of as decode_tiles
from trunkattn.gpu.tiles import prefill_device
from trunkattn.planner.from_config import make_planner
from trunkattn.planner.work_list import ITEM_COLUMNS, UNLIMITED, ChunkLimits, ChunkList, TileLimits, TileList

from .hopper_cases import CARD, GEOMETRY, OnCard, Recorder, make_tensors, prefill_tile
from .kernel_cases import CPU, kernels_with, plan_with, reserved

pytestmark = pytest.mark.slow


def make_plan(geometry: Geometry, hopper: bool = True) -> GpuPlan:
    """Two items of 32 query tokens behind 32 others, and nothing else."""
    ints = {name: np.zeros(0, np.int32) for name in ("queries", "partial_slots", "merge_queries")}
    pairs = {"merge_slots": np.zeros((0, 2), np.int32), "merge_ranges": np.zeros((0, 2), np.int32)}
    empty = TileList(
        items=np.zeros((0, 5), np.int32), segments=np.zeros((0, 3), np.int32), counts=np.zeros(5, np.int32),
        num_slots=0, merges_taller=False, **ints, **pairs,
    )  # fmt: skip
    items = np.array([[0, 0, 96, 32, 64], [0, 0, 64, 0, 32]], np.int32)
    listed = ChunkList(items, np.arange(64, dtype=np.int32), np.full(64, -1, np.int32), np.arange(6)[None].astype("i4"))
    positions = np.arange(32, 96, dtype=np.int32)
    tiles = decode_tiles(2, geometry.head_dim, 4)
    return plan_with(Lists(empty, positions, listed), geometry, tiles, CARD, prefill_tile(geometry.head_dim, hopper))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> tuple[Recorder, Recorder]:
    """The one for Hopper and the one for any card."""
    hopper, portable = Recorder(PrefillArguments._fields), Recorder()
    monkeypatch.setattr(hopper_prefill, "hopper_prefill_kernel", hopper)
    monkeypatch.setattr(prefill, "prefill_kernel", portable)
    return hopper, portable


@pytest.mark.parametrize("window", [UNLIMITED, 40])
def test_it_is_launched_with_every_argument(kernels: tuple[Recorder, Recorder], window: int) -> None:
    geometry, tensors = replace(GEOMETRY, window=window), make_tensors()
    plan = make_plan(geometry)
    execute(plan, tensors, True)
    hopper, portable = kernels
    ((num_programs, args, options),) = hopper.calls
    assert not portable.calls
    assert num_programs == 2 * 2
    given = PrefillArguments(*args)
    assert set(options) == {"num_warps", "maxnreg"}
    assert given.work.num_items.tolist()[0] == 2
    assert given.work.chunks.items.tolist()[:5] == [0, 0, 96, 32, 64]
    assert given.work.positions.tolist()[:2] == [32, 33]
    assert given.work.chunks.table_stride == 16
    assert (given.layer.q_token_stride, given.layer.q_head_stride) == (8 * 128, 128)
    assert (given.C.windowed, given.work.window) == (window != UNLIMITED, window)
    assert given.k_desc.block_shape == [1, 16, 1, 64]
    constants = PrefillConstants(8, 2, 4, 128, 16, window != UNLIMITED, 1, 0.0, False, True, False)
    assert constants == given.C


def test_the_arguments_are_the_parameters_of_the_kernel() -> None:
    assert list(PrefillArguments._fields) == hopper_prefill.hopper_prefill_kernel.arg_names


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("options", [{}, {"soft_cap": 30.0}, {"sinks": True}, {"num_qo_heads": 14}])
def test_head_dims_groups_and_options_reach_the_kernel(
    kernels: tuple[Recorder, Recorder], head_dim: int, options: dict[str, Any]
) -> None:
    shape = replace(GEOMETRY, head_dim=head_dim, head_dim_v=head_dim, **options)
    execute(make_plan(shape), make_tensors(), False)
    hopper, portable = kernels
    assert not portable.calls
    ((_, args, given_options),) = hopper.calls
    found = PrefillArguments(*args).C
    assert (found.soft_cap, found.sinks) == (options.get("soft_cap", 0.0), options.get("sinks", False))
    assert (found.num_qo_heads, found.group_size) == (shape.num_qo_heads, shape.num_qo_heads // 2)
    assert found.head_dim == head_dim
    assert given_options == {"num_warps": 4, "maxnreg": hopper_prefill.REGISTERS[1]}


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_chunks_in_a_tile_of_the_portable_kernel_go_to_it(kernels: tuple[Recorder, Recorder], head_dim: int) -> None:
    """Of an attention that the Hopper kernel computes, on a card on which it was not timed."""
    shape = replace(GEOMETRY, head_dim=head_dim, head_dim_v=head_dim)
    execute(make_plan(shape, hopper=False), make_tensors(), False)
    assert [len(kernel.calls) for kernel in kernels] == [0, 1]


@pytest.mark.parametrize("head_dim, window, two", [(64, 128, True), (64, 129, False), (128, 100, False)])
def test_two_ctas_share_an_sm_under_a_short_window(
    kernels: tuple[Recorder, Recorder], head_dim: int, window: int, two: bool
) -> None:
    shape = replace(GEOMETRY, head_dim=head_dim, head_dim_v=head_dim, window=window)
    execute(make_plan(shape), make_tensors(), False)
    ((_, args, given_options),) = kernels[0].calls
    assert PrefillArguments(*args).C.ctas_per_sm == 1 + two
    assert given_options["maxnreg"] == hopper_prefill.REGISTERS[1 + two]


@pytest.mark.parametrize("ctas", [1, 2])
def test_registers_suffice_for_its_warps(ctas: int) -> None:
    """Two groups of 4 warps that compute; two producers are given out as the 4 warps that they start."""
    alone, shared = hopper_prefill._CONSUMER_REGISTERS, hopper_prefill._SHARED_SM_CONSUMER_REGISTERS
    consumers, launched = (alone if ctas == 1 else shared).value, hopper_prefill.REGISTERS[ctas]
    assert consumers % 8 == 0
    assert (2 * consumers + PRODUCER_REGISTERS.value) * 128 <= launched * 384 <= 65536 // ctas


@pytest.mark.parametrize("num_items, num_ctas", [(2, 4), (500, 132)])
@pytest.mark.parametrize("hopper", [True, False])
def test_programs_of_the_hopper_kernel_stay_and_take_item_after_item(
    hopper: bool, num_items: int, num_ctas: int
) -> None:
    items, tile = np.zeros((num_items, ITEM_COLUMNS), np.int32), prefill_tile(64, hopper)
    listed = ChunkList(items, *(np.zeros(size, np.int32) for size in (1, 1)), np.zeros((1, 1), np.int32))

    def launched(window: int, overlapped: bool = False) -> int:
        geometry = replace(GEOMETRY, head_dim=64, head_dim_v=64, window=window)
        arrays = Arrays(kernels_with(decode_tiles(2, 64, 4), geometry, tile, overlapped), CARD, CPU)
        return arrays._chunks_of_size(listed, geometry, overlapped).num_ctas

    assert launched(UNLIMITED) == (num_ctas if hopper else 2 * num_items)
    assert launched(128) == (min(2 * num_items, 264) if hopper else 2 * num_items)
    assert launched(UNLIMITED, overlapped=True) == 132, "decodes overlap"


@pytest.mark.parametrize("window, num_ctas", [(128, 264), (129, 132), (UNLIMITED, 132)])
def test_a_plan_of_fixed_size_has_two_programs_an_sm_under_a_short_window(window: int, num_ctas: int) -> None:
    shape = replace(GEOMETRY, head_dim=64, head_dim_v=64, window=window)
    tiles, room = decode_tiles(2, 64, 4), ChunkLimits(items=8, queries=64, rows=2, columns=16)
    limits = TileLimits(*(64 for _ in fields(TileLimits)))
    found = reserved(limits, shape, tiles, CARD, (room, prefill_tile(64), False)).chunks
    assert found is not None
    assert (found.num_ctas, found.tile.ctas_per_sm) == (num_ctas, num_ctas // 132)


def test_partials_weigh_six_times_as_much_as_on_the_portable_kernel() -> None:
    config = AttentionConfig(16, 4, 64, page_size=16, dtype=torch.bfloat16)
    hopper, portable = (
        make_planner(config, prefill_device(132, prefill_tile(64, hopper))).spec.rule for hopper in (True, False)
    )
    assert (hopper.partial_bytes, hopper.merge_bytes) == (6 * portable.partial_bytes, 0)
    assert (hopper.item_bytes, portable.merge_bytes) == (2 * portable.item_bytes, 2 * portable.item_bytes)


def test_a_cache_that_tma_cannot_read_goes_to_the_other(kernels: tuple[Recorder, Recorder]) -> None:
    tensors = make_tensors()
    odd = torch.zeros(math.prod(tensors.k_cache.shape) + 1, dtype=torch.bfloat16)[1:].view(tensors.k_cache.shape)
    plan = make_plan(GEOMETRY)
    execute(plan, replace(tensors, v_cache=odd), False)
    assert [len(kernel.calls) for kernel in kernels] == [0, 1]
    thin = torch.zeros(8, 16, 2, 256, dtype=torch.bfloat16)[..., ::2]
    execute(plan, replace(tensors, v_cache=thin), False)
    assert [len(kernel.calls) for kernel in kernels] == [0, 2]
    assert list(plan.unreadable) == [
        "Hopper prefill: v_cache begins at an address that is no multiple of 16 bytes",
        "Hopper prefill: v_cache has strides (8192, 512, 256, 2): expected multiples of 16 bytes, and 1",
    ]


def test_tokens_far_apart_go_to_the_other(kernels: tuple[Recorder, Recorder]) -> None:
    for name in ("q", "out"):
        for stride, added in ((2**32 - 128, [1, 0]), (2**32, [0, 1])):
            before = [len(kernel.calls) for kernel in kernels]
            far = torch.empty_strided((64, 8, 128), (stride, 128, 1), dtype=torch.bfloat16, device="meta")
            execute(make_plan(GEOMETRY), replace(make_tensors(), **{name: far.as_subclass(OnCard)}), False)
            assert [len(kernel.calls) - count for kernel, count in zip(kernels, before, strict=True)] == added, name
