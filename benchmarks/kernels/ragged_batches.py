"""One plan and 32 layers of decode attention on a GPU, on batches with ragged lengths of three workloads.

    python -m benchmarks.kernels.ragged_batches --trace FILE         # results/workloads-CARD-bfloat16.json

mooncake: requests of a trace in Mooncake's format that are in decode together (only with --trace); they share little.
conversation: PAT's three-level system instruction, then a private part as long as an input of the trace, 4096 tokens
at most; without a trace the inputs are log-normal with median 6900 and sigma 1.4. toolagent: turns of agents.

A step is the time of one plan (median, by the host's clock; the device is idle before and after) and 32 times that of
a layer, measured and checked as in decode.py. `auto` plans on the device, from the block table and the lengths there,
into the same plan, of a capacity just as large; `host_plan_us` is what its plan takes from tables on the CPU, without a
capacity. The policy per_query plans there: for a batch unlike the last one (`plan_us`) and for the last one, grown by a
token per request (`grown_plan_us`). Others plan alike in both cases; peers from arguments at hand, in the form they
take (peers/gpu_kernels.py).
"""

import argparse
import math
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import trunkattn
from benchmarks.kernels.decode import HEAD_DIM, HEADS, PAGE_SIZE, PEERS, Case, ceilings, measure
from benchmarks.kernels.decode_cases import FLUSH_BYTES, unique_tokens
from benchmarks.lib.options import existing, integer, need_gpu
from benchmarks.lib.report import short_name, write_result
from benchmarks.workloads import PagedBatch
from benchmarks.workloads.arrivals import LONGEST_PRIVATE
from benchmarks.workloads.serving import agent_batch, conversation_batch
from benchmarks.workloads.traces import arrival_ms, decode_batches, read_trace
from trunkattn.analysis.records import LoggedRequest

LAYERS = 32
PLAN_CALLS, PLAN_SECONDS = 30, 2.0
SEED = 0
MS_PER_TOKEN = (50.0, 100.0, 200.0, 400.0, 800.0)
OURS = {"trunkattn": "auto", "trunkattn_per_query": "per_query"}


def used_entries(batch: PagedBatch) -> NDArray[np.bool_]:
    """[num_requests, max_pages] whether an entry of the block table is a page of its request."""
    return np.arange(batch.block_table.shape[1]) < -(-batch.seq_lens // batch.page_size)[:, None]


def sample(batch: PagedBatch, num_requests: int) -> PagedBatch:
    """Some of a decode batch's requests, in random order, on pages numbered at random from 0 without gaps."""
    rng = np.random.default_rng(SEED)
    rows = rng.permutation(len(batch.seq_lens))[:num_requests]
    used = used_entries(batch)[rows]
    pages, index = np.unique(batch.block_table[rows][used], return_inverse=True)
    table = np.zeros(used.shape, np.int32)
    table[used] = rng.permutation(len(pages))[index]
    width = int(used.any(0).sum())
    return PagedBatch(
        np.ascontiguousarray(table[:, :width]), batch.seq_lens[rows], batch.query_lens[rows], PAGE_SIZE, len(pages)
    )


def mooncake_batch(trace: Sequence[LoggedRequest], num_requests: int) -> PagedBatch:
    """Requests in decode in the middle of the trace, on an engine just slow enough to have so many at once."""
    now = arrival_ms(trace[len(trace) // 2])
    for speed in MS_PER_TOKEN:
        moment = {"start_ms": now, "stop_ms": now + 1, "step_ms": 1}
        (batch,) = decode_batches(trace, **moment, page_size=PAGE_SIZE, ms_per_token=speed)
        if len(batch.seq_lens) >= num_requests:
            return sample(batch, num_requests)
    raise ValueError(f"--trace has fewer than {num_requests} requests in decode at once in its middle")


def private_lengths(trace: Sequence[LoggedRequest], num_requests: int) -> list[int]:
    """Private tokens of conversations: see the head of this file."""
    rng = np.random.default_rng(SEED)
    if trace:
        inputs = rng.choice([request.num_prompt_tokens for request in trace], num_requests)
    else:
        inputs = rng.lognormal(math.log(6900), 1.4, num_requests)
    return np.clip(inputs, 1, LONGEST_PRIVATE).astype(int).tolist()


def make_batches(trace: Sequence[LoggedRequest], num_requests: int) -> dict[str, PagedBatch]:
    """The workloads; mooncake only with a trace."""
    mooncake = {"mooncake": mooncake_batch(trace, num_requests)} if trace else {}
    conversation = conversation_batch(private_lengths(trace, num_requests), PAGE_SIZE, SEED)
    return {
        **mooncake,
        "conversation": sample(conversation, num_requests),
        "toolagent": sample(agent_batch(num_requests, PAGE_SIZE, SEED), num_requests),
    }


def make_case(batch: PagedBatch, heads: str, dtype: torch.dtype) -> Case:
    """Random q, and as many random caches as make each run find the L2 cache cold."""
    hq, hkv = map(int, heads.split("/"))
    shape = (batch.num_pages, PAGE_SIZE, hkv, HEAD_DIM)
    copies = max(2, math.ceil(FLUSH_BYTES / (2 * dtype.itemsize * math.prod(shape))))
    torch.manual_seed(0)
    kv = [(torch.randn(shape, device="cuda", dtype=dtype), torch.randn(shape, device="cuda", dtype=dtype))]
    kv += [(kv[0][0].clone(), kv[0][1].clone()) for _ in range(copies - 1)]
    return Case(batch, torch.randn(len(batch.seq_lens), hq, HEAD_DIM, device="cuda", dtype=dtype), kv, [])


def grown(batch: PagedBatch, steps: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A block table with room to grow, on new pages, and the lengths of step after step, one token longer each time."""
    spare = np.zeros((len(batch.seq_lens), -(-steps // batch.page_size)), np.int32)
    table = np.concatenate([batch.block_table, spare], axis=1)
    free = np.ones(table.shape, bool)
    free[:, : batch.block_table.shape[1]] = ~used_entries(batch)
    table[free] = batch.num_pages + np.arange(free.sum())
    return torch.from_numpy(table), [torch.from_numpy(batch.seq_lens + np.int32(i)) for i in range(steps)]


def plan_us(plan: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    """Median wall time of a plan, from an idle device to an idle device; the first call is left out.

    before: called before each plan, outside the time.
    """
    times: list[float] = []
    begin = perf_counter()
    while len(times) < 4 or (len(times) < PLAN_CALLS and perf_counter() - begin < PLAN_SECONDS):
        before()
        torch.cuda.synchronize()
        start = perf_counter()
        plan()
        torch.cuda.synchronize()
        times.append((perf_counter() - start) * 1e6)
    return round(median(times[1:]), 1)


def our_cell(case: Case, policy: str) -> dict[str, Any]:
    """This project under one policy."""
    hq, hkv, dim = case.heads
    config = trunkattn.AttentionConfig(hq, hkv, dim, PAGE_SIZE, case.q.dtype, policy=policy)
    tables = torch.from_numpy(case.batch.block_table), torch.from_numpy(case.batch.seq_lens)
    on_host = trunkattn.BatchAttention(config, case.q.device)
    attention = on_host
    if policy == "auto":
        requests, pages = tables[0].shape
        capacity = trunkattn.Capacity(requests, requests, pages, case.batch.num_pages, 1)
        attention = trunkattn.BatchAttention(config, case.q.device, capacity)
    table, lens = (table.to(case.q.device) for table in tables) if policy == "auto" else tables
    plan = attention.plan(table, lens)
    out = torch.full_like(case.q, math.nan)

    def run(copy: int) -> torch.Tensor:
        k_cache, v_cache = case.kv[copy]
        attention.run(plan, case.q, k_cache, v_cache, out=out)
        return out

    cell, stats = measure(case, run), plan.stats
    host_us = plan_us(lambda: on_host.plan(*tables), lambda: on_host.plan(tables[0][:1], tables[1][:1]))
    if policy == "auto":
        cell["plan_us"] = cell["grown_plan_us"] = plan_us(lambda: attention.plan(table, lens, into=plan))
        cell["host_plan_us"] = host_us
    else:
        wide_table, longer = grown(case.batch, PLAN_CALLS)
        steps = iter(longer)
        cell |= {"plan_us": host_us, "grown_plan_us": plan_us(lambda: on_host.plan(wide_table, next(steps)))}
    return cell | {
        "tiling": stats.policy, "items": stats.num_work_items,
        "kv_tokens_read": stats.kv_tokens_read, "kv_tokens_per_query": stats.kv_tokens_per_query,
    }  # fmt: skip


def peer_cell(case: Case, name: str) -> dict[str, Any]:
    """A peer, or why there is no figure."""
    try:
        peer = PEERS[name](case)
        cell = measure(case, peer) | {"plan_us": plan_us(peer.plan)}
    except Exception as reason:  # a peer that cannot run here is reported, not fatal
        return {"missing": f"{type(reason).__name__}: {str(reason)[:200]}"}
    return cell | {"grown_plan_us": cell["plan_us"]}


def compare(cells: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Adds the time of a step to each cell that was measured; ours over the best peer's and over per_query's."""
    found: dict[str, Any] = {}
    for kind in ("", "grown_"):
        for cell in cells.values():
            if "us" in cell:
                cell[f"{kind}step_us"] = round(cell[f"{kind}plan_us"] + LAYERS * cell["us"], 1)
        steps = {name: cell[f"{kind}step_us"] for name, cell in cells.items() if "us" in cell}
        peers = {name: steps[name] for name in PEERS if name in steps}
        if "trunkattn" in steps and peers:
            best = min(peers, key=lambda name: peers[name])
            found |= {f"{kind}best_peer": best, f"{kind}over_best_peer": round(steps["trunkattn"] / peers[best], 4)}
        if OURS.keys() <= steps.keys():
            found[f"{kind}over_per_query"] = round(steps["trunkattn"] / steps["trunkattn_per_query"], 4)
    return found


def row_of(
    workload: str, batch: PagedBatch, heads: str, limits: tuple[float, float], dtype: torch.dtype
) -> dict[str, Any]:
    """One batch: what it shares, SOL, every cell and the comparison."""
    case = make_case(batch, heads, dtype)
    hq, hkv, _ = case.heads
    tokens = int(batch.seq_lens.sum())
    unique = unique_tokens(batch)
    size = unique * hkv * HEAD_DIM * 2 * dtype.itemsize + 2 * case.q.nbytes
    sol = max(size / limits[0], 4 * HEAD_DIM * hq * tokens / limits[1])
    cells = {name: our_cell(case, policy) for name, policy in OURS.items()}
    for name in PEERS:
        cells[name] = peer_cell(case, name)
        torch.cuda.empty_cache()
    return {
        "workload": workload, "requests": len(batch.seq_lens), "heads": heads,
        "tokens": tokens, "unique_tokens": unique,
        "entries_over_pages": round(int(used_entries(batch).sum()) / batch.num_pages, 3),
        "sol_us": round(sol, 2), **compare(cells), **cells,
    }  # fmt: skip


def line_of(row: dict[str, Any]) -> str:
    """One line on one batch."""
    cells = {name: row[name] for name in (*OURS, *PEERS)}
    layers = {name: cell.get("us", "-") for name, cell in cells.items()}
    plans = {name: cell["plan_us"] for name, cell in cells.items() if "plan_us" in cell}
    ratios = {name: value for name, value in row.items() if "best_peer" in name or "over_per_query" in name}
    return (
        f"{row['heads']} {row['workload']} {row['requests']}: {row['tokens']} tokens, {row['unique_tokens']} unique; "
        f"SOL {row['sol_us']} µs, layer {layers}; plan {plans}, grown {row['trunkattn']['grown_plan_us']}; "
        f"{ratios}; {row['trunkattn']['tiling']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=existing, help="JSON lines in Mooncake's format; default: no mooncake workload")
    parser.add_argument("--requests", nargs="+", type=integer(1, 100_000), default=(64, 256), help="batch sizes")
    parser.add_argument("--heads", nargs="+", default=("32/8",), choices=HEADS, help="query heads / KV heads")
    parser.add_argument(
        "--dtype", default="bfloat16", choices=("bfloat16", "float16"), help="of queries and caches; default: bfloat16"
    )
    arguments = parser.parse_args()
    trace = read_trace(arguments.trace) if arguments.trace else ()
    batches = {count: make_batches(trace, count) for count in arguments.requests}
    need_gpu()
    if not trace:
        print("mooncake is left out: no --trace", flush=True)
    limits = ceilings()
    card = torch.cuda.get_device_name()
    print(f"{card}: {limits[0] / 1e6:.2f} TB/s read, {limits[1] / 1e6:.0f} TFLOP/s bf16", flush=True)
    rows = []
    for heads in arguments.heads:
        for found in batches.values():
            for workload, batch in found.items():
                rows.append(row_of(workload, batch, heads, limits, getattr(torch, arguments.dtype)))
                torch.cuda.empty_cache()
                print(line_of(rows[-1]), flush=True)
    figures = {
        "card": card, "read_tb_per_s": round(limits[0] / 1e6, 3), "bf16_tflops": round(limits[1] / 1e6, 1),
        "dtype": arguments.dtype, "head_dim": HEAD_DIM, "page_size": PAGE_SIZE, "layers": LAYERS,
        "trace": arguments.trace.name if arguments.trace else None, "rows": rows,
    }  # fmt: skip
    print(write_result(f"workloads-{short_name(card)}-{arguments.dtype}", figures, "triton"))


if __name__ == "__main__":
    main()
