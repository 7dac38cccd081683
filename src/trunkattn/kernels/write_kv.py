"""New keys and values into the paged cache (PagedAttention, lecture §3.3)."""

import torch


def write_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Stores token i's key and value in slot `slot_mapping[i]` = page * page_size + offset; slot -1 is skipped.

    k [num_tokens, num_kv_heads, head_dim], v [num_tokens, num_kv_heads, head_dim_v], caches [num_pages, page_size,
    num_kv_heads, ...] of any strides, slot_mapping [num_tokens] int64. Values are cast to the cache's dtype.

    Raises:
        ValueError: if a shape does not match, or on a CPU a slot lies outside the cache; nothing is written then.
        TypeError: if slot_mapping is not int64.
    """
    if slot_mapping.dtype != torch.int64:
        raise TypeError(f"slot_mapping has dtype {slot_mapping.dtype}: expected torch.int64")
    for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        expected = (len(slot_mapping), *cache.shape[2:])
        if tuple(new.shape) != expected:
            raise ValueError(f"{name} has shape {tuple(new.shape)}: expected {expected}")
    num_slots = k_cache.shape[0] * k_cache.shape[1]
    if slot_mapping.device.type == "cpu" and len(slot_mapping):
        low, high = int(slot_mapping.min()), int(slot_mapping.max())
        if low < -1 or high >= num_slots:
            raise ValueError(f"slot_mapping holds {low if low < -1 else high}: expected -1 to {num_slots - 1}")
        if low == -1:
            kept = slot_mapping >= 0
            k, v, slot_mapping = k[kept], v[kept], slot_mapping[kept]
    pages = slot_mapping.div(k_cache.shape[1], rounding_mode="floor")
    offsets = slot_mapping - pages * k_cache.shape[1]
    k_cache[pages, offsets] = k.to(k_cache.dtype)
    v_cache[pages, offsets] = v.to(v_cache.dtype)
