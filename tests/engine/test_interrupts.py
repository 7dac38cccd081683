"""Ctrl-C ends a call between two steps: nothing is left over, and the next call answers."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from trunkattn import engine, lazy
from trunkattn.engine import LLM, SamplingParams
from trunkattn.interrupts import held_interrupts, interruptible

PROMPTS = [[1, 2, 3], [4, 5, 6]]
PARAMS = SamplingParams(temperature=0, max_tokens=5)


@pytest.fixture(autouse=True)
def _interrupts_raise() -> Iterator[None]:
    """A shell without job control starts a process in the background with interrupts that are ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("method", ["step", "add_checked"])
def test_an_interrupt_waits_for_the_end_of_the_step(
    tiny_model: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    llm = LLM(tiny_model("llama").path, num_pages=16)
    expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)]
    original, finished = getattr(llm.engine, method), list[bool]()

    def interrupted(*arguments: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        result = original(*arguments)
        finished.append(True)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS[:1], PARAMS)
    assert finished and not llm.engine.has_unfinished
    llm.engine.scheduler.cache.check_integrity()
    assert llm.engine.scheduler.cache.num_pages_in_use == 0
    assert [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)] == expected


COMPILING = """
import sys
from trunkattn.engine import LLM, SamplingParams, StructuredOutputsParams
import llguidance

def told(*arguments, **options):
    print("compiling", flush=True)
    return llguidance.LLMatcher(*arguments, **options)

def answer():
    return len(llm.generate("x", SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].token_ids)

llm = LLM(sys.argv[1], num_pages=16)
answer()
library = type("library", (), {"LLMatcher": staticmethod(told)})
sys.modules["trunkattn.engine.forms.structured_output"].library = lambda: library
minutes = StructuredOutputsParams(json={"type": "integer", "multipleOf": 9_999_991})
try:
    llm.generate("x", SamplingParams(structured_outputs=minutes))
except KeyboardInterrupt:
    print(answer(), flush=True)
    raise
"""


@pytest.mark.slow
def test_an_interrupt_does_not_wait_for_a_form_that_is_compiled(tiny_speaker: Path) -> None:
    command = [sys.executable, "-c", COMPILING, str(tiny_speaker)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "compiling\n"
            time.sleep(0.3)  # within the compiler
            process.send_signal(signal.SIGINT)
            rest, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert rest == "3\n" and errors.rstrip().endswith("KeyboardInterrupt")


def test_what_can_be_interrupted_raises_what_it_raises() -> None:
    assert interruptible(lambda: 2) == 2
    with pytest.raises(ZeroDivisionError):
        interruptible(lambda: 1 // 0)


def test_an_interrupt_waits_for_the_end_of_an_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within one, libraries raise other errors, and their modules cannot be imported again."""
    imported: list[str] = []

    def interrupted(name: str) -> ModuleType:
        signal.raise_signal(signal.SIGINT)
        imported.append(name)
        return import_module(name)

    monkeypatch.setattr(lazy, "import_module", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.__getattr__("LLM")
    assert imported == ["trunkattn.engine.llm"]


def test_a_second_interrupt_does_not_wait() -> None:
    before, reached = signal.getsignal(signal.SIGINT), list[int]()
    with pytest.raises(KeyboardInterrupt), held_interrupts():
        signal.raise_signal(signal.SIGINT)
        reached.append(1)
        signal.raise_signal(signal.SIGINT)
        reached.append(2)
    assert reached == [1] and signal.getsignal(signal.SIGINT) is before


def test_a_block_within_another_leaves_the_interrupt_to_it() -> None:
    """A plan is such a block within a step of the engine, of which the second interrupt must end both."""
    reached = list[str]()
    with pytest.raises(KeyboardInterrupt), held_interrupts():
        with held_interrupts():
            signal.raise_signal(signal.SIGINT)
            reached.append("inner")
        reached.append("outer")
    assert reached == ["inner", "outer"]
    with pytest.raises(KeyboardInterrupt), held_interrupts(), held_interrupts():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        reached.append("after the second")
    assert reached == ["inner", "outer"]


def test_other_threads_and_other_handlers_are_left_alone() -> None:
    done: list[bool] = []

    def run() -> None:
        with held_interrupts():
            done.append(True)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with held_interrupts():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert done
