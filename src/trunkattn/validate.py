"""Checks of single values that every part of the library shares."""

import math
import os
from collections.abc import Iterable, Iterator
from functools import lru_cache
from numbers import Integral, Real
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

# The positive normal numbers of float32, up to a power of two whose product with log2(e) is still one of them, because
# kernels compute in base 2. torch has these limits, too, but a command checks its options before torch is loaded.
_SMALLEST: Final = 2.0**-126
_LARGEST: Final = 2.0**127
_SOME_ADDRESS: Final = 1 << 62  # far from both ends of what an address can be
_MOST_WORK: Final = 100_000  # cases that NumPy tries; interleaved caches and columns of a buffer take one
_LONGEST: Final = 4096  # bits of an integer that a message writes; Python refuses to write one of thousands of digits


def expanded(path: str | Path) -> Path:
    """A path with `~` replaced by the home folder. For a user who does not exist it stays as it is."""
    return Path(os.path.expanduser(path))


def check_int(name: str, value: Any, at_least: int, at_most: int | None = None) -> int:
    """`value` as an int within its bounds.

    Raises:
        TypeError: not an integer (a bool is not one).
        ValueError: out of bounds.
    """
    if type(value) is int and value >= at_least and (at_most is None or value <= at_most):
        return value  # the usual case comes first: the scheduler makes several calls for each sequence and step
    accepted = f"an integer of at least {at_least}" if at_most is None else f"an integer from {at_least} to {at_most}"
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}={value!r}: expected {accepted}")
    number = int(value)
    if number < at_least or (at_most is not None and number > at_most):
        raise ValueError(f"{name}={written(number)}: expected {accepted}")
    return number


def keep_int(record: Any, name: str, at_least: int, at_most: int | None = None) -> None:
    """Checks the field `name` of a frozen record as `check_int` does, and keeps it as Python's own integer: those of
    NumPy overflow in later arithmetic."""
    object.__setattr__(record, name, check_int(name, getattr(record, name), at_least, at_most))


def written(number: int) -> str:
    """An integer for a message: only its size if it has hundreds of digits."""
    bits = number.bit_length()
    return str(number) if bits <= _LONGEST else f"{'-' if number < 0 else ''}(an integer of {bits} bits)"


def shown(value: object, most: int = 120) -> str:
    """A value for a message: only its beginning if it has more than `most` characters."""
    text = ""
    for piece in _pieces(value, most):
        text += piece
        if len(text) > most:
            return f"{text[:most]}…"
    return text


def _pieces(value: object, most: int) -> Iterator[str]:
    """The text of a value, piece by piece, so that the beginning of a large one can be quoted at little cost."""
    match value:
        case str():
            yield repr(value[: 2 * most])
        case dict():
            yield "{"
            for place, (name, one) in enumerate(value.items()):
                yield f"{', ' if place else ''}{shown(name, most)}: "
                yield from _pieces(one, most)
            yield "}"
        case list() | tuple():
            yield "[" if isinstance(value, list) else "("
            for place, one in enumerate(value):
                yield ", " if place else ""
                yield from _pieces(one, most)
            yield "]" if isinstance(value, list) else ",)" if len(value) == 1 else ")"
        case int() if not isinstance(value, bool):
            yield written(value)
        case _:
            yield repr(value)


def described(value: object) -> str:
    """What a value is, for a message about one of a wrong type: "a list", "an int", "None"."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOaeio' or name == 'ndarray' else 'a'} {name}"


def shape_text(axes: Iterable[str], sizes: Iterable[int | None]) -> str:
    """A shape for a message, with the name of each axis and, unless it may be any, its size."""
    each = zip(axes, sizes, strict=True)
    return f"({', '.join(axis if size is None else f'{axis}={size}' for axis, size in each)})"


def check_real(name: str, value: object, expected: str) -> float:
    """`value` as a finite float. The caller checks the range that `expected` describes."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}={value!r}: expected {expected}")
    try:
        number = float(value)
    except OverflowError:  # an integer that no float holds
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name}={shown(value)}: expected {expected}")
    return number


def check_bool(name: str, value: object) -> None:
    """Raises TypeError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: expected True or False")


def check_text(name: str, text: str) -> str:
    """`text`, if it is Unicode. Raises ValueError for a lone surrogate, which no encoding has."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name}={shown(text)}: expected Unicode text, and character {error.start} is half of a surrogate pair; "
            f"decode the text as UTF-8"
        ) from error
    return text


def check_positive(name: str, value: Any) -> None:
    """Raises unless `value` is None or a positive normal number of float32 that is one in base 2, too. A bool is no
    number."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float | Real):
        raise TypeError(f"{name}={value!r}: expected None or a number")
    if not _SMALLEST <= (value if isinstance(value, int) else float(value)) <= _LARGEST:
        smallest, largest = f"{_SMALLEST:.3g}", f"{_LARGEST:.3g}"
        raise ValueError(
            f"{name}={written(value) if isinstance(value, int) else value}: expected None or a number from {smallest} "
            f"to {largest}, the range of float32 in base 2"
        )


def check_dense(name: str, tensor: Any) -> None:
    """Raises ValueError unless the elements of a tensor lie in memory at its strides, as kernels read them."""
    if str(tensor.layout) != "torch.strided" or tensor.is_nested:
        found = "is nested" if tensor.is_nested else f"has layout {tensor.layout}"
        raise ValueError(f"{name} {found}: expected a dense tensor")


def has_memory(tensor: Any) -> bool:
    """Whether a tensor has memory of its own, which kernels read. Wrappers have none: those of torch.func, fake
    tensors, and subclasses that hold other tensors."""
    if hasattr(tensor, "fake_mode"):  # a fake tensor warns when it is asked where it lies
        return False
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # the way of some wrappers to say so
        address = 0
    return bool(address) or tensor.numel() == 0


def check_memory(name: str, tensor: Any) -> None:
    """Raises ValueError unless a tensor has memory of its own."""
    if not has_memory(tensor):
        raise ValueError(
            f"{name} is {described(tensor)} without memory of its own: expected a plain tensor, outside "
            "transformations of torch.func; use to_local() of a DTensor"
        )


def check_apart(name: str, tensor: Any) -> None:
    """Raises ValueError if two elements of a tensor that is written to may lie in one place."""
    if tensor.is_contiguous():
        return
    extent = 1  # of all dimensions with smaller strides
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < extent:
            raise ValueError(
                f"{name} has strides {tensor.stride()}: expected no two elements in one place; use {name}.contiguous()"
            )
        extent += (size - 1) * stride


def check_disjoint(name: str, tensor: Any, others: Iterable[tuple[str, Any]]) -> None:
    """Raises ValueError if a tensor that is written to has an element where one of others, named, has one, or if that
    takes too long to find out."""
    begin = tensor.data_ptr()
    end = begin + tensor.untyped_storage().nbytes()  # none of the tensor's elements is farther on
    for other_name, other in others:
        first = other.data_ptr()
        is_near = first < end and begin < first + other.untyped_storage().nbytes()
        if is_near and _share_memory(_Layout.of(tensor), _Layout.of(other), first - begin):
            raise ValueError(f"{name} lies in the memory of {other_name}: expected memory of its own")


class _Layout(NamedTuple):
    """The sizes of a tensor, its strides in bytes, and the bytes of an element."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    @classmethod
    def of(cls, tensor: Any) -> "_Layout":
        return cls(tuple(tensor.shape), tuple(stride * tensor.itemsize for stride in tensor.stride()), tensor.itemsize)


@lru_cache  # a step asks the same of each layer, and each answer takes as long as several launches
def _share_memory(one: _Layout, other: _Layout, distance: int) -> bool:
    """Whether two tensors share an element, the first elements of which lie a number of bytes apart. Those that
    interleave, such as columns of one buffer, share none. NumPy solves the equation of their strides and reads no
    memory, so tensors may lie on a GPU. Where strides have nothing in common, solving it could take for ever, and the
    answer is yes after a while."""
    import numpy as np  # rarely asked for

    arrays = []
    for layout, address in ((one, _SOME_ADDRESS), (other, _SOME_ADDRESS + distance)):
        interface = {"shape": layout.shape, "strides": layout.strides, "typestr": f"|V{layout.itemsize}", "version": 3}
        arrays.append(np.asarray(SimpleNamespace(__array_interface__=interface | {"data": (address, True)})))
    try:
        return np.shares_memory(arrays[0], arrays[1], max_work=_MOST_WORK)  # type: ignore[arg-type]  # its types know -1, 0
    except np.exceptions.TooHardError:
        return True


def check_plain(name: str, tensor: Any) -> None:
    """Raises ValueError if torch negates a tensor when it reads it, as the imaginary part of a conjugate: kernels read
    memory."""
    if tensor.is_neg():
        raise ValueError(
            f"{name} is a view that torch negates when it reads it: expected a tensor whose memory holds its values; "
            f"use {name}.resolve_neg()"
        )
