"""Sampling parameters through the whole engine: forks, preemption, chunks and other requests change nothing."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from trunkattn.engine import LLM, SamplingParams

VOCAB = 256
PROMPTS = [[(7 * place + number) % 200 + 1 for place in range(30)] for number in range(3)]
EVERYTHING: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.7,
    "min_p": 0.05,
    "min_tokens": 4,
    "logit_bias": {17: 2.0, 30: -5.0},
    "allowed_token_ids": range(0, VOCAB, 2),
    "logits_processors": [lambda output_token_ids, logits: logits * (1 + len(output_token_ids) % 2)],
    "stop_token_ids": [20, 40, 60],
}


@pytest.fixture(scope="module")
def llm(tiny_model: Callable[[str], Any]) -> LLM:
    return LLM(tiny_model("llama").path, page_size=4, num_pages=128)


@pytest.fixture(scope="module")
def small(tiny_model: Callable[[str], Any]) -> LLM:
    """Few pages and a small budget: prompts come in chunks, and answers are preempted."""
    return LLM(
        tiny_model("llama").path, page_size=4, num_pages=18, max_num_seqs=4, max_num_batched_tokens=6, max_model_len=64
    )


def tokens_of(outputs: Sequence[Any]) -> list[list[int]]:
    return [answer.token_ids for output in outputs for answer in output.outputs]


def test_answers_survive_chunks_forks_and_preemption(llm: LLM, small: LLM) -> None:
    params = SamplingParams(n=3, seed=3, max_tokens=14, **EVERYTHING)
    free = SamplingParams(n=2, seed=4, max_tokens=14)
    alone = [llm.generate(prompt, params)[0] for prompt in PROMPTS]
    free_alone = llm.generate(PROMPTS[0], free)
    crowded = small.generate([*PROMPTS, PROMPTS[0]], [params] * 3 + [free])
    assert small.stats.preemptions > 0
    assert tokens_of(crowded[:3]) == tokens_of(alone) and tokens_of(crowded[3:]) == tokens_of(free_alone)
    for answer in tokens_of(crowded[:3]):
        assert all(token % 2 == 0 for token in answer) and not set(answer[:4]) & {20, 40, 60}
    assert len(set(map(tuple, tokens_of(alone)))) > 3


def test_greedy_repetition_penalty_is_transformers_generate(llm: LLM, tiny_model: Callable[[str], Any]) -> None:
    model = tiny_model("llama").reference
    prompt = torch.tensor([PROMPTS[0]])
    expected = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        generation_config=GenerationConfig(max_new_tokens=60, do_sample=False, pad_token_id=0),
        logits_processor=LogitsProcessorList([RepetitionPenaltyLogitsProcessor(5.0)]),
    )[0, prompt.shape[1] :].tolist()
    (output,) = llm.generate(PROMPTS[0], SamplingParams(temperature=0, repetition_penalty=5.0, max_tokens=60))
    plain = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=60))[0].outputs[0].token_ids
    assert output.outputs[0].token_ids == expected != plain


def test_logprobs_stay_those_of_the_model(llm: LLM) -> None:
    plain = llm.generate(PROMPTS[1], SamplingParams(temperature=0, max_tokens=1, logprobs=3))[0].outputs[0]
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=3, logit_bias={5: 100.0})
    biased = llm.generate(PROMPTS[1], params)[0].outputs[0]
    assert biased.token_ids == [5] and plain.logprobs is not None and biased.logprobs is not None
    assert biased.logprobs[0].keys() - {5} == plain.logprobs[0].keys() - {5}
    assert all(biased.logprobs[0][token] == entry for token, entry in plain.logprobs[0].items())


def test_prompt_logprobs_are_the_models(llm: LLM, small: LLM, tiny_model: Callable[[str], Any]) -> None:
    model = tiny_model("llama").reference
    params = SamplingParams(n=2, temperature=0, max_tokens=8, prompt_logprobs=2)
    for engine in (llm, small):
        engine.generate(PROMPTS, SamplingParams(max_tokens=1))  # now the prompts are in the prefix cache
        plain = engine.generate(PROMPTS, SamplingParams(n=2, temperature=0, max_tokens=8))
        outputs = engine.generate(PROMPTS, params)
        assert tokens_of(outputs) == tokens_of(plain)
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            assert output.num_cached_tokens == 0 and output.prompt_logprobs is not None
            assert len(output.prompt_logprobs) == len(prompt) and output.prompt_logprobs[0] is None
            with torch.inference_mode():
                expected = model(torch.tensor([prompt])).logits[0].log_softmax(dim=-1)
            for place, entry in enumerate(output.prompt_logprobs[1:], start=1):
                assert entry is not None and prompt[place] in entry and len(entry) in (2, 3)
                for token, logprob in entry.items():
                    assert logprob.logprob == pytest.approx(expected[place - 1, token].item(), abs=1e-3)
                    assert logprob.rank == 1 + (expected[place - 1] > expected[place - 1, token]).sum() or (
                        logprob.rank > 2 or (expected[place - 1].topk(3).values.diff().abs() < 1e-3).any()
                    )
        assert engine.engine.usage().pages_held == 0
    assert llm.generate([1, 2], SamplingParams(max_tokens=1))[0].prompt_logprobs is None
    assert llm.generate([1], SamplingParams(max_tokens=1, prompt_logprobs=0))[0].prompt_logprobs == [None]
    cached = llm.generate(PROMPTS[0], SamplingParams(max_tokens=1))[0]
    assert cached.num_cached_tokens == 28, "what such a request computes is reused by others"


@pytest.mark.parametrize("policy", ["chunked_prefill", "prefill_first"])
def test_a_step_holds_few_rows_of_prompt_logits(
    llm: LLM, tiny_model: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=1)
    expected = llm.generate(PROMPTS, params)
    llm = LLM(tiny_model("llama").path, page_size=4, num_pages=128, scheduler_policy=policy)
    rows: list[int] = []
    execute = llm.engine.runner.execute

    def counted(*arguments: Any) -> torch.Tensor:
        logits = execute(*arguments)
        rows.append(len(logits))
        return logits

    monkeypatch.setattr(llm.engine.runner, "execute", counted)
    monkeypatch.setattr(llm.engine.scheduler, "_max_prompt_logits", 5)
    outputs = llm.generate(PROMPTS, params)
    assert max(rows) <= 5 + 2 * len(PROMPTS) and len(rows) > 5
    for output, before in zip(outputs, expected, strict=True):
        assert output.outputs[0].token_ids == before.outputs[0].token_ids
        assert output.prompt_logprobs is not None and before.prompt_logprobs is not None
        for entry, other in zip(output.prompt_logprobs[1:], before.prompt_logprobs[1:], strict=True):
            assert entry is not None and other is not None and entry.keys() == other.keys()


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("length", [2, 3, 4, 5])
def test_samples_as_many_as_prompt_rows_draw_from_their_own(llm: LLM, n: int, length: int) -> None:
    """The samples of a step and its rows of logits may be equally many and yet not belong together."""
    plain, asked = SamplingParams(temperature=0, max_tokens=3), {"temperature": 0, "max_tokens": 3, "logprobs": 0}
    prompts = [prompt[:length] for prompt in PROMPTS[:2]]
    first, second = (answer.outputs[0].token_ids for answer in llm.generate(prompts, plain))
    llm.reset_prefix_cache()
    (own,) = llm.generate(prompts[0], SamplingParams(n=n, prompt_logprobs=0, **asked))
    assert tokens_of([own]) == [first] * n
    llm.reset_prefix_cache()
    each = [SamplingParams(n=n, **asked), SamplingParams(prompt_logprobs=1, **asked)]
    assert tokens_of(llm.generate(prompts, each)) == [first] * n + [second]


def test_truncated_prompts_keep_their_end(llm: LLM) -> None:
    (output,) = llm.generate([[1] * 300 + [2, 3]], SamplingParams(max_tokens=1, truncate_prompt_tokens=3))
    assert output.prompt_token_ids == [1, 2, 3]
    (output,) = llm.generate([[1] * 1000], SamplingParams(max_tokens=None, truncate_prompt_tokens=-1))
    assert len(output.prompt_token_ids) == llm.engine.limits.max_model_len - 1
    with pytest.raises(ValueError, match=r"prompts\[0\] has 600 tokens"):
        llm.generate([[1] * 900], SamplingParams(truncate_prompt_tokens=600))


def test_a_failing_processor_ends_its_own_request(llm: LLM) -> None:
    def fail(output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(output_token_ids) == 2:
            raise KeyError("mine")
        return logits

    good = SamplingParams(temperature=0, max_tokens=6)
    expected = tokens_of(llm.generate(PROMPTS[0], good))
    cases = (fail, "raised KeyError: 'mine'"), (lambda ids, logits: None, "returned None: expected logits")
    for processor, message in cases:
        bad = SamplingParams(temperature=0, max_tokens=6, logits_processors=[processor], n=2)
        failed, other = llm.generate([PROMPTS[1], PROMPTS[0]], [bad, good])
        for answer in failed.outputs:
            assert answer.finish_reason == "error" and answer.error is not None and message in answer.error
        assert tokens_of([other]) == expected


BAD_FOR_THE_MODEL: list[tuple[dict[str, Any], str]] = [
    ({"allowed_token_ids": [3, VOCAB]}, "allowed_token_ids: token id=256: expected an integer from 0 to 255"),
    ({"stop_token_ids": [VOCAB]}, "stop_token_ids: token id=256"),
    ({"logit_bias": {VOCAB: 1.0}}, "logit_bias: token id=256"),
    ({"prompt_logprobs": 257}, "prompt_logprobs=257"),
    ({"bad_words": ["a"]}, r"bad_words=\('a',\): expected no bad_words strings"),
]


@pytest.mark.parametrize(("params", "message"), BAD_FOR_THE_MODEL)
def test_what_the_model_lacks_is_refused(llm: LLM, params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate([1, 2], SamplingParams(**params))


def test_a_seed_is_any_integer_of_64_bits(tiny_model: Callable[[str], Any]) -> None:
    llm = LLM(tiny_model("llama").path, num_pages=32)

    def answer(seed: int) -> list[int]:
        return llm.generate([[1, 2, 3]], SamplingParams(seed=seed, max_tokens=8))[0].outputs[0].token_ids

    seeds = [-(2**63), -2, 0, 2**63 - 1]
    found = [answer(seed) for seed in seeds]
    assert found == [answer(seed) for seed in seeds] and len({tuple(one) for one in found}) == len(seeds)
    for bad in (2**63, -(2**63) - 1):
        with pytest.raises(ValueError, match=r"seed=.*: expected an integer from -9223372036854775808 to 92233720"):
            SamplingParams(seed=bad)


def test_a_seeded_engine_repeats(tiny_model: Callable[[str], Any]) -> None:
    def answers(seed: int | None) -> list[list[int]]:
        llm = LLM(tiny_model("llama").path, num_pages=32, seed=seed)
        return tokens_of([*llm.generate(PROMPTS, SamplingParams(n=2)), *llm.generate(PROMPTS)])

    assert answers(7) == answers(7) != answers(8)
    with pytest.raises(ValueError, match="seed=-1"):
        LLM(tiny_model("llama").path, seed=-1)


def test_functions_of_the_user_change_the_logits_of_each_answer(tiny_model: Callable[[str], Any]) -> None:
    """Also of the first tokens of a request's answers, which come from one row of the model's logits."""
    calls = iter(range(3, 20))

    def next_token(output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits.new_full(logits.shape, -torch.inf).index_fill_(0, torch.tensor([next(calls)]), 0.0)

    params = SamplingParams(n=4, max_tokens=1, logits_processors=[next_token])
    (output,) = LLM(tiny_model("llama").path, num_pages=32).generate([[1, 2, 3]], params)
    assert [answer.token_ids for answer in output.outputs] == [[3], [4], [5], [6]]
