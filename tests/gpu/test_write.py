"""The kernel that writes keys and values, under Triton's interpreter."""

from itertools import product

import pytest
import torch

from trunkattn.gpu.portable.write_kv import write_on_gpu

from ..ops.cases import HEAD_DIM_V, LAYOUTS, PAGE_SIZE, empty_caches, random_kv, storage_bytes
from .guarded_loads import guarded_loads

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_token_goes_into_its_slot_and_nowhere_else(layout: str, dtype: torch.dtype) -> None:
    """Neither -1 nor the slot behind the cache is one."""
    slots, (k, v) = [9, -1, 3, 0, 24, 23], random_kv(6)
    found, expected = empty_caches(layout, dtype), empty_caches(layout, dtype)
    for token, slot in enumerate(slots):
        if slot in range(24):
            for cache, new in zip(expected, (k, v), strict=True):
                cache[slot // PAGE_SIZE, slot % PAGE_SIZE] = new[token].to(dtype)
    k, v = k.transpose(0, 2).contiguous().transpose(0, 2), torch.cat([v, v], 2)[..., :HEAD_DIM_V]
    with guarded_loads():
        write_on_gpu(k, v, *found, torch.tensor(slots))
    for cache, wanted in zip(found, expected, strict=True):
        assert torch.equal(storage_bytes(cache), storage_bytes(wanted))


def test_new_values_and_caches_farther_apart_than_32_bits_count() -> None:
    """Memory that nothing is written to is only promised, and takes no room."""
    memory, slots = torch.empty((2 << 30) + 1024), torch.tensor([8, 1, 3])
    new, empty = torch.randn(3, 3, 3), torch.zeros(3, 3, 3, 3)  # tokens, heads and dims; pages of 3 tokens
    expected = empty.flatten(0, 1).index_copy(0, slots, new).view_as(empty)

    def far(near: torch.Tensor, dim: int) -> torch.Tensor:
        strides = *near.stride()[:dim], 1 << 30, *near.stride()[dim + 1 :]
        return memory.as_strided(near.shape, strides).copy_(near)

    for dim, changed in product(range(3), range(4)):
        tensors = [new, new, empty.clone(), empty.clone()]
        tensors[changed] = far(tensors[changed], dim)
        write_on_gpu(*tensors, slots)
        assert all(torch.equal(cache, expected) for cache in tensors[2:])
