"""Texts that are kept outside the memory: what comes back, what it takes, and a disk that is full."""

import gc
import os
import tempfile
import tracemalloc
import warnings
from multiprocessing import get_context
from pathlib import Path

import pytest

from trunkattn.analysis import texts as texts_module
from trunkattn.analysis.texts import Texts


def test_texts_are_kept_and_replaced() -> None:
    texts = Texts(["a", "bé", "", "d" * 1000])
    assert list(texts) == ["a", "bé", "", "d" * 1000]
    assert list(texts.taken([3, 0])) == ["d" * 1000, "a"]
    assert list(texts[1:3]) == ["bé", ""]
    assert list(texts.replaced({0: "new"})) == ["new", "bé", "", "d" * 1000]
    assert texts[0] == "a"
    assert texts[-1] == "d" * 1000


def test_the_memory_holds_places_alone() -> None:
    texts = Texts(["warm up"])
    tracemalloc.start()
    try:
        for number in range(2000):
            texts.append(os.urandom(2000).hex() + str(number))
        taken = texts.taken(range(len(texts)))
        own = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, texts_module.__file__)])
    finally:
        tracemalloc.stop()
    grown = sum(trace.size for trace in own.traces)  # what other threads of the process take is not counted
    assert 2 * 16 * len(taken) <= grown < 64 * len(taken)


def test_no_file_has_a_name_and_processes_read_the_same_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    texts = Texts(["one", "two"])
    assert list(tmp_path.iterdir()) == []
    readers = [get_context("fork").Process(target=_read_again_and_again, args=(texts,)) for _ in range(2)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert [reader.exitcode for reader in readers] == [0, 0]
    assert list(texts) == ["one", "two"]


def _read_again_and_again(texts: Texts) -> None:
    assert all(list(texts) == ["one", "two"] for _ in range(500))


def test_no_file_is_left_to_python_to_close() -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        texts = Texts(["one"])
        assert texts[0] == "one"
        del texts
        gc.collect()
    messages = [str(warning.message) for warning in told]  # of what other tests left, too
    assert [message for message in messages if message.startswith("unclosed file")] == []


def test_a_disk_without_room_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: bytes, place: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(ValueError, match=r"there is no room for the texts of the log; expected as much .* TMPDIR"):
        Texts(["a"])
