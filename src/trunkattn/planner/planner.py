"""The planner: from the tables of a step to its work list.

    block table -> prefix forest -> packing -> packs -> pack tiles -> work items
                   prefix_forest    packs/             splitting

A decode step is nearly the one before it: every request has one token more, and now and then a new page of its own. As
long as nothing but such private tails has grown, the planner keeps its forest and packing and moves the ends of the
leaves. Anything else is planned from scratch. Both give the same bits.

Source: PAT, https://arxiv.org/abs/2511.22333, §5.1, "Lazy Update" for the patch.
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trunkattn.compiled import njit
from trunkattn.numerics import MAX_INT32
from trunkattn.planner.packs import policies
from trunkattn.planner.packs.cost import CostModel
from trunkattn.planner.packs.optimal import count_states, optimal
from trunkattn.planner.prefix_forest import Forest, build_forest
from trunkattn.planner.splitting import SplitRule, cut_packs, emit, split_tiles
from trunkattn.planner.work_list import KV_END, KV_START, UNLIMITED, PlanStats, WorkList

Int32Array = NDArray[np.int32]

HEURISTICS: Final = MappingProxyType(
    {
        "per_query": policies.per_query,
        "relay": policies.relay,
        "cascade": policies.cascade,
        "pat": policies.pat,
        "fasttree": policies.fasttree,
    }
)
_DEPENDS_ON_TAILS: Final = frozenset({"fasttree"})  # its choice moves with the length of a leaf
_COMPARED: Final = ("per_query", "relay", "cascade", "pat")  # what `auto` and `optimal` take the cheapest of
# The largest search for the optimum, in cases of `count_states`: under a millisecond for `auto`, well under a second
# for `optimal`, which was asked for.
MAX_STATES: Final = MappingProxyType({"auto": 1 << 14, "optimal": 1 << 22})
_MEGABYTE: Final = 1e6


@dataclass(frozen=True)
class PlannerSpec:
    """Everything a plan depends on besides the batch.

    share_columns: prefixes are shared in groups of this many columns of the block table. tile_name: the name of the
    planner's one tile in `stats.tiles`.
    """

    page_size: int
    policy: str
    model: CostModel
    rule: SplitRule
    share_columns: int = 1
    tile_name: str = "cpu"


@dataclass(frozen=True)
class StepTables:
    """The tables of one step.

    block_table [num_requests, max_pages], seq_lens [num_requests], query_start_loc [num_requests + 1]. window: the
    sliding window in tokens, the current one included.
    """

    block_table: Int32Array
    seq_lens: Int32Array
    query_start_loc: Int32Array
    window: int = UNLIMITED

    @property
    def query_positions(self) -> Int32Array:
        """[num_query_tokens] int32: each query token's place in its sequence."""
        positions = np.arange(self.query_start_loc[-1], dtype=np.int32)
        positions += np.repeat(self.seq_lens - self.query_start_loc[1:], np.diff(self.query_start_loc))
        return positions


@dataclass(frozen=True)
class Planned:
    """A work list, a copy of the tables that it was made for, and what `stats` needs."""

    work: WorkList
    batch: StepTables
    num_packs: int
    policy: str
    reason: str
    spec: PlannerSpec

    def stats(self) -> PlanStats:
        """Statistics of what the plan reads."""
        items, batch = self.work.items, self.batch
        tokens_read = int((items[:, KV_END].astype(np.int64) - items[:, KV_START]).sum())
        per_tile = self.spec.model.queries_per_tile
        tokens_unshared = int(tokens_per_query(batch.seq_lens, batch.query_start_loc, batch.window, per_tile))
        return PlanStats(
            kv_tokens_read=tokens_read,
            kv_tokens_per_query=tokens_unshared,
            num_packs=self.num_packs,
            num_work_items=len(items),
            tiles={self.spec.tile_name: len(items)},
            policy=self.policy,
            reason=self.reason,
        )


class _Packing(NamedTuple):
    """How a forest is packed (see `packs.policies`), by which policy, and why this policy was chosen."""

    start: Int32Array
    policy: str
    reason: str


class _Tables(NamedTuple):
    """The tables of a step, for compiled functions."""

    block_table: Int32Array
    seq_lens: Int32Array
    query_start_loc: Int32Array


@dataclass
class _Last:
    """The last forest that was built, with the tails as they are now, and its packing for each window."""

    tables: _Tables
    query_lens: Int32Array
    forest: Forest
    packings: dict[int, _Packing]


class Planner:
    """Plans one step at a time. It remembers the last forest, so that a growing batch is patched, not built again."""

    def __init__(self, spec: PlannerSpec) -> None:
        self.spec = spec
        self._last: _Last | None = None

    def plan(self, batch: StepTables) -> Planned:
        """The work list of a checked batch: the same bits as from a planner that has never seen another batch."""
        last = self._update(batch)
        if batch.window not in last.packings:
            last.packings[batch.window] = self._choose(last, batch)
        packing = last.packings[batch.window]
        if packing.policy in _DEPENDS_ON_TAILS or batch.window != UNLIMITED:
            del last.packings[batch.window]
        return _assemble(last, packing, batch, self.spec)

    def plan_unshared(self, batch: StepTables, spec: PlannerSpec, reason: str) -> Planned:
        """The work list, without any sharing, of the batch that was last planned or whose forest was last asked for.

        spec: its rule for splitting may differ from the planner's own.
        """
        assert self._last is not None, "plan_unshared needs a batch that was planned before"
        start = policies.per_query(self._last.forest, np.empty(0, np.int64), spec.model)
        return _assemble(self._last, _Packing(start, "per_query", reason), batch, spec)

    def forest(self, batch: StepTables) -> tuple[Forest, Int32Array]:
        """The prefix forest of a checked batch, and the copy of the block table that it was made for."""
        last = self._update(batch)
        return last.forest, last.tables.block_table

    def _update(self, batch: StepTables) -> _Last:
        last = self._last
        if last is None or not self._patched(last, batch):
            last = self._last = self._build(batch)
        return last

    def _build(self, batch: StepTables) -> _Last:
        query_lens = np.diff(batch.query_start_loc)
        tables = _Tables(batch.block_table.copy(), batch.seq_lens.copy(), batch.query_start_loc.copy())
        arrays = build_forest(
            tables.block_table, tables.seq_lens, query_lens, self.spec.page_size, self.spec.share_columns
        )
        return _Last(tables, query_lens, Forest(*arrays), {})

    def _patched(self, last: _Last, batch: StepTables) -> bool:
        if batch.block_table.shape != last.tables.block_table.shape:
            return False
        tables = _Tables(batch.block_table, batch.seq_lens, batch.query_start_loc)
        return bool(_grow_tails(last.forest, last.tables, tables, self.spec.page_size, self.spec.share_columns))

    def _choose(self, last: _Last, batch: StepTables) -> _Packing:
        """The packing of the configured policy; for `auto` the cheapest one."""
        forest, spec = last.forest, self.spec
        queries = policies.queries_below(forest, last.query_lens)
        if spec.policy in HEURISTICS:
            return _Packing(HEURISTICS[spec.policy](forest, queries, spec.model), spec.policy, "as configured")
        if bool(forest.is_leaf.all()):
            start = policies.per_query(forest, queries, spec.model)
            return _Packing(start, "per_query", "no two requests share a full page")
        found = {name: HEURISTICS[name](forest, queries, spec.model) for name in _COMPARED}
        states, allowed, left_out = int(count_states(forest)), MAX_STATES[spec.policy], ""
        if states > allowed:
            left_out = f"; optimal left out: {states} states, {allowed} allowed"
        else:  # first, so that it wins a tie
            found = {"optimal": optimal(forest, queries, spec.model), **found}
        first_visible = _first_visible(batch)
        costs = {
            name: int(policies.packing_cost(forest, start, first_visible, last.query_lens, spec.model))
            for name, start in found.items()
        }
        name = min(costs, key=lambda candidate: costs[candidate])
        listed = ", ".join(f"{name} {cost / _MEGABYTE:.3g} MB" for name, cost in costs.items())
        return _Packing(found[name], name, f"least predicted cost: {listed}{left_out}")


def _first_visible(batch: StepTables) -> Int32Array:
    """[num_requests] the first token of each request that any of its query tokens sees."""
    if batch.window == UNLIMITED:
        return np.zeros(len(batch.seq_lens), np.int32)
    first_query = batch.seq_lens.astype(np.int64) - np.diff(batch.query_start_loc)
    return np.maximum(first_query + 1 - batch.window, 0).astype(np.int32)


def too_large(policy: str, made: str) -> str:
    """The message for a batch that is too large under a policy. made: what the policy makes of it, and where there is
    no room for that."""
    fewer = "fewer or shorter requests" if policy == "auto" else "a batch that is cut into fewer pieces"
    other = "" if policy == "auto" else ", or policy='auto'"
    return f"policy={policy!r} makes {made}: expected {fewer}{other}"


def _assemble(last: _Last, packing: _Packing, batch: StepTables, spec: PlannerSpec) -> Planned:
    per_tile = spec.model.queries_per_tile
    try:
        arrays, num_packs = _work_list_arrays(
            last.forest,
            packing.start,
            _first_visible(batch),
            batch.seq_lens,
            batch.query_start_loc,
            batch.window,
            per_tile,
            spec.rule,
        )
        work = WorkList(*arrays)
        if len(work.queries) > MAX_INT32:
            raise OverflowError("query tokens of items")
    except MemoryError as error:
        raise ValueError(too_large(spec.policy, "a work list for which there is no memory")) from error
    except OverflowError as error:
        raise ValueError(too_large(spec.policy, f"a work list of more than {MAX_INT32} query tokens")) from error
    kept = StepTables(last.tables.block_table, batch.seq_lens.copy(), batch.query_start_loc.copy(), batch.window)
    return Planned(
        work=work,
        batch=kept,
        num_packs=num_packs,
        policy=packing.policy,
        reason=packing.reason,
        spec=spec,
    )


@njit
def _work_list_arrays(forest, start, first_visible, seq_lens, query_start_loc, window, queries_per_tile, rule):
    """The arrays of a WorkList, and the number of packs. This is one call for all steps, because arrays take time on
    their way between Python and compiled code."""
    packs = policies.collect_packs(forest, start, first_visible)
    tiles = cut_packs(packs, query_start_loc, seq_lens, window, queries_per_tile)
    splits = split_tiles(rule, tiles.tiles)
    return emit(packs, tiles, splits, window, rule, query_start_loc[-1]), len(packs.kv_row)


@njit
def _grow_tails(forest, old, new, page_size, share_columns):
    """Brings the forest and the old tables up to date and returns True if nothing but private tails has grown."""
    if not _only_tails_grew(forest, old, new, page_size, share_columns):
        return False
    order, leaf_of, token_end = forest.order, forest.leaf_of, forest.token_end
    old_table, old_lens, table, lens = old.block_table, old.seq_lens, new.block_table, new.seq_lens
    for i in range(len(order)):
        row = order[i]
        if lens[row] > old_lens[row]:
            first, last = (old_lens[row] + page_size - 1) // page_size, (lens[row] + page_size - 1) // page_size
            for col in range(first, last):
                old_table[row, col] = table[row, col]
            old_lens[row] = token_end[leaf_of[i]] = lens[row]
    return True


@njit(inline="always")
def _only_tails_grew(forest, old, new, page_size, share_columns):
    """Whether a new forest would have the same nodes, with nothing changed but the ends of some leaves."""
    order, leaf_of, token_start = forest.order, forest.leaf_of, forest.token_start
    old_table, old_lens, old_loc = old.block_table, old.seq_lens, old.query_start_loc
    table, lens, loc = new.block_table, new.seq_lens, new.query_start_loc
    for r in range(len(lens)):
        if loc[r + 1] - loc[r] != old_loc[r + 1] - old_loc[r]:
            return False
    for i in range(len(order)):
        row, begin = order[i], token_start[leaf_of[i]]
        if lens[row] < old_lens[row]:
            return False
        if lens[row] > old_lens[row]:
            if begin == old_lens[row]:
                return False  # an empty leaf is no longer empty
            first = begin // page_size
            was_shareable = old_lens[row] // page_size // share_columns * share_columns > first
            if not was_shareable and lens[row] // page_size // share_columns * share_columns > first:
                return False  # the leaf's first pages are full now: another row may hold the same ones
        differs = np.int32(0)  # no early exit, so that the loop is vectorised
        for col in range((old_lens[row] + page_size - 1) // page_size):
            differs |= table[row, col] ^ old_table[row, col]
        if differs != 0:
            return False
    return True


@njit
def tokens_per_query(seq_lens, query_start_loc, window, queries_per_tile):
    """KV tokens that the batch would read if nothing were shared: one pack per request, in tiles of the same height."""
    tokens = np.int64(0)
    for row in range(len(seq_lens)):
        first, last = query_start_loc[row], query_start_loc[row + 1]
        for begin in range(first, last, queries_per_tile):
            end = min(begin + queries_per_tile, last)
            tokens += seq_lens[row] - last + end - max(0, seq_lens[row] - last + begin + 1 - window)
    return tokens
