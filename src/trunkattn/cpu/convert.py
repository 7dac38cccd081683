"""Functions of the CPU kernels that a compiler can vectorise: 2^x, tanh, and conversion of KV elements to float32."""

from typing import Any, Final

import numpy as np
from numba import types
from numba.extending import overload

from trunkattn.compiled import njit
from trunkattn.cpu.microkernel import bits_to_float, float_to_bits
from trunkattn.dtypes import BFLOAT16, FLOAT8_E4M3
from trunkattn.numerics import LOG2_E

# 2^f on [-1/2, 1/2], degree 6, fitted by reweighted least squares: relative error 2e-9, 9e-8 in float32
_C: Final = tuple(
    np.float32(c)
    for c in (1.0, 6.93147206e-1, 2.40226469e-1, 5.55032878e-2, 9.61848896e-3, 1.33999312e-3, 1.53458112e-4)
)
_LOWEST: Final = np.float32(-126.0)
_TO_WHOLE: Final = np.float32(1.5 * 2**23)
# (tanh(y) / y - 1) / y² as a polynomial of y² up to 0.36, fitted likewise: relative error of tanh 8e-8 in float32
_T: Final = tuple(np.float32(c) for c in (-3.33332978e-1, 1.33319244e-1, -5.37838256e-2, 2.07959697e-2, -5.89515894e-3))
_SMALL: Final = np.float32(0.6)
_MINUS_2_LOG2_E: Final = np.float32(-2 * LOG2_E)


@njit(inline="always", fastmath={"contract", "nsz"})
def exp2(x):
    """2^x for x <= 0 in float32; 0 below 2^-126, so that a masked logit (-inf) has no weight at all; NaN for NaN."""
    z = _LOWEST if x < _LOWEST else x
    shifted = z + _TO_WHOLE  # the whole number next to z in its last bits
    f = z - (shifted - _TO_WHOLE)
    p = (((((_C[6] * f + _C[5]) * f + _C[4]) * f + _C[3]) * f + _C[2]) * f + _C[1]) * f + _C[0]
    value = p * bits_to_float((float_to_bits(shifted) + np.int32(127)) << np.int32(23))
    return np.float32(0.0) if x < _LOWEST else value


@njit(inline="always", error_model="numpy", fastmath={"contract", "nsz", "arcp"})
def tanh(y):
    """tanh(y) in float32. Near 0 a polynomial: there 1 - e^-2|y| would cancel."""
    z = y * y
    small = y + y * z * ((((_T[4] * z + _T[3]) * z + _T[2]) * z + _T[1]) * z + _T[0])
    e = exp2(_MINUS_2_LOG2_E * abs(y))
    large = (np.float32(1.0) - e) / (np.float32(1.0) + e)
    return small if abs(y) < _SMALL else (large if y >= 0 else -large)


@njit(inline="always")
def _half_to_float(bits):
    """float32 from float16 bits: exponent and mantissa move up 13 places. Subnormal numbers are converted as integers,
    because shifted they would be subnormal float32 numbers, which can take a processor a hundred cycles."""
    bits = np.int32(bits)
    magnitude = bits & np.int32(0x7FFF)
    shifted = magnitude << np.int32(13)
    if magnitude < np.int32(0x400):
        value = np.float32(magnitude) * np.float32(2.0**-24)
    elif magnitude < np.int32(0x7C00):
        value = bits_to_float(shifted + np.int32(112 << 23))
    else:  # infinity or NaN
        value = bits_to_float(shifted | np.int32(0x7F800000))
    return -value if bits & np.int32(0x8000) else value


@njit(inline="always")
def _e4m3_to_float(bits):
    """float32 from float8_e4m3fn bits, in the same way. This type has no infinity, and its NaN is 0x7F."""
    bits = np.int32(bits)
    magnitude = bits & np.int32(0x7F)
    if magnitude < np.int32(8):
        value = np.float32(magnitude) * np.float32(2.0**-9)
    elif magnitude < np.int32(0x7F):
        value = bits_to_float((magnitude << np.int32(20)) + np.int32(120 << 23))
    else:
        value = bits_to_float(np.int32(0x7FC00000))
    return -value if bits & np.int32(0x80) else value


def to_floats(out: Any, to: int, values: Any, at: int, count: int, kind: int) -> None:
    """KV elements values[at : at + count] as float32 to out[to :]; `values` holds the bits of a narrow dtype `kind`.
    Compiled code only.

    Each kind has its own loop, with indices that the compiler knows not to be negative; otherwise it does not
    vectorise.
    """
    raise TypeError("to_floats runs in compiled code only")


@overload(to_floats)
def _to_floats(out, to, values, at, count, kind):
    if values.dtype == types.float32:

        def from_32_bits(out, to, values, at, count, kind):
            for i in range(count):
                out[np.uint64(to + i)] = values[np.uint64(at + i)]

        return from_32_bits
    if values.dtype == types.uint16:

        def from_16_bits(out, to, values, at, count, kind):
            if kind == BFLOAT16:
                for i in range(count):
                    out[np.uint64(to + i)] = bits_to_float(np.int32(values[np.uint64(at + i)]) << np.int32(16))
            else:
                for i in range(count):
                    out[np.uint64(to + i)] = _half_to_float(values[np.uint64(at + i)])

        return from_16_bits

    def from_8_bits(out, to, values, at, count, kind):
        if kind == FLOAT8_E4M3:
            for i in range(count):
                out[np.uint64(to + i)] = _e4m3_to_float(values[np.uint64(at + i)])
        else:
            for i in range(count):
                out[np.uint64(to + i)] = _half_to_float(np.int32(values[np.uint64(at + i)]) << np.int32(8))

    return from_8_bits


def as_float32(cache: Any, staged: Any) -> Any:
    """The cache itself if it is float32, else the staged copy, as decided at compile time. Compiled code only.

    It is no inlined overload, because after inlining Numba runs a pass that drops stores to arrays it believes unused,
    such as fields of a named tuple.
    """
    raise TypeError("as_float32 runs in compiled code only")


@overload(as_float32)
def _as_float32(cache, staged):
    if cache.dtype == types.float32:
        return lambda cache, staged: cache
    return lambda cache, staged: staged
