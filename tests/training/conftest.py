"""Attention is tested with two threads, whatever the environment says, and no launch is bound ahead of a test."""

from collections.abc import Iterator

import pytest
import torch

from trunkattn.gpu import bound
from trunkattn.training import op
from trunkattn.training.flash_attention import _chosen


@pytest.fixture(autouse=True, scope="module")
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def nothing_bound() -> None:
    """Tests put stand-ins in the place of kernels and cards."""
    for kept in (bound._holder, op._sources, _chosen):
        kept.cache_clear()
