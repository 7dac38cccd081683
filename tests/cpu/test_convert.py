"""Pieces of the CPU executor: every bit pattern of the narrow dtypes, and 2^x and tanh against float64."""

import numpy as np
import pytest
import torch
from numba import njit

from trunkattn.cpu.convert import as_float32, exp2, tanh, to_floats
from trunkattn.dtypes import KV_KINDS

NARROW = [dtype for dtype in KV_KINDS if dtype != torch.float32]


@njit(fastmath={"contract", "nsz"})  # as the executor compiles it
def exp2_all(x):
    y = np.empty_like(x)
    for i in range(len(x)):
        y[i] = exp2(x[i])
    return y


@njit(fastmath={"contract", "nsz", "arcp"})  # as the soft cap compiles it
def tanh_all(x):
    y = np.empty_like(x)
    for i in range(len(x)):
        y[i] = tanh(x[i])
    return y


@njit
def to_floats_all(bits, kind):
    half, values = len(bits) // 2, np.full(len(bits) + 2, np.float32(7))
    to_floats(values, 1, bits, 0, half, kind)
    first = values.copy()
    to_floats(values, 1 + half, bits, half, len(bits) - half, kind)
    return values[1:-1], first[1 + half], values[0], values[-1]


def exponents() -> np.ndarray:
    """Every thousandth float32 from -126 to -1e-9, whole and half numbers, and random ones where weights matter."""
    low, high = np.array([-1e-9, -126.0], np.float32).view(np.int32)
    spread = np.arange(low, high, 1000, dtype=np.int32).view(np.float32)
    halves = -np.arange(0, 252.5, 0.5, dtype=np.float32) / 2
    return np.concatenate([spread, halves, -np.random.default_rng(0).exponential(4.0, 1_000_000).astype(np.float32)])


def test_exp2_is_accurate() -> None:
    x = exponents()
    exact = np.exp2(x.astype(np.float64))
    assert x.min() == -126
    assert np.max(np.abs(exp2_all(x) - exact) / exact) < 2e-7


def test_exp2_is_exact_at_whole_numbers_and_never_above_one() -> None:
    whole = -np.arange(127, dtype=np.float32)
    assert np.array_equal(exp2_all(whole), np.exp2(whole))
    assert exp2_all(exponents()).max() == 1


@pytest.mark.parametrize("x", [-np.inf, -1e30, -200.0, np.nextafter(np.float32(-126), np.float32(-127))])
def test_exp2_of_a_masked_logit_is_zero(x: float) -> None:
    assert exp2_all(np.array([x], np.float32)).tolist() == [0.0]


def test_nan_stays_nan() -> None:
    nan = np.array([np.nan, -np.nan], np.float32)
    assert np.isnan(exp2_all(nan)).all() and np.isnan(tanh_all(nan)).all()


def test_tanh_is_accurate_at_every_size() -> None:
    low, high = np.array([1e-30, 40.0], np.float32).view(np.int32)
    positive = np.arange(low, high, 500, dtype=np.int32).view(np.float32)
    x = np.concatenate([positive, -positive])
    exact = np.tanh(x.astype(np.float64))
    found = tanh_all(x)
    assert np.max(np.abs(found - exact) / np.abs(exact)) < 3e-7
    assert np.abs(found).max() == 1
    assert tanh_all(np.array([0, np.inf, -np.inf], np.float32)).tolist() == [0, 1, -1]


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_every_bit_pattern_is_read_as_torch_reads_it(dtype: torch.dtype) -> None:
    kind, bits_dtype = KV_KINDS[dtype]
    bits = np.arange(1 << 8 * dtype.itemsize).astype(np.uint16 if dtype.itemsize == 2 else np.uint8)
    expected = torch.from_numpy(bits).view(dtype).to(torch.float32).numpy()
    found, *beside = to_floats_all(bits, kind)
    assert beside == [7, 7, 7], "nothing is written beside"
    assert bits_dtype == torch.from_numpy(bits).dtype
    assert np.array_equal(np.isnan(found), np.isnan(expected))
    numbers = ~np.isnan(expected)
    assert np.array_equal(found[numbers].view(np.int32), expected[numbers].view(np.int32)), "signed zeros included"


def test_float32_is_read_unchanged() -> None:
    values = np.array([0.0, -0.0, 1.5, -np.inf, 1e-45], np.float32)
    assert np.array_equal(to_floats_all(values, KV_KINDS[torch.float32][0])[0].view(np.int32), values.view(np.int32))


def test_the_compiled_only_functions_say_so() -> None:
    with pytest.raises(TypeError, match="to_floats runs in compiled code only"):
        to_floats(1, 1, 1, 1, 1, 1)
    with pytest.raises(TypeError, match="as_float32 runs in compiled code only"):
        as_float32(1, 1)
