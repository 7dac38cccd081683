"""Every tensor of a safetensors folder is used, known to be harmless, or refused by name; so is what quantizes them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from trunkattn.engine import LLM, SamplingParams
from trunkattn.engine.model import inspect_model

Tensors = dict[str, torch.Tensor]
PROMPT, GREEDY = [list(range(5, 25))], SamplingParams(temperature=0, max_tokens=4)


@pytest.fixture
def folder(tiny_model: Callable[[str], Any], tmp_path: Path) -> Path:
    """A tiny Llama's own folder."""
    source = tiny_model("llama").path
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((source / file).read_bytes())
    return tmp_path


def change(folder: Path, tensors: Tensors, config: dict[str, Any] | None = None) -> None:
    saved = load_file(folder / "model.safetensors")
    save_file({**saved, **tensors}, folder / "model.safetensors", metadata={"format": "pt"})
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**written, **(config or {})}))


LAYER = "model.layers.0.self_attn"
EXTRA: dict[str, Tensors] = {
    "a bias": {f"{LAYER}.q_proj.bias": torch.ones(64)},
    "a scale": {f"{LAYER}.q_proj.weight_scale": torch.ones(())},
    "a norm": {f"{LAYER}.q_norm.weight": torch.ones(16)},
    "another layer": {"model.layers.2.mlp.up_proj.weight": torch.ones(128, 64)},
}


@pytest.mark.parametrize("kind", EXTRA)
def test_a_tensor_without_a_place_is_refused_by_name(folder: Path, kind: str) -> None:
    change(folder, EXTRA[kind])
    with pytest.raises(ValueError, match=f"its files hold {next(iter(EXTRA[kind]))}; expected no tensor"):
        LLM(folder, num_pages=16)


def test_missing_tensors_are_refused_by_name(folder: Path) -> None:
    saved = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in saved.items() if "layers.1." not in name}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"its files lack model\.layers\.1\..* and \d more; expected every weight"):
        LLM(folder, num_pages=16)


@pytest.mark.parametrize("kind", ["int8", "uint8", "float8_e4m3fn", "float8_e5m2", "int32"])
def test_a_quantized_tensor_is_refused_by_name(folder: Path, kind: str) -> None:
    weight = load_file(folder / "model.safetensors")[f"{LAYER}.q_proj.weight"]
    change(folder, {f"{LAYER}.q_proj.weight": (weight * 10).to(getattr(torch, kind))})
    with pytest.raises(ValueError, match=rf"its tensor {LAYER}\.q_proj\.weight has type .* weights are quantized"):
        inspect_model(folder)


@pytest.mark.parametrize("key", ["compression_config", "quantization", "quant_config"])
def test_a_configuration_that_quantizes_is_refused(folder: Path, key: str) -> None:
    change(folder, {}, {key: {"bits": 8}})
    with pytest.raises(ValueError, match=rf"quantized \(config\.json has {key}\)"):
        inspect_model(folder)


@pytest.mark.parametrize(("algorithm", "refused"), [("FP8", True), (None, False)])
def test_modelopts_own_file_is_read(folder: Path, algorithm: str | None, refused: bool) -> None:
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": algorithm}}))
    if not refused:
        inspect_model(folder)
        return
    with pytest.raises(ValueError, match=r"hf_quant_config\.json has quant_algo 'FP8'"):
        inspect_model(folder)


def test_harmless_tensors_and_other_float_types_pass(folder: Path) -> None:
    plain = LLM(folder, num_pages=16).generate(PROMPT, GREEDY)[0].outputs[0].token_ids
    saved = load_file(folder / "model.safetensors")
    change(folder, {f"{LAYER}.rotary_emb.inv_freq": torch.ones(8)})  # old checkpoints kept what the base gives
    assert LLM(folder, num_pages=16).generate(PROMPT, GREEDY)[0].outputs[0].token_ids == plain
    change(folder, {name: tensor.double() for name, tensor in saved.items()})
    assert LLM(folder, num_pages=16).generate(PROMPT, GREEDY)[0].outputs[0].token_ids == plain
    change(folder, {"lm_head.weight": saved["model.embed_tokens.weight"]}, {"tie_word_embeddings": True})
    LLM(folder, num_pages=16)
