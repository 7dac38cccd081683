"""Prompts that share prefixes, and options with which engines answer them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from trunkattn.engine import LLM, RequestOutput, SamplingParams

NUM_TOKENS = 16
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
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
