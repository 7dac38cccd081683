"""Top-k and top-p over rows of probabilities on a CPU.

A sort of the vocabulary takes much longer than the rest of a step. Here a radix selection finds the least likely token
that is kept: a pass of a row counts by the upper halves of the bits, and another one by the lower halves of those that
are left.
"""

from array import array
from collections.abc import Sequence
from functools import cache
from typing import Final, NamedTuple

import numpy as np
import torch

from trunkattn.compiled import njit
from trunkattn.cpu.arguments import array_at
from trunkattn.cpu.microkernel import bits_to_float
from trunkattn.cpu.threads import call_on_threads, kernel_address

# A float32 that is not negative has the order of its bits. Their upper half has the exponent and 7 bits of the
# mantissa, so that floats with equal ones are added in float64 without rounding, in any order.
_HALF: Final = 16
_NUM_LOWER: Final = 1 << _HALF
_NUM_UPPER: Final = 1 << (_HALF - 1)
_NO_SIGN: Final = (_NUM_UPPER << _HALF) - 1


class _Arguments(NamedTuple):
    """Fields of what the kernel takes, all int64."""

    probs: int  # addresses of contiguous arrays: float32 [..., width]
    rows: int  # int64 [num_rows]
    top_k: int  # int64 [num_rows]
    top_p: int  # float64 [num_rows]
    num_rows: int
    width: int
    num_threads: int


def truncate_rows(probs: torch.Tensor, rows: Sequence[int], top_k: Sequence[int], top_p: Sequence[float]) -> None:
    """Sets all probabilities of some rows to zero but those of the top-k tokens, and of these keeps the fewest whose
    share of the top-k mass reaches top_p. Of equally likely tokens those are kept that come first. A row's result does
    not depend on its neighbours.

    Args:
        probs: [rows, width] float32 on the CPU, contiguous, changed in place; not checked. Rows with NaN keep
            any tokens.
        rows: which ones.
        top_k: of each of these rows; less than 1, or width or more, for no limit.
        top_p: of each of these rows, above 0; 1 for no limit.
    """
    num_threads = max(1, min(torch.get_num_threads(), len(rows)))
    places, most, shares = array("q", rows), array("q", top_k), array("d", top_p)
    given = _Arguments(
        probs=probs.data_ptr(),
        rows=places.buffer_info()[0],
        top_k=most.buffer_info()[0],
        top_p=shares.buffer_info()[0],
        num_rows=len(rows),
        width=probs.shape[1],
        num_threads=num_threads,
    )
    arguments = array("q", given)
    call_on_threads(compile_truncation(), arguments.buffer_info()[0], num_threads)


@cache
def compile_truncation() -> int:
    """The kernel's address. The first call compiles the kernel, or loads it."""
    return kernel_address(_truncate)


@njit(by_address=True, error_model="numpy")
def _truncate(arguments, thread):
    """A thread's rows."""
    numbers = array_at(arguments, np.int64)
    a = _Arguments(
        probs=numbers[0],
        rows=numbers[1],
        top_k=numbers[2],
        top_p=numbers[3],
        num_rows=numbers[4],
        width=numbers[5],
        num_threads=numbers[6],
    )
    rows, top_k, top_p = array_at(a.rows, np.int64), array_at(a.top_k, np.int64), array_at(a.top_p, np.float64)
    sums, counts = np.empty(_NUM_UPPER, np.float64), np.empty(_NUM_LOWER, np.int64)
    for i in range(a.num_rows * thread // a.num_threads, a.num_rows * (thread + 1) // a.num_threads):
        probs = a.probs + 4 * rows[i] * a.width
        if 0 < top_k[i] < a.width:
            _keep_fewest(probs, a.width, np.float64(top_k[i]), False, sums, counts)
        if top_p[i] < 1:
            _keep_fewest(probs, a.width, top_p[i], True, sums, counts)


@njit(inner=True, error_model="numpy")
def _keep_fewest(address, width, least, by_mass, sums, counts):
    """Keeps the fewest most likely tokens of a row that reach `least`: a share of the row's mass if `by_mass`, else a
    number of tokens. `sums` and `counts` are overwritten."""
    probs, bits = array_at(address, np.float32), array_at(address, np.int32)
    sums[:] = 0.0
    for column in range(width):
        weight = np.float64(probs[column]) if by_mass else 1.0
        sums[(bits[column] & _NO_SIGN) >> _HALF] += weight
    rest = least * sums.sum() if by_mass else least
    upper = _NUM_UPPER - 1
    while upper > 0 and not sums[upper] >= rest:
        rest -= sums[upper]
        upper -= 1
    counts[:] = 0
    for column in range(width):
        if (bits[column] & _NO_SIGN) >> _HALF == upper:
            counts[bits[column] & (_NUM_LOWER - 1)] += 1
    lower, each = _NUM_LOWER - 1, 1.0
    while lower > 0:
        if counts[lower]:
            if by_mass:
                each = np.float64(bits_to_float(np.int32((upper << _HALF) + lower)))
            if counts[lower] * each >= rest:
                break
            rest -= counts[lower] * each
        lower -= 1
    last = (upper << _HALF) + lower
    num_last = np.ceil(rest / (np.float64(bits_to_float(np.int32(last))) if by_mass else 1.0))
    for column in range(width):
        own = bits[column] & _NO_SIGN
        if own == last:
            num_last -= 1
        if own < last or (own == last and num_last < 0):
            probs[column] = 0
