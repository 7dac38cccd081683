"""Plans made on the device, under Triton's interpreter: what they say of themselves, and what they refuse."""

import numpy as np
import pytest
import torch

from trunkattn import AttentionConfig, BatchAttention
from trunkattn.config import Capacity
from trunkattn.gpu.arrays import GpuPlan
from trunkattn.gpu.device_planner.step import DeviceTiles, OnDevice
from trunkattn.gpu.layer import Geometry
from trunkattn.gpu.portable.spec import tiles_of as decode_tiles
from trunkattn.gpu.step import GpuStep
from trunkattn.planner.tiles.candidates import candidates, tile_limits
from trunkattn.planner.work_list import UNLIMITED

from ..planner.tile_cases import TREE_BATCH, make_rule, predicted
from .kernel_cases import CPU, kernels_with, make_card, reserved

pytestmark = pytest.mark.slow

RULE = make_rule(4, 16, 1, num_kv_heads=2)
CARD = make_card(num_sms=1, capability=80)
TABLE, LENS, STARTS = (
    torch.from_numpy(array) for array in (TREE_BATCH.block_table, TREE_BATCH.seq_lens, TREE_BATCH.query_start_loc)
)


def made(max_query_len: int = 1, num_pages: int = 200, max_requests: int = 16) -> tuple[OnDevice, GpuPlan]:
    """For 16 requests of 16 pages."""
    capacity = Capacity(max_requests, 32, 16, num_pages, max_query_len)
    limits = tile_limits(RULE, capacity)
    geometry = Geometry(8, 2, 128, 128, 16, RULE.segment_size, UNLIMITED, False, None, False)
    plan = reserved(limits, geometry, decode_tiles(2, 128, 4), CARD)
    return OnDevice(RULE, capacity, limits, CARD, CPU), plan


def step_of(tiles: DeviceTiles) -> GpuStep:
    """A step without prompt chunks."""
    kernels = kernels_with(tiles.gpu_plan.tiles, tiles.gpu_plan.geometry)
    return GpuStep(tiles, None, RULE, kernels, tiles.gpu_plan, tiles.num_query_tokens, len(tiles.tables[0]))


@pytest.mark.parametrize(("group", "merging"), [(4, [(0, 2)]), (16, [(0, 2)]), (32, [])])
def test_only_tiles_of_16_rows_merge(group: int, merging: list[tuple[int, int]]) -> None:
    tiles = decode_tiles(2, 128, group)
    limits = tile_limits(make_rule(group, 16, 1, num_kv_heads=2), Capacity(16, 32, 16, 200, 1))
    geometry = Geometry(2 * group, 2, 128, 128, 16, RULE.segment_size, UNLIMITED, False, None, False)
    plan = reserved(limits, geometry, tiles, CARD)
    assert [
        launch.buckets for launch in plan.launches if launch.buckets and launch.buckets[-1] >= len(tiles)
    ] == merging


def test_a_step_says_what_it_reads() -> None:
    on_device, plan = made()
    step = step_of(on_device.plan((TABLE, LENS, None), UNLIMITED, plan))
    times = predicted(RULE, TREE_BATCH)
    stats = step.stats()
    assert stats.policy == min(candidates(RULE), key=lambda tiling: times[tiling]).name(RULE)
    assert stats.kv_tokens_per_query == 12 * 116
    assert step.gpu_plan.summary is not None
    assert step.gpu_plan.summary[1:].tolist() == [64 + 2 * 32 + 12 * 20, 12 * 116]
    assert (step.num_query_tokens, stats.num_work_items) == (12, 1)
    step.check()
    on_device.check()


def test_a_step_with_query_starts_knows_its_tokens_on_the_device_only() -> None:
    on_device, plan = made()
    assert on_device.plan((TABLE, LENS, STARTS), UNLIMITED, plan).num_query_tokens == 0


@pytest.mark.parametrize(
    ("name", "place", "value", "message"),
    [
        ("table", (3, 2), 200, "a page outside the cache"),
        ("lens", 4, 17 * 16, "longer than its row"),
        ("starts", 0, 1, "ascending from 0"),
        ("starts", slice(6, None), 9, "more tokens than the sequence or the capacity"),
    ],
)
def test_check_reports_what_was_out_of_bounds_once(name: str, place: object, value: int, message: str) -> None:
    on_device, plan = made()
    tables = {"table": TABLE.clone(), "lens": LENS.clone(), "starts": STARTS.clone()}
    tables[name][place] = value
    step = on_device.plan(tuple(tables.values()), UNLIMITED, plan)  # type: ignore[arg-type]
    assert int(on_device.errors) != 0
    with pytest.raises(ValueError, match=message):
        on_device.check()
    on_device.check()
    listed = step.tile_list()
    assert (listed.segments[:, 0] < 200 * 16).all()
    assert len(np.unique(listed.queries)) <= 32


def test_a_request_has_no_more_query_tokens_than_the_capacity_says() -> None:
    """Without causal masks, which such a capacity leaves out, the first would see the second."""
    table, lens, starts = TABLE[:1], LENS[:1], torch.tensor([0, 2], dtype=torch.int32)
    on_device, plan = made(max_query_len=2)
    assert on_device.plan((table, lens, starts), UNLIMITED, plan).tile_list().queries.tolist() == [0, 1]
    on_device.check()
    on_device, plan = made(max_query_len=1)
    assert len(on_device.plan((table, lens, starts), UNLIMITED, plan).tile_list().items) == 0
    with pytest.raises(ValueError, match="more tokens"):
        on_device.check()


def test_what_a_row_would_read_alone_is_counted_within_its_bounds() -> None:
    lens = LENS.clone()
    lens[2] = 10_000
    on_device, plan = made()
    step = on_device.plan((TABLE, lens, None), UNLIMITED, plan)
    assert step.gpu_plan.summary is not None
    assert int(step.gpu_plan.summary[2]) == 11 * 116 + TABLE.shape[1] * 16


def test_a_cache_has_no_more_places_than_int32_counts() -> None:
    with pytest.raises(ValueError, match=r"num_pages=134217728: expected at most 134217727"):
        made(num_pages=1 << 27)
    with pytest.raises(ValueError, match=r"max_requests=524288: expected at most 524287"):
        made(max_requests=1 << 19)


def test_what_plans_of_the_host_do_not_have() -> None:
    attention = BatchAttention(AttentionConfig(8, 2, 64, 16, torch.float32), "cpu")
    plan = attention.plan(TABLE, LENS)
    assert plan.counters == (None, None) and plan.num_chunks == 0
    assert plan.only("decodes") is plan
    with pytest.raises(ValueError, match="part='chunks': expected a plan made on the device"):
        plan.only("chunks")
    with pytest.raises(ValueError, match="part='prompts': expected one of 'decodes', 'chunks'"):
        plan.only("prompts")  # type: ignore[arg-type]
    assert attention.errors is None
