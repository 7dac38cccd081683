from . import functional  # noqa: F401
from .functional import InterpolationMode  # noqa: F401


def __getattr__(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})  # a class, which others are derived from
