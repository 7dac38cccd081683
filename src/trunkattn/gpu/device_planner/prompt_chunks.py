"""Prompt chunks in a plan that is made on the device. The host knows their lengths and lists their items. Their pages
and the decodes' tiles never leave the device.

An item of a chunk reads the KV of its own request only. To share, the host would have to wait for the pages.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from trunkattn.gpu.arrays import GpuPlan, even_rounds
from trunkattn.gpu.compiling import launch
from trunkattn.planner.check import check_plan
from trunkattn.planner.planner import Planned, StepTables
from trunkattn.planner.work_list import DIRECT, ITEM_COLUMNS, QUERY_END, QUERY_START, PlanStats
from trunkattn.step_inputs import PromptChunks

_ITEM_COLUMNS = tl.constexpr(ITEM_COLUMNS)
_QUERY_START, _QUERY_END = tl.constexpr(QUERY_START), tl.constexpr(QUERY_END)
_BLOCK = 256  # items that the kernel handles at once


class ListedChunks(NamedTuple):
    """The prompt chunks of a step. `planned` holds their items, which share nothing and are not cut. `overlaps` says
    whether decodes are co-scheduled with them."""

    planned: Planned
    first_token: int
    overlaps: bool

    @property
    def num_requests(self) -> int:
        """The number of chunks, which are the last requests of the step."""
        return len(self.planned.batch.seq_lens)

    @property
    def end_token(self) -> int:
        """The token after the chunks' last query token in the step."""
        return self.first_token + int(self.planned.batch.query_start_loc[-1])

    def check(self) -> None:
        """Raises AssertionError if the work list breaks an invariant."""
        check_plan(self.planned)

    def stats(self) -> PlanStats:
        """Returns the statistics of the chunks."""
        own = self.planned.stats()
        return replace(own, policy=f"{own.policy} overlapped with decodes") if self.overlaps else own


def chunk_tables(chunks: PromptChunks, page_size: int, window: int) -> StepTables:
    """Returns the chunks as a separate batch for the host's planner. All pages of a request have the request's number,
    because the host does not know the real ones."""
    seq_lens = chunks.seq_lens.numpy().astype(np.int32)
    starts = np.append(0, np.cumsum(chunks.query_lens.numpy())).astype(np.int32)
    rows, columns = len(seq_lens), -(-int(seq_lens.max()) // page_size)
    table = np.broadcast_to(np.arange(rows, dtype=np.int32)[:, None], (rows, columns))  # takes no memory
    return StepTables(table, seq_lens, starts, window)


def place_chunks(plan: GpuPlan, listed: ListedChunks, block_table: torch.Tensor, num_pages: int) -> None:
    """Adds prompt chunks to a plan whose tiles were made on the device, on the current stream, without a wait.

    Args:
        plan: a plan that was reserved with room for chunks.
        listed: the chunks.
        block_table: the block table of the whole step, on the device.
        num_pages: pages of the cache; page ids are clamped to them.
    """
    chunks, work, batch = plan.chunks, listed.planned.work, listed.planned.batch
    assert chunks is not None
    positions = batch.query_positions
    items = even_rounds(work.items, chunks.num_kv_heads, chunks.num_ctas)
    queries: NDArray[np.int32] = work.queries + np.int32(listed.first_token)
    slots = np.full(len(queries), DIRECT, np.int32)
    chunks.send({"items": items, "queries": queries, "partial_slots": slots, "positions": positions})
    own, columns = chunks.arrays["block_table"], min(chunks.table_stride, block_table.shape[1])
    rows = own.view(-1)[: own.numel() // chunks.table_stride * chunks.table_stride].view(-1, chunks.table_stride)
    given = block_table[len(block_table) - listed.num_requests :, :columns]
    torch.clamp(given, 0, num_pages - 1, out=rows[: listed.num_requests, :columns])
    to = plan.arrays["positions"][listed.first_token : listed.end_token]
    to.copy_(chunks.arrays["positions"][: len(positions)])
    launch(_count_kernel, (1,))(
        *(plan.arrays[name] for name in ("counts", "items", "overlapped", "chunk_count")),
        *(len(items), int(listed.overlaps)),
        BLOCK=_BLOCK,
    )


@triton.jit(do_not_specialize=["num_chunk_items", "overlaps"])
def _count_kernel(counts, items, overlapped, chunk_count, num_chunk_items, overlaps, BLOCK: tl.constexpr):
    """Stores the number of the chunks' items. If `overlaps` is 1, it takes the items of the lowest tile that merge
    nothing out of their bucket and stores their range, and the most queries of one, in `overlapped`: they are
    co-scheduled with the chunks. `overlaps` is no constant, so that one compiled kernel serves both cases."""
    tl.store(chunk_count, num_chunk_items)
    begin = tl.load(counts)
    end = tl.load(counts + overlaps)
    most = tl.zeros([BLOCK], tl.int32)
    for first in range(begin, end, BLOCK):
        item = first + tl.arange(0, BLOCK)
        row, used = items + item * _ITEM_COLUMNS, item < end
        queries = tl.load(row + _QUERY_END, mask=used, other=0) - tl.load(row + _QUERY_START, mask=used, other=0)
        most = tl.maximum(most, queries)
    tl.store(overlapped, begin)
    tl.store(overlapped + 1, end)
    tl.store(overlapped + 2, tl.max(most, 0))
    tl.store(counts, end)
