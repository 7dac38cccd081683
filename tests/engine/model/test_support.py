"""What can run is decided from the configuration alone, with the reason, and before any weight is loaded."""

import math
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread, get_ident
from typing import Any

import pytest
import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaModel, PretrainedConfig, masking_utils
from transformers.modeling_utils import PreTrainedModel

from trunkattn.engine import LLM, SamplingParams
from trunkattn.engine.model.hf_attention import AttentionProbe, trunk_attention
from trunkattn.engine.model.hf_masks import UnsupportedAttention, request_mask, window_of
from trunkattn.engine.model.packed_linear import PackedLinear
from trunkattn.engine.model.support import check_supported, max_positions, probe_attention

SMALL: dict[str, Any] = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
DYNAMIC = {"rope_type": "dynamic", "factor": 1.0, "alpha": 1000.0, "rope_theta": 1e4}
LINEAR = {"rope_type": "linear", "factor": 2.0, "attention_factor": 1.5, "rope_theta": 1e4}


def config_of(model_type: str, **options: Any) -> PretrainedConfig:
    return AutoConfig.for_model(model_type, **options)


@pytest.mark.parametrize(
    "model_type",
    [
        "llama",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "mistral",
        "mixtral",
        "gemma",
        "gemma3_text",
        "gpt2",
        "olmo2",
        "phi3",
        "granite",
        "deepseek_v3",
        "glm4_moe_lite",
        "minicpm3",
    ],
)
def test_plain_decoders_are_supported(model_type: str) -> None:
    assert check_supported(config_of(model_type)) == []


@pytest.mark.parametrize(
    ("model_type", "rope"),
    [
        ("ministral3", {**YARN, "llama_4_scaling_beta": 0.1}),
        ("hunyuan_v1_dense", DYNAMIC),
        ("llama", {**YARN, "finetuned": True}),
    ],
)
def test_parameters_of_a_rotation_that_a_model_reads_pass(model_type: str, rope: dict[str, Any]) -> None:
    assert check_supported(config_of(model_type, **SMALL, head_dim=16, rope_parameters=rope)) == []


@pytest.mark.parametrize(
    ("model_type", "options", "reason"),
    [
        ("t5", {}, "encoder-decoder"),
        ("whisper", {}, "encoder-decoder"),
        ("deepseek_v32", {}, "selects the keys of each query (sparse attention)"),
        ("glm_moe_dsa", {}, "selects the keys of each query (sparse attention)"),
        ("kimi_linear", {}, "linear_attention"),
        ("mamba2", {}, "linear_attention"),
        ("qwen3_next", {}, "linear_attention"),
        ("jamba", {}, "linear_attention"),
        ("llama4_text", {}, "chunked attention"),
        ("gemma3n_text", {}, "share KV"),
        ("gemma3", {}, "multimodal"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "bidirectional"),
        ("falcon", {"alibi": True}, "ALiBi"),
        ("falcon", {}, "does not go through transformers' AttentionInterface"),
        ("bloom", {}, "does not go through transformers' AttentionInterface"),
        ("vit", {}, "AutoModelForCausalLM has no model of type 'vit'"),
        ("gemma4_text", {}, "its layers differ in their attention: head_dim 256 or 512"),
        ("bert", {}, "its attention is bidirectional"),
        ("llama", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantized (gptq)"),
        ("doge", {}, "builds its own attention mask"),
        ("gpt_neox", {"partial_rotary_factor": 0.75}, "rotates 24 of the 96 numbers"),
        ("gemma2", {"partial_rotary_factor": 0.5}, "rotates 256 of the 256 numbers"),
        ("qwen2", {"use_qk_norm": True}, "use_qk_norm=True, which transformers' qwen2 does not read"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob=True, which transformers' deepseek_v2 does not"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax', which"),
        ("gpt_oss", {"hidden_act": "relu"}, "hidden_act='relu', which"),
        ("mistral", {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1}}, "llama_4_scaling_beta=0.1, which"),
        ("llama", {"rope_parameters": DYNAMIC}, "alpha=1000.0, which transformers' llama does not read with rope_type"),
        ("llama", {"rope_parameters": LINEAR}, "attention_factor=1.5, which"),
        ("mistral", {**SMALL, "layer_types": ["full_attention"] * 4}, "layer_types[0]='full_attention', which"),
        ("llama", {"rope_parameters": {**YARN, "rope_theta": math.inf}}, "'rope_theta': inf}: expected finite numbers"),
        ("llama", {"rms_norm_eps": 1e39}, "rms_norm_eps=1e+39: expected finite numbers"),
        ("qwen3", {"rms_norm_eps": math.nan}, "rms_norm_eps=nan: expected finite numbers"),
    ],
)
def test_a_model_that_needs_what_is_lacking_is_refused(model_type: str, options: dict[str, Any], reason: str) -> None:
    found = check_supported(config_of(model_type, **options))
    assert any(reason in one for one in found), found


def test_no_weight_is_made_or_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: set[str] = set()
    post_init = PreTrainedModel.post_init

    def spy(model: PreTrainedModel) -> None:
        devices.update(parameter.device.type for parameter in model.parameters())
        post_init(model)

    monkeypatch.setattr(PreTrainedModel, "post_init", spy)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("weights were loaded"))
    assert check_supported(config_of("llama", num_hidden_layers=200, hidden_size=8192)) == []
    assert devices == {"meta"}


def test_other_threads_make_modules_while_a_model_is_probed() -> None:
    begun, probed, failed = Event(), Event(), list[Exception]()

    def wait(*_: object) -> None:
        if get_ident() == other.ident:
            begun.set()
            assert probed.wait(60)

    def make() -> None:
        try:
            torch.nn.Linear(1, 1)
        except RuntimeError as error:
            failed.append(error)

    other, hooks = Thread(target=make), [register_module_parameter_registration_hook(one) for one in (wait, wait)]
    try:
        other.start()
        assert begun.wait(60)
        probe_attention(config_of("llama", **SMALL), num_values=1e9)
    finally:
        probed.set()
        other.join()
        for hook in hooks:
            hook.remove()
    assert failed == []


def test_the_probe_finds_windows_cap_scale_and_sinks() -> None:
    gemma, reasons = probe_attention(config_of("gemma2", num_hidden_layers=4))
    assert gemma is not None and reasons == []
    assert gemma.windows == (4096, None, 4096, None)
    assert (gemma.layer.logits_soft_cap, gemma.layer.sm_scale, gemma.layer.sinks) == (50.0, 256**-0.5, False)
    gpt_oss, _ = probe_attention(config_of("gpt_oss", num_hidden_layers=2, num_local_experts=4))
    assert gpt_oss is not None and gpt_oss.layer.sinks and gpt_oss.windows == (128, None)
    mistral, _ = probe_attention(config_of("mistral", num_hidden_layers=2))
    assert mistral is not None and mistral.windows == (4096, 4096) and mistral.layer.sliding_window is None
    layer = mistral.layer
    assert (layer.num_qo_heads, layer.num_kv_heads, layer.head_dim, layer.head_dim_v) == (32, 8, 128, 128)


def test_the_probe_leaves_the_configuration_alone() -> None:
    config = config_of("llama", **SMALL)
    before = config.to_dict(), config._attn_implementation
    probe_attention(config)
    assert (config.to_dict(), config._attn_implementation) == before


def test_the_longest_sequence_is_the_one_whose_rotation_stays() -> None:
    assert max_positions(LlamaConfig(max_position_embeddings=77)) == 77
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    lengths = {"max_position_embeddings": 500, "original_max_position_embeddings": 50}
    assert max_positions(config_of("phi3", **lengths, rope_parameters=rope)) == 50
    with pytest.raises(ValueError, match="max_position_embeddings"):
        max_positions(PretrainedConfig())


def attend(**options: Any) -> torch.Tensor:
    module = torch.nn.Module()
    vars(module).update(layer_idx=0, is_causal=options.pop("module_is_causal", True))
    states = torch.zeros(1, 2, 3, 4)
    mask = options.pop("attention_mask", None)
    step = options.pop("trunk_step", AttentionProbe())
    return trunk_attention(module, states, states, states, mask, step, **options)[0]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"attention_mask": torch.zeros(1, 1, 3, 3)}, "builds its own attention mask"),
        ({"dropout": 0.1}, "dropout"),
        ({"is_causal": False}, "bidirectional"),
        ({"module_is_causal": False}, "bidirectional"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"trunk_step": None}, "trunk_step"),
    ],
)
def test_what_the_attention_does_not_know_is_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        attend(**options)


def test_what_changes_nothing_passes() -> None:
    out = attend(position_ids=torch.zeros(1, 3), use_cache=False, dropout=0.0, is_causal=True, position_bias=None)
    assert out.shape == (1, 3, 2, 4)


def test_a_model_whose_steps_fail_is_refused_when_it_is_loaded(
    tiny_model: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise AttributeError("no such weight")

    monkeypatch.setattr(PackedLinear, "forward", broken)
    path = tiny_model("llama").path
    with pytest.raises(
        ValueError, match=r"a step of two tokens fails on cpu \(AttributeError: no such weight\)"
    ) as error:
        LLM(path, num_pages=8)
    assert str(error.value).startswith(f"model={str(path)!r}: ")


def test_a_model_that_reads_its_layers_weights_runs(tmp_path: Path) -> None:
    options = {**SMALL, "num_hidden_layers": 2, "intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 16}
    config = config_of("hunyuan_v1_moe", **options, vocab_size=64, num_experts=4, moe_topk=2, eos_token_id=None)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path)
    answer = LLM(tmp_path, num_pages=8).generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=4))
    expected = model.generate(torch.tensor([[1, 2, 3]]), do_sample=False, max_new_tokens=4, pad_token_id=0)
    assert answer[0].outputs[0].token_ids == expected[0, 3:].tolist()


TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}


def assert_equal_to_generate(config: PretrainedConfig, path: Path, length: int = 40, num_tokens: int = 8) -> None:
    """The engine's greedy answer is transformers' own, for sharp random weights."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("q_proj", "k_proj", "v_proj", "lm_head", "embed_tokens")):
                parameter.mul_(4.0)
    model.save_pretrained(path)
    prompt = torch.randint(1, 64, (length,), generator=torch.Generator().manual_seed(1))[None]
    expected = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=num_tokens
    )
    llm = LLM(path, num_pages=16)
    answer = llm.generate([prompt[0].tolist()], SamplingParams(temperature=0, max_tokens=num_tokens))
    assert answer[0].outputs[0].token_ids == expected[0, length:].tolist()


def test_a_window_that_only_the_mask_knows_is_found(tmp_path: Path) -> None:
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "use_sliding_window": True}
    config = config_of("qwen2_moe", **TINY, **moe, sliding_window=8, max_window_layers=1)
    geometry, reasons = probe_attention(config)
    assert reasons == [] and geometry is not None
    windows = tuple(8 if kind == "sliding_attention" else None for kind in config.layer_types)
    assert geometry.windows == windows and len(set(windows)) == 2
    assert_equal_to_generate(config, tmp_path)


def masked(mask_function: Callable[..., torch.Tensor], local_size: int | None = None) -> torch.Tensor:
    mask = request_mask(mask_function=mask_function, device="meta", local_size=local_size)
    assert mask is not None
    return mask


@pytest.mark.parametrize("window", [1, 2, 3, 24, 4096])
def test_a_causal_window_is_read_from_its_mask(window: int) -> None:
    assert window_of(masked(masking_utils.sliding_window_causal_mask_function(window), window)) == window
    assert window_of(masked(masking_utils.causal_mask_function)) is None


MASKS: dict[str, Callable[[], torch.Tensor]] = {
    "chunked": lambda: masked(masking_utils.chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.int64)), 8),
    "chunks of a batch": lambda: masked(
        masking_utils.chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.int64, device="meta")), 8
    ),
    "bidirectional": lambda: masked(masking_utils.bidirectional_mask_function),
    "bidirectional window": lambda: masked(masking_utils.sliding_window_bidirectional_mask_function(8), 8),
    "another window": lambda: masked(masking_utils.sliding_window_causal_mask_function(8), 9),
    "no window": lambda: masked(masking_utils.causal_mask_function, 8),
    "some block": lambda: masked(
        masking_utils.or_masks(
            masking_utils.causal_mask_function,
            masking_utils.blockwise_overlay(torch.zeros(1, 4, dtype=torch.int64, device="meta")),
        )
    ),
    "of the model": lambda: masked(masking_utils.causal_mask_function)[:, :, :, :1],
}


@pytest.mark.parametrize("kind", MASKS)
def test_any_other_mask_is_refused(kind: str) -> None:
    with pytest.raises(UnsupportedAttention, match="bidirectional" if "bidirectional" in kind else "mask"):
        window_of(MASKS[kind]())


def test_there_is_no_mask_outside_the_meta_device() -> None:
    assert request_mask(mask_function=masking_utils.causal_mask_function, device="cpu", local_size=8) is None


def test_granite_with_attention_layers_only_runs(tmp_path: Path) -> None:
    mamba = {"mamba_n_heads": 8, "mamba_d_head": 16, "layer_types": ["attention"] * 4}
    experts = {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 64}
    assert_equal_to_generate(config_of("granitemoehybrid", **TINY, **mamba, **experts), tmp_path)


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("phi3", {"partial_rotary_factor": 0.75}),
        ("hunyuan_v1_dense", {"use_qk_norm": True, "head_dim": 16}),
        ("apertus", {"qk_norm": True}),
        ("llama", {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e3, "partial_rotary_factor": 0.5}}),
    ],
)
def test_a_field_that_the_models_code_obeys_though_no_configuration_has_it(
    tmp_path: Path, model_type: str, options: dict[str, Any]
) -> None:
    assert_equal_to_generate(config_of(model_type, **TINY, **options), tmp_path)


def test_granite_with_a_shared_expert_runs(tmp_path: Path) -> None:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 64}
    assert_equal_to_generate(config_of("granitemoeshared", **TINY, **experts), tmp_path)


@pytest.mark.parametrize("model_type", ["llama", "hunyuan_v1_dense"])
def test_dynamic_rope_runs_up_to_the_length_from_which_it_changes(tmp_path: Path, model_type: str) -> None:
    alpha = {"alpha": 100.0} if model_type == "hunyuan_v1_dense" else {}
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0, **alpha}
    config = config_of(model_type, **TINY, head_dim=16, rope_parameters=rope)
    assert max_positions(config) == 64
    assert_equal_to_generate(config, tmp_path, length=56)


def test_code_that_needs_values_is_refused_in_plain_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaModel, "forward", lambda *_, **__: torch.zeros(1).item())
    assert check_supported(config_of("llama", **SMALL)) == [
        "its code decides by the values of tensors, so its attention cannot be found before its weights are loaded"
    ]


def test_a_cache_that_forgets_what_the_mask_shows_is_refused() -> None:
    found = check_supported(config_of("moshi", **SMALL, sliding_window=8))
    assert found == ["its cache keeps 8 tokens, but its attention mask shows every earlier token"]


def test_several_text_models_in_one_are_refused() -> None:
    assert any("multimodal" in reason for reason in check_supported(config_of("musicgen")))
