"""TMA for the training kernels of Hopper: which tensors it reads, which are copied first, and how."""

from typing import Final, NamedTuple

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from trunkattn.training.arguments import readable

TMA_BYTES: Final = 16  # an address or a stride in a TMA descriptor is a multiple of this
_LAYOUT: Final = gl.NVMMASharedLayout(128, 16, 4)


def reads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether the Hopper kernels compute the tensors: TMA reads no empty one."""
    return bool(q.numel() and k.numel() and v.numel())


def readable_by_tma(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Returns the tensors [..., tokens, heads, head_dim], or contiguous copies of those that `readable` copies or TMA
    does not read, because their address or a stride is not in whole `TMA_BYTES` or a stride is 0."""
    return [
        tensor if _is_read(tensor) else tensor.clone(memory_format=torch.contiguous_format)
        for tensor in readable(*tensors)
    ]


def _is_read(tensor: torch.Tensor) -> bool:
    for stride, size in zip(tensor.stride()[:-1], tensor.shape, strict=False):
        if size > 1 and (stride <= 0 or stride * tensor.itemsize % TMA_BYTES):
            return False
    return tensor.data_ptr() % TMA_BYTES == 0


class _ReadableTensor(TensorDescriptor):
    """The descriptor of a tensor that TMA can read. The base class would check this at each launch, and the check takes
    as long as the rest of the launch, so it is left out here."""

    def __post_init__(self) -> None:
        pass


class TensorMap(NamedTuple):
    """Everything that a `TensorDescriptor` holds except the tensor."""

    shape: list[int]
    strides: list[int]
    box: list[int]
    layout: gl.NVMMASharedLayout

    def of(self, tensor: torch.Tensor) -> TensorDescriptor:
        """Returns the descriptor of a tensor that TMA can read. The map says where the elements lie; the tensor's own
        shape does not matter."""
        return _ReadableTensor(tensor, self.shape, self.strides, self.box, self.layout)


def tensor_map(tensor: torch.Tensor, rows: int, width: int) -> TensorMap:
    """Returns the map of a tensor [batch, tokens, heads, head_dim] that TMA can read. A box holds `rows` tokens of one
    head, and `width` numbers of each. Beyond the tensor TMA reads zeros and writes nothing."""
    shape, strides = list(tensor.shape), list(tensor.stride())
    for at in range(3):
        if shape[at] == 1:  # the stride of such a dimension is never used
            strides[at] = TMA_BYTES
    return TensorMap(shape, strides, [1, rows, 1, width], _LAYOUT)
