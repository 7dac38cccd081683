"""The kernel that writes keys and values, under Triton's interpreter."""

import pytest
import torch

from trunkattn.gpu.portable.write_kv import write_on_gpu

from ..ops.test_write_kv import HEAD_DIM_V, LAYOUTS, PAGE_SIZE, empty_caches, random_kv, storage_bytes

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
    write_on_gpu(k, v, *found, torch.tensor(slots))
    for cache, wanted in zip(found, expected, strict=True):
        assert torch.equal(storage_bytes(cache), storage_bytes(wanted))
