"""Greedy tokens with TrunkAttention equal those of vLLM's own back end, in one process with the same options."""

from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from vllm import SamplingParams

from trunkattn.integrations.vllm import versions

from ..broken_merge import break_merge
from .engine import MAX_TOKENS, NUM_PROMPTS, Run, equal, generate

RELEASE = versions.TESTED.parse(versions.installed()) or versions.TESTED.newest
# Up to 0.30 vLLM's own back end fails at sinks in float32.
MODELS = ("llama", "qwen3", "gemma2", "gpt_oss") if RELEASE >= (0, 31) else ("llama", "qwen3", "gemma2")
CHUNKED = MappingProxyType({"max_num_batched_tokens": 64, "enable_chunked_prefill": True})
FEW_TOKENS = MappingProxyType({"llama": 1280, "qwen3": 1280, "gemma2": 2560, "gpt_oss": 2560})  # windows are a group


def ours(folder: Path, block_size: int, **options: Any) -> Run:
    run = generate(folder, block_size=block_size, attention_backend="CUSTOM", **options)
    assert run.backends == {"TrunkAttentionBackend"}
    assert run.impls == {"TrunkAttentionImpl"}
    assert run.block_sizes == {block_size}
    assert run.steps > 0
    return run


def assert_equal(run: Run, expected: Run) -> None:
    for ours_round, stock_round in zip(run.tokens, expected.tokens, strict=True):
        assert equal(ours_round, stock_round) == len(stock_round)


def assert_has_power(run: Run) -> None:
    """The tokens depend on the context: few are repeated."""
    distinct = [len(set(sequence)) for sequence in run.tokens[0]]
    assert sum(distinct) > NUM_PROMPTS * MAX_TOKENS // 2, distinct


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("name", MODELS)
def test_prefix_caching(name: str, block_size: int, model: Callable[[str], Path], stock: Callable[..., Run]) -> None:
    expected, run = stock(name), ours(model(name), block_size)
    assert len(expected.tokens[0]) == NUM_PROMPTS
    assert_has_power(expected)
    assert_equal(run, expected)
    assert run.cached_tokens > 4000
    assert run.kv_bytes_saved > 0
    assert run.specs == expected.specs


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("name", MODELS)
def test_chunked_prefill(name: str, block_size: int, model: Callable[[str], Path], stock: Callable[..., Run]) -> None:
    run = ours(model(name), block_size, **CHUNKED)
    assert_equal(run, stock(name, **CHUNKED))
    assert run.steps > 100  # so many chunks


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("name", MODELS)
def test_preemption(name: str, block_size: int, model: Callable[[str], Path], stock: Callable[..., Run]) -> None:
    run = ours(model(name), block_size, num_gpu_blocks_override=FEW_TOKENS[name] // block_size)
    assert_equal(run, stock(name, num_gpu_blocks_override=FEW_TOKENS[name] // 32))
    assert run.preemptions > 0


@pytest.mark.parametrize("name", MODELS[2:])
def test_windows_and_full_layers_in_one_group(
    name: str, model: Callable[[str], Path], stock: Callable[..., Run]
) -> None:
    run = ours(model(name), 16, disable_hybrid_kv_cache_manager=True)
    assert run.specs == {"FullAttentionSpec"}
    assert_equal(run, stock(name))


@pytest.mark.parametrize("one_group", [False, True])
def test_attention_within_chunks(one_group: bool, model: Callable[[str], Path], stock: Callable[..., Run]) -> None:
    """Every other layer sees the whole request. vLLM puts both kinds into one group for an EAGLE, or if told to."""
    expected = stock("llama4", **CHUNKED)
    assert_has_power(expected)
    folder, options = model("llama4"), {**CHUNKED, "disable_hybrid_kv_cache_manager": one_group}
    run = generate(folder, block_size=16, attention_backend="CUSTOM", **options)
    assert run.backends == {"TrunkAttentionBackend", "ChunkedLocalAttention_64_TrunkAttentionBackend"}
    assert run.specs == {"FullAttentionSpec"} | (set() if one_group else {"ChunkedLocalAttentionSpec"})
    assert_equal(run, expected)
    assert run.kv_bytes_saved > 0


def test_layers_that_read_the_cache_of_another(model: Callable[[str], Path], stock: Callable[..., Run]) -> None:
    """They have no keys and values of their own. Layers with a window have narrower heads than those without."""
    expected = stock("gemma4")
    assert_has_power(expected)
    run = generate(model("gemma4"), block_size=16, attention_backend="CUSTOM")
    assert run.impls == {"TrunkAttentionImpl"}
    assert_equal(run, expected)
    assert run.kv_bytes_saved > 0


def test_a_compiled_model(model: Callable[[str], Path], stock: Callable[..., Run]) -> None:
    assert_equal(ours(model("llama"), 16, enforce_eager=False), stock("llama"))


def test_several_samples_of_a_prompt(model: Callable[[str], Path]) -> None:
    sampling = SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=16, ignore_eos=True, detokenize=False)
    expected = generate(model("llama"), sampling, block_size=32)
    assert len(expected.tokens[0]) == 3 * NUM_PROMPTS
    assert len({tuple(sequence) for sequence in expected.tokens[0]}) > NUM_PROMPTS
    assert_equal(ours(model("llama"), 16, sampling=sampling), expected)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_drafts_that_are_mostly_rejected(name: str, model: Callable[[str], Path], stock: Callable[..., Run]) -> None:
    """Several query tokens a request, whose keys and values are overwritten later."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    run = ours(model(name), 16, speculative_config=drafts)
    assert run.drafts > 500
    assert run.accepted_drafts < run.drafts // 2
    assert_equal(run, stock(name))


def test_drafts_that_are_accepted(model: Callable[[str], Path], stock: Callable[..., Run]) -> None:
    """The model drafts for itself; the layers that draft are ours too."""
    drafts = {"method": "draft_model", "model": str(model("llama")), "num_speculative_tokens": 3}
    run = ours(model("llama"), 16, speculative_config={**drafts, "attention_backend": "CUSTOM"})
    assert run.drafts > 500
    assert run.accepted_drafts == run.drafts
    assert_equal(run, stock("llama"))


def test_a_draft_model_of_ours_beside_vllms_own_attention(
    model: Callable[[str], Path], stock: Callable[..., Run]
) -> None:
    """vLLM asks for the model's steps too, which none of the layers that draft runs: they are neither planned nor
    counted."""
    drafts = {"method": "draft_model", "model": str(model("llama")), "num_speculative_tokens": 3}
    run = generate(model("llama"), block_size=32, speculative_config={**drafts, "attention_backend": "CUSTOM"})
    assert run.impls == {"CPUAttentionBackendImpl", "TrunkAttentionImpl"}
    assert run.accepted_drafts == run.drafts > 500
    assert run.steps == 0
    assert_equal(run, stock("llama"))


def test_a_draft_model_with_windows_and_full_layers(model: Callable[[str], Path], stock: Callable[..., Run]) -> None:
    """vLLM makes the builder for the first layer that drafts, and adds the others to its list."""
    drafts = {"method": "draft_model", "model": str(model("gemma2")), "num_speculative_tokens": 3}
    options = {"speculative_config": {**drafts, "attention_backend": "CUSTOM"}, "disable_hybrid_kv_cache_manager": True}
    run = ours(model("gemma2"), 16, **options)
    assert run.accepted_drafts == run.drafts > 500
    assert_equal(run, stock("gemma2"))


def test_drafts_of_an_eagle(model: Callable[[str], Path], stock: Callable[..., Run]) -> None:
    """Several tokens a draft, each from the hidden state before it; the layer that drafts is ours too."""
    drafts = {"method": "eagle", "model": str(model("eagle")), "num_speculative_tokens": 3}
    run = ours(model("llama"), 16, speculative_config={**drafts, "attention_backend": "CUSTOM"})
    assert run.drafts > 500
    assert_equal(run, stock("llama"))


@pytest.mark.parametrize("name", MODELS)
def test_a_broken_merge_changes_tokens(
    name: str, model: Callable[[str], Path], stock: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_merge(monkeypatch)
    run = ours(model(name), 16)
    assert equal(run.tokens[0], stock(name).tokens[0]) < NUM_PROMPTS // 2
