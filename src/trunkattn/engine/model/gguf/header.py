"""The header of a GGUF file: its keys, and where its tensors lie. The vocabulary in it is skipped, which others read.

The package `gguf` turns each string of a vocabulary into an object, which takes seconds. Here it is counted.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, and for where tensors lie
https://github.com/ggml-org/ggml/blob/master/src/gguf.cpp
"""

import mmap
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_ALIGNMENT: Final = 32  # bytes, of a file that does not say
_MOST_DIMS: Final = 4
_NUMBERS: Final[Mapping[int, str]] = MappingProxyType(
    {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
)
_STRING: Final = 8
_ARRAY: Final = 9


class NumStrings(int):
    """How many strings a list has. It is no number that a file says."""


class GgufTensor(NamedTuple):
    """Where a tensor lies: its shape in torch's order, its GGML type, and its bytes [begin, begin + num_bytes)."""

    shape: tuple[int, ...]
    ggml_type: int
    begin: int
    num_bytes: int


class GgufHeader(NamedTuple):
    """What a GGUF file says of itself.

    Attributes:
        path: the file.
        keys: values by key; a list of strings is the number of its strings, `NumStrings`.
        tensors: what is known of each tensor, by name, in the file's order.
    """

    path: Path
    keys: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the model's architecture."""
        return str(self.keys["general.architecture"])

    @property
    def facts(self) -> dict[str, Any]:
        """The keys of the architecture, without its name before them."""
        prefix = f"{self.architecture}."
        return {key.removeprefix(prefix): value for key, value in self.keys.items() if key.startswith(prefix)}

    def values(self, name: str) -> NDArray[np.float32]:
        """A tensor's values, float32, in torch's shape."""
        from gguf import GGMLQuantizationType, dequantize, quant_shape_to_byte_shape

        tensor = self.tensors[name]
        kind, length = GGMLQuantizationType(tensor.ggml_type), tensor.num_bytes
        data = np.memmap(self.path, np.uint8, "r", tensor.begin, (length,)) if length else np.empty(0, np.uint8)
        if kind == GGMLQuantizationType.F32:
            return np.array(data.view(np.float32)).reshape(tensor.shape)
        if kind == GGMLQuantizationType.F16:
            return data.view(np.float16).astype(np.float32).reshape(tensor.shape)
        return np.asarray(dequantize(data.reshape(quant_shape_to_byte_shape(tensor.shape, kind)), kind), np.float32)


def read_header(path: Path) -> GgufHeader:
    """The header of a file.

    Raises:
        ValueError: it is no GGUF file of version 2 or 3, it is cut off, or a tensor has an unknown type or does not lie
            right after the one before it.
    """
    from gguf import GGML_QUANT_SIZES

    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return _parse(path, data, {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()})
        except (struct.error, IndexError, UnicodeDecodeError, MemoryError, RecursionError) as error:
            raise ValueError(f"its header is cut off or damaged ({error})") from error


def _parse(path: Path, data: mmap.mmap, sizes: Mapping[int, tuple[int, int]]) -> GgufHeader:
    magic, version, num_tensors, num_keys = struct.unpack_from("<4sIQQ", data)
    if magic != MAGIC or version not in _VERSIONS:
        raise ValueError(f"it begins with {magic!r} and version {version}: expected {MAGIC!r} and version 2 or 3")
    cursor = _Cursor(data, struct.calcsize("<4sIQQ"))
    keys: dict[str, Any] = {}
    for _ in range(num_keys):
        name = cursor.string()
        if name in keys:
            raise ValueError(f"it has the key {name} twice; expected one value for each name")
        keys[name] = cursor.value(cursor.number("I"))
    listed = [(cursor.string(), cursor.shape(), *cursor.numbers("IQ")) for _ in range(num_tensors)]
    alignment = keys.get("general.alignment", _ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"its key general.alignment={alignment!r}: expected a power of two, in bytes")
    start, end = _aligned(cursor.at, alignment), 0
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in listed:
        if kind not in sizes:
            raise ValueError(
                f"its tensor {name} has GGML type {kind}, which the package gguf does not know; upgrade it"
            )
        if name in tensors:
            raise ValueError(f"it has the tensor {name} twice; expected one value for each name")
        block, block_bytes = sizes[kind]
        if shape and shape[-1] % block:
            raise ValueError(f"its tensor {name} has rows of {shape[-1]} numbers: expected whole blocks of {block}")
        if offset != end:  # otherwise bytes would be two tensors' or none's, and the model another one
            raise ValueError(f"its tensor {name} begins at byte {offset} of the data: expected {end}, after the others")
        tensors[name] = GgufTensor(shape, kind, start + offset, prod(shape) // block * block_bytes)
        if tensors[name].begin + tensors[name].num_bytes > len(data):
            raise ValueError(f"its tensor {name} is cut off")
        end = _aligned(offset + tensors[name].num_bytes, alignment)
    return GgufHeader(path, keys, tensors)


def _aligned(at: int, alignment: int) -> int:
    """The first multiple of `alignment` that is not below `at`."""
    return -(-at // alignment) * alignment


class _Cursor:
    """A place in a file that moves on with what is read."""

    def __init__(self, data: mmap.mmap, at: int) -> None:
        self._data, self.at = data, at

    def numbers(self, kinds: str) -> tuple[Any, ...]:
        """Numbers of the kinds that `struct` names so."""
        found = struct.unpack_from(f"<{kinds}", self._data, self.at)
        self.at += struct.calcsize(f"<{kinds}")
        return found

    def number(self, kind: str) -> Any:
        """One number."""
        return self.numbers(kind)[0]

    def string(self) -> str:
        """A string."""
        begin = self.at + 8
        self._skip_string()
        return self._data[begin : self.at].decode()

    def shape(self) -> tuple[int, ...]:
        """A tensor's shape in torch's order, the reverse of the file's."""
        num_dims = self.number("I")
        if num_dims > _MOST_DIMS:
            raise ValueError(f"a tensor has {num_dims} dimensions: expected at most {_MOST_DIMS}")
        return tuple(reversed(self.numbers(f"{num_dims}Q")))

    def value(self, kind: int) -> Any:
        """A key's value of a kind, see `GgufHeader.keys`."""
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise ValueError(f"a key has a value of kind {kind}: expected 0 to 12")
        inner, count = self.numbers("IQ")
        if inner in _NUMBERS:
            return list(self.numbers(f"{count}{_NUMBERS[inner]}"))
        if inner != _STRING:
            return [self.value(inner) for _ in range(count)]
        for _ in range(count):
            self._skip_string()
        return NumStrings(count)

    def _skip_string(self) -> None:
        length = self.number("Q")
        self.at += length
        if self.at > len(self._data):
            raise ValueError("its header is cut off")
