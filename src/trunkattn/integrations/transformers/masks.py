"""transformers' mask interface, for `attention.attend`.

transformers asks for a mask once in a forward pass and gives it to every layer. Ours is None for plain causal
attention. Otherwise it has four dimensions, because models may index them:

- for padding, [rows, 1, 1, keys], 1 for tokens that are kept: uint8 if the attention is causal. If not, it is bool, as
  for PyTorch's own attention, because encoders use it elsewhere too (Siglip 2 in its pooling, LASR in convolutions);
- for packed sequences or chunks, their `cu_seqlens`, [1, 1, 1, num_sequences + 1] int32.

No mask that a model makes by itself has one of the integer dtypes.
"""

from collections.abc import Callable
from typing import Any, Final

import torch

from trunkattn.integrations.transformers.models import why_not, why_not_causal

NAME: Final = "trunkattn"


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    **options: Any,
) -> torch.Tensor | None:
    """transformers' mask interface; the module says what it returns.

    Raises:
        ValueError: the mask is not one of packed sequences, windows or padding, or the model has an attention of its
            own.
    """
    if options.get("config") is not None:
        _check_model(options["config"], "allow_is_bidirectional_skip" not in options)
    if options.get("use_vmap", False):
        raise ValueError(
            f"the model joins a mask of its own to the causal one: attn_implementation={NAME!r} takes none; use 'eager'"
        )
    both_ways = options.get("allow_is_bidirectional_skip", False)
    if not both_ways:
        _check_last(options.get("q_offset"), q_length, kv_offset + kv_length)
    kept = _kept(attention_mask, kv_offset, kv_length, torch.bool if both_ways else torch.uint8)
    if local_size == 0:  # the model has no such layers: no query would see a key
        return kept
    local = local_size is not None and local_size < kv_offset + kv_length
    if kept is not None and q_length != kv_length and local and both_ways:
        raise ValueError(
            f"attention_mask has padding, and {q_length} queries meet {kv_length} keys within a window to both sides: "
            f"attn_implementation={NAME!r} takes a query for each key there; use 'eager'"
        )
    if kept is not None and local:
        _check_holes(kept)
    plain = both_ways or (options.get("allow_is_causal_skip", True) and not local)
    if plain or mask_function is None:
        return kept
    whole = "there is padding" if kept is not None else "" if q_length == kv_length else "keys are cached"
    sums = _boundaries(mask_function, (batch_size, kv_offset, kv_length), options.get("device", "cpu"), whole)
    return kept if sums is None else sums


def _check_model(config: Any, causal: bool) -> None:
    """Raises if models of a configuration cannot use our masks. causal: whether they ask for a causal one."""
    why, then = why_not(config), "give them masks that they do not know"
    if why is None and causal:
        why, then = why_not_causal(config), "let tokens see later ones"
    if why is not None:
        raise ValueError(
            f"models of {type(config).__name__} {why}: attn_implementation={NAME!r} would {then}; use 'eager'"
        )


def require(holds: torch.Tensor, message: str) -> None:
    """Raises ValueError unless a tensor of one bool is true. Under torch.compile the check becomes an assertion of the
    graph."""
    if torch.compiler.is_compiling():
        torch._assert_async(holds, message)
    elif not bool(holds):
        raise ValueError(message)


def _check_last(q_offset: int | torch.Tensor | None, q_length: int, keys_end: int) -> None:
    """Raises unless the last query belongs to the last key, as `flash_attention` assumes."""
    if isinstance(q_offset, torch.Tensor) or (q_offset is not None and q_offset + q_length != keys_end):
        raise ValueError(
            f"the cache has room for keys after the last query: attn_implementation={NAME!r} takes caches that grow; "
            "use a DynamicCache, or generate with another attention"
        )


def _kept(
    attention_mask: torch.Tensor | None, kv_offset: int, kv_length: int, dtype: torch.dtype
) -> torch.Tensor | None:
    """The part of a padding mask that belongs to the keys, as `mask` returns it; None if it hides no key. Under
    torch.compile its values are unknown, so that a mask is returned even if it hides none."""
    if attention_mask is None:
        return None
    kept = attention_mask[:, kv_offset : kv_offset + kv_length]
    return None if not torch.compiler.is_compiling() and bool(kept.all()) else kept[:, None, None].to(dtype)


def _check_holes(kept: torch.Tensor) -> None:
    """Raises if padding lies between tokens of a row: a window would then reach too far, as it counts kept tokens
    only."""
    kept = kept[:, 0, 0].bool()
    begins = kept[:, 0] + (kept[:, 1:] & ~kept[:, :-1]).sum(1)
    require(
        (begins <= 1).all(),
        "attention_mask hides tokens between others, and the model has a window or chunks: "
        f"attn_implementation={NAME!r} takes padding at the ends of a row only",
    )


def _boundaries(
    mask_function: Callable[..., Any], keys: tuple[int, int, int], device: torch.device | str, whole: str
) -> torch.Tensor | None:
    """cu_seqlens of all rows, as `mask` returns them: a sequence begins where a token does not see the one before it.
    None if each row is a single sequence. Under torch.compile, which needs fixed shapes, empty sequences follow.

    Args:
        mask_function: transformers' function of batch, head, query and key indices.
        keys: the number of rows, the place of the first key in a row, and the number of keys of a row.
        device: where cu_seqlens is made.
        whole: the reason why each row must be a single sequence; empty if it need not.
    """
    count, first, length = keys
    rows = torch.arange(count, dtype=torch.int64, device=device)[:, None]
    later = torch.arange(first + 1, first + length, dtype=torch.int64, device=device)[None]
    sees_before = mask_function(rows, 0, later, later - 1).expand(count, -1)
    sees_after = mask_function(rows, 0, later - 1, later)
    require(
        ~sees_after.any(), f"the model's mask lets a token see a later one: attn_implementation={NAME!r} takes none"
    )
    if whole:
        require(
            sees_before.all(),
            f"the model attends in chunks, and {whole}: attn_implementation={NAME!r} takes chunks of whole rows and of "
            "packed sequences only",
        )
        return None
    begins = torch.cat([sees_before.new_ones(count, 1), ~sees_before], 1).flatten()
    numbers = torch.arange(begins.numel() + 1, dtype=torch.int32, device=device)
    if torch.compiler.is_compiling():
        starts = torch.where(begins, numbers[:-1], begins.numel()).sort().values
    elif int(begins.sum()) == count:
        return None
    else:
        starts = numbers[:-1][begins]
    return torch.cat([starts, numbers[-1:]])[None, None, None]
