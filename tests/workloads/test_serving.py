"""Batches of conversations and agents: what they share, and what the agents are calibrated to."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.workloads import PagedBatch
from benchmarks.workloads.serving import (
    AgentRequest,
    agent_batch,
    agent_requests,
    batch_of_prefixes,
    conversation_batch,
    conversation_lengths,
    poisson_arrivals,
)


def pages(batch: PagedBatch, row: int) -> list[int]:
    return batch.block_table[row, : -(-int(batch.seq_lens[row]) // batch.page_size)].tolist()


def test_full_pages_of_equal_parts_are_shared_and_no_others() -> None:
    a, b = ("a", 40), ("b", 30)
    batch = batch_of_prefixes([[a, b], [a, b], [a], [a, ("c", 30)]], [5, 1, 3, 1], page_size=16)
    assert batch.seq_lens.tolist() == [75, 71, 43, 71]
    first, second, short, other = (pages(batch, row) for row in range(4))
    assert first[:4] == second[:4] and first[4] != second[4]  # 70 shared tokens fill four pages
    assert first[:2] == short[:2] == other[:2]  # 40 tokens fill two
    assert len({first[2], short[2], other[2]}) == 3
    assert batch.num_pages == len(set(first + second + short + other))


@given(
    st.lists(st.tuples(st.lists(st.tuples(st.sampled_from("ab"), st.just(9)), max_size=4), st.integers(1, 20))),
    st.integers(1, 20),
)
def test_a_page_stands_for_one_prefix(requests: list[tuple[list[tuple[str, int]], int]], page_size: int) -> None:
    batch = batch_of_prefixes([parts for parts, _ in requests], [own for _, own in requests], page_size)
    contents: dict[int, object] = {}
    for row, (parts, own) in enumerate(requests):
        tokens = [(name, i) for name, count in parts for i in range(count)] + [("own", row, i) for i in range(own)]
        assert batch.seq_lens[row] == len(tokens)
        for column, page in enumerate(pages(batch, row)):
            prefix = tuple(tokens[: (column + 1) * page_size])
            assert contents.setdefault(page, prefix) == prefix
    assert set(contents) == set(range(len(contents)))
    assert len(set(contents.values())) == len(contents), "equal prefixes have equal pages"


def test_a_conversation_has_three_shared_levels() -> None:
    batch = conversation_batch([300] * 200, 16, seed=0, num_languages=2, num_countries=3)
    assert set(batch.seq_lens) == {46 + 348 + 2123 + 300}
    assert len(set(batch.block_table[:, 0])) == 1
    assert len(set(batch.block_table[:, (46 + 348) // 16 - 1])) == 2
    assert len(set(batch.block_table[:, (46 + 348 + 2123) // 16 - 1])) == 6
    assert len(set(batch.block_table[:, -1])) == 200


def cached_tokens(requests: tuple[AgentRequest, ...]) -> int:
    """Input tokens that an unlimited prefix cache holds when they arrive."""
    known: set[tuple] = set()
    found = 0
    for request in requests:
        names: tuple = ()
        for name, tokens in request.prefix:
            names += (name,)
            found += tokens if names in known else 0
            known.add(names)
        known.add((*names, ("turn", request.session, request.turn)))  # what its next turn begins with
    return found


def test_agents_have_the_input_output_and_hit_rate_they_are_calibrated_to() -> None:
    requests = agent_requests(20_000, seed=0)
    inputs = np.array([request.input_tokens for request in requests])
    assert inputs.mean() == pytest.approx(8596, rel=0.03)
    assert np.mean([request.output_tokens for request in requests]) == pytest.approx(182, rel=0.03)
    assert cached_tokens(requests) / inputs.sum() == pytest.approx(0.59, abs=0.015)
    uses = np.sort(np.unique([request.tool for request in requests], return_counts=True)[1])[::-1]
    assert uses[0] > 1.5 * uses[1] > 2 * uses[3]  # Zipf


def test_an_agents_batch_holds_one_turn_of_a_session() -> None:
    batch = agent_batch(64, 16, seed=1)
    assert len(batch.seq_lens) == 64 and set(batch.query_lens) == {1}
    used = sum(len(pages(batch, row)) for row in range(64))
    assert batch.num_pages == len({page for row in range(64) for page in pages(batch, row)}) < used


@pytest.mark.parametrize("call", [lambda: agent_requests(0, 0), lambda: batch_of_prefixes([[]], [0], 16)])
def test_nothing_to_draw_is_refused(call: object) -> None:
    with pytest.raises(ValueError, match="=0: expected an integer of at least 1"):
        call()  # type: ignore[operator]


def test_conversations_are_as_long_as_those_of_the_trace() -> None:
    prompts, outputs = conversation_lengths(20_000, seed=0).T
    assert np.median(prompts) == pytest.approx(6909, rel=0.05)
    assert np.quantile(prompts, [0.25, 0.75]) == pytest.approx([2306, 15368], rel=0.2)
    assert outputs.mean() == pytest.approx(343, rel=0.03) and outputs.min() >= 1


def test_arrivals_are_a_poisson_process() -> None:
    arrivals = poisson_arrivals(20_000, rate=4.0, seed=0)
    gaps = np.diff(arrivals)
    assert arrivals[0] == 0 and gaps.min() > 0
    assert gaps.mean() == pytest.approx(0.25, rel=0.03) and gaps.std() == pytest.approx(0.25, rel=0.05)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match=r"rate=.*: expected a finite number above 0"):
        poisson_arrivals(3, rate, seed=0)
