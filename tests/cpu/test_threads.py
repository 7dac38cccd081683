"""The parallel loop of the CPU kernels: each call is made once, on whatever threads there are."""

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Final

import numba
import numpy as np
import pytest
import torch

from trunkattn.compiled import njit
from trunkattn.cpu import threads
from trunkattn.cpu.arguments import address_of, array_at

NUM_CALLS: Final = 7


@njit(by_address=True)
def _count(arguments, thread):
    array_at(arguments, np.int64)[thread] += 1


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def calls_of(num_calls: int) -> list[int]:
    """How often a loop makes each call, and the next one, which it must not make."""
    counts = np.zeros(num_calls + 1, np.int64)
    threads.call_on_threads(threads.kernel_address(_count), address_of(counts), num_calls)
    return counts.tolist()


@pytest.mark.parametrize("num_calls", [1, 2, NUM_CALLS])
def test_each_call_is_made_once(num_calls: int) -> None:
    assert calls_of(num_calls) == [1] * num_calls + [0]


def test_without_the_entry_points_of_gnus_openmp_python_runs_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_parallel", lambda: threads._on_threads_of_python)
    monkeypatch.setattr(threads, "_openmp", lambda: None)
    assert calls_of(NUM_CALLS) == [1] * NUM_CALLS + [0]
    assert 1 <= len(set(threads.team(2))) <= 2
    threads.set_num_threads(1)
    assert torch.get_num_threads() == 2


def test_a_limit_is_this_threads_and_torchs_too() -> None:
    assert len(set(threads.team(2))) == 2
    threads.set_num_threads(1)
    assert torch.get_num_threads() == 1
    assert calls_of(NUM_CALLS) == [1] * NUM_CALLS + [0]
    threads.set_num_threads(2)
    assert torch.get_num_threads() == 2 and len(set(threads.team(2))) == 2


def test_a_loop_of_few_calls_ends_no_thread() -> None:
    """GNU's OpenMP ends the threads that a team has no work for, and the next loop would start others."""
    torch.set_num_threads(4)
    team = set(threads.team(4))
    assert len(team) == 4
    assert calls_of(2) == [1, 1, 0]
    assert set(threads.team(4)) == team


SCRIPT: Final = """
import threading
import torch, trunkattn

def run():
    attention = trunkattn.BatchAttention(trunkattn.AttentionConfig(4, 2, 64, 16, torch.float32), "cpu")
    plan = attention.plan(table, torch.full((8,), 250, dtype=torch.int32))
    return [attention.run(plan, q, k, v) for _ in range(50)]

torch.manual_seed(0)
torch.set_num_threads(2)
table = torch.arange(128, dtype=torch.int32).reshape(8, 16)
q, k, v = torch.randn(8, 4, 64), torch.randn(128, 16, 2, 64), torch.randn(128, 16, 2, 64)
expected, found = run()[0], []
workers = [threading.Thread(target=lambda: found.extend(run())) for _ in range(2)]
[worker.start() for worker in workers]
[worker.join() for worker in workers]
print(len(found), all(torch.equal(out, expected) for out in found))
"""


@pytest.mark.parametrize("setting", ["NUMBA_THREADING_LAYER=workqueue", "OMP_THREAD_LIMIT=1", "OMP_DYNAMIC=true"])
def test_two_threads_of_python_may_compute_at_once(setting: str) -> None:
    """Also where Numba has no OpenMP, as on a system without one of its own, and where OpenMP gives fewer threads."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    environment |= dict([setting.split("=")])
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, timeout=600)
    assert done.stdout == "100 True\n", done.stderr


def test_plain_python_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    with pytest.raises(ValueError, match="NUMBA_DISABLE_JIT is set: only plans are made"):
        threads.kernel_address(_count)
