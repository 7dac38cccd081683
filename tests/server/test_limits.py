"""What one client sends neither stops nor reaches another: limits, hosts, tenants, templates, connections."""

import gc
import json
import resource
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.engines import serve_hostile
from trunkattn.server import ServerOptions, admission, limits, running
from trunkattn.server.bodies.json_size import json_size
from trunkattn.server.engine_loop import Submission
from trunkattn.server.prompts import conversation
from trunkattn.server.prompts.template_clock import TemplateTimeout, template_clock

from .conftest import PATIENCE, Server, count_of, wait_for, whole_answer

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hello"}]
BASE: dict[str, Any] = {"prompt": "x", "max_tokens": 2, "temperature": 0}
VARIABLES = "chat_template_kwargs"
DEEP_CALL = {"function": {"name": "f", "arguments": "[" * 100_000}}
DEEP = json.loads("[" * 100 + "]" * 100)

TOO_MUCH: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETE, {"prompt": [1] * 999_000 + ["x"]}, "prompt"),
    (COMPLETE, {"prompt": ["x"] * 2000}, "n"),
    (COMPLETE, {"prompt": [[1]] * 3000}, "prompt"),
    (COMPLETE, BASE | {f"zq{i}": 1 for i in range(1000)}, "zq64"),
    (CHAT, {"messages": MESSAGES, "modalities": ["text"] * 9}, "modalities"),
    (COMPLETE, BASE | {"top_k": 2**63}, "top_k"),
    (COMPLETE, BASE | {"temperature": 2**63}, "temperature"),
    (COMPLETE, BASE | {"temperature": 10**400}, "temperature"),
    (COMPLETE, BASE | {"repetition_penalty": 1e-300}, "repetition_penalty"),
    (COMPLETE, BASE | {"logit_bias": {"5": 1e300}}, "logit_bias"),
    (COMPLETE, BASE | {"logit_bias": {"5": 10**400}}, "logit_bias"),
    (COMPLETE, BASE | {"logit_bias": {str(i): 1 for i in range(2000)}}, "logit_bias"),
    (COMPLETE, BASE | {"bad_words": ["w"] * 4000}, "bad_words"),
    (COMPLETE, BASE | {"stop": ["w"] * 4000}, "stop"),
    (COMPLETE, BASE | {"stop_token_ids": [5] * 100_000}, "stop_token_ids"),
    (COMPLETE, BASE | {"allowed_token_ids": [5] * 100_000}, "allowed_token_ids"),
    (COMPLETE, BASE | {"logprobs": 257}, "logprobs"),
    (COMPLETE, BASE | {"structured_outputs": {"regex": "(a|b)?" * 15_000}}, "structured_outputs.regex"),
    (COMPLETE, BASE | {"structured_outputs": {"json": {"$ref": "#"}}}, "structured_outputs"),
    (COMPLETE, BASE | {"structured_outputs": {"regex": r"[^\s\S]"}}, "structured_outputs"),
    (COMPLETE, BASE | {"structured_outputs": {"choice": ["x"] * 2000}}, "structured_outputs.choice"),
    (COMPLETE, BASE | {"cache_salt": "s" * 10_000}, "cache_salt"),
    (CHAT, {"messages": MESSAGES * 3000}, "messages"),
    (CHAT, {"messages": MESSAGES, "top_logprobs": 50, "logprobs": True}, "top_logprobs"),
    (CHAT, {"messages": MESSAGES, "chat_template_kwargs": {"x": DEEP}}, "chat_template_kwargs"),
    (CHAT, {"messages": MESSAGES, "chat_template_kwargs": {"chat_template": "x"}}, f"{VARIABLES}.chat_template"),
    (CHAT, {"messages": MESSAGES, "chat_template_kwargs": {"tokenizer_kwargs": {}}}, f"{VARIABLES}.tokenizer_kwargs"),
    (CHAT, {"messages": MESSAGES, "max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [DEEP_CALL]}]},
     "messages[0].tool_calls[0].function.arguments"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "param"), TOO_MUCH, ids=[param for _, _, param in TOO_MUCH])
def test_too_much_is_a_short_400_that_names_the_field(
    server: Server, path: str, body: dict[str, Any], param: str
) -> None:
    response = server.post(path, body)
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert error["param"].startswith(param) and len(error["message"]) < 1100


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", ["zzz\ud83d", "prompt\ud83d", "\0", "x" * 100_000, "", "a\nb"])
def test_names_of_every_kind(start_server: Callable[..., Server], name: str, strict: bool) -> None:
    server = start_server(strict_requests=strict)
    raw = json.dumps(BASE | {name: 1}).encode()
    response = httpx.post(f"{server.url}{COMPLETE}", content=raw, timeout=PATIENCE)
    assert response.status_code == (400 if strict or name.startswith("prompt") else 200), response.text
    assert len(response.text) < 1500


@pytest.mark.parametrize("field", ["logit_bias", "metadata", "structured_outputs"])
def test_names_within_a_field(server: Server, field: str) -> None:
    raw = json.dumps(BASE | {field: {"\ud83d": 1}}).encode()
    response = httpx.post(f"{server.url}{COMPLETE}", content=raw, timeout=PATIENCE)
    assert response.status_code == (200 if field == "metadata" else 400), response.text


def test_more_tokens_than_any_text_has(server: Server) -> None:
    response = server.post("/detokenize", {"tokens": [1] * 900_000})
    assert response.status_code == 400 and "tokens has 900000 items" in response.json()["error"]["message"]


@pytest.mark.parametrize("raw", [b'{"a":' + b"[" * 100_000, b'{"x":' + b"1" * 5000 + b"}", b"[" + b"1," * 1_200_000])
def test_json_that_nobody_should_read(server: Server, raw: bytes) -> None:
    response = httpx.post(f"{server.url}{COMPLETE}", content=raw, timeout=PATIENCE)
    assert response.status_code == 400 and len(response.text) < 1000


MANY_CALLS = [{"function": {"name": "f", "arguments": "[" + "1," * 20_000 + "1]"}}] * 3
BEFORE_READING: dict[str, tuple[str, bytes]] = {
    "values of tools": (CHAT, b'{"messages":[],"tools":[' + b"1," * 100_000 + b"1]}"),
    "values of a template": (CHAT, b'{"chat_template_kwargs":{"x":[' + b"1," * 990_000 + b"1]}}"),
    "lists": (COMPLETE, b'{"prompt":[' + b"[]," * 100_000 + b"[]]}"),
    "mappings": (COMPLETE, b'{"prompt":[' + b"{}," * 100_000 + b"{}]}"),
    "names": (COMPLETE, b"{" + b",".join(b'"%d":1' % i for i in range(100_001)) + b"}"),
    "texts": (COMPLETE, b'{"prompt":[' + b'"x",' * 100_000 + b'"x"]}'),
    "quotes": (COMPLETE, b'"' * 1_000_000),
    "the least floats": (COMPLETE, b'{"prompt":[' + b"5e-324," * 900_000 + b"1]}"),
    "exponents": (COMPLETE, b'{"prompt":[' + b"9E9,true," * 100_000 + b"1]}"),
    "fractions": (COMPLETE, b'{"prompt":[' + b"0.123456789012345678," * 700_000 + b"1]}"),
    "lists after marks within a text": (COMPLETE, rb'{"x":"\\","y":"\"","prompt":[' + b"[]," * 100_000 + b"[]]}"),
}


@pytest.mark.parametrize("kind", BEFORE_READING)
def test_what_holds_too_much_is_refused_before_it_is_read(
    server: Server, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("trunkattn.server.bodies.intake.json.loads", None)
    path, raw = BEFORE_READING[kind]
    response = httpx.post(f"{server.url}{path}", content=raw, timeout=PATIENCE)
    assert response.status_code == 400 and "expected at most 50000" in response.text


@pytest.mark.parametrize("number", ["9" * 513, "-" + "9" * 513, "0." + "9" * 600, "1e" + "9" * 600])
def test_numbers_that_take_long_to_be_read_are_refused_before(
    server: Server, monkeypatch: pytest.MonkeyPatch, number: str
) -> None:
    """Python reads and writes the digits of an integer in quadratic time, and others wait for its lock."""
    call = {"function": {"name": "f", "arguments": f'{{"x": ["1", {number}]}}'}}
    body = {"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [call]}], "max_tokens": 1}
    with monkeypatch.context() as patches:
        patches.setattr(conversation, "_arguments", None)
        refused = server.post(CHAT, body)
    assert refused.status_code == 400 and "at most 512 digits" in refused.json()["error"]["message"]
    assert refused.json()["error"]["param"] == "messages[1].tool_calls[0].function.arguments"
    text = json.dumps(BASE | {"metadata": {"x": "9" * 600}})
    assert httpx.post(server.url + COMPLETE, content=text, timeout=PATIENCE).status_code == 200
    monkeypatch.setattr("trunkattn.server.bodies.intake.json.loads", None)
    raw = text[:-1] + f', "metadata": [{number}]}}'
    refused = httpx.post(server.url + COMPLETE, content=raw, timeout=PATIENCE)
    assert refused.status_code == 400 and "too many digits: expected at most 512" in refused.text


def test_words_of_json_are_no_fractions() -> None:
    raw = b'{"a.e": ["1.5e3", true, false, null, {"b": -0.5}, 1E5]}'
    assert json_size(raw, 100, 10).nodes == len(('"a.e"', '"1.5e3"', '"b"', "{", "[", "{", ".", "E"))


def test_texts_and_token_ids_may_be_long(server: Server) -> None:
    text = '[{"a": "b"}, \\"' * 40_000
    for path, body in (
        (CHAT, {"messages": [{"role": "user", "content": text}]}),
        (COMPLETE, {"prompt": text}),
        (COMPLETE, {"prompt": [1] * 900_000}),
    ):
        response = server.post(path, body)
        assert "tokens" in response.json()["error"]["message"] or "characters" in response.json()["error"]["message"]


def test_the_calls_of_a_conversation_are_counted_before_they_are_read(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversation, "_arguments", None)
    response = server.post(CHAT, {"messages": [*MESSAGES, {"role": "assistant", "tool_calls": MANY_CALLS}]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages[1].tool_calls[2].function.arguments"


def test_log_probabilities_that_would_fill_the_memory(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    body = BASE | {"logprobs": 20, "max_tokens": 10}
    assert server.post(COMPLETE, body).status_code == 200
    monkeypatch.setattr(admission, "LIMITS", limits.RequestLimits(logprob_entries=200))
    response = server.post(COMPLETE, body)
    assert response.status_code == 400 and "expected at most 200; lower n" in response.json()["error"]["message"]


def test_log_probabilities_of_prompts_count_too(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "LIMITS", limits.RequestLimits(logprob_entries=300))
    body = BASE | {"echo": True, "logprobs": 1}
    assert server.post(COMPLETE, body | {"prompt": "x" * 100}).status_code == 200
    kept = {"prompt": "x" * 300, "truncate_prompt_tokens": 50}
    assert server.post(COMPLETE, body | kept).status_code == 200, "only these are read"
    for prompt in ("x" * 200, ["x" * 100] * 2):
        response = server.post(COMPLETE, body | {"prompt": prompt})
        assert response.status_code == 400 and response.json()["error"]["param"] == "logprobs"
    with server.app.state.service.admission.room([Submission(None, num_logprobs=299)]):
        assert server.post(COMPLETE, body).status_code == 429


def test_tools_count_as_the_prompt_that_they_become(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.llm.tokenizer, "chat_template", "{{ tools | tojson }}")
    tool = {"type": "function", "function": {"name": "f", "description": "ab " * 1_000_000}}
    response = server.post(CHAT, {"messages": MESSAGES, "tools": [tool]})
    assert response.status_code == 400 and response.json()["error"]["param"] == "messages"


def test_the_benchmark_of_hostile_clients_weighs_the_largest_tools(
    start_server: Callable[..., Server], save_tiny_model: Callable[..., None], tmp_path: Path
) -> None:
    save_tiny_model(tmp_path)
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": "{{ messages[0].content }}"}))
    serve_hostile.read_all(tmp_path)
    path, body = serve_hostile.hostile()["the most values"]
    answer = httpx.post(start_server(path=tmp_path).url + path, content=body, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text


def test_a_template_has_a_limit_of_time() -> None:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    loop = "{% for a in range(30000) %}{% for b in range(3000) %}{% endfor %}{% endfor %}"
    template, traced = ImmutableSandboxedEnvironment().from_string(loop), sys.gettrace()
    pauses: list[int] = []
    with pytest.raises(TemplateTimeout), template_clock(0.2, lambda: pauses.append(1)):
        template.render()
    assert sys.gettrace() is traced and len(pauses) > 1000


@pytest.mark.parametrize(
    "template", ["{{ 1 // (messages | length - 1) }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"]
)
def test_whatever_a_template_raises_is_an_error_of_the_messages(
    server: Server, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    monkeypatch.setattr(server.llm.tokenizer, "chat_template", template)
    gc.disable()  # finalizers of other tests' garbage would fail where the template's recursion ends
    try:
        response = server.post(CHAT, {"messages": MESSAGES})
    finally:
        gc.enable()
    assert response.status_code == 400 and response.json()["error"]["param"] == "messages"


def test_names_that_are_not_ours(server: Server, start_server: Callable[..., Server]) -> None:
    for headers in ({"Host": "evil.example"}, {"Host": "evil.example:80", "Origin": "http://evil.example"}):
        refused = server.get("/v1/models", headers=headers)
        assert refused.status_code == 421 and "--allowed-host" in refused.json()["error"]["message"]
    assert server.get("/v1/models", headers={"Origin": "http://evil.example"}).status_code == 403
    for host in ("localhost:1", "localhost.:1", "127.0.0.1", "[::1]:8000", "192.168.1.5"):
        assert server.get("/v1/models", headers={"Host": host}).status_code == 200
    assert server.get("/v1/models", headers={"Origin": server.url}).status_code == 200
    named = start_server(allowed_hosts=("LLM.example", "llm.cluster."))
    for host in ("llm.example", "llm.example.", "llm.cluster"):
        assert named.get("/v1/models", headers={"Host": host}).status_code == 200
    assert server.get("/health/").status_code == 404


@pytest.mark.parametrize("key", ["", "a b", "\xe4", "a\x7f", "\x1b"])
def test_a_key_is_what_a_header_can_hold(key: str) -> None:
    with pytest.raises(ValueError, match="api_key: expected visible ASCII characters"):
        ServerOptions("a", api_keys=("good~!", key))


def test_each_tenant_sees_its_own(start_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch) -> None:
    server = start_server(api_keys=("key-one", "key-two"))
    server.stand_still(monkeypatch)
    one, two = ({"Authorization": f"Bearer {key}"} for key in ("key-one", "key-two"))

    def shown(headers: dict[str, str]) -> str:
        with httpx.stream("GET", f"{server.url}/live", headers=headers, timeout=PATIENCE) as page:
            return next(line for line in page.iter_lines() if line.startswith("data: "))

    body = {"prompt": "The secret of tenant one.", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}{COMPLETE}", json=body, headers=one, timeout=PATIENCE) as answer:
        lines = answer.iter_lines()  # without a reader the answer would end
        next(lines)
        assert "secret" in shown(one) and "secret" not in shown(two)
    server.wait_idle()


@pytest.mark.parametrize("name", ["", "\udcff", "x" * (limits.LIMITS.label + 1)])
def test_a_model_has_a_name_that_a_request_can_send(name: str) -> None:
    with pytest.raises(ValueError, match=r"served_model_name=.*expected"):
        ServerOptions(name)


def test_what_no_other_try_mends_is_told_at_once(start_server: Callable[..., Server]) -> None:
    server = start_server(max_waiting=2, max_answer_tokens=3)
    assert server.post(COMPLETE, BASE | {"prompt": ["a", "b"]}).status_code == 200
    asked = [
        (COMPLETE, BASE | {"prompt": ["a", "b", "c"]}, "prompt"),
        (COMPLETE, BASE | {"max_tokens": 9}, "max_tokens"),
        (CHAT, {"messages": MESSAGES, "max_completion_tokens": 9}, "max_completion_tokens"),
    ]
    for path, body, param in asked:
        refused = server.post(path, body)
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, param) and error["message"].startswith(param)


def test_who_waits_for_the_tokenizer_waits(start_server: Callable[..., Server]) -> None:
    server = start_server(max_waiting=1)
    waits, release = server.app.state.service, threading.Event()
    blocked = threading.Event()
    waits.lanes._short[0].submit(lambda: (blocked.set(), release.wait(PATIENCE)))
    assert blocked.wait(PATIENCE)
    first = threading.Thread(target=server.post, args=(COMPLETE, BASE))
    first.start()
    wait_for(lambda: waits.loop.num_waiting == 1)
    assert server.post(COMPLETE, BASE).status_code == 429
    release.set()
    first.join()


def test_connections_that_say_nothing_are_closed(
    start_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start_server()
    where = urlsplit(server.url)
    with monkeypatch.context() as patch:
        patch.setattr(running, "LIMITS", limits.RequestLimits(header_seconds=0.3))
        silent = socket.create_connection((where.hostname, where.port), PATIENCE)
        slow = socket.create_connection((where.hostname, where.port), PATIENCE)
        with suppress(ConnectionError):  # a busy machine may not get so far
            slow.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")
        for connection in (silent, slow):
            with suppress(ConnectionResetError):
                assert connection.recv(1) == b""
    assert server.get("/health").status_code == 200


def test_the_connection_that_is_idle_longest_makes_room(
    start_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "_limited_protocol", lambda: type("Few", (running.LimitedProtocol,), {"most": 5}))
    server = start_server()
    where = urlsplit(server.url)
    idle = [socket.create_connection((where.hostname, where.port)) for _ in range(40)]
    for _ in range(3):
        assert server.get("/health").status_code == 200
    for connection in idle:
        connection.close()


def test_files_are_not_limited_more_than_they_must_be() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert min(limit for limit in before if limit != resource.RLIM_INFINITY) > 512
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
    try:
        protocol = running._limited_protocol()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert hard == before[1] and 512 < soft <= 1 << 16 and 256 < protocol.most < soft
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_busy_connections_make_no_room_and_a_new_one_is_told_so(
    start_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(running, "_limited_protocol", lambda: type("Few", (running.LimitedProtocol,), {"most": 1}))
    server = start_server()
    go_on = server.stand_still(monkeypatch)
    with server.send({**BASE, "max_tokens": 40, "ignore_eos": True, "stream": True}) as busy:
        assert busy.recv(1) == b"H"
        status, headers, body = whole_answer(server, "")
        go_on.set()
    assert (status, headers["retry-after"]) == (503, "1") and "1 connections are busy" in body
    assert headers["x-request-id"] in caplog.text and count_of(server, "other", 503) == 1


def test_a_bad_head_is_an_error_of_the_apis_shape(server: Server) -> None:
    where = urlsplit(server.url)
    with socket.create_connection((where.hostname, where.port)) as connection:
        connection.sendall(b"NO SENSE\r\n\r\n")
        answer = b""
        while part := connection.recv(4096):
            answer += part
    assert b"400" in answer.split(b"\r\n")[0] and json.loads(answer.split(b"\r\n\r\n")[1])["error"]["message"]


def test_a_body_that_is_too_large_is_read_before_it_is_refused(start_server: Callable[..., Server]) -> None:
    server = start_server(max_body_bytes=10_000)
    for _ in range(3):
        assert httpx.post(f"{server.url}{COMPLETE}", content=b"a" * 20_000_000, timeout=PATIENCE).status_code == 413


def test_what_the_server_did_wrong_is_counted(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KeyError("a fault of ours")

    def counted() -> float:
        families = text_string_to_metric_families(server.get("/metrics").text)
        samples = [sample for one in families for sample in one.samples if sample.name.endswith("_requests_total")]
        return sum(sample.value for sample in samples if sample.labels.get("status") == "500")

    before = counted()
    monkeypatch.setattr(server.app.state.service.sampling, "params", fail)
    response = server.post(COMPLETE, BASE)
    assert response.status_code == 500 and response.json()["error"]["type"] == "server_error"
    assert counted() == before + 1
