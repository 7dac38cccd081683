"""Cases of equality.py: what each engine is asked to compute with either attention.

vLLM: context-parallel (two cards share each request; the model has one KV head, and so has one-kv-head, on one card);
invariant (VLLM_BATCH_INVARIANT=1: also whether each request has the same tokens and log-probabilities by itself);
bf16; mixed (long prompts that arrive in chunks while others decode, heads as in Llama-3-8B); fp8 (KV cache); drafts
(n-gram speculation, several query tokens); window (a sliding window, Mistral); soft-cap (Gemma2, windows in every other
layer); gpt-oss (sinks, windows in every other layer, heads of 64, experts) and gpt-oss-fp8; gemma-3 (heads of 256,
windows in five of six layers); group-7 (seven query heads per KV head, as in Qwen2.5-7B); tensor-parallel (two cards).

SGLang, in pages of 16 tokens: bf16; page-1 (pages of one token, SGLang's own size); fp8 (KV cache; beside SGLang's
Triton kernels, which keep queries in 16 bits as ours do); window (every other layer, Cohere2: SGLang runs Mistral
without its window); hybrid-pools (the same, with a KV pool of its own for the layers with a window); soft-cap (Gemma2,
with windows); chunked (prompts in chunks of 512 tokens); mixed (and decodes in the same step); n-samples (four of each
prompt); retraction (every eighth step throws requests back into the queue); tensor-parallel (two cards). bf16, page-1
and hybrid-pools also have SGLang's own back end for prompts with ours for decoding. GPT-OSS is left out: SGLang takes
only attention back ends that it knows by name for it. SGLang's own back end for CPUs ignores soft caps and misreads
window pools: these cases and fp8 are for GPUs.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from benchmarks.engines.interface import Case
from benchmarks.workloads.small_models import (
    COHERE,
    GEMMA,
    GEMMA_3,
    GPT_OSS,
    GROUP_7,
    HYBRID,
    LLAMA,
    MANY_HEADS,
    MISTRAL,
    ONE_KV_HEAD,
)

DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
FP8 = {"kv_cache_dtype": "fp8"}
# vLLM's other merge needs NCCL 2.29.7; with an older one it leaves results unmerged and does not say so.
TWO_SHARE = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "dcp_comm_backend": "a2a"}


def in_vllm(shape: Mapping[str, Any], options: Mapping[str, Any] = MappingProxyType({}), **more: Any) -> Case:
    """A case of vLLM."""
    return Case(shape, options, ("FLASH_ATTN", "CUSTOM"), **more)


VLLM_CASES: Final[Mapping[str, Case]] = MappingProxyType(
    {
        "bf16": in_vllm(LLAMA),
        "mixed": in_vllm(MANY_HEADS, {"max_num_batched_tokens": 2048}, long_prompts=True),
        "fp8": in_vllm(LLAMA, FP8, rounds_queries=True),
        "drafts": in_vllm(LLAMA, {"speculative_config": DRAFTS}),
        "window": in_vllm(MISTRAL),
        "soft-cap": in_vllm(GEMMA),
        "gpt-oss": in_vllm(GPT_OSS),
        "gpt-oss-fp8": in_vllm(GPT_OSS, FP8, rounds_queries=True),
        "gemma-3": in_vllm(GEMMA_3),
        "group-7": in_vllm(GROUP_7),
        "tensor-parallel": in_vllm(LLAMA, {"tensor_parallel_size": 2}, cards=2),
        "one-kv-head": in_vllm(ONE_KV_HEAD),
        "context-parallel": in_vllm(ONE_KV_HEAD, TWO_SHARE, cards=2),
        "invariant": in_vllm(LLAMA, environment={"VLLM_BATCH_INVARIANT": "1"}, alone=True),
    }
)
VLLM_PLAIN: Final = MappingProxyType({"llama": "bf16", "llama-one-kv-head": "one-kv-head", "gpt_oss": "gpt-oss"})

CHUNKS = {"chunked_prefill_size": 512}
RETRACTION = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "8"}


def in_sglang(
    shape: Mapping[str, Any], options: Mapping[str, Any] = MappingProxyType({}), page: int = 16, split: bool = False,
    first: str = "fa3", on_cpu: bool = True, **more: Any,
) -> Case:  # fmt: skip
    """A case of SGLang. page: tokens of a page. split: also with SGLang's own back end for prompts and ours for
    decoding. first: SGLang's own on a GPU. on_cpu: whether its own for CPUs is right."""

    def backends(own: str) -> tuple[str, ...]:
        return tuple(f"{name}@{page}" for name in (own, "trunk", *([f"{own}+trunk"] if split else [])))

    return Case(shape, options, backends(first), backends("torch_native") if on_cpu else (), **more)


SGLANG_CASES: Final[Mapping[str, Case]] = MappingProxyType(
    {
        "bf16": in_sglang(LLAMA, split=True),
        "page-1": in_sglang(LLAMA, page=1, split=True),
        "fp8": in_sglang(LLAMA, {"kv_cache_dtype": "fp8_e4m3"}, first="triton", on_cpu=False),
        "window": in_sglang(COHERE),
        "hybrid-pools": in_sglang(HYBRID, split=True, on_cpu=False),
        "soft-cap": in_sglang(GEMMA | {"hidden_act": GEMMA["hidden_activation"]}, on_cpu=False),
        "chunked": in_sglang(LLAMA, CHUNKS),
        "mixed": in_sglang(LLAMA, CHUNKS | {"enable_mixed_chunk": True}, mixes=True),
        "n-samples": in_sglang(LLAMA, samples=4),
        "retraction": in_sglang(LLAMA, environment=RETRACTION),
        "tensor-parallel": in_sglang(LLAMA, {"tp_size": 2}, cards=2, on_cpu=False),
    }
)
SGLANG_PLAIN: Final = MappingProxyType({"llama": "bf16", "cohere2": "window", "cohere2-hybrid": "window"})
