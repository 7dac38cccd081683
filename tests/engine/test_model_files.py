"""Files that are missing, truncated or of another format are refused by name before anything is loaded."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from torch import zeros

from trunkattn.engine.model import inspect_model
from trunkattn.engine.model_files import check_gguf, check_safetensors, find_model_files
from trunkattn.engine.model_path import existing_path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder in order, in two shards."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    save_file({"a": zeros(3, 4)}, tmp_path / "one.safetensors")
    save_file({"b": zeros(5)}, tmp_path / "two.safetensors")
    index = {"metadata": {}, "weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def test_a_whole_folder_passes(folder: Path) -> None:
    files = find_model_files(folder)
    assert (files.folder, files.gguf_file, files.path) == (folder, None, folder)
    assert files == find_model_files(str(folder))


def test_a_whole_gguf_file_passes(smollm2_gguf: Path) -> None:
    files = find_model_files(smollm2_gguf)
    assert files.load_options == {"local_files_only": True, "trust_remote_code": False, "gguf_file": smollm2_gguf.name}
    assert files.path == smollm2_gguf


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "config.json": lambda folder: (folder / "config.json").unlink(),
    "it is not JSON": lambda folder: (folder / "config.json").write_text("{"),
    "it holds no JSON object": lambda folder: (folder / "config.json").write_text("[]"),
    r"not JSON \(maximum recursion": lambda folder: (folder / "config.json").write_text("[" * 99_999),
    "a model_type that is no text": lambda folder: (folder / "config.json").write_text('{"model_type": ["llama"]}'),
    "no model_type": lambda folder: (folder / "config.json").write_text("{}"),
    "two.safetensors": lambda folder: (folder / "two.safetensors").unlink(),
    "model.safetensors": lambda folder: (folder / "model.safetensors.index.json").unlink(),
    "a weight_map from tensors to files, and metadata": lambda folder: (
        folder / "model.safetensors.index.json"
    ).write_text('{"weight_map": {"a": "one.safetensors"}}'),
    "weight_map": lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}'),
    "one.safetensors.*file not fully covered": lambda folder: truncate(folder / "one.safetensors", 1),
    "one.safetensors.*invalid header length": lambda folder: truncate(folder / "one.safetensors", 80),
    "one.safetensors.*cannot open it": lambda folder: (folder / "one.safetensors").write_bytes(b""),
    "one.safetensors.*not fully covered": lambda folder: (folder / "one.safetensors").open("ab").write(b"x"),
    "one.safetensors.*header too large": lambda folder: (folder / "one.safetensors").write_bytes(b"PK\3\4" * 30),
    "one.safetensors.*invalid JSON": lambda folder: (folder / "one.safetensors").write_bytes(
        struct.pack("<Q", 2) + b"[]"
    ),
}


def truncate(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:-num_bytes])


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_folder_is_refused_with_what_is_wrong(folder: Path, what: str) -> None:
    DAMAGES[what](folder)
    with pytest.raises(ValueError, match=what) as caught:
        find_model_files(folder)
    message = str(caught.value)
    assert message.startswith("model=") and str(folder) in message and "expected" in message
    assert "\n" not in message


@pytest.mark.parametrize("num_bytes", [1, 100, 3_000, 1_000_000, -1])
def test_a_truncated_gguf_file_is_refused(tmp_path: Path, smollm2_gguf: Path, num_bytes: int) -> None:
    """Cut within the magic number, the fields, the tokens, the tensors, and by one byte."""
    path = tmp_path / "m.gguf"
    with smollm2_gguf.open("rb") as file:
        path.write_bytes(file.read()[:num_bytes])
    with pytest.raises(
        ValueError, match=r"begins with b'G'|expected a complete GGUF file, so copy or download"
    ) as caught:
        inspect_model(path)
    assert str(caught.value).startswith(f"model={str(path)!r}: ") and "\n" not in str(caught.value)


def test_a_gguf_file_of_an_unknown_version_is_refused(tmp_path: Path, smollm2_gguf: Path) -> None:
    path = tmp_path / "m.gguf"
    with smollm2_gguf.open("rb") as file:
        whole = file.read(1000)
    path.write_bytes(whole[:4] + struct.pack("<I", 9) + whole[8:])
    with pytest.raises(ValueError, match=r"GGUF v9|version 9"):
        inspect_model(path)


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"PK\3\4" * 100)
    with pytest.raises(ValueError, match=r"begins with b'PK.*not b'GGUF'; expected a local Hugging Face folder"):
        find_model_files(tmp_path / "m.gguf")
    (tmp_path / "empty.gguf").write_bytes(b"")
    with pytest.raises(ValueError, match=r"begins with b''"):
        check_gguf(tmp_path / "empty.gguf")
    with pytest.raises(ValueError, match="no such file or folder"):
        find_model_files(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"there is no config\.json in this folder; expected a local Hugging Face"):
        existing_path(tmp_path)
    with pytest.raises(ValueError, match=r"m\.gguf.*safetensors cannot open it"):
        check_safetensors(tmp_path / "m.gguf")
    with pytest.raises(TypeError, match="model=None"):
        find_model_files(None)
