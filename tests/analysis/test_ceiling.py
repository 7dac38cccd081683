"""The hit rate that no cache exceeds, against a count by hand and against the figures that are published of a trace."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkattn.analysis.ceiling import ceiling_of
from trunkattn.analysis.reading.log import read_log
from trunkattn.analysis.reading.tokens import chained
from trunkattn.analysis.records import Ceiling, LoggedRequest

REAL_TRACE = Path(__file__).parents[4] / "shared" / "traces" / "conversation_trace.jsonl"


def requests_of(prompts: list[tuple[list[int], int]], block_size: int = 4) -> list[LoggedRequest]:
    """Prompts as the hashes of their blocks, and by how many tokens their last block is short."""
    return [
        LoggedRequest(line, 0.0, block_size * len(ids) - short, 1, chained(np.array(ids, np.int64)), block_size)
        for line, (ids, short) in enumerate(prompts, start=1)
    ]


def counted(requests: list[LoggedRequest]) -> list[int]:
    """Tokens of each prompt that a cache without an end has when it comes, with a set of all blocks."""
    seen: set[int] = set()
    found = []
    for request in requests:
        known = 0
        while known < len(request.blocks) and int(request.blocks[known]) in seen:
            known += 1
        found.append(min(known * request.block_size, request.num_prompt_tokens))
        seen.update(request.blocks.tolist())
    return found


@given(st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(0, 3)), max_size=12))
def test_each_prompt_finds_what_an_earlier_one_begins_with(prompts: list[tuple[list[int], int]]) -> None:
    requests = requests_of(prompts)
    found, lengths = counted(requests), [request.num_prompt_tokens for request in requests]
    half = len(requests) // 2
    assert ceiling_of(requests) == Ceiling(
        sum(found) / max(1, sum(lengths)), sum(found[half:]) / max(1, sum(lengths[half:]))
    )


def test_a_block_in_which_a_prompt_ends_counts_with_its_tokens() -> None:
    assert ceiling_of(requests_of([([1, 2], 3), ([1, 2], 3)])) == Ceiling(5 / 10, 1.0)
    assert ceiling_of([]) == Ceiling(0.0, 0.0)


@pytest.mark.skipif(not REAL_TRACE.is_file(), reason="the published trace is not here")
def test_the_published_ceilings_of_the_conversation_trace() -> None:
    """37.4 % of all 12,031 requests, and 39.8 % of those that come when the cache is full of the earlier half, as
    llmtrafficlens 0.6 and 0.12 report."""
    requests = read_log(REAL_TRACE).requests
    found = ceiling_of(requests)
    assert (len(requests), round(found.hit_rate, 3), round(found.later_hit_rate, 3)) == (12_031, 0.374, 0.398)
