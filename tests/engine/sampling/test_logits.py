"""What sampling parameters do to logits, against transformers' own processors and the definitions."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
)

from trunkattn.engine.checked_request import RequestChecks
from trunkattn.engine.sampling.logits import LogitsRules, LogitsState, adjust_logits
from trunkattn.engine.sampling.sampler import (
    NO_TOKEN_LEFT,
    NOT_FINITE,
    Sampler,
    SampleSpec,
    _probabilities,
    token_logprobs,
)
from trunkattn.engine.sampling_params import SamplingParams
from trunkattn.engine.token_rules import ModelLimits, TokenRules

VOCAB = 200
PROMPT = [5, 7, 7, 9]
ANSWER = [9, 11, 11, 3]


def logits_of(rows: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def state_of(
    params: SamplingParams,
    answer: Sequence[int] = ANSWER,
    banned: LogitsRules | None = None,
) -> LogitsState:
    rules = banned or LogitsRules(allowed=np.array(params.allowed_token_ids or (), dtype=np.int64))
    return LogitsState(params, rules, [*PROMPT, *answer], len(PROMPT))


def adjusted(logits: torch.Tensor, *states: LogitsState) -> torch.Tensor:
    result = logits.clone()
    adjust_logits(result, states)
    return result


def by_transformers(processor: Any, token_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    return processor(torch.tensor([list(token_ids)]), logits.clone())


@settings(max_examples=25)
@given(
    penalty=st.floats(0.1, 3.0),
    tokens=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40),
    num_prompt_tokens=st.integers(1, 40),
    seed=st.integers(0, 9),
)
def test_repetition_penalty_is_transformers_own(
    penalty: float, tokens: list[int], num_prompt_tokens: int, seed: int
) -> None:
    logits = logits_of(1, seed)
    params = SamplingParams(repetition_penalty=penalty)
    state = LogitsState(params, LogitsRules(), tokens, min(num_prompt_tokens, len(tokens)))
    expected = by_transformers(RepetitionPenaltyLogitsProcessor(penalty), tokens, logits)
    assert torch.equal(adjusted(logits, state), expected)


@pytest.mark.parametrize(("presence", "frequency"), [(0.5, 0.0), (0.0, 1.25), (-2.0, 2.0), (0.3, -0.7)])
def test_presence_and_frequency_count_the_answer_alone(presence: float, frequency: float) -> None:
    logits = logits_of(1)
    expected = logits.clone()
    for token_id in set(ANSWER):
        expected[0, token_id] -= frequency * ANSWER.count(token_id)
        expected[0, token_id] -= presence
    state = state_of(SamplingParams(presence_penalty=presence, frequency_penalty=frequency))
    assert torch.equal(adjusted(logits, state), expected)


def test_counts_follow_the_answer() -> None:
    params, tokens = SamplingParams(frequency_penalty=1.0, repetition_penalty=1.3), [1, 2]
    state = LogitsState(params, LogitsRules(), tokens, 2)
    for token_id in (2, 8, 8):
        tokens.append(token_id)
        fresh = LogitsState(params, LogitsRules(), list(tokens), 2)
        assert torch.equal(adjusted(logits_of(1), state), adjusted(logits_of(1), fresh))
    assert [part.tolist() for part in state.token_counts()] == [[1, 2, 8], [0, 1, 2]]


def test_answers_share_the_tokens_of_their_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """To count a long prompt for each of many answers would hold up the step in which they begin."""
    limits, params = ModelLimits(VOCAB, 100), SamplingParams(n=3, repetition_penalty=1.3)
    checks = RequestChecks(limits, TokenRules(limits, None))
    prompts = [[5, 7, 7, 9], [8, 8]]
    first = checks.check(prompts[0], params, "prompt", None)
    both = [first, checks.check(prompts[1], params, "prompt", first.rules)]  # as `LLM` does for prompts in a row
    monkeypatch.setattr(np, "unique", None)
    for prompt, checked in zip(prompts, both, strict=True):
        state = LogitsState(params, checked.rules, [*prompt, 9, 11, 9], len(prompt))
        counts = dict(zip(*(part.tolist() for part in state.token_counts()), strict=True))
        assert counts == {**dict.fromkeys(prompt, 0), 9: 2, 11: 1}


@pytest.mark.parametrize("answer", [[], [4], [4, 6], [6, 4, 6], [4, 6, 8], [1, 4]])
def test_bad_words_are_transformers_own(answer: list[int]) -> None:
    words = [[4], [4, 6], [6, 4, 6], [4, 6, 8, 10], [2, 3]]
    for banned in (words[:1], words[1:3], words):
        state = state_of(SamplingParams(bad_words=["x"]), answer, LogitsRules(sequences=tuple(map(tuple, banned))))
        logits = logits_of(1)
        # vLLM looks for words in the answer alone; with a prompt before them transformers does too.
        expected = by_transformers(NoBadWordsLogitsProcessor(banned), [199, *answer], logits)
        assert torch.equal(adjusted(logits, state), expected)


@pytest.mark.parametrize("min_tokens", [0, 3, 4, 5, 9])
def test_min_tokens_is_transformers_own(min_tokens: int) -> None:
    ends = (3, 17)
    params = SamplingParams(min_tokens=min_tokens, logit_bias={1: 0.0})
    processor = MinNewTokensLengthLogitsProcessor(len(PROMPT), min_tokens, list(ends))
    expected = by_transformers(processor, [*PROMPT, *ANSWER], logits_of(1))
    assert torch.equal(adjusted(logits_of(1), state_of(params, banned=LogitsRules(ends=ends))), expected)


@settings(max_examples=25)
@given(min_p=st.floats(0.001, 1.0), temperature=st.floats(0.1, 3.0), seed=st.integers(0, 9))
def test_min_p_keeps_what_transformers_keeps(min_p: float, temperature: float, seed: int) -> None:
    logits = logits_of(2, seed)
    probs = _probabilities(logits, [SamplingParams(min_p=min_p, temperature=temperature), SamplingParams()])
    scaled = by_transformers(TemperatureLogitsWarper(temperature), [0], logits[:1])
    expected = by_transformers(MinPLogitsWarper(min_p), [0], scaled).softmax(dim=-1)
    # A token at the very edge may fall on either side: the maximum is subtracted here before the temperature.
    assert ((probs[:1] > 0) != (expected > 0)).sum() <= (min_p < 1)
    assert (probs[:1] - expected).abs().max() < 1e-3 + min_p * ((probs[:1] > 0) != (expected > 0)).any()
    assert torch.equal(probs[1], _probabilities(logits[1:], [SamplingParams()])[0])


def test_top_p_is_a_share_of_what_min_p_leaves() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.15, 0.1]]).log()
    probs = _probabilities(logits, [SamplingParams(min_p=0.4, top_p=0.6)])
    assert (probs[0] > 0).tolist() == [True, False, False, False], "0.5 of 0.75 reaches 0.6"


def test_bias_and_allowed_tokens_may_meet() -> None:
    logits = logits_of(3)
    bias = {4: -100.0, 9: 2.5}
    states = [
        state_of(SamplingParams(logit_bias=bias)),
        state_of(SamplingParams(allowed_token_ids=[1, 8])),
        state_of(SamplingParams(allowed_token_ids=[1, 8], logit_bias={8: 1.5, 5: 50})),
    ]
    result = adjusted(logits, *states)
    expected = logits[0].clone()
    expected[4] -= 100
    expected[9] += 2.5
    assert torch.equal(result[0], expected)
    assert result[1].isfinite().nonzero()[:, 0].tolist() == [1, 8] and torch.equal(result[1, [1, 8]], logits[1, [1, 8]])
    assert torch.equal(result[2, [1, 8]], logits[2, [1, 8]] + torch.tensor([0, 1.5])) and result[2, 5] == -torch.inf


class KeepEven(LogitsProcessor):
    def __call__(self, input_ids: Any, scores: Any) -> Any:
        assert input_ids.tolist() == [[*PROMPT, *ANSWER]] and scores.shape == (1, VOCAB)
        return scores.masked_fill(torch.arange(VOCAB) % 2 == 1, -torch.inf)


def by_two(output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    assert output_token_ids == ANSWER
    return logits * 2


def by_three(prompt_token_ids: list[int], output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    assert (prompt_token_ids, output_token_ids) == (PROMPT, ANSWER)
    logits += 1
    return logits


def test_processors_of_each_form_run_in_their_order() -> None:
    logits = logits_of(2)
    processors = [by_two, by_three, KeepEven(), LogitsProcessorList([KeepEven()])]
    result = adjusted(logits, state_of(SamplingParams(logits_processors=processors)), state_of(SamplingParams()))
    expected = (logits[0] * 2 + 1).masked_fill(torch.arange(VOCAB) % 2 == 1, -torch.inf)
    assert torch.equal(result[0], expected) and torch.equal(result[1], logits[1])


def test_processors_come_after_the_bias_and_before_the_penalties() -> None:
    params = SamplingParams(logits_processors=[by_two], logit_bias={9: 1.0}, presence_penalty=0.5)
    logits = logits_of(1)
    assert adjusted(logits, state_of(params))[0, 9] == (logits[0, 9] + 1) * 2 - 0.5


def test_one_row_does_not_touch_another() -> None:
    states = [
        state_of(SamplingParams(repetition_penalty=1.5), [1, 2, 3]),
        state_of(SamplingParams(logit_bias={3: 4.0}), []),
        state_of(SamplingParams(presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=0.7)),
        state_of(SamplingParams(min_tokens=9), banned=LogitsRules(ends=(1,))),
        state_of(SamplingParams(allowed_token_ids=range(0, 50, 7))),
    ]
    logits = logits_of(len(states))
    together = adjusted(logits, *states)
    for row, state in enumerate(states):
        assert torch.equal(adjusted(logits[row : row + 1], state)[0], together[row])


def test_sampling_uses_the_adjusted_logits() -> None:
    logits = logits_of(4)
    greedy = SamplingParams(temperature=0, logit_bias={42: 100.0})
    drawn = SamplingParams(seed=1, allowed_token_ids=[6])
    specs = [
        SampleSpec(SamplingParams(temperature=0), 0, 0),
        SampleSpec(greedy, 0, 0, state_of(greedy)),
        SampleSpec(drawn, 0, 0, state_of(drawn)),
        SampleSpec(SamplingParams(seed=3), 0, 0),
    ]
    before = logits.clone()
    token_ids = Sampler().sample(logits, specs)
    assert token_ids[:3] == [logits[0].argmax().item(), 42, 6]
    assert token_ids[3] == Sampler().sample(logits[3:], specs[3:])[0]
    assert torch.equal(logits, before)


SHARED_ROWS = (
    {"temperature": 0, "n": 1},
    {"temperature": 0.7, "top_k": 40, "logprobs": 5},
    {"seed": 3, "min_p": 0.02, "logprobs": 0},
    {"top_p": 0.8, "logit_bias": {42: 2.5}, "logprobs": 3},
    {"temperature": 0, "repetition_penalty": 1.5, "logprobs": 2},
    {"allowed_token_ids": range(0, 50, 7), "logprobs": 60},
)


@given(
    kinds=st.lists(st.integers(0, len(SHARED_ROWS) - 1), min_size=1, max_size=5),
    counts=st.lists(st.integers(1, 6), min_size=5, max_size=5),
    order=st.randoms(use_true_random=False),
)
def test_answers_that_share_a_row_get_what_copies_of_it_would_give(
    kinds: list[int], counts: list[int], order: Any
) -> None:
    logits = logits_of(len(kinds))
    drawn = [(row, index) for row in range(len(kinds)) for index in range(counts[row])]
    order.shuffle(drawn)
    rows = [row for row, _ in drawn]
    params = [SamplingParams(**SHARED_ROWS[kind]) for kind in kinds]  # type: ignore[arg-type]

    def specs(share: bool) -> list[SampleSpec]:
        states = [state_of(params[row], [1, 2, 3]) for row in rows]
        where = rows if share else [None] * len(rows)
        return [
            SampleSpec(params[row], index, 0, state, place)
            for (row, index), state, place in zip(drawn, states, where, strict=True)
        ]

    before = logits.clone()
    token_ids = Sampler(5).sample(logits, specs(True))
    assert torch.equal(logits, before)
    assert token_ids == Sampler(5).sample(logits[rows], specs(False))
    together = token_logprobs(logits, specs(True), token_ids)
    assert together == token_logprobs(logits[rows], specs(False), token_ids)


def test_an_error_of_a_shared_row_is_that_of_all_its_answers() -> None:
    class Broken:
        def allowed(self, output_token_ids: list[int]) -> Any:
            raise ValueError("no way on")

    states = [state_of(SamplingParams()) for _ in range(4)]
    for state in states[:3]:
        state.grammar = Broken()  # type: ignore[assignment]
    rows = [0, 0, 0, 1]
    specs = [SampleSpec(state.params, index, 0, state, rows[index]) for index, state in enumerate(states)]
    assert Sampler().sample(logits_of(2), specs)[:3] == [NO_TOKEN_LEFT] * 3
    assert [state.error for state in states] == ["no way on"] * 3 + [None]


def test_rows_without_a_token() -> None:
    logits = logits_of(6)
    logits[0, 17], logits[1, 3], logits[2] = torch.nan, torch.inf, -torch.inf
    logits[4, 5] = -torch.inf  # a model may forbid tokens
    none_left = SamplingParams(allowed_token_ids=[4], logits_processors=[lambda ids, row: row - torch.inf])
    specs = [
        *(SampleSpec(SamplingParams(temperature=t), 0, 0) for t in (0, 1, 0)),
        SampleSpec(none_left, 0, 0, state_of(none_left)),
        SampleSpec(SamplingParams(temperature=0), 0, 0),
        SampleSpec(SamplingParams(seed=2, top_p=0.5), 0, 0),
    ]
    token_ids = Sampler().sample(logits, specs)
    assert token_ids[:4] == [NOT_FINITE] * 3 + [NO_TOKEN_LEFT]
    assert token_ids[4] == logits[4].argmax() and token_ids[5] == Sampler().sample(logits[5:], specs[5:])[0]


def test_a_seeded_sampler_repeats() -> None:
    logits = torch.zeros(20, 10**4)
    specs = [SampleSpec(SamplingParams(), 0, 0)] * 20
    assert Sampler(5).sample(logits, specs) == Sampler(5).sample(logits, specs) != Sampler(6).sample(logits, specs)
