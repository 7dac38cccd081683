"""Every tensor of a safetensors folder is used, known to be harmless, or refused by name; so is what quantizes them."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from trunkattn.engine import LLM, SamplingParams
from trunkattn.engine.model.inspection import inspect_model

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


def test_a_model_that_the_files_are_far_too_small_for_is_refused_before_it_is_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "config.json").write_text('{"model_type": "llama"}')  # the sizes are then those of a model of 7 billion
    num_values = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("the model is made"))
    expected = rf"a model of 6,738,415,616 weights, and its files hold {num_values:,} numbers; expected the weights"
    with pytest.raises(ValueError, match=expected):
        LLM(folder, num_pages=16)


@pytest.mark.parametrize("kind", ["int8", "uint8", "float8_e4m3fn", "float8_e5m2", "int32", "int64", "bool"])
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


@pytest.mark.parametrize("name", ["quantize_config.json", "quant_config.json"])
def test_a_file_that_says_how_weights_are_quantized_is_a_reason_to_refuse(folder: Path, name: str) -> None:
    (folder / name).write_text('{"bits": 4, "group_size": 128}')
    with pytest.raises(ValueError, match=rf"quantized \({name} says how\)"):
        inspect_model(folder)


@pytest.mark.parametrize(("algorithm", "refused"), [("FP8", True), (None, False)])
@pytest.mark.parametrize("within", [True, False])
def test_modelopts_own_file_is_read(folder: Path, algorithm: str | None, refused: bool, within: bool) -> None:
    said = {"quant_algo": algorithm}
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": said} if within else said))
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


def two_files(folder: Path, first: Tensors, second: Tensors) -> None:
    """Replaces the folder's weights by two files and their index; a tensor of both is said to be in the first."""
    (folder / "model.safetensors").unlink()
    for file, tensors in (("1.safetensors", first), ("2.safetensors", second)):
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / file, metadata={"format": "pt"})
    places = dict.fromkeys(second, "2.safetensors") | dict.fromkeys(first, "1.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def test_one_name_has_one_value(folder: Path) -> None:
    saved = load_file(folder / "model.safetensors")
    plain = LLM(folder, num_pages=16).generate(PROMPT, GREEDY)[0].outputs[0].token_ids
    first = {name: tensor for name, tensor in saved.items() if "layers.0" in name}
    second = {name: tensor for name, tensor in saved.items() if name not in first}
    name = f"{LAYER}.q_proj.weight"
    two_files(folder, first, {**second, name: first[name]})
    assert LLM(folder, num_pages=16).generate(PROMPT, GREEDY)[0].outputs[0].token_ids == plain
    save_file({**second, name: first[name] + 1}, folder / "2.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"its tensor {name} is another one in 1\.safetensors"):
        inspect_model(folder)


@pytest.mark.parametrize("name", [f"{LAYER}.q_proj.weight".removeprefix("model."), "model.lm_head.weight"])
def test_one_weight_has_one_value(folder: Path, name: str) -> None:
    """transformers adds and removes the prefix of the model's base, so two names can be one weight."""
    saved = load_file(folder / "model.safetensors")
    weight = "lm_head.weight" if "lm_head" in name else f"model.{name}"
    plain = LLM(folder, num_pages=16).generate(PROMPT, GREEDY)[0].outputs[0].token_ids
    change(folder, {name: saved[weight].clone()})
    assert LLM(folder, num_pages=16).generate(PROMPT, GREEDY)[0].outputs[0].token_ids == plain
    change(folder, {name: saved[weight] + 1})
    with pytest.raises(ValueError, match=f"{name}.* are both read as {weight}, and they differ"):
        LLM(folder, num_pages=16)


def test_weights_that_are_tied_have_one_value(folder: Path) -> None:
    """transformers unties weights that differ, and other engines drop one: which is meant, only the user knows."""
    plain = LLM(folder, num_pages=16).generate(PROMPT, GREEDY)[0].outputs[0].token_ids
    change(folder, {}, {"tie_word_embeddings": True})
    with pytest.raises(ValueError, match=r"ties lm_head\.weight to model\.embed_tokens\.weight.* value for each"):
        LLM(folder, num_pages=16)
    change(folder, {}, {"tie_word_embeddings": False})
    assert LLM(folder, num_pages=16).generate(PROMPT, GREEDY)[0].outputs[0].token_ids == plain


@pytest.mark.parametrize("left_out", ["lm_head.weight", "model.embed_tokens.weight"])
def test_a_tied_weight_may_be_stored_under_either_name(folder: Path, left_out: str) -> None:
    saved = load_file(folder / "model.safetensors")
    both = {name: saved["lm_head.weight"].clone() for name in ("lm_head.weight", "model.embed_tokens.weight")}
    change(folder, both, {"tie_word_embeddings": True})
    plain = LLM(folder, num_pages=16).generate(PROMPT, GREEDY)[0].outputs[0].token_ids
    kept = {name: tensor for name, tensor in {**saved, **both}.items() if name != left_out}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    assert LLM(folder, num_pages=16).generate(PROMPT, GREEDY)[0].outputs[0].token_ids == plain


def test_parts_of_one_weight_may_differ(tiny_model: Callable[[str], Any]) -> None:
    """Experts, each a tensor of the file, are one weight of the model."""
    path = tiny_model("glm4_moe_lite").path
    assert any("experts.0." in name for name in load_file(path / "model.safetensors"))
    LLM(path, num_pages=16)


def test_the_file_that_is_loaded_is_the_one_that_is_checked(folder: Path) -> None:
    """transformers takes a model.safetensors and no index beside it."""
    whole = (folder / "model.safetensors").read_bytes()
    saved = load_file(folder / "model.safetensors")
    two_files(folder, saved, {})
    (folder / "model.safetensors").write_bytes(whole)
    inspect_model(folder)
    change(folder, {f"{LAYER}.q_proj.weight": saved[f"{LAYER}.q_proj.weight"].to(torch.float8_e4m3fn)})
    with pytest.raises(ValueError, match="weights are quantized"):
        inspect_model(folder)


def test_an_adapter_that_nobody_adds_is_refused(folder: Path) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    with pytest.raises(ValueError, match=r"it holds an adapter \(adapter_config\.json\), .*merge_and_unload"):
        inspect_model(folder)


UNREAD: dict[str, dict[str, Any]] = {
    "final_logit_softcapping=30.0, which transformers' llama does not read": {"final_logit_softcapping": 30.0},
    "logit_scale=0.5, which": {"logit_scale": 0.5},
    "use_qk_norm=True, which": {"use_qk_norm": True},
    "partial_rotary_factor=0.5, and transformers' llama rotates 16 of the 16": {"partial_rotary_factor": 0.5},
    "routed_scaling_factor=2.5, which": {"routed_scaling_factor": 2.5},
    "use_parallel_residual=True, which": {"use_parallel_residual": True},
    "factor=4.0, .* with rope_type='default'": {"rope_parameters": {"rope_type": "default", "factor": 4.0}},
}


@pytest.mark.parametrize("message", UNREAD)
def test_a_field_that_would_change_the_model_and_nobody_reads_is_refused(folder: Path, message: str) -> None:
    change(folder, {}, UNREAD[message])
    with pytest.raises(ValueError, match=message):
        inspect_model(folder)


def test_fields_that_change_nothing_pass(folder: Path) -> None:
    neutral = {"final_logit_softcapping": None, "logit_scale": 1.0, "use_qk_norm": False, "partial_rotary_factor": 1.0}
    neutral |= {"routed_scaling_factor": 1.0, "use_parallel_residual": False}
    neutral["rope_parameters"] = {"rope_type": "default", "factor": 1.0, "mrope_section": [2, 3, 3]}
    change(folder, {}, {**neutral, "_name_or_path": "a"})
    inspect_model(folder)


ROPE = {"rope_type": "default", "rope_theta": 1e6}
LINEAR = {"type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"rope_parameters": ROPE, "rope_scaling": LINEAR}, "rope_scaling={'type': 'linear', 'factor': 2.0} beside"),
        ({"rope_parameters": ROPE, "rope_theta": 1e4}, "rope_theta=10000.0 beside other rope_parameters"),
        ({"rope_parameters": {**ROPE, **LINEAR}, "rope_scaling": LINEAR}, "rope_scaling="),  # its base would be 10,000
    ],
)
def test_two_rotations_in_a_configuration_are_refused(folder: Path, given: dict[str, Any], reason: str) -> None:
    """Guides say to add rope_scaling, and transformers then takes nothing of the rope_parameters that it has saved."""
    change(folder, {}, given)
    with pytest.raises(ValueError, match=f"config.json has {re.escape(reason)}"):
        inspect_model(folder)


@pytest.mark.parametrize(
    "given",
    [
        {"rope_parameters": ROPE, "rope_theta": 1_000_000, "rope_scaling": None},
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "linear", "factor": 2.0}, "rope_theta": 1e6}
        | {"rope_scaling": LINEAR},
        {"rope_parameters": None, "rope_theta": 1e6, "rope_scaling": LINEAR},
    ],
)
def test_a_rotation_that_is_written_twice_alike_passes(folder: Path, given: dict[str, Any]) -> None:
    change(folder, {}, given)
    rope = inspect_model(folder).config.rope_parameters
    assert rope["rope_theta"] == 1e6 and rope.get("factor", 2.0) == 2.0


BAD_GENERATION: dict[str, str] = {
    "{": "generation_config.json': it is not JSON",
    "[]": "it holds no JSON object",
    '{"temperature": -1}': "temperature=-1: expected a finite number >= 0; correct it or remove the file",
    '{"top_k": 2.5}': "top_k=2.5: expected an integer",
    '{"max_new_tokens": 0}': "max_tokens=0: expected an integer",
    '{"eos_token_id": [3, null]}': "eos_token_id=None: expected an integer",
    '{"suppress_tokens": [3]}': r"suppress_tokens=\[3\] changes which tokens are drawn",
    '{"no_repeat_ngram_size": 3}': "no_repeat_ngram_size=3 changes",
    '{"typical_p": 0.9}': "typical_p=0.9 changes",
    '{"encoder_repetition_penalty": 1.5}': "encoder_repetition_penalty=1.5 changes",  # transformers counts the prompt
    '{"encoder_no_repeat_ngram_size": 2}': "encoder_no_repeat_ngram_size=2 changes",
    '{"token_healing": true}': "token_healing=True changes",
    '{"dola_layers": "low"}': "dola_layers='low' changes",
    '{"force_words_ids": [[3]]}': "force_words_ids=.* changes",
}


@pytest.mark.parametrize("text", BAD_GENERATION)
def test_defaults_that_nobody_can_follow_are_refused_at_the_start(folder: Path, text: str) -> None:
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match=BAD_GENERATION[text]):
        inspect_model(folder)


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        ({"no_repeat_ngram_size": 2}, "config.json': no_repeat_ngram_size=2 changes which tokens are drawn"),
        ({"suppress_tokens": [3]}, r"config.json': suppress_tokens=\[3\] changes"),
        ({"top_p": 2.0}, r"config.json': top_p=2.0: expected a number in \(0, 1\]; correct it or remove it$"),
    ],
)
def test_a_configuration_says_how_to_draw_where_no_other_file_does(
    folder: Path, field: dict[str, Any], reason: str
) -> None:
    """Folders of transformers' first years have such fields in config.json, and it still follows them."""
    (folder / "generation_config.json").unlink(missing_ok=True)
    change(folder, {}, {**field, "temperature": 0.5})
    with pytest.raises(ValueError, match=reason):
        inspect_model(folder)
    (folder / "generation_config.json").write_text("{}")  # it counts alone, where there is one
    inspect_model(folder)


def test_defaults_that_change_nothing_pass(folder: Path) -> None:
    neutral = {"suppress_tokens": [], "no_repeat_ngram_size": 0, "typical_p": 1.0, "num_beams": 1, "stop_strings": None}
    neutral |= {"encoder_repetition_penalty": 1.0, "token_healing": False}
    (folder / "generation_config.json").write_text(json.dumps(neutral))
    inspect_model(folder)


@pytest.mark.parametrize("end", [-1, 10**9])
def test_an_end_that_is_no_token_ends_nothing(folder: Path, end: int) -> None:
    """`min_tokens` holds the ends of an answer back, and -1 would be the vocabulary's last token."""
    expected = LLM(folder, num_pages=16).generate(PROMPT, GREEDY)[0].outputs[0].token_ids
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    llm = LLM(folder, num_pages=16)
    assert not llm.engine.limits.eos_token_ids
    params = SamplingParams(temperature=0, max_tokens=4, min_tokens=4)
    assert llm.generate(PROMPT, params)[0].outputs[0].token_ids == expected
