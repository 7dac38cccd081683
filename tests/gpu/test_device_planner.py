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
from trunkattn.gpu.device_planner.planner import DevicePlanner
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
from .device_cases import CANDIDATES, capacity_for, prepare, some_candidates
from .kernel_cases import make_card

pytestmark = pytest.mark.slow

REPORT = "tests.gpu.device_report"


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
def test_pages_of_hybrid_models_are_planned_as_on_the_host(page_size: int) -> None:
    batch = as_batch(tree_batch(parse_tree(f"1,2,6_{page_size},{page_size},37"), page_size, row_seed=0, page_seed=1))
    planned = prepare(make_rule(8, page_size, 16), capacity_for(batch))
    planned.fill(batch)
    assert planned.errors == []
    planned.assert_equals_host(batch)


@pytest.mark.parametrize("candidate", range(len(CANDIDATES)), ids=CANDIDATES)
def test_every_tiling_of_a_small_tree_is_planned_as_on_the_host(candidate: int) -> None:
    """12 requests of 4 heads, of which 6 and 12 share; several items of a tile, and several tiles of a node. Fine cuts
    are of 16 multiprocessors, the others of 16 and of one in turn."""
    num_sms = 16 if CANDIDATES[candidate].endswith(" fine") or candidate % 2 else 1
    planned = prepare(make_rule(4, 16, num_sms, num_kv_heads=2), capacity_for(TREE_BATCH), candidate)
    planned.fill(TREE_BATCH)
    planned.assert_equals_host(TREE_BATCH)


@pytest.mark.parametrize("bytes_per_us, l2_bytes", [(1000, 50 << 20), (60_000_000, 50 << 20), (1000, 1 << 16)])
def test_times_that_memory_or_the_l2_cache_decide_are_those_of_the_host(bytes_per_us: int, l2_bytes: int) -> None:
    """A small cache holds 64 tokens, fewer than tiles share; some requests have several query tokens and a window."""
    batch = TREE_BATCH
    if l2_bytes < 50 << 20:
        starts = np.cumsum([0, 4, 1, 3, 9, 1, 1, 6, 1, 1, 20, 2, 2], dtype=np.int32)
        batch = replace(TREE_BATCH, query_start_loc=starts, window=100)
    rule = make_rule(4, 16, 16, num_kv_heads=2, l2_bytes=l2_bytes)
    card_times = CARD_TIMES._replace(bytes_per_us=bytes_per_us)
    planned = prepare(replace(rule, card_times=card_times), capacity_for(batch))
    planned.fill(batch)
    planned.assert_equals_host(batch)


def test_a_trunk_of_more_rows_than_a_block_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """More requests and columns than one pass of any kernel takes, and as many as the capacity has."""
    for name in ("_PAIRS", "_BLOCK", "_HASHED"):
        monkeypatch.setattr(device_candidates, name, 32)
    monkeypatch.setattr(device_candidates, "_CANDIDATE_BLOCK", 8)
    batch = as_batch(tree_batch(parse_tree("1,2,40_32,16,20"), 1, row_seed=1, page_seed=1))
    planned = prepare(make_rule(4, 1, 16), capacity_for(batch, spare=0))
    planned.fill(batch)
    planned.assert_equals_host(batch)


def test_two_lowest_tiles_may_have_one_height() -> None:
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


def test_an_item_merges_only_for_queries_that_it_holds() -> None:
    """Seven of 20 requests end with the trunk, which is cut. Four of these stand at the edge of a low tile, whose item
    reads only what others have left of theirs."""
    trunk = [*range(1, 17)]
    batch = make_batch([[*trunk, 20 + row] for row in range(20)], [256 if row % 3 == 1 else 265 for row in range(20)])
    planned = prepare(make_rule(4, 16, 16, num_kv_heads=2), capacity_for(batch), CANDIDATES.index("64x64+16x64 fine"))
    planned.fill(batch)
    planned.assert_equals_host(batch)
    assert planned.plan.arrays["merge_queries"][:4].tolist() == [4, 7, 16, 19]


@pytest.mark.parametrize("name", [None, "64x64+16x64 fine"])
def test_a_larger_batch_before_leaves_no_trace(name: str | None) -> None:
    """By the tiling that is best, and by one of two launches, the second of which merges what the first leaves."""
    rule, candidate = make_rule(4, 16, 16, num_kv_heads=2), None if name is None else CANDIDATES.index(name)
    larger = as_batch(tree_batch(parse_tree("1,2,36_64,32,20"), 16, row_seed=0, page_seed=1))
    planned = prepare(rule, capacity_for(larger, spare=0), candidate)
    for batch in (larger, TREE_BATCH):
        planned.fill(batch)
        planned.assert_equals_host(batch)


def test_rows_that_agree_only_behind_the_columns_hashed_at_once_are_planned_as_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or that have the same pages in another order. All columns of the capacity are used, whose number is a power of
    the parts into which the search divides them."""
    monkeypatch.setattr(device_candidates, "_HASHED", 4)
    row = [*range(1, 10)]
    assert len(row) == device_candidates._RADIX
    batch = make_batch([row, [20, *row[1:]], [*row[:5], 30, *row[6:]], [2, 1, *row[2:]], row])
    planned = prepare(make_rule(4, 1, 16), capacity_for(batch, spare=0), CANDIDATES.index("64x64"))
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
    """In the caller's tensors, with any length and pages, and beyond them; an empty batch empties the plan."""
    batch = make_batch([[1, 2, 3], [1, 2, 4], [1, 2, 4], [1, 2]], [3, 5000, 3, 2], query_lens=[1, 0, 1, 0], columns=5)
    rule = make_rule(4, 1, 1)
    planned = prepare(rule, capacity_for(batch, spare=6))
    planned.fill(batch)
    assert planned.errors == []
    planned.assert_equals_host(batch)
    assert planned.plan.arrays["counts"][2 * len(rule.tiles)] > 0
    for empty in (make_batch([]), make_batch([[], []], query_lens=[0, 0])):
        planned.fill(empty)
        assert not planned.plan.arrays["counts"][: 2 * len(rule.tiles) + 2].any()
        planned.assert_guarded()


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
