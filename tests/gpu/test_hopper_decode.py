"""Which row tiles the kernel for Hopper gets, and its arguments; on a card: tests/on_gpu/test_hopper_decode.py."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from triton._C.libtriton import native_specialize_impl
from triton.backends.nvidia.compiler import CUDABackend

from trunkattn import AttentionConfig
from trunkattn.gpu.arrays import GpuPlan
from trunkattn.gpu.hopper import decode as hopper_decode
from trunkattn.gpu.hopper.decode_arguments import (
    UNSPECIALIZED,
    DecodeArguments,
    DecodeConstants,
    kv_source,
    shape_of,
    tile_of,
)
from trunkattn.gpu.hopper.spec import DECODE, Source, source_of
from trunkattn.gpu.hopper.spec import TILES as HOPPER_TILES
from trunkattn.gpu.hopper.spec import decode_tiles as taken_tiles
from trunkattn.gpu.hopper.spec import tiles_of as hopper_tiles
from trunkattn.gpu.kernel import Work
from trunkattn.gpu.launch import execute
from trunkattn.gpu.launch_order import Launch, LaunchOptions
from trunkattn.gpu.layer import Geometry, Pdl
from trunkattn.gpu.portable import decode, merge
from trunkattn.gpu.portable.spec import tiles_of as decode_tiles
from trunkattn.gpu.portable.spec import without_subtiles
from trunkattn.gpu.tiles import GpuTile, tile_config
from trunkattn.planner.work_list import UNLIMITED

from .hopper_cases import CARD, GEOMETRY, LIMITS, Recorder, make_list, make_tensors
from .kernel_cases import plan_with, refilled, reserved

pytestmark = pytest.mark.slow

TILES = hopper_tiles(2, 128, 16)


def uploaded(geometry: Geometry = GEOMETRY) -> GpuPlan:
    return plan_with((make_list(), np.full(3, 15, np.int32)), geometry, TILES, CARD)


def bound(plan: GpuPlan, launch: Launch, pdl: Pdl, return_lse: bool = False) -> Any:
    return hopper_decode.bind(plan, make_tensors(), launch, LaunchOptions(pdl, return_lse))


def of(kernel: Recorder) -> list[tuple[int, DecodeArguments]]:
    """CTAs and arguments of each launch."""
    assert all(options["launch_pdl"] for _, _, options in kernel.calls)
    return [(num_programs, DecodeArguments(*args)) for num_programs, args, _ in kernel.calls]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, Recorder]:
    """The one for Hopper, the one for any card, and the one that merges."""
    found = {"hopper": Recorder(DecodeArguments._fields), "any": Recorder(), "merge": Recorder()}
    monkeypatch.setattr(hopper_decode, "hopper_decode_kernel", found["hopper"])
    monkeypatch.setattr(decode, "decode_kernel", found["any"])
    monkeypatch.setattr(merge, "merge_kernel", found["merge"])
    return found


@pytest.mark.parametrize("window, masked", [(UNLIMITED, False), (UNLIMITED, True), (40, True)])
def test_it_is_launched_with_every_argument(monkeypatch: pytest.MonkeyPatch, window: int, masked: bool) -> None:
    kernel = Recorder(DecodeArguments._fields)
    monkeypatch.setattr(hopper_decode, "hopper_decode_kernel", kernel)
    plan, tensors = uploaded(replace(GEOMETRY, window=window, masked=masked)), make_tensors()
    launch = Launch(DECODE, Work.DECODE, 300, (1, 2))  # more CTAs than run at once
    bound(plan, launch, Pdl(trigger=True, wait=False))(tensors)
    ((num_programs, args, options),) = kernel.calls
    given = DecodeArguments(*args)
    assert (num_programs, given.first_cta, given.total_ctas) == (264, 0, 264)
    assert set(options) == {"num_warps", "maxnreg", "launch_pdl"}
    assert given.work.counts.tolist()[:7] == [0, 1, 2, 4, 4, 4, 4]
    assert (given.first_bucket, given.last_bucket) == (1, 2)
    assert (given.work.window, given.C.masked) == (window, masked)
    assert (given.items_size, given.queries_size, given.segments_size) == (20, 4, 12)
    tiles, layer = given.work.tiles, given.layer
    assert tiles.items.numel() == 20 and tiles.segments.numel() == 12 and tiles.queries.tolist() == [0, 1, 2, 2]
    assert tiles.partial_slots.tolist() == [-1, -1, 0, 1] and tiles.positions.tolist()[:3] == [15, 15, 15]
    assert all(getattr(layer, name) is getattr(tensors, name) for name in layer._fields if "stride" not in name)
    of_caches = 16 * 2 * 128, 2 * 128, 128
    assert layer[-10:] == (8 * 128, 128, 8 * 128, 128, *of_caches, *of_caches)
    assert given.k_desc.base is tensors.k_cache and given.v_desc.base is tensors.v_cache
    constants = DecodeConstants(
        *(8, 2, 4, 128, 16, 16, masked, 0.0), sinks=False, return_lse=False, source=int(Source.LOADED),
        kv_bytes=2, kv_kind=0, tile=tile_of(128, Source.LOADED), producer_registers=24,
    )  # fmt: skip
    assert constants == given.C


def test_the_arguments_are_the_parameters_of_the_kernel() -> None:
    assert list(DecodeArguments._fields) == hopper_decode.hopper_decode_kernel.arg_names


def test_a_list_takes_a_launch_for_each_tile(kernels: dict[str, Recorder]) -> None:
    execute(uploaded(), make_tensors(), False)
    buckets = [(given.first_bucket, given.last_bucket, num_programs) for num_programs, given in of(kernels["hopper"])]
    assert buckets == [(2, 2, 4), (1, 1, 2), (0, 0, 2)]
    assert [len(kernels[name].calls) for name in ("any", "merge")] == [0, 1]


def fixed_size(tiles: tuple[GpuTile, ...], geometry: Geometry = GEOMETRY) -> GpuPlan:
    plan = reserved(LIMITS, geometry, tiles, CARD)
    return refilled(plan, (make_list(), np.full(3, 15, np.int32)))


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_a_plan_of_fixed_size_is_one_launch_of_all_heights_and_the_merge(
    kernels: dict[str, Recorder], head_dim: int
) -> None:
    """The launch is one grid of an SM's CTA each for every CTA that an SM holds."""
    tiles = hopper_tiles(2, head_dim, 16)
    plan = fixed_size(tiles, replace(GEOMETRY, head_dim=head_dim, head_dim_v=head_dim))
    assert [launch.buckets for launch in plan.launches] == [(0, 1, 2), ()]
    execute(plan.without_chunks(), make_tensors(), False)
    launched = of(kernels["hopper"])
    assert [num_programs for num_programs, _ in launched] == [CARD.num_sms] * tiles[0].ctas_per_sm
    assert all((given.first_bucket, given.last_bucket) == (0, 2) for _, given in launched)
    assert [len(kernels[name].calls) for name in ("any", "merge")] == [0, 1]


def test_one_kv_head_takes_one_grid(kernels: dict[str, Recorder]) -> None:
    geometry = replace(GEOMETRY, num_kv_heads=1)
    tiles = hopper_tiles(2, geometry.head_dim, 16)
    execute(fixed_size(tiles, geometry), make_tensors(), False)
    ((num_programs, given),) = of(kernels["hopper"])
    assert (num_programs, given.first_cta) == (given.total_ctas, 0)
    assert num_programs == CARD.num_sms * tiles[0].ctas_per_sm


def test_a_portable_low_tile_of_8_bits_has_a_launch_of_its_own_whose_ctas_queue(kernels: dict[str, Recorder]) -> None:
    """The planner pairs no tile of the Hopper kernel, so that the low one has nothing to merge."""
    tiles = hopper_tiles(1, 128, 16)
    execute(fixed_size(tiles), make_tensors(kv_dtype=torch.float8_e4m3fn), False)
    assert [(given.first_bucket, given.last_bucket) for _, given in of(kernels["hopper"])] == [(1, 2), (1, 2)]
    ((num_programs, _, options),) = kernels["any"].calls
    assert num_programs == CARD.num_sms * tiles[0].queued_per_sm > CARD.num_sms * tiles[0].ctas_per_sm
    assert options["BUCKETS"] == (0, -1, False, 1)


def test_a_portable_low_tile_beside_a_portable_tall_one_merges() -> None:
    tiles = decode_tiles(1, 128, 4)
    (low,) = [launch for launch in fixed_size(tiles).launches if launch.buckets[:1] == (0,)]
    assert low.buckets == (0, len(tiles)) and low.spread
    assert low.num_ctas == CARD.num_sms * tiles[0].ctas_per_sm


@pytest.mark.parametrize("head_dim, ahead", [(64, False), (128, True), (256, False)])
def test_masks_of_positions_are_ahead_where_registers_are_left(head_dim: int, ahead: bool) -> None:
    for source in Source:
        is_ahead = ahead or source is Source.GATHERED
        assert tile_of(head_dim, source, masked=True).mask_ahead is is_ahead
        assert tile_of(head_dim, source).mask_ahead


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kv_itemsize, page_size", [(2, 16), (2, 48), (1, 16), (1, 32), (2, 8), (2, 1), (1, 1), (1, 8)])
def test_tiles_are_those_of_the_table_but_some_low_ones(head_dim: int, kv_itemsize: int, page_size: int) -> None:
    """One kernel computes all but a low one of 8-bit heads up to 128 and of small pages."""
    source = source_of(kv_itemsize, page_size)
    assert source == (2 if page_size % 16 else kv_itemsize == 1)
    listed, tiles = HOPPER_TILES[source, head_dim], hopper_tiles(kv_itemsize, head_dim, page_size)
    assert [tile.block_m for tile in tiles] == [16, 32, 64]
    low_is_hopper = page_size % 16 == 0 and (kv_itemsize == 2 or head_dim == 256)
    assert [tile.kernel == DECODE for tile in tiles] == [low_is_hopper, True, True]
    assert [tile.merges for tile in tiles] == [not low_is_hopper, False, False]
    assert {(it.block_n, it.ctas_per_sm) for it in tiles if it.kernel == DECODE} == {
        (listed.block_n, listed.ctas_per_sm)
    }
    assert [tile.read_percent for tile in tiles[1:]] == [100, 100]
    assert tiles[0].read_percent == 98 or low_is_hopper
    assert without_subtiles(tiles) == tiles
    dtype = torch.bfloat16 if kv_itemsize == 2 else torch.float8_e5m2
    for group, held in ((4, tiles), (16, tiles), (17, tiles[1:]), (32, tiles[1:]), (64, tiles[2:])):
        config = AttentionConfig(group, 1, head_dim, page_size, torch.bfloat16, kv_dtype=dtype)
        assert taken_tiles(config, CARD) == held


def test_the_planner_sees_the_times_of_a_hopper_tile_as_they_are() -> None:
    """They were measured with its head_dim; those of portable tiles with keys and values of 512 bytes."""
    low, _, tall = hopper_tiles(1, 128, 16)
    seen = [tile_config(tile, 132, 256) for tile in (low, tall)]
    assert seen[0].block_ns == tuple(ns // 2 for ns in low.block_ns) and seen[0].paired
    assert (seen[1].block_ns, seen[1].chain_ns, seen[1].paired) == (tall.block_ns, tall.chain_ns, False)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("options", [{}, {"soft_cap": 30.0}, {"sinks": True}, {"num_qo_heads": 14}])
def test_head_dims_groups_and_options_reach_the_kernel(
    kernels: dict[str, Recorder], head_dim: int, options: dict[str, Any]
) -> None:
    shape = replace(GEOMETRY, head_dim=head_dim, head_dim_v=head_dim, **options)
    tiles = hopper_tiles(2, head_dim, 16)
    execute(fixed_size(tiles, shape), make_tensors(), False)
    constants = {given.C for _, given in of(kernels["hopper"])}
    assert len(constants) == 1
    (found,) = constants
    assert (found.soft_cap, found.sinks) == (options.get("soft_cap", 0.0), options.get("sinks", False))
    assert (found.group_size, found.head_dim) == (shape.num_qo_heads // 2, head_dim)
    assert found.tile.head_dim == {96: 128}.get(head_dim, head_dim)


@pytest.mark.parametrize(
    ("geometry", "tensors", "source", "kind"),
    [
        ({"page_size": 8, "segment_size": 8}, {}, Source.GATHERED, 0),
        ({"page_size": 1, "segment_size": 1}, {}, Source.GATHERED, 0),
        ({"page_size": 4, "segment_size": 4}, {"kv_dtype": torch.float8_e5m2}, Source.GATHERED, 2),
        ({"page_size": 48}, {}, Source.LOADED, 0),
        ({}, {"kv_dtype": torch.float8_e4m3fn}, Source.WIDENED, 1),
        ({"head_dim": 256, "head_dim_v": 256}, {"kv_dtype": torch.float8_e5m2}, Source.WIDENED, 2),
    ],
)
def test_where_keys_and_values_come_from(
    kernels: dict[str, Recorder], geometry: dict[str, Any], tensors: dict[str, Any], source: Source, kind: int
) -> None:
    shape, given = replace(GEOMETRY, **geometry), make_tensors(**tensors)
    assert kv_source(given, shape) is source
    size = given.k_cache.element_size()
    tiles = hopper_tiles(size, shape.head_dim, shape.page_size)
    execute(fixed_size(tiles, shape), given, False)
    launched = of(kernels["hopper"])
    assert len(launched) == tiles[-1].ctas_per_sm
    taken = shape_of(shape.head_dim, source)
    for (_, arguments), (_, _, options) in zip(launched, kernels["hopper"].calls, strict=True):
        assert (arguments.C.source, arguments.C.kv_kind, arguments.C.kv_bytes) == (source, kind, size)
        assert arguments.C.tile == tile_of(shape.head_dim, source)
        assert (arguments.C.tile.block_n, arguments.C.tile.head_dim) == (tiles[-1].block_n, shape.head_dim)
        assert arguments.C.producer_registers == taken.producer_registers
        assert options["maxnreg"] == taken.registers
        for cache, its_own in ((arguments.k_desc, given.k_cache), (arguments.v_desc, given.v_cache)):
            if source is Source.GATHERED:
                assert (cache.dtype, cache.data_ptr()) == (torch.int32, its_own.data_ptr())
            else:
                assert cache.base.data_ptr() == its_own.data_ptr()
                assert cache.base.dtype == (torch.uint8 if size == 1 else torch.bfloat16)
                assert cache.block_shape == [1, 16, 1, 128 if size == 1 else 64]


@pytest.mark.parametrize("source", Source)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_registers_suffice_for_all_warps(source: Source, head_dim: int) -> None:
    """Of an SM's 65,536. Warps that load are given out in whole fours; those that compute take what is left."""
    shape, ctas_per_sm = shape_of(head_dim, source), HOPPER_TILES[source, head_dim].ctas_per_sm
    pipelines = 2 if source is Source.LOADED else 1
    producers = -(-pipelines * shape.producer_warps // 4) * 4
    assert shape.producer_registers % 8 == 0 and 24 <= shape.producer_registers <= 255
    assert shape.registers * (4 + producers) * 32 * ctas_per_sm <= 65536
    left = shape.registers * (4 + producers) - shape.producer_registers * producers
    assert left // 4 >= 168, "of a thread that computes"


def test_a_launch_of_all_tiles_becomes_one_for_each_where_the_kernel_cannot_read(kernels: dict[str, Recorder]) -> None:
    tensors = make_tensors()
    padded = torch.nn.functional.pad(tensors.k_cache, (1, 0))[..., 1:]
    plan = fixed_size(TILES)
    execute(plan, replace(tensors, k_cache=padded), False)
    assert not kernels["hopper"].calls
    launched = [(options["BUCKETS"].first, options["TILE"].block_m) for _, _, options in kernels["any"].calls]
    assert launched == [(0, 16), (1, 32), (2, 64)]
    dependent = [options["PDL"] for _, _, options in kernels["any"].calls]
    assert dependent == [(True, False), (True, True), (True, True)]
    assert [reason.split(":")[0] for reason in plan.unreadable] == ["Hopper decode"] * 2


def test_a_cache_that_tma_cannot_read_goes_to_the_other(kernels: dict[str, Recorder]) -> None:
    tensors = make_tensors()
    odd = torch.zeros(math.prod(tensors.k_cache.shape) + 1, dtype=torch.bfloat16)[1:].view(tensors.k_cache.shape)
    execute(uploaded(), replace(tensors, v_cache=odd), False)
    assert not kernels["hopper"].calls and len(kernels["any"].calls) == 3


@pytest.mark.parametrize("trigger, overlaps", [(False, False), (False, True), (True, False), (True, True)])
def test_launches_side_by_side_share_the_tasks(kernels: dict[str, Recorder], trigger: bool, overlaps: bool) -> None:
    """The second overlaps the first and ends after it, and the first so what is ahead."""
    tensors, launch = make_tensors(), Launch(DECODE, Work.DECODE, 264, (1, 2), spread=True)
    bound(uploaded(), launch, Pdl(trigger, overlaps), True)(tensors)
    (first_ctas, first), (second_ctas, second) = of(kernels["hopper"])
    assert (first_ctas, first.first_cta, first.total_ctas) == (132, 0, 264)
    assert (second_ctas, second.first_cta, second.total_ctas) == (132, 132, 264)
    assert first.work.pdl == (True, overlaps) and second.work.pdl == (trigger, True)


def test_what_merges_goes_to_the_other(kernels: dict[str, Recorder]) -> None:
    """No tiling makes such items; were there any, their partial results must not be lost."""
    listed = replace(make_list(), counts=np.array([0, 1, 1, 1, 1, 2, 4], np.int32))
    plan = plan_with((listed, np.full(3, 15, np.int32)), GEOMETRY, TILES, CARD)
    execute(plan, make_tensors(), False)
    assert [(given.first_bucket, given.last_bucket) for _, given in of(kernels["hopper"])] == [(0, 0)]
    launched = [(options["BUCKETS"].first, options["BUCKETS"].merge) for _, _, options in kernels["any"].calls]
    assert launched == [(5, True), (4, True)]


def test_a_plan_of_another_size_is_not_compiled_anew() -> None:
    """Nor is one with other `Pdl`: Triton does not compile for the values of bools."""
    found = {parameter.name for parameter in hopper_decode.hopper_decode_kernel.params if parameter.do_not_specialize}
    numbers = {name for name, kind in DecodeArguments.__annotations__.items() if kind is int}
    assert found == set(UNSPECIALIZED) == numbers
    for pdl in (Pdl(True, False), Pdl(False, True)):
        assert native_specialize_impl(CUDABackend, pdl, False, True, True) == (("u1", "u1"), (None, None))
