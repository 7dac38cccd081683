"""Decode attention on a GPU: PAT's 20 trees × 4 head settings, against every peer that imports.

    python -m benchmarks.kernels.decode                                            # results/kernels-CARD-bfloat16.json
    python -m benchmarks.kernels.decode --name long --heads 32/8 --trees 8_8192 1_131072
    python -m benchmarks.kernels.decode --name fp8 --kv-dtype float8_e4m3fn --trees 256_1024 256_4096      # only ours

Time is the device's, of a CUDA graph that runs the layer once on each of several copies of the cache, together several
times the L2 cache, so that every run finds it cold; median of replays that the host queues ahead. SOL = max(unique K,
V, Q and output bytes / read bandwidth, FLOPs / bf16 matrix rate), both measured here. Every output is checked against
float64.
"""

import argparse
import math
import time
from statistics import geometric_mean, median
from typing import Any

import torch
import triton
import triton.language as tl

from benchmarks.kernels import decode_cases
from benchmarks.kernels.decode_cases import Shape, expected, ours, sol_us
from benchmarks.lib.options import accepted_by, need_gpu
from benchmarks.lib.report import short_name, write_result
from benchmarks.peers.gpu_kernels import PEERS, Case, Run
from benchmarks.workloads.pat_trees import PAT_TREES
from trunkattn.analysis.trees import parse_tree, tree_batch

HEADS = ("32/32", "16/8", "32/8", "64/8")
HEAD_DIM, PAGE_SIZE = 128, 16
TREE = accepted_by(lambda text: tree_batch(parse_tree(text), PAGE_SIZE))  # a value of --trees
OURS = ("trunkattn", "trunkattn_one_graph")
# Replays before those that are timed: right after the check in float64 a card was up to 20 % slower
WARM_UP_SECONDS = 0.05
# The device is held so long before each replay that is timed, about 0.2 ms, while the host queues it. Without, a host
# that was late made a tree or two of a run up to a quarter slower, and a graph of nothing takes 16 to 20 µs
HELD_CYCLES = 400_000
TOLERANCE = 0.02  # bf16 outputs of size 1: 8 bits of mantissa, and a sum of rounded weights


@triton.jit
def _read(source, sums, size, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.range(tl.program_id(0) * BLOCK, size, tl.num_programs(0) * BLOCK, num_stages=4):
        total += tl.load(source + i.to(tl.int64) + tl.arange(0, BLOCK))
    tl.store(sums + tl.program_id(0), tl.sum(total))


def microseconds(run: Run, copies: int, replays: int = 15, warm_up_seconds: float = WARM_UP_SECONDS) -> float:
    """Time of one run on the device, from graphs of one run per copy."""
    for copy in range(copies):
        run(copy)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for copy in range(copies):
            run(copy)
    ready = time.perf_counter() + warm_up_seconds
    while time.perf_counter() < ready:
        graph.replay()
        torch.cuda.synchronize()
    times = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(HELD_CYCLES)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / copies)
    return median(times)


def ceilings() -> tuple[float, float]:
    """Read bandwidth in bytes per µs and bf16 matrix rate in FLOP per µs."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    flops = 2 * 8192**3 / microseconds(lambda _: torch.mm(a, b), 2)
    source = torch.randn(1 << 30, device="cuda")
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    sums = torch.empty(num_sms * 8, device="cuda")

    def rate(ctas_per_sm: int) -> float:
        read = _read[(num_sms * ctas_per_sm,)]
        return source.nbytes / microseconds(lambda _: read(source, sums, source.numel(), 4096, num_warps=8), 1)

    return max(map(rate, (2, 4, 8))), flops


def shape_of(hq: int, hkv: int, dtypes: tuple[torch.dtype, torch.dtype]) -> Shape:
    """The shape of a cell. dtypes: of q and of the cache."""
    return Shape(f"{hq}/{hkv}", hq, hkv, HEAD_DIM, *dtypes, page_size=PAGE_SIZE)


def make_case(tree: str, hq: int, hkv: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> Case:
    """Random q and caches, pages shuffled; the rows stay in tree order, in which the cascades want them."""
    return decode_cases.make_case(shape_of(hq, hkv, (dtype, kv_dtype)), parse_tree(tree))


def largest_error(case: Case, out: torch.Tensor) -> float:
    """Against float64, on rows from everywhere in the batch; NaN anywhere is an infinite error."""
    if out.isnan().any():
        return math.inf
    rows = sorted({0, len(out) // 3, len(out) // 2, len(out) - 1})
    return float((out[rows].double() - expected(case, rows)).abs().max())


def measure(case: Case, run: Run) -> dict[str, Any]:
    """Time and error, or why there is none."""
    error = largest_error(case, run(0))
    if error > TOLERANCE:
        return {"wrong": f"error {error:.3g}"}
    return {"us": round(microseconds(run, len(case.kv)), 2), "error": error}


def row_of(
    tree: str, heads: str, limits: tuple[float, float], dtypes: tuple[torch.dtype, torch.dtype], peers: list[str]
) -> dict[str, Any]:
    """One cell: SOL, ours and the peers (of q's dtype only). dtypes: of q and of the cache."""
    hq, hkv = map(int, heads.split("/"))
    case = make_case(tree, hq, hkv, *dtypes)
    sol = sol_us(shape_of(hq, hkv, dtypes), parse_tree(tree), limits)
    row: dict[str, Any] = {"tree": tree, "heads": heads, "sol_us": round(sol, 2)}
    run, plan = ours(case)
    stats = plan.stats
    row["trunkattn"] = measure(case, run) | {"tiling": stats.policy, "items": stats.num_work_items}
    row["trunkattn_one_graph"] = measure(case, ours(case, fixed=True)[0])
    for name in peers if dtypes[0] == dtypes[1] else ():
        try:
            row[name] = measure(case, PEERS[name](case))
        except Exception as reason:  # a peer that cannot run here is reported, not fatal
            row[name] = {"missing": f"{type(reason).__name__}: {str(reason)[:200]}"}
    return row


def summary(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Geometric mean of each head setting over the shared trees as a multiple of SOL, where every cell was measured."""
    means: dict[str, dict[str, float]] = {}
    for heads in dict.fromkeys(row["heads"] for row in rows):
        shared = [row for row in rows if row["heads"] == heads and "," in row["tree"].split("_")[0]]
        for name in (*OURS, *PEERS):
            times = [row[name]["us"] / row["sol_us"] for row in shared if "us" in row.get(name, {})]
            if times and len(times) == len(shared):
                means.setdefault(heads, {})[name] = round(geometric_mean(times), 3)
    return means


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", nargs="+", default=HEADS, choices=HEADS, help="query heads / KV heads")
    parser.add_argument("--trees", nargs="+", type=TREE, default=PAT_TREES, help="nodes per level _ tokens per level")
    parser.add_argument(
        "--dtype", default="bfloat16", choices=("bfloat16", "float16"), help="of queries; default: bfloat16"
    )
    parser.add_argument("--kv-dtype", choices=("float8_e4m3fn", "float8_e5m2"), help="default: as --dtype")
    parser.add_argument("--peers", nargs="*", default=tuple(PEERS), choices=tuple(PEERS), help="default: all")
    parser.add_argument("--name", help="of the result file; default: the dtype")
    arguments = parser.parse_args()
    need_gpu()
    dtypes = tuple(getattr(torch, name) for name in (arguments.dtype, arguments.kv_dtype or arguments.dtype))
    limits = ceilings()
    card = torch.cuda.get_device_name()
    print(f"{card}: {limits[0] / 1e6:.2f} TB/s read, {limits[1] / 1e6:.0f} TFLOP/s bf16", flush=True)
    rows = []
    for heads in arguments.heads:
        for tree in arguments.trees:
            rows.append(row_of(tree, heads, limits, dtypes, arguments.peers))
            torch.cuda.empty_cache()
            row = rows[-1]
            cells = {name: row[name].get("us", "-") for name in (*OURS, *PEERS) if name in row}
            print(f"{heads} {tree}: SOL {row['sol_us']}, {cells}, {row['trunkattn'].get('tiling')}", flush=True)
    figures = {
        "card": card, "read_tb_per_s": round(limits[0] / 1e6, 3), "bf16_tflops": round(limits[1] / 1e6, 1),
        "dtype": arguments.dtype, "kv_dtype": arguments.kv_dtype or arguments.dtype,
        "head_dim": HEAD_DIM, "page_size": PAGE_SIZE,
        "times_sol": summary(rows), "rows": rows,
    }  # fmt: skip
    print(figures["times_sol"])
    write_result(f"kernels-{short_name(card)}-{arguments.name or arguments.dtype}", figures, "triton")


if __name__ == "__main__":
    main()
