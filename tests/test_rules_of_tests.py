"""What a test may not do to the others: tests that share a process share its clocks, and servers run beside them."""

import ast
from pathlib import Path, PurePosixPath

import pytest
import torch

from tests.imports import imported_names

TESTS = Path(__file__).parent
# Clocks that threads count on: an event loop that looks at one set back sleeps until the clock has caught up.
CLOCKS = frozenset({"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "sleep"})
PATCHES = ("setattr", "patch", "patch.object")


def imported_tests(path: PurePosixPath, source: str) -> list[str]:
    """What a file of tests, `path` relative to the project, imports from a file with tests of its own."""
    imported = imported_names(ast.parse(source), ".".join(path.parent.parts))
    return [f"{path}:{line} imports {name}" for line, name in imported if ".test_" in name]


def changed_clocks(path: PurePosixPath, source: str) -> list[str]:
    """Where a test replaces a clock of the whole process. It may replace the name `time` of one module."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and node.args and ast.unparse(node.func).endswith(PATCHES)):
            continue
        names = [each.value if isinstance(each, ast.Constant) else ast.unparse(each) for each in node.args[:2]]
        replaced = names[: 1 if isinstance(node.args[0], ast.Constant) else 2]
        *_, owner, name = ("", "", *".".join(map(str, replaced)).split("."))
        if owner == "time" and name in CLOCKS:
            found.append(f"{path}:{node.lineno} replaces time.{name}")
    return found


def test_tests_keep_the_rules() -> None:
    files = [PurePosixPath(file.relative_to(TESTS.parent)) for file in sorted(TESTS.rglob("*.py"))]
    sources = {path: (TESTS.parent / path).read_text() for path in files}
    found = [each for rule in (imported_tests, changed_clocks) for path in files for each in rule(path, sources[path])]
    assert not found, "\n".join(found)


def test_an_imported_test_is_found() -> None:
    path = PurePosixPath("tests/gpu/test_launch.py")
    assert imported_tests(path, "from ..ops.cases import LAYOUTS\nfrom .backend_cases import pretend_gpu") == []
    for source in ("from ..ops.test_write_kv import LAYOUTS", "from tests.gpu.test_decode import TABLE"):
        assert len(imported_tests(path, source)) == 1


@pytest.mark.parametrize(
    ("source", "is_found"),
    [
        ('patch.setattr(live.time, "monotonic", clock)', True),
        ('monkeypatch.setattr(time, "perf_counter", clock)', True),
        ('monkeypatch.setattr("time.sleep", clock)', True),
        ('mock.patch.object(time, "monotonic_ns", clock)', True),
        ('monkeypatch.setattr(live, "time", SimpleNamespace(monotonic=clock))', False),
        ('monkeypatch.setattr(time, "time", clock)', False),  # people set it, too
        ('monkeypatch.setattr(engine, "step", clock)', False),
    ],
)
def test_a_changed_clock_is_found(source: str, is_found: bool) -> None:
    assert bool(changed_clocks(PurePosixPath("tests/test_x.py"), source)) is is_found


@pytest.mark.parametrize("time", ["first", "second"])
def test_a_test_draws_its_tensors_from_the_beginning(time: str) -> None:
    anew = torch.Generator().manual_seed(torch.initial_seed())
    assert torch.equal(torch.rand(4), torch.rand(4, generator=anew)), time
