"""The cells of shapes.py: one layer of one shape on one batch, by every way to run it. For processes that may be lost.

Their functions are generators, which `subprocesses.Apart` calls.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch

from benchmarks.kernels.decode import ceilings, microseconds
from benchmarks.kernels.decode_cases import Shape, expected, make_case, ours, relative_error, sol_us
from benchmarks.peers.gpu_kernels import Case, Run, flash_attention_3, flashinfer_decode
from benchmarks.workloads.shape_table import FA3, FLASHINFER, OURS_BFLOAT16, batch_name
from trunkattn.analysis.trees import TreeLevels

TOLERANCE = 0.05  # root mean squares of an output: 8 bits of mantissa, the largest of many thousand errors
TOLERANCE_8_BIT_QUERIES = 0.4  # 4 bits of mantissa, of queries and of weights
FLASHINFER_HEAD_DIM = 128  # it would compile others for minutes

Limits = tuple[float, float]  # see kernels.ceilings
Made = tuple[Run, dict[str, Any]]  # a way to run a case, and what is noted of it


def our_way(case: Case, fixed: bool) -> Made:
    run, plan = ours(case, fixed)
    return run, {"tiling": plan.stats.policy, "items": plan.stats.num_work_items}


def flashinfer(case: Case) -> Made:
    if case.heads[2] != FLASHINFER_HEAD_DIM:
        raise ValueError(f"it is run here on heads of {FLASHINFER_HEAD_DIM} alone")
    return flashinfer_decode(case), {}


MAKERS: dict[str, Callable[[Case], Made]] = {
    "trunkattn": lambda case: our_way(case, fixed=False),
    "trunkattn_one_graph": lambda case: our_way(case, fixed=True),
    FA3: lambda case: (flash_attention_3(case), {}),
    FLASHINFER: flashinfer,
}


def on_16_bit_cache(shape: Shape) -> Shape:
    return shape._replace(kv_dtype=shape.dtype)


def tolerance_of(case: Case, way: str) -> float:
    has_8_bit_queries = way == FA3 and case.kv[0][0].dtype.itemsize == 1
    return TOLERANCE_8_BIT_QUERIES if has_8_bit_queries else TOLERANCE


def measure(case: Case, truth: torch.Tensor, run: Run, tolerance: float) -> dict[str, Any]:
    """Time and error. The output is compared again once graphs have run, for a launch may leave something behind."""
    error = relative_error(run(0), truth)
    if error > tolerance:
        return {"wrong": f"error {error:.3g}"}
    us = microseconds(run, len(case.kv))
    run(0).fill_(math.nan)
    error = max(error, relative_error(run(len(case.kv) - 1), truth))
    if error > tolerance:
        return {"wrong": f"error {error:.3g} after the timing"}
    return {"us": round(us, 2), "error": round(error, 5)}


def cell_of(case: Case, truth: torch.Tensor, way: str) -> dict[str, Any]:
    """One way to run a case, or why there is no time."""
    try:
        run, noted = MAKERS[way](case)
        return measure(case, truth, run, tolerance_of(case, way)) | noted
    except Exception as reason:  # what cannot run here is reported, not fatal
        if case.q.is_cuda:
            torch.cuda.synchronize()  # raises where nothing can run any more
        return {"missing": f"{type(reason).__name__}: {str(reason)[:200]}"}


def empty_row(shape: Shape, tree: TreeLevels, limits: Limits) -> dict[str, Any]:
    """A row without a time."""
    return {"shape": shape.name, "batch": batch_name(tree), "sol_us": round(sol_us(shape, tree, limits), 3)}


def measured_row(
    shape: Shape, tree: TreeLevels, limits: Limits, without: Collection[str] = (), device: str = "cuda"
) -> Iterator[dict[str, Any]]:
    """A row, as far as it is measured. under_way: what comes next. without: ways that are left out. A cache of 8 bits
    is followed by one of 16, for ours."""
    row = empty_row(shape, tree, limits)
    parts = [(shape, {way: way for way in MAKERS})]
    if on_16_bit_cache(shape) != shape:
        parts.append((on_16_bit_cache(shape), OURS_BFLOAT16))
    for of_part, names in parts:
        yield row | {"under_way": "case"}
        case = make_case(of_part, tree, device)
        truth = expected(case)
        for way, name in names.items():
            if name in without:
                row[name] = {"missing": "left out: it ended or hung its process before"}
                continue
            yield row | {"under_way": name}
            row[name] = cell_of(case, truth, way)
        del case, truth
        torch.cuda.empty_cache()
    yield row


def measured_limits() -> Iterator[Limits]:
    """Limits of the card."""
    yield ceilings()
    torch.cuda.empty_cache()


def kernels_of(shapes: Sequence[Shape]) -> list[Shape]:
    """What is compiled for shapes: each kind once, under the name of the first that needs it."""
    kinds: dict[Shape, Shape] = {}
    for shape in [*shapes, *map(on_16_bit_cache, shapes)]:
        kinds.setdefault(shape._replace(name=""), shape)
    return list(kinds.values())


def compiled(shape: Shape, trees: Sequence[TreeLevels], device: str = "cuda") -> Iterator[str]:
    """Runs a shape on each batch once, with the plans and the kinds of tensors that are measured later."""
    for tree in trees:
        case = make_case(shape, tree, device, copies=1)
        for fixed in (False, True):
            ours(case, fixed)[0](0)
            if case.q.is_cuda:
                torch.cuda.synchronize()
        del case
        torch.cuda.empty_cache()
        yield batch_name(tree)
