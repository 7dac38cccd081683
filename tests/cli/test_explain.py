"""`trunkattn explain` from the command line: trees and files, and what is wrong with them."""

import json
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from trunkattn.cli.app import app
from trunkattn.cli.explain import read_batch

GOOD = {"block_table": [[0, 1, 2], [0, 1, 3], [0, 4]], "seq_lens": [40, 41, 17], "page_size": 16}


def run(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["explain", *arguments])
    assert done.exit_code == code, done.output
    return " ".join(done.output.replace("│", " ").split())


def test_a_tree_is_explained() -> None:
    text = run("1,4,64_1024,512,128")
    assert "64 requests decode" in text and "auto took 32x64" in text


def test_a_page_that_every_level_fills_is_taken_for_a_tree() -> None:
    assert read_batch("1,8_24,5", None)[2] == 8
    assert read_batch("1,8_24,5", 4)[2] == 4
    assert read_batch("1, 2_512, 3", None)[2] == 16
    assert read_batch("8_33", None)[2] == 16


@pytest.mark.parametrize("kind", ["json", "json with a byte-order mark", "npz"])
def test_a_file_is_explained_like_a_tree(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"batch.{kind.split()[0]}"
    if kind != "npz":
        path.write_text(json.dumps(GOOD), encoding="utf-8" if kind == "json" else "utf-8-sig")
    else:
        np.savez(path, block_table=np.array([[0, 1, 2], [0, 1, 3], [0, 4, 99]]), seq_lens=[40, 41, 17], page_size=16)
    written = json.loads(run(str(path), "--json"))
    assert written["num_requests"] == 3 and written["page_size"] == 16
    assert [(node["tokens"], node["requests"]) for node in written["forest"]] == [
        (16, 3),
        (16, 2),
        (8, 1),
        (9, 1),
        (1, 1),
    ]


@pytest.mark.parametrize(
    ("engines", "torchs"), [("fp8", "float8_e4m3fn"), ("fp8_e4m3", "float8_e4m3fn"), ("fp8_e5m2", "float8_e5m2")]
)
def test_a_cache_has_the_names_of_engines_too(engines: str, torchs: str) -> None:
    by_engines, by_torchs, of_16_bits = (
        run("1,4_64,16", "--kv-cache-dtype", name, "--json") for name in (engines, torchs, "auto")
    )
    assert by_engines == by_torchs != of_16_bits


def test_a_picture_goes_to_a_file_or_to_standard_output(tmp_path: Path) -> None:
    run("1,4,64_1024,512,128", "--svg", str(tmp_path / "forest.svg"))
    assert (tmp_path / "forest.svg").read_text().startswith("<svg")
    alone = run("1,4,64_1024,512,128", "--svg", "-")  # no table follows it
    assert alone == " ".join((tmp_path / "forest.svg").read_text().split())


def test_a_batch_may_come_through_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writing = threading.Thread(target=lambda: pipe.write_text(json.dumps(GOOD)))
    writing.start()
    assert read_batch(str(pipe), None)[1].tolist() == GOOD["seq_lens"]
    writing.join()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["1,4_1024"], "levels"),
        (["4,1_16,16"], "at least as many nodes"),
        (["1,4_24,16", "--page-size", "16"], "--page-size: 16: expected a divisor"),
        (["nowhere.json"], "there is no such file; expected a tree such as 1,4,64_1024,512,128"),
        (["a" * 300], "File name too long; expected a file or a folder that can be read"),
        (["."], "there is no such file; expected a tree such as 1,4,64_1024,512,128"),
        (["~nobody-has-this-name/a.json"], "there is no such file; expected a tree such as 1,4,64_1024,512,128"),
        (["1,4_16,16", "--json", "--svg", "-"], "--svg: '-': expected a file, because --json prints"),
        (["1,4_16,16", "--gpu", "abacus"], "--gpu: 'abacus': expected a card"),
        (["1,4_16,16", "--model", "abacus"], "--model: 'abacus': expected one of"),
        (["1,4_16,16", "--tp", "3"], "--tp: 3: expected a number of cards"),
        (["1,4_16,16", "--tp", "0"], "--tp"),
        (["1,4_16,16", "--kv-cache-dtype", "int4"], "--kv-cache-dtype: 'int4': expected one of"),
        (["1,4_16,16", "--page-size", "0"], "--page-size: 0: expected an integer of at least 1"),
        (["1,4_16,16", "--svg", "no/such/folder/a.svg"], "--svg"),
    ],
)
def test_bad_arguments_are_named(arguments: list[str], message: str) -> None:
    assert message.replace(" ", "") in run(*arguments, code=2).replace(" ", "")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seq_lens": None}, 'there is no "seq_lens"'),
        ({"seq_lens": [40, 41]}, '"seq_lens" has 2 entries; expected 3'),
        ({"seq_lens": [40, 41, 0]}, '"seq_lens" holds a 0; expected at least 1 token'),
        ({"seq_lens": [40, 41, 33]}, 'row 2 of "block_table" has 2 pages of 16 tokens'),
        ({"block_table": [[0]] * 9999, "seq_lens": [(1 << 31) - 1] * 9999}, 'row 0 of "block_table" has 1 pages'),
        ({"seq_lens": [40, 41, 1.5]}, '"seq_lens" is not a list of integers'),
        ({"block_table": [[0, 1, 2], [0, 1, "x"], [0, 4]]}, '"block_table" is not a list of integers'),
        ({"block_table": [[0, 1, 2], [0, 1, -3], [0, 4]]}, '"block_table" is not a list of integers from 0'),
        ({"block_table": [[0, [1], 2], [0, 1, 3], [0, 4]]}, '"block_table" is not a list of integers'),
        ({"block_table": 3}, '"block_table" is not a list of rows'),
        *(({"page_size": size}, '"page_size" is not one integer of at least 1') for size in (0, "16", [], [8, 9], 1.5)),
        ({"block_table": [], "seq_lens": []}, '"block_table" is not a list of rows'),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    path = tmp_path / "batch.json"
    path.write_text(json.dumps(GOOD | changed))
    assert message.replace(" ", "") in run(str(path), code=2).replace(" ", "")


@pytest.mark.parametrize("name", FIELDS := ("block_table", "seq_lens", "page_size"))
def test_a_missing_field_is_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / "batch.json"
    path.write_text(json.dumps({field: value for field, value in GOOD.items() if field != name}))
    assert f'thereisno"{name}"' in run(str(path), code=2).replace(" ", "")


def test_what_a_table_is_padded_with_is_not_looked_at(tmp_path: Path) -> None:
    """Engines pad rows with any number."""
    path = tmp_path / "batch.json"
    for pad in (-1, 1 << 40):
        path.write_text(json.dumps(GOOD | {"block_table": [[0, 1, 2], [0, 1, 3], [0, 4, pad]]}))
        assert read_batch(str(path), None)[0].tolist() == [[0, 1, 2], [0, 1, 3], [0, 4, 0]]


@pytest.mark.parametrize("content", ["", "[1, 2]", "{", "\x00\xff", "[" * 100_000, "\x93NUMPY"])
def test_what_is_no_batch_is_refused(tmp_path: Path, content: str) -> None:
    for name in ("batch.json", "batch.npz"):
        (tmp_path / name).write_text(content)
        text = run(str(tmp_path / name), code=2)
        assert "Invalid value for BATCH" in text and "expected" in text


def test_the_page_size_of_a_file_stands(tmp_path: Path) -> None:
    path = tmp_path / "batch.json"
    path.write_text(json.dumps(GOOD))
    assert "expected16,whichthefilesays" in run(str(path), "--page-size", "32", code=2).replace(" ", "")
    path.write_text(json.dumps({name: GOOD[name] for name in ("block_table", "seq_lens")}))
    assert json.loads(run(str(path), "--page-size", "16", "--json"))["page_size"] == 16
