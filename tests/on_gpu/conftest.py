"""What tests of training on a GPU have in common."""

from collections.abc import Iterator

import pytest

from benchmarks.lib.internals import own_training_kernels


@pytest.fixture
def own_kernels() -> Iterator[None]:
    """Others compute sequences of one length unless they are off. Then our kernels compute these too."""
    with own_training_kernels():
        yield
