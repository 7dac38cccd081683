"""The host's planner compiled by another process: it compiles all that plans need, and its failure does no harm."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trunkattn.gpu.cards import GpuFacts
from trunkattn.gpu.planner_compilation import process, program
from trunkattn.gpu.planner_compilation.process import PlannerCompilation, compile_ahead

H100 = GpuFacts("NVIDIA H100 80GB HBM3", 132, 90, 50 << 20)


def compiled_by(folder: Path, *arguments: str) -> list[str]:
    """What `plan_script` compiles in a process whose cache is in this folder."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.gpu.plan_script", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["NUMBA_CACHE_DIR"] = str(folder)
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=root)
    return done.stdout.splitlines()


def test_a_plan_on_the_device_compiles_nothing_on_the_host(tmp_path: Path) -> None:
    assert compiled_by(tmp_path, "chunks") == []


@pytest.mark.compile  # all of the planner, twice
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_plans_find_all_that_the_process_has_compiled(tmp_path: Path, batch_invariant: bool) -> None:
    arguments = json.dumps([*H100, batch_invariant])
    assert compiled_by(tmp_path, "ahead", arguments) == []
    (index,) = tmp_path.rglob("prefix_forest.build_forest*.nbi")
    index.unlink()
    compiled = compiled_by(tmp_path, "host", arguments)
    assert "build_forest" in compiled[0], "what is not found is compiled, and noticed"


def test_no_process_where_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "cache_folder", lambda: None)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert compile_ahead(H100, False)._process is None


@pytest.mark.parametrize("python", ["", "/no/such/program", "/bin/false"])
def test_a_process_that_fails_does_no_harm(monkeypatch: pytest.MonkeyPatch, python: str) -> None:
    monkeypatch.setattr(sys, "executable", python)
    planner = compile_ahead(H100, False)
    planner.wait()
    planner.wait()


def test_a_process_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(process, "_LONGEST_WAIT_S", 0.1)
    sleeping = subprocess.Popen(["sleep", "60"])
    PlannerCompilation(sleeping).wait()
    assert sleeping.returncode == -signal.SIGKILL
    assert "waits until its planner is compiled" in caplog.text


def test_one_process_compiles_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fcntl = pytest.importorskip("fcntl")
    planned: list[tuple[GpuFacts, bool]] = []

    def plan(facts: GpuFacts, batch_invariant: bool) -> None:
        with (tmp_path / "trunkattn.lock").open("w") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        planned.append((facts, batch_invariant))

    monkeypatch.setattr(program, "cache_folder", lambda: str(tmp_path))
    monkeypatch.setattr(program, "plan_every_kind", plan)
    for _ in range(2):
        program.main(json.dumps([*H100, True]))
    assert planned == [(H100, True)] * 2
