"""Attentions of a prefix tree, ours and those of peers, over packed q, k and v [tokens, heads, head_dim]."""

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.kernels.training_cells import Attend, Inputs
from benchmarks.kernels.training_peers import flex
from benchmarks.lib.internals import own_flash_attention, tree_intervals
from trunkattn import PrefixTree, flash_attention


def default(tree: PrefixTree, inputs: Inputs) -> Attend:
    """`flash_attention`, what a user gets."""
    return lambda q, k, v: flash_attention(q, k, v, tree=tree)


def ours(deterministic: bool) -> Callable[[PrefixTree, Inputs], Attend]:
    """Kernels of our own."""
    return lambda tree, inputs: lambda q, k, v: own_flash_attention(q, k, v, tree=tree, deterministic=deterministic)


def tight_intervals(tree: PrefixTree, device: torch.device) -> torch.Tensor:
    """The fewest intervals of keys that each token sees, [1, 2 · levels - 1, tokens] int32: those of the library, and
    under one root without the two ends before it, because its segment is [0, F0)."""
    found = tree_intervals(tree, device)
    return found[:, 2:].contiguous() if tree.parents.count(-1) == 1 else found


def cudnn_plan(tree: PrefixTree, inputs: Inputs) -> Any:
    """cuDNN's plan of a tree, as its documentation makes one."""
    from cudnn.flex_attention import create_mask_plan

    q, k, v = (tensor.detach().unsqueeze(0) for tensor in inputs.leaves)
    return create_mask_plan(tight_intervals(tree, q.device), q, k, v, build_backward=True)


def cudnn_flex(tree: PrefixTree, inputs: Inputs) -> Attend:
    """cuDNN's flex_attention, called directly."""
    from cudnn.flex_attention import flex_attn_func

    plan = cudnn_plan(tree, inputs)
    return lambda q, k, v: flex_attn_func(q[None], k[None], v[None], mask_plan=plan)[0]


def flex_mask(tree: PrefixTree, device: str) -> Any:
    """FlexAttention's block mask of a tree."""
    from torch.nn.attention.flex_attention import create_block_mask

    ends, tokens = tree.subtree_end.to(device), tree.num_tokens

    def sees(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (key <= query) & (query < ends[key])

    return create_block_mask(sees, None, None, tokens, tokens, device=device)


def flex_attention(tree: PrefixTree, inputs: Inputs) -> Attend:
    """PyTorch's FlexAttention with a tree's mask."""
    groups = inputs.q.shape[1] != inputs.k.shape[1]
    attend = flex(flex_mask(tree, inputs.q.device.type), groups, inputs.q.device.type)
    return lambda q, k, v: attend(q[None], k[None], v[None])[0]


def paths(tree: PrefixTree, inputs: Inputs, varlen: Callable[..., torch.Tensor] | None = None) -> Attend:
    """TRL's way: keys and values of every path from a root to a segment, gathered and end to end. The tokens of the
    segment are its last queries. varlen: attention of packed sequences; None for FlashAttention-4's."""
    if varlen is None:
        from flash_attn.cute import flash_attn_varlen_func

        def varlen(q: Any, k: Any, v: Any, ends_q: Any, ends_k: Any, longest: Any) -> torch.Tensor:
            out: torch.Tensor = flash_attn_varlen_func(
                q, k, v, cu_seqlens_q=ends_q, cu_seqlens_k=ends_k, max_seqlen_q=longest[0], max_seqlen_k=longest[1],
                causal=True,
            )[0]  # fmt: skip
            return out

    of_segment = [torch.from_numpy(path) for _, path in tree.paths(range(len(tree.starts)))]
    sizes = torch.tensor([0, *map(len, of_segment)]), torch.tensor([0, *tree.lengths])
    index = torch.cat(of_segment).to(inputs.q.device)
    ends_k, ends_q = (size.cumsum(0).int().to(inputs.q.device) for size in sizes)
    longest = max(tree.lengths), max(map(len, of_segment))
    attention = varlen
    return lambda q, k, v: attention(q, k.index_select(0, index), v.index_select(0, index), ends_q, ends_k, longest)


def repeated(tree: PrefixTree, inputs: Inputs) -> Attend:
    """`flash_attention` of every sequence by itself, over repeated tokens as `repeat` lays them out."""
    if inputs.q.dim() == 4:
        return lambda q, k, v: flash_attention(q, k, v, causal=True)
    sizes = torch.tensor([0, *map(len, tree.sequence_indices())])
    ends = sizes.cumsum(0).int().to(inputs.q.device)
    return lambda q, k, v: flash_attention(q, k, v, causal=True, cu_seqlens_q=ends, cu_seqlens_k=ends)


def repeat(tree: PrefixTree, values: torch.Tensor) -> torch.Tensor:
    """The values of all sequences, [num_sequences, length, ...], or end to end if their lengths differ."""
    parts = tree.unpack(values)
    return torch.stack(parts) if len({len(part) for part in parts}) == 1 else torch.cat(parts)


ATTENTIONS: dict[str, Callable[[PrefixTree, Inputs], Attend]] = {
    "default": default,
    "own": ours(False),
    "deterministic": ours(True),
    "cudnn_flex": cudnn_flex,
    "flex_attention": flex_attention,
    "paths_flash_attention_4": paths,
}
