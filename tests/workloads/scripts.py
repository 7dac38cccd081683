"""Arguments that a benchmark's script must refuse."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def refusal(module: str, arguments: list[str]) -> str:
    """What a script says on standard error before it ends with status 2."""
    done = subprocess.run([sys.executable, "-m", module, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    return done.stderr


def refused(read: Callable[[Sequence[str]], object], given: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What reading arguments says on standard error, in this process."""
    with pytest.raises(SystemExit) as ended:
        read(given)
    assert ended.value.code == 2
    return capsys.readouterr().err
