"""Decode attention of the models that people serve, on a GPU: every shape on every batch, beside FlashAttention-3.

    python -m benchmarks.kernels.shapes  # all cells; results/shapes-CARD.json
    python -m benchmarks.kernels.shapes --shapes fp8 "gpt-oss full" --batches "64 x (8192 + 512)" "8 x (8192)"
    python -m benchmarks.kernels.shapes --resume  # cells that this commit has not measured

A cell is one layer of one shape on one batch: REQUESTS x (tokens of each level, from what all share to a request's
own). Times are measured as in decode.py. SOL counts only what a window lets the queries see. Every output is compared
with float64, before the timing and after it; one that is wrong has no time. `trunkattn` has a plan of its own,
`trunkattn_one_graph` one of fixed size, which serves any batch. FlashAttention-3 reads 8-bit caches with 8-bit queries,
as in vLLM; ours is then measured on a bf16 cache, too. The goals are in shape_table.py.

Kernels are compiled first, by --jobs processes that run each shape on each batch once. Another process measures; one
that crashes or hangs costs its cell and is started again. Rows are saved as they come, and the file keeps the rows of
other cells. After --seconds no cell is begun. The exit status is 1 if an output of ours was wrong or missing.
"""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import Any

import torch

from benchmarks.kernels.shape_cells import Limits, Shape, compiled, empty_row, kernels_of, measured_limits, measured_row
from benchmarks.lib.options import integer, need_gpu, parsed_by
from benchmarks.lib.report import RESULTS, environment, read_result, short_name, write_result
from benchmarks.lib.subprocesses import Apart, Lost
from benchmarks.workloads.shape_table import (
    BATCHES,
    FLASHINFER,
    OURS,
    SHAPES,
    WAYS,
    batch_name,
    order_of,
    parse_batch,
    shapes_named,
    summary,
    us_of,
    why_not,
)
from trunkattn.analysis.trees import TreeLevels

COMPILE_SHARE = 0.5  # of the time, after which the rest is compiled where it is measured
PATIENCE_SECONDS = 60  # for one way to run a cell
COMPILE_SECONDS = 150  # for the same, if it may compile all that it needs
MOST_LOST = 2  # processes that a way may cost, before it is left out

Cell = tuple[Shape, TreeLevels]
Rows = list[dict[str, Any]]


class Results:
    """The result file of a card: its rows by shape and batch, those of earlier runs, too."""

    def __init__(self, card: str) -> None:
        self.card, self.name = card, f"shapes-{short_name(card)}"
        self._rows = {(row["shape"], row["batch"]): row for row in read_result(self.name).get("rows", ())}
        self._commit = environment()["commit"]

    def lacks(self, shape: Shape, tree: TreeLevels) -> bool:
        """Whether this commit has not measured a cell."""
        row = self._rows.get((shape.name, batch_name(tree)), {})
        return row.get("commit") != self._commit or all(us_of(row, way) is None for way in WAYS)

    @property
    def rows(self) -> Rows:
        """Rows in the order of the tables."""
        return sorted(self._rows.values(), key=order_of)

    def add(self, row: dict[str, Any], limits: Limits) -> None:
        """Saves a row in place of an earlier one. limits: of this run."""
        self._rows[row["shape"], row["batch"]] = row | {"commit": self._commit}
        figures = {
            "card": self.card, "read_tb_per_s": round(limits[0] / 1e6, 3), "bf16_tflops": round(limits[1] / 1e6, 1),
            "summary": summary(self.rows), "rows": self.rows,
        }  # fmt: skip
        write_result(self.name, figures, "triton")


def compile_ahead(shapes: Sequence[Shape], trees: Sequence[TreeLevels], jobs: int, until: float) -> set[str]:
    """Fills the caches of compiled kernels, which all processes share, as far as the time suffices. Returns the names
    of shapes for which that was not done."""
    kinds, done = kernels_of(shapes), set[Shape]()
    left = iter(kinds)

    def work() -> None:
        process = Apart()
        for shape in left:  # the threads take from one iterator
            if monotonic() > until:
                break
            try:
                answers = process.ask(compiled, shape, trees, patience=COMPILE_SECONDS, until=until)
                print(f"compiled: {shape.name}, {shape.kv_dtype}, {len(list(answers))} batches", flush=True)
                done.add(shape)
            except Lost as reason:
                print(f"not compiled: {shape.name}, {shape.kv_dtype}: {reason}", flush=True)
        process.stop()

    with ThreadPoolExecutor(jobs) as pool:
        for thread in [pool.submit(work) for _ in range(min(jobs, len(kinds)))]:
            thread.result()
    return {shape.name for shape in kinds if shape not in done}


class Losses:
    """Processes that were lost, by what ran in them."""

    def __init__(self) -> None:
        self._counts = Counter[tuple[str, str]]()

    @staticmethod
    def _key(shape: str, way: str) -> tuple[str, str]:
        """What fails on one shape may run on another; but FlashInfer's kernels, if they are to be compiled first."""
        return ("" if way == FLASHINFER else shape), way

    def add(self, shape: str, way: str) -> None:
        self._counts[self._key(shape, way)] += 1

    def left_out(self, shape: str) -> list[str]:
        """Ways that are not tried again on a shape."""
        return [way for way in ("case", *WAYS) if self._counts[self._key(shape, way)] >= MOST_LOST]


def row_after(row: dict[str, Any], reason: str) -> dict[str, Any]:
    """What is known of a cell whose process was lost."""
    under_way = row.get("under_way", "case")
    return {name: value for name, value in row.items() if name != "under_way"} | {under_way: {"missing": reason}}


class Measurement:
    """The process that measures, and what it has cost so far. until: moment after which no cell is begun."""

    def __init__(self, until: float) -> None:
        self._until, self._process, self._losses = until, Apart(), Losses()
        (self.limits,) = self._process.ask(measured_limits, patience=PATIENCE_SECONDS)

    @property
    def is_over(self) -> bool:
        return monotonic() > self._until

    def row_of(self, shape: Shape, tree: TreeLevels, patience: float) -> dict[str, Any]:
        """One cell. patience: seconds for one way to run it."""
        row = empty_row(shape, tree, self.limits)
        without = self._losses.left_out(shape.name)
        if "case" in without:
            return row_after(row, f"left out: {MOST_LOST} processes were lost on this shape before")
        try:
            asked = (shape, tree, self.limits, without)
            for answer in self._process.ask(measured_row, *asked, patience=patience, until=self._until + patience):
                row = answer
        except Lost as reason:
            self._losses.add(shape.name, row.get("under_way", "case"))
            row = row_after(row, str(reason))
        return row

    def stop(self) -> None:
        self._process.stop()


def measure_all(cells: Sequence[Cell], results: Results, not_compiled: set[str], until: float) -> Rows:
    """The rows of cells, each saved and printed. Shapes that were not compiled come last, for they may hang."""
    measurement, rows = Measurement(until), Rows()
    read, flops = measurement.limits
    print(f"{results.card}: {read / 1e6:.2f} TB/s read, {flops / 1e6:.0f} TFLOP/s bf16", flush=True)
    for shape, tree in sorted(cells, key=lambda cell: cell[0].name in not_compiled):
        if measurement.is_over:
            print(f"stopped after {len(rows)} of {len(cells)} cells: the time is over; --resume measures the others")
            break
        patience = COMPILE_SECONDS if shape.name in not_compiled else PATIENCE_SECONDS
        rows.append(measurement.row_of(shape, tree, patience))
        results.add(rows[-1], measurement.limits)
        print(line_of(rows[-1]), flush=True)
    measurement.stop()
    return rows


def line_of(row: dict[str, Any]) -> str:
    """One line on one cell."""
    cells = []
    for way in ("case", *WAYS):
        if way in row:
            us, tiling = us_of(row, way), row[way].get("tiling")
            text = why_not(row, way) if us is None else f"{us}" + (f" ({tiling})" if tiling else "")
            cells.append(f"{way} {text}")
    return f"{row['shape']}, {row['batch']}: SOL {row['sol_us']}, {', '.join(cells)}"


def check_pages(parser: argparse.ArgumentParser, shapes: Sequence[Shape], trees: Sequence[TreeLevels]) -> None:
    """Checks that whole pages are shared: others cannot be."""
    for shape in shapes:
        for tree in trees:
            if any(tokens % shape.page_size for tokens in tree.tokens[:-1]):
                pages = f"shared levels of whole pages, which are of {shape.page_size} tokens in {shape.name}"
                parser.error(f"argument --batches: {batch_name(tree)!r}: expected {pages}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    named, batches = parsed_by(shapes_named), [*map(parse_batch, BATCHES)]
    parser.add_argument("--shapes", nargs="+", type=named, default=[SHAPES], help="parts of their names; default: all")
    parser.add_argument("--batches", nargs="+", type=parsed_by(parse_batch), default=batches, help="default: eight")
    parser.add_argument(
        "--seconds", type=integer(1, 100_000), default=420, help="after which no cell is begun; default: 420"
    )
    cores = len(os.sched_getaffinity(0))
    parser.add_argument(
        "--jobs", type=integer(0, 256), default=cores, help="processes that compile; 0: none; default: cores"
    )
    parser.add_argument("--resume", action="store_true", help="leave out cells that the file has of this commit")
    arguments = parser.parse_args()
    shapes, begin = list(dict.fromkeys(shape for found in arguments.shapes for shape in found)), monotonic()
    check_pages(parser, shapes, arguments.batches)
    need_gpu()
    results = Results(torch.cuda.get_device_name())
    cells = [(shape, tree) for shape in shapes for tree in arguments.batches]
    cells = [cell for cell in cells if not arguments.resume or results.lacks(*cell)]
    not_compiled = {shape.name for shape, _ in cells}
    if arguments.jobs:
        chosen = list(dict.fromkeys(shape for shape, _ in cells))
        half_time = begin + COMPILE_SHARE * arguments.seconds
        not_compiled = compile_ahead(chosen, arguments.batches, arguments.jobs, half_time)
        print(f"compiling took {monotonic() - begin:.0f} s", flush=True)
    try:
        rows = measure_all(cells, results, not_compiled, begin + arguments.seconds)
    except Lost as reason:
        parser.exit(1, f"shapes.py: nothing was measured: {reason}\n")
    for name, found in summary(results.rows).items():
        print(f"{name}: times SOL {found['times_sol']}, goal {found['goal']}, {len(found['misses'])} goals missed")
    print(f"{len(rows)} cells took {monotonic() - begin:.0f} s: {RESULTS / results.name}.json")
    sys.exit(any(us_of(row, way) is None for row in rows for way in OURS))


if __name__ == "__main__":
    main()
