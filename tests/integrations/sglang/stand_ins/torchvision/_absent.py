"""Names that can be imported and not used."""

from collections.abc import Callable
from enum import Enum
from typing import Any, NoReturn


def absent(name: str) -> Callable[..., NoReturn]:
    """What a module's `__getattr__` returns for a function that nobody calls."""
    if name.startswith("__"):
        raise AttributeError(name)

    def call(*arguments: Any, **options: Any) -> NoReturn:
        raise NotImplementedError(f"torchvision's {name}: these tests stand in for torchvision")

    return call


class InterpolationMode(Enum):
    """Members that transformers names when it is imported."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class ImageReadMode(Enum):
    """As above."""

    UNCHANGED = 0
    GRAY = 1
    RGB = 3
