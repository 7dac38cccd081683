"""The key and value tensors behind the pages."""

from collections.abc import Sequence

import torch

from trunkattn.cache.page_pool import PageCopy, check_int


class KVCache:
    """Keys and values of `num_layers` layers in pages of `page_size` tokens (PagedAttention, lecture §3.3).

    One allocation of `num_bytes` bytes for the whole model, zeroed, so that a slot nobody has written holds no NaN.
    `dtype` is any floating-point type torch can store, fp8 included.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        check_int("num_pages", num_pages, 1)
        _check_shape(num_layers, page_size, num_kv_heads, head_dim, dtype)
        self.num_layers = num_layers
        self.num_pages = num_pages
        # Head-major: one head's keys of a page are one run of memory, 3 % faster decode on a CPU than token-major.
        shape = (num_layers, 2, num_pages, num_kv_heads, page_size, head_dim)
        self._storage = torch.zeros(shape, dtype=dtype, device=device)
        self._layers = [(keys.transpose(1, 2), values.transpose(1, 2)) for keys, values in self._storage]

    @staticmethod
    def bytes_per_page(num_layers: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes of one page's keys and values over all layers: a memory budget divided by it gives `num_pages`."""
        _check_shape(num_layers, page_size, num_kv_heads, head_dim, dtype)
        return 2 * num_layers * page_size * num_kv_heads * head_dim * dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes allocated, over all layers."""
        return self._storage.nbytes

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`(k_cache, v_cache)` of layer `index`: views [num_pages, page_size, num_kv_heads, head_dim].

        The last dimension is contiguous; no other stride is promised.
        """
        check_int("index", index, 0)
        if index >= self.num_layers:
            raise ValueError(f"index must be less than num_layers = {self.num_layers}, got {index}")
        return self._layers[index]

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copy the keys and values of `src` to `dst` in every layer, one copy after the other, on the current stream.

        The order is kept because a page that one copy fills may be the source of the next. Everything is checked
        before the first copy.
        """
        for copy in copies:
            check_int("copies: src", copy.src, 0)
            check_int("copies: dst", copy.dst, 0)
            if max(copy) >= self.num_pages or copy.src == copy.dst:
                raise ValueError(f"copies: expected two different pages below {self.num_pages}, got {copy}")
        for src, dst in copies:
            self._storage[:, :, dst].copy_(self._storage[:, :, src])


def _check_shape(num_layers: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    check_int("num_layers", num_layers, 1)
    check_int("page_size", page_size, 1)
    check_int("num_kv_heads", num_kv_heads, 1)
    check_int("head_dim", head_dim, 1)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype, got {dtype!r}")
    if not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating-point type, got {dtype}")
