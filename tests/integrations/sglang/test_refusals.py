"""What is refused, when the engine starts, with one line; in a real engine where that is quick to make."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.arg_groups.arg_utils import record_fields
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.models.gemma3_mm import Gemma3ForConditionalGeneration as Gemma3
from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES, ServerArgs

from trunkattn.integrations import sglang as plugin
from trunkattn.integrations.sglang import layers, versions
from trunkattn.integrations.sglang.route import choose

from .engine import OPTIONS
from .fakes import Step, make_runner


def refused(*given: Any, **changes: Any) -> str:
    with pytest.raises(ValueError) as error:
        choose(make_runner(*given, **changes))
    message = str(error.value)
    assert "\n" not in message
    return message


def test_registering_twice_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(plugin.logger, "error", lambda message, *values: said.append(message % values))
    plugin.register()
    plugin.register()
    assert ATTENTION_BACKEND_CHOICES.count("trunk") == 1
    assert ATTENTION_BACKENDS["trunk"] is plugin.create
    assert said == []


def test_a_plugin_that_took_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(plugin.logger, "error", lambda message, *values: said.append(message % values))
    monkeypatch.setitem(ATTENTION_BACKENDS, "trunk", pytest.approx)
    plugin.register()
    assert ATTENTION_BACKENDS["trunk"] is pytest.approx
    (line,) = said
    assert "SGLANG_PLUGINS" in line and pytest.approx.__module__ in line


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("speculative_algorithm", "NGRAM", "speculative decoding (speculative_algorithm=NGRAM)"),
        ("dllm_algorithm", "LowConfidence", "diffusion"),
        ("enable_deterministic_inference", True, "deterministic inference"),
        ("enable_two_batch_overlap", True, "two-batch overlap"),
        ("enable_pdmux", True, "on one GPU"),
        ("dcp_size", 2, "decode context parallelism"),
        ("enable_torch_compile", True, "torch.compile on a CPU"),
    ],
)
def test_options(option: str, value: Any, words: str) -> None:
    assert words in refused(options={option: value})


def test_what_sglang_decides_is_refused_as_what_the_user_gives() -> None:
    """Prompts of latent attention over several GPUs make SGLang set attn_cp_size, which the user left out."""
    decided = {"attn_cp_size": 1, "_resolved_overrides": [("a model", {"attn_cp_size": 2})]}
    assert "context parallelism (attn_cp_size=2)" in refused(options=decided)


def test_every_refused_option_is_one_of_sglangs() -> None:
    """An option of another name would be accepted without a word."""
    names = {field.name for field in record_fields(ServerArgs)}
    assert versions.REFUSED_OPTIONS.keys() <= names


def test_options_that_sglang_fills_in(model: Callable[[str], Path]) -> None:
    given = {"model_path": str(model("llama")), "attention_backend": "trunk", "device": "cpu"}
    arguments = ServerArgs(**given, skip_tokenizer_init=True, cuda_graph_backend_prefill="full")
    arguments.resolve_once()
    assert arguments.served_model_name is arguments.chunked_prefill_size is arguments.cuda_graph_config is None
    options = versions.options_in_effect(SimpleNamespace(server_args=arguments))
    assert options.served_model_name == given["model_path"]
    assert versions.most_prompt_tokens(options) == options.chunked_prefill_size > 0
    assert versions.prompt_graphs(options) == "full"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"attn_type": AttentionType.ENCODER_ONLY}, "encoder_only attention, only decoder"),
        ({"attn_type": AttentionType.DECODER_BIDIRECTIONAL}, "decoder_bidirectional"),
        ({"is_cross_attention": True}, "cross attention"),
        ({"v_head_dim": 16}, "another width than keys (16 and 32)"),
        ({"logit_cap": 30.0, "logit_capping_method": "relu"}, "a soft cap by relu"),
        ({"pos_encoding_mode": "ALIBI"}, "pos_encoding_mode=ALIBI"),
    ],
)
def test_layers(change: dict[str, Any], words: str) -> None:
    assert words in refused(change)


def test_models_and_devices() -> None:
    widths = SimpleNamespace(is_encoder_decoder=False, kv_lora_rank=512, qk_rope_head_dim=64)
    assert "prompts of latent attention (MLA)" in refused(use_mla_backend=True, model_config=widths)
    assert "encoder-decoder" in refused(model_config=SimpleNamespace(is_encoder_decoder=True))
    assert "a query sees the whole prompt, which SGLang's fa3 supports" in refused(prefill_aware_swa=True)
    assert "the device xpu, only NVIDIA GPUs and CPUs" in refused(device="xpu")
    assert "speculative decoding" in refused(spec_algorithm=SimpleNamespace(is_none=lambda: False))


def test_images_that_are_seen_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 3, whose images are off unless enable_multimodal is set."""
    monkeypatch.setattr(torch.nn.ModuleList, "prepare_attn_masks", Gemma3.prepare_attn_masks, raising=False)
    config = SimpleNamespace(is_encoder_decoder=False, is_multimodal=False)
    choose(make_runner(model_config=config))
    config.is_multimodal = True
    assert "image tokens that see each other in both directions" in refused(model_config=config)


def test_kv_caches() -> None:
    runner = make_runner()
    pool = runner.token_to_kv_pool
    assert layers.pool_refusals(pool, 16) == []
    pool.kv_cache_layout = "hnd"
    assert layers.pool_refusals(pool, 16) == ["the KV layout hnd, only nhd"]
    other = type("MHATokenToKVPoolFP4", (), {})()
    assert "MHATokenToKVPoolFP4, only MHATokenToKVPool and SWAKVPool" in layers.pool_refusals(other, 16)[0]
    assert "KV cache of torch.int8" in refused(kv_cache_dtype=torch.int8)


def test_a_version_without_what_the_plugin_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "CONTRACT", (*versions.CONTRACT, "some_new_hook"))
    message = refused()
    assert "has no AttentionBackend.some_new_hook" in message and "0.5.17 to 0.5.23" in message


def test_another_version_warns_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(versions, "installed", lambda: "0.6.0")
    monkeypatch.setattr("trunkattn.integrations.sglang.route.logger.warning", said.append)
    choose(make_runner())
    (line,) = said
    assert "SGLang 0.6.0" in line and "0.5.17 to 0.5.23" in line


def test_an_unknown_option_of_a_layer() -> None:
    backend = choose(make_runner())
    q, layer = torch.zeros(1, 128), RadixAttention(4, 32, 0.2, 2, 0)
    with pytest.raises(ValueError, match="the layer option score_mod"):
        backend.forward_decode(q, None, None, layer, SimpleNamespace(), score_mod=abs)


@pytest.mark.parametrize(
    "mode", [mode for mode in ForwardMode if mode.name not in ("EXTEND", "MIXED", "DECODE", "IDLE")]
)
def test_a_step_of_another_mode(mode: ForwardMode) -> None:
    """Some of them are prompts in SGLang's words, but not causal."""
    runner = make_runner()
    backend, step = choose(runner), Step([3], [40]).batch(runner)
    step.forward_mode = mode
    with pytest.raises(ValueError, match=f"a step of mode {mode.name}: TrunkAttention expects prompts or decoding"):
        backend.init_forward_metadata(step)


def test_a_real_engine_says_why_and_ends(model: Callable[[str], Path]) -> None:
    """SGLang ends the process of a failed engine, so this one is in a process of its own."""
    import subprocess
    import sys

    code = f"""
import sglang
if __name__ == "__main__":
    sglang.Engine(model_path={str(model("llama"))!r}, attention_backend="trunk", enable_torch_compile=True,
                  **{OPTIONS!r})
"""
    script = model("llama") / "refused.py"
    script.write_text(code)
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert result.returncode != 0
    assert "TrunkAttention does not support torch.compile on a CPU (enable_torch_compile=True)" in result.stderr
