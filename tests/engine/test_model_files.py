"""Files that are missing, truncated or of another format are refused by name before anything is loaded."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from torch import zeros

from trunkattn.engine.model_files import check_gguf, check_safetensors, find_model_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder in order, in two shards."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    save_file({"a": zeros(3, 4)}, tmp_path / "one.safetensors")
    save_file({"b": zeros(5)}, tmp_path / "two.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def write_gguf(path: Path, num_fields: int = 1, tensor_kind: int = 0, missing_bytes: int = 0, version: int = 3) -> None:
    """A GGUF file of one tensor of 2 x 32 elements."""

    def string(text: str) -> bytes:
        return struct.pack("<Q", len(text)) + text.encode()

    header = b"GGUF" + struct.pack("<IQQ", version, 1, num_fields)
    header += string("general.alignment") + struct.pack("<II", 4, 64)
    header += string("w") + struct.pack("<IQQIQ", 2, 32, 2, tensor_kind, 0)
    header += b"\0" * (-len(header) % 64)
    path.write_bytes((header + b"\0" * 256)[: len(header) + 256 - missing_bytes])


def test_a_whole_folder_passes(folder: Path) -> None:
    files = find_model_files(folder)
    assert (files.folder, files.gguf_file) == (folder, None)
    assert files == find_model_files(str(folder))


def test_a_whole_gguf_file_passes(tmp_path: Path, smollm2_gguf: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    assert find_model_files(tmp_path / "m.gguf").load_options == {"local_files_only": True, "gguf_file": "m.gguf"}
    assert find_model_files(smollm2_gguf).gguf_file == smollm2_gguf.name


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "config.json": lambda folder: (folder / "config.json").unlink(),
    "not JSON": lambda folder: (folder / "config.json").write_text("{"),
    "a JSON object": lambda folder: (folder / "config.json").write_text("[]"),
    "no model_type": lambda folder: (folder / "config.json").write_text("{}"),
    "two.safetensors": lambda folder: (folder / "two.safetensors").unlink(),
    "model.safetensors": lambda folder: (folder / "model.safetensors.index.json").unlink(),
    "weight_map": lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}'),
    "truncated": lambda folder: truncate(folder / "one.safetensors", 1),
    "header alone": lambda folder: truncate(folder / "one.safetensors", 80),
    "header length is 0": lambda folder: (folder / "one.safetensors").write_bytes(b""),
    "too long": lambda folder: (folder / "one.safetensors").open("ab").write(b"x"),
    "not a safetensors file": lambda folder: (folder / "one.safetensors").write_bytes(b"PK\3\4" + b"x" * 100),
    "not a tensor table": lambda folder: (folder / "one.safetensors").write_bytes(struct.pack("<Q", 2) + b"[]"),
}


def truncate(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:-num_bytes])


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_folder_is_refused_with_what_is_wrong(folder: Path, what: str) -> None:
    DAMAGES[what](folder)
    with pytest.raises(ValueError, match=what) as caught:
        find_model_files(folder)
    assert str(caught.value).startswith("model=") and str(folder) in str(caught.value)


@pytest.mark.parametrize("missing_bytes", [1, 200, 256, 300, 350, 400])
def test_a_truncated_gguf_file_is_refused(tmp_path: Path, missing_bytes: int) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, missing_bytes=missing_bytes)
    with pytest.raises(ValueError, match=r"truncated|begins with|version") as caught:
        check_gguf(path)
    assert str(path) in str(caught.value)


def test_the_real_gguf_file_truncated(tmp_path: Path, smollm2_gguf: Path) -> None:
    path = tmp_path / "m.gguf"
    with smollm2_gguf.open("rb") as file:
        path.write_bytes(file.read(4_000_000))
    with pytest.raises(ValueError, match="truncated, 4000000 bytes; its header says 98362432"):
        find_model_files(path)
    truncate(path, 3_900_000)
    with pytest.raises(ValueError, match="truncated or damaged"):
        find_model_files(path)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"num_fields": 2**40}, "damaged"),
        ({"tensor_kind": 999}, "damaged"),
        ({"version": 9}, "version 9"),
    ],
)
def test_a_strange_gguf_header_is_refused(tmp_path: Path, options: dict[str, int], what: str) -> None:
    write_gguf(tmp_path / "m.gguf", **options)
    with pytest.raises(ValueError, match=what):
        check_gguf(tmp_path / "m.gguf")


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"PK\3\4" * 100)
    with pytest.raises(ValueError, match=r"begins with b'PK.*not b'GGUF'; expected a local Hugging Face folder"):
        find_model_files(tmp_path / "m.gguf")
    with pytest.raises(ValueError, match="no such file or folder"):
        find_model_files(tmp_path / "nothing")
    with pytest.raises(ValueError, match="not a safetensors file"):
        check_safetensors(tmp_path / "m.gguf")
    with pytest.raises(TypeError, match="model=None"):
        find_model_files(None)
