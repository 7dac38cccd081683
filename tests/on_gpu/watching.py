"""What tests on a GPU watch: that the host never waits for the device, and that a kernel is launched."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch


@contextmanager
def no_waits() -> Iterator[None]:
    """Inside, torch raises where the host would wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def count_launches(monkeypatch: pytest.MonkeyPatch, source: ModuleType) -> list[int]:
    """A list that gets a 1 with every launch of an attention kernel. source: the module of its source."""
    launches: list[int] = []
    bind = source.bind

    def counted(*given: Any) -> Any:
        run = bind(*given)
        return lambda t: launches.append(1) or run(t)

    monkeypatch.setattr(source, "bind", counted)
    return launches
