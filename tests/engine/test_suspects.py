"""A step that fails ends the request that makes it fail, and no other."""

from collections.abc import Sequence

import pytest
import torch

from trunkattn.engine import Engine, RequestOutput, SamplingParams
from trunkattn.engine.scheduling.scheduled_batch import ScheduledBatch
from trunkattn.kv_cache.manager import CacheManager

from .fake_engine import make_engine, run, runner_of


def fail_for(engine: Engine, *tokens: int) -> None:
    """Makes every step fail that samples for a prompt which begins with one of these tokens."""
    runner = runner_of(engine)
    execute = runner.execute

    def guarded(batch: ScheduledBatch, cache: CacheManager) -> torch.Tensor:
        if any(sample.request.token_ids[0] in tokens for sample in batch.samples):
            raise RuntimeError("out of luck")
        return execute(batch, cache)

    runner.execute = guarded  # type: ignore[method-assign]


def run_on(engine: Engine) -> dict[str, RequestOutput]:
    """As a server runs an engine: the request that makes steps fail ends, and the others go on."""
    outputs: dict[str, RequestOutput] = {}
    for _ in range(1000):
        try:
            stepped = engine.step()
        except RuntimeError as error:
            stepped = engine.blame(error)
        outputs |= {output.request_id: output for output in stepped}
        if not engine.has_unfinished:
            break
    assert not engine.has_unfinished and engine.usage().pages_held == 0
    engine.scheduler.cache.check_integrity()
    return outputs


@pytest.mark.parametrize("guilty", [(3,), (1, 6), (2, 3, 4)])
@pytest.mark.parametrize("num_prompt_tokens", [3, 50])
@pytest.mark.parametrize("n", [1, 2])
def test_a_step_that_fails_ends_the_request_that_caused_it_alone(
    guilty: tuple[int, ...], num_prompt_tokens: int, n: int
) -> None:
    engine, params = make_engine(num_pages=200), SamplingParams(temperature=0, n=n)
    fail_for(engine, *guilty)
    ids = {first: engine.add_request([first] * num_prompt_tokens, params) for first in range(1, 8)}
    outputs = run_on(engine)
    for first, request_id in ids.items():
        for answer in outputs[request_id].outputs:
            if first in guilty:
                assert answer.finish_reason == "error" and not answer.is_bad and "out of luck" in str(answer.error)
            else:
                assert (answer.text, answer.error) == ("hello world", None)


def test_requests_that_come_or_go_while_the_guilty_one_is_looked_for() -> None:
    engine, params = make_engine(), SamplingParams(temperature=0)
    fail_for(engine, 3)
    ids = [engine.add_request([first] * 5, params) for first in range(1, 5)]
    with pytest.raises(RuntimeError):
        engine.step()
    assert engine.blame(RuntimeError("out of luck")) == []
    late = engine.add_request([9] * 5, params)
    engine.abort_request(ids[0])
    outputs = run_on(engine)
    assert [outputs[one].outputs[0].finish_reason for one in (ids[1], ids[2], ids[3], late)] == [
        "stop", "error", "stop", "stop"
    ]  # fmt: skip


def test_a_tokenizer_that_fails_ends_one_answer() -> None:
    engine = make_engine()
    good = engine.add_request([8] * 3, SamplingParams(temperature=0))
    bad = engine.add_request([9] * 3, SamplingParams(temperature=0))

    def fail(*_: object) -> None:
        raise OverflowError("too far")

    engine._requests[bad].add = fail  # type: ignore[method-assign,assignment]
    outputs = run(engine)
    assert outputs[good].outputs[0].text == "hello world"
    assert "could not decode an answer: OverflowError: too far" in str(outputs[bad].outputs[0].error)


@pytest.mark.parametrize("stop", [[], ["help"]])
def test_a_token_that_cannot_be_decoded_ends_one_answer(stop: list[str]) -> None:
    engine = make_engine("he\x7flo")
    decode = engine._tokenizer.decode  # type: ignore[union-attr]

    def decode_some(token_ids: Sequence[int], **options: bool) -> str:
        if 127 in token_ids:
            raise IndexError("piece id is out of range")
        return str(decode(token_ids, **options))

    engine._tokenizer.decode = decode_some  # type: ignore[union-attr]
    good = engine.add_request([8] * 3, SamplingParams(temperature=0, detokenize=False))
    bad = engine.add_request([9] * 3, SamplingParams(temperature=0, stop=stop))
    outputs = run(engine)
    assert outputs[good].outputs[0].finish_reason == "stop" and len(outputs[good].outputs[0].token_ids) == 6
    answer = outputs[bad].outputs[0]
    assert (answer.text, answer.finish_reason, len(answer.token_ids)) == ("he", "error", 3)
    assert "could not decode an answer: IndexError: piece id is out of range" in str(answer.error)


def test_a_bad_word_without_tokens_is_refused() -> None:
    engine = make_engine()
    engine._tokenizer.encode = lambda text, add_special_tokens=True: []  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="bad_words='x': expected a word that the model's tokenizer has tokens for"):
        engine.add_request([1], SamplingParams(bad_words=["x"]))
