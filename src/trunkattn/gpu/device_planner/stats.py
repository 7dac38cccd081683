"""Counts on the device what a plan reads. It runs in the launch that makes the items."""

import triton
import triton.language as tl

from trunkattn.gpu.device_planner.common import SUMMARY_CANDIDATE, SUMMARY_READ, SUMMARY_UNSHARED
from trunkattn.gpu.device_planner.cost import LAUNCH_COLUMNS
from trunkattn.gpu.device_planner.layout import totals_of
from trunkattn.gpu.device_planner.prefix_forest import load_request


@triton.jit
def tokens_unshared(tables, bounds, window, SIZES: tl.constexpr):
    """Returns as int64 how many KV tokens are read if every request reads its own."""
    BLOCK: tl.constexpr = SIZES.block
    unshared = tl.zeros([BLOCK], tl.int64)
    for begin in range(0, bounds.num_rows, BLOCK):
        request = load_request(begin + tl.arange(0, BLOCK), tables, bounds, SIZES)
        seen = tl.minimum(request.length.to(tl.int64), request.queries.to(tl.int64) + window - 1)
        unshared += tl.where(request.queries > 0, seen, 0)
    return tl.sum(unshared, 0)


@triton.jit
def summarize(candidate, tables, bounds, window, launches, totals, summary, SIZES: tl.constexpr):
    """Stores the summary of a plan."""
    read = tl.zeros([], tl.int64)
    for nth in tl.static_range(2):
        stage = tl.load(launches + (candidate * 2 + nth) * LAUNCH_COLUMNS)
        if stage >= 0:
            total = totals_of(totals, stage)
            read += tl.load(total.once) + tl.load(total.again)
    tl.store(summary + SUMMARY_CANDIDATE, candidate.to(tl.int64))
    tl.store(summary + SUMMARY_READ, read)
    tl.store(summary + SUMMARY_UNSHARED, tokens_unshared(tables, bounds, window, SIZES))
