"""Planning on the device: its time, and whether it gives the bits that the host gives.

    python benchmarks/device_planner.py                 # results/device-planner-CARD.json

Batches of 256 requests (and one of 64, and of 1024) of PAT's kind of trees, pages of 16 tokens, 32 query and 8 KV heads.
`device_us`: of the planner's launches, replayed as a CUDA graph, from tables on the device to a plan there. `call_us`:
what `BatchAttention.plan(..., into=plan)` takes on the host, which does not wait. `host_us`: a plan from tables on the
CPU, without a capacity. `kernels_us`: of each kernel of the 256 × 512 pages, without overlap, by the profiler.
"""

from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from kernels import microseconds
from report import write_result

import trunkattn
from trunkattn.workloads import PagedBatch
from trunkattn.workloads.trees import parse_tree, tree_batch

PAGE_SIZE, CALLS = 16, 50
TREES = ("1,8,256_1024,3072,4096", "256_8192", "1,256_4096,4096", "1,64_8192,512", "1,4,16,512_1024,256,128,32", "1,1024_2048,32")  # fmt: skip


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
    plan, expected = on_device.plan(*there), on_host.plan(*tables)
    found, host = plan.step.tile_list(), expected.step.tile_list
    names = ("items", "runs", "queries", "slots", "parts", "counts", "merge_queries", "merge_ranges")
    differing = [name for name in names if not np.array_equal(getattr(found, name), getattr(host, name))]
    fresh = trunkattn.BatchAttention(config, "cuda")
    return {
        "tree": tree, "requests": rows, "pages": pages, "tiling": plan.stats.policy, "differing": differing,
        "device_us": round(microseconds(lambda _: on_device.plan(*there, into=plan), 1), 1),
        "call_us": host_us(lambda: on_device.plan(*there, into=plan)),
        "host_us": host_us(lambda: fresh.plan(*tables)),
    }  # fmt: skip


def kernels_us(batch: PagedBatch) -> dict[str, float]:
    """Of each kernel of a plan."""
    config = trunkattn.AttentionConfig(32, 8, 128, PAGE_SIZE, torch.bfloat16)
    rows, pages = batch.block_table.shape
    attention = trunkattn.BatchAttention(config, "cuda", trunkattn.Capacity(rows, rows, pages, batch.num_pages, 1))
    there = torch.from_numpy(batch.block_table).cuda(), torch.from_numpy(batch.seq_lens).cuda()
    plan = attention.plan(*there)
    for _ in range(3):
        attention.plan(*there, into=plan)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        for _ in range(CALLS):
            attention.plan(*there, into=plan)
            torch.cuda.synchronize()
    found = {event.key: event.device_time_total / event.count for event in profiled.key_averages()}
    return {name: round(time, 2) for name, time in found.items() if name.endswith("_kernel")}


def main() -> None:
    rows = []
    for tree in TREES:
        batch = tree_batch(parse_tree(tree), PAGE_SIZE, row_seed=0, page_seed=1)
        rows.append(row_of(tree, batch))
        print(rows[-1], flush=True)
        torch.cuda.empty_cache()
    largest = tree_batch(parse_tree(TREES[0]), PAGE_SIZE, row_seed=0, page_seed=1)
    card = torch.cuda.get_device_name()
    figures = {"card": card, "page_size": PAGE_SIZE, "rows": rows, "kernels_us": kernels_us(largest)}
    print(figures["kernels_us"], write_result(f"device-planner-{card.split()[-1].lower()}", figures, "triton"))


if __name__ == "__main__":
    main()
