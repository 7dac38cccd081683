"""What strangers' logs have: wrong values anywhere, text where numbers belong, links, frames, other spellings."""

import copy
import csv
import gzip
import json
import os
import random
from pathlib import Path
from typing import Any, Final

import pytest

from trunkattn.analysis.formats.base import epoch_seconds
from trunkattn.analysis.formats.table import FORMATS
from trunkattn.analysis.reading.files import contents_of, files_of
from trunkattn.analysis.reading.log import read_log

SAMPLES: Final = Path(__file__).parent / "logs"
SECRET: Final = "somebody's words"
STRANGE: Final[tuple[Any, ...]] = (
    *(None, True, 0, -1, 1.5, float("nan"), float("inf"), 1e308, 10**18, 10**30, 10**400, SECRET, "", "NaN", "1e5"),
    *("2026-13-45", "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "\ud800", "[1,", "[null]", "9" * 5000),
    *([], {}, [[]], [{}], [None], [SECRET], [SECRET, [1]], {"a": SECRET}, {"content": SECRET}, [1.5], [-1], [[1]]),
    *([{"role": "user"}], [{"role": 1, "content": 2}], [{"role": "user", "content": [{"type": "image_url"}]}]),
    *({"meta_info": SECRET}, {"choices": SECRET}, {"choices": []}, {"choices": [None]}, {"usage": SECRET}),
    *({"n": SECRET}, {"intValue": SECRET}, {"intValue": []}, {"arrayValue": None}, {"arrayValue": {"values": None}}),
    *({"kvlistValue": {"values": [{}]}}, {"kvlistValue": None}),
    *([{"choices": 3}], [{"choices": [3, {"index": [], "delta": SECRET}]}, 3], {"usage": []}, {"input_cached": SECRET}),
    *({"function_call": SECRET}, [{"type": "blob"}, {"inlineData": SECRET}], {"status": {"code": []}}, '{"a":', "[1"),
)


def samples() -> dict[str, list[Any]]:
    """Objects of each sample log."""
    found: dict[str, list[Any]] = {}
    for path in sorted(SAMPLES.iterdir()):
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".csv":
            found[path.name] = [dict(row) for row in csv.DictReader(text.splitlines())]
        elif path.suffix == ".json":
            value = json.loads(text)
            found[path.name] = value if isinstance(value, list) else [value]
        else:
            found[path.name] = [json.loads(line) for line in text.splitlines()]
    return found


def places(value: Any) -> list[tuple[Any, Any]]:
    """Each object or list within a value, with each key or index of it."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, inner in pairs for place in ((value, key), *places(inner))]


def spoiled(row: Any, rng: random.Random) -> Any:
    """A row in which one to three values are others, or are not there."""
    row = json.loads(json.dumps(row))
    for _ in range(rng.choice((1, 1, 2, 3))):
        found = places(row)
        if found:
            holder, key = rng.choice(found)
            if rng.random() < 0.2:
                del holder[key]
            else:
                holder[key] = copy.deepcopy(rng.choice(STRANGE))
    return row


@pytest.mark.parametrize("name", samples())
def test_a_strange_value_is_a_line_left_out_and_never_quoted(name: str, tmp_path: Path) -> None:
    rng, rows, path = random.Random(name), samples()[name], tmp_path / "log.jsonl"
    for _ in range(60):
        path.write_text("".join(json.dumps(spoiled(row, rng)) + "\n" for row in rows), encoding="utf-8")
        try:
            log = read_log(path, format=rng.choice(("auto", *(known.name for known in FORMATS))))
        except ValueError as error:
            said = str(error)
        else:
            said = " ".join([*(line.reason for line in log.skipped), *log.assumptions])
            assert all(each.arrival is None or 0 <= each.arrival < 1e15 for each in log.requests)
        assert SECRET not in said


def written(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_an_id_that_comes_again_is_not_quoted(tmp_path: Path) -> None:
    row = {"custom_id": SECRET, "url": "/v1/completions", "body": {"prompt": "a b c"}}
    log = read_log(written(tmp_path / "in.jsonl", row, row))
    assert [line.reason for line in log.skipped] == ["its custom_id comes a second time: expected one input for each"]


def test_a_name_of_a_text_is_not_quoted(tmp_path: Path) -> None:
    (tmp_path / f"{SECRET}.txt").write_bytes(b"\xff")
    (tmp_path / "other.txt").write_text("A prompt.")
    assert SECRET not in repr(read_log(tmp_path))


@pytest.mark.parametrize(
    "value",
    [
        *(1767225600.5, 1767225600500, 1767225600500000, "1767225600.5", "2026-01-01T00:00:00.5Z"),
        *("2026-01-01 00:00:00.500 UTC", "2026-01-01T00:00:00.5 gmt", "2026-01-01T02:00:00.500000+02:00"),
        *("2026-01-01 00:00:00,500", "2026-01-01T02:00:00.5+0200", "2026-01-01 02:00:00.5 +02", "20260101T000000.5Z"),
    ],
)
def test_a_moment_is_read_in_many_spellings(value: object) -> None:
    assert epoch_seconds("time", value) == 1767225600.5


@pytest.mark.parametrize("value", ["2026-13-01", "1767225600.5.5", -5, 1e30, 10**400])
def test_a_wrong_number_or_date_is_quoted(value: object) -> None:
    with pytest.raises(ValueError, match=r"time=('?[-0-9.e+]+'?|\d+\.\.\.): expected a time"):
        epoch_seconds("time", value)


def test_a_file_with_two_names_is_read_once(tmp_path: Path) -> None:
    real = written(tmp_path / "run-5.jsonl", {"prompt": "a b c"})
    (tmp_path / "latest.jsonl").symlink_to(real)
    os.link(real, tmp_path / "same.jsonl")
    (tmp_path / "folder").symlink_to(tmp_path)
    assert files_of(tmp_path) == [real]
    assert len(read_log(tmp_path).requests) == 1


@pytest.mark.parametrize("name", ["run.jsonl", "run.txt"])
def test_a_log_beside_its_compressed_copy_is_read_once(tmp_path: Path, name: str) -> None:
    """A copy is told by its name and by what it holds: an older log may have the same name."""
    real = written(tmp_path / name, {"prompt": "a b c"})
    copy = tmp_path / f"{name}.gz"
    copy.write_bytes(gzip.compress(real.read_bytes()))
    counted: list[int] = []
    assert len(list(contents_of(tmp_path, counted.append).lines)) == 1
    assert sum(counted) == sum(file.stat().st_size for file in (real, copy))
    copy.write_bytes(gzip.compress(json.dumps({"prompt": "d e f"}).encode()))
    assert len(list(contents_of(tmp_path).lines)) == 2


def test_what_has_the_name_of_a_log_and_is_no_file_is_named(tmp_path: Path) -> None:
    """A folder's log that cannot be read must not be missing from the count in silence."""
    written(tmp_path / "a.jsonl", {"prompt": "a b c"})
    (tmp_path / "gone").symlink_to("nowhere")
    assert len(read_log(tmp_path).requests) == 1
    (tmp_path / "latest.jsonl").symlink_to("gone.jsonl")
    with pytest.raises(ValueError, match=r"latest.jsonl: it is a link that leads to no file; expected a file, or no"):
        read_log(tmp_path)
    (tmp_path / "latest.jsonl").unlink()
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(ValueError, match=r"pipe.jsonl: it is no file, but a pipe or a device; expected a file, or no"):
        read_log(tmp_path)
    with pytest.raises(ValueError, match=r"pipe.jsonl: it is no file, but a pipe or a device; expected a log"):
        read_log(tmp_path / "pipe.jsonl")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ValueError, match=r"loop: it is a link that leads to no file; expected a log"):
        read_log(tmp_path / "loop")


@pytest.mark.parametrize("end", ["", ",", ', {"prompt": "d e f"}', "]]"])
def test_an_array_that_ends_behind_an_entry_without_its_bracket_is_told(tmp_path: Path, end: str) -> None:
    path = tmp_path / "log.json"
    path.write_text(f'[{{"prompt": "a b c"}}{end}')
    log = read_log(path)
    reasons = ["it is not JSON (its list does not end); expected a JSON object, and nothing after it is read"]
    assert [line.reason for line in log.skipped] == ([] if "]" in end else reasons)
    assert len(log.requests) == 1 + ("{" in end)


def test_an_array_of_an_open_bracket_is_not_empty(tmp_path: Path) -> None:
    (tmp_path / "log.json").write_text("[" * 9)
    with pytest.raises(ValueError, match="its list does not end"):
        read_log(tmp_path / "log.json")


def test_a_table_may_have_one_column(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text('prompt\na b c\n"d, e"\n')
    log = read_log(tmp_path / "log.csv")
    assert (log.unit, len(log.requests), log.num_skipped) == ("row", 2, 0)


@pytest.mark.parametrize(("sign", "name"), [(";", "semicolons"), ("\t", "tabs")])
def test_a_table_without_commas_is_refused_by_what_it_has(tmp_path: Path, sign: str, name: str) -> None:
    (tmp_path / "log.csv").write_text(sign.join(("Timestamp", "Request tokens", "Response tokens")) + "\n")
    with pytest.raises(ValueError, match=rf"log.csv: {name} separate the names of its columns; expected commas"):
        read_log(tmp_path / "log.csv")


def test_a_time_that_python_has_no_name_for_is_not_a_damaged_file(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    times = pyarrow.array([1 << 62], pyarrow.timestamp("us"))
    parquet.write_table(pyarrow.table({"prompt": ["a b c"], "timestamp": times}), tmp_path / "log.parquet")
    with pytest.raises(ValueError, match=r"log.parquet: it holds a time outside of the years 1 to 9999"):
        read_log(tmp_path / "log.parquet")


@pytest.mark.parametrize("inner", [b"\x1f\x8b", b"PAR1", b"\x28\xb5\x2f\xfd"], ids=["gzip", "Parquet", "Zstandard"])
def test_a_log_that_is_compressed_twice_is_to_be_unpacked(tmp_path: Path, inner: bytes) -> None:
    (tmp_path / "log.gz").write_bytes(gzip.compress(inner))
    with pytest.raises(ValueError, match=r"log.gz holds a compressed file or a Parquet file: expected .* unpack"):
        read_log(tmp_path / "log.gz")


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    path = written(tmp_path / "log.jsonl", {"prompt": "a b c"})
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ValueError, match=r"log.jsonl: it cannot be read: Permission denied; expected a file that you"):
        read_log(path)


def test_a_frame_without_data_may_stand_first(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    empty = b"\x5a\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"size"
    path = tmp_path / "log"
    path.write_bytes(empty + zstandard.compress(b'{"prompt": "a b c"}\n'))
    assert len(read_log(path).requests) == 1


def test_the_current_folder_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "log.jsonl", {"prompt": "a b c"})
    monkeypatch.chdir(tmp_path)
    assert read_log(".").source == str(tmp_path)


def test_a_system_prompt_beside_the_messages_is_part_of_the_prompt(tmp_path: Path) -> None:
    """As Anthropic's interface has it."""
    messages = [{"role": "user", "content": [{"type": "text", "text": "When?"}]}]
    inside = {"messages": [{"role": "system", "content": "The ferry leaves at noon."}, *messages]}
    beside = {"request": {"system": "The ferry leaves at noon.", "messages": messages}}
    first, second = read_log(written(tmp_path / "log.jsonl", inside, beside)).requests
    assert first.blocks.tolist() == second.blocks.tolist()


def test_an_answer_that_calls_a_tool_is_an_answer(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "tide", "arguments": "{}"}}]}
    messages = [{"role": "user", "content": "When?"}, call, {"role": "tool", "content": "At six."}]
    log = read_log(written(tmp_path / "log.jsonl", {"messages": [*messages, {"role": "assistant", "content": "Six."}]}))
    assert [request.turn for request in log.requests] == [0, 1]
    assert log.requests[0].num_output_tokens == -(-len(json.dumps(call["tool_calls"])) // 4)
    (whole,) = read_log(written(tmp_path / "timed.jsonl", {"ts": 5, "messages": [messages[0], call]})).requests
    assert whole.num_output_tokens == log.requests[0].num_output_tokens
