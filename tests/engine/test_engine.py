"""The engine around a fake model: steps, stop strings, cancellation, errors, outputs and counters."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from trunkattn.engine import Engine, ModelLimits, SamplingParams
from trunkattn.engine.scheduling.scheduler import Scheduler
from trunkattn.kv_cache.manager import CacheManager

from .fake_engine import EOS, VOCAB, AsciiTokenizer, FakeRunner, make_engine, run, runner_of


def answer_of(engine: Engine, **params: Any) -> Any:
    request_id = engine.add_request([65, 66], SamplingParams(**{"temperature": 0, "max_tokens": 50, **params}))
    return run(engine)[request_id].outputs[0]


def test_an_answer_ends_at_end_of_sequence() -> None:
    answer = answer_of(make_engine())
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("hello world", "stop", None)
    assert answer.token_ids == [*map(ord, "hello world"), EOS]


def test_ignore_eos_goes_on() -> None:
    answer = answer_of(make_engine("ab"), ignore_eos=True, max_tokens=6)
    assert answer.token_ids == [97, 98, 0, 0, 0, 0]
    assert (answer.text, answer.finish_reason) == ("ab", "length")


def test_max_tokens_ends_an_answer() -> None:
    answer = answer_of(make_engine(), max_tokens=4)
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("hell", "length", None)


def test_an_answer_ends_at_the_longest_length_of_the_model() -> None:
    answer = answer_of(make_engine("x" * 50, num_pages=5), max_tokens=None)
    assert len(answer.token_ids) == 18 and answer.finish_reason == "length"


@pytest.mark.parametrize(
    ("stop", "text", "num_tokens", "reason"),
    [
        ("lo w", "hel", 7, "lo w"),
        (["zz", "o"], "hell", 5, "o"),
        (["world", "wor"], "hello ", 9, "wor"),
        ("h", "", 1, "h"),
        ("z", "hello world", 12, None),
    ],
)
def test_an_answer_ends_at_the_first_stop_string(
    stop: str | list[str], text: str, num_tokens: int, reason: str | None
) -> None:
    answer = answer_of(make_engine(), stop=stop)
    assert (answer.text, len(answer.token_ids), answer.stop_reason) == (text, num_tokens, reason)
    assert answer.finish_reason == "stop"


def test_a_stop_string_completed_by_the_last_token_counts() -> None:
    answer = answer_of(make_engine(), stop="lo", max_tokens=5)
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("hel", "stop", "lo")


@pytest.mark.parametrize(("max_tokens", "answer"), [(3, "ab~~"), (50, "ab~")])
def test_a_stop_string_that_the_end_completes_counts(max_tokens: int, answer: str) -> None:
    """Part of a character is shown when an answer ends, and a stop string may hold it: at the limit or at an end."""

    class Unfinished(AsciiTokenizer):
        def decode(self, token_ids: Sequence[int], *arguments: Any, **options: Any) -> str:
            return super().decode(token_ids, *arguments, **options).replace("~", "\ufffd")

    scheduler = Scheduler(CacheManager(100, 4), max_num_seqs=8, max_num_batched_tokens=32)
    engine = Engine(FakeRunner(answer), scheduler, ModelLimits(VOCAB, 400, frozenset({EOS})), Unfinished())
    found = answer_of(engine, stop="b\ufffd", max_tokens=max_tokens)
    assert (found.text, found.finish_reason, found.stop_reason) == ("a", "stop", "b\ufffd")


def test_stop_token_ids_are_no_text() -> None:
    answer = answer_of(make_engine(), stop_token_ids=[ord("w"), ord("d")])
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("hello ", "stop", ord("w"))
    assert answer.token_ids[-1] == ord("w")


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"stop": "lo", "include_stop_str_in_output": True}, "hello"),
        ({"stop_token_ids": [ord("w")], "include_stop_str_in_output": True}, "hello w"),
        ({"stop_token_ids": [ord("w")], "detokenize": False}, ""),
        ({"skip_special_tokens": False}, "hello world"),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "hello world <eos>"),
        ({"skip_special_tokens": False, "ignore_eos": True, "max_tokens": 13}, "hello world <eos> <eos>"),
        (
            {
                "skip_special_tokens": False,
                "spaces_between_special_tokens": False,
                "ignore_eos": True,
                "max_tokens": 13,
            },
            "hello world<eos><eos>",
        ),
        ({"stop": "o", "min_tokens": 5}, "hello w"),
        ({"stop": "o", "min_tokens": 4}, "hell"),
        ({"stop": "l", "min_tokens": 9}, "hello wor"),
        ({"stop": "ol", "min_tokens": 9}, "hello world"),
        ({"bad_words": ["llo"]}, "hell\0"),
        ({"bad_words": ["hello world", " world"]}, "hello worl\0"),
    ],
    ids=str,
)
def test_options_of_the_text_change_it(params: dict[str, Any], text: str) -> None:
    assert answer_of(make_engine(), **params).text == text.rstrip("\0")


def test_min_tokens_hold_every_end_back() -> None:
    answer = answer_of(make_engine("ab"), min_tokens=5, max_tokens=9)
    assert EOS not in answer.token_ids[:5] and answer.token_ids[5] == EOS and answer.finish_reason == "stop"
    answer = answer_of(make_engine("abab"), min_tokens=3, stop_token_ids=[ord("b")])
    assert answer.token_ids[3] == ord("b") and ord("b") not in answer.token_ids[:3]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("temperature", [0, 1])
def test_logits_that_are_not_finite_end_their_own_request(n: int, temperature: float) -> None:
    engine = make_engine()
    runner_of(engine).broken = 9
    good = engine.add_request([8] * 6, SamplingParams(temperature=0))
    params = SamplingParams(temperature=temperature, n=n, logprobs=1, repetition_penalty=1.1, seed=1)
    broken = engine.add_request([9] * 6, params)
    outputs = run(engine)
    assert outputs[good].outputs[0].text == "hello world" and outputs[good].outputs[0].error is None
    assert outputs[broken].finished and len(outputs[broken].outputs) == n
    for answer in outputs[broken].outputs:
        assert (answer.finish_reason, answer.stop_reason, answer.text) == ("error", None, "he")
        assert answer.logprobs is not None and len(answer.token_ids) == len(answer.logprobs) == 2
        assert answer.error is not None and answer.error.startswith(
            "The model computed NaN or infinity for output token 2:"
        )
    assert engine.stats.generated_tokens == 12 + 2 * n


def test_a_prompt_whose_first_logits_are_not_finite() -> None:
    engine = make_engine()
    runner_of(engine).answer = [0]
    request_id = engine.add_request([9] * 6, SamplingParams(n=2, allowed_token_ids=[7], logits_processors=[nothing]))
    outputs = run(engine)
    assert [answer.finish_reason for answer in outputs[request_id].outputs] == ["error"] * 2
    assert all("forbid every token" in str(answer.error) for answer in outputs[request_id].outputs)


def nothing(output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    return logits - torch.inf


def test_text_that_may_be_a_stop_string_is_held_back() -> None:
    engine = make_engine()
    engine.add_request([65], SamplingParams(temperature=0, stop="low"), prompt="A")
    texts = []
    while engine.has_unfinished:
        (output,) = engine.step()
        texts.append(output.outputs[0].text)
    assert texts[:4] == ["", "", "h", "he"] and texts[-1] == "hello world"
    assert output.prompt == "A" and output.prompt_token_ids == [65]


def test_log_probabilities_have_ranks_and_texts() -> None:
    engine = make_engine("ab")
    answer = answer_of(engine, logprobs=2)
    assert answer.logprobs is not None and len(answer.logprobs) == 3
    first = answer.logprobs[0]
    assert next(iter(first)) == 97 and len(first) == 2
    assert first[97].rank == 1 and first[97].decoded_token == "a" and -1e-3 < first[97].logprob <= 0
    assert answer.cumulative_logprob == pytest.approx(
        sum(entry[token].logprob for entry, token in zip(answer.logprobs, answer.token_ids, strict=True))
    )
    silent = answer_of(engine)
    assert silent.logprobs is None and silent.cumulative_logprob is None


def test_a_sampled_token_outside_the_top_is_reported_too() -> None:
    answer = answer_of(make_engine("a"), temperature=1e4, logprobs=1, ignore_eos=True, max_tokens=40, seed=1)
    assert answer.logprobs is not None
    for entry, token_id in zip(answer.logprobs, answer.token_ids, strict=True):
        assert token_id in entry and len(entry) <= 2 and min(item.rank for item in entry.values()) == 1
    assert any(len(entry) == 2 for entry in answer.logprobs)


def test_n_answers_share_the_prompt() -> None:
    engine = make_engine("abcabcabc")
    request_id = engine.add_request(list(range(1, 23)), SamplingParams(n=5, temperature=3.0, seed=4, max_tokens=6))
    output = run(engine)[request_id]
    assert [answer.index for answer in output.outputs] == [0, 1, 2, 3, 4]
    assert len({tuple(answer.token_ids) for answer in output.outputs}) > 1
    assert engine.stats.computed_tokens == 22 + sum(len(answer.token_ids) - 1 for answer in output.outputs)


def test_an_answer_that_has_not_changed_is_the_same_object() -> None:
    engine = make_engine("abcabcabc")
    engine.add_request([65], SamplingParams(n=20, temperature=0, max_tokens=3))  # 8 of them run at once
    first, second, third = ([answer for one in engine.step() for answer in one.outputs] for _ in range(3))
    changed = [index for index in range(20) if second[index] is not first[index]]
    assert changed == list(range(8))
    assert all(third[index].text == "abc" and third[index].finish_reason == "length" for index in changed)
    assert all(third[index] is first[index] for index in range(8, 20))
    (last,) = (output for output in run(engine).values())
    assert [answer.text for answer in last.outputs] == ["abc"] * 20
    assert all(last.outputs[index] is third[index] for index in changed)


def test_answers_that_wait_hold_no_copy_of_the_prompt() -> None:
    engine, prompt = make_engine("abc"), list(range(1, 23))
    checked = engine.check_request(prompt, SamplingParams(n=5, max_tokens=3, repetition_penalty=1.1))
    engine.add_checked(checked)
    (first,) = engine.scheduler.waiting
    assert all(one.token_ids is checked.token_ids and one.logits_state is None for one in (first, *first.children))
    output = next(iter(run(engine).values()))
    assert [len(answer.token_ids) for answer in output.outputs] == [3] * 5 and checked.token_ids == prompt


@pytest.mark.parametrize("n", [1, 3, 20])
def test_seeds_make_answers_repeatable_whatever_runs_beside(n: int) -> None:
    params = SamplingParams(n=n, temperature=3.0, seed=4, max_tokens=6, ignore_eos=True)
    alone = make_engine("abcabcabc")
    request_id = alone.add_request([3, 4], params)
    first = run(alone)[request_id]
    crowded = make_engine("abcabcabc", num_pages=12)
    for value in range(4):
        crowded.add_request([value + 1] * 9, SamplingParams(max_tokens=9, n=2, ignore_eos=True))
    request_id = crowded.add_request([3, 4], params)
    assert [a.token_ids for a in run(crowded)[request_id].outputs] == [a.token_ids for a in first.outputs]
    assert n == 1 or len({tuple(a.token_ids) for a in first.outputs}) > 1


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("n", [1, 4])
def test_a_cancelled_request_leaves_the_others_alone(steps: int, n: int) -> None:
    engine = make_engine()
    gone = engine.add_request([9] * 40, SamplingParams(temperature=0, n=n), request_id="gone")
    kept = engine.add_request([8] * 3, SamplingParams(temperature=0))
    for _ in range(steps):
        engine.step()
    output = engine.abort_request(gone)
    assert output is not None and output.finished and {a.finish_reason for a in output.outputs} == {"abort"}
    assert engine.abort_request(gone) is None
    assert set(run(engine)) <= {kept} and not engine.has_unfinished


def test_an_error_in_a_step_loses_no_page_and_no_request() -> None:
    engine = make_engine()
    ids = [engine.add_request([value] * 9, SamplingParams(temperature=0, n=2)) for value in (5, 6)]
    engine.step()
    runner_of(engine).fails = True
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of luck"):
            engine.step()
        assert engine.usage().pages_held == 0 and engine.has_unfinished
    runner_of(engine).fails = False
    outputs = run(engine)
    assert [answer.text for request_id in ids for answer in outputs[request_id].outputs] == ["hello world"] * 4


def test_steps_that_take_too_long_compute_less_of_a_prompt_and_answer_the_same() -> None:
    steps = []
    for seconds in (None, 1e9, 1e-9):
        engine = make_engine(max_step_seconds=seconds)
        request_id = engine.add_request([7] * 30, SamplingParams(temperature=0))
        assert run(engine)[request_id].outputs[0].text == "hello world"
        steps.append(engine.stats.steps)
    assert steps[0] + 3 == steps[1] and steps[0] + 14 == steps[2]  # chunks of 30; 2, 4, 8 and 16; 2


BAD_REQUESTS: list[tuple[Any, dict[str, Any], str]] = [
    ([], {}, "prompt has 0 tokens: expected at least one"),
    ([1] * 40, {}, "prompt has 40 tokens: expected 1 to 39"),
    ([1, VOCAB], {}, "token id=128: expected an integer from 0 to 127"),
    ([1, -1], {}, "token id=-1"),
    ([1, 2.5], {}, "token id=2.5"),
    ([1, "a"], {}, "token id='a'"),
    ([1], {"logprobs": 200}, "logprobs=200"),
    ([1] * 30, {"min_tokens": 11, "max_tokens": None}, "min_tokens=11: expected at most 10, because prompt has 30 tok"),
    ([1] * 30, {"min_tokens": 11, "max_tokens": 50}, "min_tokens=11: expected at most 10"),
    ([1], {"min_tokens": 1 << 9998, "max_tokens": None}, "(an integer of 9999 bits): expected at most 39"),
]


@pytest.mark.parametrize(("prompt", "params", "message"), BAD_REQUESTS)
def test_a_bad_request_is_refused_and_the_others_go_on(prompt: Any, params: dict[str, Any], message: str) -> None:
    engine = make_engine(num_pages=10)
    good = engine.add_request([3, 4], SamplingParams(temperature=0))
    engine.step()
    with pytest.raises((TypeError, ValueError)) as caught:
        engine.add_request(prompt, SamplingParams(**params))
    assert message in str(caught.value)
    assert run(engine)[good].outputs[0].text == "hello world"


def test_integers_of_other_types_are_token_ids() -> None:
    engine = make_engine()
    request_id = engine.add_request(torch.tensor([3, 4]).numpy(), SamplingParams(temperature=0))  # type: ignore[arg-type]
    output = run(engine)[request_id]
    assert output.prompt_token_ids == [3, 4] and type(output.prompt_token_ids[0]) is int


def test_request_ids_are_unique_while_unfinished() -> None:
    engine = make_engine()
    engine.add_request([1], SamplingParams(temperature=0), request_id="a")
    with pytest.raises(ValueError, match="request_id='a'"):
        engine.add_request([1], SamplingParams(temperature=0), request_id="a")
    run(engine)
    assert engine.add_request([1], SamplingParams(temperature=0), request_id="a") == "a"
    ids = [engine.add_request([1], SamplingParams(temperature=0), request_id=name) for name in ("3", None, None, "7")]
    assert len({*ids, "a"}) == 5, "the engine's own ids avoid those of users"


def test_params_are_sampling_params() -> None:
    with pytest.raises(TypeError, match=r"sampling_params=\{\}"):
        make_engine().add_request([1], {})  # type: ignore[arg-type]


def test_without_a_tokenizer_answers_have_no_text() -> None:
    engine = make_engine(has_tokenizer=False)
    answer = answer_of(engine, logprobs=1)
    assert answer.text == "" and len(answer.token_ids) == 12
    assert answer.logprobs is not None and answer.logprobs[0][104].decoded_token is None
    with pytest.raises(ValueError, match="stop="):
        engine.add_request([1], SamplingParams(stop="x"))


def test_counters_and_times_are_those_of_the_steps() -> None:
    engine = make_engine("abcdefgh")
    first = engine.add_request([1] * 40, SamplingParams(temperature=0, max_tokens=3))
    second = engine.add_request([2] * 5, SamplingParams(temperature=0, max_tokens=3))
    outputs = run(engine)
    stats = engine.stats
    assert stats.steps == 4 and stats.generated_tokens == 6
    assert stats.computed_tokens == 40 + 5 + 4
    assert (stats.kv_tokens_read, stats.kv_tokens_per_query) == (12.0, 20.0)
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits, stats.preemptions) == (45, 0, 0)
    assert stats.peak_usage is not None and stats.peak_usage.pages_held == 13
    assert stats.generated_tokens_per_second == pytest.approx(6 / stats.busy_seconds)
    for request_id in (first, second):
        metrics = outputs[request_id].metrics
        assert metrics.first_token_time is not None and metrics.finished_time is not None
        assert metrics.arrival_time <= metrics.first_token_time <= metrics.finished_time
        assert metrics.time_to_first_token == metrics.first_token_time - metrics.arrival_time
        tpot = outputs[request_id].time_per_output_token
        assert tpot == pytest.approx((metrics.finished_time - metrics.first_token_time) / 2)
    engine.add_request([1] * 40, SamplingParams(temperature=0, max_tokens=3))
    assert next(iter(run(engine).values())).num_cached_tokens == 36
    assert engine.stats.prefix_cache_hits == 36


def test_block_tables_show_running_requests_and_an_emptied_prefix_cache() -> None:
    engine = make_engine("abcdefgh")
    assert engine.block_tables().block_table.shape == (0, 0)
    first = engine.add_request([1] * 6, SamplingParams(temperature=0, max_tokens=4, n=2))
    second = engine.add_request([2] * 9, SamplingParams(temperature=0, max_tokens=4))
    engine.step()
    tables = engine.block_tables()
    assert tables.request_ids == [first, first, second]
    assert tables.seq_lens.tolist() == [6, 6, 9] and tables.seq_lens.dtype == tables.block_table.dtype == np.int32
    assert tables.block_table.shape == (3, 3), "pages of 4 tokens"
    assert (tables.block_table[0] == tables.block_table[1]).all(), "answers of one prompt share its pages"
    assert not set(tables.block_table[0, :2]) & set(tables.block_table[2])
    run(engine)
    engine.add_request([2] * 9, SamplingParams(max_tokens=1))
    run(engine)
    assert engine.stats.prefix_cache_hits == 8
    engine.reset_prefix_cache()
    engine.add_request([2] * 9, SamplingParams(max_tokens=1))
    run(engine)
    assert engine.stats.prefix_cache_hits == 8, "nothing is cached any more"


def test_an_idle_step_does_nothing() -> None:
    engine = make_engine()
    assert engine.step() == [] and engine.stats.steps == 0
