"""How functions are compiled for the CPU: what the cache notices, running without one, and who is told."""

import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numba.core import event
from numba.core.caching import CompileResultCacheImpl, IndexDataCacheFile, NullCache

from trunkattn import compiled

SOURCE = Path(compiled.__file__).parent


def first_axis(x):  # type: ignore[no-untyped-def]
    return x.shape[0]


@pytest.fixture
def own_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with a few sources in the place of trunkattn."""
    for name in ("compiled.py", "planner/packs/cost.py", "engine/llm.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    monkeypatch.setattr(compiled, "_PACKAGE", tmp_path)
    return tmp_path


def stamp() -> str:
    return compiled.source_stamp.__wrapped__()


@pytest.mark.parametrize(("name", "matters"), [("planner/packs/cost.py", True), ("engine/llm.py", False)])
def test_a_stamp_follows_the_compiled_sources(own_package: Path, name: str, matters: bool) -> None:
    before = stamp()
    (own_package / name).write_text("x = 2\n")
    assert (stamp() != before) == matters
    (own_package / name).write_text("x = 1\n")
    assert stamp() == before


def test_every_compiled_function_stands_in_a_source_of_the_stamp() -> None:
    files = [file.relative_to(SOURCE) for file in SOURCE.rglob("*.py") if "njit" in file.read_text()]
    named = [Path(name) for name in compiled.COMPILED_SOURCES]
    assert len(files) > 10
    assert not [file for file in files if not any(name in (file, *file.parents) for name in named)]
    assert all((SOURCE / name).exists() for name in named)


def test_a_cached_function_has_the_stamp_of_all_sources() -> None:
    dispatcher = compiled.njit(first_axis)
    assert dispatcher._cache._cache_file._source_stamp == compiled.source_stamp()
    assert isinstance(compiled.njit(inner=True)(first_axis)._cache, NullCache)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a cache, with the compiled code of `first_axis`."""
    monkeypatch.setattr(compiled._PackageCacheImpl, "check_cachable", lambda self, result: True)
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))
    assert compiled.njit(first_axis)(np.zeros((3, 2))) == 3
    return tmp_path


def is_cached() -> bool:
    """Whether the next process would find the code of `first_axis`, which has to run in any case."""
    dispatcher = compiled.njit(first_axis)
    assert dispatcher(np.zeros((3, 2))) == 3
    return bool(dispatcher.stats.cache_hits)


@pytest.mark.parametrize("name", ["nowhere.Entries", "trunkattn.compiled.Entries"])
def test_an_index_that_names_what_is_gone_is_emptied(own_cache: Path, name: str) -> None:
    """Another version wrote it, whose classes have other names or stood in other files."""
    (index,) = own_cache.rglob("*.nbi")
    module, _, attribute = name.rpartition(".")
    version, _ = index.read_bytes().split(b"\x80", 1)
    index.write_bytes(version + f"c{module}\n{attribute}\n.".encode())
    assert not is_cached() and is_cached()


@pytest.mark.parametrize("pattern", ["*.nbi", "*.nbc"])
@pytest.mark.parametrize(
    "damage", [lambda data: b"", lambda data: data[: len(data) // 2], lambda data: bytes(len(data))]
)
def test_damaged_files_are_written_again(own_cache: Path, pattern: str, damage: Callable[[bytes], bytes]) -> None:
    """The machine lost its power after a file had its name and before it had its bytes."""
    assert is_cached()
    (file,) = own_cache.rglob(pattern)
    file.write_bytes(damage(file.read_bytes()))
    assert not is_cached() and is_cached()


def test_a_full_disk_keeps_no_code_of_another_version(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index with the new stamp still finds room, and names a file that has the code of the version before."""

    def no_room(self: Any, name: str, data: Any) -> None:
        raise OSError(28, "No space left on device")

    compiled._warn_unkept.cache_clear()
    monkeypatch.setattr(compiled, "source_stamp", lambda: "of a newer version")
    with monkeypatch.context() as full, pytest.warns(RuntimeWarning, match="No space left on device.*make room there"):
        full.setattr(IndexDataCacheFile, "_save_data", no_room)
        assert not is_cached()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not is_cached() and is_cached()


def test_one_warning_tells_of_files_that_cannot_be_made(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them has a name of its own, which the error names, too."""

    def refuse(self: Any, name: str, data: Any) -> None:
        refused.append(name)
        raise OSError(122, "Disk quota exceeded", f"{name}.{len(refused)}")

    refused: list[str] = []
    compiled._warn_unkept.cache_clear()
    monkeypatch.setattr(IndexDataCacheFile, "_save_data", refuse)
    monkeypatch.setattr(compiled, "source_stamp", lambda: "of a newer version")
    with pytest.warns(RuntimeWarning) as warned:
        assert not is_cached() and not is_cached()
    assert len(refused) == 2 and len(warned) == 1 and "(Disk quota exceeded)" in str(warned[0].message)


def test_without_a_folder_functions_run_uncached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CompileResultCacheImpl, "_locator_classes", [])
    compiled.cache_folder.cache_clear()
    try:
        assert compiled.cache_folder() is None
        dispatcher = compiled.njit(first_axis)
        assert isinstance(dispatcher._cache, NullCache)
        assert dispatcher(np.zeros(3)) == 3
    finally:
        compiled.cache_folder.cache_clear()


class Clock:
    """Stands for the module `time`; a test moves it on."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


def compile_events(announcer: compiled.Announcer, clock: Clock, module: str, seconds: float) -> None:
    event = SimpleNamespace(data={"dispatcher": SimpleNamespace(py_func=SimpleNamespace(__module__=module))})
    announcer.on_start(event)
    announcer.on_start(event)  # a function that it calls
    announcer.on_end(event)
    clock.now += seconds
    announcer.on_end(event)


def test_the_second_long_compilation_is_announced_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    announcer, clock = compiled.Announcer(), Clock()
    monkeypatch.setattr(compiled, "time", clock)
    compile_events(announcer, clock, "somebody.elses", 0.4)
    compile_events(announcer, clock, "trunkattn.planner.planner", 0.0)
    compile_events(announcer, clock, "trunkattn.planner.planner", 0.4)
    assert caplog.messages == []
    for _ in range(2):
        compile_events(announcer, clock, "trunkattn.cpu.parallel", 0.0)
    (said,) = caplog.messages
    assert said.startswith("trunkattn compiles what runs on the CPU") and str(compiled.cache_folder()) in said


def test_without_a_folder_the_announcement_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.warns(RuntimeWarning, match="set NUMBA_CACHE_DIR to a folder that can be written"):
        compiled.announce(None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled.announce("/somewhere")
    assert [message.endswith(" /somewhere") for message in caplog.messages] == [True]


def in_a_process_of_its_own(code: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parent)}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)


def test_the_announcement_is_seen_without_a_configured_log_and_can_be_silenced() -> None:
    announce = "from trunkattn.compiled import announce; announce('/somewhere')"
    silence = "import logging; logging.getLogger('trunkattn').setLevel('ERROR')"
    said = "trunkattn compiles what runs on the CPU, 10 to 40 s once, and keeps it in /somewhere\n"
    done = in_a_process_of_its_own(f"{announce}; {silence}; announce('/elsewhere')")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", said)


def test_no_compiler_of_the_cpu_is_imported_before_a_plan_needs_it() -> None:
    uses = [
        "import trunkattn",
        "from trunkattn import AttentionConfig, Capacity",
        "from trunkattn import flash_attention",
        "from trunkattn import merge_states, PlanStats",
        "import trunkattn.reference",
    ]
    imported = "print(sorted({'numba', 'llvmlite'} & set(sys.modules)))"
    done = in_a_process_of_its_own("; ".join(["import sys", *(f"{use}; {imported}" for use in uses)]))
    assert done.stdout.splitlines() == ["[]"] * len(uses), (uses, done.stdout, done.stderr)


class Interrupting(event.Listener):
    """Stands for somebody who presses Ctrl-C while a function is being compiled."""

    def on_start(self, event: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    def on_end(self, event: Any) -> None:
        """Nobody does anything then."""


def test_an_interrupt_waits_for_the_end_of_a_compilation() -> None:
    """An interrupted compiler frees memory twice, whoever calls the function first."""
    dispatcher = compiled.njit(first_axis)
    dispatcher._cache = NullCache()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with event.install_listener("numba:compile", Interrupting()), pytest.raises(KeyboardInterrupt):
            dispatcher(np.zeros(3))
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(dispatcher.overloads) == 1 and dispatcher(np.zeros(3)) == 3
