"""The tensors: shapes, strides, bytes, and page copies over all layers."""

from typing import Any

import pytest
import torch

from trunkattn.kv_cache import PageCopy
from trunkattn.kv_cache.tensors import KVCache

SIZES: dict[str, Any] = dict(num_layers=2, num_pages=5, page_size=4, num_kv_heads=3, head_dim=8, dtype=torch.float32)


def make(**changes: object) -> KVCache:
    return KVCache(**{**SIZES, "device": "cpu", **changes})


def fill(cache: KVCache) -> torch.Tensor:
    """Give every element its own value; returns them as [layers, 2, pages, page_size, heads, head_dim]."""
    values = torch.arange(2 * 2 * 5 * 4 * 3 * 8, dtype=torch.float32).reshape(2, 2, 5, 4, 3, 8)
    for layer in range(2):
        for part in range(2):
            cache.layer(layer)[part].copy_(values[layer, part])
    return values


def contents(cache: KVCache) -> torch.Tensor:
    return torch.stack([torch.stack(cache.layer(layer)) for layer in range(2)])


@pytest.mark.parametrize("num_pages", [10**14, 10**17, 10**30])  # more than memory, than NumPy counts, than int64
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_cache_that_no_memory_holds_is_refused(monkeypatch: pytest.MonkeyPatch, num_pages: int, device: str) -> None:
    def no_memory(*arguments: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")

    monkeypatch.setattr(torch, "zeros", no_memory)  # as on a GPU
    with pytest.raises(ValueError) as refused:
        make(num_pages=num_pages, device=device)
    assert str(refused.value) == (
        f"num_pages={num_pages}: expected a cache that fits into the memory of {device}, but it takes "
        f"{num_pages * 2 * 2 * 4 * 3 * 8 * 4} bytes; lower num_pages"
    )


def test_a_cache_lies_on_its_device() -> None:
    keys, _ = make(device="meta", dtype=torch.bfloat16).layer(0)
    assert (keys.device.type, keys.dtype, keys.shape) == ("meta", torch.bfloat16, (5, 4, 3, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_layers_are_zeroed_views_of_one_allocation(dtype: torch.dtype) -> None:
    cache = make(dtype=dtype)
    views = [view for layer in range(2) for view in cache.layer(layer)]
    for view in views:
        assert view.shape == (5, 4, 3, 8)
        assert view.stride(-1) == 1
        assert view.dtype == dtype
        assert torch.equal(view.float(), torch.zeros(5, 4, 3, 8))
    assert len({view.untyped_storage().data_ptr() for view in views}) == 1
    assert sum(view.nbytes for view in views) == cache.num_bytes


def test_no_two_views_overlap() -> None:
    cache = make()
    assert torch.equal(fill(cache), contents(cache))


def test_bytes_per_page_times_pages_is_the_allocation() -> None:
    sizes = {name: value for name, value in SIZES.items() if name != "num_pages"}
    assert KVCache.bytes_per_page(**sizes) == 2 * 2 * 4 * 3 * 8 * 4
    assert make().num_bytes == 5 * KVCache.bytes_per_page(**sizes)
    assert KVCache.bytes_per_page(**{**sizes, "dtype": torch.bfloat16}) == KVCache.bytes_per_page(**sizes) // 2


LATENT: dict[str, Any] = {"num_kv_heads": 1, "latent_dim": 6}


def test_a_latent_cache_has_one_tensor_a_layer() -> None:
    cache = make(**LATENT)
    (first, none), (second, _) = cache.layer(0), cache.layer(1)
    assert first.shape == (5, 4, 8) and first.is_contiguous() and none is None
    assert first.nbytes + second.nbytes == cache.num_bytes == 5 * 4 * cache.bytes_per_token
    assert cache.bytes_per_token == 2 * 8 * 4 == make(num_kv_heads=1).bytes_per_token // 2
    first.fill_(1.0)
    assert not second.any()
    first[3], second[3] = 3.0, 4.0
    cache.copy_pages([PageCopy(3, 1)])
    assert torch.equal(first[1], torch.full((4, 8), 3.0)) and torch.equal(second[1], torch.full((4, 8), 4.0))
    assert torch.equal(first[2], torch.ones(4, 8))


def test_the_sizes_of_a_latent_cache_are_checked() -> None:
    for latent_dim in (0, 8, 2.5):
        with pytest.raises((TypeError, ValueError), match=rf"latent_dim={latent_dim}: expected an integer"):
            make(num_kv_heads=1, latent_dim=latent_dim)
    assert [make(num_kv_heads=1, latent_dim=latent_dim).layer(0)[1] for latent_dim in (1, 7)] == [None, None]
    with pytest.raises(ValueError, match="num_kv_heads=3: expected 1 with latent_dim"):
        make(latent_dim=6)


def test_copy_pages_copies_keys_and_values_of_every_layer() -> None:
    cache = make()
    expected = fill(cache)
    cache.copy_pages([PageCopy(4, 3), PageCopy(0, 4)])
    expected[:, :, 3] = expected[:, :, 4]
    expected[:, :, 4] = expected[:, :, 0]
    assert torch.equal(contents(cache), expected)


def test_copy_pages_keeps_the_order_of_the_copies() -> None:
    cache = make()
    original = fill(cache).clone()
    cache.copy_pages([PageCopy(0, 1), PageCopy(1, 2), PageCopy(3, 0)])
    after = contents(cache)
    for page, source in enumerate([3, 0, 0, 3, 4]):
        assert torch.equal(after[:, :, page], original[:, :, source])


@pytest.mark.parametrize("copy", [PageCopy(0, 5), PageCopy(5, 0), PageCopy(-1, 0), PageCopy(0, -1), PageCopy(2, 2)])
def test_a_wrong_copy_raises_before_any_copy(copy: PageCopy) -> None:
    cache = make()
    expected = fill(cache)
    with pytest.raises(ValueError, match="copies"):
        cache.copy_pages([PageCopy(0, 1), copy])
    assert torch.equal(contents(cache), expected)


@pytest.mark.parametrize("index", [-1, 2])
def test_layer_index_is_checked(index: int) -> None:
    with pytest.raises(ValueError, match=r"index=.*: expected an integer from 0 to"):
        make().layer(index)


@pytest.mark.parametrize("name", ["num_layers", "num_pages", "page_size", "num_kv_heads", "head_dim"])
def test_sizes_are_checked(name: str) -> None:
    sizes = {size: value for size, value in SIZES.items() if size != "num_pages"}
    if name in sizes:
        with pytest.raises(ValueError, match=f"{name}=0: expected an integer of at least 1"):
            KVCache.bytes_per_page(**(sizes | {name: 0}))
    with pytest.raises(ValueError, match=f"{name}=0: expected an integer of at least 1"):
        make(**{name: 0})
    with pytest.raises(TypeError, match=rf"{name}=2\.5: expected an integer of at least 1"):
        make(**{name: 2.5})


def test_dtype_is_checked() -> None:
    with pytest.raises(ValueError, match=r"dtype=torch\.int8: expected a floating-point torch\.dtype"):
        make(dtype=torch.int8)
    with pytest.raises(TypeError, match=r"dtype='float16': expected a floating-point torch\.dtype"):
        make(dtype="float16")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_cpu_reads_every_vector_from_one_cache_line(dtype: torch.dtype) -> None:
    cache = KVCache(2, 400, 16, 3, 64, dtype, "cpu")
    assert all(tensor.data_ptr() % 64 == 0 for layer in range(2) for tensor in cache.layer(layer))
    assert not any(tensor.float().any() for layer in range(2) for tensor in cache.layer(layer))


def test_a_cache_that_is_made_in_inference_mode_is_written_outside_of_it() -> None:
    with torch.inference_mode():
        cache = KVCache(1, 4, 2, 1, 8, torch.float32, "cpu")
    keys, _ = cache.layer(0)
    keys[1] = 3.0
    cache.copy_pages([PageCopy(1, 2)])
    assert bool((keys[2] == 3.0).all())
