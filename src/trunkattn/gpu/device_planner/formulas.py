"""The host planner's formulas, compiled by Triton: one source for both planners, so that their integers are equal.

A formula is plain Python: integers, NamedTuples, `min`, `max`, `//` and `if`. Numba compiles it in the planner. Here
Triton compiles the same code object, for scalars and, where it has no `if`, for tensors too.
"""

from collections.abc import Callable
from types import FunctionType
from typing import Any, Final

import triton
import triton.language as tl

from trunkattn.planner.tiles import cost, layout


@triton.jit
def _min(a, b):
    return tl.minimum(a, b)


@triton.jit
def _max(a, b):
    return tl.maximum(a, b)


# What the names in a formula mean on the device: Python's `min` and `max` know no tensors.
_NAMES: Final = {"__name__": __name__, "tl": tl, "min": _min, "max": _max}


def _on_device(formula: Callable[..., Any]) -> Any:
    source = getattr(formula, "py_func", formula)  # Numba may be told not to compile
    return triton.jit(FunctionType(source.__code__, _NAMES, source.__name__))


item_ns = _on_device(cost.item_ns)
listed_segments = _on_device(cost.listed_segments)
load_ns = _on_device(cost.load_ns)
memory_tokens = _on_device(cost.memory_tokens)
target_of = _on_device(layout.target_of)
step_of = _on_device(layout.step_of)
pitch_of = _on_device(layout.pitch_of)
lead_of = _on_device(layout.lead_of)
splits_of = _on_device(layout.splits_of)
portion_ns = _on_device(cost.portion_ns)
tile_blocks = _on_device(cost.tile_blocks)
