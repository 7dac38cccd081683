"""What tests of training on a GPU have in common."""

from collections.abc import Iterator

import pytest

from benchmarks.lib.internals import own_training_kernels
from trunkattn.training.hopper import division


@pytest.fixture
def own_kernels() -> Iterator[None]:
    """Others compute sequences of one length unless they are off. Then our kernels compute these too."""
    with own_training_kernels():
        yield


@pytest.fixture
def one_pass(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Unless bits must repeat, the kernel for dk and dv also adds to dq of short sequences. Otherwise a kernel of its
    own computes their dq."""
    monkeypatch.setattr(division, "FEW_KEYS", 0)
    division._divide.cache_clear()
    yield
    division._divide.cache_clear()
