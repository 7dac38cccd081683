"""Caches of several layouts to write into, and keys and values to write."""

import torch

NUM_PAGES, PAGE_SIZE, NUM_HEADS, HEAD_DIM, HEAD_DIM_V = 6, 4, 2, 8, 5
LAYOUTS = ("plain", "heads_first", "sliced", "one_tensor")


def empty_caches(layout: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """[num_pages, page_size, num_kv_heads, head_dim or head_dim_v] of ones, in storage of several layouts."""
    if layout == "one_tensor":
        both = torch.ones(NUM_PAGES, PAGE_SIZE, NUM_HEADS, HEAD_DIM + HEAD_DIM_V).to(dtype)
        return both[..., :HEAD_DIM], both[..., HEAD_DIM:]
    caches = []
    for width in (HEAD_DIM, HEAD_DIM_V):
        if layout == "heads_first":
            cache = torch.ones(NUM_PAGES, NUM_HEADS, PAGE_SIZE, width).to(dtype).transpose(1, 2)
        elif layout == "sliced":
            cache = torch.ones(2 * NUM_PAGES, PAGE_SIZE + 1, NUM_HEADS + 2, width + 3).to(dtype)
            cache = cache[1::2, 1:, 1:-1, 2:-1]
        else:
            cache = torch.ones(NUM_PAGES, PAGE_SIZE, NUM_HEADS, width).to(dtype)
        caches.append(cache)
    return caches[0], caches[1]


def random_kv(num_tokens: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    k = torch.randn(num_tokens, NUM_HEADS, HEAD_DIM, generator=generator)
    return k.to(dtype), torch.randn(num_tokens, NUM_HEADS, HEAD_DIM_V, generator=generator).to(dtype)


def storage_bytes(cache: torch.Tensor) -> torch.Tensor:
    """All memory that the cache is a view of."""
    return torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage())
