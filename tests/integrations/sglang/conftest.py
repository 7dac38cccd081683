"""Models and stock outputs that the tests share, and what lets one process start many engines of SGLang."""

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

# prometheus_client decides when it is imported whether processes share their counters.
os.environ.setdefault("PROMETHEUS_MULTIPROC_DIR", tempfile.mkdtemp())

import pytest
from sglang.srt.plugins import load_plugins

from ..vllm.device_attention import PlannerCompilations
from ..vllm.models import write_model
from .engine import Run, generate


def pytest_configure() -> None:
    start = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda method, force=False: start("fork", force=True)
    load_plugins()
    for module in ("sglang.srt.managers.scheduler", "trunkattn.integrations.sglang.backend"):
        import_module(module)  # once for all engines


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model."""

    @cache
    def folder(name: str) -> Path:
        path = tmp_path_factory.mktemp(name)
        write_model(name, path)
        return path

    return folder


@pytest.fixture(scope="session")
def stock(model: Callable[[str], Path]) -> Callable[..., Run]:
    """What SGLang's own back end for CPUs generates, with pages of one token."""

    @cache
    def run(name: str, **options: Any) -> Run:
        found = generate(model(name), "torch_native", **options)
        assert not found.steps
        return found

    return run


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> PlannerCompilations:
    """No process compiles a planner."""
    planners = PlannerCompilations()
    monkeypatch.setattr("trunkattn.integrations.sglang.cuda.planner_compilation", planners)
    return planners


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, compilations: PlannerCompilations) -> None:
    """A GPU, as far as the back end can tell."""
    from .card import set_card  # it imports SGLang, which is set up first

    set_card(monkeypatch)
