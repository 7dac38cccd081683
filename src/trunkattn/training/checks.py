"""The arguments of `flash_attention`, checked before anything is computed."""

import math
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch

from trunkattn.numerics import GPU_OFFSET_END, MAX_GPU_SOFT_CAP, MAX_GPU_TOKENS, MAX_INT32
from trunkattn.training import spec
from trunkattn.training.prefix_tree import check_is_tree
from trunkattn.training.sequences import LARGEST_BLOCK
from trunkattn.validate import check_dense, check_int, check_plain, check_positive, described

DTYPES: Final = MappingProxyType({"cuda": spec.DTYPES, "cpu": (*spec.DTYPES, torch.float64)})


class Options(NamedTuple):
    """The arguments of `flash_attention` besides the tensors, under the same names."""

    causal: Any
    sm_scale: Any
    sliding_window: Any
    logits_soft_cap: Any
    sinks: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    tree: Any
    deterministic: Any
    return_lse: Any


def check(q: Any, k: Any, v: Any, options: Options) -> None:
    """Raises unless `flash_attention` takes the arguments.

    Raises:
        ValueError, TypeError: naming the argument, its value and what was expected.
    """
    for name in ("causal", "deterministic", "return_lse"):
        if not isinstance(getattr(options, name), bool):
            raise TypeError(f"{name}={getattr(options, name)!r}: expected a bool")
    _check_tensors(q, k, v, _packed_by(options.cu_seqlens_q, options.cu_seqlens_k, options.tree))
    if options.tree is not None:
        _check_tree(options.tree, q, k)
    _check_sums(q, options.cu_seqlens_q, options.cu_seqlens_k)
    _check_sinks(options.sinks, q)
    for name in ("sm_scale", "logits_soft_cap"):
        check_positive(name, getattr(options, name))
    if q.is_cuda and options.logits_soft_cap is not None and options.logits_soft_cap > MAX_GPU_SOFT_CAP:
        expected = f"at most {MAX_GPU_SOFT_CAP:g} on a GPU, or None for no cap"
        raise ValueError(f"logits_soft_cap={options.logits_soft_cap}: expected {expected}")
    if options.sliding_window is not None:
        check_int("sliding_window", options.sliding_window, 1, MAX_INT32)


def check_nested(q: Any, k: Any, v: Any, options: Options) -> None:
    """Raises unless q, k and v are nested tensors that packed sequences are made of, and nothing else packs them.

    Raises:
        ValueError: naming the argument, its value and what was expected.
    """
    for name in ("cu_seqlens_q", "cu_seqlens_k", "tree"):
        if getattr(options, name) is not None:
            raise ValueError(f"{name} is given and q is nested: expected one of them, as q holds its sequences")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        nested = isinstance(tensor, torch.Tensor) and tensor.is_nested
        if not nested or tensor.layout != torch.jagged:
            found = f"has layout {tensor.layout}" if nested else "is not nested, as q is"
            raise ValueError(f"{name} {found}: expected a nested tensor of layout torch.jagged")
        if tensor.dim() != 4 or tensor._ragged_idx != 1 or not tensor.is_contiguous():
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}: expected (batch, tokens of each, heads, head_dim), contiguous"
            )
    if v.shape[1] != k.shape[1]:
        raise ValueError(f"v has sequences of shape {v.shape[1]}: expected k's offsets, so make both from the same")


def _packed_by(cu_seqlens_q: Any, cu_seqlens_k: Any, tree: Any) -> str:
    """The name of the argument that makes the tensors packed; empty if none does."""
    if (cu_seqlens_q is None) != (cu_seqlens_k is None):
        missing = "cu_seqlens_q" if cu_seqlens_q is None else "cu_seqlens_k"
        raise ValueError(f"{missing} is None: expected both of cu_seqlens_q and cu_seqlens_k, or neither")
    if cu_seqlens_q is None:
        return "" if tree is None else "tree"
    if tree is not None:
        raise ValueError("tree and cu_seqlens_q are both given: expected one of them, as a tree holds its sequences")
    return "cu_seqlens_q"


def _check_tensor(name: str, value: Any) -> None:
    """Raises unless it is a dense tensor."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} is {described(value)}: expected a torch.Tensor")
    if type(value) is not torch.Tensor and hasattr(value, "to_local"):
        raise ValueError(f"{name} is a DTensor: expected a tensor of this process alone; use {name}.to_local()")
    if value.layout != torch.strided or value.is_nested:  # asked first: a call takes longer, and an eager step has many
        check_dense(name, value)


def _check_tensors(q: Any, k: Any, v: Any, packed: str) -> None:
    """Raises unless shapes, dtypes and devices fit. packed: the argument that makes the tensors packed, or nothing."""
    compiling = torch.compiler.is_compiling()
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _check_tensor(name, tensor)
        dtypes = DTYPES.get(tensor.device.type)
        if dtypes is None or tensor.device != q.device:
            expected = "cpu or cuda" if dtypes is None else f"{q.device}, like q"
            raise ValueError(f"{name} is on {tensor.device}: expected {expected}")
        if tensor.dtype not in dtypes or tensor.dtype != q.dtype:
            expected = f"one of {', '.join(map(str, dtypes))}" if tensor.dtype not in dtypes else f"{q.dtype}, like q"
            raise TypeError(f"{name} has dtype {tensor.dtype}: expected {expected}")
        if tensor.is_cuda and not compiling:  # torch.compile traces no question of how a view is read
            check_plain(name, tensor)
        if tensor.dim() != (3 if packed else 4):
            unpacked = "(batch, seqlen, heads, head_dim), or cu_seqlens_q and cu_seqlens_k for packed sequences"
            expected = f"(tokens, heads, head_dim), as {packed} is given" if packed else unpacked
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}: expected {expected}")
        if tensor.is_cuda and not compiling and tensor.shape[-3] > MAX_GPU_TOKENS:
            expected = f"at most {MAX_GPU_TOKENS} on a GPU; attend to fewer sequences at a time, or on a CPU"
            raise ValueError(f"{name} has {tensor.shape[-3]} tokens: expected {expected}")
    heads, head_dim = q.shape[-2:]
    for name, width in (("q", head_dim), ("v", v.shape[-1])):
        if not 1 <= width <= (spec.MAX_HEAD_DIM if q.is_cuda else math.inf):
            expected = f"1 to {spec.MAX_HEAD_DIM} on a GPU, from 1 on a CPU"
            raise ValueError(f"{name} has head_dim {width}: expected {expected}")
    if k.shape[-1] != head_dim or (not packed and k.shape[0] != q.shape[0]):
        expected = f"q's head_dim, {head_dim}" + ("" if packed else f", and batch, {q.shape[0]}")
        raise ValueError(f"k has shape {tuple(k.shape)}: expected {expected}")
    if v.shape[:-1] != k.shape[:-1]:
        expected = f"({', '.join(map(str, k.shape[:-1]))}, head_dim), as k has"
        raise ValueError(f"v has shape {tuple(v.shape)}: expected {expected}")
    if heads < 1 or k.shape[-2] < 1 or heads % k.shape[-2]:
        raise ValueError(f"k has {k.shape[-2]} heads: expected a divisor of q's {heads}")
    if q.is_cuda and not compiling:
        _check_offsets(q, heads // k.shape[-2], max(head_dim, v.shape[-1]))


def _check_offsets(q: torch.Tensor, group_size: int, widest: int) -> None:
    """Raises unless kernels on a GPU count in int32 what they do: a block of tokens, and the rows of a group."""
    tokens, heads = q.shape[-3:-1]
    if heads * widest * LARGEST_BLOCK >= GPU_OFFSET_END:
        expected = f"fewer than {GPU_OFFSET_END // LARGEST_BLOCK} numbers of a token on a GPU"
        raise ValueError(f"q has {heads} heads of {widest}: expected {expected}; attend with fewer heads at a time")
    if tokens * group_size > GPU_OFFSET_END:
        expected = f"at most {GPU_OFFSET_END // group_size} on a GPU, as {group_size} heads of q share one of k"
        raise ValueError(f"q has {tokens} tokens: expected {expected}; attend to fewer sequences at a time")


def _check_tree(tree: Any, q: torch.Tensor, k: torch.Tensor) -> None:
    """Raises unless there are as many packed tokens as the tree has."""
    check_is_tree(tree)
    for name, tensor in (("q", q), ("k", k)):
        if tensor.shape[0] != tree.num_tokens:
            raise ValueError(f"{name} has {tensor.shape[0]} tokens: expected the tree's {tree.num_tokens}")


def _check_sums(q: torch.Tensor, cu_seqlens_q: Any, cu_seqlens_k: Any) -> None:
    """Raises unless dtype, device and shape of both fit; their values are on the device."""
    for name, sums in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if sums is None:
            continue
        _check_tensor(name, sums)
        if sums.dtype != torch.int32:
            raise TypeError(f"{name} has dtype {sums.dtype}: expected torch.int32; use {name}.int()")
        if sums.device != q.device:
            raise ValueError(f"{name} is on {sums.device}: expected {q.device}, like q")
        if sums.dim() != 1 or sums.shape[0] == 0 or sums.shape != cu_seqlens_q.shape:
            like_q = f"{tuple(cu_seqlens_q.shape)}, like cu_seqlens_q"
            expected = "(num_sequences + 1)" if sums is cu_seqlens_q else like_q
            raise ValueError(f"{name} has shape {tuple(sums.shape)}: expected {expected}")


def _check_sinks(sinks: Any, q: torch.Tensor) -> None:
    """Raises unless there are none, or one number for each head of q."""
    if sinks is None:
        return
    _check_tensor("sinks", sinks)
    if not sinks.dtype.is_floating_point:
        raise TypeError(f"sinks has dtype {sinks.dtype}: expected a floating one")
    if sinks.device != q.device:
        raise ValueError(f"sinks is on {sinks.device}: expected {q.device}, like q")
    if tuple(sinks.shape) != (q.shape[-2],):
        raise ValueError(f"sinks has shape {tuple(sinks.shape)}: expected ({q.shape[-2]},), one for each head of q")
