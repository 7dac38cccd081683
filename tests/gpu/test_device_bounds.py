"""What a plan made on the device refuses, flags or leaves out: values that a batch must not have, and batches for which
the plan has no room. Under Triton's interpreter."""

from bisect import bisect_left
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from benchmarks.workloads import parse_tree, tree_batch
from trunkattn.config import Capacity
from trunkattn.gpu.device_planner.common import BAD_PAGE, BAD_QUERIES, LONG_SEQUENCE
from trunkattn.gpu.device_planner.planner import ERRORS
from trunkattn.gpu.tiles import GpuTile
from trunkattn.planner.tiles.candidates import TilingRule, candidates, tile_limits
from trunkattn.planner.work_list import UNLIMITED, TileLimits

from ..planner.specs import as_batch, make_batch
from ..planner.tile_cases import TREE_BATCH, make_rule, tile, tiled
from .device_cases import CANDIDATES, ROOMY, Planned, capacity_for, prepare

pytestmark = pytest.mark.slow

# Low tiles, and a batch of a trunk that eleven requests share, which is for the tall ones.
LOW_RULE = make_rule(
    1, 1, 8, shapes=tuple(GpuTile(*size, 1, 1, 2, (2000, 3000), (1500, 2500)) for size in ((2, 4), (8, 8)))
)
# A tile of two subtiles, each with a list of its own.
NESTED_RULE = make_rule(1, 1, 8, shapes=(GpuTile(8, 8, 1, 1, 2, (2000, 3000), (1500, 2500), 2, 4),))
LOW_BATCH = as_batch(tree_batch(parse_tree("1,11_40,9"), 1, row_seed=0, page_seed=1))
LOW_NAMES = [tiling.name(LOW_RULE) for tiling in candidates(LOW_RULE)]


def runs_of(planned: Planned) -> np.ndarray:
    counts = planned.plan.arrays["counts"].numpy()
    items = planned.plan.arrays["items"].numpy()[: 5 * counts[2 * len(planned.rule.tiles)]].reshape(-1, 5)
    return planned.plan.arrays["segments"].numpy()[: 3 * items[:, 2].max(initial=0)].reshape(-1, 3)


@pytest.mark.parametrize("page", [-1, 9, 2**31 - 1])
def test_a_page_outside_the_cache_is_flagged_and_not_read(page: int) -> None:
    batch = make_batch([[1, 2, 3, 4], [1, 2, 8]])
    planned = prepare(make_rule(4, 1, 1), capacity_for(batch, num_pages=9))
    planned.fill(batch)
    assert planned.errors == []
    batch.block_table[0, 2] = page
    planned.fill(batch)
    assert planned.errors == [ERRORS[BAD_PAGE.value]]
    assert ((runs_of(planned)[:, 0] >= 0) & (runs_of(planned)[:, 0] < 9)).all()
    planned.fill(make_batch([[1]]))
    assert planned.errors == [ERRORS[BAD_PAGE.value]], "it stays until the caller sets it back"
    planned.assert_guarded()


def test_a_page_that_no_query_sees_may_be_any() -> None:
    batch = make_batch([[-5, 2**31 - 1, 3, 4]], window=2)
    planned = prepare(make_rule(4, 1, 1), capacity_for(batch, num_pages=9))
    planned.fill(batch)
    assert planned.errors == []
    planned.assert_equals_host(batch)
    batch.block_table[0, 2] = -5  # the first that it sees
    planned.fill(batch)
    assert planned.errors == [ERRORS[BAD_PAGE.value]]


def test_a_sequence_longer_than_its_row_is_flagged_and_cut_short() -> None:
    """Columns that the capacity does not have are not looked at."""
    batch = make_batch([[1, 2, 3, 4, 5], [1, 2, 8, 5, 6]], seq_lens=[4, 5000])
    planned = prepare(make_rule(4, 1, 1), replace(capacity_for(batch), max_pages_per_request=4))
    planned.fill(batch)
    assert planned.errors == [ERRORS[LONG_SEQUENCE.value]]
    planned.assert_equals_host(replace(batch, seq_lens=np.array([4, 4], np.int32)))


@pytest.mark.parametrize(
    "starts",
    [
        [0, 1, 0, 1],
        [0, 1, -3, 2],
        [0, 1, 1 << 20, 2],
        [-1, 1, 1, 2],
        [1, 2, 3, 3],
        [0, 1, 5, 6],
        [2**31 - 1, -(2**31), 0, 1],
        [0, 2, 0, 2, 0, 2, 0, 2],  # eight tokens in all
    ],
)
def test_query_tokens_that_cannot_be_are_flagged_and_left_out(starts: list[int]) -> None:
    lens = [3, 3, 2, 2, 2, 2, 2][: len(starts) - 1]
    batch = make_batch([[1, 2, 3], [1, 2, 4], [1, 5], *([1, 6 + row] for row in range(4))][: len(lens)])
    planned = prepare(make_rule(4, 1, 1), capacity_for(batch, spare=0))
    planned.fill(replace(batch, query_start_loc=np.array(starts, np.int32)))
    assert ERRORS[BAD_QUERIES.value] in planned.errors
    planned.assert_guarded()
    ranges = [range(*bounds) for bounds in pairwise(starts)]
    kept = [
        token
        for row, tokens in enumerate(ranges)
        if 0 <= tokens.start <= tokens.stop <= len(lens) and len(tokens) <= lens[row] and (row or not tokens.start)
        for token in tokens
    ]
    num_items = planned.plan.arrays["counts"][2 * len(planned.rule.tiles)]
    listed = planned.plan.arrays["items"].view(-1, 5)[:num_items, 4].max() if num_items else 0
    assert set(planned.plan.arrays["queries"][:listed].tolist()) == set(kept)


@pytest.mark.parametrize("name", ["items", "segments", "queries", "slots", "merged"])
def test_a_plan_that_is_too_small_is_flagged_and_not_written_beyond(name: str) -> None:
    """Whatever is left of it reads only what was written."""
    rule = make_rule(4, 16, 16, num_kv_heads=2)
    candidate = CANDIDATES.index("16x64 fine")
    limits = replace(tile_limits(rule, capacity_for(TREE_BATCH)), **{name: 2})
    planned = prepare(rule, capacity_for(TREE_BATCH), candidate, limits)
    planned.fill(TREE_BATCH)
    assert len(planned.errors) == (name != "merged"), "as many as the capacity's tokens always fit"
    planned.assert_guarded()
    arrays, kinds = planned.plan.arrays, len(rule.tiles)
    counts = arrays["counts"].numpy()
    assert counts[2 * kinds] <= limits.items
    assert counts[2 * kinds + 1] <= limits.merged
    items = arrays["items"].numpy()[: 5 * counts[2 * kinds]].reshape(-1, 5)
    assert (items[:, 2] <= limits.segments).all()
    assert (items[:, 4] <= limits.queries).all()
    for start, end in items[:, 3:5]:
        assert (arrays["partial_slots"].numpy()[start:end] < limits.slots).all()
        assert (arrays["merge_slots"].numpy()[2 * start : 2 * end] <= limits.slots).all()
    assert (arrays["merge_ranges"].numpy()[: 2 * counts[2 * kinds + 1]] <= limits.slots).all()


def test_a_plan_may_be_full() -> None:
    """It has all items, segments, queries, merges and partial slots that its arrays hold; with fewer slots, what its
    items merge stays within them."""
    candidate = LOW_NAMES.index("8x8+2x4")
    host = tile(LOW_RULE, LOW_RULE.priced.tilings[candidate], LOW_BATCH)
    assert len(host.merge_queries) and host.merge_slots.any(), "some are merged by items, and some are not"
    sizes = (host.items, host.segments, host.queries, host.merge_queries)
    planned = prepare(LOW_RULE, capacity_for(LOW_BATCH), candidate, TileLimits(*map(len, sizes), host.num_slots, 11))
    planned.fill(LOW_BATCH)
    assert planned.errors == []
    planned.assert_holds(host, LOW_BATCH)
    planned.planner._limits = planned.planner._limits._replace(slots=2)
    planned.fill(LOW_BATCH)
    assert len(planned.errors) == 1
    assert (planned.plan.arrays["merge_slots"] <= 2).all() and (planned.plan.arrays["partial_slots"] < 2).all()


@pytest.mark.parametrize(
    ("rule", "name", "tiling"),
    [
        (LOW_RULE, "items", "8x8+2x4"),
        (LOW_RULE, "segments", "8x8+2x4"),
        (LOW_RULE, "slots", "8x8+2x4 uncut"),
        (NESTED_RULE, "segments", "8x8"),
    ],
)
def test_the_same_candidates_fit_as_on_the_host(rule: TilingRule, name: str, tiling: str) -> None:
    """Of the least limit within which a candidate fits, and of one less."""
    candidate = [each.name(rule) for each in candidates(rule)].index(tiling)

    def fits(size: int) -> bool:
        return bool(tiled(rule, LOW_BATCH, replace(ROOMY, **{name: size})).fits()[candidate])

    least = bisect_left(range(10_000), True, key=fits)
    planned = prepare(rule, capacity_for(LOW_BATCH), limits=replace(ROOMY, **{name: least}))
    for size in (least, least - 1):
        planned.limits = replace(ROOMY, **{name: size})
        planned.planner._limits = planned.planner._limits._replace(**{name: size})
        planned.fill(LOW_BATCH)
        planned.assert_equals_host(LOW_BATCH)


@pytest.mark.parametrize("limit", [{"slots": 3}, {"items": 4}])
def test_a_tiling_that_might_not_fit_is_passed_over(limit: dict[str, int]) -> None:
    """One long request is cut into many items, unless the plan holds few of them or of their partial results."""
    rule, batch = make_rule(4, 16, 16), make_batch([[*range(500)]], [8000])
    free, bound = (prepare(rule, capacity_for(batch), limits=replace(ROOMY, **more)) for more in ({}, limit))
    for planned in (free, bound):
        planned.fill(batch)
        assert planned.errors == []
    free.assert_equals_host(batch)
    best = free.chosen(batch)
    assert rule.priced.tilings[best].waves > 0
    assert bound.chosen(batch) != best
    bound.assert_equals_host(batch)


@pytest.mark.parametrize(
    "change, error, match",
    [
        ({"block_table": torch.zeros(2, 3, dtype=torch.int64)}, TypeError, r"block_table of torch.int64"),
        ({"seq_lens": torch.zeros(2)}, TypeError, r"seq_lens of torch.float32"),
        ({"block_table": torch.zeros(6, dtype=torch.int32)}, ValueError, r"block_table of shape \(6,\)"),
        ({"block_table": torch.zeros(9, 3, dtype=torch.int32)}, ValueError, r"block_table of shape \(9, 3\)"),
        ({"block_table": torch.zeros(3, 2, dtype=torch.int32).t()}, ValueError, r"block_table on cpu with strides"),
        ({"seq_lens": torch.zeros(3, dtype=torch.int32)}, ValueError, r"seq_lens of shape \(3,\)"),
        ({"query_start_loc": torch.zeros(2, dtype=torch.int32)}, ValueError, r"query_start_loc of shape \(2,\)"),
        ({"query_start_loc": torch.zeros(6, dtype=torch.int32)[::2]}, ValueError, r"query_start_loc on cpu with str"),
    ],
)
def test_what_the_host_can_see_is_checked(change: dict, error: type[Exception], match: str) -> None:
    rule = make_rule(4, 16, 1)
    planned = prepare(rule, Capacity(8, 8, 4, 10))
    step = {
        "block_table": torch.zeros(2, 3, dtype=torch.int32),
        "seq_lens": torch.zeros(2, dtype=torch.int32),
        "query_start_loc": torch.zeros(3, dtype=torch.int32),
    }
    with pytest.raises(error, match=match):
        planned.planner.fill(planned.plan, **(step | change), window=UNLIMITED)
