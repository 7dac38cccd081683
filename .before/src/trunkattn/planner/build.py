"""The planner: cold build, and lazy update while only private tails grow (PAT §5.1 "Lazy Update")."""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np
from numba import njit
from numpy.typing import NDArray

from trunkattn.plan_format import KV_END, KV_START, PlanStats, WorkList
from trunkattn.planner import packing
from trunkattn.planner.cost_model import CostModel
from trunkattn.planner.forest import Forest, build_forest
from trunkattn.planner.optimal import count_states, optimal
from trunkattn.planner.splitting import UNLIMITED, SplitRule, emit, part_length, row_tiles

Int32Array = NDArray[np.int32]
Starts = NDArray[np.int32]

HEURISTICS: Final = MappingProxyType(
    {
        "per_query": packing.per_query,
        "relay": packing.relay,
        "cascade": packing.cascade,
        "pat": packing.pat,
        "fasttree": packing.fasttree,
    }
)
POLICIES: Final = (*HEURISTICS, "optimal", "auto")
_DEPENDS_ON_TAILS: Final = frozenset({"fasttree"})  # its choice moves with the length of a leaf
_CHEAP: Final = ("per_query", "relay", "cascade", "pat")  # what `auto` and `optimal` compare with
MAX_STATES: Final = MappingProxyType({"auto": 1 << 14, "optimal": 1 << 22})  # at 35 ns each: 0.6 ms, 0.15 s


@dataclass(frozen=True)
class PlannerSpec:
    """Everything a plan depends on besides the batch. `share_columns`: unit of sharing, in columns."""

    page_size: int
    policy: str
    model: CostModel
    rule: SplitRule
    share_columns: int = 1
    tile_name: str = "cpu"


@dataclass(frozen=True)
class Batch:
    """One step: block_table [num_requests, max_pages], seq_lens [num_requests], query_start_loc [num_requests + 1]."""

    block_table: Int32Array
    seq_lens: Int32Array
    query_start_loc: Int32Array
    window: int = UNLIMITED  # sliding window in tokens, the current one included


@dataclass(frozen=True)
class Planned:
    """A work list, the pages it was made for (a copy) and what `stats` needs."""

    work: WorkList
    batch: Batch
    num_packs: int
    policy: str
    reason: str
    spec: PlannerSpec

    def stats(self) -> PlanStats:
        """See PlanStats."""
        items = self.work.items
        read = int((items[:, KV_END].astype(np.int64) - items[:, KV_START]).sum())
        batch, per_tile = self.batch, self.spec.model.queries_per_tile
        alone = int(tokens_per_query(batch.seq_lens, batch.query_start_loc, batch.window, per_tile))
        tiles = {self.spec.tile_name: len(items)}
        return PlanStats(read, alone, self.num_packs, len(items), tiles, self.policy, self.reason)


@dataclass
class _Last:
    """The last cold build, and the tails as they are now."""

    batch: Batch
    query_lens: Int32Array
    forest: Forest
    starts: dict[int, tuple[Starts, str, str]]  # by window: start, policy, reason


class Planner:
    """Plans one step at a time; remembers the last forest so that a growing batch is patched, not rebuilt."""

    def __init__(self, spec: PlannerSpec) -> None:
        self.spec = spec
        self._last: _Last | None = None

    def forget(self) -> None:
        """Makes the next plan a cold one: what was planned last was not used."""
        self._last = None

    def plan(self, batch: Batch, changed_rows: Int32Array | None = None) -> Planned:
        """Work list of a validated batch; equal, bit for bit, to that of a planner that never saw another batch.

        `changed_rows`: the rows of which pages planned before may have changed; None: look at all of them.
        """
        last = self._update(batch, changed_rows)
        if batch.window not in last.starts:
            last.starts[batch.window] = self._choose(last, batch)
        start, policy, reason = last.starts[batch.window]
        if policy in _DEPENDS_ON_TAILS or batch.window != UNLIMITED:
            del last.starts[batch.window]
        packs, work = _assemble(last.forest, start, batch, self.spec)
        kept = Batch(last.batch.block_table, batch.seq_lens.copy(), batch.query_start_loc.copy(), batch.window)
        return Planned(work, kept, len(packs.kv_row), policy, reason, self.spec)

    def forest(self, batch: Batch, changed_rows: Int32Array | None = None) -> tuple[Forest, Int32Array]:
        """The prefix forest of a validated batch, and the block table it was made for."""
        last = self._update(batch, changed_rows)
        return last.forest, last.batch.block_table

    def _update(self, batch: Batch, changed_rows: Int32Array | None) -> _Last:
        last = self._last
        if last is None or not self._grown(last, batch, changed_rows):
            last = self._last = self._cold(batch)
        return last

    def _cold(self, batch: Batch) -> _Last:
        query_lens = np.diff(batch.query_start_loc).astype(np.int32)
        table = batch.block_table.copy()
        forest = build_forest(table, batch.seq_lens, query_lens, self.spec.page_size, self.spec.share_columns)
        kept = Batch(table, batch.seq_lens.copy(), batch.query_start_loc.copy())
        return _Last(kept, query_lens, Forest(*forest), {})

    def _grown(self, last: _Last, batch: Batch, changed_rows: Int32Array | None) -> bool:
        if batch.block_table.shape != last.batch.block_table.shape:
            return False
        rows = np.empty(0, np.int32) if changed_rows is None else changed_rows
        before = (last.batch.block_table, last.batch.seq_lens, last.batch.query_start_loc)
        after = (batch.block_table, batch.seq_lens, batch.query_start_loc)
        units = (self.spec.page_size, self.spec.share_columns)
        return bool(_grow(last.forest, before, after, (rows, changed_rows is None), units))

    def _choose(self, last: _Last, batch: Batch) -> tuple[Starts, str, str]:
        """The packing, the policy that made it, and why."""
        forest, spec = last.forest, self.spec
        queries = packing.queries_below(forest, last.query_lens)
        if spec.policy in HEURISTICS:
            return HEURISTICS[spec.policy](forest, queries, spec.model), spec.policy, "as configured"
        if bool(forest.is_leaf.all()):
            return packing.per_query(forest, queries, spec.model), "per_query", "no two requests share a full page"
        lowest = _lowest_token(batch)
        found = {name: HEURISTICS[name](forest, queries, spec.model) for name in _CHEAP}
        states = int(count_states(forest))
        within = states <= MAX_STATES[spec.policy]
        if within:
            found = {"optimal": optimal(forest, queries, spec.model), **found}
        costs = {name: _cost(forest, start, lowest, last.query_lens, spec.model) for name, start in found.items()}
        name = min(costs, key=lambda candidate: costs[candidate])
        reason = f"least predicted cost: {_list_costs(costs)}"
        if not within:
            reason += f"; optimal left out: {states} states, {MAX_STATES[spec.policy]} allowed"
        return found[name], name, reason


def _list_costs(costs: dict[str, int]) -> str:
    return ", ".join(f"{name} {cost / 1e6:.3g} MB" for name, cost in costs.items())


def _cost(forest: Forest, start: Starts, lowest: Int32Array, query_lens: Int32Array, model: CostModel) -> int:
    return int(packing.packing_cost(packing.collect_packs(forest, start, lowest), query_lens, model))


def _lowest_token(batch: Batch) -> Int32Array:
    """[num_requests] the first token that any of a request's query tokens sees."""
    first_query = batch.seq_lens.astype(np.int64) - np.diff(batch.query_start_loc)
    return np.maximum(first_query + 1 - batch.window, 0).astype(np.int32)


def _assemble(forest: Forest, start: Starts, batch: Batch, spec: PlannerSpec) -> tuple[packing.Packs, WorkList]:
    packs, *arrays = _assemble_arrays(
        forest, start, (batch.seq_lens, batch.query_start_loc, batch.window), spec.model.queries_per_tile, spec.rule
    )
    return packs, WorkList(*arrays)


@njit(cache=True)
def _assemble_arrays(forest, start, batch, queries_per_tile, rule):
    seq_lens, query_start_loc, window = batch
    lowest = np.zeros(len(seq_lens), np.int32)
    if window != UNLIMITED:
        for row in range(len(seq_lens)):
            first_query = seq_lens[row] - (query_start_loc[row + 1] - query_start_loc[row])
            lowest[row] = max(0, first_query + 1 - window)
    packs = packing.collect_packs(forest, start, lowest)
    tiles, query, position = row_tiles(packs, query_start_loc, seq_lens, window, queries_per_tile)
    parts = part_length(rule, tiles)
    return (packs, *emit(packs, tiles, parts, query, position, window, rule, query_start_loc[-1]))


@njit(cache=True)
def _grow(forest, old, new, changed, units):
    """True, with the old table and the leaves brought up to date, if nothing but private tails grew."""
    old_table, old_lens, old_loc = old
    table, seq_lens, query_start_loc = new
    rows, all_rows = changed
    page_size, share_columns = units
    for r in range(len(seq_lens)):
        if query_start_loc[r + 1] - query_start_loc[r] != old_loc[r + 1] - old_loc[r]:
            return False
    look = np.full(len(seq_lens), all_rows)
    for i in range(len(rows)):
        look[rows[i]] = True
    for i in range(len(forest.order)):
        row, leaf = forest.order[i], forest.leaf_of[i]
        if seq_lens[row] < old_lens[row]:
            return False
        if seq_lens[row] > old_lens[row]:
            if forest.token_start[leaf] == old_lens[row]:
                return False  # an empty leaf is no longer empty
            first = forest.token_start[leaf] // page_size
            was_shareable = old_lens[row] // page_size // share_columns * share_columns > first
            if not was_shareable and seq_lens[row] // page_size // share_columns * share_columns > first:
                return False  # the leaf's first block is full now: another row may hold the same one
        if look[row]:
            differs = np.int32(0)  # no early exit: the loop is vectorised
            for col in range((old_lens[row] + page_size - 1) // page_size):
                differs |= table[row, col] ^ old_table[row, col]
            if differs != 0:
                return False
    for i in range(len(forest.order)):
        row, leaf = forest.order[i], forest.leaf_of[i]
        if seq_lens[row] > old_lens[row]:
            first, last = (old_lens[row] + page_size - 1) // page_size, (seq_lens[row] + page_size - 1) // page_size
            for col in range(first, last):
                old_table[row, col] = table[row, col]
            old_lens[row] = seq_lens[row]
            forest.token_end[leaf] = seq_lens[row]
    return True


@njit(cache=True)
def tokens_per_query(seq_lens, query_start_loc, window, queries_per_tile):
    """KV tokens that one pack per request would read."""
    tokens = np.int64(0)
    for row in range(len(seq_lens)):
        first, last = query_start_loc[row], query_start_loc[row + 1]
        for tile in range(first, last, queries_per_tile):
            stop = min(tile + queries_per_tile, last)
            tokens += seq_lens[row] - last + stop - max(0, seq_lens[row] - last + tile + 1 - window)
    return tokens
