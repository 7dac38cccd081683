"""Names of a package that are imported when they are asked for, so that importing the package stays cheap."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from trunkattn.interrupts import importing


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns the functions `__getattr__` and `__dir__` of a package. `__dir__` lists its lazy names too, so that a
    prompt completes them.

    Args:
        package: the package's name.
        homes: the lazy names, and the module that each is imported from.

    Example:
        >>> find, _ = lazy_names("mathematics", {"sqrt": "math"})
        >>> find("sqrt")(9.0)
        3.0
    """

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with importing():
            return getattr(import_module(homes[name]), name)

    def names() -> list[str]:
        return sorted(vars(sys.modules[package]).keys() | homes.keys())

    return find, names
