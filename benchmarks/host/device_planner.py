"""Planning on the device: its time, and whether it gives the bits that the host gives.

    python -m benchmarks.host.device_planner                 # results/device-planner-CARD.json

Trees of 64 to 1024 requests, pages of 16 tokens, 32 query and 8 KV heads. `device_us`: of the planner's launches, from
tables on the device to a plan there, replayed as a CUDA graph that the host has queued before it begins; `empty_us`: of
a graph with a launch of one CTA that does nothing. `in_a_row_us`: of each of five plans in one graph. `call_us`:
what `BatchAttention.plan(..., into=plan)` takes on the host, which does not wait. `host_us`: a plan from tables on the
CPU, without a capacity.
"""

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
import triton

import trunkattn
from benchmarks.kernels.decode import microseconds
from benchmarks.lib.internals import step_of
from benchmarks.lib.options import need_gpu, no_options
from benchmarks.lib.report import short_name, write_result
from benchmarks.workloads import PagedBatch
from trunkattn.analysis.trees import parse_tree, tree_batch

PAGE_SIZE, CALLS, IN_A_ROW = 16, 50, 5
TREES = (
    "1,8,256_1024,3072,4096", "256_8192", "1,256_4096,4096", "1,64_8192,512", "1,4,16,512_1024,256,128,32",
    "1,1024_2048,32",
)  # fmt: skip


@triton.jit
def _empty():
    pass


def repeated(call: Callable[[], object]) -> None:
    """What a graph of several plans holds."""
    for _ in range(IN_A_ROW):
        call()


def host_us(call: Any, settle: Any = torch.cuda.synchronize) -> float:
    """Median time of a call on the host; the device is idle before each."""
    times = []
    for _ in range(CALLS):
        settle()
        start = perf_counter()
        call()
        times.append((perf_counter() - start) * 1e6)
    return round(median(times[5:]), 1)


def row_of(tree: str, batch: PagedBatch) -> dict[str, Any]:
    """One batch."""
    rows, pages = batch.block_table.shape
    config = trunkattn.AttentionConfig(32, 8, 128, PAGE_SIZE, torch.bfloat16)
    capacity = trunkattn.Capacity(rows, rows, pages, batch.num_pages, 1)
    on_device, on_host = (trunkattn.BatchAttention(config, "cuda", size) for size in (capacity, capacity))
    tables = torch.from_numpy(batch.block_table), torch.from_numpy(batch.seq_lens)
    there = tuple(table.cuda() for table in tables)
    plan, expected = on_device.plan(there[0], there[1]), on_host.plan(*tables)
    found, host = (step_of(each).tiles.tile_list() for each in (plan, expected))
    names = ("items", "segments", "queries", "partial_slots", "merge_slots", "counts", "merge_queries", "merge_ranges")
    differing = [name for name in names if not np.array_equal(getattr(found, name), getattr(host, name))]
    fresh = trunkattn.BatchAttention(config, "cuda")

    def again() -> object:
        return on_device.plan(there[0], there[1], into=plan)

    return {
        "tree": tree, "requests": rows, "pages": pages, "tiling": plan.stats.policy, "differing": differing,
        "device_us": round(microseconds(lambda _: again(), 1), 1),
        "in_a_row_us": round(microseconds(lambda _: repeated(again), 1) / IN_A_ROW, 1),
        "call_us": host_us(again),
        "host_us": host_us(lambda: fresh.plan(*tables)),
    }  # fmt: skip


def main() -> None:
    need_gpu()
    rows, empty_us = [], round(microseconds(lambda _: _empty[(1,)](), 1), 1)
    for tree in TREES:
        batch = tree_batch(parse_tree(tree), PAGE_SIZE, row_seed=0, page_seed=1)
        rows.append(row_of(tree, batch))
        print(rows[-1], flush=True)
        torch.cuda.empty_cache()
    card = torch.cuda.get_device_name()
    name = f"device-planner-{short_name(card)}"
    print(write_result(name, {"card": card, "page_size": PAGE_SIZE, "empty_us": empty_us, "rows": rows}, "triton"))


if __name__ == "__main__":
    no_options(__doc__)
    main()
