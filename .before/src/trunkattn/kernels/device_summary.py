"""Planning on the device, beside the items: what a plan reads, for those who count it."""

import triton
import triton.language as tl

from trunkattn.kernels.device_choice import USE_COLUMNS, USE_STAGE
from trunkattn.kernels.device_order import lengths_of
from trunkattn.kernels.device_tiles import TOTAL_AGAIN, TOTAL_ONCE, TOTALS

# Places in a plan's summary
WAY = tl.constexpr(0)  # the tiling that was taken
TOKENS_READ = tl.constexpr(1)  # by all tiles
TOKENS_ALONE = tl.constexpr(2)  # had every request read its own


@triton.jit
def summarize(way, batch, uses, totals, summary, window, BLOCK: tl.constexpr):
    """summary [3] int64, of one plan. batch: as of `lengths_of`."""
    read, alone = tl.zeros([], tl.int64), tl.zeros([BLOCK], tl.int64)
    for nth in tl.static_range(2):
        stage = tl.load(uses + (way * 2 + nth) * USE_COLUMNS + USE_STAGE)
        if stage >= 0:
            read += tl.load(totals + stage * TOTALS + TOTAL_ONCE) + tl.load(totals + stage * TOTALS + TOTAL_AGAIN)
    for begin in range(0, batch[2], BLOCK):
        length, queries, _end = lengths_of(begin + tl.arange(0, BLOCK), batch)
        seen = tl.minimum(length.to(tl.int64), queries.to(tl.int64) + window - 1)
        alone += tl.where(queries > 0, seen, 0)
    tl.store(summary + WAY, way.to(tl.int64))
    tl.store(summary + TOKENS_READ, read)
    tl.store(summary + TOKENS_ALONE, tl.sum(alone, 0))
