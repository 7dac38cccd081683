"""The page about installing names every environment variable that the package reads or sets."""

import re
from pathlib import Path

import pytest
import typer

from trunkattn.cli.app import app

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "docs/guide/install.md").read_text().partition("## Environment variables")[2]
READS = re.compile(r"environ|envvar|_VARIABLE|_not_loaded\(|\benvs\.")
NAMES = re.compile(r"(?:\"|envs\.)((?:[A-Z]+_)+[A-Z]+)\b")


def variables() -> set[str]:
    lines = [line for path in (ROOT / "src").rglob("*.py") for line in path.read_text().splitlines()]
    return {name for line in lines if READS.search(line) for name in NAMES.findall(line)}


def test_every_variable_is_named() -> None:
    found = variables()
    assert {"NUMBA_CACHE_DIR", "TRUNKATTN_API_KEY", "VLLM_PLUGINS", "VLLM_BATCH_INVARIANT"} <= found
    assert not found - set(re.findall(r"`([A-Z_]+)`", TABLE))


def test_keys_of_the_variable_stand_between_spaces(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "`TRUNKATTN_API_KEY` | `trunkattn serve` | [keys](server.md#keys-and-tenants), with spaces" in TABLE
    monkeypatch.setenv("TRUNKATTN_API_KEY", "one two")
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    assert list(command.make_context("serve", ["model"]).params["api_key"]) == ["one", "two"]
