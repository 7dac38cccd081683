"""/v1/chat/completions through the official client."""

from typing import Any

import pytest

from trunkattn import LLM, SamplingParams

from .conftest import NAME, Server

MESSAGES: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Which part is read?"}]


def expected(llm: LLM, max_tokens: int = 12) -> str:
    return llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=max_tokens))[0].outputs[0].text


def test_an_answer(server: Server, reference: LLM) -> None:
    answer = server.client().chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=12, temperature=0)
    assert answer.choices[0].message.content == expected(reference)
    assert answer.choices[0].message.role == "assistant" and answer.choices[0].finish_reason == "length"


def test_a_stream_adds_up_to_the_answer(server: Server, reference: LLM) -> None:
    stream = server.client().chat.completions.create(
        model=NAME,
        messages=MESSAGES,
        max_completion_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == expected(reference)
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 12


def test_parts_of_text_are_one_text(server: Server, reference: LLM) -> None:
    parts = [{"type": "text", "text": "Which part"}, {"type": "text", "text": "is read?"}]
    shown = [
        server.post("/tokenize", {"messages": [{"role": "user", "content": content}]}).json()["tokens"]
        for content in (parts, "Which part\nis read?")
    ]
    assert shown[0] == shown[1]


def test_log_probabilities(server: Server) -> None:
    answer = server.client().chat.completions.create(
        model=NAME, messages=MESSAGES, max_tokens=3, temperature=0, logprobs=True, top_logprobs=2
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == 3 and all(len(one.top_logprobs) == 2 for one in content)
    assert all(one.top_logprobs[0].logprob == one.logprob for one in content)  # greedy: the likeliest is taken


def test_without_max_tokens_the_models_limit_holds(server: Server) -> None:
    answer = server.client().chat.completions.create(model=NAME, messages=MESSAGES, temperature=0)
    assert answer.usage.total_tokens == server.llm.engine.limits.max_model_len


@pytest.mark.parametrize("messages", [MESSAGES, [*MESSAGES, {"role": "assistant", "content": "The"}]])
def test_tokenize_shows_what_the_model_gets(server: Server, reference: LLM, messages: list[Any]) -> None:
    shown = server.post("/tokenize", {"model": NAME, "messages": messages}).json()
    prompt = reference.chat(messages, SamplingParams(max_tokens=1))[0].prompt_token_ids
    assert shown["tokens"] == prompt and shown["count"] == len(prompt)
    text = server.post("/detokenize", {"tokens": shown["tokens"]}).json()["prompt"]
    assert text.endswith("<assistant>")
