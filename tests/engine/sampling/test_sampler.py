"""Sampling: greedy, temperature, top-k, top-p, seeds and log-probabilities, against the plain definition row by row."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trunkattn.engine.sampling import truncation
from trunkattn.engine.sampling.sampler import (
    NO_TOKEN_LEFT,
    Sampler,
    SampleSpec,
    _draw,
    _probabilities,
    token_logprobs,
)
from trunkattn.engine.sampling_params import SamplingParams

VOCAB = 3000  # more than the sampler's first candidates


def logits_of(rows: int, scale: float = 3.0, seed: int = 0) -> torch.Tensor:
    return scale * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def spec(index: int = 0, position: int = 0, **params: object) -> SampleSpec:
    return SampleSpec(SamplingParams(**params), index, position)  # type: ignore[arg-type]


def expected_probabilities(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """One row in float64: temperature, then top-k, then the fewest tokens whose mass reaches top_p."""
    probs = (logits.double() / params.temperature).softmax(dim=0)
    order = probs.argsort(descending=True)
    count = params.top_k if 0 < params.top_k < len(probs) else len(probs)
    kept = probs[order[:count]] / probs[order[:count]].sum()
    if params.top_p < 1:
        kept = kept[: int((kept.cumsum(0) < params.top_p).sum()) + 1]
    result = torch.zeros_like(probs)
    result[order[: len(kept)]] = kept / kept.sum()
    return result


@settings(max_examples=40)
@given(
    temperature=st.floats(0.05, 5.0),
    top_k=st.sampled_from([-1, 0, 1, 2, 50, 300, VOCAB, 10**6]),
    top_p=st.sampled_from([0.01, 0.3, 0.9, 0.999, 1.0]),
    scale=st.sampled_from([0.01, 1.0, 10.0]),
    seed=st.integers(0, 100),
)
def test_probabilities_are_those_of_the_definition(
    temperature: float, top_k: int, top_p: float, scale: float, seed: int
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    others = [SamplingParams(top_p=0.5), SamplingParams(), SamplingParams(top_k=7)]
    logits = logits_of(4, scale, seed)
    probs = _probabilities(logits, [others[0], params, *others[1:]])[1].double()
    expected = expected_probabilities(logits[1], params)
    # A token at the very edge of top_p may fall on either side: the sums are float32 here and float64 there.
    assert ((probs > 0) != (expected > 0)).sum() <= 1 + VOCAB * (top_p == 0.999) * 1e-2
    assert (probs / probs.sum() - expected).abs().max() < 1e-4


@pytest.mark.parametrize("least", [5e-324, 1e-300, 1e-46])
def test_a_top_p_that_is_zero_in_float32_keeps_the_most_likely_token(least: float) -> None:
    logits = logits_of(3)
    drawn = Sampler().sample(logits, [spec(top_p=least), spec(top_p=least, top_k=5), spec(top_p=least, min_p=0.1)])
    assert drawn == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize(
    "wide", [{"top_p": 0.999, "temperature": 2.0}, {"top_k": 2999}, {"top_k": 1 << 20, "top_p": 0.99999}]
)
def test_a_row_that_keeps_many_tokens_costs_the_others_nothing_and_is_not_sorted(
    monkeypatch: pytest.MonkeyPatch, wide: dict[str, float]
) -> None:
    logits, topk, count, sorted_rows, counted_rows = logits_of(10), torch.Tensor.topk, truncation.truncate_rows, [], []

    def sorting(values: torch.Tensor, width: int) -> torch.return_types.topk:
        sorted_rows.append((len(values), width))
        return topk(values, width)

    def counting(probs: torch.Tensor, rows: list[int], *given: Any) -> None:
        counted_rows.append(rows)
        count(probs, rows, *given)

    narrow = [SamplingParams(top_p=0.9, top_k=50), SamplingParams(top_p=0.5)] * 4
    alone = _probabilities(logits[:8], narrow)
    monkeypatch.setattr(torch.Tensor, "topk", sorting)
    monkeypatch.setattr(truncation, "truncate_rows", counting)
    found = _probabilities(logits, [*narrow, SamplingParams(**wide), SamplingParams()])  # type: ignore[arg-type]
    assert sorted_rows == [(9, 256)] and counted_rows == [[8]]
    assert torch.equal(found[:8], alone)
    expected = expected_probabilities(logits[8], SamplingParams(**wide))  # type: ignore[arg-type]
    torch.testing.assert_close((found[8] / found[8].sum()).double(), expected, rtol=1e-4, atol=1e-7)


def kept_by_sorting(probs: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Whether each token of a row is kept, by sorting and adding in float64; of equal ones the first."""
    order = probs.double().argsort(descending=True, stable=True)
    if params.top_k > 0:
        order = order[: params.top_k]
    values = probs[order].double()
    before = values.cumsum(0) - values
    kept = torch.zeros(len(probs), dtype=torch.bool)
    kept[order[before < params.top_p * values.sum()] if params.top_p < 1 else order] = True
    return kept


@pytest.mark.parametrize("rounded", [torch.float32, torch.bfloat16])  # in bfloat16 many tokens are equally likely
@pytest.mark.parametrize("scale", [0.0, 1e-4, 0.3, 1.5])
def test_rows_that_keep_many_tokens_keep_exactly_those_that_a_sort_finds(scale: float, rounded: torch.dtype) -> None:
    params = [
        SamplingParams(**one)  # type: ignore[arg-type]
        for one in (
            {"top_p": 0.99},
            {"top_p": 0.9},
            {"top_p": 0.5, "top_k": 2500},
            {"top_k": 257},
            {"top_k": 2999, "top_p": 1 - 1e-9},
            {"top_p": 1 - 1e-12},
        )
    ]
    probs = logits_of(len(params), scale).to(rounded).float().softmax(dim=-1)
    kept = probs.clone()
    truncation.truncate(kept, params)
    for row, one in enumerate(params):
        assert torch.equal(kept[row], probs[row].where(kept_by_sorting(probs[row], one), 0.0)), one


@pytest.mark.parametrize("scale", [0.0, 0.01])
def test_sums_over_a_large_vocabulary_are_exact(scale: float) -> None:
    params = [SamplingParams(top_p=0.9), SamplingParams(top_p=0.999), SamplingParams(top_p=0.5, top_k=100_000)]
    generator = torch.Generator().manual_seed(1)
    probs = (torch.randn(len(params), 150_000, generator=generator) * scale).softmax(dim=-1)
    kept = probs.clone()
    truncation.truncate(kept, params)
    for row, one in enumerate(params):
        assert torch.equal(kept[row], probs[row].where(kept_by_sorting(probs[row], one), 0.0)), one


def test_rows_of_nan_with_any_sign_are_truncated_beside_others() -> None:
    params = [SamplingParams(top_p=0.99), SamplingParams(top_k=1000), SamplingParams(top_p=0.99)]
    probs = logits_of(3, 0.1).softmax(dim=-1)
    alone = probs.clone()
    probs[0], probs[1] = math.nan, -math.nan
    for values in (alone, probs):
        truncation.truncate(values, params)
    assert torch.equal(probs[2], alone[2]) and (probs[2] > 0).sum() < VOCAB


def test_a_temperature_that_is_infinite_in_float32_draws_no_banned_token() -> None:
    logits = torch.full((50, 8), -math.inf)
    logits[:, 2] = 1.0
    assert Sampler().sample(logits, [spec(temperature=1e300)] * 50) == [2] * 50


def test_draws_follow_the_probabilities() -> None:
    probs = torch.tensor([[0.5, 0.0, 0.25, 0.25, 0.0]])
    drawn = [
        _draw(probs, torch.tensor([[u]], dtype=torch.float64), [0]).item()
        for u in (0.0, 0.4999, 0.5, 0.7, 0.75, 1 - 2**-53)
    ]
    assert drawn == [0, 0, 2, 2, 3, 3]


def test_unnormalised_probabilities_are_drawn_alike() -> None:
    probs = torch.rand(6, VOCAB, generator=torch.Generator().manual_seed(1))
    uniform = torch.rand(6, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    rows = list(range(6))
    assert _draw(probs, uniform, rows).tolist() == _draw(probs * 0.125, uniform, rows).tolist()


def test_unseeded_samples_are_as_frequent_as_likely() -> None:
    logits = torch.full((4000, 8), -math.inf)
    logits[:, 2], logits[:, 5] = math.log(0.7), math.log(0.3)
    counts = Counter(Sampler().sample(logits, [spec()] * 4000))
    assert counts.keys() == {2, 5}
    assert abs(counts[2] / 4000 - 0.7) < 6 * math.sqrt(0.7 * 0.3 / 4000)


def test_seeded_samples_are_as_frequent_as_likely() -> None:
    logits = torch.full((4000, 8), -math.inf)
    logits[:, 2], logits[:, 5] = math.log(0.7), math.log(0.3)
    specs = [spec(index=i % 40, position=i // 40, seed=7) for i in range(4000)]
    counts = Counter(Sampler().sample(logits, specs))
    assert abs(counts[2] / 4000 - 0.7) < 6 * math.sqrt(0.7 * 0.3 / 4000)


def test_greedy_rows_take_the_maximum_whatever_stands_beside_them() -> None:
    logits = logits_of(5)
    specs = [spec(temperature=0), spec(), spec(temperature=0, seed=3, top_k=5), spec(seed=1), spec(temperature=1e-7)]
    for _ in range(3):
        token_ids = Sampler().sample(logits, specs)
        assert [token_ids[row] for row in (0, 2, 4)] == [logits[row].argmax().item() for row in (0, 2, 4)]


def test_a_seeded_row_does_not_depend_on_its_batch() -> None:
    logits = logits_of(1).expand(6, -1).clone()
    alone = Sampler().sample(logits[:1], [spec(index=1, position=4, seed=11, top_p=0.9)])
    specs = [
        spec(),
        spec(seed=12),
        spec(index=1, position=4, seed=11, top_p=0.9),
        spec(temperature=0),
        spec(top_k=2),
        spec(),
    ]
    sampler = Sampler()
    for _ in range(3):
        assert sampler.sample(logits, specs)[2] == alone[0]


def test_seed_index_and_position_each_change_the_stream() -> None:
    logits = torch.zeros(1, 10**6)
    drawn = {
        Sampler().sample(logits, [spec(index=index, position=position, seed=seed)])[0]
        for index in range(3)
        for position in range(3)
        for seed in (0, 1, 2**63 - 1)
    }
    assert len(drawn) == 27


def test_unseeded_samplers_differ() -> None:
    logits = torch.zeros(20, 10**5)
    assert Sampler().sample(logits, [spec()] * 20) != Sampler().sample(logits, [spec()] * 20)


@pytest.mark.parametrize("temperature", [1.1e-5, 1e30])
@pytest.mark.parametrize("scale", [1e-3, 1e4])
def test_extreme_temperatures_stay_finite(temperature: float, scale: float) -> None:
    logits = logits_of(3, scale)
    probs = _probabilities(logits, [SamplingParams(temperature=temperature)] * 3)
    assert torch.isfinite(probs).all() and (probs.sum(dim=-1) - 1).abs().max() < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_are_not_changed(dtype: torch.dtype) -> None:
    logits = logits_of(3).to(dtype)
    before = logits.clone()
    specs = [spec(top_p=0.8, logprobs=2), spec(temperature=0), spec(top_k=4, temperature=0.3, logprobs=0)]
    token_logprobs(logits, specs, Sampler().sample(logits, specs))
    assert torch.equal(logits, before)
    many = [SampleSpec(SamplingParams(), 0, 0, row=row) for row in (0, 1, 2) * 200]
    assert Sampler(1).sample(logits, many) == Sampler(1).sample(logits.float(), many)


def test_logprobs_are_of_the_unmodified_logits() -> None:
    logits = logits_of(5)
    specs = [spec(logprobs=3, temperature=0.1), spec(), spec(logprobs=0, top_k=1), spec(logprobs=VOCAB, temperature=0)]
    specs.append(spec(logprobs=1))
    token_ids = [0, 5, 6, int(logits[3].argmax()), NO_TOKEN_LEFT]
    found = token_logprobs(logits, specs, token_ids)
    expected = logits.double().log_softmax(dim=-1)
    order = expected.argsort(dim=-1, descending=True)
    assert found[1] is None and found[4] is None
    for row, count in ((0, 3), (2, 0), (3, VOCAB)):
        entry = found[row]
        assert entry is not None
        assert entry.token_ids == [token_ids[row], *order[row, :count].tolist()]
        assert entry.logprobs == pytest.approx([expected[row, token].item() for token in entry.token_ids], abs=1e-4)
        rank = int((expected[row] > expected[row, token_ids[row]]).sum()) + 1
        assert entry.ranks == [rank, *range(1, count + 1)]


def test_log_probabilities_that_nobody_asked_for_are_none() -> None:
    assert token_logprobs(logits_of(2), [spec(), spec()], [1, 2]) == [None, None]


@pytest.mark.parametrize("vocab_size", [3, 256, 257, 3000])
def test_a_draw_inverts_the_cumulative_sum(vocab_size: int) -> None:
    chance = torch.Generator().manual_seed(vocab_size)
    probs = torch.rand(400, vocab_size, generator=chance) ** 8
    probs[torch.rand(400, vocab_size, generator=chance) < 0.7] = 0.0
    probs[:, vocab_size // 2] += 1e-6
    uniform = torch.rand(400, 1, dtype=torch.float64, generator=chance)
    uniform[:2, 0] = torch.tensor([0.0, math.nextafter(1.0, 0.0)])
    cumulative = probs.double().cumsum(dim=-1)
    expected = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)[:, 0]
    drawn = _draw(probs, uniform, list(range(400)))
    assert (probs.gather(1, drawn[:, None]) > 0).all()
    assert (drawn == expected).float().mean() > 0.99  # a number at an edge may fall to the neighbour
