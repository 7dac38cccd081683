"""Arguments that a benchmark's script must refuse."""

import io
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from importlib import import_module

import pytest


def refusal(module: str, arguments: list[str]) -> str:
    """What a script says on standard error before it ends with status 2, run in this process."""
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patched, redirect_stderr(said), pytest.raises(SystemExit) as ended:
        patched.setattr(sys, "argv", [f"{module}.py", *arguments])
        import_module(module).main()
    assert ended.value.code == 2
    return said.getvalue()


def refused(read: Callable[[Sequence[str]], object], given: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What reading arguments says on standard error, in this process."""
    with pytest.raises(SystemExit) as ended:
        read(given)
    assert ended.value.code == 2
    return capsys.readouterr().err
