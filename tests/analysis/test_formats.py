"""A small sample of each format, read."""

import gzip
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import zstandard

from trunkattn.analysis.analyze import analyze
from trunkattn.analysis.formats.table import FORMATS
from trunkattn.analysis.reading.log import read_log
from trunkattn.analysis.records import Log
from trunkattn.analysis.settings import Settings

LOGS = Path(__file__).parent / "logs"
SYSTEM = "You answer questions about the harbour of a small town."


class Expected(NamedTuple):
    """What is expected of a sample: a value for each request, in order of arrival."""

    format: str
    arrivals: list[float | None]
    outputs: list[int | None]
    answers: list[int]
    sessions: list[tuple[str | None, int]]
    models: list[str | None]
    lines: list[int]


NO_TIMES: list[Any] = [None, None, None]
ONE_EACH = [1, 1, 1]
NO_SESSIONS: list[Any] = [(None, 0)] * 3
SAMPLES = {
    "mooncake.jsonl": Expected("mooncake", [0, 1.5, 2.25], [20, 5, 0], ONE_EACH, NO_SESSIONS, NO_TIMES, [1, 2, 3]),
    "mooncake-sessions.jsonl": Expected(
        "mooncake", [0, 0.2, 0.5], [9, 2, 4], ONE_EACH, [("s1", 0), ("s2", 0), ("s1", 1)], NO_TIMES, [1, 3, 2]
    ),
    "bailian.jsonl": Expected(
        "bailian", [0, 0.25, 8.75], [12, 3, 30], ONE_EACH, [("11", 0), ("12", 0), ("11", 1)], NO_TIMES, [1, 2, 3]
    ),
    "dynamo.jsonl": Expected(
        "dynamo", [0, 0.25, 1], [8, 9, 10], ONE_EACH, [("run-0", 0), ("run-1", 0), ("run-0", 1)], ["m"] * 3, [1, 2, 3]
    ),
    "sglang.jsonl": Expected(
        "sglang", [0, 0.25, 1], [None, 7, 6], [2, 1, 1], NO_SESSIONS, [None, "m", None], [1, 2, 5]
    ),
    "openai-batch-input.jsonl": Expected(
        "openai-batch", NO_TIMES, NO_TIMES, [1, 2, 3], NO_SESSIONS, ["m"] * 3, [1, 2, 3]
    ),
    "chat.jsonl": Expected(
        "chat", [0, 60, 120], [2, 7, 6], ONE_EACH, [("c0", 0), ("c1", 0), ("c0", 1)], ["m"] * 3, [1, 2, 3]
    ),
    "openai-requests.jsonl": Expected("chat", [0, 2], [10, 11], [3, 1], NO_SESSIONS[:2], ["m"] * 2, [1, 2]),
    "vllm-custom.jsonl": Expected("chat", NO_TIMES, [10, 11, 12], ONE_EACH, NO_SESSIONS, NO_TIMES, [1, 2, 3]),
    "sharegpt.json": Expected(
        "chat", NO_TIMES, [2, 7, 6], ONE_EACH, [("talk-1", 0), ("talk-1", 1), ("talk-2", 0)], NO_TIMES, [1, 1, 2]
    ),
    "agents.jsonl": Expected(
        "chat", NO_TIMES, [5, None, None], ONE_EACH, [("1.0", 0), ("1.0", 1), ("1.1", 0)], NO_TIMES, [1, 1, 1]
    ),
    "litellm.jsonl": Expected(
        "litellm", [0, 1, 8.5], [8, 8, 8], ONE_EACH, [("t0", 0), ("t1", 0), ("t0", 1)], ["gpt"] * 3, [1, 2, 5]
    ),
    "langfuse.jsonl": Expected(
        "langfuse", [0, 1, 2], [7, 7, 7], ONE_EACH, [("harbour", turn) for turn in range(3)], ["m"] * 3, [1, 3, 4]
    ),
    "langfuse-page.json": Expected("langfuse", [0, 1.25], [6, 3], [1, 2], NO_SESSIONS[:2], ["m"] * 2, [1, 1]),
    "otlp.json": Expected(
        "opentelemetry", [0, 0.75], [6, 15], [1, 1], [("harbour", 0), (None, 0)], ["m", None], [1, 1]
    ),
    "openinference.jsonl": Expected(
        "opentelemetry", [0, 1, 2], [5, 6, 7], ONE_EACH, [("s", turn) for turn in range(3)], ["m"] * 3, [1, 2, 3]
    ),
    "burstgpt.csv": Expected("burstgpt", [0, 40], [18, 230], [1, 1], NO_SESSIONS[:2], ["ChatGPT", "GPT-4"], [1, 2]),
}  # fmt: skip


def check(log: Log, expected: Expected) -> None:
    title = next(known.title for known in FORMATS if known.name == expected.format)
    assert log.format == title
    assert (log.num_skipped, log.skipped) == (0, [])
    assert [request.arrival for request in log.requests] == pytest.approx(expected.arrivals)
    assert [request.num_output_tokens for request in log.requests] == expected.outputs
    assert [request.num_answers for request in log.requests] == expected.answers
    assert [(request.session, request.turn) for request in log.requests] == expected.sessions
    assert [request.model for request in log.requests] == expected.models
    assert [request.line for request in log.requests] == expected.lines
    for request in log.requests:
        assert len(request.blocks) == -(-request.num_prompt_tokens // request.block_size)


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_is_recognised_and_read(name: str) -> None:
    log = read_log(LOGS / name)
    check(log, SAMPLES[name])
    assert log.source == name


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_can_be_analyzed(name: str) -> None:
    analysis = analyze(read_log(LOGS / name), Settings(concurrencies=(2,)))
    has_times = SAMPLES[name].arrivals[0] is not None
    assert [replay.name for replay in analysis.replays] == ["as logged", "2 at a time"][0 if has_times else 1 :]
    assert all(replay.num_requests == len(analysis.log.requests) for replay in analysis.replays)


def test_every_format_has_a_sample() -> None:
    assert {expected.format for expected in SAMPLES.values()} == {known.name for known in FORMATS}


@pytest.mark.parametrize("name", ["mooncake.jsonl", "sglang.jsonl", "sharegpt.json", "otlp.json", "burstgpt.csv"])
@pytest.mark.parametrize("packed", ["gzip", "zstandard", "gzip under another name"])
def test_a_compressed_sample_is_the_same(name: str, packed: str, tmp_path: Path) -> None:
    data = (LOGS / name).read_bytes()
    path = tmp_path / (name if "another" in packed else name + {"gzip": ".gz", "zstandard": ".zst"}[packed])
    if packed == "zstandard":
        half = len(data) // 2  # programs that append write a frame each
        frames = [zstandard.ZstdCompressor().compress(part) for part in (data[:half], data[half:])]
        path.write_bytes(b"".join(frames))
    else:
        path.write_bytes(gzip.compress(data))
    check(read_log(path), SAMPLES[name])


def test_equal_beginnings_are_equal_blocks() -> None:
    mooncake = [request.blocks.tolist() for request in read_log(LOGS / "mooncake.jsonl").requests]
    assert mooncake[0][:2] == mooncake[1]
    assert mooncake[0][0] == mooncake[2][0]
    assert mooncake[0][1] != mooncake[2][1]
    for name in ("sglang.jsonl", "chat.jsonl", "langfuse.jsonl", "openinference.jsonl", "vllm-custom.jsonl"):
        log = read_log(LOGS / name)
        first = [request.blocks[0] for request in log.requests]
        assert len(set(first)) == 1, name
        assert len({request.blocks[-1] for request in log.requests}) == len(log.requests), name
        assert log.texts is not None
        assert all(SYSTEM in text for text in log.texts)


def test_the_turns_of_a_session_share_their_beginning() -> None:
    for name in ("bailian.jsonl", "mooncake-sessions.jsonl"):
        by_session: dict[str | None, list[Any]] = {}
        for request in read_log(LOGS / name).requests:
            by_session.setdefault(request.session, []).append(request.blocks.tolist())
        before, after = next(turns for turns in by_session.values() if len(turns) == 2)
        assert after[: len(before) - 1] == before[:-1]


def test_a_batch_s_input_and_output_are_joined(tmp_path: Path) -> None:
    for name in ("openai-batch-output.jsonl", "openai-batch-input.jsonl"):
        (tmp_path / f"{'a' if 'output' in name else 'b'}-{name}").write_bytes((LOGS / name).read_bytes())
    log = read_log(tmp_path)
    assert [request.num_output_tokens for request in log.requests] == [9, 9, None]
    assert [request.num_answers for request in log.requests] == [1, 2, 3]
    assert log.num_lines == 6
    with pytest.raises(ValueError, match="put the batch's input file into the same folder"):
        read_log(LOGS / "openai-batch-output.jsonl")


def test_otlp_without_text_has_lengths() -> None:
    log = read_log(LOGS / "otlp.json")
    assert [request.num_prompt_tokens for request in log.requests][1] == 90
    assert log.texts is not None
    assert log.texts[1] == ""


def test_a_table_has_lengths_alone_and_says_so() -> None:
    log = read_log(LOGS / "burstgpt.csv")
    assert [request.num_prompt_tokens for request in log.requests] == [472, 1087]
    assert len({block for request in log.requests for block in request.blocks.tolist()}) == 30 + 68
    assert log.assumptions == ["The log has neither prompts nor block hashes, so no prompt is known to be shared."]
    assert log.unit == "row"


def test_parquet_is_read(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [json.loads(line) for line in (LOGS / "chat.jsonl").read_text().splitlines()]
    table = [row | {"messages": json.dumps(row["messages"])} for row in rows]  # as databases keep them
    for name, some in (("nested", rows), ("text", table)):
        path = tmp_path / f"{name}.parquet"
        parquet.write_table(arrow.Table.from_pylist(some), path)
        check(read_log(path), SAMPLES["chat.jsonl"])


def test_a_folder_of_texts_is_a_prompt_each(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "b.txt").write_text(SYSTEM + " b")
    (tmp_path / "inner" / "c.md").write_text(SYSTEM + " c", encoding="utf-8-sig")
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00 no text")
    (tmp_path / "d").write_text("")
    (tmp_path / ".hidden").write_text("not read")
    log = read_log(tmp_path)
    assert (log.unit, log.num_lines, log.num_skipped) == ("file", 4, 2)
    assert [(line.line, line.reason) for line in log.skipped] == [
        (1, "it is not a text in UTF-8"),
        (3, "it is empty"),
    ]
    assert [request.line for request in log.requests] == [2, 4]
    assert log.texts is not None
    assert list(log.texts) == [SYSTEM + " b", SYSTEM + " c"]


def test_files_of_a_folder_are_one_log(tmp_path: Path) -> None:
    lines = (LOGS / "sglang.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "host_0.log.2026-01-01_12").write_text("".join(lines[:3]))
    (tmp_path / "host_0.log").write_text("".join(lines[3:]))
    (tmp_path / "README.txt").write_text("about these logs")
    check(read_log(tmp_path), SAMPLES["sglang.jsonl"])


def test_lines_of_a_program_s_log_in_between_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"
    path.write_text("[2026-01-01 12:00:00] server started\n" + (LOGS / "sglang.jsonl").read_text() + "done\n")
    log = read_log(path)
    assert [request.num_output_tokens for request in log.requests] == SAMPLES["sglang.jsonl"].outputs
    assert [line.line for line in log.skipped] == [1, 7]


def test_an_answer_before_its_request_is_one_request(tmp_path: Path) -> None:
    lines = (LOGS / "sglang.jsonl").read_text().splitlines(keepends=True)
    path = tmp_path / "log.jsonl"
    path.write_text("".join(lines[3:] + lines[:3]))
    log = read_log(path)
    assert [request.num_output_tokens for request in log.requests] == [None, 7, 6]
    assert [request.arrival for request in log.requests] == pytest.approx([0, 0.25, 1])


def test_an_array_on_one_line_and_a_mark_in_front_are_read(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (LOGS / "chat.jsonl").read_text().splitlines()]
    path = tmp_path / "array.json"
    path.write_text("\ufeff" + json.dumps(rows), encoding="utf-8")
    log = read_log(path)
    check(log, SAMPLES["chat.jsonl"])
    assert log.unit == "entry"
    marked = tmp_path / "marked.jsonl"
    marked.write_text("\ufeff" + (LOGS / "chat.jsonl").read_text(), encoding="utf-8")
    check(read_log(marked), SAMPLES["chat.jsonl"])


def test_an_array_larger_than_what_is_read_at_once(tmp_path: Path) -> None:
    rows = [{"prompt": f"{number} " + "x" * 700_000, "output_tokens": 3} for number in range(5)]
    path = tmp_path / "large.json"
    path.write_text(json.dumps(rows, indent=1))
    assert [request.num_prompt_tokens for request in read_log(path).requests] == [175_001] * 5
