"""Stands in for sgl-kernel, which PyPI has as a CUDA build alone. Without the operators that its CPU build would add to
torch, SGLang computes with PyTorch; names can be imported from here, and a call raises."""

from collections.abc import Callable
from typing import Any, NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def call(*arguments: Any, **options: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name}: these tests stand in for sgl-kernel")

    return call
