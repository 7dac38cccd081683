"""/v1/chat/completions through the official client."""

import json
from typing import Any

import pytest

from trunkattn import LLM, SamplingParams

from .conftest import NAME, Server

MESSAGES: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Which part is read?"}]


def expected(llm: LLM, max_tokens: int = 12) -> str:
    return llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=max_tokens))[0].outputs[0].text


def test_a_chat_answers_as_the_library_does(server: Server, reference: LLM) -> None:
    answer = server.client().chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=12, temperature=0)
    assert answer.choices[0].message.content == expected(reference)
    assert answer.choices[0].message.role == "assistant" and answer.choices[0].finish_reason == "length"
    assert "refusal" in answer.choices[0].message.model_fields_set  # strict clients need it


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


def test_a_chat_has_log_probabilities(server: Server) -> None:
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


@pytest.mark.parametrize(
    "options",
    [
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
        {"chat_template_kwargs": {"tools_are": "here"}},
    ],
)
def test_tokenize_counts_what_a_chat_with_the_same_fields_has(server: Server, options: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "x"}], **options}
    usage = server.post("/v1/chat/completions", body | {"max_tokens": 1}).json()["usage"]
    assert server.post("/tokenize", body).json()["count"] == usage["prompt_tokens"]


@pytest.mark.parametrize("place", ["json_schema", "beside json_object"])
def test_an_answer_of_a_schema(server: Server, place: str) -> None:
    schema = {
        "type": "object",
        "properties": {"read": {"type": "string", "enum": ["trunk", "leaf"]}},
        "required": ["read"],
        "additionalProperties": False,
    }
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "part", "schema": schema}}
    if place != "json_schema":
        wanted = {"type": "json_object", "schema": schema}
    answer = server.client().chat.completions.create(model=NAME, messages=MESSAGES, response_format=wanted, seed=1)
    assert json.loads(answer.choices[0].message.content)["read"] in ("trunk", "leaf")
    assert answer.choices[0].finish_reason == "stop"


TOOL: Any = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {
            "type": "object",
            "properties": {"part": {"type": "string", "enum": ["trunk", "leaf"]}},
            "required": ["part"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look_up"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_is_one_call_with_arguments_of_its_schema(server: Server, choice: Any, stream: bool) -> None:
    made = server.client().chat.completions.create(
        model=NAME,
        messages=MESSAGES,
        tools=[TOOL],
        tool_choice=choice,
        parallel_tool_calls=False,
        stream=stream,
        seed=1,
    )
    if stream:
        chunks = list(made)
        (call,) = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
        assert not "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
    else:
        (call,) = made.choices[0].message.tool_calls
        assert made.choices[0].finish_reason == "tool_calls" and not made.choices[0].message.content
    assert call.function.name == "look_up" and json.loads(call.function.arguments)["part"] in ("trunk", "leaf")


def test_penalties_and_biases_are_the_librarys(server: Server, reference: LLM) -> None:
    extra = {"repetition_penalty": 1.3, "min_tokens": 4, "logit_bias": {"65": 3.5, "66": -100}}
    answer = server.client().chat.completions.create(
        model=NAME, messages=MESSAGES, max_tokens=12, temperature=0, presence_penalty=0.5, extra_body=extra
    )
    changes: Any = extra | {"logit_bias": {65: 3.5, 66: -100}}
    params = SamplingParams(temperature=0, max_tokens=12, presence_penalty=0.5, **changes)
    assert answer.choices[0].message.content == reference.chat(MESSAGES, params)[0].outputs[0].text
