"""PAT's offline tile solver (section 5.2) on candidates compiled ahead of time; needs no GPU.

    python -m benchmarks.kernels.solve_tiles --capability 90 --latency-ns 800     # results/tiles-sm90.json

Bandwidth and multiprocessors are an H200's by default (benchmarks/results/kernels-h200-bfloat16.json). The latency of a
load that misses the L2 cache has to be given: it was not measured with that file.
"""

import argparse
from dataclasses import asdict
from typing import Any

from rich.progress import track

from benchmarks.kernels.compile_kernels import compile_decode
from benchmarks.kernels.cross_compile import Target
from benchmarks.kernels.tile_solver import ARCHITECTURES, Memory, reasons_against
from benchmarks.lib.options import integer
from benchmarks.lib.report import write_result
from trunkattn.gpu.portable.spec import DECODE_TILES
from trunkattn.gpu.tiles import GpuTile

WARPS = {16: (1, 2, 4), 32: (2, 4), 64: (4, 8), 128: (4, 8)}
KEYS = (16, 32, 64, 128)
STAGES = (2, 3, 4)
HEAD_DIM = 128


def candidates() -> list[GpuTile]:
    """Every combination; the tall ones with subtiles of 16 rows and with none."""
    return [
        GpuTile(m, n, warps, stages, ctas_per_sm=0, block_ns=(0, 0), chain_ns=(0, 0), subtiles=subtiles)
        for m, choices in WARPS.items()
        for n in KEYS
        for warps in choices
        for stages in STAGES
        for subtiles in sorted({1, m // 16})
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--capability",
        type=integer(80, 200),
        default=90,
        choices=sorted(ARCHITECTURES),
        help="compute capability, times 10; default: 90",
    )
    parser.add_argument(
        "--latency-ns",
        type=integer(1, 100_000),
        required=True,
        help="of a load that misses the L2 cache: tile_equivalence.py measures it",
    )
    parser.add_argument(
        "--bytes-per-ns", type=integer(1, 1_000_000), default=4574, help="read bandwidth; default: 4574"
    )
    parser.add_argument("--num-sms", type=integer(1, 10_000), default=132, help="multiprocessors; default: 132")
    arguments = parser.parse_args()
    memory = Memory(arguments.latency_ns, arguments.bytes_per_ns, arguments.num_sms)
    figures = {"latency_ns": memory.latency_ns, "bytes_per_ns": memory.bytes_per_ns, "processors": memory.num_sms}
    architecture, target = ARCHITECTURES[arguments.capability], Target(arguments.capability, HEAD_DIM)
    listed = {(tile.block_m, tile.block_n, tile.warps, tile.stages, tile.subtiles) for tile in DECODE_TILES}
    rows = []
    for tile in track(candidates(), "Compiling"):
        shape = (tile.block_m, tile.block_n, tile.warps, tile.stages, tile.subtiles)
        row: dict[str, Any] = dict(zip(("m", "n", "warps", "stages", "subtiles"), shape, strict=True))
        row["listed"] = shape in listed
        try:
            used = compile_decode(target, tile)
        except Exception as failure:  # the compiler refuses what cannot fit, in many ways
            rows.append(row | {"reasons": [f"does not compile: {str(failure).splitlines()[0][:120]}"]})
            continue
        reasons = reasons_against(tile, used, architecture, memory, HEAD_DIM * 2)
        rows.append(row | asdict(used) | {"programs": architecture.resident(tile, used), "reasons": reasons})
    feasible = [row for row in rows if not row["reasons"]]
    print(f"{len(feasible)} of {len(rows)} candidates meet every constraint")
    for row in feasible + [row for row in rows if row["listed"] and row["reasons"]]:
        print(row)
    print(write_result(f"tiles-sm{arguments.capability}", {"memory": figures, "rows": rows}, "triton"))


if __name__ == "__main__":
    main()
