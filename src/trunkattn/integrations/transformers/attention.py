"""transformers' attention interface over `flash_attention`."""

from typing import Any, Final

import torch
from torch import nn

from trunkattn import PrefixTree, flash_attention
from trunkattn.integrations.transformers.masks import NAME
from trunkattn.integrations.transformers.models import why_no_tree
from trunkattn.training.prefix_tree import check_is_tree
from trunkattn.validate import described

_CHECKED: Final = "_trunkattn_checked"  # on position ids: what they were checked against, and their version
# Arguments of an attention that change what it computes, and that this one does not have.
_ABSENT: Final = frozenset(
    {
        *("output_attentions", "position_bias", "head_mask", "cache", "block_table", "num_splits"),
        *("indices", "block_indices", "sinks"),  # which keys a query sees, and sinks that differ from token to token
    }
)


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
        ValueError, TypeError: an option asks for what `flash_attention` does not have, or `tree` is none.
    """
    refuse(**options)
    if tree is not None:
        check_is_tree(tree)
    causal = _is_causal(module, attention_mask, options.get("is_causal"))
    attention_mask = _opened(attention_mask, causal)
    query, key, value = _of_as_many_rows(query, key, value)
    _check_packing(len(query), key.shape[2], attention_mask, tree, options)
    given: dict[str, Any] = {
        "sm_scale": options.get("scaling"),
        "sliding_window": options.get("sliding_window"),
        "logits_soft_cap": options.get("softcap"),
        "sinks": options.get("s_aux"),
        "deterministic": bool(options.get("deterministic")),
    }
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    _check_layer(module, key.shape[2], causal, tree, options)
    packed = attention_mask is not None and attention_mask.dim() == 1
    if tree is not None or packed or (attention_mask is None and causal and q.shape[:2] == (1, key.shape[2])):
        check_positions(module, tree, packed, options)
    if tree is not None:
        return _one(flash_attention(q[0], k[0], v[0], tree=tree, **given)).unsqueeze(0), None
    sums = _sums(attention_mask, options.get("cu_seq_lens_q"), options.get("cu_seq_lens_k"))
    if sums is not None:
        _check_queries(q.shape[1], k.shape[1], causal)
        flat = [tensor.flatten(0, 1) for tensor in (q, k, v)]
        given |= {"cu_seqlens_q": sums[0], "cu_seqlens_k": sums[1]}
        return _one(flash_attention(flat[0], flat[1], flat[2], causal, **given)).unflatten(0, q.shape[:2]), None
    if attention_mask is None:
        return _one(flash_attention(q, k, v, causal, **given)), None
    return _padded((q, k, v), attention_mask.bool(), causal, given), None


def _opened(mask: torch.Tensor | None, causal: bool) -> torch.Tensor | None:
    """The contents of a mask that `masks.mask` made: cu_seqlens [num_sequences + 1], or which tokens are kept [rows,
    keys]. Any other mask is returned as it is, and `_check_packing` refuses it. The same holds for a mask without
    causality in a causal layer."""
    if mask is None or mask.dim() != 4 or mask.shape[1:3] != (1, 1):
        return mask
    if mask.dtype == torch.int32:
        return mask[0, 0, 0]
    return mask[:, 0, 0] if mask.dtype == torch.uint8 or (mask.dtype == torch.bool and not causal) else mask


def _of_as_many_rows(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Repeats tensors of one row for all rows of the others: GraniteSpeech has learned queries that all rows share."""
    rows = max(len(tensor) for tensor in tensors)
    return [tensor.expand(rows, -1, -1, -1) if len(tensor) == 1 else tensor for tensor in tensors]


def _is_causal(module: nn.Module, mask: torch.Tensor | None, option: bool | None) -> bool:
    """Whether a layer is causal: by the option that it was called with, else by its own attribute, else it is.

    With a mask, some causal layers pass False (Moonshine), because PyTorch's masks include causality. So the attribute
    of such a layer counts. But if the whole model was called with False, its configuration says so until the call
    returns, its masks have no causality, and False holds.
    """
    own: bool | None = getattr(module, "is_causal", None)
    of_model = getattr(getattr(module, "config", None), "is_causal", None)
    if option is None or (own and mask is not None and of_model is not False):
        return own is None or bool(own)
    return bool(option)


def _padded(
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor], kept: torch.Tensor, causal: bool, given: dict[str, Any]
) -> torch.Tensor:
    """Attention of the tokens that a mask of padding keeps, 0 for the others. given: options of `flash_attention`."""
    q, k, v = tensors
    # With `own` the queries belong to the last keys. Otherwise they may belong to another text, as in a decoder that
    # attends to its encoder.
    own = causal or given["sliding_window"]
    asked = kept[:, kept.shape[1] - q.shape[1] :] if own else kept.new_ones(q.shape[:2])
    given = given | {"cu_seqlens_q": _lengths(asked), "cu_seqlens_k": _lengths(kept)}
    # `nonzero` is called once for each mask: each call waits for the GPU, and inductor does not know that two calls
    # find equally many tokens
    keys = kept.flatten().nonzero().squeeze(1)
    queries = keys if own and q.shape[1] == kept.shape[1] else asked.flatten().nonzero().squeeze(1)
    flat = [tensor.flatten(0, 1)[places] for tensor, places in ((q, queries), (k, keys), (v, keys))]
    found = _one(flash_attention(flat[0], flat[1], flat[2], causal, **given))
    out = found.new_zeros(q.shape[0] * q.shape[1], q.shape[2], v.shape[-1])
    padded: torch.Tensor = out.index_put((queries,), found).unflatten(0, q.shape[:2])
    return padded


def _lengths(kept: torch.Tensor) -> torch.Tensor:
    """cu_seqlens [rows + 1] of the tokens that a mask keeps in each row."""
    return torch.nn.functional.pad(kept.sum(1).cumsum(0), (1, 0)).int()


def _sums(
    mask: torch.Tensor | None, of_queries: torch.Tensor | None, of_keys: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """cu_seqlens of queries and of keys, from a mask, from a model's keywords, or from both. In the latter case the
    boundaries are joined, and a boundary that both have makes an empty sequence."""
    of_mask = mask if mask is not None and mask.dim() == 1 else None
    if of_queries is None or of_keys is None:
        return None if of_mask is None else (of_mask, of_mask)
    both = of_queries.int(), of_keys.int()
    if of_mask is None:
        return both
    joined = [torch.cat([of_mask, sums]).sort().values for sums in both]
    return joined[0], joined[1]


def _check_layer(module: nn.Module, keys: int, causal: bool, tree: PrefixTree | None, options: dict[str, Any]) -> None:
    """Raises if a layer's arguments contradict the masks that its model makes."""
    config = getattr(module, "config", None)
    window, chunk = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    if window and keys > window and "sliding_window" not in options:  # 0 is Qwen2-MoE's word for none
        raise ValueError(
            f"{type(module).__name__} does not pass on its model's sliding_window={window} and has {keys} keys: "
            f"attn_implementation={NAME!r} would compute no window; use another one"
        )
    given = options.get("sliding_window")
    if window is not None and given is not None and not causal and given != window + 1:
        raise ValueError(
            f"sliding_window={given}: expected {window + 1}, the token itself and the {window} to each side that the "
            f"model's own masks let it see; attn_implementation={NAME!r} would compute fewer"
        )
    if tree is not None:
        why = why_no_tree(config) if causal else "lets a token see later ones"
        if why is not None:
            raise ValueError(
                f"tree is given and the model of {type(module).__name__} {why}: expected a batch without it"
            )
    if tree is not None and chunk is not None and keys > chunk:
        raise ValueError(
            f"tree is given and has {keys} tokens: expected at most {chunk}, because the model attends in chunks of "
            f"{chunk} tokens"
        )


def _check_packing(
    rows: int, keys: int, mask: torch.Tensor | None, tree: PrefixTree | None, options: dict[str, Any]
) -> None:
    """Raises if more than one argument says which tokens belong together, or if it does not fit the batch."""
    given = [name for name in ("cu_seq_lens_q", "cu_seq_lens_k") if options.get(name) is not None]
    if len(given) == 1:
        missing = "cu_seq_lens_k" if given == ["cu_seq_lens_q"] else "cu_seq_lens_q"
        raise ValueError(f"{missing} is None: expected both of cu_seq_lens_q and cu_seq_lens_k, or neither")
    for name in given:
        if not isinstance(options[name], torch.Tensor):
            raise TypeError(f"{name} is {described(options[name])}: expected a torch.Tensor of integers")
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
    if shape != (rows, keys):
        raise ValueError(f"attention_mask has shape {shape}: expected {(rows, keys)}, one for each key")


def _check_queries(queries: int, keys: int, causal: bool) -> None:
    """Raises if a causal layer over packed sequences has fewer queries than keys: nobody knows whose queries they
    are."""
    if causal and queries != keys:
        raise ValueError(
            f"query has {queries} tokens and key has {keys} beside packed sequences: expected as many; leave "
            "logits_to_keep and the cache out"
        )


def check_positions(module: nn.Module, tree: PrefixTree | None, packed: bool, options: dict[str, Any]) -> None:
    """Raises if `position_ids`, which some models pass on, contradict the sequences: those of the tree, the packed ones
    of the mask, or the only one. Reads them once in a forward pass."""
    position_ids = options.get("position_ids")
    if position_ids is None or position_ids.dim() != 2 or torch.compiler.is_compiling():
        return
    known = getattr(position_ids, _CHECKED, None)  # kept on the tensor itself, because its address may be reused
    packed = packed and tree is None
    if known is not None and known[0] is tree and known[1:] == (packed, version(position_ids)):
        return
    if tree is None and (options.get("cu_seq_lens_q") is not None or _is_capturing(position_ids)):
        return
    if packed:
        _check_begins(module, position_ids)
        setattr(position_ids, _CHECKED, (tree, packed, version(position_ids)))
        return
    found = position_ids.flatten().cpu()
    expected = (
        found[:1] + torch.arange(len(found), dtype=torch.int64, device="cpu")
        if tree is None
        else tree.pack().position_ids
    )
    if len(found) != len(expected):
        raise ValueError(f"position_ids has {len(found)} entries: expected {len(expected)}, the tree's tokens")
    wrong = (found != expected).nonzero().flatten().tolist()
    if wrong:
        reason = "the number of the token's ancestors; use tree.pack().position_ids"
        if tree is None:
            masks = f"masks of {type(module).__name__}"
            reason = (
                f"as {masks} hold no packed sequences; pass cu_seq_lens_q and cu_seq_lens_k for them, or "
                "use_cache=False if there is a cache"
            )
        raise ValueError(f"position_ids[{wrong[0]}]={found[wrong[0]]}: expected {expected[wrong[0]]}, {reason}")
    setattr(position_ids, _CHECKED, (tree, packed, version(position_ids)))


def _check_begins(module: nn.Module, position_ids: torch.Tensor) -> None:
    """Raises if positions within a row jump to another number than 0. The branches of a tree do this, if the model does
    not pass the tree on."""
    rows = position_ids.cpu()
    wrong = ((rows[:, 1:] != rows[:, :-1] + 1) & (rows[:, 1:] != 0)).nonzero().tolist()
    if wrong:
        row, before = wrong[0]
        first = rows[row, before + 1]
        raise ValueError(
            f"position_ids[{row}, {before + 1}]={first} after {rows[row, before]}: expected 0 where a packed sequence "
            f"begins; {type(module).__name__} was given no tree, and if its model was, it takes none; pass "
            "cu_seq_lens_q and cu_seq_lens_k for sequences that begin elsewhere"
        )


def _is_capturing(tensor: torch.Tensor) -> bool:
    """Whether a CUDA graph is captured, in which nothing can be read."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def version(tensor: torch.Tensor) -> int:
    """How often a tensor has been written to; -1 for tensors of inference mode, which do not count that."""
    return -1 if tensor.is_inference() else tensor._version


def _one(out: Any) -> torch.Tensor:
    """The output itself, which `flash_attention` returns without `return_lse`."""
    assert isinstance(out, torch.Tensor)
    return out


def refuse(**options: Any) -> None:
    """Raises ValueError for options that this attention does not have."""
    if options.get("dropout"):
        raise ValueError(f"dropout={options['dropout']}: expected 0, as attention here has none; set attention_dropout")
    asked = sorted(name for name in _ABSENT if options.get(name) is not None and options[name] is not False)
    if asked:
        raise ValueError(f"{asked[0]} is given: attn_implementation={NAME!r} has none; use another one for it")
