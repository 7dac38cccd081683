"""/v1/completions through the official client: every answer is the library's."""

import json
from typing import Any

import pytest
from tokenizers import processors

from trunkattn import LLM, SamplingParams

from .conftest import NAME, Server

PROMPT = "The trunk is read once, "


def greedy(llm: LLM, prompt: str, max_tokens: int = 12) -> str:
    return llm.generate(prompt, SamplingParams(temperature=0, max_tokens=max_tokens))[0].outputs[0].text


def test_a_completion_answers_as_the_library_does(server: Server, reference: LLM) -> None:
    answer = server.client().completions.create(model=NAME, prompt=PROMPT, max_tokens=12, temperature=0)
    assert answer.choices[0].text == greedy(reference, PROMPT)
    assert (answer.choices[0].finish_reason, answer.model, answer.object) == ("length", NAME, "text_completion")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(PROMPT), 12)


def test_a_stream_adds_up_to_the_answer(server: Server, reference: LLM) -> None:
    options = {"include_usage": True}
    stream = server.client().completions.create(
        model=NAME, prompt=PROMPT, max_tokens=12, temperature=0, stream=True, stream_options=options
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == greedy(reference, PROMPT)
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == "length"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 12
    assert len({chunk.id for chunk in chunks}) == 1


SCHEMA: Any = {"enum": ["trunk", "leaf"]}


@pytest.mark.parametrize(
    "wanted",
    [
        {"type": "json_schema", "json_schema": {"name": "part", "schema": SCHEMA}},
        {"type": "json_object", "schema": SCHEMA},
    ],
    ids=lambda wanted: wanted["type"],
)
def test_an_answer_of_a_schema(server: Server, wanted: Any) -> None:
    answer = server.client().completions.create(
        model=NAME, prompt=PROMPT, seed=1, extra_body={"response_format": wanted}
    )
    assert json.loads(answer.choices[0].text) in SCHEMA["enum"] and answer.choices[0].finish_reason == "stop"


def test_text_is_the_form_of_any_answer(server: Server, reference: LLM) -> None:
    answer = server.client().completions.create(
        model=NAME, prompt=PROMPT, max_tokens=12, temperature=0, extra_body={"response_format": {"type": "text"}}
    )
    assert answer.choices[0].text == greedy(reference, PROMPT)


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_and_answers(server: Server, reference: LLM, stream: bool) -> None:
    prompts = [PROMPT + name for name in ("leaf", "branch", "root")]
    created = server.client().completions.create(
        model=NAME, prompt=prompts, n=2, max_tokens=8, temperature=1.0, seed=7, stream=stream
    )
    texts = [""] * 6
    for chunk in created if stream else [created]:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    expected = reference.generate(prompts, SamplingParams(n=2, seed=7, max_tokens=8))
    assert texts == [answer.text for output in expected for answer in output.outputs]


def test_prompts_may_be_token_ids_and_are_echoed(server: Server, reference: LLM) -> None:
    token_ids = reference.tokenizer(PROMPT)["input_ids"]
    for prompt in (token_ids, [token_ids]):
        answer = server.client().completions.create(model=NAME, prompt=prompt, echo=True, max_tokens=4, temperature=0)
        assert answer.choices[0].text == PROMPT + greedy(reference, PROMPT, 4)


@pytest.mark.parametrize("logprobs", [None, 1])
def test_a_stream_that_holds_its_beginning_back_echoes_the_prompt(
    server: Server, reference: LLM, logprobs: int | None
) -> None:
    """The first tokens have no text that can be sent while they may become a stop string."""
    prompts = [PROMPT, PROMPT + "leaf"]
    stream = server.client().completions.create(
        model=NAME, prompt=prompts, echo=True, stop=["no such text"], max_tokens=6, temperature=0, stream=True, n=2,
        logprobs=logprobs,
    )  # fmt: skip
    texts = [""] * 4
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [prompt + greedy(reference, prompt, 6) for prompt in prompts for _ in range(2)]


def test_log_probabilities_are_those_of_the_engine(server: Server, reference: LLM) -> None:
    arguments = {"model": NAME, "prompt": PROMPT, "max_tokens": 5, "temperature": 0, "logprobs": 2}
    whole = server.client().completions.create(**arguments).choices[0]
    expected = reference.generate(PROMPT, SamplingParams(temperature=0, max_tokens=5, logprobs=2))[0].outputs[0]
    assert whole.logprobs is not None and whole.logprobs.token_logprobs == pytest.approx(
        [entry[token_id].logprob for token_id, entry in zip(expected.token_ids, expected.logprobs, strict=True)]
    )
    written = [entry[token] for token, entry in zip(expected.token_ids, expected.logprobs, strict=True)]
    assert b"".join(one.token_bytes for one in written).decode(errors="replace") == whole.text
    streamed = [chunk.choices[0] for chunk in server.client().completions.create(**arguments, stream=True)]
    values = [value for choice in streamed if choice.logprobs for value in choice.logprobs.token_logprobs]
    assert values == pytest.approx(whole.logprobs.token_logprobs)


def test_stop_strings_end_the_text(server: Server, reference: LLM) -> None:
    whole = greedy(reference, PROMPT, 24)
    stop = whole[5:7]
    answer = server.client().completions.create(model=NAME, prompt=PROMPT, max_tokens=24, temperature=0, stop=stop)
    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_a_cached_prefix_is_counted_and_salts_part(server: Server) -> None:
    prompt = "A prefix of more than one page of sixteen tokens, asked for twice."

    def cached(**extra: str) -> int:
        answer = server.client().completions.create(model=NAME, prompt=prompt, max_tokens=1, extra_body=extra)
        return answer.usage.prompt_tokens_details.cached_tokens

    assert [cached(), cached(), cached(cache_salt="a"), cached(cache_salt="a"), cached(cache_salt="b")] == [
        0, 64, 0, 64, 0
    ]  # fmt: skip


@pytest.fixture
def beginning(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """A server whose tokenizer begins every text with a token."""
    adds = processors.TemplateProcessing(single="<end> $A", special_tokens=[("<end>", 256)])
    monkeypatch.setattr(server.llm.tokenizer.backend_tokenizer, "post_processor", adds)
    return server


@pytest.mark.parametrize("prompt", ["ab", ["ab", "cd"]])
def test_a_text_has_the_special_tokens_that_are_asked_for(beginning: Server, prompt: Any) -> None:
    def num_tokens(**extra: Any) -> int:
        usage = beginning.post("/v1/completions", {"prompt": prompt, "max_tokens": 1} | extra).json()["usage"]
        return int(usage["prompt_tokens"])

    count = 1 if isinstance(prompt, str) else len(prompt)
    assert [num_tokens(), num_tokens(add_special_tokens=True)] == [3 * count] * 2
    assert num_tokens(add_special_tokens=False) == 2 * count
