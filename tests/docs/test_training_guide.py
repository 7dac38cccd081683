"""The guide's table of who computes which pass of training is what the table of kernels says."""

import re
from itertools import product
from pathlib import Path

import pytest
import torch

from trunkattn.gpu.cards import ASSUMED
from trunkattn.gpu.kernel import Work, choose
from trunkattn.training import spec

GUIDE = (Path(__file__).parents[2] / "docs" / "guide" / "training.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (\d+) to (\d+) \| (any|one|several) \| (\w+) \| (\w+) \|$", GUIDE, re.MULTILINE)


@pytest.fixture(autouse=True)
def without_flash_attention_4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec, "fa4_version", str)


def who_computes(head_dims: tuple[int, int], is_grouped: bool, is_long: bool = False) -> tuple[str, str]:
    """The forward and the backward pass on Hopper."""
    config = spec.TrainingConfig(head_dims[0], torch.bfloat16, head_dims[1], (), is_grouped, is_long)
    if choose(Work.BATCH, config, ASSUMED).kernel is not None:
        return "cuDNN", "cuDNN"
    names = [choose(work, config, ASSUMED).kernel for work in (Work.FORWARD, Work.BACKWARD)]
    forward, backward = ("cuDNN" if kernel and kernel.name.startswith("cuDNN") else "ours" for kernel in names)
    return forward, backward


def test_every_head_dim_is_in_the_table_and_goes_where_it_says() -> None:
    said = {
        (head_dim, is_grouped): (forward, backward)
        for first, last, heads, forward, backward in ROWS
        for head_dim in range(int(first), int(last) + 1, 8)
        for is_grouped in (False, True)
        if heads in ("any", "several" if is_grouped else "one")
    }
    found = {(each, grouped): who_computes((each, each), grouped) for each in range(8, 257, 8) for grouped in (0, 1)}
    assert said == found


def test_long_sequences_go_where_it_says() -> None:
    queries, first, last = re.findall(
        r"^From (\d,\d{3}) queries on, the forward pass of heads of (\d+) to (\d+) is ours", GUIDE, re.MULTILINE
    )[0]
    assert int(queries.replace(",", "")) == spec.LONG
    for each, is_grouped in product(range(8, 257, 8), (False, True)):
        usual = who_computes((each, each), is_grouped)
        own = int(first) <= each <= int(last)
        assert who_computes((each, each), is_grouped, is_long=True) == (("ours", "ours") if own else usual), each


@pytest.mark.parametrize("is_grouped", [False, True])
def test_keys_of_192_with_values_of_128_are_computed_here(is_grouped: bool) -> None:
    assert "Keys of 192 with values of 128 are ours, too" in GUIDE
    assert who_computes((192, 128), is_grouped) == ("ours", "ours")
