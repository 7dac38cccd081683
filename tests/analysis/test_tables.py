"""Cells of tables, and the names of fields in what is said of a wrong one."""

import json
from pathlib import Path
from typing import Any

import pytest

from trunkattn.analysis.reading.log import read_log
from trunkattn.analysis.records import LoggedRequest


def written(path: Path, *rows: object) -> Path:
    text = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(text) + "\n", encoding="utf-8")
    return path


def read(path: Path, *rows: object) -> list[LoggedRequest]:
    return read_log(written(path, *rows)).requests


def test_a_table_s_texts_stay_texts_and_its_empty_cells_say_nothing(tmp_path: Path) -> None:
    rows = [
        "timestamp,prompt,output_tokens,session_id,n",
        "1,42,3,007,",
        '2,"{""question"": ""why""}",,7,2',
        '3,"[""a"", ""b""]",3,12e45678,',
        "4,nan,3,3.5,1",
        '5,"[11, 12, 13]",3,,',
        '6,"[{""role"": ""user"", ""content"": ""hi""}]",3,,',
    ]
    log = read_log(written(tmp_path / "log.csv", *rows))
    assert log.num_skipped == 0
    assert [request.session for request in log.requests] == ["007", "7", "12e45678", "3.5", None, None]
    assert [request.num_output_tokens for request in log.requests] == [3, None, 3, 3, 3, 3]
    assert [request.num_answers for request in log.requests] == [1, 2, 1, 1, 1, 1]
    assert log.texts is not None
    assert [log.texts[place] for place in range(4)] == ["42", '{"question": "why"}', '["a", "b"]', "nan"]
    assert log.requests[4].num_prompt_tokens == 3


def test_a_cell_of_lists_too_deep_is_left_out(tmp_path: Path) -> None:
    deep = "[" * 100_000 + "]" * 100_000
    good = '2,"[{""role"": ""user"", ""content"": ""a""}]"'
    log = read_log(written(tmp_path / "log.csv", "timestamp,messages", f"1,{deep}", good))
    assert (len(log.requests), [line.line for line in log.skipped]) == (1, [1])


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ('2,"a text that ends\nnowhere', "it is not CSV (unexpected end of data)"),
        ('2,"a \\"text\\" with, other quotes"', "it is not CSV (',' expected after '\"')"),
        ("2,Hello, how are you?", "it has more cells than there are names; expected quotes around a comma"),
    ],
)
def test_a_row_that_would_be_read_as_another_text_is_left_out(tmp_path: Path, row: str, reason: str) -> None:
    log = read_log(written(tmp_path / "log.csv", "timestamp,prompt", "1,hello,", row))
    assert [request.line for request in log.requests] == [1]
    assert [line.reason.startswith(reason) for line in log.skipped] == [True]


def test_a_cell_keeps_the_ends_of_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_bytes(b'timestamp,prompt\r\n1,"two\r\nlines"\r\n')
    log = read_log(path)
    assert log.texts is not None
    assert list(log.texts) == ["two\r\nlines"]


@pytest.mark.parametrize(
    "fields",
    [
        {"completion_tokens": -1},
        {"usage": {"prompt_tokens": 3, "completion_tokens": -1}},
        {"input_length": -1},
        {"best_of": -1},
    ],
)
def test_the_field_that_is_wrong_is_named(tmp_path: Path, fields: dict[str, Any]) -> None:
    wrong = "completion_tokens" if "usage" in fields else next(iter(fields))
    with pytest.raises(ValueError, match=f"line 1: {wrong}=-1: expected an integer of at least"):
        read(tmp_path / "log.jsonl", {"prompt": "a"} | fields)


def test_the_field_of_a_time_is_named(tmp_path: Path) -> None:
    row = {"type": "GENERATION", "traceId": "a", "id": "b", "startTime": "now", "input": "text"}
    with pytest.raises(ValueError, match="startTime=a text: expected a time"):
        read(tmp_path / "log.jsonl", row)
    with pytest.raises(ValueError, match="startTimeUnixNano=-1: expected a time"):
        read(tmp_path / "log.jsonl", {"attributes": {"gen_ai.prompt": "a"}, "startTimeUnixNano": -1})


def test_a_session_may_be_a_number_with_a_point(tmp_path: Path) -> None:
    """As pandas writes a column of whole numbers in which some are missing."""
    log = read(tmp_path / "log.jsonl", {"prompt": "a", "session_id": 3.0}, {"prompt": "b", "session_id": 3.0})
    assert [request.turn for request in log] == [0, 1]
