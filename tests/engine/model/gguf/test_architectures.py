"""Files of every architecture that runs here give the answers of the model that they were made from."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    NemotronConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Starcoder2Config,
)

from trunkattn.engine import LLM, SamplingParams
from trunkattn.engine.model.inspection import inspect_model

VOCAB, WIDTH, INNER, HEADS, KV_HEADS, CONTEXT = 300, 64, 96, 4, 2, 128
PROMPT = list(range(40, 70))
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Case:
    """A model whose values differ from its type's defaults, and the keys that say so in a file."""

    architecture: str
    config: PretrainedConfig
    keys: Mapping[str, Any] = field(default_factory=dict)


RMS = {"attention.layer_norm_rms_epsilon": 1e-3}
EPS = {"attention.layer_norm_epsilon": 1e-3}
HEADS_OF_32 = {"attention.key_length": 32, "attention.value_length": 32}
GEMMA = {**HEADS_OF_32, "attention.sliding_window": 12}
MOE = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
FEW = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
WIDE = {"block_count": 46}  # as many layers as the Gemma 2 whose scale is not 1 / sqrt(head_dim)
CASES = {
    "llama": Case("llama", LlamaConfig(**COMMON, rms_norm_eps=1e-3, head_dim=32), {**RMS, **HEADS_OF_32}),
    "llama, biases": Case("llama", LlamaConfig(**COMMON, rms_norm_eps=1e-3, attention_bias=True, mlp_bias=True), RMS),
    "qwen2": Case("qwen2", Qwen2Config(**COMMON, rms_norm_eps=1e-3), RMS),
    "qwen3": Case("qwen3", Qwen3Config(**COMMON, head_dim=32, rms_norm_eps=1e-3), {**RMS, **HEADS_OF_32}),
    "phi3": Case(
        "phi3", Phi3Config(**COMMON, sliding_window=12, rms_norm_eps=1e-3), {**RMS, "attention.sliding_window": 12}
    ),
    "gemma2": Case(
        "gemma2",
        Gemma2Config(
            **COMMON,
            head_dim=32,
            query_pre_attn_scalar=32,
            sliding_window=12,
            attn_logit_softcapping=9.0,
            final_logit_softcapping=7.0,
            rms_norm_eps=1e-3,
        ),
        {**RMS, **GEMMA, "attn_logit_softcapping": 9.0, "final_logit_softcapping": 7.0},
    ),
    "gemma2, wide": Case(
        "gemma2",
        Gemma2Config(
            **COMMON | {"num_hidden_layers": 46}, head_dim=32, query_pre_attn_scalar=16, sliding_window=12,
            rms_norm_eps=1e-3,
        ),
        {**RMS, **GEMMA, **WIDE, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3": Case(
        "gemma3",
        Gemma3TextConfig(**COMMON, head_dim=32, query_pre_attn_scalar=32, sliding_window=12, rms_norm_eps=1e-3),
        {**RMS, **GEMMA, "rope.freq_base": 1_000_000.0},
    ),
    "starcoder2": Case(
        "starcoder2", Starcoder2Config(**COMMON, norm_epsilon=1e-3, rope_theta=500.0), {**EPS, "rope.freq_base": 500.0}
    ),
    "gpt2": Case(
        "gpt2",
        GPT2Config(
            vocab_size=VOCAB, n_embd=WIDTH, n_layer=2, n_head=HEADS, n_positions=CONTEXT, n_inner=INNER,
            layer_norm_epsilon=1e-3, bos_token_id=1, eos_token_id=2,
        ),
        EPS,
    ),
    "qwen2moe": Case(
        "qwen2moe",
        Qwen2MoeConfig(**COMMON, **FEW, shared_expert_intermediate_size=48, rms_norm_eps=1e-3),
        {**RMS, **MOE, "expert_shared_feed_forward_length": 48},
    ),
    "qwen3moe": Case(
        "qwen3moe",
        Qwen3MoeConfig(**COMMON, **FEW, head_dim=32, norm_topk_prob=True, rms_norm_eps=1e-3),
        {**RMS, **MOE, **HEADS_OF_32},
    ),
}  # fmt: skip


def stored(architecture: str, name: str, weight: np.ndarray) -> dict[str, np.ndarray]:
    """A weight as llama.cpp's converter stores it; the name is transformers', of experts the file's."""
    if architecture.startswith("gemma") and "norm" in name:
        return {name: weight + 1}
    if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
        heads = HEADS if "q_proj" in name else KV_HEADS
        return {name: weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)}
    if architecture == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        return {name: weight.T}
    if name.endswith("shared_expert_gate.weight"):
        return {name: weight[0]}
    if "mlp.experts." in name:
        block, half = f"blk.{name.split('.')[2]}", weight.shape[1] // 2
        if name.endswith("down_proj"):
            return {f"{block}.ffn_down_exps.weight": weight}
        return {f"{block}.ffn_gate_exps.weight": weight[:, :half], f"{block}.ffn_up_exps.weight": weight[:, half:]}
    return {name: weight}


def write(path: Path, case: Case) -> Any:
    """Writes a random model's file; returns the model."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(case.config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name and "ln_" not in name:
                parameter.normal_(std=0.3)
    writer = gguf.GGUFWriter(path, case.architecture)
    keys = {"context_length": CONTEXT, "embedding_length": WIDTH, "block_count": 2, "feed_forward_length": INNER}
    keys |= {"attention.head_count": HEADS} | ({} if case.architecture == "gpt2" else {"attention.head_count_kv": 2})
    for key, value in {**keys, **case.keys}.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        if value is not None:
            add(f"{case.architecture}.{key}", value)
    tokens = ["<pad>", "<bos>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    tokens += [f"<{number}>" for number in range(VOCAB - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * VOCAB)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == case.architecture)
    names = gguf.get_tensor_name_map(kind, case.config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and case.config.tie_word_embeddings:
            continue
        for mine, values in stored(case.architecture, name, weight.numpy()).items():
            theirs = mine if mine.startswith("blk.") else names.get_name(mine, try_suffixes=(".weight", ".bias"))
            writer.add_tensor(theirs, np.ascontiguousarray(values, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.mark.parametrize("name", CASES)
def test_a_file_answers_as_its_model(tmp_path: Path, name: str) -> None:
    path = tmp_path / "m.gguf"
    model = write(path, CASES[name])
    llm = LLM(path, num_pages=20)
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        expected = model(ids).logits[0].log_softmax(dim=-1)
    output = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))[0]
    assert output.prompt_logprobs is not None
    for place, entry in enumerate(output.prompt_logprobs[1:]):
        assert entry is not None
        assert entry[PROMPT[place + 1]].logprob == pytest.approx(expected[place, PROMPT[place + 1]].item(), abs=2e-3)
    assert output.outputs[0].token_ids == [int(expected[-1].argmax())]


# Half of each head is rotated; the model does not run here, whatever its file says.
NEMOTRON = Case("nemotron", NemotronConfig(**COMMON, norm_eps=1e-3), {**EPS, "rope.dimension_count": 8})
DECI = Case("deci", LlamaConfig(**COMMON), RMS)
BAD_KEYS: dict[str, tuple[str, dict[str, Any]]] = {
    r"general\.architecture='deci' names no model": ("deci", {}),
    r"gemma3\.rope\.dimension_count=16: expected 32": ("gemma3", {"rope.dimension_count": 16}),
    r"rope scaling \(gemma3\.rope\.scaling\.factor\)": ("gemma3", {"rope.scaling.factor": 8.0}),
    "attn_logit_softcapping=9.0, which its code does not apply": ("gemma3", {"attn_logit_softcapping": 9.0}),
    r"it has no key qwen2\.attention\.layer_norm_rms_epsilon or": ("qwen2", {"attention.layer_norm_rms_epsilon": None}),
    r"it has no key qwen2\.context_length": ("qwen2", {"context_length": None}),
    r"it has no key gpt2\.attention\.head_count": ("gpt2", {"attention.head_count": None}),
    r"it has no key qwen2moe\.expert_used_count": ("qwen2moe", {"expert_used_count": None}),
    r"it has no key gemma3\.attention\.sliding_window": ("gemma3", {"attention.sliding_window": None}),
    r"nemotron\.rope\.dimension_count=16: expected 8": ("nemotron", {"rope.dimension_count": None}),
}


@pytest.mark.parametrize("message", BAD_KEYS)
def test_a_key_that_nobody_follows_or_everybody_needs_is_named(tmp_path: Path, message: str) -> None:
    name, keys = BAD_KEYS[message]
    case = {**CASES, "nemotron": NEMOTRON, "deci": DECI}[name]
    write(tmp_path / "m.gguf", replace(case, keys={**case.keys, **keys}))
    with pytest.raises(ValueError, match=message):
        inspect_model(tmp_path / "m.gguf")
