"""Inside `compiled_together` launches compile and run nothing; everywhere else, and afterwards, they run."""

import json
import os
import subprocess
import sys
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from trunkattn.gpu.compiling import compiled_together, is_compiling, launch

from .bound_cases import Compiled, Kernel, bound
from .hopper_cases import make_tensors

active_mode = pytest.importorskip("triton.runtime._async_compile").active_mode


class Warmed(Kernel):
    """A jitted function that notes what it is compiled for."""

    def __init__(self) -> None:
        super().__init__()
        self.warmed: list[tuple[tuple[int, ...], dict[str, Any]]] = []

    def warmup(self, *, grid: tuple[int, ...], **given: Any) -> Compiled:
        self.warmed.append((grid, given))
        return self.compiled


def test_launches_compile_inside_and_run_outside() -> None:
    kernel = Warmed()
    launch(kernel, (7,))(SIZE=1)
    with compiled_together():
        launch(kernel, (8,))(SIZE=2)
    launch(kernel, (9,))(SIZE=3)
    assert kernel.warmed == [((8,), {"SIZE": 2})]
    assert kernel.calls == [((7,), {"SIZE": 1}), ((9,), {"SIZE": 3})]


def test_bound_launches_are_bound_when_they_first_run() -> None:
    kernel, t = Warmed(), make_tensors()
    launches = bound(kernel, t)
    with compiled_together():
        launches(t)
        launches(t)
    assert [grid for grid, _ in kernel.warmed] == [(7, 1, 1), (9, 1, 1)] * 2
    assert (kernel.calls, kernel.compiled.calls) == ([], [])
    launches(t)
    assert [given for _, given in kernel.calls] == [given for _, given in kernel.warmed[:2]]
    launches(t)
    assert [call[0] for call in kernel.compiled.calls] == [(7, 1, 1), (9, 1, 1)]


def test_triton_compiles_in_threads_of_a_pool_meanwhile() -> None:
    with compiled_together():
        assert active_mode.get().executor.submit(lambda: 3).result() == 3
    assert active_mode.get() is None


def test_a_failure_ends_it() -> None:
    with pytest.raises(ValueError, match="no such layer"), compiled_together():
        raise ValueError("no such layer")
    assert not is_compiling()
    assert active_mode.get() is None


def test_other_threads_run_their_launches_meanwhile() -> None:
    kernel = Warmed()
    with compiled_together():
        thread = Thread(target=lambda: launch(kernel, (7,))(SIZE=1))
        thread.start()
        thread.join()
        assert is_compiling()
    assert (len(kernel.calls), kernel.warmed) == (1, [])


@pytest.fixture(scope="module")
def asked() -> dict[str, list[list[str]]]:
    """By case, the kernels that a warm-up compiles, and those that the steps after it compile."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("warm_script.py")
    found = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, env=environment)
    cases: dict[str, list[list[str]]] = json.loads(found.stdout)
    return cases


@pytest.mark.parametrize(
    ("case", "kernels"),
    [
        ("chunks_beside_decodes", {"_count_kernel", "decode_kernel", "lists_kernel"}),
        ("batch_invariant_prompts", {"decode_kernel", "merge_kernel"}),
    ],
)
def test_steps_compile_nothing_after_the_warm_up(
    asked: dict[str, list[list[str]]], case: str, kernels: set[str]
) -> None:
    warm, later = asked[case]
    assert kernels <= set(warm)
    assert later == []
