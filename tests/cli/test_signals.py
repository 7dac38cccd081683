"""Ctrl-C, SIGTERM and SIGHUP end a command with one line and its status, at once where nothing has to be put away."""

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from typing import Any

import pytest

from trunkattn.analysis.parallel import run_all
from trunkattn.interrupts import CommandSignals, ends_at_once, finished, held_interrupts, importing, temporary_folder

USUAL = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}
SIGNALS = list(USUAL)
PROGRAM = """
import signal, sys
import trunkattn.cli as cli

def interrupt():
    signal.raise_signal({number})

class Dropping:  # as the imports of some libraries do
    def find_spec(self, name, *_):
        if name == "trunkattn.cli.app":
            try:
                interrupt()
            except KeyboardInterrupt:
                pass

signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
sys.argv = ["trunkattn", "doctor"]
{change}
cli.main()
"""


@pytest.fixture(autouse=True)
def _interrupts_raise() -> Iterator[None]:
    """A shell without job control starts a process in the background with interrupts that are ignored, and `nohup` one
    that ignores SIGHUP."""
    before = [signal.signal(*usual) for usual in USUAL.items()]
    yield
    for number, handler in zip(USUAL, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("change", ["sys.meta_path.insert(0, Dropping())", "cli._run = interrupt"])
def test_one_line_and_the_status_of_a_shell(number: signal.Signals, change: str) -> None:
    program = PROGRAM.format(number=int(number), change=change)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (128 + number, "", "trunkattn: interrupted")


def status_of(work: Callable[[], object]) -> int:
    """How a child ends whose command does some work."""
    child = os.fork()
    if not child:
        try:
            with CommandSignals().handling():
                work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("number", SIGNALS)
def test_a_step_or_a_compiler_delays_the_end_of_no_command(number: signal.Signals) -> None:
    def step() -> None:
        with ends_at_once(), held_interrupts():
            signal.raise_signal(number)

    def imports() -> None:
        with importing():
            signal.raise_signal(number)

    assert status_of(step) == status_of(imports) == 128 + number


@pytest.mark.parametrize("number", SIGNALS)
def test_a_temporary_folder_goes_first(number: signal.Signals) -> None:
    with (
        CommandSignals().handling() as signals,
        pytest.raises(KeyboardInterrupt),
        ends_at_once(),
        temporary_folder() as folder,
    ):
        (folder / "a file").touch()
        signal.raise_signal(number)
    assert signals.received == number and not folder.exists()


@pytest.mark.parametrize("number", SIGNALS)
def test_signals_wait_where_a_library_must_not_be_interrupted(number: signal.Signals) -> None:
    through = False
    with CommandSignals().handling(), pytest.raises(KeyboardInterrupt), held_interrupts():
        signal.raise_signal(number)
        through = True
    assert through and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_what_is_ignored_stays_ignored() -> None:
    """As `nohup` and `&` in a script start a command."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with CommandSignals().handling() as signals:
        signal.raise_signal(signal.SIGINT)
    assert signals.received is None


@pytest.mark.parametrize("context", [importing, finished, held_interrupts])
def test_sigterm_of_a_command_in_the_background_is_not_lost(context: Callable[[], Any]) -> None:
    """A library drops an error that is raised within its import."""

    def work() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with CommandSignals().handling(), ends_at_once() if context is finished else nullcontext():
            through = False
            with suppress(KeyboardInterrupt), context(), suppress(BaseException):
                signal.raise_signal(signal.SIGTERM)
                through = True
            os._exit(1 if through else 2)

    expected = {importing: 128 + signal.SIGTERM, finished: 128 + signal.SIGTERM, held_interrupts: 1}
    assert status_of(work) == expected[context]


def test_a_file_is_written_before_the_end() -> None:
    def work() -> None:
        with ends_at_once(), finished():
            signal.raise_signal(signal.SIGTERM)
            os.write(writing, b"written")

    reading, writing = os.pipe()
    assert status_of(work) == 128 + signal.SIGTERM and os.read(reading, 7) == b"written"


def test_a_command_runs_in_another_thread() -> None:
    with ThreadPoolExecutor(1) as pool, pool.submit(CommandSignals().handling).result() as signals:
        assert signals.received is None
    handled = CommandSignals()

    def handle() -> Any:
        with handled.handling():
            return signal.getsignal(signal.SIGTERM)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(handle).result() is signal.SIG_DFL


def test_a_terminal_interrupts_the_parent_alone() -> None:
    """It sends Ctrl-C to all processes of a command, and each would print a traceback."""

    def task(_: Callable[[float], None]) -> bool:
        signal.raise_signal(signal.SIGINT)
        return signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    with CommandSignals().handling():
        assert run_all([task, task], [1.0, 1.0], lambda _: None, 2) == [True, True]


def test_ctrl_z_leaves_a_terminal_with_a_cursor_and_loses_nothing() -> None:
    program = """
from rich.progress import Progress
from trunkattn.interrupts import CommandSignals
import sys

with CommandSignals().handling(), Progress() as progress:
    for line in sys.stdin:
        progress.console.print(line, end="")
"""
    terminal, end = pty.openpty()
    command = [sys.executable, "-c", program]
    # of a group of its own: where no shell could continue it, the system stops no process for Ctrl+Z
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=end, stderr=end, preexec_fn=os.setpgrp)
    assert process.stdin is not None
    for word in ("once", "again"):
        process.stdin.write(f"{word}\n".encode())
        process.stdin.flush()
        shown = b""
        while word.encode() not in shown:
            shown += os.read(terminal, 1 << 16)
        os.kill(process.pid, signal.SIGTSTP)
        assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
        shown += os.read(terminal, 1 << 16)
        assert shown.rfind(b"\x1b[?25h") > shown.rfind(b"\x1b[?25l")
        os.kill(process.pid, signal.SIGCONT)
    process.stdin.close()
    assert process.wait(120) == 0
    os.close(end)
    os.close(terminal)
