"""Which row tiles the kernel for Hopper gets, and with what it is launched. The kernel itself:
tests/on_gpu/test_decode_hopper.py."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from trunkattn.gpu import launch
from trunkattn.gpu.hopper import decode as decode_hopper
from trunkattn.gpu.launch import execute
from trunkattn.gpu.plan import Geometry, GpuPlan, refill, reserve, upload
from trunkattn.gpu.tuning.decode import decode_tiles
from trunkattn.planner.work_list import UNLIMITED, TileLimits, TileList

from .test_hopper_prefill import CARD, GEOMETRY, UNSUPPORTED, Recorder, make_tensors

CPU = torch.device("cpu")
TILES = decode_tiles(2, 128, 4, hopper=True)
LIMITS = TileLimits(items=8, runs=8, queries=8, merged=8, slots=8, query_tokens=8)


def make_list() -> TileList:
    """Decodes of one run each: a low item, one of 32 rows, and two of 64, whose query is in two pieces."""
    ints = np.arange(4, dtype=np.int32)
    run = np.array([16, 1 << 8 | 16 << 16, 0], np.int32)
    return TileList(
        items=np.stack([ints, ints, ints + 1, ints, ints + 1], 1), runs=np.tile(run, (4, 1)),
        queries=np.array([0, 1, 2, 2], np.int32), slots=np.array([-1, -1, 0, 1], np.int32),
        parts=np.zeros((4, 2), np.int32), counts=np.array([0, 1, 2, 4, 4, 4, 4], np.int32),
        merge_queries=ints[2:3], merge_ranges=np.array([[0, 2]], np.int32), num_slots=2, merges_taller=True,
    )  # fmt: skip


def uploaded(geometry: Geometry = GEOMETRY) -> GpuPlan:
    return upload(make_list(), np.full(3, 15, np.int32), geometry, CARD, "serial", CPU)


def of(kernel: Recorder) -> list[tuple[int, dict[str, Any]]]:
    """Programs and arguments by name of each launch."""
    names = kernel.arg_names  # type: ignore[attr-defined]
    return [(programs, dict(zip(names, args, strict=False)) | options) for programs, args, options in kernel.calls]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, Recorder]:
    """The one for Hopper, the one for any card, and the one that merges."""
    found = {"hopper": Recorder(), "any": Recorder(), "merge": Recorder()}
    found["hopper"].arg_names = decode_hopper.decode_hopper_kernel.arg_names  # type: ignore[attr-defined]
    monkeypatch.setattr(decode_hopper, "decode_hopper_kernel", found["hopper"])
    monkeypatch.setattr(launch, "decode_kernel", found["any"])
    monkeypatch.setattr(launch, "merge_kernel", found["merge"])
    return found


@pytest.mark.parametrize("window, masked", [(UNLIMITED, False), (UNLIMITED, True), (40, True)])
def test_it_is_launched_with_every_argument(monkeypatch: pytest.MonkeyPatch, window: int, masked: bool) -> None:
    names, kernel = decode_hopper.decode_hopper_kernel.arg_names, Recorder()
    monkeypatch.setattr(decode_hopper, "decode_hopper_kernel", kernel)
    plan = uploaded(replace(GEOMETRY, window=window, masked=masked))
    options = {"LEADS": True, "FOLLOWS": False, "RETURN_LSE": False}
    decode_hopper.launch(make_tensors(), plan, (1, 2), (264,), options)
    ((programs, args, options),) = kernel.calls
    given = dict(zip(names, args, strict=False)) | options
    assert (programs, given["first_program"], given["programs"]) == (264, 0, 264)
    assert set(given) == {*names, "num_warps", "maxnreg", "launch_pdl"}
    assert len(args) + len(options) == len(given)
    assert given["counts"].tolist()[:7] == [0, 1, 2, 4, 4, 4, 4]
    assert (given["first_bucket"], given["last_bucket"]) == (1, 2)
    assert (given["window"], given["MASKED"]) == (window, masked)
    assert (given["items_size"], given["queries_size"], given["runs_size"]) == (20, 4, 12)
    assert given["runs"].numel() == 12 and given["slots"].tolist() == [-1, -1, 0, 1]
    assert (given["q_stride_t"], given["q_stride_h"]) == (8 * 128, 128)


def test_a_list_takes_a_launch_for_each_tile(kernels: dict[str, Recorder]) -> None:
    execute(uploaded(), make_tensors(), TILES, CARD, False)
    buckets = [(given["first_bucket"], given["last_bucket"], programs) for programs, given in of(kernels["hopper"])]
    assert buckets == [(2, 2, 4), (1, 1, 2)]
    assert [options["BUCKETS"].first for _, _, options in kernels["any"].calls] == [0]
    assert len(kernels["merge"].calls) == 1


def test_a_plan_of_fixed_size_takes_launches_for_all_heights_at_once(kernels: dict[str, Recorder]) -> None:
    plan = reserve(LIMITS, TILES, GEOMETRY, CARD, "serial", CPU)
    refill(plan, make_list(), np.full(3, 15, np.int32))
    execute(plan, make_tensors(), TILES, CARD, False)
    launched = of(kernels["hopper"])
    assert [programs for programs, _ in launched] == [CARD.processors, CARD.processors]
    assert all((given["first_bucket"], given["last_bucket"]) == (1, 2) for _, given in launched)
    ((_, _, options),) = kernels["any"].calls
    assert options["BUCKETS"] == (0, 3, True)


@UNSUPPORTED
def test_what_it_cannot_do_goes_to_the_other(
    kernels: dict[str, Recorder], geometry: dict[str, Any], tensors: dict[str, Any]
) -> None:
    plan = reserve(LIMITS, TILES, replace(GEOMETRY, **geometry), CARD, "serial", CPU)
    refill(plan, make_list(), np.full(3, 15, np.int32))
    execute(plan, make_tensors(**tensors), TILES, CARD, False)
    assert not kernels["hopper"].calls
    launched = [(options["BUCKETS"].first, options["TILE"].block_m) for _, _, options in kernels["any"].calls]
    assert launched == [(1, 32), (2, 64), (0, 16)]
    dependent = [(options["PDL_TRIGGER"], options["PDL_WAIT"]) for _, _, options in kernels["any"].calls]
    assert dependent == [(True, False), (True, True), (True, True)]


def test_a_cache_that_the_copy_engine_cannot_read_goes_to_the_other(kernels: dict[str, Recorder]) -> None:
    tensors = make_tensors()
    odd = torch.zeros(math.prod(tensors.k_cache.shape) + 1, dtype=torch.bfloat16)[1:].view(tensors.k_cache.shape)
    execute(uploaded(), replace(tensors, v_cache=odd), TILES, CARD, False)
    assert not kernels["hopper"].calls and len(kernels["any"].calls) == 3


def test_other_cards_get_the_other(kernels: dict[str, Recorder]) -> None:
    execute(uploaded(), make_tensors(), TILES, replace(CARD, hopper=False), False)
    assert not kernels["hopper"].calls and len(kernels["any"].calls) == 3


@pytest.mark.parametrize("leads, follows", [(False, False), (False, True), (True, False), (True, True)])
def test_launches_side_by_side(kernels: dict[str, Recorder], leads: bool, follows: bool) -> None:
    """The second runs beside the first and ends after it, and the first so beside what is ahead."""
    options = {"LEADS": leads, "FOLLOWS": follows, "RETURN_LSE": True}
    decode_hopper.launch(make_tensors(), uploaded(), (1, 2), (132, 68), options)
    (first_programs, first), (programs, second) = of(kernels["hopper"])
    assert (first_programs, first["first_program"], first["programs"]) == (132, 0, 200)
    assert (programs, second["first_program"], second["programs"]) == (68, 132, 200)
    assert (first["leads"], first["follows"], first["launch_pdl"]) == (1, follows, True)
    assert (second["leads"], second["follows"], second["launch_pdl"]) == (leads, 1, True)


def test_what_merges_goes_to_the_other(kernels: dict[str, Recorder]) -> None:
    """No tiling makes such items; were there any, their partial states must not be lost."""
    listed = replace(make_list(), counts=np.array([0, 1, 1, 1, 1, 2, 4], np.int32))
    plan = upload(listed, np.full(3, 15, np.int32), GEOMETRY, CARD, "serial", CPU)
    execute(plan, make_tensors(), TILES, CARD, False)
    assert not kernels["hopper"].calls
    launched = [(options["BUCKETS"].first, options["BUCKETS"].merge) for _, _, options in kernels["any"].calls]
    assert launched == [(0, False), (5, True), (4, True)]


def test_a_plan_of_another_size_is_not_compiled_anew() -> None:
    parameters = {parameter.name: parameter for parameter in decode_hopper.decode_hopper_kernel.params}
    for name in decode_hopper.NUMBERS:
        assert parameters[name].do_not_specialize
