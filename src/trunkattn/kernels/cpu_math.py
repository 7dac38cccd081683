"""Scalar pieces of the CPU executor that a compiler can vectorise: 2^x, tanh, KV elements to float32."""

from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch
from numba import njit, types
from numba.extending import overload

from trunkattn.kernels.cpu_tile import bits_to_float

# The KV dtypes, and the integer type through which numba reads their bits.
FLOAT32, BFLOAT16, FLOAT16, FLOAT8_E4M3, FLOAT8_E5M2 = range(5)
KV_KINDS: Final = MappingProxyType(
    {
        torch.float32: (FLOAT32, torch.float32),
        torch.bfloat16: (BFLOAT16, torch.uint16),
        torch.float16: (FLOAT16, torch.uint16),
        torch.float8_e4m3fn: (FLOAT8_E4M3, torch.uint8),
        torch.float8_e5m2: (FLOAT8_E5M2, torch.uint8),
    }
)

# 2^f on [-1/2, 1/2], degree 6, fitted by reweighted least squares: relative error 2e-9, 9e-8 in float32
_C: Final = tuple(
    np.float32(c)
    for c in (1.0, 6.93147206e-1, 2.40226469e-1, 5.55032878e-2, 9.61848896e-3, 1.33999312e-3, 1.53458112e-4)
)
_LOWEST: Final = np.float32(-126.0)
# (tanh(y) / y - 1) / y² as a polynomial of y² up to 0.36, fitted likewise: relative error of tanh 8e-8 in float32
_T: Final = tuple(np.float32(c) for c in (-3.33332978e-1, 1.33319244e-1, -5.37838256e-2, 2.07959697e-2, -5.89515894e-3))
_SMALL: Final = np.float32(0.6)
_MINUS_2_LOG2_E: Final = np.float32(-2.885390081777927)


@njit(inline="always", fastmath={"contract", "nsz"})
def exp2(x):
    """2^x for x <= 0 in float32; 0 below 2^-126, so that a masked logit (-inf) has no weight at all."""
    z = max(x, _LOWEST)
    whole = np.floor(z + np.float32(0.5))  # rint would be a call per element
    f = z - whole
    p = (((((_C[6] * f + _C[5]) * f + _C[4]) * f + _C[3]) * f + _C[2]) * f + _C[1]) * f + _C[0]
    value = p * bits_to_float((np.int32(whole) + np.int32(127)) << np.int32(23))
    return value if x >= _LOWEST else np.float32(0.0)


@njit(inline="always", fastmath={"contract", "nsz", "arcp"})
def tanh(y):
    """tanh(y) in float32. Near 0 a polynomial: there 1 - e^-2|y| would cancel."""
    z = y * y
    small = y + y * z * ((((_T[4] * z + _T[3]) * z + _T[2]) * z + _T[1]) * z + _T[0])
    e = exp2(_MINUS_2_LOG2_E * abs(y))
    large = (np.float32(1.0) - e) / (np.float32(1.0) + e)
    return small if abs(y) < _SMALL else (large if y >= 0 else -large)


@njit(inline="always")
def _half_to_float(bits):
    """float16 bits: exponent and mantissa move up 13 places; 2^112 corrects the bias, subnormals included."""
    bits = np.int32(bits)
    magnitude = (bits & np.int32(0x7FFF)) << np.int32(13)
    sign = (bits & np.int32(0x8000)) << np.int32(16)
    if magnitude >= np.int32(0x0F800000):  # infinity or NaN
        return bits_to_float(sign | magnitude | np.int32(0x7F800000))
    return bits_to_float(magnitude) * _signed(sign, np.float32(2.0**112))


@njit(inline="always")
def _signed(sign, value):
    return -value if sign != np.int32(0) else value


@njit(inline="always")
def _e4m3_to_float(bits):
    """float8_e4m3fn bits: no infinity, NaN is 0x7F; 2^120 corrects the bias."""
    bits = np.int32(bits)
    sign = (bits & np.int32(0x80)) << np.int32(24)
    magnitude = bits & np.int32(0x7F)
    if magnitude == np.int32(0x7F):
        return bits_to_float(np.int32(0x7FC00000))
    return bits_to_float(magnitude << np.int32(20)) * _signed(sign, np.float32(2.0**120))


def to_float(value: Any, kind: int) -> Any:
    """A KV element as float32; `value` holds the bits of a narrow dtype `kind`. Compiled code only."""
    raise TypeError("to_float runs in compiled code only")


@overload(to_float, inline="always")
def _to_float(value, kind):
    if value == types.float32:
        return lambda value, kind: value
    if value == types.uint16:

        def from_16_bits(value, kind):
            if kind == BFLOAT16:
                return bits_to_float(np.int32(value) << np.int32(16))
            return _half_to_float(value)

        return from_16_bits

    def from_8_bits(value, kind):
        if kind == FLOAT8_E4M3:
            return _e4m3_to_float(value)
        return _half_to_float(np.int32(value) << np.int32(8))

    return from_8_bits


def as_float32(cache: Any, staged: Any) -> Any:
    """The cache itself if it is float32, else the staged copy: decided when compiled. Compiled code only."""
    raise TypeError("as_float32 runs in compiled code only")


@overload(as_float32, inline="always")
def _as_float32(cache, staged):
    if cache.dtype == types.float32:
        return lambda cache, staged: cache
    return lambda cache, staged: staged
