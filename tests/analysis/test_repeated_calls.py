"""Calls that several spans tell of: within each other, or of one id. Each counts once; what ids do not tell is kept."""

import json
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from trunkattn.analysis.reading.log import read_log
from trunkattn.analysis.records import Log

SAMPLES = Path(__file__).parent / "logs"
NAMES = ("gateway", "http", "engine")
SAID = "Each call counts once: what tells of one again, by the same id or as a span around it, is left out ({})."


def span(name: str, parent: str | None = None, *, text: str | None = None, **fields: Any) -> dict[str, Any]:
    """A span of OpenTelemetry that tells of a call, with a text if there is one. http: it tells of other work."""
    attributes: dict[str, Any] = {"http.route": "/"}
    if name != "http":
        attributes = {"gen_ai.operation.name": "chat", "gen_ai.usage.input_tokens": 64, "server": name}
        attributes |= {"gen_ai.usage.output_tokens": 8}
    if text is not None:
        attributes["gen_ai.input.messages"] = [{"role": "user", "content": text}]
    ids = {"traceId": "t", "spanId": name, "parentSpanId": parent or ""}
    return {"startTimeUnixNano": "1767225600000000000", "attributes": attributes} | ids | fields


def observation(name: str, parent: str | None = None, **fields: Any) -> dict[str, Any]:
    """An observation of Langfuse, a generation unless the name is http."""
    known = {"id": name, "trace_id": "t", "parent_observation_id": parent, "start_time": "2026-01-01 00:00:00"}
    return known | {"type": "SPAN" if name == "http" else "GENERATION", "usage_details": {"input": 64}} | fields


def read(tmp_path: Path, *rows: dict[str, Any]) -> Log:
    """A log with these lines."""
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_log(path, strict=True)


def said(log: Log) -> list[str]:
    """What a log says of spans."""
    return [sentence for sentence in log.assumptions if "span" in sentence]


@pytest.mark.parametrize("order", list(permutations(range(3))))
@pytest.mark.parametrize("make", [span, observation])
def test_an_engine_s_call_within_a_gateway_s_counts_once_wherever_it_stands(
    make: Any, order: tuple[int, ...], tmp_path: Path
) -> None:
    rows = [make(name, parent) for name, parent in zip(NAMES, (None, *NAMES), strict=False)]
    log = read(tmp_path, *(rows[place] for place in order))
    assert [request.line for request in log.requests] == [order.index(2) + 1]
    assert said(log) == [SAID.format("1 time")]


def test_the_span_with_the_text_stays_and_learns_what_the_other_one_knows(tmp_path: Path) -> None:
    gateway = span("gateway", text="When does the ferry leave?")
    del gateway["attributes"]["gen_ai.usage.output_tokens"]
    engine = span("engine", "gateway")
    engine["attributes"] |= {"gen_ai.conversation.id": "harbour", "gen_ai.request.model": "m"}
    (request,) = read(tmp_path, engine, gateway).requests
    assert (request.line, request.num_output_tokens, request.session, request.model) == (2, 8, "harbour", "m")


def test_of_two_spans_with_texts_the_inner_one_stays(tmp_path: Path) -> None:
    log = read(tmp_path, span("gateway", text="a b c d"), span("engine", "gateway", text="system: a b c d"))
    assert [request.line for request in log.requests] == [2]


def test_a_span_around_several_calls_is_none_of_them(tmp_path: Path) -> None:
    steps = [span("agent"), span("loop", "agent"), span("first", "loop"), span("second", "loop")]
    log = read(tmp_path, *steps)
    assert [request.line for request in log.requests] == [3, 4]
    assert said(log) == [SAID.format("2 times")]


def test_a_span_that_is_exported_twice_counts_once_and_the_one_with_the_text_stays(tmp_path: Path) -> None:
    log = read(tmp_path, span("engine"), span("engine", text="a b c"), span("engine"))
    assert [request.line for request in log.requests] == [2]
    assert len(read(tmp_path, observation("a"), observation("a"), observation("b")).requests) == 2


@pytest.mark.parametrize("sample", ["litellm.jsonl", "dynamo.jsonl"])
def test_two_exports_of_one_log_in_a_folder_count_once(sample: str, tmp_path: Path) -> None:
    once = read_log(SAMPLES / sample)
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_bytes((SAMPLES / sample).read_bytes())
    twice = read_log(tmp_path)
    assert [each.arrival for each in twice.requests] == [each.arrival for each in once.requests]
    assert said(twice) == [SAID.format(f"{len(once.requests)} times")]


def test_a_server_may_give_all_of_its_answers_one_id(tmp_path: Path) -> None:
    row = {"call_type": "completion", "id": "chatcmpl-1", "messages": "a b c"}
    assert len(read(tmp_path, row | {"startTime": 1767225600.0}, row | {"startTime": 1767225600.5}).requests) == 2


@pytest.mark.parametrize(
    "rows",
    [
        (span("one"), span("two")),
        (span("one", "http"), span("two", "http"), span("http")),
        (span("", "one"), span("one")),
        (span("0000"), span("0000")),
        (span("one"), span("one", traceId="other"), span("two", "one", traceId="third")),
        (span("one", "two"), span("two", "one")),
        (span("one", "one"), span("two", "nowhere")),
    ],
)
def test_what_ids_do_not_tell_is_not_guessed(rows: tuple[dict[str, Any], ...], tmp_path: Path) -> None:
    log = read(tmp_path, *rows)
    assert len(log.requests) == sum("server" in row["attributes"] for row in rows)
    assert not said(log)


def test_a_call_stays_where_the_one_within_it_failed_or_cannot_be_read(tmp_path: Path) -> None:
    failed = span("engine", "gateway", status={"code": 2})
    del failed["attributes"]["gen_ai.usage.output_tokens"]
    assert [request.line for request in read(tmp_path, span("gateway"), failed).requests] == [1]
    path = tmp_path / "log.jsonl"
    wrong = span("engine", "gateway")
    wrong["attributes"]["gen_ai.usage.input_tokens"] = "many"
    path.write_text("".join(json.dumps(row) + "\n" for row in (span("gateway"), wrong)))
    assert [request.line for request in read_log(path).requests] == [1]


def test_ids_are_read_as_exporters_write_them(tmp_path: Path) -> None:
    plain = span("0xAB")
    nested = {name: value for name, value in span("x").items() if not name.endswith("Id")}
    nested |= {"context": {"trace_id": "0xT", "span_id": "0xcd"}, "parent_id": "0xab"}
    table = {name: value for name, value in span("x").items() if not name.endswith("Id")}
    table |= {"context.trace_id": "t", "context.span_id": "ef", "parent_id": "cd"}
    assert [request.line for request in read(tmp_path, plain, nested, table).requests] == [3]


def test_calls_within_each_other_do_not_run_out_of_stack(tmp_path: Path) -> None:
    rows = [span(f"s{number}", f"s{number - 1}") for number in range(3000)]
    assert [request.line for request in read(tmp_path, *rows).requests] == [3000]
