"""TMA for the training kernels of Hopper: which tensors it reads, and how."""

from typing import Final

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

TMA_BYTES: Final = 16  # what an address and a stride in a TMA descriptor are multiples of
_LAYOUT: Final = gl.NVMMASharedLayout(128, 16, 4)


def reads(*tensors: torch.Tensor) -> bool:
    """Whether TMA reads the tensors [..., heads, head_dim], or a copy of those whose last dimension is not
    contiguous."""
    return all(_is_readable(tensor) for tensor in tensors)


def _is_readable(tensor: torch.Tensor) -> bool:
    if tensor.numel() == 0:
        return False
    if tensor.stride(-1) != 1:  # `with_batch` makes it contiguous
        return tensor.shape[-1] * tensor.itemsize % TMA_BYTES == 0
    strides = [stride * tensor.itemsize for stride, size in _outer(tensor) if size > 1]
    return tensor.data_ptr() % TMA_BYTES == 0 and all(stride > 0 and stride % TMA_BYTES == 0 for stride in strides)


def _outer(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Stride and size of all dimensions but the last."""
    return list(zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True))


def tma_descriptor(tensor: torch.Tensor, rows: int, width: int) -> TensorDescriptor:
    """The descriptor of a tensor [batch, tokens, heads, head_dim] for boxes of `rows` tokens of a head, `width` numbers
    of each. TMA reads zeros beyond the tensor, and writes nothing there."""
    strides = [stride if size > 1 else TMA_BYTES for stride, size in _outer(tensor)]  # of one element any will do
    return TensorDescriptor(tensor, list(tensor.shape), [*strides, 1], [1, rows, 1, width], _LAYOUT)
