"""Ctrl-C while a command imports its libraries: torch's import of NumPy drops one, and the command went on."""

import signal
import sys
from contextlib import suppress
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
from typer.testing import CliRunner

from trunkattn.cli.app import app


def module_of(command: str) -> str:
    """The module that a command imports."""
    return f"trunkattn.cli.{command}" + (".command" if command in ("demo", "doctor") else "")


class Dropping(Loader):
    """Finds the module of a command; its import is interrupted, and drops that as torch's does."""

    def __init__(self, name: str) -> None:
        self._name, self.ran = name, False

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name == module_of(self._name) else None

    def exec_module(self, module: ModuleType) -> None:
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        for name in ("run_demo_command", f"run_{self._name}"):
            setattr(module, name, lambda _: setattr(self, "ran", True))


@pytest.mark.parametrize("line", ["demo", "generate", "serve", "analyze -", "explain 1,4_16,16", "doctor"])
def test_it_ends_the_command_after_the_import(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str) -> None:
    name, *arguments = line.split()
    if name in ("generate", "serve"):
        arguments = [str(tmp_path)]
    dropping = Dropping(name)
    monkeypatch.setattr(sys, "meta_path", [dropping, *sys.meta_path])
    parent, _, child = module_of(name).rpartition(".")
    monkeypatch.setattr(import_module(parent), child, None, raising=False)  # the import sets it
    with patch.dict(sys.modules):
        sys.modules.pop(module_of(name), None)
        result = CliRunner().invoke(app, [name, *arguments])
    assert (result.exit_code, dropping.ran) == (130, False), result.output
