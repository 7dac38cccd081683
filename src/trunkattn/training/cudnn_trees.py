"""Attention over a prefix tree by cuDNN's `flex_attention`, which computes both passes on Hopper and Blackwell.

Its mask is a union of intervals of keys for each query: the segments above it, and its own up to itself. They are made
on the device from the tree's tables, and cuDNN makes a plan from them once for a tree and a shape of heads.
"""

import math
from importlib import import_module
from typing import Any

import torch

from trunkattn.training import spec, tree_tables
from trunkattn.training.cpu_blocks import Pair
from trunkattn.training.prefix_tree import PrefixTree
from trunkattn.training.sequences import TreeTables


def intervals(tables: TreeTables, num_levels: int) -> torch.Tensor:
    """The keys that each token sees as ends F of intervals, [1, 2 · num_levels + 1, tokens] int32, on the tables'
    device: [0, F0), which is empty, [F1, F2), [F3, F4) and so on. Ends never fall; intervals that a token does not need
    are empty behind its last key. num_levels: segments on the longest path from a root to a leaf."""
    if tables.segment_of.is_cuda:
        return tree_tables.intervals(tables, num_levels)
    start, stop, parent, level = tables.segments.unbind(1)
    segment = tables.segment_of.long()
    behind = torch.arange(1, len(segment) + 1, dtype=torch.int32, device=segment.device)
    ends = torch.zeros(2 * num_levels + 1, len(segment), dtype=torch.int32, device=segment.device)
    for above in reversed(range(num_levels)):
        segment = torch.where(level[segment] > above, parent[segment].long(), segment)
        on_path = level[segment] == above
        ends[2 * above + 1] = torch.where(on_path, start[segment], behind)
        ends[2 * above + 2] = torch.where(on_path, torch.minimum(stop[segment], behind), behind)
    return ends[None]


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tree: PrefixTree, sm_scale: float) -> Pair:
    """out [tokens, num_qo_heads, head_dim of v] and lse [num_qo_heads, tokens] of checked tensors, with gradients."""
    flex_attention = import_module(spec.CUDNN_MODULE)
    alignment = 128 if q.shape[-1] == v.shape[-1] == 256 else 16
    q, k, v = (_readable(tensor, alignment).unsqueeze(0) for tensor in (q, k, v))

    def plan() -> Any:
        mask = intervals(tree.tables(q.device), tree.num_levels)
        return flex_attention.create_mask_plan(mask, q.detach(), k.detach(), v.detach(), build_backward=True)

    shape = q.device, q.dtype, *(tuple(tensor.shape[2:]) for tensor in (q, k, v))
    mask_plan = tree.cached(("cudnn", *shape), plan)
    out, lse = flex_attention.flex_attn_func(q, k, v, mask_plan=mask_plan, softmax_scale=sm_scale, return_lse=True)
    return out[0], lse[0]


def _readable(tensor: torch.Tensor, alignment: int) -> torch.Tensor:
    """The tensor if each head begins at a multiple of `alignment` bytes and is contiguous, else a contiguous copy."""
    bytes_of = [tensor.data_ptr(), *(stride * tensor.itemsize for stride in tensor.stride()[:-1])]
    if tensor.stride(-1) == 1 and math.gcd(*bytes_of) % alignment == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
