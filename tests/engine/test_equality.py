"""Greedy answers equal transformers' own on each prompt alone: policies, chunks, preemption, prefix hits, models."""

from collections.abc import Callable
from typing import Any

import pytest

from trunkattn.engine import LLM, SamplingParams

from .scenarios import GREEDY, NUM_TOKENS, SCENARIOS, AssertGreedy, prompts, run_twice

POLICIES = ("per_query", "relay", "cascade", "fasttree", "pat", "optimal", "auto")


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_answers_as_transformers_does_in_every_scenario(
    tiny_model: Callable[[str], Any], assert_greedy: AssertGreedy, policy: str, scenario: str
) -> None:
    model = tiny_model("llama")
    options = {"page_size": 4, "num_pages": 300, "max_num_seqs": 16, **SCENARIOS[scenario]}
    llm = LLM(model.path, policy=policy, **options)
    outputs = run_twice(llm)
    assert_greedy(model, outputs, NUM_TOKENS)
    assert (llm.stats.preemptions > 0) == ("preemption" in scenario)
    caching = options.get("enable_prefix_caching", True)
    assert all((output.num_cached_tokens > 0) == caching for output in outputs[8:13])
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)


@pytest.mark.parametrize("name", ["qwen3", "mistral", "gemma2", "gpt_oss"])
def test_models_with_windows_soft_caps_and_sinks_answer_as_transformers_does(
    tiny_model: Callable[[str], Any], assert_greedy: AssertGreedy, name: str
) -> None:
    model = tiny_model(name)
    llm = LLM(model.path, page_size=4, num_pages=34, max_num_seqs=16, max_num_batched_tokens=20)
    assert_greedy(model, run_twice(llm), NUM_TOKENS)
    assert llm.stats.preemptions > 0


def test_several_greedy_answers_are_equal(tiny_model: Callable[[str], Any], assert_greedy: AssertGreedy) -> None:
    model = tiny_model("llama")
    llm = LLM(model.path, page_size=4, num_pages=40, max_num_seqs=5)
    outputs = llm.generate(prompts(), SamplingParams(temperature=0, max_tokens=NUM_TOKENS, n=3))
    assert_greedy(model, outputs, NUM_TOKENS)
    assert all(len(output.outputs) == 3 for output in outputs) and llm.engine.usage().pages_held == 0


def test_shared_prefixes_are_read_once(tiny_model: Callable[[str], Any]) -> None:
    trunk = list(range(1, 129))
    reads = {}
    for policy in ("per_query", "cascade"):
        llm = LLM(tiny_model("llama").path, num_pages=300, policy=policy)
        llm.generate([[*trunk, 200 + i] for i in range(8)], GREEDY)
        reads[policy] = llm.stats.kv_tokens_read
        assert llm.stats.peak_usage is not None
        assert llm.stats.peak_usage.pages_held == 8 + 8 and llm.stats.peak_usage.unshared_pages == 8 * 9
    assert reads["cascade"] < 0.4 * reads["per_query"]
