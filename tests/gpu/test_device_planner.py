"""Planning on the device under Triton's interpreter: the same bits as on the host, and nothing outside the arrays."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.workloads import parse_tree, random_forest, tree_batch
from trunkattn.config import Capacity
from trunkattn.gpu.device_planner import candidates as device_candidates
from trunkattn.gpu.device_planner.common import BAD_PAGE, BAD_QUERIES, LONG_SEQUENCE
from trunkattn.gpu.device_planner.planner import ERRORS, DevicePlanner
from trunkattn.gpu.device_planner.prefix_forest import Links, place_of
from trunkattn.gpu.hopper.spec import tiles_of as hopper_tiles
from trunkattn.gpu.portable.spec import tiles_of as decode_tiles
from trunkattn.gpu.tiles import GpuTile
from trunkattn.planner.planner import StepTables
from trunkattn.planner.tiles.candidates import TilingRule, candidates, tile_limits
from trunkattn.planner.work_list import UNLIMITED, TileLimits

from ..compiling import compile_report
from ..planner.specs import as_batch, forest_of, make_batch
from ..planner.tile_cases import CARD_TIMES, SEEDS, TREE_BATCH, WINDOWS, low_tiles, make_rule
from .device_cases import ROOMY, Planned, capacity_for, prepare, some_candidates
from .kernel_cases import make_card

pytestmark = pytest.mark.slow

REPORT = "tests.gpu.device_report"
CANDIDATES = [tiling.name(make_rule(4, 16, 1)) for tiling in candidates(make_rule(4, 16, 1))]


@triton.jit
def _places_kernel(starts, links, places, previous, num_rows, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    first, before = place_of(tl.load(links.link + row), starts, links, num_rows, BLOCK)
    tl.store(places + row, first)
    tl.store(previous + row, before)


@st.composite
def rules(draw: st.DrawFn) -> TilingRule:
    group_size = draw(st.sampled_from([1, 4, 5, 8]))
    tables = [decode_tiles(*cache, group_size) for cache in ((2, 128), (1, 128), (2, 256))]
    table = st.sampled_from([*tables, tuple(tile for tile in hopper_tiles(2, 128, 16) if tile.block_m >= group_size)])
    return make_rule(
        group_size,
        draw(st.sampled_from([1, 8, 12, 16, 32])),
        draw(st.sampled_from([1, 3, 16, 132])),
        shapes=draw(st.one_of(table, low_tiles(group_size))),
        num_kv_heads=draw(st.sampled_from([1, 2, 8])),
        fuse_up_to=draw(st.sampled_from([0, 1, 8])),
        l2_bytes=draw(st.sampled_from([0, 1 << 16, 50 << 20])),
    )


@st.composite
def batches(draw: st.DrawFn, page_size: int) -> StepTables:
    """With stale entries after each row's pages, padding rows, and the null block where no query of some rows sees."""
    paged = random_forest(
        np.random.default_rng(draw(SEEDS)),
        page_size=page_size,
        max_requests=draw(st.sampled_from([3, 6, 12])),
        max_own_tokens=draw(st.sampled_from([8, 60])),
        max_query_len=draw(st.sampled_from([1, 1, 3, 8])),
    )
    batch = as_batch(paged, draw(WINDOWS))
    firsts = (batch.seq_lens - np.diff(batch.query_start_loc) + 1 - batch.window) // page_size
    for row in np.flatnonzero(draw(st.integers(0, 2**12 - 1)) >> np.arange(len(firsts)) & 1):
        batch.block_table[row, : max(0, firsts[row])] = 0
    return batch


@pytest.mark.property
@settings(max_examples=settings().max_examples // 20)  # the interpreter takes seconds for each
@given(data=st.data())
def test_a_plan_has_the_bits_that_the_host_writes(data: st.DataObject) -> None:
    """Of the tiling that it takes, or of one that it is given; twice, as a captured graph would."""
    rule = data.draw(rules())
    first, second = (data.draw(batches(rule.page_size)) for _ in range(2))
    candidate = data.draw(st.one_of(st.none(), st.integers(0, len(candidates(rule)) - 1)))
    sizes = [capacity_for(batch) for batch in (first, second)]
    most = {
        name: max(getattr(size, name) for size in sizes)
        for name in ("max_requests", "max_query_tokens", "max_pages_per_request", "num_pages")
    }
    card = make_card(num_sms=data.draw(st.sampled_from([1, 2, 8])), capability=80)
    planned = prepare(rule, Capacity(**most), candidate, card=card)
    for batch in (first, second):
        planned.fill(batch)
        assert planned.errors == []
        planned.assert_equals_host(batch)


@pytest.mark.parametrize("page_size", [528, 784])
def test_pages_of_hybrid_models(page_size: int) -> None:
    batch = as_batch(tree_batch(parse_tree(f"1,2,6_{page_size},{page_size},37"), page_size, row_seed=0, page_seed=1))
    planned = prepare(make_rule(8, page_size, 16), capacity_for(batch))
    planned.fill(batch)
    assert planned.errors == []
    planned.assert_equals_host(batch)


@pytest.mark.parametrize("candidate", range(len(CANDIDATES)), ids=CANDIDATES)
def test_every_tiling_of_a_small_tree(candidate: int) -> None:
    """12 requests of 4 heads, of which 6 and 12 share; several items of a tile, and several tiles of a node. Fine cuts
    are of 16 multiprocessors, the others of 16 and of one in turn."""
    num_sms = 16 if CANDIDATES[candidate].endswith(" fine") or candidate % 2 else 1
    planned = prepare(make_rule(4, 16, num_sms, num_kv_heads=2), capacity_for(TREE_BATCH), candidate)
    planned.fill(TREE_BATCH)
    planned.assert_equals_host(TREE_BATCH)


@pytest.mark.parametrize("bytes_per_us", [1000, 60_000_000])
def test_times_that_memory_or_the_l2_cache_decide(bytes_per_us: int) -> None:
    card_times = CARD_TIMES._replace(bytes_per_us=bytes_per_us)
    planned = prepare(replace(make_rule(4, 16, 16, num_kv_heads=2), card_times=card_times), capacity_for(TREE_BATCH))
    planned.fill(TREE_BATCH)
    planned.assert_equals_host(TREE_BATCH)


def test_a_trunk_of_more_rows_than_a_block_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """More requests and columns than one pass of any kernel takes."""
    monkeypatch.setattr(device_candidates, "_PAIRS", 32)
    monkeypatch.setattr(device_candidates, "_BLOCK", 32)
    monkeypatch.setattr(device_candidates, "_HASHED", 32)
    batch = as_batch(tree_batch(parse_tree("1,2,40_32,16,20"), 1, row_seed=1, page_seed=1))
    planned = prepare(make_rule(4, 1, 16), capacity_for(batch))
    planned.fill(batch)
    planned.assert_equals_host(batch)


def test_two_lowest_tiles_of_one_height() -> None:
    """Of the first items merge what the tall tile leaves, of the second none does."""
    shapes = tuple(GpuTile(*size, 1, 1, 2, (2000, 3000), (1500, 2500)) for size in ((2, 4), (2, 8), (8, 8)))
    batch = as_batch(tree_batch(parse_tree("1,12_16,6"), 1, row_seed=0, page_seed=1))
    rule = make_rule(1, 1, 1, shapes=shapes)
    numbers = [number for number, tiling in enumerate(candidates(rule)) if (tiling.tall, tiling.low) == (2, 1)]
    assert len(numbers) == 3, "cut, fine, uncut"
    for candidate in numbers:
        planned = prepare(rule, capacity_for(batch), candidate)
        planned.fill(batch)
        planned.assert_equals_host(batch)


def test_rows_that_agree_only_behind_the_columns_hashed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_candidates, "_HASHED", 4)
    batch = make_batch([[*range(1, 11)], [20, *range(2, 11)], [*range(1, 6), 30, *range(7, 11)]])
    planned = prepare(make_rule(4, 1, 16), capacity_for(batch), 0)
    planned.fill(batch)
    planned.assert_equals_host(batch)


@pytest.mark.parametrize("seed", range(3))
def test_rows_that_share_ever_more_columns(seed: int) -> None:
    """Each with those that follow it in the tree, in any order of the batch; some are equal."""
    lengths = np.random.default_rng(seed).permutation([*range(14), 3, 3, 9, 12, 12])
    rows = [[*range(1, 1 + length), *([] if length % 2 else [100 + row])] for row, length in enumerate(lengths)]
    batch = make_batch([row or [99] for row in rows])
    planned = prepare(make_rule(4, 1, 16), capacity_for(batch))
    planned.fill(batch)
    planned.assert_equals_host(batch)
    order = forest_of(batch, 1).order
    links = Links(*(planned.planner._buffers[name] for name in ("links", "subtree_queries")))
    starts, (places, previous) = torch.from_numpy(batch.query_start_loc), torch.zeros(2, len(rows), dtype=torch.int32)
    _places_kernel[(len(rows),)](starts, links, places, previous, len(rows), BLOCK=8)
    assert np.array_equal(places.numpy()[order], np.arange(len(rows)))
    assert np.array_equal(previous.numpy()[order[1:]], order[:-1])


def test_rows_without_queries_are_padding() -> None:
    """In the caller's tensors and beyond them; an empty batch empties the plan."""
    batch = make_batch([[1, 2, 3], [], [1, 2, 4], [1, 2]], query_lens=[1, 0, 1, 0], columns=5)
    rule = make_rule(4, 1, 1)
    planned = prepare(rule, capacity_for(batch, spare=5))
    planned.fill(batch)
    planned.assert_equals_host(batch)
    assert planned.plan.arrays["counts"][2 * len(rule.tiles)] > 0
    for empty in (make_batch([]), make_batch([[], []], query_lens=[0, 0])):
        planned.fill(empty)
        assert not planned.plan.arrays["counts"][: 2 * len(rule.tiles) + 2].any()
        planned.assert_guarded()


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


def test_a_sequence_longer_than_its_row_is_flagged_and_cut_short() -> None:
    batch = make_batch([[1, 2, 3, 4], [1, 2, 8, 5]], seq_lens=[4, 5000])
    planned = prepare(make_rule(4, 1, 1), capacity_for(batch))
    planned.fill(batch)
    assert planned.errors == [ERRORS[LONG_SEQUENCE.value]]
    planned.assert_equals_host(replace(batch, seq_lens=np.array([4, 4], np.int32)))


@pytest.mark.parametrize(
    "starts",
    [[0, 1, 0, 1], [0, 1, -3, 2], [0, 1, 1 << 20, 2], [-1, 1, 1, 2], [0, 1, 5, 6], [2**31 - 1, -(2**31), 0, 1]],
)
def test_query_tokens_that_cannot_be_are_flagged_and_left_out(starts: list[int]) -> None:
    batch = make_batch([[1, 2, 3], [1, 2, 4], [1, 5]])
    planned = prepare(make_rule(4, 1, 1), capacity_for(batch))
    planned.fill(replace(batch, query_start_loc=np.array(starts, np.int32)))
    assert ERRORS[BAD_QUERIES.value] in planned.errors
    planned.assert_guarded()


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


@pytest.mark.parametrize("limit", [{"slots": 3}, {"items": 4}])
def test_a_tiling_that_might_not_fit_is_passed_over(limit: dict[str, int]) -> None:
    """One long request is cut into many items, unless the plan holds few of them or of their partial states."""
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


@pytest.mark.property
@settings(max_examples=settings().max_examples // 8)
@given(data=st.data(), seed=SEEDS, tight=st.booleans())
def test_no_numbers_make_it_write_outside_its_arrays(data: st.DataObject, seed: int, tight: bool) -> None:
    rule, rng = data.draw(rules()), np.random.default_rng(seed)
    rows, columns = (int(size) for size in rng.integers(0, 6, 2))
    bounds = [(0, 6), (-6, 6), (-41, 40), (-(2**31), 2**31 - 1)]
    table, lens, starts = (
        rng.integers(*bounds[rng.integers(len(bounds))], size, np.int32) for size in ((rows, columns), rows, rows + 1)
    )
    if rng.random() < 0.7:
        starts = np.cumsum(rng.integers(0, 3, rows + 1), dtype=np.int32)
    items, segments, queries, merged, slots = (int(size) for size in rng.integers(1, 6 if tight else 60, 5))
    planned = prepare(rule, Capacity(8, 12, 8, 5), limits=TileLimits(items, segments, queries, merged, slots, 12))
    planned.fill(StepTables(table, lens, starts, data.draw(WINDOWS)))
    planned.assert_guarded()


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


def test_buffers_are_allocated_once() -> None:
    rule = make_rule(4, 16, 1)
    planner = DevicePlanner(
        some_candidates(rule),
        Capacity(8, 8, 4, 10),
        tile_limits(rule, Capacity(8, 8, 4, 10)),
        make_card(1, 80),
        torch.device("cpu"),
    )
    places = {name: buffer.data_ptr() for name, buffer in planner._buffers.items()}
    planned = prepare(rule, Capacity(8, 8, 4, 10))
    table, lens, starts = (torch.zeros(size, dtype=torch.int32) for size in ((2, 3), 2, 3))
    for _ in range(2):
        planner.fill(planned.plan, table, lens, starts, UNLIMITED)
    assert {name: buffer.data_ptr() for name, buffer in planner._buffers.items()} == places


@pytest.mark.parametrize("capability", [90, *(pytest.param(other, marks=pytest.mark.compile) for other in (80, 100))])
def test_the_kernels_compile_for_cards(capability: int) -> None:
    """A group of one head has the most nodes."""
    report = compile_report("-m", REPORT, str(capability))
    assert len(report) == 17
    for name, used in report.items():
        assert used["registers"] > 16, name
        assert used["spilled"] <= (160 if name == "tiles_kernel 1" else 0), name
        assert used["shared"] <= 48 << 10, name
