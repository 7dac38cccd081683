"""What a hybrid batch costs in watts: time, power and clock of a GPU with chunks, decodes, one after the other and both
at once.

    python -m benchmarks.kernels.hybrid_power                  # results/hybrid-power-CARD.json

Each way to run a batch is a CUDA graph over several copies of the cache. `rested_us` is the median of a few replays
after pauses, when the card may take more power than its limit for a while; `steady_us` is of replays without a pause,
when it is at that limit if it ever is. Watts and megahertz are medians of what nvidia-smi says in the last two thirds
of them; millijoules are those watts times `steady_us`.
"""

import statistics
import subprocess
import time
from typing import Any

import torch

from benchmarks.kernels.hybrid import FLUSH_BYTES, Ours, make_case
from benchmarks.lib.options import need_gpu, no_options
from benchmarks.lib.report import short_name, write_result
from benchmarks.peers.gpu_hybrid import HYBRID_PEERS, HybridRun
from benchmarks.workloads.hybrid_batches import TABLE

BATCHES = (TABLE[1], TABLE[2], TABLE[4])  # long chunks beside many decodes, and a chunk of 2k
WAYS = ("fa3_serial", "trunkattn_prefill", "trunkattn_decode", "trunkattn_serial", "trunkattn_overlapped")
PAUSE_S, PAUSES, STEADY_S = 0.15, 3, 1.5
SAMPLE_MS = 50
QUERY = ("power.draw.instant", "clocks.sm", "clocks_event_reasons.sw_power_cap")


def captured(run: HybridRun, copies: int) -> torch.cuda.CUDAGraph:
    run(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for copy in range(copies):
            run(copy)
    return graph


def replay_us(graph: torch.cuda.CUDAGraph, copies: int) -> float:
    """Time of one run, from one replay."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / copies


def steady(graph: torch.cuda.CUDAGraph, copies: int) -> dict[str, Any]:
    """Replays without a pause, and what the driver says of them."""
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits", "-lms", str(SAMPLE_MS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching:
        times, begun = list[float](), time.perf_counter()
        try:
            while time.perf_counter() - begun < STEADY_S:
                times.append(replay_us(graph, copies))
        finally:
            watching.terminate()
        said = watching.stdout.read() if watching.stdout else ""
    samples = [line.split(", ") for line in said.splitlines() if line.count(", ") == len(QUERY) - 1]
    samples = samples[len(samples) // 3 :]
    us = statistics.median(times[len(times) // 3 :])
    found: dict[str, Any] = {"steady_us": round(us, 1), "samples": len(samples)}
    if samples:
        watts = statistics.median(float(sample[0]) for sample in samples)
        found |= {
            "watts": round(watts, 1),
            "megahertz": statistics.median(float(sample[1]) for sample in samples),
            "at_power_limit": round(sum(sample[2] == "Active" for sample in samples) / len(samples), 2),
            "millijoules": round(watts * us / 1e3, 1),
        }
    return found


def measure(run: HybridRun, copies: int) -> dict[str, Any]:
    """One way to run a batch."""
    graph = captured(run, copies)
    rested = []
    for _ in range(PAUSES):
        torch.cuda.synchronize()
        time.sleep(PAUSE_S)
        rested.append(replay_us(graph, copies))
    return {"rested_us": round(statistics.median(rested), 1)} | steady(graph, copies)


def main() -> None:
    need_gpu()
    card = torch.cuda.get_device_name()
    limit = subprocess.run(
        ["nvidia-smi", "--query-gpu=power.limit,clocks.max.sm", "--format=csv,noheader"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    torch.manual_seed(0)
    most = max(batch.elements for batch in BATCHES)
    pool = [
        torch.empty(most + max(most, FLUSH_BYTES // 4), device="cuda", dtype=torch.bfloat16).normal_() for _ in "kv"
    ]
    rows = []
    for batch in BATCHES:
        case = make_case(batch, pool)
        makers = HYBRID_PEERS | Ours().makers()
        row: dict[str, Any] = {"batch": str(batch), "ways": {}, "missing": {}}
        for way in WAYS:
            try:
                row["ways"][way] = measure(makers[way](case), len(case.kv))
            except Exception as reason:  # what cannot run here is reported, not fatal
                row["missing"][way] = f"{type(reason).__name__}: {str(reason)[:200]}"
                continue
            print(row["batch"], way, row["ways"][way], flush=True)
        rows.append(row)
    name = f"hybrid-power-{short_name(card)}"
    write_result(name, {"card": card, "limits": limit, "rows": rows}, "triton")


if __name__ == "__main__":
    no_options(__doc__)
    main()
