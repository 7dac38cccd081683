"""Lazy update: a planner that has seen other batches plans as one that has seen none, and seldom rebuilds."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.workloads import random_forest, tree_batch
from trunkattn.analysis.trees import parse_tree
from trunkattn.config import POLICIES
from trunkattn.planner import planner as planner_module
from trunkattn.planner.check import check_plan
from trunkattn.planner.planner import Planned, Planner, StepTables
from trunkattn.planner.work_list import UNLIMITED

from .specs import make_batch, make_spec, random_spec

SPARE_COLUMNS = 3
EDITS = ("change_page", "add_row", "remove_row", "pad_row", "change_queries", "shrink", "change_window")
STEPS = ("grow", "grow", "grow", *EDITS)


@dataclass
class Requests:
    """Running requests as an engine holds them: every row has its pages, and a page is written by one row only."""

    rng: np.random.Generator
    page_size: int
    pages: list[list[int]]
    seq_lens: list[int]
    query_lens: list[int]
    columns: int
    window: int = UNLIMITED
    next_page: int = 10_000

    def batch(self) -> StepTables:
        """The block table, with new garbage after every row's pages."""
        table = self.rng.integers(-1, self.next_page, (len(self.pages), self.columns)).astype(np.int32)
        for row, pages in enumerate(self.pages):
            table[row, : len(pages)] = pages
        starts = np.cumsum([0, *self.query_lens], dtype=np.int32)
        return StepTables(table, np.array(self.seq_lens, np.int32), starts, self.window)

    def new_page(self) -> int:
        self.next_page += 1
        return self.next_page

    def some_row(self) -> int:
        return int(self.rng.integers(len(self.pages)))

    def grow(self) -> None:
        """Some rows get one to three tokens; a partly filled page that another row holds too is copied first."""
        for row in range(len(self.pages)):
            new_len = self.seq_lens[row] + int(self.rng.integers(1, 4))
            if self.rng.random() < 0.3 or -(-new_len // self.page_size) > self.columns:
                continue
            pages = self.pages[row]
            others = [other for i, other in enumerate(self.pages) if i != row]
            if self.seq_lens[row] % self.page_size and any(pages[-1] in other for other in others):
                pages[-1] = self.new_page()
            while len(pages) * self.page_size < new_len:
                pages.append(self.new_page())
            self.seq_lens[row] = new_len

    def change_page(self) -> None:
        row = self.some_row()
        if self.pages[row]:
            column = int(self.rng.integers(len(self.pages[row])))
            self.pages[row][column] = self.new_page()

    def add_row(self) -> None:
        """A new row, often with the prefix of another; it gets a place between the others."""
        prefix = self.pages[self.some_row()]
        shared = min(int(self.rng.integers(len(prefix) + 1)), self.columns - 1)
        at = int(self.rng.integers(len(self.pages) + 1))
        self.pages.insert(at, [*prefix[:shared], self.new_page()])
        self.seq_lens.insert(at, shared * self.page_size + int(self.rng.integers(1, self.page_size + 1)))
        self.query_lens.insert(at, 1)

    def remove_row(self) -> None:
        if len(self.pages) > 1:
            row = self.some_row()
            for values in (self.pages, self.seq_lens, self.query_lens):
                del values[row]

    def pad_row(self) -> None:
        self.query_lens[self.some_row()] = 0

    def change_queries(self) -> None:
        row = self.some_row()
        self.query_lens[row] = int(self.rng.integers(0, min(self.seq_lens[row], 5) + 1))

    def shrink(self) -> None:
        """A row loses tokens, as after rejected speculation, but no page and no query."""
        row = self.some_row()
        least = max((len(self.pages[row]) - 1) * self.page_size + 1, self.query_lens[row])
        self.seq_lens[row] = max(least, self.seq_lens[row] - int(self.rng.integers(1, 4)))

    def change_window(self) -> None:
        self.window = int(self.rng.integers(1, 100)) if self.window == UNLIMITED else UNLIMITED

    def step(self, name: str) -> None:
        getattr(self, name)()


def random_requests(rng: np.random.Generator, page_size: int) -> Requests:
    paged = random_forest(rng, page_size=page_size, max_requests=8, max_own_tokens=60, max_query_len=5)
    used = -(-paged.seq_lens // page_size)
    pages = [row[:count].tolist() for row, count in zip(paged.block_table, used, strict=True)] or [[0]]
    seq_lens, query_lens = paged.seq_lens.tolist() or [1], paged.query_lens.tolist() or [1]
    return Requests(rng, page_size, pages, seq_lens, query_lens, max(map(len, pages)) + SPARE_COLUMNS)


def assert_same_plan(found: Planned, expected: Planned) -> None:
    assert found.work.equals(expected.work)
    assert (found.policy, found.num_packs) == (expected.policy, expected.num_packs)
    batch = expected.batch
    used = -(-batch.seq_lens // expected.spec.page_size) * (np.diff(batch.query_start_loc) > 0)
    for row, count in enumerate(used):
        assert np.array_equal(found.batch.block_table[row, :count], batch.block_table[row, :count]), f"pages of {row}"


def snapshot(planned: Planned) -> list[np.ndarray]:
    work = planned.work
    return [a.copy() for a in (work.items, work.queries, work.partial_slots, work.merge_queries, work.merge_indptr)]


@pytest.mark.property
@given(
    seed=st.integers(0, 2**32 - 1),
    policy=st.sampled_from(POLICIES),
    page_size=st.sampled_from([1, 2, 3, 7, 16]),
    steps=st.lists(st.sampled_from(STEPS), min_size=1, max_size=15),
)
def test_a_patched_plan_equals_a_cold_one(seed: int, policy: str, page_size: int, steps: list[str]) -> None:
    rng = np.random.default_rng(seed)
    spec = random_spec(rng, policy, page_size)
    requests, planner = random_requests(rng, page_size), Planner(spec)
    plans = [planner.plan(requests.batch())]
    kept = [snapshot(plans[0])]
    for name in steps:
        requests.step(name)
        batch = requests.batch()
        found, expected = planner.plan(batch), Planner(spec).plan(batch)
        assert_same_plan(found, expected)
        plans.append(found)
        kept.append(snapshot(found))
    for planned, arrays in zip(plans, kept, strict=True):  # later steps change no earlier plan
        check_plan(planned)
        assert all(np.array_equal(a, b) for a, b in zip(snapshot(planned), arrays, strict=True))


class CountedBuilds:
    """Counts the forests built from a table."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        original = planner_module.build_forest

        def counted(*args: object) -> object:
            self.count += 1
            return original(*args)

        monkeypatch.setattr(planner_module, "build_forest", counted)


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> CountedBuilds:
    return CountedBuilds(monkeypatch)


def decode_steps(count: int) -> list[StepTables]:
    """Eight requests in two trees, page size 16, each a token longer in every step; the first has 1 private token."""
    paged = tree_batch(parse_tree("2,8_64,1"), 16)
    own = 1000 + np.arange(8 * 20, dtype=np.int32).reshape(8, 20)
    table = np.hstack([paged.block_table, own])
    return [StepTables(table, paged.seq_lens + step, paged.query_start_loc) for step in range(count)]


@pytest.mark.parametrize(("policy", "share_columns"), [*((policy, 1) for policy in POLICIES), ("auto", 2)])
def test_growing_tails_are_patched(policy: str, share_columns: int, builds: CountedBuilds) -> None:
    planner = Planner(make_spec(policy, 16, share_columns=share_columns))
    counts = []
    for batch in decode_steps(200):
        planner.plan(batch)
        counts.append(builds.count)
    # rebuilt once: when the first private pages, from token 64 to 80 or 96, are full, they could have been shared
    before = 16 * share_columns - 1
    assert counts == [1] * before + [2] * (200 - before)


def test_windows_of_one_step_share_a_forest(builds: CountedBuilds) -> None:
    planner, spec = Planner(make_spec("auto", 16)), make_spec("auto", 16)
    steps = [replace(batch, window=window) for batch in decode_steps(3) for window in (UNLIMITED, 20, 40, UNLIMITED)]
    found = [planner.plan(batch) for batch in steps]
    assert builds.count == 1
    for planned, batch in zip(found, steps, strict=True):
        assert planned.work.equals(Planner(spec).plan(batch).work)


def grown(batch: StepTables, row: int, tokens: int) -> StepTables:
    lens = batch.seq_lens.copy()
    lens[row] += tokens
    return replace(batch, seq_lens=lens)


def test_a_request_that_is_the_prefix_of_one_that_grows_is_patched(builds: CountedBuilds) -> None:
    first = make_batch([[1], [1, 2]], seq_lens=[16, 20])
    planner = Planner(make_spec("optimal", 16))
    planner.plan(first)
    assert_same_plan(planner.plan(grown(first, 1, 5)), Planner(make_spec("optimal", 16)).plan(grown(first, 1, 5)))
    assert builds.count == 2  # the other planner's is one of them


def test_a_request_that_leaves_what_it_shared_rebuilds(builds: CountedBuilds) -> None:
    first = make_batch([[1, 2], [1, 2]], seq_lens=[32, 32], columns=3)
    planner = Planner(make_spec("optimal", 16))
    planner.plan(first)
    planner.plan(grown(first, 1, 1))
    assert builds.count == 2


@pytest.mark.parametrize(
    ("share_columns", "rebuilt_at"), [(1, [4, 5, 8, 9, 12, 13, 16]), (2, [8, 9, 16]), (3, [12, 13])]
)
def test_a_request_that_grows_along_the_pages_of_another_one(
    share_columns: int, rebuilt_at: list[int], builds: CountedBuilds
) -> None:
    """It shares pages with that one in whole groups: a group that it fills becomes a node, and its leaf then begins
    anew."""
    spec = make_spec("cascade", 4, share_columns=share_columns)
    planner, rebuilt = Planner(spec), []
    for length in range(1, 17):
        batch, before = make_batch([[1, 2, 3, 4], [1, 2, 3, 4]], seq_lens=[length, 16]), builds.count
        found = planner.plan(batch)
        rebuilt += [length] if builds.count > before else []
        assert_same_plan(found, Planner(spec).plan(batch))
    assert rebuilt == [1, *rebuilt_at]


def test_fasttree_chooses_anew_when_a_tail_grows() -> None:
    # 60 query rows of one leaf, 4 of the other, 32 shared tokens: as long as the first leaf is far below a tile of 32
    # keys, less is padded if it reads the trunk itself
    first = make_batch([[*range(32), *range(40, 50)], [*range(32), 50]], query_lens=[15, 1], columns=60)
    planner = Planner(make_spec("fasttree"))
    packs = []
    for tokens in range(16):
        batch = grown(first, 0, tokens)
        found = planner.plan(batch)
        assert_same_plan(found, Planner(make_spec("fasttree")).plan(batch))
        packs.append(found.num_packs)
    assert set(packs) == {2, 3}


def test_auto_chooses_anew_when_a_window_slides() -> None:
    # sharing the trunk pays while enough of its 64 tokens are in the window
    planner, policies = Planner(make_spec("auto", 16)), []
    for batch in decode_steps(60):
        found = planner.plan(replace(batch, window=30))
        assert_same_plan(found, Planner(make_spec("auto", 16)).plan(replace(batch, window=30)))
        policies.append(found.policy)
    assert policies[0] == "optimal"
    assert "per_query" in policies


def test_tables_may_be_written_in_place() -> None:
    """As engines write theirs. The next plan sees every change, and earlier plans stay as they were."""
    spec, (batch,) = make_spec("cascade", 16), decode_steps(1)
    table, lens, starts = batch.block_table, batch.seq_lens, batch.query_start_loc
    planner, plans = Planner(spec), []
    for values, change in ((lens, 1), (lens, 16), (table[3, 1:2], 5000), (starts[4:], -1), (lens[5:6], -2)):
        plans.append(planner.plan(batch))
        assert_same_plan(plans[-1], Planner(spec).plan(batch))
        before = [planned.stats() for planned in plans]
        values += change
        assert_same_plan(planner.plan(batch), Planner(spec).plan(batch))
        assert [planned.stats() for planned in plans] == before
    for planned in plans:
        check_plan(planned)


@pytest.mark.parametrize("change", ["page", "fewer_tokens", "fewer_queries", "wider_table"])
def test_any_other_change_rebuilds(change: str, builds: CountedBuilds) -> None:
    first, grown = decode_steps(2)
    table, lens, starts = grown.block_table.copy(), grown.seq_lens.copy(), grown.query_start_loc.copy()
    if change == "page":
        table[3, 1] = 5000
    elif change == "fewer_tokens":
        lens[3] -= 2
    elif change == "fewer_queries":
        starts[4:] -= 1
    else:
        table = np.pad(table, ((0, 0), (0, 1)))
    planner = Planner(make_spec("pat", 16))
    planner.plan(first)
    planner.plan(StepTables(table, lens, starts))
    assert builds.count == 2
