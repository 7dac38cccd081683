"""Model files on disk: what a local Hugging Face folder or a GGUF file must hold, checked before anything is loaded."""

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

EXPECTED_MODEL = "a local Hugging Face folder (config.json and *.safetensors) or a .gguf file"
SAFETENSORS_INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100 * 1024 * 1024  # the safetensors format's own limit
GGUF_VERSIONS = (2, 3)
GGUF_STRING, GGUF_ARRAY = 8, 9
GGUF_SCALAR_BYTES = (1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8)  # by GGUF value type; strings and arrays differ


@dataclass(frozen=True)
class ModelFiles:
    """Where a model lies. `gguf_file` is the file's name within `folder`, or None for a safetensors folder."""

    folder: Path
    gguf_file: str | None

    @property
    def load_options(self) -> dict[str, Any]:
        """Keywords of transformers' `from_pretrained`: this folder and nothing from a network."""
        options: dict[str, Any] = {"local_files_only": True}
        return options if self.gguf_file is None else {**options, "gguf_file": self.gguf_file}


def find_model_files(model: object, with_weights: bool = True) -> ModelFiles:
    """Locate and check a model's files; of a folder only the configuration unless `with_weights`.

    Raises:
        TypeError, ValueError: naming the path, what is wrong with it and what was expected: not there, of another
            format, truncated, or a shard missing.
    """
    if not isinstance(model, str | Path):
        raise TypeError(f"model={model!r}: expected {EXPECTED_MODEL}")
    path = Path(model).expanduser()
    if path.is_dir():
        check_folder(path, with_weights)
        return ModelFiles(path, None)
    if not path.is_file():
        raise ValueError(f"model={str(model)!r}: there is no such file or folder; expected {EXPECTED_MODEL}")
    check_gguf(path)
    return ModelFiles(path.parent, path.name)


def check_folder(folder: Path, with_weights: bool = True) -> None:
    """Raises ValueError unless `folder` holds a config.json and, if asked for, whole safetensors files."""
    config = _read_json(folder / "config.json")
    if "model_type" not in config:
        raise ValueError(f"model={str(folder)!r}: config.json has no model_type; expected {EXPECTED_MODEL}")
    if not with_weights:
        return
    if (folder / SAFETENSORS_INDEX).is_file():
        shards = _read_json(folder / SAFETENSORS_INDEX).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise ValueError(f"model={str(folder / SAFETENSORS_INDEX)!r}: expected a weight_map from tensors to files")
        files = sorted({folder / str(name) for name in shards.values()})
    else:
        files = [folder / "model.safetensors"]
    for file in files:
        check_safetensors(file)


def check_safetensors(path: Path) -> None:
    """Raises ValueError unless the file is there, has a safetensors header and is as long as the header says."""
    if not path.is_file():
        raise ValueError(f"model={str(path)!r}: there is no such file; expected {EXPECTED_MODEL}")
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or not 2 <= length <= MAX_HEADER_BYTES:
            raise ValueError(f"model={str(path)!r}: not a safetensors file, its header length is {length}")
        if 8 + length > size:
            raise ValueError(f"model={str(path)!r}: truncated at {size} bytes, its header alone takes {8 + length}")
        header = file.read(length)
    try:
        tensors = json.loads(header)
        ends = [tensor["data_offsets"][1] for name, tensor in tensors.items() if name != "__metadata__"]
        expected = 8 + length + max(ends, default=0)
    except (ValueError, AttributeError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"model={str(path)!r}: not a safetensors file, its header is not a tensor table") from error
    if size != expected:
        what = "truncated" if size < expected else "too long"
        raise ValueError(f"model={str(path)!r}: {what}, {size} bytes; its header says {expected}")


def check_gguf(path: Path) -> None:
    """Raises ValueError unless the file is GGUF of a known version and holds all the tensors that its header lists."""
    with path.open("rb") as file:
        magic = file.read(4)
        if magic != b"GGUF":
            raise ValueError(f"model={str(path)!r}: it begins with {magic!r}, not b'GGUF'; expected {EXPECTED_MODEL}")
        version = int.from_bytes(file.read(4), "little")
        if version not in GGUF_VERSIONS:
            raise ValueError(f"model={str(path)!r}: GGUF version {version}; expected one of {GGUF_VERSIONS}")
        try:
            expected = _gguf_size(file)
        except (struct.error, ValueError, KeyError, IndexError, MemoryError, OverflowError) as error:
            raise ValueError(f"model={str(path)!r}: truncated or damaged, its GGUF header cannot be read") from error
    size = path.stat().st_size
    if size < expected:
        raise ValueError(f"model={str(path)!r}: truncated, {size} bytes; its header says {expected}")


def _gguf_size(file: BinaryIO) -> int:
    """Bytes up to the end of the last tensor, read from the header; `file` stands behind magic number and version."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType  # which folders need not have

    num_tensors, num_fields = struct.unpack("<QQ", file.read(16))
    alignment = 32
    for _ in range(num_fields):
        name = _read_string(file)
        (kind,) = struct.unpack("<I", file.read(4))
        if name == b"general.alignment":
            (alignment,) = struct.unpack("<I", file.read(4))
        else:
            _skip_value(file, kind)
    end = 0
    for _ in range(num_tensors):
        _read_string(file)
        (num_dims,) = struct.unpack("<I", file.read(4))
        *shape, kind, offset = struct.unpack(f"<{num_dims}QIQ", file.read(8 * num_dims + 12))
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        end = max(end, offset + math.prod(shape) // block * block_bytes)
    return -(-file.tell() // alignment) * alignment + end


def _skip_value(file: BinaryIO, kind: int) -> None:
    if kind == GGUF_STRING:
        _read_string(file)
    elif kind == GGUF_ARRAY:
        element, count = struct.unpack("<IQ", file.read(12))
        if element in (GGUF_STRING, GGUF_ARRAY):
            for _ in range(count):
                _skip_value(file, element)
        else:
            file.seek(GGUF_SCALAR_BYTES[element] * count, 1)
    else:
        file.seek(GGUF_SCALAR_BYTES[kind], 1)


def _read_string(file: BinaryIO) -> bytes:
    (length,) = struct.unpack("<Q", file.read(8))
    string = file.read(length)
    if len(string) != length:
        raise struct.error("the file ends within a string")
    return string


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"model={str(path)!r}: there is no such file; expected {EXPECTED_MODEL}")
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"model={str(path)!r}: not JSON ({error}); expected {EXPECTED_MODEL}") from error
    if not isinstance(content, dict):
        raise ValueError(f"model={str(path)!r}: expected a JSON object")
    return content
