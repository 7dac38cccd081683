"""Planner specifications and hand-made batches for the planner's tests."""

import numpy as np

from benchmarks.workloads import PagedBatch
from trunkattn.planner.packs.cost import CostModel
from trunkattn.planner.planner import PlannerSpec, StepTables
from trunkattn.planner.prefix_forest import Forest, build_forest
from trunkattn.planner.splitting import SplitRule
from trunkattn.planner.work_list import UNLIMITED

MODEL = CostModel(kv_bytes=4096, partial_bytes=10_000, item_bytes=2000, queries_per_tile=64, group_size=4)
# One slot for many heads: nothing is cut to fill slots.
UNCUT = SplitRule(
    num_workers=1,
    num_kv_heads=1000,
    grid=16,
    above_mean=False,
    fixed_chunk=0,
    head_bytes=512,
    row_bytes=8,
    row_unit=16,
    group_size=4,
)


def make_spec(
    policy: str, page_size: int = 1, *, model: CostModel = MODEL, rule: SplitRule = UNCUT, share_columns: int = 1
) -> PlannerSpec:
    return PlannerSpec(page_size, policy, model, rule, share_columns)


def random_spec(rng: np.random.Generator, policy: str, page_size: int) -> PlannerSpec:
    """Small tiles, small grids and every way of cutting, so that a small batch meets them all."""
    invariant = rng.random() < 0.3
    columns = int(rng.integers(1, 4)) if invariant else 1
    model = MODEL._replace(
        partial_bytes=int(rng.choice([10, 1000, 100_000])), queries_per_tile=int(rng.choice([1, 2, 5, 16, 64]))
    )
    rule = UNCUT._replace(
        num_workers=int(rng.choice([1, 2, 16, 132])),
        num_kv_heads=int(rng.choice([1, 2, 8])),
        grid=int(rng.choice([1, 16, 64])),
        above_mean=bool(rng.random() < 0.5),
        fixed_chunk=columns * page_size if invariant else 0,
    )
    return make_spec(policy, page_size, model=model, rule=rule, share_columns=columns)


def as_batch(paged: PagedBatch, window: int = UNLIMITED) -> StepTables:
    return StepTables(paged.block_table, paged.seq_lens, paged.query_start_loc, window)


def make_batch(
    rows: list[list[int]],
    seq_lens: list[int] | None = None,
    query_lens: list[int] | None = None,
    *,
    columns: int = 0,
    window: int = UNLIMITED,
) -> StepTables:
    """A batch from the page ids of each row. By default pages hold one token, queries one, and stale columns hold 0."""
    lens = [len(row) for row in rows] if seq_lens is None else seq_lens
    table = np.zeros((len(rows), max([columns, *map(len, rows)])), np.int32)
    for row, pages in enumerate(rows):
        table[row, : len(pages)] = pages
    queries = [1] * len(rows) if query_lens is None else query_lens
    return StepTables(table, np.array(lens, np.int32), np.cumsum([0, *queries], dtype=np.int32), window)


def forest_of(batch: StepTables, page_size: int = 1, share_columns: int = 1) -> Forest:
    query_lens = np.diff(batch.query_start_loc).astype(np.int32)
    return Forest(*build_forest(batch.block_table, batch.seq_lens, query_lens, page_size, share_columns))
