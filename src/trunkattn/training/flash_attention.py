"""FlashAttention for training (https://arxiv.org/abs/2205.14135): exact attention that never stores the scores."""

import math
from functools import lru_cache
from typing import Any, Final

import torch

from trunkattn.gpu.cards import card_at
from trunkattn.gpu.kernel import Kernel, Work, choose
from trunkattn.training import spec
from trunkattn.training.checks import DTYPES, Options, check, check_nested
from trunkattn.training.cpu_blocks import Pair, sums_dtype
from trunkattn.training.op import arguments_of, attention
from trunkattn.training.prefix_tree import PrefixTree
from trunkattn.training.sequences import NO_TREE, Sequences

# Arguments that may stand in the way of a kernel that computes both passes
_NOT_IN_TREES: Final = ("sliding_window", "logits_soft_cap", "sinks", "deterministic")
_NOT_IN_BATCHES: Final = (*_NOT_IN_TREES, "cu_seqlens_q", "return_lse")


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    *,
    sm_scale: float | None = None,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    tree: PrefixTree | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
) -> torch.Tensor | Pair:
    """Exact attention with gradients, in memory linear in the sequence length.

    The forward pass keeps only out and lse, and the backward pass computes the weights again from them, tile by tile
    (FlashAttention, https://arxiv.org/abs/2205.14135, §3.1; FlashAttention-2, https://arxiv.org/abs/2307.08691). cuDNN
    and FlashAttention-4 compute some sequences of one length, unless `enable_cudnn_sdp(False)` and
    `enable_flash_sdp(False)` of torch.backends.cuda turn them off.

    Args:
        q: [batch, seqlen_q, num_qo_heads, head_dim] or, packed, [total_q, num_qo_heads, head_dim]; float16, bfloat16 or
            float32, on a CPU also float64, and any strides. Under torch.autocast, q, k and v become its dtype first.
        k, v: [batch, seqlen_k, num_kv_heads, head_dim] or, packed, [total_k, num_kv_heads, head_dim]; num_kv_heads
            divides num_qo_heads, and v may have a head_dim of its own. On a GPU head_dim is at most 256, and tokens are
            at most 2^28. All may be nested tensors of layout torch.jagged, [batch, tokens of each, heads, head_dim].
        causal: a query sees the keys up to its place; the last query sees the last key, whatever the lengths.
        sm_scale: factor of the logits, above 0; None for 1 / sqrt(head_dim).
        sliding_window: a query sees this many last keys, its own included; without `causal` also as many next ones. In
            a tree it counts the query's token and its ancestors. None for all keys.
        logits_soft_cap: c > 0 turns a logit x into c · tanh(x / c); at most 1,024 on a GPU. None for no cap.
        sinks: [num_qo_heads], floating: a logit more for each head, without a value, with a gradient. None for none.
        cu_seqlens_q, cu_seqlens_k: [num_sequences + 1] int32 for packed tensors, on their device: sequence i holds
            tokens [cu_seqlens[i], cu_seqlens[i + 1]) and may be empty. Tokens after the last sequence are padding, with
            output 0 and gradient 0. The values are checked on a CPU; on a GPU kernels stay inside the tensors for any.
        tree: sequences that share prefixes: q, k and v are packed, [tree.num_tokens, heads, head_dim], and a token sees
            itself and its ancestors, whatever `causal` is.
        deterministic: gradients are bit-equal over repeated runs, as torch.use_deterministic_algorithms asks for, too.
            Otherwise a GPU may add up dq in the order in which its thread blocks run. All else is bit-equal anyway.
        return_lse: also return the natural log-sum-exp of the logits, through which gradients flow, too.

    Returns:
        out like q, as wide as v; with return_lse also lse [..., num_qo_heads], float32 (float64 for float64). A query
        that sees no key has output 0, gradient 0, and lse -inf or its sink. NaN reaches nothing from padding or from
        other sequences; from tokens of its sequence or tree that a query does not see it may, as in PyTorch.

    Raises:
        ValueError, TypeError: naming the argument, its value and what was expected.
        RuntimeError: gradients of gradients, or forward-mode differentiation. torch.func.grad and its kind work.

    Example:
        >>> flash_attention(*(torch.ones(1, 5, 2, 8) for _ in range(3)), causal=True).shape
        torch.Size([1, 5, 2, 8])
    """
    given = {"causal": causal, "sliding_window": sliding_window, "tree": tree, "sinks": sinks, "sm_scale": sm_scale}
    given |= {"logits_soft_cap": logits_soft_cap, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    return _attend(q, k, v, Options(**given, deterministic=deterministic, return_lse=return_lse))


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> torch.Tensor | Pair:
    """Checks the arguments of `flash_attention` and computes."""
    if isinstance(q, torch.Tensor) and q.is_nested:
        return _nested(q, k, v, options)
    q, k, v = (_autocast(tensor) for tensor in (q, k, v))
    check(q, k, v, options)
    tree = None if options.tree is None else options.tree.tables(q.device)
    ordered = options.deterministic or torch.are_deterministic_algorithms_enabled()
    sm_scale = float(1 / math.sqrt(q.shape[-1]) if options.sm_scale is None else options.sm_scale)
    kernel = _whole_kernel(q, k, v, options._replace(deterministic=ordered))
    if kernel is not None and options.tree is not None:
        out, lse = kernel.source().attend(q, k, v, options.tree, sm_scale)
        return (out, lse.transpose(-1, -2)) if options.return_lse else out
    if kernel is not None and kernel.source().reads(q, k, v, options.causal):
        found: torch.Tensor = kernel.source().attend(q, k, v, options.causal, sm_scale)
        return found
    work = NO_TREE if options.tree is None else options.tree.work
    sequences = Sequences(
        causal=options.causal or options.tree is not None,
        sm_scale=sm_scale,
        cu_seqlens_q=options.cu_seqlens_q,
        cu_seqlens_k=options.cu_seqlens_k,
        tree=tree,
        sliding_window=options.sliding_window,
        soft_cap=options.logits_soft_cap,
        sinks=None if options.sinks is None else options.sinks.to(sums_dtype(q)),
        pairs=work.pairs,
        largest=work.largest,
    )
    out, lse = attention(q, k, v, *arguments_of(sequences, ordered))
    return (out, lse.transpose(-1, -2)) if options.return_lse else out


def _nested(q: Any, k: Any, v: Any, options: Options) -> torch.Tensor | Pair:
    """Attention of jagged nested tensors, [batch, tokens of each, heads, head_dim]: packed sequences."""
    check_nested(q, k, v, options)
    sums = {f"cu_seqlens_{name}": tensor.offsets().int() for name, tensor in (("q", q), ("k", k))}
    found = _attend(q.values(), k.values(), v.values(), options._replace(**sums))
    if isinstance(found, torch.Tensor):
        return torch.nested.nested_tensor_from_jagged(found, q.offsets())
    out, lse = (torch.nested.nested_tensor_from_jagged(part, q.offsets()) for part in found)
    return out, lse


def _whole_kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> Kernel | None:
    """The kernel of the table that computes both passes at once. None if the two custom ops do, which torch.compile
    takes without a graph break, and torch.func's transformations."""
    if not q.is_cuda or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return None
    tree = options.tree
    names = _NOT_IN_TREES if tree is not None else _NOT_IN_BATCHES
    given = [name for name in names if (value := getattr(options, name)) is not None and value is not False]
    if tree is None and options.causal and q.shape[1] != k.shape[1]:
        given += [spec.UNEVEN]
    if tree is not None and tree.num_levels > spec.CUDNN_LEVELS:
        given += [spec.DEEP]
    is_shallow = tree is not None and tree.work.pairs <= spec.FEW_KEYS * tree.num_tokens
    config = spec.TrainingConfig.of(q, k, v, tuple(given), is_shallow)
    return _chosen(Work.BATCH if tree is None else Work.TREE, config, q.device)


@lru_cache
def _chosen(work: Work, config: spec.TrainingConfig, device: torch.device) -> Kernel | None:
    return choose(work, config, card_at(device)).kernel


def _autocast(tensor: Any) -> Any:
    """Returns the tensor in the dtype that torch.autocast asks for, if it is on; float64 stays, as torch has it."""
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in spec.DTYPES:
        return tensor
    kind = tensor.device.type
    on = kind in DTYPES and torch.is_autocast_enabled(kind)
    return tensor.to(torch.get_autocast_dtype(kind)) if on else tensor
