"""Answers that fill the context, and requests without an answer."""

from dataclasses import replace

from trunkattn.engine import SamplingParams

from .fake_engine import EOS, make_engine, run


def test_min_tokens_may_fill_the_context() -> None:
    engine = make_engine(num_pages=10)
    request_id = engine.add_request([1] * 30, SamplingParams(min_tokens=10, max_tokens=None))
    assert len(run(engine)[request_id].outputs[0].token_ids) == 10


def test_a_request_without_an_answer_ends_with_its_prompt() -> None:
    engine = make_engine()
    params = SamplingParams(n=2, max_tokens=1, logprobs=1, allowed_token_ids=[EOS])
    checked = replace(engine.check_request([65] * 40, params), has_answer=False)
    request_id = engine.add_checked(checked)
    output = run(engine)[request_id]
    ended = [(answer.token_ids, answer.text, answer.finish_reason) for answer in output.outputs]
    assert ended == [([], "", "length")] * 2 and output.metrics.first_token_time is None
    assert engine.stats.generated_tokens == 0 and engine.stats.computed_tokens == 40
