"""8-bit numbers become float16 exactly, and queries lose next to nothing: `hopper.widen`, computed here."""

import re

import numpy as np
import pytest
import torch

from trunkattn.gpu.hopper import gather, widen
from trunkattn.gpu.hopper.widen import _BIAS, _E4M3_TO_FP16, _E5M2_TO_FP16, _LARGEST_EXPONENT

BYTES = torch.arange(256, dtype=torch.uint8)
LARGEST = torch.finfo(torch.bfloat16).max
SMALLEST = 2.0**-133  # subnormal


def in_float16(kind: torch.dtype) -> torch.Tensor:
    """All numbers of a type of 8 bits. Those of float8_e5m2 by the bytes that `_E5M2_TO_FP16` picks."""
    if kind == torch.float8_e4m3fn:
        return BYTES.view(kind).to(torch.float16)
    halves = np.concatenate([picked(word) for word in BYTES.numpy().reshape(-1, 4)])
    return torch.from_numpy(halves.copy()).view(torch.float16)


def picked(word: np.ndarray) -> np.ndarray:
    """prmt.b32 picks a byte of (word, 0) for each of four, by a digit; the lowest digit is for the lowest byte."""
    selectors = re.findall(r"prmt\.b32 \$(\d), \$2, 0, 0x(\w{4});", _E5M2_TO_FP16.value)
    assert [result for result, _ in selectors] == ["0", "1"]
    source = np.append(word, np.zeros(4, np.uint8))
    chosen = [source[int(digit, 16)] for _, digits in selectors for digit in reversed(digits)]
    return np.array(chosen, np.uint8).view(np.int16)


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_every_number_is_in_float16_exactly(kind: torch.dtype) -> None:
    expected, found = BYTES.view(kind).double(), in_float16(kind).double()
    finite = expected.isfinite()
    assert torch.equal(found[finite], expected[finite]) and finite.sum() >= 248
    assert torch.equal(found.isnan(), expected.isnan()) and torch.equal(found.isinf(), expected.isinf())
    assert torch.equal(found.signbit(), expected.signbit())


def test_bytes_keep_their_order() -> None:
    assert picked(np.array([0x11, 0x22, 0x33, 0x44], np.uint8)).tolist() == [0x1100, 0x2200, 0x3300, 0x4400]
    for low, high in [("$0", "low"), ("$1", "high")]:
        assert f"cvt.rn.f16x2.e4m3x2 {low}, {high};" in _E4M3_TO_FP16.value
    assert "mov.b32 {low, high}, $2;" in _E4M3_TO_FP16.value


def test_what_a_cache_holds() -> None:
    kinds = {dtype: widen.kind_of(dtype) for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)}
    assert widen.kind_of(torch.float16) == kinds[torch.bfloat16] == widen.IS_SAME.value
    assert len(set(kinds.values())) == 3


@pytest.mark.parametrize("dtype, words", [(torch.bfloat16, 32), (torch.float8_e5m2, 16)])
def test_a_cache_that_is_gathered_is_read_as_words(dtype: torch.dtype, words: int) -> None:
    cache = torch.zeros(2, 1, 3, 64, dtype=dtype)
    found = gather.as_words(cache)
    assert found.dtype == torch.int32 and found.shape == (2, 1, 3, words) and found.data_ptr() == cache.data_ptr()


@pytest.mark.parametrize("head_dim, dims", [(64, 64), (128, 128), (256, 128)])
def test_boxes_of_8_bit_numbers_are_as_wide_as_tma_swizzles(head_dim: int, dims: int) -> None:
    cache = torch.zeros(8, 48, 2, head_dim, dtype=torch.float8_e4m3fn)
    found = widen.staged_descriptor(cache)
    assert found.block_shape == [1, 16, 1, dims] and found.base.dtype == torch.uint8
    assert (found.base.data_ptr(), found.strides) == (cache.data_ptr(), list(cache.stride()))
    assert (found.layout.swizzle_byte_width, found.layout.element_bitwidth) == (dims, 8)


def as_float16(rows: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """`widen.as_float16` of rows of bfloat16, in the same operations."""
    bias, wide = _BIAS.value, rows.float().numpy()
    largest = np.fmax.reduce(np.abs(wide), 1).view(np.int32) >> 23
    exponent = np.minimum(_LARGEST_EXPONENT.value + 2 * bias - largest, 2 * bias)
    factor, inverse = ((it.astype(np.int32) << 23).view(np.float32) for it in (exponent, 2 * bias - exponent))
    with np.errstate(invalid="ignore"):
        return (wide * factor[:, None]).astype(np.float16), inverse


def random_rows(spread: float) -> torch.Tensor:
    """Normal numbers times powers of two."""
    generator = torch.Generator().manual_seed(0)
    rows, exponents = torch.randn(400, 128, generator=generator), torch.randn(400, 1, generator=generator) * spread
    return (rows * 2.0 ** exponents.clamp(-90, 90)).to(torch.bfloat16)


def check(rows: torch.Tensor) -> np.ndarray:
    """What as_float16 says of its loss. Returns the share of each row's largest number that is lost."""
    scaled, inverse = as_float16(rows)
    exact, undone = rows.double().numpy(), scaled.astype(np.float64) * inverse.astype(np.float64)[:, None]
    assert np.isfinite(scaled).all() and np.isfinite(inverse).all()
    assert np.abs(scaled.astype(np.float64)).max() < 2**15
    largest = np.abs(exact).max(1, keepdims=True)
    assert (np.abs(undone - exact)[np.abs(exact) >= largest * 2.0**-29] == 0).all()
    assert (np.abs(undone - exact) <= largest * 2.0**-39).all()
    assert (undone[np.abs(exact) < largest * 2.0**-40] == 0).all()
    return np.abs(undone - exact).max(1) / largest[:, 0]


@pytest.mark.parametrize("spread", [0, 3, 30])
def test_rows_of_queries_lose_nothing(spread: float) -> None:
    assert (check(random_rows(spread)) == 0).all()


def test_small_numbers_of_a_row_with_a_huge_one_are_lost() -> None:
    rows = random_rows(0)
    rows[:, 5] = torch.tensor([2.0**10, 2.0**30, 2.0**60, LARGEST]).repeat(100).to(torch.bfloat16)
    lost = check(rows).reshape(-1, 4)
    assert (lost[:, 0] == 0).all() and (lost[:, 1:].max(0) > 0).all()
    scaled, _ = as_float16(rows[3::4])
    assert (np.delete(scaled, 5, 1) == 0).all()


def test_the_largest_numbers_do_not_overflow() -> None:
    for value in (LARGEST, -LARGEST, 2.0**127, 1.0, 2.0**-96):
        scaled, inverse = as_float16(torch.full((1, 64), value, dtype=torch.bfloat16))
        assert (scaled.astype(np.float64) * inverse == value).all() and 2**14 <= abs(float(scaled[0, 0])) < 2**15


@pytest.mark.parametrize("value", [0.0, SMALLEST, -SMALLEST, 2.0**-126, 2.0**-113])
def test_rows_of_the_smallest_numbers_count_as_zeros(value: float) -> None:
    """Their inverse is no number of float32 but a subnormal, which becomes 0: the logits are 0 to the last bit of any
    number that is not as small."""
    scaled, inverse = as_float16(torch.full((1, 64), value, dtype=torch.bfloat16))
    assert np.isfinite(scaled).all() and (np.abs(scaled) < 2**15).all() and inverse == 0
    assert as_float16(torch.full((1, 64), 2.0**-111, dtype=torch.bfloat16))[1] > 0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so_in_its_row(value: float) -> None:
    rows = random_rows(0)[:3]
    rows[1, 7] = value
    scaled, inverse = as_float16(rows)
    assert np.isfinite(scaled[[0, 2]]).all() and np.isfinite(inverse).all()
    assert np.array_equal(scaled[1, 7], np.float16(value), equal_nan=True)
    assert np.isfinite(np.delete(scaled[1], 7)).all()
