"""TMA for the training kernels of Hopper: which tensors it reads, and how."""

from typing import Final, NamedTuple

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
    shape, itemsize = tensor.shape, tensor.itemsize
    *strides, last = tensor.stride()
    if 0 in shape:
        return False
    if last != 1:  # `with_batch` makes it contiguous
        return shape[-1] * itemsize % TMA_BYTES == 0
    for stride, size in zip(strides, shape, strict=False):
        if size > 1 and (stride <= 0 or stride * itemsize % TMA_BYTES):
            return False
    return tensor.data_ptr() % TMA_BYTES == 0


class _ReadableTensor(TensorDescriptor):
    """The descriptor of a tensor that TMA reads. Its base checks that at each launch, which takes as long as all else
    that a launch does."""

    def __post_init__(self) -> None:
        pass


class TensorMap(NamedTuple):
    """All of a descriptor but the tensor, as `TensorDescriptor` has it."""

    shape: list[int]
    strides: list[int]
    box: list[int]
    layout: gl.NVMMASharedLayout

    def of(self, tensor: torch.Tensor) -> TensorDescriptor:
        """The descriptor of a tensor that TMA reads, whose elements lie as the map says, whatever its own shape is."""
        return _ReadableTensor(tensor, self.shape, self.strides, self.box, self.layout)


def tensor_map(tensor: torch.Tensor, rows: int, width: int) -> TensorMap:
    """The map of a tensor [batch, tokens, heads, head_dim] that TMA reads, for boxes of `rows` tokens of a head and
    `width` numbers of each. TMA reads zeros beyond the tensor, and writes nothing there."""
    shape, strides = list(tensor.shape), list(tensor.stride())
    for at in range(3):
        if shape[at] == 1:  # then any stride will do
            strides[at] = TMA_BYTES
    return TensorMap(shape, strides, [1, rows, 1, width], _LAYOUT)
