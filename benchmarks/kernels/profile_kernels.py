"""Why a cell of decode.py takes the time it takes: Nsight Compute's counters of its kernels, under policy `auto`.

    python -m benchmarks.kernels.profile_kernels              # results/profile-CARD.json; needs `ncu` on PATH

Each kernel is profiled once, on a cold L2 cache, at the card's own clocks.
"""

import argparse
import csv
import shutil
import subprocess
import sys
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import torch

from benchmarks.kernels.decode import make_case, ours
from benchmarks.lib.report import short_name, write_result

CELLS = (
    "32/8:1,10_4096,416", "32/8:1,256_256,32", "32/8:1,1024_2048,32", "32/8:1,8,512_32,512,256",
    "32/8:1,4,16,512_1024,256,128,32", "16/8:1,256_256,32", "64/8:1,8,512_32,2048,256", "32/8:256_1024",
)  # fmt: skip
_STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
STALLS = ("long_scoreboard", "short_scoreboard", "barrier", "wait", "math_pipe_throttle", "lg_throttle", "mio_throttle",
          "gmma", "no_instruction", "selected", "not_selected")  # fmt: skip
METRICS = MappingProxyType(
    {
        "us": "gpu__time_duration.sum",
        "dram_percent": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
        "dram_bytes": "dram__bytes_read.sum",
        "l2_percent": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
        "l2_bytes": "lts__t_bytes.sum",
        "tensor_percent": "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
        "issue_percent": "smsp__issue_active.avg.pct_of_peak_sustained_active",
        "warps_per_processor": "sm__warps_active.avg.per_cycle_active",
    }
    | {f"stalled_{name}": _STALL.format(name) for name in STALLS}
)


def run_once(cells: Sequence[str]) -> None:
    """The child under ncu: compiles everything, then runs each cell once between profiler marks."""
    for cell in cells:
        heads, tree = cell.split(":")
        hq, hkv = map(int, heads.split("/"))
        case = make_case(tree, hq, hkv, torch.bfloat16, torch.bfloat16)
        run, _ = ours(case)
        run(0)
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStart()
        run(1)
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()
        print(f"CELL {cell} {ours(case)[1].stats.policy}", flush=True)
        del case, run
        torch.cuda.empty_cache()


def kernels_of(text: str) -> list[dict[str, Any]]:
    """ncu's CSV, one row a kernel and metric, as one dict a kernel."""
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith('"ID"'))
    names = {metric: name for name, metric in METRICS.items()}
    found: dict[str, dict[str, Any]] = {}
    for row in csv.DictReader(line for line in lines[start:] if line.startswith('"')):
        kernel = found.setdefault(row["ID"], {"kernel": row["Kernel Name"], "grid": row["Grid Size"]})
        value = float(row["Metric Value"].replace(",", "")) if row["Metric Value"] not in ("", "n/a") else None
        kernel[names[row["Metric Name"]]] = value
    for kernel in found.values():
        kernel["us"] = kernel["us"] / 1e3  # base units: ns
    return list(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", default=CELLS, help="heads:tree")
    parser.add_argument("--once", action="store_true", help="what ncu runs: no profile, each cell once")
    arguments = parser.parse_args()
    if arguments.once:
        run_once(arguments.cells)
        return
    if shutil.which("ncu") is None:
        parser.exit(1, "profile_kernels.py: no `ncu` on PATH: expected NVIDIA Nsight Compute\n")
    command = [
        "ncu", "--csv", "--clock-control", "none", "--print-units", "base", "--profile-from-start", "off",
        "--kernel-name", "regex:(hopper_)?decode_kernel|merge_kernel", "--metrics", ",".join(METRICS.values()),
        sys.executable, "-m", "benchmarks.kernels.profile_kernels", "--once", "--cells", *arguments.cells,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        parser.exit(1, f"profile_kernels.py: ncu failed: {(done.stdout + done.stderr)[-2000:]}\n")
    rows = kernels_of(done.stdout)
    cells = [line.split(" ", 2)[1:] for line in done.stdout.splitlines() if line.startswith("CELL ")]
    for row in rows:
        print(row, flush=True)
    name = short_name(torch.cuda.get_device_name())
    print(write_result(f"profile-{name}", {"cells": cells, "kernels": rows}, "triton"))


if __name__ == "__main__":
    main()
