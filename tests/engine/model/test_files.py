"""Files that are missing, truncated or of another format are refused by name before anything is loaded."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from torch import zeros
from transformers import LlamaConfig

from trunkattn.engine.model.files import check_gguf, check_safetensors, find_model_files, one_line, plain
from trunkattn.engine.model.inspection import _check_layers, inspect_model
from trunkattn.engine.model.path import existing_path


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


def point(name: object) -> Callable[[Path], Any]:
    """Lets the index name another file for a tensor."""
    return lambda folder: (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": {"a": name, "b": "two.safetensors"}})
    )


DAMAGES |= {
    "names the file '../one.safetensors'": lambda folder: (
        (folder.parent / "one.safetensors").write_bytes((folder / "one.safetensors").read_bytes()),
        point("../one.safetensors")(folder),
    ),
    "names the file '/dev/null'": point("/dev/null"),
    "names the file '5'": point(5),
    "names the file 'aaaa": point("a" * 5000),
    "generation_config.json.*no such file": lambda folder: (folder / "generation_config.json").mkdir(),
    "generation_config.json.*it is not JSON .*BOM": lambda folder: (folder / "generation_config.json").write_bytes(
        b"\xef\xbb\xbf{}"
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


@pytest.mark.parametrize("field", ["num_hidden_layers", "n_layer", "num_nextn_predict_layers"])
def test_more_layers_than_tensors_are_refused_before_a_list_of_them_is_made(folder: Path, field: str) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", field: 10**30}))
    with pytest.raises(ValueError, match=rf"{field}=1000.*expected at most 2, the tensors in its files") as caught:
        inspect_model(folder)
    assert str(caught.value).startswith(f"model={str(folder)!r}: ")
    with pytest.raises(ValueError, match=r"expected at most 10000$"):
        inspect_model(folder, load_format="dummy")


def test_layers_are_found_at_any_depth(folder: Path) -> None:
    config: dict[str, Any] = {"num_layers": 3}
    for _ in range(5000):  # some versions of Python read so deep a file
        config = {"within": config}
    with pytest.raises(ValueError, match="num_layers=3: expected at most 2"):
        _check_layers(find_model_files(folder), config)


def test_a_model_that_the_files_are_too_small_for_is_not_made_to_its_end(folder: Path) -> None:
    save_file({f"a{i}": zeros(1) for i in range(3000)}, folder / "model.safetensors")
    config = {"model_type": "llama", "num_hidden_layers": 3000, "hidden_size": 64, "num_attention_heads": 2}
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 10, "intermediate_size": 8}))
    with pytest.raises(ValueError, match=r"more than a model of 4,\d+,\d+ weights, and its files hold 3,000 numbers"):
        inspect_model(folder)


def test_what_foreign_files_say_is_one_line_that_can_be_printed() -> None:
    assert plain("a\nb\t c \x1b[31m\0") == r"a b c \x1b[31m\x00"
    assert (len(plain("x" * 5000)), plain("x" * 5000)[-3:]) == (400, "x …")
    assert one_line(KeyError("a\nb")) == r"KeyError: 'a\nb'"
    with pytest.raises(Exception, match="pad_token_id") as caught:
        LlamaConfig(pad_token_id=1.5)
    assert one_line(caught.value) == "Field 'pad_token_id' with value 1.5 doesn't match any type in (int, NoneType)."


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
