"""What gateways and engines write besides one good answer to one text: failures, pages of calls, several answers, what
was cached or thought, tools, pictures, and files that are damaged in the middle."""

import gzip
import json
import random
from datetime import date
from decimal import Decimal
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import zstandard

from trunkattn.analysis.analyze import analyze
from trunkattn.analysis.ceiling import ceiling_of
from trunkattn.analysis.formats.base import brief
from trunkattn.analysis.reading.log import read_log
from trunkattn.analysis.records import LoggedRequest
from trunkattn.analysis.reports.html import to_html
from trunkattn.analysis.settings import Settings

CALL = {"gen_ai.operation.name": "chat", "gen_ai.usage.input_tokens": 64, "gen_ai.usage.output_tokens": 8}
ASKED = {"role": "user", "content": "When does the ferry leave?"}


def write(tmp_path: Path, *rows: object, name: str = "log.jsonl") -> Path:
    """A log with these lines."""
    path = tmp_path / name
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def read(tmp_path: Path, *rows: object, name: str = "log.jsonl", **options: Any) -> list[LoggedRequest]:
    """The requests of a log with these lines."""
    return read_log(write(tmp_path, *rows, name=name), **options).requests


def span(start: int, **attributes: Any) -> dict[str, Any]:
    """A span of OpenTelemetry."""
    named = {name.replace("__", "."): value for name, value in attributes.items()}
    return {"startTimeUnixNano": str(1767225600_000000000 + start), "attributes": CALL | named}


def export(*spans: dict[str, Any]) -> dict[str, Any]:
    """Spans as one object, as exporters write them."""
    return {"resourceSpans": [{"scopeSpans": [{"spans": list(spans)}]}]}


def observation(**fields: Any) -> dict[str, Any]:
    """An observation of Langfuse."""
    known = {"type": "GENERATION", "traceId": "t", "startTime": "2026-01-01T00:00:00Z", "input": "a b", "output": "c"}
    return known | fields


def test_calls_of_one_line_of_which_only_lengths_are_known_share_nothing(tmp_path: Path) -> None:
    requests = read(tmp_path, export(*(span(number) for number in range(3))))
    assert [request.num_prompt_tokens for request in requests] == [64] * 3
    assert ceiling_of(requests).hit_rate == 0


def test_a_wrong_span_leaves_out_none_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "log.json"
    path.write_text(json.dumps(export(span(0), span(1, gen_ai__usage__input_tokens="many"), span(2))))
    log = read_log(path)
    assert (len(log.requests), log.num_skipped) == (2, 1)
    assert log.skipped[0].reason.startswith("span 2: gen_ai.usage.input_tokens=a text: expected an integer")
    with pytest.raises(ValueError, match="line 1: span 2: "):
        read_log(path, strict=True)


def test_a_wrong_observation_leaves_out_none_beside_it(tmp_path: Path) -> None:
    page = {"data": [observation(), observation(startTime="soon"), observation()]}
    path = tmp_path / "page.json"
    path.write_text(json.dumps(page))
    log = read_log(path)
    assert len(log.requests) == 2
    assert log.skipped[0].reason.startswith("observation 2: startTime=a text")


def test_calls_that_failed_are_no_requests(tmp_path: Path) -> None:
    failed = {name: value for name, value in CALL.items() if "output" not in name}
    bad = {"startTimeUnixNano": "1767225600000000000", "attributes": failed, "status": {"code": 2}}
    partly = span(1, error__type="cancelled")  # it had written eight tokens when it was cancelled
    assert len(read(tmp_path, export(span(0), bad, partly))) == 2
    broken = observation(level="ERROR", output=None)
    assert len(read(tmp_path, observation(), broken, observation(level="ERROR"))) == 2


def test_requests_of_a_batch_that_failed_are_left_out(tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = [
        {"custom_id": name, "url": "/v1/chat/completions", "body": {"messages": [ASKED]}} for name in "abc"
    ]
    asked.append({"custom_id": "d", "url": "/v1/embeddings", "body": {"input": "x"}})
    usage = {"prompt_tokens": 6, "completion_tokens": 9}
    told = [
        {"custom_id": "a", "response": {"status_code": 200, "body": {"choices": [{}], "usage": usage}}, "error": None},
        {"custom_id": "b", "response": {"status_code": 400, "body": {"error": {"message": "bad"}}}, "error": None},
        {"custom_id": "c", "response": None, "error": {"code": "batch_expired"}},
        {"custom_id": "d", "response": {"status_code": 200, "body": {"data": []}}, "error": None},
    ]
    (request,) = read(tmp_path, *asked, *told, strict=True)
    assert (request.line, request.num_output_tokens) == (1, 9)


def test_what_was_cached_or_thought_counts(tmp_path: Path) -> None:
    openai = {
        "prompt_tokens": 100,
        "completion_tokens": 60,
        "prompt_tokens_details": {"cached_tokens": 96},
        "completion_tokens_details": {"reasoning_tokens": 50},
    }
    anthropic = {
        "input_tokens": 4,
        "cache_read_input_tokens": 90,
        "cache_creation_input_tokens": 6,
        "output_tokens": 60,
    }
    for usage in (openai, anthropic):  # 100 tokens of 200 bytes
        (request,) = read(tmp_path, {"prompt": "a" * 200, "usage": usage})
        assert (request.num_prompt_tokens, request.num_output_tokens) == (100, 60)
    apart = {"input": 4, "input_cached_tokens": 96, "output": 10, "output_reasoning_tokens": 50, "total": 160}
    read_apart = {"input": 4, "cache_read_input_tokens": 90, "cache_creation_input_tokens": 6, "output": 60}
    for usage in (apart, read_apart):
        for told in (usage, json.dumps(usage)):
            (request,) = read(tmp_path, observation(input=None, usageDetails=told))
            assert (request.num_prompt_tokens, request.num_output_tokens) == (100, 60)


def test_what_an_answer_thinks_is_counted_where_no_count_is(tmp_path: Path) -> None:
    answer = {"role": "assistant", "content": "b" * 40, "reasoning_content": "t" * 79}
    (request,) = read(tmp_path, {"messages": [ASKED], "response": {"choices": [{"message": answer}]}})
    assert request.num_output_tokens == 30
    (request,) = read(tmp_path, {"messages": [ASKED], "answer": {"content": "", "tool_calls": [{"id": "x" * 20}]}})
    assert request.num_output_tokens == -(-len(json.dumps([{"id": "x" * 20}])) // 4)


def test_the_tokens_of_several_answers_are_divided(tmp_path: Path) -> None:
    usage = {"prompt_tokens": 6, "completion_tokens": 30}
    texts = [{"text": "x"}] * 6
    rows = [
        ({"prompt": "a b", "n": 3, "response": {"usage": usage}}, [(3, 10)]),
        ({"prompt": "a b", "choices": texts[:3], "usage": usage}, [(3, 10)]),
        ({"prompt": ["a b", "c d"], "n": 3, "usage": usage}, [(3, 5)] * 2),
        ({"prompt": ["a b", "c d"], "choices": texts, "usage": usage}, [(3, 5)] * 2),
        ({"prompt": ["a b", "c d"], "choices": texts[:2], "usage": usage}, [(1, 15)] * 2),
        (span(0, gen_ai__request__choice__count=2), [(2, 4)]),
        (observation(modelParameters={"n": 2}, usageDetails={"output": 9}), [(2, 5)]),
    ]
    for row, expected in rows:
        found = read(tmp_path, row)
        assert [(request.num_answers, request.num_output_tokens) for request in found] == expected, row


def test_the_pieces_of_a_streamed_answer_are_one(tmp_path: Path) -> None:
    pieces: list[Any] = [{"choices": [{"index": 0, "delta": {"content": "abcd" * 3}}]} for _ in range(5)]
    (request,) = read(tmp_path, {"messages": [ASKED], "response": pieces})
    assert request.num_output_tokens == 15
    end = {"choices": [], "usage": {"completion_tokens": 77}}
    (request,) = read(tmp_path, {"messages": [ASKED], "response": [*pieces, end]})
    assert request.num_output_tokens == 77


def prompts(tmp_path: Path, *messages: list[Any]) -> list[str]:
    """What prompts of messages are as text."""
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps({"messages": some, "output_tokens": 1}) + "\n" for some in messages))
    texts = read_log(path).texts
    assert texts is not None
    return list(texts)


@pytest.mark.parametrize(
    "picture",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "input_audio", "input_audio": {"data": "AAAA"}},
        {"type": "file", "file": {"file_data": "AAAA"}},
        {"type": "blob", "modality": "image", "content": "AAAA"},
        {"inlineData": {"data": "AAAA"}},
    ],
    ids=lambda part: part.get("type", "none"),
)
def test_another_picture_is_another_prompt(tmp_path: Path, picture: dict[str, Any]) -> None:
    other = json.loads(json.dumps(picture).replace("AAAA", "BBBB"))
    behind = {"type": "text", "text": "What is it?"}
    first, again, second = prompts(
        tmp_path, *([{"role": "user", "content": [part, behind]}] for part in (picture, dict(picture), other))
    )
    assert first == again != second
    assert "AAAA" not in first
    large = json.loads(json.dumps(picture).replace("AAAA", "A" * 100_000))
    assert len(prompts(tmp_path, [{"role": "user", "content": [large, behind]}])[0]) < 200


def test_calls_of_tools_are_part_of_a_prompt_also_beside_a_text(tmp_path: Path) -> None:
    def talk(**said: Any) -> list[Any]:
        return [ASKED, {"role": "assistant", **said}, {"role": "tool", "content": "At six."}]

    noon, six = [{"function": {"name": "tide", "arguments": "noon"}}], {"name": "tide", "arguments": "six"}
    plain, calls, older = prompts(
        tmp_path,
        talk(content="I look."),
        talk(content="I look.", tool_calls=noon),
        talk(content=None, function_call=six),
    )
    assert plain.replace("I look.", "I look.\n" + json.dumps(noon)) == calls
    assert json.dumps(six) in older


def litellm(**fields: Any) -> dict[str, Any]:
    """A row of LiteLLM."""
    known = {"call_type": "acompletion", "status": "success", "prompt_tokens": 10, "completion_tokens": 4}
    return known | {"startTime": 1767225600.0, "messages": [ASKED]} | fields


def test_a_table_of_spending_holds_json_as_text(tmp_path: Path) -> None:
    first, second = read(tmp_path, litellm(), litellm(messages=json.dumps([ASKED]), response="{}"))
    assert first.blocks.tolist() == second.blocks.tolist()


@pytest.mark.parametrize(
    "nothing", ["{}", {}, "", None, "redacted-by-litellm", [{"role": "user", "content": "redacted-by-litellm"}]]
)
def test_messages_that_litellm_leaves_out_are_not_all_one_prompt(tmp_path: Path, nothing: Any) -> None:
    requests = read(tmp_path, *[litellm(messages=nothing, prompt_tokens=40)] * 2)
    assert [request.num_prompt_tokens for request in requests] == [40, 40]
    assert ceiling_of(requests).hit_rate == 0


def test_prompt_tokens_that_litellm_did_not_count_come_from_the_text(tmp_path: Path) -> None:
    (request,) = read(tmp_path, litellm(prompt_tokens=0))
    assert request.num_prompt_tokens > 1


def test_an_event_that_sglang_wrote_twice_counts_once(tmp_path: Path) -> None:
    event = {"timestamp": "2026-01-01T00:00:00", "rid": "a", "obj": {"text": "x y", "sampling_params": [{"n": 2}]}}
    received, finished = event | {"event": "request.received"}, event | {"event": "request.finished", "out": {}}
    requests = read(tmp_path, received, finished, finished)
    assert [request.num_answers for request in requests] == [2]
    assert len(read(tmp_path, received, finished, received, finished)) == 2  # the client gave its id again


def test_dynamo_s_milliseconds_are_milliseconds_of_any_size(tmp_path: Path) -> None:
    replay = {"trace_block_size": 64, "input_length": 100, "input_sequence_hashes": [2**64 - 1, 3]}
    rows = [
        {"schema": "dynamo.request.trace.v1", "request": {"request_received_ms": time, "replay": replay}}
        for time in (0, 250, 1000.5)
    ]
    assert [request.arrival for request in read(tmp_path, *rows)] == [0, 0.25, 1.0005]


def test_a_chat_without_a_parent_may_say_null(tmp_path: Path) -> None:
    row = {"chat_id": 3, "timestamp": 0.5, "input_length": 16, "output_length": 3, "hash_ids": [1]}
    later = row | {"chat_id": 4, "parent_chat_id": 3, "turn": 2, "timestamp": 1}
    lost = row | {"chat_id": 6, "parent_chat_id": 5, "turn": 3, "timestamp": 2}
    found = read(tmp_path, row | {"parent_chat_id": None, "turn": None}, later, lost, lost | {"chat_id": 7})
    assert [(request.session, request.turn) for request in found] == [("3", 0), ("3", 1), ("5", 2), ("5", 2)]


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_turns_of_a_chat_may_stand_before_those_that_they_follow(tmp_path: Path, order: tuple[int, ...]) -> None:
    row = {"timestamp": 1, "input_length": 16, "output_length": 3, "hash_ids": [1]}
    chats = [(11, -1, 1), (12, 11, 2), (13, 12, 3), (21, -1, 1)]
    rows = [row | {"chat_id": chat, "parent_chat_id": parent, "turn": turn} for chat, parent, turn in chats]
    log = read_log(write(tmp_path, *(rows[place] for place in order)), strict=True)
    sessions = {chat: (session, turn - 1) for (chat, _, turn), session in zip(chats, ["11"] * 3 + ["21"], strict=True)}
    assert [(each.line, each.session, each.turn) for each in log.requests] == [
        (number, *sessions[chats[place][0]]) for number, place in enumerate(order, start=1)
    ]


def test_chats_whose_turns_follow_each_other_in_a_circle_are_read(tmp_path: Path) -> None:
    row = {"timestamp": 1, "input_length": 16, "output_length": 3, "hash_ids": [1]}
    rows = [row | {"chat_id": chat, "parent_chat_id": parent} for chat, parent in ((1, 2), (2, 3), (3, 1), (4, 4))]
    assert len(read(tmp_path, *rows)) == 4


@pytest.mark.parametrize("packed", ["gzip", "zstandard"])
def test_damaged_bytes_anywhere_are_told(tmp_path: Path, packed: str) -> None:
    rng = random.Random(0)
    data = "".join(json.dumps({"prompt": f"{rng.random()} a b c"}) + "\n" for _ in range(500)).encode()
    whole = gzip.compress(data) if packed == "gzip" else zstandard.ZstdCompressor(write_checksum=True).compress(data)
    for place in rng.sample(range(20, len(whole)), 30):
        broken = bytearray(whole)
        broken[place] ^= 0xFF
        (tmp_path / "log").write_bytes(broken)
        with pytest.raises(ValueError, match=r"log: it cannot be read to its end \(.+\); copy or download it again"):
            read_log(tmp_path / "log")


def test_a_table_may_hold_long_texts_and_says_what_is_wrong(tmp_path: Path) -> None:
    rows = ("prompt,output_tokens", "long " * 40_000 + ",5", "x,3")
    assert [request.num_prompt_tokens for request in read(tmp_path, *rows, name="log.csv")] == [50_000, 1]
    assert len(read(tmp_path, *rows, name="standard input")) == 2
    body = json.dumps({"prompt": "a b c", "stop": ["x", "prompt", "y"]})
    assert len(read(tmp_path, body, body, name="standard input")) == 2
    path = tmp_path / "latin.csv"
    path.write_bytes(b"prompt,output_tokens\n" + b"a,5\n" * 5000 + b"\xff,5\n")
    log = read_log(path)
    assert 0 < len(log.requests) <= 5000
    assert log.skipped[0].reason == "it is not text in UTF-8; expected a row, and nothing after it is read"


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ('{"a": ' + "[" * 100_000 + "}", "it is not JSON (lists or objects within each other, too deep)"),
        ('{"a": ' + "9" * 5000 + "}", "it is not JSON (a number too long)"),
        ('{"a" 3}', "it is not JSON (Expecting ':' delimiter"),
    ],
    ids=["deep", "digits", "colon"],
)
def test_a_wrong_entry_is_the_last_of_an_array_and_says_so(tmp_path: Path, wrong: str, reason: str) -> None:
    path = tmp_path / "log.json"
    path.write_text(f'[{{"prompt": "a"}}, {wrong}, {{"prompt": "b"}}]')
    log = read_log(path)
    assert (len(log.requests), log.num_skipped) == (1, 1)
    assert log.skipped[0].reason.startswith(reason)
    assert log.skipped[0].reason.endswith("; expected a JSON object, and nothing after it is read")
    path.write_text(f'{{"prompt": "a"}}\n{wrong}\n{{"prompt": "b"}}\n')  # a line ends where it ends
    log = read_log(path)
    assert (len(log.requests), log.num_skipped, log.skipped[0].line) == (2, 1, 2)
    assert log.skipped[0].reason.startswith(reason)


def test_an_object_over_several_lines_may_begin_on_the_first(tmp_path: Path) -> None:
    for text in ('{ "prompt": "a",\n  "n": 2 }', '{"prompt": "a",\n"n": 2}\n{"prompt":\n"b"}\n'):
        assert read(tmp_path, text)[0].num_answers == 2
    assert len(read(tmp_path, '{"prompt": "a"', {"prompt": "b"}, {"prompt": "c"})) == 2


def test_parquet_as_other_programs_write_it(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "log.parquet"
    usage = arrow.array([[("prompt_tokens", 3), ("completion_tokens", 9)]] * 2, arrow.map_("string", "int64"))
    times = {
        "ns": arrow.array([1767225600_123456789, 1767225601_623456789], arrow.timestamp("ns", "UTC")),
        "decimal": arrow.array([Decimal("1.25"), Decimal("2.75")]),
        "date": arrow.array([date(2026, 1, 1), date(2026, 1, 2)]),
    }
    for name, column in times.items():
        texts = arrow.array([b"a b", b"c d"])
        parquet.write_table(arrow.table({"timestamp": column, "prompt": texts, "usage": usage}), path)
        first, second = read_log(path).requests
        assert second.arrival == pytest.approx(86400 if name == "date" else 1.5, abs=1e-6)
        assert first.num_output_tokens == 9


def test_a_parquet_file_that_is_damaged_in_the_middle(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "log.parquet"
    parquet.write_table(arrow.table({"prompt": ["a" * 100] * 100}), path)
    data = bytearray(path.read_bytes())
    data[8:40] = bytes(32)
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"it is no whole Parquet file \(.*\); copy or download it again"):
        read_log(path)


def test_bytes_are_not_quoted() -> None:
    assert brief(b"somebody's words") == "bytes"


def test_a_report_shows_the_text_of_each_prompt_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps({"prompt": ["first " * 300, "second " * 300], "output_tokens": 50}))
    analysis = analyze(read_log(path), Settings(concurrencies=(2,), find_spoilers=False))
    for word in ("first", "second"):
        assert f"{word} {word}" in to_html(analysis, show_text=True)
        assert f"{word} {word}" not in to_html(analysis)


def test_a_table_without_names_is_not_quoted(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="row 1 has the fields a text, 17; expected one of") as caught:
        read(tmp_path, "Somebody's long question,17", "Another one,18", name="log.csv")
    assert "question" not in str(caught.value)


def test_where_tokens_come_from_is_told(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    for row, source in (
        ({"prompt_token_ids": [1, 2], "output_tokens": 3}, "token ids"),
        (span(0), "the log's own counts"),
        ({"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [1]}, "block hashes"),
        ({"prompt": "a"}, "an estimate of 4 bytes per token"),
    ):
        path.write_text(json.dumps(row))
        assert read_log(path).tokens_from == source


def test_files_with_marks_may_be_joined(tmp_path: Path) -> None:
    (tmp_path / "log").write_text(f"\ufeff{json.dumps({'prompt': 'a'})}\n" * 2, encoding="utf-8")
    assert len(read_log(tmp_path / "log").requests) == 2
