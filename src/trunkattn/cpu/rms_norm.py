"""Root mean square norms on a CPU (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467), in one pass of a row.

Written in torch, a norm is eight operations, each of which costs as much as the arithmetic of a few rows.
"""

from array import array
from functools import cache
from typing import Final, NamedTuple

import numpy as np
import torch

from trunkattn.compiled import njit
from trunkattn.cpu.arguments import array_at
from trunkattn.cpu.microkernel import bits_to_float
from trunkattn.cpu.threads import call_on_threads, kernel_address

_SHARE: Final = 16_384  # numbers that a thread is worth waking for


class _Arguments(NamedTuple):
    """Fields of what the kernel takes, all int64."""

    x: int  # addresses of contiguous float32 arrays: [rows, width]
    weight: int  # [width]
    out: int  # [rows, width]
    rows: int
    width: int
    epsilon: int  # the bits of a float32
    num_threads: int


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """weight · x / sqrt(mean(x²) + epsilon), the mean over the last dimension. A row's result does not depend on its
    neighbours.

    x [..., width] and weight [width] are float32 on the CPU; not checked. Returns a contiguous tensor like x.
    """
    x, width = x.detach().contiguous(), weight.shape[0]
    out = torch.empty_like(x)
    rows = x.numel() // width
    if rows:
        num_threads = max(1, min(torch.get_num_threads(), x.numel() // _SHARE, rows))
        given = _Arguments(
            x=x.data_ptr(),
            weight=weight.data_ptr(),
            out=out.data_ptr(),
            rows=rows,
            width=width,
            epsilon=_bits(epsilon),
            num_threads=num_threads,
        )
        arguments = array("q", given)
        call_on_threads(_kernel(), arguments.buffer_info()[0], num_threads)
    return out


@cache
def _bits(number: float) -> int:
    return int(np.float32(number).view(np.int32))


@cache
def _kernel() -> int:
    return kernel_address(_normalize)


@njit(by_address=True, error_model="numpy", fastmath={"contract", "nsz", "reassoc"})
def _normalize(arguments, thread):
    """A thread's rows. The sum of squares is taken in vectors, in an order that depends on the width and not on the
    number of rows. Without epsilon a row of zeros becomes NaN, as torch has it: Python's error would leave out the rows
    after it."""
    numbers = array_at(arguments, np.int64)
    a = _Arguments(
        x=numbers[0],
        weight=numbers[1],
        out=numbers[2],
        rows=numbers[3],
        width=numbers[4],
        epsilon=numbers[5],
        num_threads=numbers[6],
    )
    weight, epsilon = array_at(a.weight, np.float32), bits_to_float(np.int32(a.epsilon))
    for row in range(a.rows * thread // a.num_threads, a.rows * (thread + 1) // a.num_threads):
        x, out = array_at(a.x + 4 * row * a.width, np.float32), array_at(a.out + 4 * row * a.width, np.float32)
        squares = np.float32(0)
        for column in range(a.width):
            squares += x[column] * x[column]
        factor = np.float32(1) / np.sqrt(squares / np.float32(a.width) + epsilon)
        for column in range(a.width):
            out[column] = weight[column] * (x[column] * factor)
