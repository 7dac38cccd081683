"""Two versions of the project on one machine, cell by cell: does a change make anything slower?

    python -m benchmarks.tools.compare_versions --before ../old  # results/compare-CARD.json, or compare-cpu
    python -m benchmarks.tools.compare_versions --before ../old --part kernels device_planner --rounds 3

`--before` and `--after` are checkouts; each runs its own benchmarks on its own sources, in turns (before, after, after,
before, ...), so that a machine that slows down over the run favours neither. A cell's time is its least over the
rounds. No peers are run: the times of both are this project's own.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

import torch

from benchmarks.lib.options import existing, integer
from benchmarks.lib.report import short_name, write_result

Cells = dict[str, float]


def kernel_cells(result: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """µs of a plan of its own, and of one graph for any batch."""
    for row in result["rows"]:
        for name in ("trunkattn", "trunkattn_one_graph"):
            yield f"{row['heads']} {row['tree']} {name}", row[name].get("us", float("nan"))


def planner_cells(result: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """µs of planning on the device."""
    for row in result["rows"]:
        for name in ("device_us", "in_a_row_us"):
            yield f"{row['tree']} {name}", row[name]


def prefill_cells(result: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """µs of prompt chunks, with the card's kernel and with the portable one."""
    for row in (*result["chunks"], *result["shared"]):
        for name in ("trunkattn", "trunkattn_portable"):
            yield f"{row['requests']} x {row['tokens']} @ {row['cached']} {name}", row[name].get("us", float("nan"))


def hybrid_cells(result: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """µs of a prompt chunk and decodes, by execution."""
    for number, row in enumerate(result["sweep"]["rows"]):
        for name, us in row["us"].items():
            yield f"{number} {name}", us


def cpu_cells(result: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """ms of decode attention on a CPU."""
    for case, ways in result["cases"].items():
        for name in ("trunkattn per_query", "trunkattn auto"):
            yield f"{case} {name}", ways[name]["min_ms"]


def cpu_planner_cells(result: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """ms of planning on a CPU, from scratch and from the step before, by policy."""
    for policy, row in result["policies_ms"].items():
        for name in ("cold", "patch"):
            yield f"{policy} {name}", row[name]["min_ms"]


class Part(NamedTuple):
    """A benchmark of a checkout.

    Attributes:
        module: its name in `benchmarks`.
        flat: its file in checkouts whose `benchmarks` has no folders.
        arguments: of the command line.
        result: the name of its file, `{card}` for the card's.
        cells: reads the times from a result.
        unit: of the times.
    """

    module: str
    flat: str
    arguments: tuple[str, ...]
    result: str
    cells: Callable[[dict[str, Any]], Iterator[tuple[str, float]]]
    unit: str = "us"


CPU_PARTS = {
    "cpu_attention": Part("kernels.cpu_attention", "cpu_attention.py", (), "cpu-attention", cpu_cells, "ms"),
    "cpu_planner": Part("host.planner", "planner.py", (), "planner-cpu", cpu_planner_cells, "ms"),
}
GPU_PARTS = {
    "kernels": Part(
        "kernels.decode",
        "kernels.py",
        ("--peers", "--heads", "32/8", "16/8", "--name", "compare"),
        "kernels-{card}-compare",
        kernel_cells,
    ),
    "device_planner": Part("host.device_planner", "device_planner.py", (), "device-planner-{card}", planner_cells),
    "prefill": Part("kernels.prefill", "prefill.py", ("--peers",), "prefill-{card}", prefill_cells),
    "hybrid": Part(
        "kernels.hybrid", "hybrid.py", ("--part", "sweep", "--batches", "12", "--peers"), "hybrid-{card}", hybrid_cells
    ),
}


def run(checkout: Path, part: Part, card: str) -> Cells:
    """One benchmark of one checkout."""
    environment = os.environ | {"PYTHONPATH": str(checkout / "src"), "BENCHMARK_COMMIT": "compared"}
    has_folders = (checkout / "benchmarks" / "kernels").is_dir()
    script = ["-m", f"benchmarks.{part.module}"] if has_folders else [f"benchmarks/{part.flat}"]
    command = [sys.executable, *script, *part.arguments]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{checkout}: {' '.join(command)} failed: {done.stderr[-2000:]}")
    path = checkout / "benchmarks" / "results" / f"{part.result.format(card=card)}.json"
    return dict(part.cells(json.loads(path.read_text())))


def least(rounds: list[Cells]) -> Cells:
    """Each cell's least time."""
    return {name: min(cells[name] for cells in rounds) for name in rounds[0]}


def compared(before: Cells, after: Cells, unit: str) -> dict[str, Any]:
    """Ratios of after to before; above 1 is slower."""
    ratios = {name: after[name] / before[name] for name in before if name in after and before[name] > 0}
    ratios = {name: ratio for name, ratio in ratios.items() if ratio == ratio}  # a cell that could not run is NaN
    worst = max(ratios, key=lambda name: ratios[name])
    return {
        "cells": len(ratios),
        "geomean": round(geometric_mean(ratios.values()), 4),
        "worst": {"cell": worst, "ratio": round(ratios[worst], 4)},
        "over_3_percent": {name: round(ratio, 4) for name, ratio in ratios.items() if ratio > 1.03},
        unit: {name: [before[name], after[name]] for name in ratios},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=existing, required=True, help="a checkout of the older version")
    parser.add_argument("--after", type=existing, default=Path(__file__).parents[2], help="default: this one")
    parser.add_argument(
        "--part", nargs="+", choices=[*GPU_PARTS, *CPU_PARTS], help="default: all of the GPU, or the CPU"
    )
    parser.add_argument("--rounds", type=integer(1, 100), default=2, help="of each version")
    parser.add_argument("--name", default="compare", help="of the result file")
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    parts = arguments.part or list(GPU_PARTS if on_gpu else CPU_PARTS)
    if not on_gpu and set(parts) & set(GPU_PARTS):
        parser.exit(1, "compare_versions.py: torch finds no CUDA device: these parts need an NVIDIA GPU\n")
    card = short_name(torch.cuda.get_device_name()) if on_gpu else "cpu"
    versions = {"before": arguments.before.resolve(), "after": arguments.after.resolve()}
    figures: dict[str, Any] = {"card": torch.cuda.get_device_name() if on_gpu else "cpu"}
    figures |= {"rounds": arguments.rounds, "parts": {}}
    for name in parts:
        part = (GPU_PARTS | CPU_PARTS)[name]
        found: dict[str, list[Cells]] = {"before": [], "after": []}
        for turn in range(arguments.rounds):
            for version in ("before", "after") if turn % 2 == 0 else ("after", "before"):
                found[version].append(run(versions[version], part, card))
        figures["parts"][name] = result = compared(least(found["before"]), least(found["after"]), part.unit)
        print(name, {key: value for key, value in result.items() if key != part.unit}, flush=True)
        write_result(f"{arguments.name}-{card}", figures, *(["triton"] if on_gpu else []))


if __name__ == "__main__":
    main()
