"""Reading a model: tokenizers that are damaged, code that comes with a folder, ids that end an answer."""

import gc
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, Qwen2Config

from trunkattn.engine import LLM, EngineConfig, SamplingParams
from trunkattn.engine.model import loading as model_module
from trunkattn.engine.model.inspection import _dtype, inspect_model
from trunkattn.engine.model.loading import eos_token_ids, load_model, load_tokenizer

from ..conftest import tiny_config

TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
BAD_MERGE = {"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}
DAMAGED: dict[str, dict[str, bytes]] = {
    "truncated": {"tokenizer.json": b"{"},
    "without a vocabulary": {"tokenizer_config.json": b"{}"},
    "with a bad merge": {"tokenizer.json": json.dumps(BAD_MERGE).encode()},
    "of another format": {"tokenizer.json": b"\x00\xff"},
    "whose package panics": {
        "tokenizer.json": json.dumps(
            {
                "version": "1.0",
                "model": {
                    "type": "BPE",
                    "vocab": {"a": 0, "b": 1, "ab": 2},
                    "merges": ["a b"],
                    "continuing_subword_prefix": "\u00e9" * 9,
                },
            }
        ).encode()
    },
    "that fails at its first text": {
        "tokenizer.json": json.dumps(
            {"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}
        ).encode(),
        "tokenizer_config.json": b'{"model_max_length": "many"}',
    },
    "with code of its own": {
        "tokenizer_config.json": b'{"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", null]}}',
        "mine.py": b"raise SystemExit('the code of the folder ran')",
    },
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A configuration alone, for `load_format="dummy"`."""
    LlamaConfig(**TINY).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_tokenizer_is_refused_with_its_path(folder: Path, damage: str) -> None:
    for name, content in DAMAGED[damage].items():
        (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match="transformers cannot read its tokenizer") as error:
        load_tokenizer(inspect_model(folder, load_format="dummy").files)
    message = str(error.value)
    assert message.startswith(f"model={str(folder)!r}: ") and "expected whole tokenizer files" in message
    assert "\n" not in message


def test_a_vocabulary_of_whole_words_needs_no_unknown_one(folder: Path) -> None:
    words = {"type": "WordLevel", "vocab": {"e4": 0, "Nf6": 1}, "unk_token": "<unk>"}
    content = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": words}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(inspect_model(folder, load_format="dummy").files)
    assert tokenizer is not None and tokenizer("Nf6 e4")["input_ids"] == [1, 0]


def test_a_tokenizer_without_its_package_names_the_package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "tokenizer.model").write_bytes(b"\x0a\x0e\x0a\x05<unk>")
    monkeypatch.setattr(model_module, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"needs the package sentencepiece; install it"):
        load_tokenizer(inspect_model(folder, load_format="dummy").files)


def write_own_code(folder: Path) -> None:
    """A model type that transformers does not know, whose code is a Llama of another name."""
    (folder / "modeling_my.py").write_text(
        "from pathlib import Path\nfrom transformers import LlamaConfig, LlamaForCausalLM\n"
        f"Path({str(folder / 'RAN')!r}).touch()\n"
        "class MyConfig(LlamaConfig):\n    model_type = 'mynew'\n"
        "class MyModel(LlamaForCausalLM):\n    config_class = MyConfig\n"
    )
    auto_map = {"AutoConfig": "modeling_my.MyConfig", "AutoModelForCausalLM": "modeling_my.MyModel"}
    config = {**LlamaConfig(**TINY).to_dict(), "model_type": "mynew", "auto_map": auto_map}
    (folder / "config.json").write_text(json.dumps(config))


def test_the_code_of_a_folder_does_not_run_and_nobody_is_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_own_code(folder)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asks on the terminal"))
    with pytest.raises(ValueError, match=r"no model of type 'mynew'.*set trust_remote_code=True if you trust it"):
        LLM(folder, load_format="dummy")
    assert not (folder / "RAN").exists()


def test_the_code_of_a_folder_runs_with_leave(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_own_code(folder)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
    llm = LLM(folder, load_format="dummy", trust_remote_code=True, num_pages=8)
    output = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    assert type(llm.model).__name__ == "MyModel" and len(output[0].outputs[0].token_ids) == 2


def test_trust_is_true_or_false() -> None:
    assert EngineConfig().trust_remote_code is False
    with pytest.raises(TypeError, match=r"trust_remote_code='yes': expected True or False"):
        EngineConfig(trust_remote_code="yes")  # type: ignore[arg-type]


PER_LAYER: dict[str, dict[str, Any]] = {
    "a list of KV heads": {"num_key_value_heads": [2, 1]},
    "a list of sizes": {"intermediate_size": [32, 64]},
    "no length": {"max_position_embeddings": None},
}


@pytest.mark.parametrize("kind", PER_LAYER)
def test_a_configuration_per_layer_is_refused_with_its_path(folder: Path, kind: str) -> None:
    config = {**json.loads((folder / "config.json").read_text()), **PER_LAYER[kind]}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError) as error:
        inspect_model(folder, load_format="dummy")
    assert str(error.value).startswith(f"model={str(folder)!r}") and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer", "expected"),
    [
        (None, None, None, set()),
        (1, None, None, {1}),
        (1, [2, 3], 4, {1, 2, 3, 4}),
        ([1, 2], 2, None, {1, 2}),
        (None, None, 4, {4}),
        (None, 5, 4, {4, 5}),
        ([-1, 7], -1, None, {7}),
    ],
)
def test_every_end_of_sequence_ends_an_answer(config: Any, generation: Any, tokenizer: Any, expected: set[int]) -> None:
    sources = [None if ids is None else SimpleNamespace(eos_token_id=ids) for ids in (config, tokenizer)]
    found = eos_token_ids(GenerationConfig(eos_token_id=generation), sources[1], sources[0])  # type: ignore[arg-type]
    assert found == expected


def test_an_answer_ends_at_the_configurations_end_of_sequence(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**TINY))
    model.save_pretrained(tmp_path)
    first = LLM(tmp_path, num_pages=8).generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=1))
    model.config.eos_token_id = first[0].outputs[0].token_ids[0]
    model.config.save_pretrained(tmp_path)
    answer = LLM(tmp_path, num_pages=8).generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=5))
    assert answer[0].outputs[0].finish_reason == "stop" and len(answer[0].outputs[0].token_ids) == 1


def test_a_type_of_integers_is_no_type_of_a_model() -> None:
    with pytest.raises(ValueError, match=r"dtype='int8': expected one in which weights are stored"):
        _dtype("auto", LlamaConfig(dtype="int8"), torch.device("cpu"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["qwen2", "deepseek_v2"])  # tied weights and biases; heads that are parts of a weight
def test_whoever_writes_the_files_again_changes_no_loaded_model(tmp_path: Path, kind: str, dtype: str) -> None:
    config = Qwen2Config(**TINY, tie_word_embeddings=True) if kind == "qwen2" else tiny_config(kind)
    AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).save_pretrained(tmp_path)
    model = load_model(inspect_model(str(tmp_path), dtype=dtype, device="cpu"))
    gc.collect()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert all(parameter.isfinite().all() for parameter in model.parameters())
