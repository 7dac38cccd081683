"""Masks as transformers' models ask for them: which keys a layer's queries see, found before any weight is loaded.

Most models hand a sliding window to the attention as a keyword too, but some apply it only by the mask. transformers'
own default attention obeys the mask, so the mask decides. A forward pass on the meta device gets a `RequestedMask` for
each mask that the model's code asks for, and each layer shows which one it was given. Every other forward pass gets no
mask, because the plan holds causality and windows.
"""

from collections.abc import Callable
from typing import Any

import torch

MaskFunction = Callable[..., torch.Tensor]
NO_WINDOW_KEYS = 1024  # keys over which a mask without a window is compared with a causal one


class UnsupportedAttention(ValueError):
    """A model's attention is of a kind that does not exist here. The message is the reason, for users."""


class RequestedMask(torch.Tensor):
    """A mask on the meta device that knows what it stands for. What a model derives from it is a plain tensor.

    Attributes:
        mask_function: transformers' function of batch, head, query and key indices.
        window: size of the mask's window or chunk, in tokens; None: it has none.
    """

    mask_function: MaskFunction
    window: int | None
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def request_mask(
    *,
    mask_function: MaskFunction,
    attention_mask: torch.Tensor | None = None,
    device: torch.device | str | None = None,
    local_size: int | None = None,
    **_: Any,
) -> torch.Tensor | None:
    """transformers' mask interface: a `RequestedMask` on the meta device, and no mask elsewhere. Versions that pass no
    `device` pass the attention mask."""
    if device is None:
        device = "cpu" if attention_mask is None else attention_mask.device
    if torch.device(device).type != "meta":
        return None
    mask = torch.empty(1, 1, 1, 1, dtype=torch.bool, device=device).as_subclass(RequestedMask)
    mask.mask_function, mask.window = mask_function, local_size
    return mask


def window_of(mask: torch.Tensor) -> int | None:
    """The sliding window that a layer's mask stands for; None: its queries see all earlier keys.

    Raises:
        UnsupportedAttention: the mask is neither causal nor causal with a sliding window.
    """
    if not isinstance(mask, RequestedMask):
        raise UnsupportedAttention("it builds its own attention mask")
    if _shows(mask.mask_function, query=0, key=1):
        raise UnsupportedAttention("its attention is bidirectional")
    if not _is_causal_window(mask.mask_function, mask.window):
        size = "" if mask.window is None else f" of size {mask.window}"
        raise UnsupportedAttention(f"its attention mask{size} is neither causal nor a causal sliding window")
    return mask.window


def _shows(mask_function: MaskFunction, query: int, key: int) -> bool:
    zero, *positions = (torch.tensor(index, dtype=torch.int64, device="cpu") for index in (0, query, key))
    try:
        return bool(mask_function(zero, zero, *positions))
    except Exception:  # it needs more than indices, such as the tokens of this batch
        return False


def _is_causal_window(mask_function: MaskFunction, window: int | None) -> bool:
    """Whether the function is that of causal attention over the last `window` keys: for queries around the window's
    edges, where chunks and bidirectional masks differ from it."""
    size = NO_WINDOW_KEYS // 2 if window is None else window
    edges = [0, 1, size - 1, size, size + 1, 2 * size - 1]
    queries = torch.tensor(edges, dtype=torch.int64, device="cpu").clamp(min=0).view(-1, 1)
    keys = torch.arange(2 * size + 1, dtype=torch.int64, device="cpu").view(1, -1)
    expected = (keys <= queries) & (keys > queries - (window or NO_WINDOW_KEYS))
    zero = torch.zeros((), dtype=torch.int64, device="cpu")
    try:
        visible = mask_function(zero, zero, queries, keys)
        return torch.equal(visible.broadcast_to(expected.shape), expected)
    except Exception:  # as in _shows
        return False
