"""transformers' attention and mask interfaces over `flash_attention`.

transformers asks for a mask once for a forward pass and gives it to every layer. Ours is none where all is causal;
`cu_seqlens`, one dimension, of sequences that are packed or of chunks; and the 2-dimensional mask of padding.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from trunkattn import PrefixTree, flash_attention

NAME: Final = "trunkattn"
_CHECKED: Final = "_trunkattn_checked"  # on position ids: the tree whose they are, and their version
# Arguments of an attention that change what it computes, and that this one does not have.
_ABSENT: Final = frozenset({"output_attentions", "position_bias", "head_mask", "cache", "block_table", "num_splits"})


def register() -> None:
    """Lets models of transformers take `attn_implementation="trunkattn"`."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask)


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    **options: Any,
) -> torch.Tensor | None:
    """transformers' mask interface; see the module for what it returns.

    Raises:
        ValueError: the mask is one that no packed sequence, window or padding makes.
    """
    if options.get("use_vmap", False):
        raise ValueError(
            f"the model joins a mask of its own to the causal one: attn_implementation={NAME!r} takes none"
        )
    padded = attention_mask is not None
    if attention_mask is not None and not torch.compiler.is_compiling():
        padded = attention_mask.shape[1] != kv_length or not bool(attention_mask.all())
    if padded:
        if q_length != kv_length:
            raise ValueError(
                f"attention_mask has padding, and {q_length} queries meet {kv_length} keys: "
                f"attn_implementation={NAME!r} takes padding in training only; generate with another one"
            )
        return attention_mask
    plain = options.get("allow_is_causal_skip", True) and (local_size is None or local_size >= kv_length)
    if plain or options.get("allow_is_bidirectional_skip", False) or mask_function is None:
        return None
    if q_length != kv_length:
        return None  # a window, which the layer names; others come with training
    return _boundaries(mask_function, (batch_size, q_length), options.get("device", "cpu"))


def _boundaries(
    mask_function: Callable[..., Any], shape: tuple[int, int], device: torch.device | str
) -> torch.Tensor | None:
    """cu_seqlens [num_sequences + 1] of all rows: a sequence begins where a token does not see the one before. None if
    each row is one. Under torch.compile, which needs fixed shapes, empty sequences follow."""
    rows = torch.arange(shape[0], dtype=torch.int64, device=device)[:, None]
    later = torch.arange(1, shape[1], dtype=torch.int64, device=device)[None]
    sees_before = mask_function(rows, 0, later, later - 1).expand(shape[0], -1)
    sees_after = mask_function(rows, 0, later - 1, later)
    begins = torch.cat([sees_before.new_ones(shape[0], 1), ~sees_before], 1).flatten()
    numbers = torch.arange(begins.numel() + 1, dtype=torch.int32, device=device)
    if torch.compiler.is_compiling():
        starts = torch.where(begins, numbers[:-1], begins.numel()).sort().values
        return torch.cat([starts, numbers[-1:]])
    if bool(sees_after.any()):
        raise ValueError(f"the model's mask lets a token see a later one: attn_implementation={NAME!r} takes none")
    if int(begins.sum()) == shape[0]:
        return None
    return torch.cat([numbers[:-1][begins], numbers[-1:]])


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    tree: PrefixTree | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface.

    Args:
        query, key, value: [batch, heads, tokens, head_dim], of any strides.
        attention_mask: what `mask` returned.
        tree: of a batch of one row that holds its packed tokens; a model passes keywords on.
        options: `scaling`, `sliding_window`, `softcap`, `s_aux`, `is_causal`, `cu_seq_lens_q`, `cu_seq_lens_k` and
            `deterministic`, as transformers passes them.

    Returns:
        The output [batch, tokens, num_qo_heads, head_dim of values], and None instead of attention weights.

    Raises:
        ValueError: an option asks for what `flash_attention` does not have.
    """
    _refuse(options)
    _check_packing(len(query), query.shape[2], attention_mask, tree, options)
    given: dict[str, Any] = {
        "sm_scale": options.get("scaling"),
        "sliding_window": options.get("sliding_window"),
        "logits_soft_cap": options.get("softcap"),
        "sinks": options.get("s_aux"),
        "deterministic": bool(options.get("deterministic")),
    }
    causal = options.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if causal is None else causal)
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    sums = options.get("cu_seq_lens_q"), options.get("cu_seq_lens_k")
    if tree is not None:
        _check_positions(tree, options.get("position_ids"))
        return _one(flash_attention(q[0], k[0], v[0], tree=tree, **given)).unsqueeze(0), None
    if sums[0] is None and attention_mask is not None and attention_mask.dim() == 1:
        sums = attention_mask, attention_mask
    if sums[0] is not None and sums[1] is not None:
        flat = [tensor.flatten(0, 1) for tensor in (q, k, v)]
        given |= {"cu_seqlens_q": sums[0].int(), "cu_seqlens_k": sums[1].int()}
        return _one(flash_attention(flat[0], flat[1], flat[2], causal, **given)).unflatten(0, q.shape[:2]), None
    if attention_mask is None:
        return _one(flash_attention(q, k, v, causal, **given)), None
    kept = attention_mask.bool()
    lengths = torch.nn.functional.pad(kept.sum(1).cumsum(0), (1, 0)).int()
    given |= {"cu_seqlens_q": lengths, "cu_seqlens_k": lengths}
    found = _one(flash_attention(q[kept], k[kept], v[kept], causal, **given))
    out = found.new_zeros(*q.shape[:3], v.shape[-1])
    return out.index_put((kept,), found), None


def _check_packing(
    rows: int, tokens: int, mask: torch.Tensor | None, tree: PrefixTree | None, options: dict[str, Any]
) -> None:
    """Raises unless at most one thing says which tokens belong together, and it fits the batch."""
    given = [name for name in ("cu_seq_lens_q", "cu_seq_lens_k") if options.get(name) is not None]
    if len(given) == 1:
        missing = "cu_seq_lens_k" if given == ["cu_seq_lens_q"] else "cu_seq_lens_q"
        raise ValueError(f"{missing} is None: expected both of cu_seq_lens_q and cu_seq_lens_k, or neither")
    shape = None if mask is None else tuple(mask.shape)
    if tree is not None and rows != 1:
        raise ValueError(f"tree is given with a batch of {rows} rows: expected one row, its packed tokens")
    if tree is not None and given:
        raise ValueError("tree and cu_seq_lens_q are both given: expected one of them, as a tree holds its sequences")
    if tree is not None and shape is not None and len(shape) != 1:
        raise ValueError(f"attention_mask has shape {shape} beside tree: expected none, as a tree has no padding")
    if shape is not None and len(shape) == 2 and given and not torch.compiler.is_compiling():  # there `mask` keeps all
        raise ValueError(
            "attention_mask has padding and cu_seq_lens_q is given: expected one of them, so leave the mask out"
        )
    if shape is None or len(shape) == 1 or given:
        return
    if len(shape) != 2:
        raise ValueError(
            f"attention_mask has shape {shape}: attn_implementation={NAME!r} takes one of (batch, tokens), packed "
            "sequences or a tree"
        )
    if shape != (rows, tokens):
        raise ValueError(f"attention_mask has shape {shape}: expected {(rows, tokens)}, one for each token of q")


def _check_positions(tree: PrefixTree, position_ids: torch.Tensor | None) -> None:
    """Raises if a model that names its positions has others than the tree; it reads them once for a forward pass."""
    if position_ids is None or position_ids.dim() != 2 or torch.compiler.is_compiling():
        return
    known = getattr(position_ids, _CHECKED, None)  # on the tensor: another one may get its place in memory later
    if known is not None and known[0] is tree and known[1] == version(position_ids):
        return
    found, expected = position_ids.flatten().cpu(), tree.pack().position_ids
    if len(found) != len(expected):
        raise ValueError(f"position_ids has {len(found)} entries: expected {len(expected)}, the tree's tokens")
    wrong = (found != expected).nonzero().flatten().tolist()
    if wrong:
        raise ValueError(
            f"position_ids[{wrong[0]}]={found[wrong[0]]}: expected {expected[wrong[0]]}, the number of the token's "
            "ancestors; use tree.pack().position_ids"
        )
    setattr(position_ids, _CHECKED, (tree, version(position_ids)))


def version(tensor: torch.Tensor) -> int:
    """How often a tensor has been written to; those of inference mode do not count."""
    return -1 if tensor.is_inference() else tensor._version


def _one(out: Any) -> torch.Tensor:
    """The output alone, which `flash_attention` returns without `return_lse`."""
    assert isinstance(out, torch.Tensor)
    return out


def _refuse(options: dict[str, Any]) -> None:
    """Raises for options that ask for what is not there."""
    if options.get("dropout"):
        raise ValueError(f"dropout={options['dropout']}: expected 0, as attention here has none; set attention_dropout")
    asked = sorted(name for name in _ABSENT if options.get(name) is not None and options[name] is not False)
    if asked:
        raise ValueError(f"{asked[0]} is given: attn_implementation={NAME!r} has none; use another one for it")
