"""`BatchAttention.run` as one op of torch, which `torch.compile` takes into a graph as it is.

An op takes only tensors and numbers. So a plan goes into a graph as the number of an object, which a guard compares at
each call, and the op runs the plan that has the number then.
"""

import math
from collections.abc import Callable
from typing import Any, Final
from weakref import WeakValueDictionary

import torch
from torch import library

from trunkattn.layer_inputs import LayerInputs, Scale

Run = Callable[..., Any]

# The only way from a number in a graph to an object. Entries go away with their plans.
_PLANS: Final[WeakValueDictionary[int, Any]] = WeakValueDictionary()
_SCALES: Final = ("q_scale", "k_scale", "v_scale")


def number_of(plan: Any) -> int:
    """The number of a `Plan`, under which the op finds it for as long as it lives."""
    _PLANS[id(plan)] = plan
    return id(plan)


def run_in_graph(number: int, inputs: LayerInputs, latent: bool, out: torch.Tensor) -> torch.Tensor:
    """Runs a plan in a graph that is traced; returns lse.

    Args:
        number: of the plan.
        inputs: checked arguments, as `of_layer` returns them.
        latent: whether the caches of `inputs` are two views of one latent cache.
        out: the tensor to write into.

    Raises:
        RuntimeError: torch.export traces, whose program would keep the number of a plan that is gone when it runs.
    """
    if torch.compiler.is_exporting():
        raise RuntimeError(
            "BatchAttention.run in torch.export: expected no export, as a plan lives in one process; use torch.compile"
        )
    scales = [getattr(inputs, name) for name in _SCALES]
    found: torch.Tensor = torch.ops.trunkattn.run(
        number,
        inputs.q,
        inputs.q_rope,
        inputs.k_cache.squeeze(2) if latent else inputs.k_cache,
        None if latent else inputs.v_cache,
        out,
        inputs.sinks,
        [scale if isinstance(scale, torch.Tensor) else None for scale in scales],
        [_number(scale) for scale in scales],
    )
    return found


def _number(scale: Scale) -> float:
    """A scale as a number; NaN if it is None or a tensor."""
    return math.nan if scale is None or isinstance(scale, torch.Tensor) else float(scale)


def _run(number: int, *given: Any) -> torch.Tensor:
    plan = _PLANS[number]
    q, q_rope, k_cache, v_cache, out, sinks, tensors, numbers = given
    scales: dict[str, Scale] = {}
    for name, tensor, scale in zip(_SCALES, tensors, numbers, strict=True):
        scales[name] = None if tensor is None and math.isnan(scale) else scale if tensor is None else tensor
    if v_cache is None:  # a latent cache has one scale
        scales["v_scale"] = None
    queries = q if q_rope is None else (q, q_rope)
    lse: torch.Tensor
    _, lse = plan.owner.run(plan, queries, k_cache, v_cache, out, True, sinks=sinks, **scales)
    return lse


def _run_fake(number: int, *given: Any) -> torch.Tensor:
    _, _, _, _, out, *_ = given
    return torch.empty(out.shape[:2], dtype=torch.float32, device=out.device)


library.define(
    "trunkattn::run",
    "(SymInt number, Tensor q, Tensor? q_rope, Tensor k_cache, Tensor? v_cache, Tensor(a!) out, Tensor? sinks,"
    " Tensor?[] tensors, float[] numbers) -> Tensor",
    tags=(torch.Tag.needs_exact_strides, torch.Tag.cudagraph_unsafe),  # a CUDA graph would keep the arrays of a plan
)
for _device in ("cpu", "cuda"):
    library.impl("trunkattn::run", _device)(_run)
library.register_fake("trunkattn::run", _run_fake)
