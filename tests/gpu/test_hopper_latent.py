"""What the latent kernel for Hopper is launched with; on a card: tests/on_gpu/test_latent.py."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from trunkattn.gpu.launch import execute
from trunkattn.gpu.launch_order import LaunchOptions
from trunkattn.gpu.layer import Geometry, Pdl, Tensors
from trunkattn.gpu.mla import decode
from trunkattn.gpu.mla.decode import REGISTERS, UNSPECIALIZED, LatentArguments
from trunkattn.gpu.mla.spec import decode_tiles
from trunkattn.gpu.portable import merge
from trunkattn.planner.work_list import UNLIMITED, TileList

from .hopper_cases import OnCard, Recorder
from .kernel_cases import make_card, plan_with
from .latent_cases import deepseek

pytestmark = pytest.mark.slow

CARD = make_card()
# 128 heads in two groups, pages of 64 tokens
GEOMETRY = Geometry(128, 2, 576, 512, 64, 64, UNLIMITED, False, None, False)
E4M3 = torch.float8_e4m3fn


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    found = Recorder(LatentArguments._fields)
    monkeypatch.setattr(decode, "latent_decode_kernel", found)
    return found


def make_tensors(kv_dtype: torch.dtype = torch.bfloat16) -> Tensors:
    """Queries side by side in one tensor, an output between others, and a cache whose pages lie apart."""
    q = torch.zeros(5, 128, 576, dtype=torch.bfloat16).as_subclass(OnCard)
    out = torch.zeros(5, 130, 640, dtype=torch.bfloat16)[:, :128, :512]
    cache = torch.zeros(3, 80, 1, 640, dtype=torch.uint8 if kv_dtype.itemsize == 1 else kv_dtype)
    cache = cache.view(kv_dtype)[:, :64, :, :576]
    floats = {name: torch.zeros(2) for name in ("lse", "partial", "partial_lse", "logit_scale", "v_scale", "sinks")}
    return Tensors(q[..., :512], cache, cache[..., :512], out, **floats, q_rope=q[..., 512:])


def make_list(num_items: int = 2) -> TileList:
    """Items of one query token and one segment each, the last in two pieces."""
    ints, none = np.arange(num_items, dtype=np.int32), np.full(num_items, -1, np.int32)
    segment = np.array([64, 1 << 8 | 64 << 16, 0], np.int32)
    return TileList(
        items=np.stack([ints, ints, ints + 1, ints, ints + 1], 1), segments=np.tile(segment, (num_items, 1)),
        queries=ints, partial_slots=none, merge_slots=np.zeros((num_items, 2), np.int32),
        counts=np.array([0, num_items, num_items], np.int32), merge_queries=none[:0],
        merge_ranges=np.zeros((0, 2), np.int32), num_slots=0, merges_taller=False,
    )  # fmt: skip


def launched(kernel: Recorder, geometry: Geometry, t: Tensors, num_items: int = 2, **options: Any) -> Any:
    """CTAs, arguments and compile options of the only launch."""
    tiles = decode_tiles(deepseek(heads=128, kv_dtype=t.k_cache.dtype), CARD)
    plan = plan_with((make_list(num_items), np.full(5, 63, np.int32)), geometry, tiles, CARD)
    (launch,) = plan.launches
    given = LaunchOptions(options.get("pdl", Pdl(False, False)), options.get("return_lse", False))
    decode.bind(plan, t, launch, given)(t)
    ((num_ctas, args, compiled),) = kernel.calls
    return num_ctas, LatentArguments(*args), compiled


@pytest.mark.parametrize(("window", "masked"), [(UNLIMITED, False), (UNLIMITED, True), (40, True)])
def test_it_is_launched_with_every_argument(kernel: Recorder, window: int, masked: bool) -> None:
    t, pdl = make_tensors(), Pdl(trigger=True, wait=False)
    geometry = replace(GEOMETRY, window=window, masked=masked)
    num_ctas, given, compiled = launched(kernel, geometry, t, pdl=pdl, return_lse=True)
    assert num_ctas == 2 * 2, "an item is computed for each group of heads"
    assert compiled == {"num_warps": 4, "maxnreg": REGISTERS, "launch_pdl": True}
    assert (given.first_bucket, given.last_bucket) == (0, 0)
    assert (given.items_size, given.queries_size, given.segments_size) == (12, 4, 8)
    work = given.work
    assert work.counts.tolist()[:2] == [0, 2] and (work.window, work.pdl) == (window, pdl)
    assert work.tiles.items.tolist()[:10] == [0, 0, 1, 0, 1, 1, 1, 2, 1, 2]
    assert work.tiles.segments.tolist()[:3] == [64, 1 << 8 | 64 << 16, 0]
    assert work.tiles.queries.tolist()[:2] == [0, 1] and work.tiles.partial_slots.tolist()[:2] == [-1, -1]
    assert work.tiles.positions.tolist()[:2] == [63, 63]
    layer = given.layer
    assert layer.q_latent is t.q and layer.q_rope is t.q_rope
    others = ("out", "lse", "partial", "partial_lse", "logit_scale", "v_scale")
    assert all(getattr(layer, name) is getattr(t, name) for name in others)
    constants = given.C
    assert (constants.num_qo_heads, constants.num_head_groups, constants.group_size) == (128, 2, 64)
    assert (constants.page_size, constants.segment_size) == (64, 64)
    assert (constants.masked, constants.return_lse) == (masked, True)


@pytest.mark.parametrize(
    ("kv_dtype", "base", "box", "blocks"),
    [
        (torch.bfloat16, torch.bfloat16, [1, 64, 64], (64, 1, 64, 32, 64)),
        (E4M3, torch.uint8, [1, 64, 128], (32, 2, 128, 128, 128)),
    ],
)
def test_a_cache_is_read_where_it_lies(
    kernel: Recorder, kv_dtype: torch.dtype, base: torch.dtype, box: list[int], blocks: tuple[int, ...]
) -> None:
    t = make_tensors(kv_dtype)
    _, given, _ = launched(kernel, GEOMETRY, t)
    desc, C = given.desc, given.C
    assert (desc.base.data_ptr(), desc.base.dtype) == (t.k_cache.data_ptr(), base)
    assert (desc.shape, desc.strides, desc.block_shape) == ([3, 64, 576], [80 * 640, 640, 1], box)
    assert C.widened is (kv_dtype == E4M3)
    assert (C.block_rows, C.pairs_held, C.box_columns, C.part_threads, C.producer_threads) == blocks


def test_an_sm_has_one_cta(kernel: Recorder) -> None:
    """Its shared memory holds no second one."""
    assert launched(kernel, GEOMETRY, make_tensors(), num_items=500)[0] == CARD.num_sms


def test_the_arguments_are_the_parameters_of_the_kernel() -> None:
    kernel = decode.latent_decode_kernel
    assert list(LatentArguments._fields) == kernel.arg_names
    assert {each.name for each in kernel.params if each.do_not_specialize} == set(UNSPECIALIZED)


def test_a_later_layer_brings_its_own_tensors(kernel: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge, "merge_kernel", Recorder())
    tiles = decode_tiles(deepseek(heads=128), CARD)
    plan = plan_with((make_list(), np.full(5, 63, np.int32)), GEOMETRY, tiles, CARD)
    for t in (make_tensors(), make_tensors()):
        execute(plan, t, False)
        given = LatentArguments(*kernel.calls[-1][1])
        assert given.layer.q_rope is t.q_rope and given.desc.base.data_ptr() == t.k_cache.data_ptr()
    assert len(plan.bound) == 1 and not given.C.return_lse
    execute(plan, t, True)
    assert LatentArguments(*kernel.calls[-1][1]).C.return_lse and len(plan.bound) == 2
