"""TRL's packing of trees (`trl.experimental.async_grpo`) with its attention replaced by `flash_attention`.

TRL copies the keys and values of every path from a root to a segment. The same five arguments say what the tree is.
"""

from importlib import import_module
from types import ModuleType
from typing import Any, Final

import torch
from torch import nn

from trunkattn.integrations.transformers.attention import attend
from trunkattn.training.prefix_tree import PrefixTree
from trunkattn.training.tree_formats import from_paths

_MODULE: Final = "trl.experimental.async_grpo.packing"
_KEPT: Final = "_trunkattn_tree"  # on the tensor that names it, so that it lives as long as its batch


def replace_tree_attention(packing: ModuleType | None = None) -> None:
    """Lets TRL's trainers attend to trees by `flash_attention`; call it before a trainer is made.

    packing: None for TRL's module.
    """
    packing = import_module(_MODULE) if packing is None else packing
    setattr(packing, "tree_attention", tree_attention)  # noqa: B010, for mypy knows no such attribute
    packing.register_tree_attention()


def tree_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """TRL's function of this name, with its arguments: `tree_kv_index`, `tree_cu_seqlens_q`, `tree_cu_seqlens_k`,
    `tree_max_seqlen_q`, `tree_max_seqlen_k`. q, k and v are [1, heads, tokens, head_dim]."""
    paths = [options.pop(f"tree_{name}") for name in ("kv_index", "cu_seqlens_q", "cu_seqlens_k")]
    for name in ("tree_max_seqlen_q", "tree_max_seqlen_k"):
        options.pop(name, None)
    return attend(module, query, key, value, None, tree=_tree_of(*paths), **options)


def _tree_of(kv_index: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor) -> PrefixTree:
    """The tree of a batch, made by its first layer."""
    tree: PrefixTree | None = getattr(kv_index, _KEPT, None)
    if tree is None:
        tree = from_paths(kv_index, cu_seqlens_q, cu_seqlens_k)
        setattr(kv_index, _KEPT, tree)
    return tree
