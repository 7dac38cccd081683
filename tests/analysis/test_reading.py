"""Logs that are wrong in one way or another, and what the reader says of them."""

import builtins
import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from trunkattn.analysis.reading.finished_log import depend_only_on_contents
from trunkattn.analysis.reading.log import read_log

GOOD = {"timestamp": 0, "input_length": 600, "output_length": 10, "hash_ids": [0, 1]}
SECRET = "the combination is left, right, left"
REAL_TRACE = Path(__file__).parents[4] / "shared" / "traces" / "conversation_trace.jsonl"


def write(path: Path, *lines: object) -> Path:
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(text) + "\n")
    return path


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "it is not JSON (Expecting property name enclosed in double quotes, column 2); expected a JSON object"),
        ("[1]", "it is a list; expected a JSON object"),
        ("null", "it is null; expected a JSON object"),
        ("[" * 100_000, "it is not JSON"),
        (
            {"timestamp": 0, "input_length": 5},
            "output_length, hash_ids missing: expected timestamp, input_length, output_length, hash_ids",
        ),
        (GOOD | {"timestamp": -1}, "timestamp=-1: expected milliseconds of at least 0"),
        (GOOD | {"timestamp": "now"}, "timestamp=a text: expected milliseconds of at least 0"),
        (GOOD | {"input_length": 0, "hash_ids": []}, "input_length=0: expected an integer of at least 1"),
        (GOOD | {"output_length": "9"}, "output_length='9': expected an integer of at least 0"),
        (GOOD | {"output_length": True}, "output_length=True: expected an integer of at least 0"),
        (GOOD | {"hash_ids": 3}, "hash_ids=3: expected a list of integers"),
        (GOOD | {"hash_ids": [0, None]}, "hash_ids=None: expected an integer of at least 0 and below 2**64"),
        (GOOD | {"hash_ids": [0, 1 << 64]}, f"hash_ids={1 << 64}: expected an integer of at least 0 and below 2**64"),
        (
            GOOD | {"hash_ids": []},
            "hash_ids has 0 entries: expected 2, one per 512 tokens of input_length=600",
        ),
    ],
)
def test_a_bad_line_is_left_out_and_named(tmp_path: Path, line: object, reason: str) -> None:
    path = write(tmp_path / "trace.jsonl", GOOD, "", GOOD, line, GOOD)
    log = read_log(path)
    assert (len(log.requests), log.num_lines, log.num_skipped) == (3, 4, 1)
    assert log.skipped[0].line == 4
    assert log.skipped[0].reason.startswith(reason)
    with pytest.raises(ValueError, match=r"^trace\.jsonl, line 4: .*; strict ends .* after 3 lines without") as caught:
        read_log(path, strict=True)
    assert reason in str(caught.value)


SAID = {"ts": 5, "prompt": "a", "output_tokens": 3}


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (SAID | {"output_tokens": "x"}, "output_tokens=a text"),
        (SAID | {"prompt": ""}, "its prompt is empty"),
        (SAID | {"messages": [{"role": 3}]}, "messages: expected objects, each with a role"),
        (SAID | {"ts": 1}, "its time is 4 s before"),
        ({"prompt": "a"}, "it has no time"),
    ],
)
@pytest.mark.parametrize("second", ["{", SAID | {"output_tokens": -1}, SAID | {"prompt": ""}, SAID | {"ts": 2}])
def test_strict_names_the_first_line_with_any_fault(
    tmp_path: Path, first: dict[str, Any], reason: str, second: object
) -> None:
    path = write(tmp_path / "log.jsonl", SAID, SAID, first, SAID, second, *[SAID] * 300)
    with pytest.raises(ValueError, match=rf"line 3: {reason}.*after 2 lines without a fault"):
        read_log(path, strict=True)
    assert read_log(path).num_skipped + read_log(path).num_out_of_order == 2


def test_strict_tells_nothing_of_lines_behind_the_fault(tmp_path: Path) -> None:
    """Not that an answer of a batch has no prompt, which comes behind it."""
    asked = {"custom_id": "a", "body": {"prompt": "a b"}}
    told = {"custom_id": "a", "response": {"body": {"choices": []}}}
    with pytest.raises(ValueError, match="line 2: it is not JSON"):
        read_log(write(tmp_path / "log.jsonl", told, "{", asked), strict=True)


def test_bytes_that_are_no_text_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b'\n{"timestamp": "\xff"}\n')
    log = read_log(path)
    assert log.skipped[0].reason == "it is not text in UTF-8; expected a JSON object"


def test_an_array_that_breaks_off_keeps_what_came_before(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps([GOOD, GOOD])[:-20])
    log = read_log(path)
    assert (len(log.requests), log.num_skipped, log.skipped[0].line) == (1, 1, 2)
    assert "it is not JSON" in log.skipped[0].reason


def test_an_array_without_a_request_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    path.write_text('["a", "b"]')
    with pytest.raises(ValueError, match=r"none of its 2 entries could be taken; entry 1: it is a text; expected"):
        read_log(path)
    spans = [{"type": "SPAN", "trace_id": "a", "start_time": "2026-01-01"}] * 2
    with pytest.raises(ValueError, match="none of its 2 lines holds a request"):
        read_log(write(tmp_path / "spans.jsonl", *spans))


def test_only_the_first_skipped_lines_are_kept(tmp_path: Path) -> None:
    log = read_log(write(tmp_path / "trace.jsonl", GOOD, *["{"] * 500))
    assert (log.num_lines, log.num_skipped, len(log.skipped)) == (501, 500, 20)


def test_times_that_run_backwards_are_sorted_and_counted(tmp_path: Path) -> None:
    times = [5000, 1000, 6000, 2000, 6000]
    log = read_log(write(tmp_path / "trace.jsonl", *(GOOD | {"timestamp": time} for time in times)))
    assert [request.arrival for request in log.requests] == [0, 1, 4, 5, 5]
    assert [request.line for request in log.requests] == [2, 4, 1, 3, 5]
    assert log.num_out_of_order == 2
    assert log.assumptions == [
        "2 requests out of order, the first in line 2: all are replayed in the order of their times.",
        "The log's hashes are of all that precedes a block, so they tell no field that spoils sharing.",
    ]
    with pytest.raises(ValueError, match=r"^trace\.jsonl, line 2: its time is 4 s before .*; expected times that"):
        read_log(tmp_path / "trace.jsonl", strict=True)


def test_a_partial_last_block_may_be_left_out_and_is_shared_with_nobody(tmp_path: Path) -> None:
    log = read_log(write(tmp_path / "trace.jsonl", *[GOOD | {"hash_ids": [0]}] * 2, GOOD))
    first, second, third = (request.blocks.tolist() for request in log.requests)
    assert [len(first), len(second), len(third)] == [2, 2, 2]
    assert first[0] == second[0] == third[0]
    assert len({first[1], second[1], third[1]}) == 3


def test_an_equal_hash_behind_another_block_is_another_block(tmp_path: Path) -> None:
    rows = [GOOD | {"hash_ids": ids} for ids in ([1, 5], [2, 5], [1, 5])]
    log = read_log(write(tmp_path / "trace.jsonl", *rows))
    blocks = [request.blocks.tolist() for request in log.requests]
    assert blocks[0] == blocks[2]
    assert set(blocks[0]).isdisjoint(blocks[1])
    assert log.contents is not None
    assert [ids.tolist() for ids in log.contents] == [[1, 5], [2, 5], [1, 5]]


def test_chained_hashes_tell_no_contents() -> None:
    chained = [np.array([1, 2, 3]), np.array([1, 2, 4]), np.array([], dtype=np.int64), np.array([5])]
    assert not depend_only_on_contents(chained)
    assert depend_only_on_contents([*chained, np.array([5, 2])])
    assert not depend_only_on_contents([])


@pytest.mark.parametrize(
    "content",
    [b"", b"\n\n", gzip.compress(b"", mtime=0), zstandard.ZstdCompressor().compress(b"")],
    ids=["nothing", "empty lines", "gzip", "zst"],
)
def test_an_empty_file_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"^trace\.jsonl: it is empty; expected a log with a request on each line$"):
        read_log(path)


def test_a_path_without_a_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no such file or folder; expected a log"):
        read_log(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="the folder is empty"):
        read_log(tmp_path)


def test_an_unknown_format_is_refused_with_the_names_of_all(tmp_path: Path) -> None:
    path = write(tmp_path / "log.jsonl", {"level": "info", "text_of": SECRET})
    with pytest.raises(
        ValueError, match=r"no known format; line 1 has the fields level, text_of; .* mooncake"
    ) as caught:
        read_log(path)
    assert SECRET not in str(caught.value)
    with pytest.raises(ValueError, match=r"format='mooncakes': expected auto, bailian, mooncake, dynamo"):
        read_log(path, format="mooncakes")


def test_a_file_without_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(f"{SECRET}\nmore\n")
    with pytest.raises(ValueError, match=r"none of its 2 lines could be taken; line 1: it is not JSON") as caught:
        read_log(path)
    assert SECRET not in str(caught.value)


def test_a_named_format_says_what_is_missing(tmp_path: Path) -> None:
    path = write(tmp_path / "log.jsonl", {"prompt": SECRET})
    with pytest.raises(ValueError, match=r"nothing taken; line 1: chat_id, timestamp, .* missing: expected chat_id"):
        read_log(path, format="bailian")


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_file_that_is_cut_is_refused(suffix: str, tmp_path: Path) -> None:
    data = "\n".join(json.dumps(GOOD | {"timestamp": time}) for time in range(5000)).encode()
    packed = gzip.compress(data) if suffix == ".gz" else zstandard.ZstdCompressor().compress(data)
    path = tmp_path / f"trace.jsonl{suffix}"
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(ValueError, match="it cannot be read to its end"):
        read_log(path)


@pytest.mark.parametrize("package", ["zstandard", "pyarrow"])
def test_a_missing_package_is_named(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def refuse(name: str, *arguments: Any) -> Any:
        if name.split(".")[0] == package:
            raise ImportError(name)
        return imported(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", refuse)
    path = tmp_path / "log"
    path.write_bytes(b"\x28\xb5\x2f\xfd" if package == "zstandard" else b"PAR1")
    with pytest.raises(ValueError, match=f"the package {package} is missing; run pip install {package}"):
        read_log(path)


def test_requests_without_a_time_are_left_out_where_others_have_one(tmp_path: Path) -> None:
    rows = [{"prompt": "a b c", "timestamp": 3}, {"prompt": "a b c"}, {"prompt": "d", "timestamp": "2026-13-01"}]
    log = read_log(write(tmp_path / "log.jsonl", *rows))
    assert len(log.requests) == 1
    assert sorted((line.line, line.reason) for line in log.skipped) == [
        (2, "it has no time, and other requests of the log have one"),
        (3, "timestamp='2026-13-01': expected a time, as seconds or as YYYY-MM-DD HH:MM:SS"),
    ]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"content": SECRET}]},
        {"messages": SECRET},
        {"messages": []},
        {"messages": [SECRET]},
        {"prompt": {"text": SECRET}},
        {"prompt": ""},
        {"prompt": [SECRET, 3]},
        {"prompt": [-1]},
        {"conversations": [{"from": "human", "value": SECRET}, {"value": SECRET}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": SECRET}, 3]}]},
        {"custom_id": "a", "body": SECRET},
        {"custom_id": "a", "body": {"model": "m"}},
        {"rid": "a", "event": "request.received", "timestamp": "2026-01-01T00:00:00", "obj": {}},
        {
            "rid": "a",
            "event": "request.received",
            "timestamp": "2026-01-01T00:00:00",
            "obj": {"text": "x" * 1024 + "..." + "x" * 1024},
        },
        {"call_type": "completion", "startTime": 3, "messages": 5},
        {"type": "GENERATION", "trace_id": "a", "start_time": "soon", "input": SECRET},
        {"type": "GENERATION", "trace_id": "a", "start_time": "2026-01-01"},
        {"attributes": {"gen_ai.operation.name": "chat"}},
        {"schema": "dynamo.request.trace.v1", "request": {}},
        {"schema": "dynamo.request.trace.v1"},
    ],
    ids=lambda row: json.dumps(row)[:60],
)
def test_a_bad_line_of_text_is_told_without_its_text(row: object, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="line 1: ") as caught:
        read_log(write(tmp_path / "log.jsonl", row))
    assert "combination" not in str(caught.value)


@pytest.mark.parametrize("content", [{"role": None, "content": "hi"}, {"role": "user", "content": [3]}])
def test_a_bad_message_beside_a_count_of_tokens_leaves_only_its_line_out(content: object, tmp_path: Path) -> None:
    """The counts tell how many bytes a token has, before any line is encoded."""
    bad = {"messages": [content], "usage": {"prompt_tokens": 3}, "response": "a"}
    good = {"prompt": "x" * 60, "prompt_tokens": 10, "response": "a"}
    log = read_log(write(tmp_path / "log.jsonl", bad, good))
    assert ([line.line for line in log.skipped], [request.num_prompt_tokens for request in log.requests]) == ([1], [10])


def test_a_folder_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = os.scandir

    def refuse(path: str) -> object:
        if Path(path).name == "inner":
            raise PermissionError(13, "Permission denied", path)
        return listed(path)

    for folder in (".hidden", "lost+found", "inner"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "log.jsonl", {"prompt": "a"})
    write(tmp_path / "log.jsonl", {"prompt": "a"})
    assert len(read_log(tmp_path).requests) == 2
    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ValueError, match="inner: it cannot be read: Permission denied; expected a folder that you may"):
        read_log(tmp_path)


def test_a_file_that_opens_and_cannot_be_read_is_named() -> None:
    with pytest.raises(ValueError, match="mem: it cannot be read: Input/output error; expected a file that you may"):
        read_log("/proc/self/mem")


def test_the_progress_goes_from_nothing_to_all(tmp_path: Path) -> None:
    shares: list[float] = []
    read_log(
        write(tmp_path / "trace.jsonl", *[GOOD | {"note": "x" * 1000}] * 3000),
        progress=lambda what, share: shares.append(share),
    )
    assert shares == sorted(shares)
    assert len(shares) > 2
    assert shares[-1] == 1


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=8))
def test_blocks_are_equal_where_prefixes_are(
    tmp_path_factory: pytest.TempPathFactory, prompts: list[list[int]]
) -> None:
    rows = [GOOD | {"input_length": 512 * len(ids), "hash_ids": ids} for ids in prompts]
    log = read_log(write(tmp_path_factory.mktemp("logs") / "trace.jsonl", *rows))
    numbers: dict[int, tuple[int, ...]] = {}
    for ids, request in zip(prompts, log.requests, strict=True):
        for length, number in enumerate(request.blocks.tolist(), start=1):
            assert numbers.setdefault(number, tuple(ids[:length])) == tuple(ids[:length])
    assert len(numbers) == len(set(numbers.values()))


@pytest.mark.skipif(not REAL_TRACE.is_file(), reason="the published trace is not here")
def test_the_published_trace_is_read() -> None:
    log = read_log(REAL_TRACE)
    assert (len(log.requests), log.num_skipped, log.num_out_of_order) == (12_031, 0, 0)
    assert log.contents is None
    seen: set[int] = set()
    num_found = 0
    for request in log.requests:
        num_found += sum(block in seen for block in request.blocks.tolist())
        seen.update(request.blocks.tolist())
    assert num_found / sum(len(request.blocks) for request in log.requests) == pytest.approx(0.3664, abs=1e-4)
