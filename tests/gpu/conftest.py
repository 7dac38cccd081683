"""Fixtures of the tests of the GPU back end, which need no GPU."""

import pytest

from .backend_cases import pretend_gpu


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes torch find a GPU; see `pretend_gpu`."""
    pretend_gpu(monkeypatch)
