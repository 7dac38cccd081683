"""8-bit numbers become 16-bit ones exactly: the instructions of `hopper.gather`, computed here."""

import re

import numpy as np
import pytest
import torch

from trunkattn.gpu.hopper import gather

EVERY = np.arange(256, dtype=np.uint32)
WIDENED = {
    (torch.float8_e4m3fn, torch.bfloat16): gather._E4M3_TO_BF16,
    (torch.float8_e5m2, torch.bfloat16): gather._E5M2_TO_BF16,
    (torch.float8_e4m3fn, torch.float16): gather._E4M3_TO_FP16,
}


def as_float(bits: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(bits.astype(np.uint16).view(np.int16).copy()).view(dtype)


@pytest.mark.parametrize("types", WIDENED, ids=str)
def test_every_finite_number_is_widened_exactly(types: tuple[torch.dtype, torch.dtype]) -> None:
    narrow, wide = types
    text = WIDENED[types].value
    shift = int(re.findall(r"shr\.b32 rest, pair, (\d+)", text)[0])
    (mask,) = {int(each, 16) for each in re.findall(r"lop3\.b32 rest, rest, 0x(\w+)", text)}
    (factor,) = (int(each, 16) for each in re.findall(r"mov\.b32 factor, 0x(\w+)", text))
    assert mask >> 16 == mask & 0xFFFF and factor >> 16 == factor & 0xFFFF
    half = EVERY << 8
    moved = (half >> shift & mask & 0xFFFF) | (half & 0x8000)
    scale = as_float(np.array([factor & 0xFFFF]), wide)
    found = as_float(moved, wide).double() * scale.double()
    expected = torch.arange(256, dtype=torch.uint8).view(narrow).double()
    finite = expected.isfinite()
    assert torch.equal(found[finite], expected[finite])
    assert torch.equal(found[finite].to(wide).double(), expected[finite]), "the product is exact, too"
    assert as_float(moved, wide).double()[finite].abs().max() > 0


def test_the_upper_half_of_float16_is_float8_e5m2() -> None:
    found = as_float(EVERY << 8, torch.float16).double()
    assert torch.equal(
        found.nan_to_num(), torch.arange(256, dtype=torch.uint8).view(torch.float8_e5m2).double().nan_to_num()
    )


def test_bytes_go_to_the_upper_halves() -> None:
    """prmt.b32 picks a byte of (x, 0) for each of four, by a digit."""
    word = 0x44332211
    for text in (each.value for each in (*WIDENED.values(), gather._E5M2_TO_FP16)):
        picked = [
            [(word | 0 << 32) >> 8 * int(digit, 16) & 255 for digit in reversed(selector)]
            for selector in re.findall(r"\$2, 0, 0x(\w{4})", text)
        ]
        assert picked == [[0, 0x11, 0, 0x22], [0, 0x33, 0, 0x44]]


def test_what_a_cache_holds() -> None:
    assert [gather.kind_of(dtype) for dtype in (torch.bfloat16, torch.float16)] == [0, 0]
    assert len({gather.kind_of(dtype) for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)}) == 3
    cache = torch.zeros(2, 16, 1, 64, dtype=torch.float8_e5m2)
    assert gather.as_numbers(cache).dtype == torch.uint8
    assert gather.as_numbers(cache).data_ptr() == cache.data_ptr()
    assert gather.as_numbers(cache.to(torch.float16)).dtype == torch.float16
