"""TRL's packing of trees (`trl.experimental.async_grpo`) with its attention replaced by `flash_attention`.

TRL copies the keys and values of every path from a root to a segment. The same five arguments say what the tree is.
"""

from importlib import import_module
from types import ModuleType
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from trunkattn.integrations.transformers.attention import attend, version
from trunkattn.training.prefix_tree import PrefixTree
from trunkattn.training.tree_formats import from_paths

_MODULE: Final = "trl.experimental.async_grpo.packing"
_KEPT: Final = "_trunkattn_tree"  # on the tensor that names it, so that it lives as long as its batch


class _Known(NamedTuple):
    """The tree of a batch, and what it was made of besides the tensor that it is kept on."""

    tree: PrefixTree
    starts: torch.Tensor
    ends: torch.Tensor
    versions: list[int]


def replace_tree_attention(packing: ModuleType | None = None) -> None:
    """Lets TRL's trainers attend to trees by `flash_attention`; call it before a trainer is made.

    Args:
        packing: the module of TRL that has `tree_attention` and `register_tree_attention`; None for the one of TRL 1.16
            and 1.17.

    Raises:
        ModuleNotFoundError: if packing is None and the installed TRL has no such module.
    """
    packing = _packing() if packing is None else packing
    setattr(packing, "tree_attention", tree_attention)  # noqa: B010, for mypy knows no such attribute
    packing.register_tree_attention()


def _packing() -> ModuleType:
    try:
        return import_module(_MODULE)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"replace_tree_attention found no {_MODULE}, which TRL 1.16 and 1.17 have: install one of them, or pass as "
            f"packing the module of another TRL that has tree_attention and register_tree_attention",
            name=error.name,
        ) from error


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
    names = ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")
    missing = [name for name in names if not isinstance(options.get(name), torch.Tensor)]
    if missing:
        raise ValueError(
            f"{missing[0]} is no tensor: expected {', '.join(names)}, as TRL's packing of trees makes them"
        )
    if options.pop("tree", None) is not None:
        raise ValueError(f"tree and {names[0]} are both given: expected one of them, so leave tree out")
    paths = [options.pop(name) for name in names]
    for name in ("tree_max_seqlen_q", "tree_max_seqlen_k"):
        options.pop(name, None)
    return attend(module, query, key, value, None, tree=_tree_of(paths), **options)


def _tree_of(paths: list[torch.Tensor]) -> PrefixTree:
    """The tree of a batch, made by its first layer."""
    known: _Known | None = getattr(paths[0], _KEPT, None)
    versions = [version(tensor) for tensor in paths]
    if known is not None and known.versions == versions and known.starts is paths[1] and known.ends is paths[2]:
        return known.tree
    tree = from_paths(*paths)
    setattr(paths[0], _KEPT, _Known(tree, paths[1], paths[2], versions))
    return tree
