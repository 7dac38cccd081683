"""Packing policies on hand-computed forests, and `optimal` against all of them on random ones."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.workloads import random_forest
from trunkattn.planner import planner
from trunkattn.planner.device import DeviceModel
from trunkattn.planner.packs import policies as packing
from trunkattn.planner.packs.cost import CostModel, cost_model, partial_cost, read_cost
from trunkattn.planner.packs.optimal import count_states, optimal
from trunkattn.planner.planner import HEURISTICS, Planner, StepTables
from trunkattn.planner.prefix_forest import ROOT, Forest

from ..attention.cases import fraction
from .specs import MODEL, as_batch, forest_of, make_batch, make_spec

ONE_TILE = 1 << 20  # queries


def trunk_of(*pages: tuple[int, int]) -> list[int]:
    """Page ids of one row from ranges (first page, count)."""
    return [page for first, count in pages for page in range(first, first + count)]


def starts(policy: str, batch: StepTables, model: CostModel = MODEL) -> list[int]:
    forest = forest_of(batch)
    queries = packing.queries_below(forest, np.diff(batch.query_start_loc))
    return HEURISTICS[policy](forest, queries, model).tolist()


def packs(
    start: list[int], batch: StepTables, lowest: list[int] | None = None
) -> list[tuple[int, int, int, list[int]]]:
    """(row with the pages, first token, one past the last, rows) of each pack."""
    forest = forest_of(batch)
    first = np.zeros(len(batch.seq_lens), np.int32) if lowest is None else np.array(lowest, np.int32)
    found = packing.collect_packs(forest, np.array(start, np.int32), first)
    rows = [found.rows[a:b].tolist() for a, b in zip(found.row_indptr[:-1], found.row_indptr[1:], strict=True)]
    return list(zip(found.kv_row.tolist(), found.token_start.tolist(), found.token_end.tolist(), rows, strict=True))


# Nodes: 0 [0, 8) of all rows; 1 [8, 12) of rows 0 and 1; 2, 3 their leaves [12, 15); 4 row 2's leaf [8, 11).
TWO_LEVELS = make_batch(
    [trunk_of((0, 8), (20, 4), (30, 3)), trunk_of((0, 8), (20, 4), (40, 3)), trunk_of((0, 8), (50, 3))]
)
# Two trees: rows 0 and 1 share [0, 2), row 2 stands alone.
TWO_TREES = make_batch([[1, 2, 3], [1, 2, 4], [5, 6]])


def test_queries_below_counts_query_tokens_not_rows() -> None:
    batch = make_batch([[1, 2], [1, 3], [4]], seq_lens=[2, 2, 1], query_lens=[2, 1, 1])
    assert packing.queries_below(forest_of(batch), np.array([2, 1, 1])).tolist() == [3, 2, 1, 1]


def test_per_query_reads_each_request_from_its_start() -> None:
    assert starts("per_query", TWO_LEVELS) == [ROOT] * 5
    assert packs([ROOT] * 5, TWO_LEVELS) == [(0, 0, 15, [0]), (1, 0, 15, [1]), (2, 0, 11, [2])]


def test_cascade_reads_every_node_alone() -> None:
    assert starts("cascade", TWO_LEVELS) == [ROOT, 0, 1, 1, 0]
    assert packs([ROOT, 0, 1, 1, 0], TWO_LEVELS) == [
        (0, 0, 8, [0, 1, 2]),
        (0, 8, 12, [0, 1]),
        (0, 12, 15, [0]),
        (1, 12, 15, [1]),
        (2, 8, 11, [2]),
    ]


def test_relay_shares_what_all_requests_share() -> None:
    assert starts("relay", TWO_LEVELS) == [ROOT, ROOT, 0, 0, 0]
    assert packs([ROOT, ROOT, 0, 0, 0], TWO_LEVELS) == [
        (0, 0, 8, [0, 1, 2]),
        (0, 8, 15, [0]),
        (1, 8, 15, [1]),
        (2, 8, 11, [2]),
    ]


def test_relay_shares_nothing_between_several_trees() -> None:
    assert starts("relay", TWO_TREES) == [ROOT] * 4


def test_relay_of_one_request_is_one_pack() -> None:
    assert starts("relay", make_batch([[1, 2]])) == [ROOT]


def test_pat_merges_at_exactly_four_queries_per_token() -> None:
    # node 1: 4 · 2 >= 8, so its two rows read the trunk themselves; row 2: 4 · 1 < 8
    assert starts("pat", TWO_LEVELS) == [ROOT, ROOT, 1, 1, 0]


def test_pat_counts_the_tokens_carried_from_merged_ancestors() -> None:
    # a trunk of 5 tokens, then 3 that rows 0 and 1 share: 4 · 2 >= 5 merges node 1, which then carries 8 tokens
    batch = make_batch([trunk_of((0, 5), (20, 3), (30, 1)), trunk_of((0, 5), (20, 3), (40, 1)), trunk_of((0, 5))])
    assert starts("pat", batch) == [ROOT, ROOT, 1, 1, 0]
    # without carrying, 3 tokens of its own would merge the leaves: 4 · 1 >= 3
    assert starts("pat", make_batch([[20, 21, 22, 30], [20, 21, 22, 40]])) == [ROOT, ROOT, ROOT]


def test_pat_carries_only_own_tokens_after_a_cut() -> None:
    # 4 · 2 < 9: the trunk stays; node 1 then carries its own 4 tokens only, and 4 · 1 >= 4 merges the leaves
    batch = make_batch([trunk_of((0, 9), (20, 4), (30, 1)), trunk_of((0, 9), (20, 4), (40, 1)), trunk_of((0, 9))])
    assert starts("pat", batch) == [ROOT, 0, 0, 0, 0]


def test_pat_counts_query_tokens() -> None:
    batch = make_batch([trunk_of((0, 8), (20, 2)), trunk_of((0, 8), (30, 2))], query_lens=[2, 1])
    assert starts("pat", batch) == [ROOT, ROOT, 0]


def test_fasttree_merges_a_row_that_spills_into_another_tile() -> None:
    # 17 rows need a tile of 64: 66 · 47 · 100 for the trunk. Once one row left, 16 fit a tile of 16 exactly.
    rows = [trunk_of((0, 100), (1000 * (i + 1), 10)) for i in range(17)]
    assert starts("fasttree", make_batch(rows), MODEL._replace(group_size=1)) == [ROOT, ROOT, *[0] * 16]


def test_fasttree_cuts_where_both_sides_would_be_padded() -> None:
    rows = [trunk_of((0, 100), (1000 * (i + 1), 10)) for i in range(2)]
    assert starts("fasttree", make_batch(rows), MODEL._replace(group_size=1)) == [ROOT, 0, 0]


def fasttree_by_definition(forest: Forest, queries: np.ndarray, group_size: int) -> list[int]:
    """The rule with the weights that FastTree publishes: a child that takes its parent's tokens and its own queries
    away from it, or leaves both there."""

    def padding(rows: int, keys: int) -> Fraction:
        tile = 64 if rows > 16 else 16
        return Fraction("0.66") * (-rows % tile) * keys + Fraction("0.33") * max(0, 32 - keys) * rows

    tokens, start = (forest.token_end - forest.token_start).tolist(), forest.parent.tolist()
    left = (queries * group_size).tolist()
    for node, up in enumerate(forest.parent.tolist()):
        if up != ROOT:
            own = left[node]
            apart = padding(left[up], tokens[up]) + padding(own, tokens[node]) + Fraction("0.1") * own / group_size
            if apart > padding(left[up] - own, tokens[up]) + padding(own, tokens[node] + tokens[up]):
                start[node] = start[up]
                tokens[node] += tokens[up]
                left[up] -= own
    return start


@settings(max_examples=fraction(5))
@pytest.mark.property
@given(seed=st.integers(0, 2**32 - 1), group_size=st.sampled_from([1, 2, 4, 16]))
def test_fasttree_is_its_definition(seed: int, group_size: int) -> None:
    """Forests of small trees of two levels of sharing, in which a hundredth often decides."""
    rng = np.random.default_rng(seed)
    unused = iter(range(1, 1 << 20))
    rows: list[list[int]] = []

    def pages(most: int) -> list[int]:
        return [next(unused) for _ in range(rng.integers(1, most + 1))]

    for _ in range(40):
        trunk, most = pages(int(rng.choice([2, 40]))), int(rng.choice([2, 40]))
        for _ in range(rng.integers(1, 4)):
            branch = trunk + pages(most)
            rows += [branch + pages(most) for _ in range(rng.integers(1, int(rng.choice([3, 19]))))]
    batch = make_batch(rows, query_lens=rng.integers(1, int(rng.choice([2, 6])), len(rows)).tolist())
    forest = forest_of(batch)
    queries = packing.queries_below(forest, np.diff(batch.query_start_loc))
    given_queries = queries.copy()
    found = packing.fasttree(forest, queries, MODEL._replace(group_size=group_size))
    assert found.tolist() == fasttree_by_definition(forest, queries, group_size)
    assert np.array_equal(queries, given_queries)


@pytest.mark.parametrize(("trunk", "own", "group_size", "start"), [(11, 28, 2, ROOT), (6, 31, 1, 0)])
def test_fasttree_decides_by_hundredths(trunk: int, own: int, group_size: int, start: int) -> None:
    """A request of seven queries leaves a trunk that costs 0.04 more apart, and stays where it costs 0.29 less."""
    batch = make_batch([trunk_of((0, trunk), (100, own)), trunk_of((0, trunk), (200, 9))], query_lens=[7, 1])
    assert starts("fasttree", batch, MODEL._replace(group_size=group_size))[1] == start


def test_fasttree_stays_where_both_cost_the_same() -> None:
    batch = make_batch([trunk_of((0, 23), (100, 19)), trunk_of((0, 23), (200, 9))], query_lens=[33, 1])
    assert starts("fasttree", batch, MODEL._replace(group_size=1))[1] == 0


def test_a_pack_starts_at_the_first_token_that_one_of_its_rows_sees() -> None:
    lowest = [10, 14, 3]
    assert packs([ROOT, 0, 1, 1, 0], TWO_LEVELS, lowest) == [
        (2, 3, 8, [2]),
        (0, 10, 12, [0]),
        (0, 12, 15, [0]),
        (1, 14, 15, [1]),
        (2, 8, 11, [2]),
    ]


def test_empty_leaves_read_nothing() -> None:
    batch = make_batch([[1, 2], [1, 2], [1, 2, 3]])
    assert packs(starts("cascade", batch), batch) == [(0, 0, 2, [0, 1, 2]), (2, 2, 3, [2])]


def test_the_cost_model_of_an_attention() -> None:
    device = DeviceModel("test", 512, 16, 2, 16_384, 25, False, 256)
    assert cost_model(device, 32, 8, 128 + 64, 64, 2) == CostModel(
        kv_bytes=8 * 192 * 2, partial_bytes=32 * 65 * 4 * 2, item_bytes=8 * 16_384, queries_per_tile=128, group_size=4
    )
    assert cost_model(device, 1024, 1, 128, 64, 2).queries_per_tile == 1


def test_the_cost_of_a_packing() -> None:
    model = CostModel(kv_bytes=100, partial_bytes=7, item_bytes=1000, queries_per_tile=2, group_size=1)
    assert read_cost(model, 5, 3) == read_cost(model, 5, 4) == 2 * (500 + 1000)
    assert (partial_cost(model, 1, 3), partial_cost(model, 2, 3)) == (0, 42)
    # the trunk needs two tiles; all three rows have two pieces
    start = np.array([ROOT, ROOT, 0, 0, 0], np.int32)
    ones, zeros = np.ones(3, np.int32), np.zeros(3, np.int32)
    expected = 2 * (800 + 1000) + (700 + 1000) * 2 + (300 + 1000) + 3 * 2 * 7
    assert packing.packing_cost(forest_of(TWO_LEVELS), start, zeros, ones, model) == expected


@pytest.mark.property
@given(seed=st.integers(0, 2**32 - 1), page_size=st.integers(1, 32))
def test_the_cost_of_a_packing_is_that_of_its_packs(seed: int, page_size: int) -> None:
    """Each pack is read once, and each row has a partial for every pack that lists it, under any window."""
    rng = np.random.default_rng(seed)
    paged = random_forest(rng, page_size=page_size, max_requests=20)
    model = random_model(rng)._replace(queries_per_tile=int(rng.choice([1, 4, 64])))
    forest, lens = forest_of(as_batch(paged), page_size), paged.query_lens
    lowest = np.minimum(rng.choice([0, 1, 20, 300], len(lens)), paged.seq_lens).astype(np.int32)
    queries = packing.queries_below(forest, lens)
    for start in [policy(forest, queries, model) for policy in HEURISTICS.values()]:
        found = packing.collect_packs(forest, start, lowest)
        packs_of = np.bincount(found.rows, minlength=len(lens))
        expected = sum(partial_cost(model, int(count), int(own)) for count, own in zip(packs_of, lens, strict=True))
        for pack, (begin, end) in enumerate(zip(found.token_start, found.token_end, strict=True)):
            readers = found.rows[found.row_indptr[pack] : found.row_indptr[pack + 1]]
            expected += read_cost(model, end - begin, lens[readers].sum())
        assert packing.packing_cost(forest, start, lowest, lens, model) == expected


def assert_optimal_is_least(forest: Forest, query_lens: np.ndarray, model: CostModel) -> None:
    queries = packing.queries_below(forest, query_lens)
    lowest = np.zeros(len(query_lens), np.int32)

    def cost(start: np.ndarray) -> int:
        return int(packing.packing_cost(forest, start, lowest, query_lens, model))

    least = cost(optimal(forest, queries, model))
    for name, policy in HEURISTICS.items():
        assert least <= cost(policy(forest, queries, model)), name


def random_model(rng: np.random.Generator) -> CostModel:
    return CostModel(
        kv_bytes=int(rng.choice([64, 512, 4096])),
        partial_bytes=int(rng.choice([8, 2064, 33_000])),
        item_bytes=int(rng.choice([0, 1000, 131_072])),
        queries_per_tile=ONE_TILE,
        group_size=int(rng.choice([1, 4, 8])),
    )


@pytest.mark.property
@given(seed=st.integers(0, 2**32 - 1), page_size=st.integers(1, 128))
def test_optimal_is_never_dearer(seed: int, page_size: int) -> None:
    rng = np.random.default_rng(seed)
    paged = random_forest(rng, page_size=page_size, max_requests=20)
    forest = forest_of(as_batch(paged), page_size)
    assert count_states(forest) < 1 << 20
    assert_optimal_is_least(forest, paged.query_lens, random_model(rng))


def test_optimal_is_never_dearer_on_ten_thousand_forests() -> None:
    for seed in range(10_000):
        rng = np.random.default_rng(seed)
        paged = random_forest(rng, page_size=4, max_requests=8, max_own_tokens=40, max_query_len=3)
        assert_optimal_is_least(forest_of(as_batch(paged), 4), paged.query_lens, random_model(rng))


@pytest.mark.parametrize("policy", ["auto", "optimal"])
def test_a_planner_that_chooses_says_why(policy: str) -> None:
    alone = Planner(make_spec(policy)).plan(make_batch([[1, 2], [3]]))
    assert (alone.policy, alone.reason) == ("per_query", "no two requests share a full page")
    # sharing 5000 tokens of 4096 bytes between 8 requests saves 143 MB and costs 0.16 MB of partials
    shared = Planner(make_spec(policy)).plan(make_batch([trunk_of((0, 5000), (9000 + i, 1)) for i in range(8)]))
    assert shared.policy == "optimal"
    assert shared.reason.startswith("least predicted cost: optimal 20.7 MB, per_query 164 MB, relay 20.7 MB")
    assert (shared.num_packs, len(shared.work.items)) == (9, 9)


def test_a_forest_too_deep_for_optimal_is_planned_by_the_best_other_policy() -> None:
    rows = [trunk_of((0, 30 * (i + 1)), (10_000 + i, 1)) for i in range(40)]  # a chain: 2^39 ways above the last node
    found = Planner(make_spec("optimal")).plan(make_batch(rows))
    assert found.policy != "optimal"
    assert "optimal left out" in found.reason


def test_optimal_is_left_out_of_a_forest_with_more_states_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of TWO_LEVELS: 1 for the root, 2 for each of two nodes, 4 for each of two."""
    reasons = []
    for allowed in (12, 13):
        monkeypatch.setattr(planner, "MAX_STATES", {"optimal": allowed})
        reasons.append(Planner(make_spec("optimal")).plan(TWO_LEVELS).reason)
    assert (
        reasons[0].endswith("; optimal left out: 13 states, 12 allowed")
        and "least predicted cost: optimal" in reasons[1]
    )


def test_a_pack_before_all_windows_is_left_out() -> None:
    """The only query of each row sees its last 4 tokens, or one of the trunk, too."""
    batch = make_batch([trunk_of((0, 8), (20 * i, 4)) for i in (1, 2)], window=4)
    assert [Planner(make_spec("cascade")).plan(replace(batch, window=size)).num_packs for size in (4, 5)] == [2, 3]


def test_a_list_that_int32_does_not_count_is_refused() -> None:
    """Nothing of the batch is wrong, and any other policy lists each of its 2^31 - 2 query tokens once."""
    page = 1 << 20
    columns = np.arange(1024, dtype=np.int32)
    table = np.stack([columns, np.append(columns[:1], columns[1:] + 1024)])
    half = (1 << 30) - 1
    batch = StepTables(table, np.array([half, half], np.int32), np.array([0, half, 2 * half], np.int32))
    planner = Planner(make_spec("cascade", page))
    message = "policy='cascade' makes a work list of more than 2147483647 query tokens: expected a batch that is cut"
    with pytest.raises(ValueError, match=message):
        planner.plan(batch)


def test_a_work_list_that_no_memory_holds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*arguments: object) -> None:
        raise MemoryError

    planner = Planner(make_spec("auto"))
    with monkeypatch.context() as patch:
        patch.setattr("trunkattn.planner.planner._work_list_arrays", no_memory)
        message = "policy='auto' makes a work list for which there is no memory: expected fewer or shorter requests"
        with pytest.raises(ValueError, match=message):
            planner.plan(TWO_LEVELS)
    assert planner.plan(TWO_LEVELS).num_packs == 4
