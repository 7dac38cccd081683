"""FlashAttention for training (https://arxiv.org/abs/2205.14135): exact attention that never stores the scores.

Two custom ops of torch, so that autograd and `torch.compile` take them: Triton kernels on a GPU, blocks of PyTorch on a
CPU.
"""

import math
from collections.abc import Iterator
from types import MappingProxyType, ModuleType
from typing import Any, Final

import torch
from torch.library import custom_op

from trunkattn.gpu.cards import card_at
from trunkattn.gpu.kernel import Work, choose
from trunkattn.training import spec
from trunkattn.training.cpu_blocks import CpuSequence, Pair, Triple, sums_dtype
from trunkattn.training.prefix_tree import PrefixTree
from trunkattn.training.tree_attention import tree_attention
from trunkattn.validate import check_positive

_DTYPES: Final = MappingProxyType({"cuda": spec.DTYPES, "cpu": (*spec.DTYPES, torch.float64)})


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    *,
    sm_scale: float | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    tree: PrefixTree | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
) -> torch.Tensor | Pair:
    """Exact attention with gradients, in memory linear in the sequence length.

    The forward pass keeps out and lse only; the backward pass computes the weights again from them, tile by tile.
    Sources: FlashAttention, https://arxiv.org/abs/2205.14135, §3.1, and FlashAttention-2,
    https://arxiv.org/abs/2307.08691, §3.

    Args:
        q: [batch, seqlen_q, num_qo_heads, head_dim] or, packed, [total_q, num_qo_heads, head_dim]; float16, bfloat16 or
            float32, on a CPU also float64, and any strides. Under torch.autocast, q, k and v become its dtype first.
        k, v: [batch, seqlen_k, num_kv_heads, head_dim] or, packed, [total_k, num_kv_heads, head_dim]; num_qo_heads is
            a multiple of num_kv_heads. On a GPU head_dim is at most 256.
        causal: a query sees the keys up to its place; the last query sees the last key, whatever the lengths.
        sm_scale: factor of the logits, above 0; None for 1 / sqrt(head_dim).
        cu_seqlens_q, cu_seqlens_k: [num_sequences + 1] int32 for packed tensors, on their device: sequence i holds
            tokens [cu_seqlens[i], cu_seqlens[i + 1]), at times none. Tokens after the last are padding: output 0,
            gradient 0. Their values are checked on a CPU; kernels stay inside the tensors whatever they are.
        tree: sequences that share prefixes, on a CPU: q, k and v are packed, [tree.num_tokens, heads, head_dim], and a
            token sees itself and its ancestors, whatever `causal` is.
        deterministic: gradients are bit-equal over repeated runs, as torch.use_deterministic_algorithms asks for, too.
            Else a GPU adds dq in whatever order its programs come; all else is bit-equal anyway.
        return_lse: also return the natural log-sum-exp of the logits, through which gradients flow, too.

    Returns:
        out like q; with return_lse also lse [..., num_qo_heads], q's shape without head_dim, float32 (float64 for
        float64). A query that sees no key has output 0, lse -inf and gradient 0.

    Gradients of gradients and torch.func.grad raise; forward-mode differentiation finds no tangent.

    Raises:
        ValueError, TypeError: naming the argument, its value and what was expected.
    """
    _check_flags(causal=causal, deterministic=deterministic, return_lse=return_lse)
    q, k, v = (_autocast(tensor) for tensor in (q, k, v))
    _check_tensors(q, k, v, _packed_by(cu_seqlens_q, cu_seqlens_k, tree))
    if tree is not None:
        _check_tree(tree, q, k)
    _check_sums(q, cu_seqlens_q, cu_seqlens_k)
    check_positive("sm_scale", sm_scale)
    if sm_scale is None:
        sm_scale = 1 / math.sqrt(q.shape[-1])
    if tree is not None:
        out, lse = tree_attention(q, k, v, tree.subtree_end, float(sm_scale))
        return (out, lse.transpose(-1, -2)) if return_lse else out
    ordered = deterministic or torch.are_deterministic_algorithms_enabled()
    out, lse = _forward(q, k, v, cu_seqlens_q, cu_seqlens_k, causal, float(sm_scale), ordered)
    return (out, lse.transpose(-1, -2)) if return_lse else out


def _check_flags(**flags: Any) -> None:
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{name}={flag!r}: expected a bool")


def _packed_by(cu_seqlens_q: Any, cu_seqlens_k: Any, tree: Any) -> str:
    """The argument that makes the tensors packed, or nothing."""
    if (cu_seqlens_q is None) != (cu_seqlens_k is None):
        missing = "cu_seqlens_q" if cu_seqlens_q is None else "cu_seqlens_k"
        raise ValueError(f"{missing} is None: expected both of cu_seqlens_q and cu_seqlens_k, or neither")
    if cu_seqlens_q is None:
        return "" if tree is None else "tree"
    if tree is not None:
        raise ValueError("tree and cu_seqlens_q are both given: expected one of them, as a tree holds its sequences")
    return "cu_seqlens_q"


def _autocast(tensor: Any) -> Any:
    """Returns the tensor in the dtype that torch.autocast asks for, if it is on; float64 stays, as torch has it."""
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in spec.DTYPES:
        return tensor
    kind = tensor.device.type
    on = kind in _DTYPES and torch.is_autocast_enabled(kind)
    return tensor.to(torch.get_autocast_dtype(kind)) if on else tensor


def _check_tensors(q: Any, k: Any, v: Any, packed: str) -> None:
    """Raises unless shapes, dtypes and devices fit. packed: the argument that makes the tensors packed, or nothing."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}: expected a torch.Tensor")
        dtypes = _DTYPES.get(tensor.device.type)
        if dtypes is None or tensor.device != q.device:
            expected = "cpu or cuda" if dtypes is None else f"{q.device}, like q"
            raise ValueError(f"{name} is on {tensor.device}: expected {expected}")
        if tensor.dtype not in dtypes or tensor.dtype != q.dtype:
            expected = f"one of {', '.join(map(str, dtypes))}" if tensor.dtype not in dtypes else f"{q.dtype}, like q"
            raise TypeError(f"{name} has dtype {tensor.dtype}: expected {expected}")
        if tensor.dim() != (3 if packed else 4):
            expected = f"(tokens, heads, head_dim), as {packed} is given" if packed else "4 dimensions"
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}: expected {expected}")
    heads, head_dim = q.shape[-2:]
    if not 1 <= head_dim <= (spec.MAX_HEAD_DIM if q.is_cuda else math.inf):
        raise ValueError(f"q has head_dim {head_dim}: expected 1 to {spec.MAX_HEAD_DIM} on a GPU, from 1 on a CPU")
    if k.shape[-1] != head_dim or (not packed and k.shape[0] != q.shape[0]):
        expected = f"q's head_dim, {head_dim}" + ("" if packed else f", and batch, {q.shape[0]}")
        raise ValueError(f"k has shape {tuple(k.shape)}: expected {expected}")
    if v.shape != k.shape:
        raise ValueError(f"v has shape {tuple(v.shape)}: expected k's, {tuple(k.shape)}")
    if heads < 1 or k.shape[-2] < 1 or heads % k.shape[-2]:
        raise ValueError(f"k has {k.shape[-2]} heads: expected a divisor of q's {heads}")


def _check_tree(tree: Any, q: torch.Tensor, k: torch.Tensor) -> None:
    if not isinstance(tree, PrefixTree):
        raise TypeError(f"tree is a {type(tree).__name__}: expected a trunkattn.PrefixTree")
    for name, tensor in (("q", q), ("k", k)):
        if tensor.shape[0] != tree.num_tokens:
            raise ValueError(f"{name} has {tensor.shape[0]} tokens: expected the tree's {tree.num_tokens}")
    if q.is_cuda:
        raise ValueError(
            f"tree is given and q is on {q.device}: expected tensors on a CPU; on a GPU repeat the shared tokens for "
            "each sequence and give cu_seqlens_q and cu_seqlens_k"
        )


def _check_sums(q: torch.Tensor, cu_seqlens_q: Any, cu_seqlens_k: Any) -> None:
    for name, sums in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if sums is None:
            continue
        if not isinstance(sums, torch.Tensor):
            raise TypeError(f"{name} is a {type(sums).__name__}: expected a torch.Tensor")
        if sums.dtype != torch.int32:
            raise TypeError(f"{name} has dtype {sums.dtype}: expected torch.int32")
        if sums.device != q.device:
            raise ValueError(f"{name} is on {sums.device}: expected {q.device}, like q")
        if sums.dim() != 1 or sums.shape[0] == 0 or sums.shape != cu_seqlens_q.shape:
            expected = "(num_sequences + 1), the same for both"
            raise ValueError(f"{name} has shape {tuple(sums.shape)}: expected {expected}")


def _kernel(work: Work, q: torch.Tensor) -> ModuleType:
    """The source of the kernel for some work on the card of q."""
    choice = choose(work, spec.TrainingConfig(q.shape[-1], q.dtype), card_at(q.device))
    if choice.kernel is None:
        raise ValueError(f"no kernel computes {work.value} of q: {'; '.join(choice.reasons)}")
    return choice.kernel.source()


@custom_op("trunkattn::flash_attention", mutates_args=())
def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None, causal: bool, sm_scale: float, deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """out like q and lse [batch, num_qo_heads, seqlen_q] or, packed, [num_qo_heads, total_q]; `deterministic` is for
    the backward pass."""
    if q.is_cuda:
        from trunkattn.training.common import Sequences  # needs Triton, which a CPU does not

        forward = _kernel(Work.FORWARD, q).forward
        sums = [None if tensor is None else tensor.contiguous() for tensor in (cu_seqlens_q, cu_seqlens_k)]
        with torch.cuda.device(q.device):  # launches go to the current device
            return forward(q, k, v, Sequences(causal, sm_scale, *sums))
    out = torch.zeros(q.shape, dtype=sums_dtype(q), device=q.device)
    lse = torch.full((*q.shape[:-1],), -math.inf, dtype=out.dtype, device=q.device)
    for rows, sequence in _cpu_sequences((q, k, v), (cu_seqlens_q, cu_seqlens_k), causal, sm_scale):
        found, found_lse = sequence.forward()
        out.view(-1, *q.shape[-2:])[rows[0]] = sequence.by_token(found)
        lse.view(-1, q.shape[-2])[rows[0]] = sequence.by_token(found_lse).squeeze(-1)
    return out.to(q.dtype), lse.transpose(-1, -2).contiguous()


@_forward.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any) -> Pair:
    lse = torch.empty_like(q[..., 0].transpose(-1, -2), dtype=sums_dtype(q), memory_format=torch.contiguous_format)
    return torch.empty_like(q, memory_format=torch.contiguous_format), lse


@custom_op("trunkattn::flash_attention_backward", mutates_args=())
def _backward(
    dout: torch.Tensor, dlse: torch.Tensor, saved: list[torch.Tensor], cu_seqlens: list[torch.Tensor], causal: bool,
    sm_scale: float, deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """dq, dk and dv. saved: q, k, v, out and lse. cu_seqlens: of queries and keys, or none."""
    sums = (cu_seqlens[0], cu_seqlens[1]) if cu_seqlens else (None, None)
    q, k, v, out, lse = saved
    if q.is_cuda:
        from trunkattn.training.common import Sequences

        backward = _kernel(Work.BACKWARD, q).backward
        sequences = Sequences(causal, sm_scale, *(tensor.contiguous() for tensor in cu_seqlens))
        with torch.cuda.device(q.device):
            return backward((dout, dlse), tuple(saved), sequences, deterministic)
    heads, head_dim = q.shape[-2:]
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1) - dlse.transpose(-1, -2)
    delta = delta.masked_fill(lse.transpose(-1, -2) == -math.inf, 0.0)  # dlse may be NaN there
    flat = [delta.reshape(-1, heads, 1), lse.transpose(-1, -2).reshape(-1, heads, 1), dout.reshape(-1, heads, head_dim)]
    gradients = tuple(torch.zeros(tensor.shape, dtype=lse.dtype, device=q.device) for tensor in (q, k, v))
    for rows, sequence in _cpu_sequences((q, k, v), sums, causal, sm_scale):
        found = sequence.backward(*(sequence.by_head(tensor[rows[0]]) for tensor in flat))
        for gradient, part, own in zip(gradients, found, (rows[0], rows[1], rows[1]), strict=True):
            gradient.view(-1, *gradient.shape[-2:])[own] = sequence.by_token(part, gradient.shape[-2])
    return gradients[0].to(q.dtype), gradients[1].to(q.dtype), gradients[2].to(q.dtype)


@_backward.register_fake
def _(dout: torch.Tensor, dlse: torch.Tensor, saved: list[torch.Tensor], *options: Any) -> Triple:
    dq, dk, dv = (torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in saved[:3])
    return dq, dk, dv


def _save(ctx: Any, inputs: tuple[Any, ...], output: Pair) -> None:
    q, k, v, cu_seqlens_q, cu_seqlens_k, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, *(() if cu_seqlens_q is None else (cu_seqlens_q, cu_seqlens_k)))


def _gradients(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    tensors = ctx.saved_tensors
    return (*_backward(dout, dlse, list(tensors[:5]), list(tensors[5:]), *ctx.options), *[None] * 5)


_forward.register_autograd(_gradients, setup_context=_save)


def _cpu_sequences(
    tensors: Triple, sums: tuple[torch.Tensor | None, torch.Tensor | None], causal: bool, sm_scale: float
) -> Iterator[tuple[tuple[slice, slice], CpuSequence]]:
    """Each sequence, with its tokens among all query tokens and among all key tokens."""
    q, k, v = (tensor.to(sums_dtype(tensor)).reshape(-1, *tensor.shape[-2:]) for tensor in tensors)
    bounds = []
    for name, cu_seqlens, own, flat in zip(("cu_seqlens_q", "cu_seqlens_k"), sums, tensors, (q, k), strict=False):
        dense = range(0, len(flat) + 1, own.shape[1]) if own.shape[1] else [0] * (len(own) + 1)
        bounds.append(list(dense) if cu_seqlens is None else _checked(name, cu_seqlens, len(flat)))
    group = q.shape[1] // k.shape[1]
    for index in range(len(bounds[0]) - 1):
        rows, keys = (slice(*ends[index : index + 2]) for ends in bounds)
        own_q = q[rows].unflatten(1, (k.shape[1], group)).transpose(0, 1).flatten(1, 2)
        own_k, own_v = k[keys].transpose(0, 1), v[keys].transpose(0, 1)
        yield (rows, keys), CpuSequence(own_q, own_k, own_v, group, causal, sm_scale)


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
