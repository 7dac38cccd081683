"""Attention in training and its gradients as two custom ops of torch, so that autograd and `torch.compile` take them.

On a GPU the kernels of the table compute; on a CPU blocks of PyTorch do. Ops take only tensors and numbers. They take
no list of tensors, because then torch.autograd.grad could not pass batches of gradients (`is_grads_batched`) through
them, and PyTorch would take longer to call them. So these arguments stand for lists and records:

    table_0 to table_3: cu_seqlens of queries and of keys for packed sequences, the `TreeTables` of a tree, else None.
    switches: causal, sliding_window (`UNLIMITED` for none), deterministic, and the two numbers of the `TreeWork`. The
        last three are for the backward pass.
    soft_cap: 0 for none.

`torch.library.custom_op` inspects the schema and all results at each call, which takes longer than a small attention.
So these ops are defined by `impl` for each device, with an autograd function of our own.
"""

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import ModuleType
from typing import Any, Final

import torch
from torch import library
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from trunkattn.derivatives import are_recorded
from trunkattn.gpu.cards import card_at
from trunkattn.gpu.kernel import Work, all_that_compute, choose, portable_kernel
from trunkattn.planner.work_list import UNLIMITED
from trunkattn.training import spec
from trunkattn.training.cpu_blocks import CpuSequence, Pair, Triple, sums_dtype
from trunkattn.training.sequences import Sequences, TreeTables


def arguments_of(given: Sequences, deterministic: bool = False) -> tuple[Any, ...]:
    """The last arguments of the ops for some sequences; `_options_of` reads them back."""
    tables = (given.cu_seqlens_q, given.cu_seqlens_k, None, None) if given.tree is None else given.tree
    window = int(given.sliding_window or UNLIMITED)
    switches = [int(given.causal), window, int(deterministic), given.pairs, given.largest]
    return given.sinks, *tables, switches, given.sm_scale, float(given.soft_cap or 0)


def _options_of(sinks: torch.Tensor | None, *options: Any) -> tuple[Sequences, bool]:
    """The Sequences that the last arguments of an op describe, and whether these ask for gradients that are bit-equal
    over repeated runs."""
    *tables, (causal, window, deterministic, pairs, largest), sm_scale, soft_cap = options
    given = [table for table in tables if table is not None]
    sums = (given[0].contiguous(), given[1].contiguous()) if len(given) == 2 else (None, None)
    sequences = Sequences(
        causal=bool(causal),
        sm_scale=sm_scale,
        cu_seqlens_q=sums[0],
        cu_seqlens_k=sums[1],
        tree=TreeTables(*given) if len(given) == len(TreeTables._fields) else None,
        sliding_window=None if window == UNLIMITED else window,
        soft_cap=soft_cap or None,
        sinks=None if sinks is None else sinks.contiguous(),
        pairs=pairs,
        largest=largest,
    )
    return sequences, bool(deterministic)


def _names(given: Sequences, q: torch.Tensor, k: torch.Tensor, deterministic: bool) -> tuple[str, ...]:
    """The options of a `TrainingConfig` for some sequences."""
    return given.options + given.layout(q, k) + ("deterministic",) * deterministic


def _kernel(work: Work, tensors: Triple, options: tuple[str, ...]) -> ModuleType:
    """The source of the first kernel that computes some work on the card of q, k and v and can read them; the portable
    kernel reads all. `options` are those of a `TrainingConfig`."""
    *fast, portable = _sources(work, spec.TrainingConfig.of(*tensors, options), tensors[0].device)
    return next((source for source in fast if source.reads(*tensors)), portable)


@lru_cache
def _sources(work: Work, config: spec.TrainingConfig, device: torch.device) -> tuple[ModuleType, ...]:
    """The sources of the kernels of the table, in its order; the last one is portable."""
    card = card_at(device)
    choice = choose(work, config, card)
    if choice.kernel is None:
        *_, reasons = choice.passed_over.values()  # of the one that refuses least
        raise ValueError(f"no kernel computes {work.value} of q: {'; '.join(reasons)}")
    fast = (kernel for kernel in all_that_compute(work, config, card) if not kernel.portable)
    return *(kernel.source() for kernel in fast), portable_kernel(work).source()


_OPTIONS: Final = (
    "Tensor? sinks, Tensor? table_0, Tensor? table_1, Tensor? table_2, Tensor? table_3, SymInt[] switches,"
    " float sm_scale, float soft_cap"
)


def _forward_cpu(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any) -> Pair:
    """out like q, as wide as v, and lse [batch, num_qo_heads, seqlen_q] or, packed, [num_qo_heads, total_q]."""
    given, _ = _options_of(*options)
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=sums_dtype(q), device=q.device)
    lse = torch.full((*q.shape[:-1],), -math.inf, dtype=out.dtype, device=q.device)
    for rows, sequence in _cpu_sequences((q, k, v), given):
        found, found_lse = sequence.forward()
        out.view(-1, *out.shape[-2:])[rows[0]] = sequence.by_token(found)
        lse.view(-1, q.shape[-2])[rows[0]] = sequence.by_token(found_lse).squeeze(-1)
    return out.to(q.dtype), lse.transpose(-1, -2).contiguous()


def _forward_gpu(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any) -> Pair:
    given, deterministic = _options_of(*options)
    forward = _kernel(Work.FORWARD, (q, k, v), _names(given, q, k, deterministic)).forward
    with torch.cuda.device(q.device):  # launches go to the current device
        found: Pair = forward(q, k, v, given)
    return found


def _forward_fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any) -> Pair:
    lse = torch.empty_like(q[..., 0].transpose(-1, -2), dtype=sums_dtype(q), memory_format=torch.contiguous_format)
    return q.new_empty(*q.shape[:-1], v.shape[-1]), lse


def _backward_cpu(dout: torch.Tensor, dlse: torch.Tensor | None, *saved: Any) -> tuple[torch.Tensor, ...]:
    """dq, dk, dv and dsinks, which is empty without sinks. dlse: None for 0."""
    q, k, v, out, lse, *options = saved
    given, _ = _options_of(*options)
    heads = q.shape[-2]
    seen_dout = dout.masked_fill(out == 0, 0.0)  # dout may be NaN where out is 0 because a query sees no key
    delta = (seen_dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    delta = delta if dlse is None else delta - dlse.transpose(-1, -2)
    delta = delta.masked_fill(lse.transpose(-1, -2) == -math.inf, 0.0)  # dlse may be NaN there
    rows_of = (delta[..., None], lse.transpose(-1, -2)[..., None], dout)
    flat = tuple(tensor.reshape(-1, heads, tensor.shape[-1]) for tensor in rows_of)
    results = tuple(torch.zeros(tensor.shape, dtype=lse.dtype, device=q.device) for tensor in (q, k, v))
    for rows, sequence in _cpu_sequences((q, k, v), given):
        found = sequence.backward(*(sequence.by_head(tensor[rows[0]]) for tensor in flat))
        for result, part, own in zip(results, found, (rows[0], rows[1], rows[1]), strict=True):
            result.view(-1, *result.shape[-2:])[own] = sequence.by_token(part, result.shape[-2])
    dsinks = given.sink_gradients(delta.transpose(-1, -2), lse)
    return results[0].to(q.dtype), results[1].to(q.dtype), results[2].to(q.dtype), dsinks


def _backward_gpu(dout: torch.Tensor, dlse: torch.Tensor | None, *saved: Any) -> tuple[torch.Tensor, ...]:
    q, k, v, out, lse, *options = saved
    given, deterministic = _options_of(*options)
    backward = _kernel(Work.BACKWARD, (q, k, v), _names(given, q, k, deterministic)).backward
    with torch.cuda.device(q.device):
        found: tuple[torch.Tensor, ...] = backward((dout, dlse), (q, k, v, out, lse), given, deterministic)
    return found


def _backward_fake(dout: torch.Tensor, dlse: torch.Tensor | None, *saved: Any) -> tuple[torch.Tensor, ...]:
    q, k, v, _, lse, sinks, *_ = saved
    dq, dk, dv = (torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (q, k, v))
    return dq, dk, dv, lse.new_empty(0 if sinks is None else sinks.shape[0])


def _one_of_zeros(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """A tensor like one of size 0 in a dimension, and of size 1 there."""
    return tensor.new_zeros([size if other != dim else 1 for other, size in enumerate(tensor.shape)])


def _one_by_one(op: Callable[..., Any]) -> Callable[..., Any]:
    """The rule of an op under vmap: it computes each element by itself and stacks the results. Of no elements, one of
    zeros tells the shapes."""

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        pairs = list(zip(arguments, in_dims, strict=True))
        if info.batch_size == 0:
            pairs = [(_one_of_zeros(given, dim) if isinstance(dim, int) else given, dim) for given, dim in pairs]
        results = [
            op(*(given.select(dim, index) if isinstance(dim, int) else given for given, dim in pairs))
            for index in range(max(info.batch_size, 1))
        ]
        stacked = tuple(torch.stack(parts)[: info.batch_size] for parts in zip(*results, strict=True))
        return stacked, (0,) * len(stacked)

    return rule


def _define(name: str, schema: str, cpu: Callable[..., Any], gpu: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """The op of that name with a function for each device."""
    library.define(name, schema)
    library.impl(name, "cpu")(cpu)
    library.impl(name, "cuda")(gpu)
    library.register_fake(name, fake)
    op = getattr(torch.ops.trunkattn, name.split("::")[1]).default
    library.register_vmap(name, _one_by_one(op))
    return op


attention: Callable[..., Pair] = _define(
    "trunkattn::flash_attention",
    f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)",
    _forward_cpu,
    _forward_gpu,
    _forward_fake,
)
_backward: Callable[..., Any] = _define(
    "trunkattn::flash_attention_backward",
    "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _backward_cpu,
    _backward_gpu,
    _backward_fake,
)


def _below_autograd(op: Callable[..., Any], given: tuple[Any, ...]) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return op(*given)


def _transformed(function: Any, given: tuple[Any, ...]) -> Any:
    """The results of an autograd function within torch.func's transformations. It belongs to the transformation that
    has called its op, while `Function.apply` begins with the innermost one. Autograd does not record within it, but
    outer transformations do."""
    with enable_single_level_autograd_function():
        return super(torch.autograd.Function, function).apply(*given)


def _no_tangents(ctx: Any, *grad_inputs: Any) -> Any:
    raise RuntimeError(
        "trunkattn::flash_attention has no forward-mode derivatives: expected tensors without tangents; use"
        " torch.func.vjp or torch.func.jacrev, or torch.nn.functional.scaled_dot_product_attention with"
        " SDPBackend.MATH"
    )


class _Attention(torch.autograd.Function):
    """`attention` with its gradients."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Pair:
        found: Pair = _below_autograd(attention, given)
        ctx.options = given[-3:]
        ctx.set_materialize_grads(False)  # most callers ask for no lse
        # autograd saves no tensor that was made in inference mode, but its copy
        own = [tensor.clone() if tensor is not None and tensor.is_inference() else tensor for tensor in given[:8]]
        ctx.save_for_backward(*own[:3], *found, *own[3:])
        return found

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
        saved = ctx.saved_tensors  # checkpointing unpacks them once
        sinks = saved[5]
        given = torch.zeros_like(saved[3]) if dout is None else dout, dlse, *saved, *ctx.options
        dq, dk, dv, dsinks = _backward(*given) if torch.is_grad_enabled() else _below_autograd(_backward, given)
        return dq, dk, dv, None if sinks is None else dsinks.to(sinks.dtype), *(None,) * 7

    jvp = staticmethod(_no_tangents)


class _Gradients(torch.autograd.Function):
    """`_backward`, which has no gradients."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        return _below_autograd(_backward, given)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise RuntimeError(
            "trunkattn::flash_attention_backward has no gradients: expected first derivatives only, as recomputation"
            " gives no others; use torch.nn.functional.scaled_dot_product_attention with SDPBackend.MATH"
        )

    jvp = staticmethod(_no_tangents)


class _TransformedAttention(_Attention):
    """`_Attention` within torch.func's transformations."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Pair:
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
            return _Attention.forward(ctx, *given)


class _TransformedGradients(_Gradients):
    """`_Gradients` within torch.func's transformations."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
            return _Gradients.forward(ctx, *given)


@library.impl("trunkattn::flash_attention", "Autograd")
def _(*given: Any) -> Pair:
    if not are_recorded():
        found: Pair = _below_autograd(attention, given)
    elif torch._C._are_functorch_transforms_active():
        found = _transformed(_TransformedAttention, given)
    else:
        found = _Attention.apply(*given)
    return found


@library.impl("trunkattn::flash_attention_backward", "Autograd")
def _(*given: Any) -> Any:
    if not are_recorded():
        return _below_autograd(_backward, given)
    if torch._C._are_functorch_transforms_active():
        return _transformed(_TransformedGradients, given)
    return _Gradients.apply(*given)


def _cpu_sequences(tensors: Triple, given: Sequences) -> Iterator[tuple[tuple[slice, slice], CpuSequence]]:
    """Each sequence, with its tokens among all query tokens and among all key tokens. A tree is one."""
    q, k, v = (tensor.to(sums_dtype(tensor)).reshape(-1, *tensor.shape[-2:]) for tensor in tensors)
    bounds = []
    for name, own, flat in zip(("cu_seqlens_q", "cu_seqlens_k"), tensors, (q, k), strict=False):
        sums: torch.Tensor | None = getattr(given, name)
        if sums is not None:
            bounds.append(_checked(name, sums, len(flat)))
        elif given.tree is not None:
            bounds.append([0, len(flat)])
        else:
            bounds.append(list(range(0, len(flat) + 1, own.shape[1])) if own.shape[1] else [0] * (len(own) + 1))
    group = q.shape[1] // k.shape[1]
    for index in range(len(bounds[0]) - 1):
        rows, keys = (slice(*ends[index : index + 2]) for ends in bounds)
        own_q = q[rows].unflatten(1, (k.shape[1], group)).transpose(0, 1).flatten(1, 2)
        own_k, own_v = k[keys].transpose(0, 1), v[keys].transpose(0, 1)
        yield (rows, keys), CpuSequence(own_q, own_k, own_v, group, given)


def _checked(name: str, cu_seqlens: torch.Tensor, total: int) -> list[int]:
    """The values, from 0 and never falling, up to `total`."""
    values: list[int] = cu_seqlens.tolist()
    if values[0] != 0:
        raise ValueError(f"{name}[0]={values[0]}: expected 0")
    for index in range(1, len(values)):
        if not values[index - 1] <= values[index] <= total:
            expected = f"{values[index - 1]} to {total}, from the one before to the number of tokens"
            raise ValueError(f"{name}[{index}]={values[index]}: expected {expected}")
    return values
