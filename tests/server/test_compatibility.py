"""Requests as clients in use send them: histories, fields without effect, unknown names, echo, and what is logged."""

import json
import logging
import re
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from trunkattn import LLM, SamplingParams
from trunkattn.server.engine_loop import Submission
from trunkattn.server.monitoring.log_lines import report, request_line, status_line

from .conftest import NAME, PATIENCE, Server

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
USER: dict[str, Any] = {"role": "user", "content": "hi"}
SAID: dict[str, Any] = {"role": "assistant", "content": "x"}
CALL: dict[str, Any] = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
RESULT: dict[str, Any] = {"role": "tool", "tool_call_id": "c", "content": "1"}
NULLS = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "tool_calls"))

ACCEPTED: dict[str, dict[str, Any]] = {
    "model_dump() of the SDK": {"messages": [USER, SAID | NULLS, USER]},
    "a call without content": {
        "messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, RESULT]
    },
    "a parsed call": {
        "messages": [
            USER,
            SAID | {"tool_calls": [CALL | {"function": CALL["function"] | {"parsed_arguments": {"a": 1}}}]},
            RESULT,
        ]
    },
    "a call whose arguments are a mapping": {
        "messages": [USER, SAID | {"tool_calls": [CALL | {"function": {"name": "f", "arguments": {"a": 1}}}]}, RESULT]
    },
    "a streamed call": {"messages": [USER, SAID | {"tool_calls": [CALL | {"index": 0}]}, RESULT]},
    "a type in a message": {"messages": [USER | {"type": "text"}]},
    "reasoning": {"messages": [USER, SAID | {"reasoning_content": "y"}, USER]},
    "a refusal part": {"messages": [USER, SAID | {"content": [{"type": "refusal", "refusal": "no"}]}, USER]},
    "cache_control": {
        "messages": [USER | {"content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]}]
    },
    "parts as in /v1/responses": {
        "messages": [
            USER | {"content": [{"type": "input_text", "text": "hi", "prompt_cache_breakpoint": {"mode": "explicit"}}]},
            SAID | {"content": [{"type": "output_text", "text": "x", "annotations": [], "logprobs": []}]},
            USER,
        ]
    },
    "nulls": dict.fromkeys(("n", "stream", "logprobs", "temperature", "tools", "tool_choice", "stop", "functions")),
    "obfuscation": {"stream": True, "stream_options": {"include_obfuscation": False}},
    "fields without effect": {
        "store": False,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "reasoning_effort": "low",
        "verbosity": "low",
        "prediction": {"type": "content", "content": "x"},
        "prompt_cache_key": "k",
        "prompt_cache_options": {"mode": "implicit", "ttl": "30m"},
        "safety_identifier": "s",
        "modalities": ["text"],
    },
    "nothing of what there is not": {
        "use_beam_search": False,
        "functions": [],
        "documents": [],
        "web_search_options": {},
        "guided_json": "",
        "echo": False,
        "add_special_tokens": False,
        "return_token_ids": False,
        "truncation_side": "left",
        "response_format": {"type": "text", "json_schema": None},
    },
    "a choice of the form's program": {
        "structured_outputs": {"regex": "a", "disable_fallback": True, "disable_any_whitespace": False}
    },
    "no function of none": {"functions": [], "function_call": "none"},
    "any function of none": {"function_call": "auto"},
    "a schema with all that stands beside one": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "a", "description": "d", "strict": True, "schema": {"type": "object"}},
        }
    },
    "an unknown name": {"provider": {"order": ["x"]}},
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_clients_send_is_accepted(server: Server, name: str) -> None:
    response = server.post(CHAT, {"messages": [USER], "max_tokens": 1} | ACCEPTED[name])
    assert response.status_code == 200, response.text


def test_the_model_reads_the_same_history(server: Server) -> None:
    def tokens(message: dict[str, Any]) -> list[int]:
        return server.post("/tokenize", {"messages": [USER, message, USER]}).json()["tokens"]

    assert tokens(SAID | NULLS) == tokens(SAID)
    for kind in ("text", "input_text", "output_text"):
        assert tokens(SAID | {"content": [{"type": kind, "text": "x"}]}) == tokens(SAID)
    assert tokens({"role": "assistant", "content": None}) == tokens({"role": "assistant", "content": ""})


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"max_token": 5}, "max_token=5: did you mean max_tokens?"),
        ({"temprature": 0}, "temprature=0: did you mean temperature?"),
        ({"max_new_tokens": 5}, "expected max_tokens instead"),
        ({"return_prompt_text": True}, "return_prompt_text=True: this server does not have it; leave it out"),
        ({"min_new_tokens": 5}, "expected min_tokens instead"),
        ({"truncation_side": "right"}, "truncation_side='right': input should be 'left'"),
        ({"guided_json": {"type": "object"}}, "expected structured_outputs instead"),
        ({"modalities": ["audio"]}, "modalities[0]='audio'"),
        ({"moderation": {"model": "m"}}, "this server moderates nothing"),
        (
            {"messages": [USER, SAID | {"content": [{"type": "thinking", "thinking": "y"}]}]},
            "messages[1].content[0].type='thinking': expected reasoning_content of the message instead",
        ),
        ({"max_output_tokens": 5}, "expected max_tokens instead"),
        ({"json_schema": {"type": "array"}}, "expected structured_outputs instead"),
        ({"function_call": {"name": "f"}}, "expected tool_choice instead"),
        ({"function_call": "none", "tools": [TOOL]}, "expected tool_choice='none' where there are tools"),
        ({"functions": [TOOL["function"]], "function_call": "auto"}, "expected tools instead"),
        ({"echo": True}, "this server sends only the answer"),
        ({"prompt": "x"}, "expected messages instead"),
        ({"suffix": "x"}, "this server cannot fill in"),
        ({"best_of": 2}, "best_of=2: expected n"),
        ({"add_special_tokens": True}, "the model's template writes them"),
        (
            {"response_format": {"type": "text", "schema": {"type": "object"}}},
            "response_format.type='text': expected 'json_object' where a schema stands beside it",
        ),
        (
            {"response_format": {"type": "json_object", "json_schema": {"name": "a", "schema": {"type": "object"}}}},
            "response_format.type='json_object': expected 'json_schema' where a json_schema is given",
        ),
        ({"structured_outputs": {"regex": "a b", "whitespace_pattern": " *"}}, "one way to write a form"),
        ({"structured_outputs": {"json": {}, "disable_any_whitespace": True}}, "one way to write a form"),
        (
            {"structured_outputs": {"json": {}, "disable_additional_properties": True}},
            "expected additionalProperties in the schema instead",
        ),
    ],
)
def test_a_name_that_would_be_missed_is_refused(server: Server, extra: dict[str, Any], message: str) -> None:
    response = server.post(CHAT, {"messages": [USER]} | extra)
    assert response.status_code == 400 and message in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"messages": [USER]}, "expected a request to /v1/chat/completions with it"),
        ({"tools": [TOOL]}, "expected a request to /v1/chat/completions with it"),
        ({"chat_template_kwargs": {"a": 1}}, "expected a request to /v1/chat/completions with it"),
        ({"max_completion_tokens": 5}, "expected max_tokens instead"),
        ({"top_logprobs": 2}, "expected logprobs, a number, instead"),
    ],
)
def test_a_name_of_the_other_endpoint_is_refused(server: Server, extra: dict[str, Any], message: str) -> None:
    response = server.post(COMPLETE, {"prompt": "x"} | extra)
    assert response.status_code == 400 and message in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "extra",
    [{"chat_template": "x"}, {"documents": [{"text": "x"}]}, {"functions": [TOOL]}, {"truncate_prompt_tokens": 2}],
)
def test_tokens_of_another_prompt_are_not_counted_in_silence(server: Server, extra: dict[str, Any]) -> None:
    response = server.post("/tokenize", {"messages": [USER]} | extra)
    assert response.status_code == 400 and response.json()["error"]["param"] in extra


def test_unknown_names_are_logged_once_or_refused(
    server: Server, start_server: Callable[..., Server], caplog: pytest.LogCaptureFixture
) -> None:
    body = {"prompt": "x", "max_tokens": 1, "zzz": 1, "yyy": [2]}
    with caplog.at_level(logging.INFO, "trunkattn"):
        assert server.post(COMPLETE, body).status_code == 200
    lines = [record.getMessage() for record in caplog.records if "Ignored" in record.getMessage()]
    assert lines == ["Ignored fields that do not exist: 'yyy', 'zzz'"]
    strict = start_server(strict_requests=True)
    refused = strict.post(COMPLETE, body)
    assert refused.status_code == 400 and "zzz=1: there is no such field" in refused.json()["error"]["message"]
    assert strict.post(COMPLETE, {"prompt": "x", "max_tokens": 1, "store": False}).status_code == 200


ONLY_TEXTS = "{% for m in messages %}{{ m.content }}{% endfor %}{{ mood }}"
READS_TOOLS_IN_VAIN = ONLY_TEXTS + "{% if tools %}{% endif %}"
FORCED: list[Any] = ["required", {"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize("template", [ONLY_TEXTS, READS_TOOLS_IN_VAIN])
@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_tools_that_the_model_would_not_see_are_refused(
    server: Server, monkeypatch: pytest.MonkeyPatch, path: str, template: str
) -> None:
    body = {"messages": [USER], "tools": [TOOL]}
    assert server.post(path, body).status_code == 200
    monkeypatch.setattr(server.llm.tokenizer, "chat_template", template)
    refused = server.post(path, body)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "tools") and "template shows none" in error["message"]


@pytest.mark.parametrize("template", [ONLY_TEXTS, READS_TOOLS_IN_VAIN])
@pytest.mark.parametrize("choice", ["none", *FORCED], ids=str)
def test_tools_pass_if_nothing_has_to_show_them(
    server: Server, monkeypatch: pytest.MonkeyPatch, choice: Any, template: str
) -> None:
    """A forced call follows the tools' schemas by the form of its answer; libraries ask for objects that way."""
    monkeypatch.setattr(server.llm.tokenizer, "chat_template", template)
    function = {"name": "f", "parameters": {"type": "object", "additionalProperties": False}}
    tools = [{"type": "function", "function": function}]
    body = {"messages": [USER], "tools": tools, "tool_choice": choice, "parallel_tool_calls": False, "seed": 1}
    (answer,) = server.post(CHAT, body).json()["choices"]
    assert choice == "none" or answer["message"]["tool_calls"][0]["function"]["name"] == "f"


def test_tools_pass_if_a_form_may_be_that_of_calls(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.llm.tokenizer, "chat_template", ONLY_TEXTS)
    form = {"choice": ['<tool_call>{"name": "f", "arguments": {}}</tool_call>']}
    body = {"messages": [USER], "tools": [TOOL], "structured_outputs": form, "max_tokens": 200}
    (answer,) = server.post(CHAT, body).json()["choices"]
    assert answer["message"]["tool_calls"][0]["function"]["name"] == "f"


def test_variables_of_other_templates_are_logged_or_refused(
    server: Server,
    start_server: Callable[..., Server],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    strict = start_server(strict_requests=True)
    for one in (server, strict):
        monkeypatch.setattr(one.llm.tokenizer, "chat_template", ONLY_TEXTS)
    body = {"messages": [USER], "max_tokens": 1, "chat_template_kwargs": {"mood": "calm", "enable_thinking": False}}
    with caplog.at_level(logging.INFO, "trunkattn"):
        answer = server.post(CHAT, body)
    assert answer.status_code == 200 and answer.json()["usage"]["prompt_tokens"] == len("hicalm")
    lines = [record.getMessage() for record in caplog.records if "Ignored" in record.getMessage()]
    assert lines == ["Ignored variables that the chat template does not read: 'enable_thinking'"]
    misspelt = body | {"chat_template_kwargs": {"moood": "calm"}}
    for one, sent, name in (
        (strict, body, "enable_thinking"),
        (strict, misspelt, "moood"),
        (server, misspelt, "moood"),
    ):
        refused = one.post(CHAT, sent)
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, f"chat_template_kwargs.{name}")
        assert "expected one of its variables, which are mood" in error["message"]
    many = server.post(CHAT, body | {"chat_template_kwargs": dict.fromkeys(map(str, range(65)), 1)})
    assert many.status_code == 400 and "names 65 variables that the model's" in many.json()["error"]["message"]


def test_echo_with_logprobs_scores_the_prompt(server: Server, reference: LLM) -> None:
    prompt = list(b"Which part is read?")
    body = {"prompt": [prompt], "echo": True, "logprobs": 2, "max_tokens": 1, "temperature": 0}
    choice = server.post(COMPLETE, body).json()["choices"][0]
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=2, prompt_logprobs=2)
    (output,) = reference.generate([prompt], params)
    found = choice["logprobs"]
    assert output.prompt_logprobs is not None and len(found["tokens"]) == len(prompt) + 1
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    expected = [
        entry[token].logprob for token, entry in zip(prompt[1:], output.prompt_logprobs[1:], strict=True) if entry
    ]
    assert found["token_logprobs"][1:-1] == pytest.approx(expected, abs=1e-4)
    assert choice["text"].startswith(server.post("/detokenize", {"tokens": prompt}).json()["prompt"])
    assert found["text_offset"] == sorted(found["text_offset"])


@pytest.mark.parametrize("stream", [False, True])
def test_echo_alone_without_an_answer(server: Server, stream: bool) -> None:
    made = server.client().completions.create(
        model=NAME, prompt="The trunk", echo=True, logprobs=1, max_tokens=0, temperature=0, stream=stream
    )
    choices = [chunk.choices[0] for chunk in made] if stream else made.choices
    assert "".join(choice.text for choice in choices) == "The trunk"
    assert sum(len(choice.logprobs.tokens) for choice in choices if choice.logprobs) == len("The trunk")


def test_every_event_has_the_counts_if_asked(server: Server) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    made = server.client().completions.create(
        model=NAME, prompt="x", max_tokens=3, stream=True, stream_options=options, extra_body={"ignore_eos": True}
    )
    counts = [chunk.usage.completion_tokens for chunk in made if chunk.usage]
    assert len(counts) > 1 and counts == sorted(counts) and counts[-1] == 3


def test_the_counts_of_every_event_are_those_of_the_whole_request(server: Server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": ["x", "yz"], "n": 2, "max_tokens": 3, "ignore_eos": True, "stream": True}
    lines = server.post(COMPLETE, body | {"stream_options": options}).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    counts = [(event["usage"]["prompt_tokens"], event["usage"]["completion_tokens"]) for event in events]
    assert counts == sorted(counts) and counts[-2:] == [(3, 12)] * 2


@pytest.mark.parametrize("end", [{"logit_bias": {"256": 100}}, {"stop": "a", "allowed_token_ids": [64]}])
def test_what_an_echo_alone_leaves_out_ends_nothing(server: Server, end: dict[str, Any]) -> None:
    choice = server.post(COMPLETE, {"prompt": "x", "echo": True, "max_tokens": 0} | end).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("x", "length", None)


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
def test_the_counts_at_the_end_are_null_before(server: Server, path: str) -> None:
    body = {"messages": [USER]} if path == CHAT else {"prompt": "x"}
    asked = {"stream": True, "n": 2, "max_tokens": 2, "ignore_eos": True, "stream_options": {"include_usage": True}}
    lines = server.post(path, body | asked).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert [event["usage"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 4


def test_events_have_one_line_for_clients_that_know_unicodes(start_server: Callable[..., Server]) -> None:
    server = start_server()
    server.say("a\u2028b\x85c\u2029d")
    body = {"messages": [USER], "stream": True, "max_tokens": 20}
    with httpx.stream("POST", f"{server.url}{CHAT}", json=body, timeout=PATIENCE) as response:
        events = [json.loads(line.removeprefix("data: ")) for line in response.iter_lines() if "{" in line]
    said = "".join(choice["delta"].get("content", "") for event in events for choice in event["choices"])
    assert said == "a\u2028b\x85c\u2029d"


@pytest.mark.parametrize("arguments", ["", " ", "null", {}])
def test_a_call_without_arguments_has_none_in_the_template(
    server: Server, monkeypatch: pytest.MonkeyPatch, arguments: Any
) -> None:
    template = "{{ messages[1].tool_calls[0].function.arguments | tojson }}"
    monkeypatch.setattr(server.llm.tokenizer, "chat_template", template)
    call = CALL | {"function": {"name": "f", "arguments": arguments}}
    found = server.post("/tokenize", {"messages": [USER, SAID | {"tool_calls": [call]}]}).json()
    assert server.llm.tokenizer.decode(found["tokens"]) == "{}"


def test_metrics_have_vllms_names_beside_ours(server: Server) -> None:
    server.post(COMPLETE, {"prompt": "x" * 40, "max_tokens": 6, "ignore_eos": True})
    families = {one.name: one for one in text_string_to_metric_families(server.get("/metrics").text)}
    pairs = {
        "trunkattn_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
        "trunkattn_inter_token_seconds": "vllm:inter_token_latency_seconds",
        "trunkattn_request_seconds": "vllm:e2e_request_latency_seconds",
        "trunkattn_generated_tokens": "vllm:generation_tokens",
        "trunkattn_prompt_tokens": "vllm:prompt_tokens",
        "trunkattn_running_sequences": "vllm:num_requests_running",
        "trunkattn_waiting_requests": "vllm:num_requests_waiting",
        "trunkattn_prefix_cache_hits": "vllm:prefix_cache_hits",
    }
    for ours, theirs in pairs.items():
        values = [[s.value for s in families[name].samples if "created" not in s.name] for name in (ours, theirs)]
        assert values[0] == values[1], ours
        assert all(sample.labels.get("model_name") == NAME for sample in families[theirs].samples)
    assert families["trunkattn_inter_token_seconds"].type == "histogram"


def test_a_request_has_its_line(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "trunkattn"):
        server.post(COMPLETE, {"prompt": "x" * 20, "max_tokens": 3, "ignore_eos": True})
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("cmpl-")]
    assert "length, prompt 20 tokens" in line and re.search(r"answers 3 tokens, first token after \d+\.\d+ s,", line)


def test_the_line_of_a_request_that_got_nothing_has_its_prompt(reference: LLM) -> None:
    checked = reference.engine.check_request([1, 2, 3], SamplingParams())
    line = request_line("cmpl-1", [Submission(checked, arrival_time=time.monotonic() - 2)], [], is_whole=False)
    assert re.match(r"cmpl-1: cut off, prompt 3 tokens .0 cached., answers 0 tokens, first token after none, 2\.", line)


def test_a_line_says_how_the_server_does(reference: LLM) -> None:
    before = reference.stats
    reference.generate([list(range(40))], SamplingParams(max_tokens=5, ignore_eos=True))
    line = status_line(reference.engine, reference.stats, before, 2.0, 3)
    assert "Avg generation throughput: 2.5 tokens/s, Running: 0 reqs, Waiting: 3 reqs, KV cache usage: 0.0%" in line
    assert "Prefix cache hit rate: " in line and report is not None
