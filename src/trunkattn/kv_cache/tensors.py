"""The tensors behind the pages: keys and values, or the rows of a latent cache (MLA)."""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from trunkattn.kv_cache.page_pool import PageCopy
from trunkattn.memory import memory_for
from trunkattn.validate import check_int

_MOST_BYTES: Final = 1 << 62  # more than torch and NumPy count
_ALIGNMENT: Final = 64  # bytes, as in torch: a vector of a CPU then lies in one cache line


class KVCache:
    """Keys and values of `num_layers` layers in pages of `page_size` tokens.

    The whole model has one allocation of `num_bytes` bytes. It starts as zeros, so that a slot that was never written
    holds no NaN.

    Args:
        num_layers, num_pages, page_size, num_kv_heads, head_dim: sizes, each at least 1; `page_size` in tokens.
        dtype: any floating-point type that torch can store, fp8 included.
        device: where the tensors are.
        latent_dim: for a latent cache, whose rows of head_dim numbers also hold the values, in their first latent_dim
            columns. num_kv_heads is then 1. None: keys and values are apart.

    Raises:
        TypeError, ValueError: a size is not an integer of at least 1, `dtype` is not a floating-point type, or there is
            no memory for the cache.
    """

    @torch.inference_mode(False)  # pages are written inside and outside of it
    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        latent_dim: int | None = None,
    ) -> None:
        self.num_pages = check_int("num_pages", num_pages, 1)
        self.bytes_per_token = self.bytes_per_page(num_layers, 1, num_kv_heads, head_dim, dtype, latent_dim)
        check_int("page_size", page_size, 1)
        self.num_layers = int(num_layers)
        # Head-major: one head's keys of a page are contiguous, which a CPU decodes faster than token-major pages.
        parts = _parts(num_kv_heads, head_dim, latent_dim)
        shape = tuple(map(int, (num_layers, parts, num_pages, num_kv_heads, page_size, head_dim)))
        num_bytes = math.prod(shape) * dtype.itemsize
        with memory_for(
            lambda _: (
                f"num_pages={self.num_pages}: expected a cache that fits into the memory of {device}, but it takes "
                f"{num_bytes} bytes; lower num_pages"
            )
        ):
            self._storage = _zeros(shape, num_bytes, dtype, torch.device(device))
        if latent_dim is None:
            self._layers = [(keys.transpose(1, 2), values.transpose(1, 2)) for keys, values in self._storage]
        else:
            self._layers = [(rows.squeeze(1), None) for (rows,) in self._storage]

    @staticmethod
    def bytes_per_page(
        num_layers: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        latent_dim: int | None = None,
    ) -> int:
        """Bytes of one page over all layers. A memory budget divided by it gives `num_pages`."""
        _check_shape(num_layers, page_size, num_kv_heads, head_dim, dtype)
        parts = _parts(num_kv_heads, head_dim, latent_dim)
        return parts * math.prod(map(int, (num_layers, page_size, num_kv_heads, head_dim))) * dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes allocated, over all layers."""
        return self._storage.nbytes

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`(k_cache, v_cache)` of layer `index`, as `BatchAttention.run` takes them: views [num_pages, page_size,
        num_kv_heads, head_dim], and of a latent cache [num_pages, page_size, head_dim] and None.

        The last dimension is contiguous; no other stride is promised.
        """
        check_int("index", index, 0, self.num_layers - 1)
        return self._layers[index]

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copies the keys and values of `src` to `dst` in every layer, one copy after the other, on the current stream.

        The order matters, because a page that one copy fills may be the source of the next. Everything is checked
        before the first copy.
        """
        for index, copy in enumerate(copies):
            check_int(f"copies[{index}].src", copy.src, 0, self.num_pages - 1)
            check_int(f"copies[{index}].dst", copy.dst, 0, self.num_pages - 1)
            if copy.src == copy.dst:
                raise ValueError(f"copies[{index}]={copy}: expected two different pages")
        for src, dst in copies:
            self._storage[:, :, dst].copy_(self._storage[:, :, src])


def _zeros(shape: tuple[int, ...], num_bytes: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros. On a CPU the system makes the memory of a page when the page is first written: gigabytes of cache then
    cost no time at the start, and pages that are never used no memory."""
    if num_bytes > _MOST_BYTES:
        raise MemoryError
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = torch.from_numpy(np.zeros(num_bytes + _ALIGNMENT, np.uint8))
    begin = -memory.data_ptr() % _ALIGNMENT
    return memory[begin : begin + num_bytes].view(dtype).view(shape)


def _parts(num_kv_heads: int, head_dim: int, latent_dim: int | None) -> int:
    """Tensors of a layer: keys and values, or the rows of a latent cache, which are both."""
    if latent_dim is None:
        return 2
    check_int("latent_dim", latent_dim, 1, head_dim - 1)
    if num_kv_heads != 1:
        raise ValueError(f"num_kv_heads={num_kv_heads}: expected 1 with latent_dim, for all heads share a cached row")
    return 1


def _check_shape(num_layers: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    check_int("num_layers", num_layers, 1)
    check_int("page_size", page_size, 1)
    check_int("num_kv_heads", num_kv_heads, 1)
    check_int("head_dim", head_dim, 1)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype={dtype!r}: expected a floating-point torch.dtype")
    if not dtype.is_floating_point:
        raise ValueError(f"dtype={dtype}: expected a floating-point torch.dtype")
