"""Two versions of the project on one card, cell by cell: does a change make anything slower?

    python benchmarks/compare_versions.py --before ../old                 # results/compare-CARD.json
    python benchmarks/compare_versions.py --before ../old --part kernels device_planner --rounds 3

`--before` and `--after` are checkouts; each runs its own benchmarks on its own sources, in turns (before, after, after,
before, ...), so that a card that slows down over the run does not favour one of them. A cell's time is its least over
the rounds. No peers are run: the times of both are this project's own.
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
from report import short_name, write_result

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


class Part(NamedTuple):
    """A benchmark of a checkout. result: the name of its file, `{card}` for the card's."""

    script: str
    arguments: tuple[str, ...]
    result: str
    cells: Callable[[dict[str, Any]], Iterator[tuple[str, float]]]


PARTS = {
    "kernels": Part(
        "kernels.py",
        ("--peers", "--heads", "32/8", "16/8", "--name", "compare"),
        "kernels-{card}-compare",
        kernel_cells,
    ),
    "device_planner": Part("device_planner.py", (), "device-planner-{card}", planner_cells),
    "prefill": Part("prefill.py", ("--peers",), "prefill-{card}", prefill_cells),
    "hybrid": Part("hybrid.py", ("--part", "sweep", "--batches", "12", "--peers"), "hybrid-{card}", hybrid_cells),
}


def run(checkout: Path, part: Part, card: str) -> Cells:
    """One benchmark of one checkout."""
    environment = os.environ | {"PYTHONPATH": str(checkout / "src"), "BENCHMARK_COMMIT": "compared"}
    command = [sys.executable, f"benchmarks/{part.script}", *part.arguments]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{checkout}: {' '.join(command)} failed: {done.stderr[-2000:]}")
    path = checkout / "benchmarks" / "results" / f"{part.result.format(card=card)}.json"
    return dict(part.cells(json.loads(path.read_text())))


def least(rounds: list[Cells]) -> Cells:
    """Each cell's least time."""
    return {name: min(cells[name] for cells in rounds) for name in rounds[0]}


def compared(before: Cells, after: Cells) -> dict[str, Any]:
    """Ratios of after to before; above 1 is slower."""
    ratios = {name: after[name] / before[name] for name in before if name in after and before[name] > 0}
    ratios = {name: ratio for name, ratio in ratios.items() if ratio == ratio}  # a cell that could not run is NaN
    worst = max(ratios, key=lambda name: ratios[name])
    return {
        "cells": len(ratios),
        "geomean": round(geometric_mean(ratios.values()), 4),
        "worst": {"cell": worst, "ratio": round(ratios[worst], 4)},
        "over_3_percent": {name: round(ratio, 4) for name, ratio in ratios.items() if ratio > 1.03},
        "us": {name: [before[name], after[name]] for name in ratios},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="a checkout of the older version")
    parser.add_argument("--after", type=Path, default=Path(__file__).parents[1], help="default: this one")
    parser.add_argument("--part", nargs="+", default=list(PARTS), choices=list(PARTS), help="default: all")
    parser.add_argument("--rounds", type=int, default=2, help="of each version")
    parser.add_argument("--name", default="compare", help="of the result file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "compare_versions.py: torch finds no CUDA device: this benchmark needs an NVIDIA GPU\n")
    card = short_name(torch.cuda.get_device_name())
    versions = {"before": arguments.before.resolve(), "after": arguments.after.resolve()}
    figures: dict[str, Any] = {"card": torch.cuda.get_device_name(), "rounds": arguments.rounds, "parts": {}}
    for name in arguments.part:
        found: dict[str, list[Cells]] = {"before": [], "after": []}
        for turn in range(arguments.rounds):
            for version in ("before", "after") if turn % 2 == 0 else ("after", "before"):
                found[version].append(run(versions[version], PARTS[name], card))
        figures["parts"][name] = result = compared(least(found["before"]), least(found["after"]))
        print(name, {key: value for key, value in result.items() if key != "us"}, flush=True)
        write_result(f"{arguments.name}-{card}", figures, "triton")


if __name__ == "__main__":
    main()
