"""Greedy answers equal transformers' own on each prompt alone: policies, chunks, preemption, prefix hits, models."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from trunkattn.engine import LLM, RequestOutput, SamplingParams

NUM_TOKENS = 16
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
POLICIES = ("per_query", "relay", "cascade", "fasttree", "pat", "optimal", "auto")
SCENARIOS: dict[str, dict[str, Any]] = {
    "whole prompts": {},
    "chunks": {"max_num_batched_tokens": 13, "max_num_seqs": 13},
    "preemption": {"num_pages": 34, "max_num_batched_tokens": 50},
    "few slots": {"max_num_seqs": 3, "page_size": 16},
    "prefill first": {"scheduler_policy": "prefill_first", "max_num_batched_tokens": 40},
    "prefill first, preemption": {"scheduler_policy": "prefill_first", "num_pages": 34},
    "nothing cached": {"enable_prefix_caching": False},
}

AssertGreedy = Callable[[Any, Sequence[RequestOutput], int], None]


def prompts() -> list[list[int]]:
    """A tree of prefixes, equal prompts, prompts that are prefixes of others, and strangers."""
    generator = torch.Generator().manual_seed(5)

    def tokens(count: int) -> list[int]:
        return torch.randint(1, 256, (count,), generator=generator).tolist()

    trunk, branch = tokens(41), tokens(20)
    tree = [[*trunk, *tokens(3)], [*trunk, *branch, *tokens(1)], [*trunk, *branch, *tokens(9)], trunk, trunk[:32]]
    return [*tree, tree[0], tokens(1), tokens(70)]


def run_twice(llm: LLM) -> list[RequestOutput]:
    """The second time, the prefixes are cached."""
    outputs = llm.generate(prompts(), GREEDY) + llm.generate(prompts(), GREEDY)
    assert llm.engine.usage().pages_held == 0
    assert len({token for output in outputs for token in output.outputs[0].token_ids}) > 30, "the answers are dull"
    return outputs


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
