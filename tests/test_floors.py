"""Who may import whom: the floors of the package, enforced from the syntax tree of every source file.

Imports count wherever they stand: at the top, inside a function, under `TYPE_CHECKING`, or as `import_module("...")`.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from types import MappingProxyType

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "trunkattn"
TOP_FLOOR = 6
FLOORS = MappingProxyType(
    {
        "plan_format": 0,
        "reference": 0,
        "kernels": 1,
        "planner": 2,
        "attention": 3,
        "cache": 4,
        "engine": 5,
        "server": TOP_FLOOR,
        "plugins": TOP_FLOOR,
        "analysis": TOP_FLOOR,
        "cli": TOP_FLOOR,
    }
)
SAME_FLOOR = MappingProxyType(
    {
        "attention_config": "attention",
        "attention_captured": "attention",
        "attention_cpu": "attention",
        "attention_device": "attention",
        "attention_gpu": "attention",
        "attention_overlap": "attention",
        "attention_planner": "attention",
        "attention_prefill": "attention",
        "attention_training": "attention",
        "checks": "attention",
    }
)  # one module in several files
ROOT = "trunkattn"  # the package's own __init__: may re-export every floor but the top one
WORKLOADS = "workloads"  # stands beside the floors: imports nothing of ours, and only the top floor imports it

NEVER_IMPORTS = (
    ("reference", "triton"),
    ("planner", "triton"),
    ("workloads", "torch"),
    ("cache/page_pool", "torch"),
    ("cache/prefix_index", "torch"),
    ("cache/manager", "torch"),
    ("engine/scheduler", "torch"),
    ("engine/request", "torch"),
)
# A core install has these only (llvmlite is part of Numba): the engine and the top floor may use what the extras bring.
CORE_PACKAGES = frozenset({"torch", "numpy", "numba", "llvmlite", "triton"}) | sys.stdlib_module_names


def imported_names(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of everything imported; `from a import b` gives a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute_name("." * node.level + (node.module or ""), package)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield node.lineno, absolute_name(argument.value, package)


def absolute_name(name: str, package: str) -> str:
    """`name` with its leading dots resolved from inside `package`."""
    level = len(name) - len(name.lstrip("."))
    if level == 0:
        return name
    parents = package.split(".")[: len(package.split(".")) - (level - 1)]
    return ".".join([*parents, name[level:]]).rstrip(".")


def unit_of(dotted_name: str) -> str:
    """The floor table's name for a module of ours; ROOT for a name that the package's __init__ gives."""
    parts = dotted_name.split(".")
    unit = SAME_FLOOR.get(parts[1], parts[1]) if len(parts) > 1 else ROOT
    return unit if unit in FLOORS or unit == WORKLOADS else ROOT


def may_import(importer: str, target: str) -> bool:
    """Whether one unit of ours may import another."""
    if importer == target:
        return True
    if importer == WORKLOADS:
        return False
    if target in (WORKLOADS, ROOT):
        return FLOORS.get(importer) == TOP_FLOOR
    if importer == ROOT:
        return FLOORS[target] < TOP_FLOOR
    return FLOORS[target] < FLOORS[importer]


def floor_violations(path: PurePosixPath, source: str) -> list[str]:
    """What one file, `path` relative to the package, imports against the table."""
    module = path.with_suffix("")
    first = module.parts[0]
    unit = ROOT if module.parts == ("__init__",) else SAME_FLOOR.get(first, first)
    if unit not in FLOORS and unit not in (ROOT, WORKLOADS):
        return [f"{path}: {unit} stands on no floor; known: {', '.join(FLOORS)}"]
    package = ".".join([ROOT, *path.parts[:-1]])
    has_extras = FLOORS.get(unit, 0) >= FLOORS["engine"]
    found = []
    for line, name in imported_names(ast.parse(source), package):
        top = name.split(".")[0]
        if top == ROOT:
            if not may_import(unit, unit_of(name)):
                found.append(f"{path}:{line}: {unit} may not import {name}")
        elif not has_extras and top not in CORE_PACKAGES:
            found.append(f"{path}:{line}: {unit} imports {top}, which a core install does not have")
        found += [
            f"{path}:{line}: {place} never imports {top}"
            for place, forbidden in NEVER_IMPORTS
            if forbidden == top and PurePosixPath(place) in (module, *module.parents)
        ]
    return found


def test_every_module_imports_only_from_lower_floors() -> None:
    files = sorted(SOURCE.rglob("*.py"))
    assert files, f"no sources under {SOURCE}"
    found = [
        violation
        for file in files
        for violation in floor_violations(PurePosixPath(file.relative_to(SOURCE).as_posix()), file.read_text())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("kernels/decode.py", "from trunkattn.planner import build"),
        ("kernels/decode.py", "from trunkattn import planner"),
        ("kernels/decode.py", "import trunkattn.planner.forest"),
        ("kernels/decode.py", "from ..planner.forest import Forest"),
        ("kernels/decode.py", "def f():\n    from .. import cache"),
        ("kernels/decode.py", "if TYPE_CHECKING:\n    from trunkattn.engine.request import Request"),
        ("kernels/__init__.py", "from ..planner import forest"),
        ("plan_format.py", "from trunkattn.reference import paged_attention"),
        ("plan_format.py", "from .kernels import merge"),
        ("planner/build.py", "from trunkattn.attention_config import AttentionConfig"),
        ("checks.py", "from trunkattn.cache import kv_cache"),
        ("attention.py", "import importlib\nimportlib.import_module('trunkattn.engine')"),
        ("attention.py", "from importlib import import_module\nimport_module('.engine', 'trunkattn')"),
        ("engine/engine.py", "from trunkattn import BatchAttention"),
        ("engine/engine.py", "import trunkattn"),
        ("engine/engine.py", "from trunkattn.workloads import trees"),
        ("cli/demo.py", "from trunkattn.plugins import vllm"),
        ("server/app.py", "from ..analysis import explain"),
        ("workloads/trees.py", "from trunkattn.plan_format import Plan"),
        ("workloads/trees.py", "import torch"),
        ("__init__.py", "from trunkattn.cli import main"),
        ("__init__.py", "def __getattr__(name):\n    from .workloads import trees"),
        ("__init__.py", "import transformers"),
        ("attention.py", "import transformers"),
        ("reference.py", "import triton.language as tl"),
        ("planner/build.py", "def f():\n    from triton import jit"),
        ("cache/page_pool.py", "import torch"),
        ("cache/prefix_index.py", "from torch import Tensor"),
        ("cache/manager.py", "import torch.nn"),
        ("engine/scheduler.py", "import torch"),
        ("engine/request.py", "if TYPE_CHECKING:\n    import torch"),
        ("helpers.py", "import math"),
    ],
)
def test_a_forbidden_import_is_found(path: str, source: str) -> None:
    assert len(floor_violations(PurePosixPath(path), source)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("kernels/decode.py", "import triton\nfrom trunkattn.plan_format import Plan\nfrom . import merge"),
        ("kernels/decode.py", "from .tile_table import TILES"),
        ("attention.py", "from trunkattn.checks import check_layer"),
        ("checks.py", "from .attention_config import AttentionConfig"),
        ("planner/build.py", "from ..kernels.tile_table import TILES\nfrom .forest import Forest\nimport numba"),
        ("engine/runner.py", "import torch\nimport transformers\nfrom trunkattn.attention import BatchAttention"),
        ("cli/demo.py", "import rich\nimport trunkattn\nfrom trunkattn.workloads import trees\nfrom . import doctor"),
        ("workloads/trees.py", "import numpy as np\nfrom trunkattn.workloads.batch import PagedBatch"),
        ("__init__.py", "from trunkattn.attention import BatchAttention\nfrom .engine import LLM"),
    ],
)
def test_an_allowed_import_passes(path: str, source: str) -> None:
    assert floor_violations(PurePosixPath(path), source) == []
