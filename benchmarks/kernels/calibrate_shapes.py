"""Measures every tiling of the decode attention of models' shapes on this card, and fits the times of their tiles.

    python -m benchmarks.kernels.calibrate_shapes  # results/calibration-shapes-CARD.json
    python -m benchmarks.kernels.calibrate_shapes --batches "64 x (1024)"  # only these; the file keeps others
    python -m benchmarks.kernels.calibrate_shapes --latent  # latent attention on the batches of mla.py
    python -m benchmarks.kernels.calibrate_shapes --fit FILE  # only the fit, on what was measured; needs no GPU

Shapes whose tiles are the same (`hopper_tiles`) are a family and have times of their own. The fit is that of
calibrate.py: the least error of the predicted times, and the least loss of the tiling that they would choose. Outputs
are compared with float64. Kernels are compiled first, by --jobs processes. After --seconds no batch is begun.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from benchmarks.kernels import mla
from benchmarks.kernels.calibration_families import config_of, families_of, fitted_text
from benchmarks.kernels.decode import Run, ceilings, microseconds
from benchmarks.kernels.decode_cases import Shape, expected, make_case, relative_error
from benchmarks.kernels.shapes import compile_ahead
from benchmarks.lib.internals import backend_of
from benchmarks.lib.options import accepted_by, existing, integer, need_gpu
from benchmarks.lib.report import short_name, with_earlier, write_result
from benchmarks.workloads import PagedBatch
from benchmarks.workloads.shape_table import BATCHES, LATENT_SHAPES, SHAPES, batch_name, parse_batch
from trunkattn import BatchAttention, Plan
from trunkattn.analysis.trees import TreeLevels
from trunkattn.gpu import step_planners
from trunkattn.gpu.cards import facts_of
from trunkattn.planner.tiles.candidates import Tiling

TIMED = (
    "llama3-8b 32/8x128", "llama3-70b/TP8 8/1x128", "qwen2.5-7b 28/4x128", "mistral-large 96/8x128",
    "gpt-oss full 64/8x64 sinks", "gpt-oss window 64/8x64 sinks", "llama3.2-1b 32/8x64",
    "gemma3-12b 16/8x256", "qwen3-next 16/2x256",
    "llama3-8b fp8 32/8x128", "qwen3-30b fp8 32/4x128", "gemma3-12b fp8 16/8x256",
    "llama3-8b page 1 32/8x128", "gpt-oss page 1 64/8x64 sinks",
)  # fmt: skip
MORE_BATCHES = ("64 x (1024)", "16 x (8192)", "128 x (8 groups x 512 + 128)", "256 x (256)", "32 x (1024 + 512)")
REPLAYS, WARM_UP_SECONDS = 7, 0.01  # the card is warm from the tiling before
TOLERANCE = 0.08  # as in shape_cells.py; other tilings round otherwise
Row = dict[str, Any]


@contextmanager
def only(tiling: Tiling) -> Iterator[None]:
    """Makes every plan take a tiling."""
    choose = step_planners.choose_step
    step_planners.choose_step = lambda *given: replace(choose(*given), tiling=tiling)
    try:
        yield
    finally:
        step_planners.choose_step = choose


class Cell(NamedTuple):
    """A batch of a shape. run_of: runs a plan on a copy of the cache; error_of: what an output is wrong by."""

    batch: PagedBatch
    window: int | None
    copies: int
    run_of: Callable[[Plan], Run]
    error_of: Callable[[torch.Tensor], float]


def cell_of(shape: Shape, tree: TreeLevels, attention: BatchAttention) -> Cell:
    """A cell with a cache of keys and values."""
    case = make_case(shape, tree)
    truth, out = expected(case), torch.full_like(case.q, torch.nan)

    def run_of(plan: Plan) -> Run:
        return lambda copy: attention.run(plan, case.q, *case.kv[copy], out=out, sinks=case.features.sinks)

    return Cell(case.batch, case.features.window, len(case.kv), run_of, lambda found: relative_error(found, truth))


def latent_cell_of(shape: Shape, tree: TreeLevels, attention: BatchAttention) -> Cell:
    """A cell with a latent cache."""
    case = mla.make_case(mla.paged(tree), shape.num_qo_heads)
    out = torch.full((*case.q.shape[:2], mla.LATENT), torch.nan, dtype=case.q.dtype, device=case.q.device)

    def run_of(plan: Plan) -> Run:
        return lambda copy: attention.run(plan, case.q, case.caches[copy], None, out)

    return Cell(case.batch, None, len(case.caches), run_of, lambda found: mla.error_of(case, found))


def measure(shape: Shape, tree: TreeLevels) -> Row:
    """Microseconds of every tiling of a batch."""
    attention = BatchAttention(config_of(shape), "cuda")
    cell = (cell_of if shape.latent_dim is None else latent_cell_of)(shape, tree, attention)
    rule = backend_of(attention)._planner.rule
    found = {}
    for tiling in rule.priced.tilings:
        with only(tiling):
            us = timed(cell, attention)
        if us is not None:
            found[tiling.name(rule)] = us
    return {"shape": shape.name, "batch": batch_name(tree), "us": found}


def timed(cell: Cell, attention: BatchAttention) -> float | None:
    """The time; None: the output is wrong."""
    tables = torch.from_numpy(cell.batch.block_table), torch.from_numpy(cell.batch.seq_lens)
    plan = attention.plan(*tables, sliding_window=cell.window)
    run = cell.run_of(plan)
    if (error := cell.error_of(run(0))) > TOLERANCE:
        print(f"wrong: error {error:.3g}, {plan.stats.policy}", flush=True)
        return None
    return round(microseconds(run, cell.copies, REPLAYS, WARM_UP_SECONDS), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latent", action="store_true", help="the latent shapes, and the batches of mla.py")
    parser.add_argument(
        "--shapes",
        nargs="+",
        choices=[shape.name for shape in (*SHAPES, *LATENT_SHAPES)],
        metavar="NAME",
        help="default: all",
    )
    parser.add_argument(
        "--batches", nargs="+", type=accepted_by(parse_batch), help='such as "64 x (1024)"; default: all'
    )
    parser.add_argument("--jobs", type=integer(0, 256), default=len(os.sched_getaffinity(0)), help="that compile")
    parser.add_argument("--seconds", type=integer(1, 100_000), default=300, help="after which no batch is begun")
    parser.add_argument("--fit", type=existing, help="a result of this script; measures nothing")
    parser.add_argument("--fit-seconds", type=integer(0, 100_000), default=60, help="for each family; 0: no fit")
    arguments = parser.parse_args()
    if arguments.fit:
        result = json.loads(arguments.fit.read_text())
    else:
        need_gpu(", or --fit")
        names = arguments.shapes or ([shape.name for shape in LATENT_SHAPES] if arguments.latent else TIMED)
        result = measured([shape for shape in (*SHAPES, *LATENT_SHAPES) if shape.name in names], arguments)
    for family in families_of(result) if arguments.fit_seconds else ():
        print(fitted_text(family, arguments.fit_seconds), flush=True)


def measured(shapes: list[Shape], arguments: argparse.Namespace) -> dict[str, Any]:
    """The result, written after each shape."""
    until, batches = time.monotonic() + arguments.seconds, arguments.batches
    batches = batches or (mla.BATCHES if arguments.latent else (*BATCHES, *MORE_BATCHES))
    trees, of_keys = [parse_batch(text) for text in batches], [shape for shape in shapes if shape.latent_dim is None]
    if arguments.jobs and of_keys:  # the latent shapes share one kernel
        compile_ahead(of_keys, trees, arguments.jobs, until)
    facts = facts_of(torch.device("cuda"))
    figures: dict[str, Any] = {"card": facts._asdict(), "bytes_per_us": int(ceilings()[0])}
    name, rows = f"calibration-shapes-{short_name(facts.name)}", list[Row]()
    for shape in shapes:
        for tree in trees:
            if time.monotonic() > until:
                break
            rows.append(measure(shape, tree))
            print(shape.name, batch_name(tree), rows[-1]["us"], flush=True)
            torch.cuda.empty_cache()
        figures["rows"] = with_earlier(name, rows, ("shape", "batch"))
        print(write_result(name, figures, "triton"), flush=True)
    return figures


if __name__ == "__main__":
    main()
