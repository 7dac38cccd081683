"""Writes new keys and values into pages on a CPU."""

import numpy as np
import torch

from trunkattn.compiled import njit
from trunkattn.cpu.arguments import array_at
from trunkattn.cpu.parallel import strides_of


def write_on_cpu(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Writes checked tensors, whose shapes are those of `ops.write_kv.write_kv`.

    Raises:
        ValueError: a slot lies outside the cache; nothing is written then.
    """
    slots = slot_mapping.contiguous()
    count, num_slots = slots.shape[0], k_cache.shape[0] * k_cache.shape[1]
    bad = _first_outside(slots.data_ptr(), count, num_slots)
    if bad >= 0:
        raise ValueError(
            f"slot_mapping[{bad}]={slots[bad]}: expected a slot from 0 to {num_slots - 1}, or -1 to skip the token"
        )
    for new, cache in ((k, k_cache), (v, v_cache)):
        source, size = new.detach().to(cache.dtype).contiguous(), cache.itemsize
        strides = tuple(size * stride for stride in strides_of(cache))
        _, page_size, num_heads, width = cache.shape
        addresses = (cache.data_ptr(), source.data_ptr(), slots.data_ptr())
        _scatter(addresses, strides, count, page_size, num_heads, size * width)


@njit
def _first_outside(slots_at, count, num_slots):
    slots = array_at(slots_at, np.int64)
    for i in range(count):
        if slots[i] < -1 or slots[i] >= num_slots:
            return i
    return -1


@njit
def _scatter(addresses, strides, num_tokens, page_size, num_heads, width):
    """Copies bytes. The strides of pages, tokens and heads and the width of a head are in bytes.

    It runs on one thread: a step has only a few hundred kilobytes, which take less time than to wake a second one.
    """
    cache, source = array_at(addresses[0], np.uint8), array_at(addresses[1], np.uint8)
    slots = array_at(addresses[2], np.int64)
    page_stride, token_stride, head_stride = strides
    for i in range(num_tokens):
        if slots[i] < 0:
            continue
        at = slots[i] // page_size * page_stride + slots[i] % page_size * token_stride
        for head in range(num_heads):
            to, begin = at + head * head_stride, (i * num_heads + head) * width
            for byte in range(width):
                cache[to + byte] = source[begin + byte]
