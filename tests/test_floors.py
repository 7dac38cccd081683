"""Who may import whom: the floors of the package, enforced from the syntax tree of every source file.

Imports count wherever they stand: at the top, inside a function, under `TYPE_CHECKING`, or as `import_module("...")`.
"""

import ast
import sys
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

import pytest

from tests.floors import FLOORS, INNER_FLOORS, KERNEL_FLOOR, SPEC_FLOOR, TOP_FLOOR
from tests.imports import imported_names

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / "trunkattn"
ROOT = "trunkattn"  # the package's own __init__: may re-export every floor but the top one

NEVER_IMPORTS = (
    ("reference", "triton"),
    ("planner", "triton"),
    ("analysis/batch", "torch"),
    ("analysis/trees", "torch"),
    ("config", "numba"),
    ("gpu/cards", "numba"),
    ("gpu/cards", "triton"),
    ("gpu/tiles", "triton"),
    ("gpu/kernel", "triton"),
    ("gpu/*/spec", "triton"),
    ("training/spec", "triton"),
    ("dtypes", "numba"),
    ("training", "numba"),
    ("kv_cache/page_pool", "torch"),
    ("kv_cache/prefix_index", "torch"),
    ("kv_cache/manager", "torch"),
    ("engine/scheduling", "torch"),
    ("integrations/layer_spec", "vllm"),
    ("integrations/kv_traffic", "vllm"),
    ("integrations/device_traffic", "vllm"),
    ("integrations/captured_run", "vllm"),
    ("integrations/layer_spec", "sglang"),
    ("integrations/kv_traffic", "sglang"),
    ("integrations/device_traffic", "sglang"),
    ("integrations/captured_run", "sglang"),
    ("integrations/sglang", "vllm"),
    ("integrations/vllm", "sglang"),
)
# A core install has these only (llvmlite is part of Numba): the engine and the top floor may use what the extras bring.
CORE_PACKAGES = frozenset({"torch", "numpy", "numba", "llvmlite", "triton"}) | sys.stdlib_module_names


def unit_of(dotted_name: str) -> str:
    """The floor table's name for a module of ours; ROOT for a name that the package's __init__ gives."""
    parts = dotted_name.split(".")[1:]
    return entry_of(parts, FLOORS) or ROOT


def entry_of(parts: Sequence[str], floors: Mapping[str, int]) -> str | None:
    """The longest entry of a table of floors that a path lies in."""
    found = ["/".join(parts[:length]) for length in range(1, len(parts) + 1)]
    return next((path for path in reversed(found) if path in floors), None)


def may_import(importer: str, target: str) -> bool:
    """Whether one unit of ours may import another."""
    if importer == target:
        return True
    if target == ROOT:
        return FLOORS.get(importer, 0) >= TOP_FLOOR
    if importer == ROOT:
        return FLOORS[target] < TOP_FLOOR
    return FLOORS[target] < FLOORS[importer]


def floor_violations(path: PurePosixPath, source: str) -> list[str]:
    """What one file, `path` relative to the package, imports against the table."""
    module = path.with_suffix("")
    first = module.parts[0]
    unit = ROOT if module.parts == ("__init__",) else entry_of(module.parts, FLOORS) or first
    if unit not in FLOORS and unit != ROOT:
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
            if forbidden == top and any(fnmatchcase(str(part), place) for part in (module, *module.parents))
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


def kernel_floors(modules: Iterable[str]) -> dict[str, int]:
    """The floors of folders of gpu/ that have a spec, and of the specs."""
    inside = [module.removeprefix(f"{ROOT}.gpu.").replace(".", "/") for module in modules]
    specs = [path for path in inside if fnmatchcase(path, "*/spec") and path.count("/") == 1]
    return dict.fromkeys(specs, SPEC_FLOOR) | {path.removesuffix("/spec"): KERNEL_FLOOR for path in specs}


def inner_violations(folder: str, files: dict[str, str]) -> list[str]:
    """Imports inside a folder of INNER_FLOORS that do not go down, or to the own entry of it."""
    prefix, found = f"{ROOT}.{folder}.", list[str]()
    floors = (kernel_floors(files) if folder == "gpu" else {}) | dict(INNER_FLOORS[folder])
    for module, targets in sorted(import_graph(files).items()):
        inside = module.removeprefix(prefix)
        own = entry_of(inside.split("."), floors)
        if inside == module or (own is None and any(entry.startswith(f"{inside}/") for entry in floors)):
            continue  # of another folder; or a package whose files have entries of their own
        if own is None:
            found.append(f"{module} stands on no floor; known: {', '.join(floors)}")
            continue
        for target in targets:
            other = entry_of(target.removeprefix(prefix).split("."), floors) if target.startswith(prefix) else None
            if other is not None and other != own and floors[other] >= floors[own]:
                found.append(f"{module} may not import {target}")
    return found


@pytest.mark.parametrize("folder", INNER_FLOORS)
def test_imports_inside_a_folder_go_down(folder: str) -> None:
    found = inner_violations(folder, sources())
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source", "is_allowed"),
    [
        ("arrays", "from trunkattn.gpu.kernel import Work", True),
        ("kernel", "from trunkattn.gpu.hopper import spec", True),
        ("hopper.decode", "from trunkattn.gpu.hopper import spec", True),
        ("hopper.decode", "from .common import pdl_wait", True),
        ("hopper.spec", "from trunkattn.gpu.portable.spec import WIDE", True),
        ("portable.spec", "from trunkattn.gpu.hopper.spec import TILES", False),
        ("kernel", "from trunkattn.gpu.hopper.decode import bind", False),
        ("arrays", "def f():\n    from trunkattn.gpu import attention", False),
        ("hopper.spec", "from .common import pdl_wait", False),
        ("blackwell", "import torch", False),
        ("blackwell.spec", "from trunkattn.gpu.portable.spec import WIDE", True),
        ("blackwell.spec", "from trunkattn.gpu.kernel import KERNELS", False),
        ("blackwell.decode", "from trunkattn.gpu.hopper.common import pdl_wait", True),
        ("blackwell.decode", "from trunkattn.gpu.attention import make", False),
        ("kernel", "from trunkattn.gpu.blackwell import spec", True),
        ("kernel", "from trunkattn.gpu.blackwell.decode import bind", False),
    ],
)
def test_an_arrow_up_inside_gpu_is_found(module: str, source: str, is_allowed: bool) -> None:
    names = ("kernel", "attention", "hopper", "hopper.spec", "hopper.common", "hopper.decode", "portable.spec")
    if module != "blackwell":
        names += ("blackwell.spec", "blackwell.decode")  # a folder in no table
    files = dict.fromkeys([f"{ROOT}.gpu.{name}" for name in names], "") | {f"{ROOT}.gpu.{module}": source}
    assert (inner_violations("gpu", files) == []) is is_allowed


def import_graph(files: dict[str, str]) -> dict[str, set[str]]:
    """Which of our modules each of our modules imports. files: source by dotted name; a package by its own name."""
    graph: dict[str, set[str]] = {}
    for module, source in files.items():
        is_package = any(other.startswith(f"{module}.") for other in files)
        package = module if is_package else module.rpartition(".")[0]
        named = [name for _, name in imported_names(ast.parse(source), package)]
        targets = {name if name in files else name.rpartition(".")[0] for name in named}
        graph[module] = {target for target in targets if target in files and target != module}
    return graph


def circles(graph: dict[str, set[str]]) -> list[tuple[str, ...]]:
    """Modules that import each other, directly or through others."""
    reach = {module: set(targets) for module, targets in graph.items()}
    for middle in graph:
        for module in graph:
            if middle in reach[module]:
                reach[module] |= reach[middle]
    groups = {
        tuple(sorted({module} | {other for other in reach[module] if module in reach[other]})) for module in graph
    }
    return sorted(group for group in groups if len(group) > 1)


def sources() -> dict[str, str]:
    found = {}
    for file in SOURCE.rglob("*.py"):
        parts = file.relative_to(SOURCE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file.read_text()
    return found


def test_no_import_circle() -> None:
    """Not within a folder either, nor inside a function or under `TYPE_CHECKING`."""
    found = circles(import_graph(sources()))
    assert not found, "\n".join(" <-> ".join(group) for group in found)


@pytest.mark.parametrize(
    "late",
    [
        "from trunkattn.gpu.arrays import Plan",
        "def f():\n    from trunkattn.gpu import arrays",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .arrays import Plan",
        "import trunkattn.gpu.middle",
    ],
)
def test_a_circle_is_found(late: str) -> None:
    files = {
        "trunkattn": "",
        "trunkattn.gpu": "",
        "trunkattn.gpu.arrays": "from trunkattn.gpu.launch import execute",
        "trunkattn.gpu.middle": "from . import arrays",
        "trunkattn.gpu.launch": late,
    }
    assert len(circles(import_graph(files))) == 1
    assert circles(import_graph(files | {"trunkattn.gpu.launch": "import torch"})) == []


def borrowed_names(files: dict[str, str]) -> list[str]:
    """Names that a module takes from another one which only imports them. Packages hand names on by design."""
    trees = {module: ast.parse(source) for module, source in files.items()}
    packages = {module.rpartition(".")[0] for module in files}
    imports = {
        module: {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        for module, tree in trees.items()
    }
    return [
        f"{module}:{node.lineno} takes {alias.name} from {node.module}, which imports it"
        for module, tree in sorted(trees.items())
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in files and node.module not in packages
        for alias in node.names
        if alias.name in imports[node.module]
    ]


def test_names_are_imported_from_their_own_module() -> None:
    found = borrowed_names(sources())
    assert not found, "\n".join(found)


def test_a_borrowed_name_is_found() -> None:
    files = {
        "trunkattn.gpu": "from trunkattn.gpu.layer import Geometry",
        "trunkattn.gpu.layer": "class Geometry: ...",
        "trunkattn.gpu.launch": "from trunkattn.gpu.layer import Geometry",
        "trunkattn.gpu.good": "from trunkattn.gpu.layer import Geometry\nfrom trunkattn.gpu import layer",
    }
    assert borrowed_names(files) == []
    bad = files | {"trunkattn.gpu.bad": "def f():\n    from trunkattn.gpu.launch import Geometry"}
    assert len(borrowed_names(bad)) == 1


def test_every_file_stands_in_the_house() -> None:
    """A file at the top is named in the table; everything else is in a folder that is."""
    files, folders = SOURCE.glob("*.py"), SOURCE.glob("*/__init__.py")
    units = {path.stem for path in files} | {path.parent.name for path in folders}
    assert units == {*(name.split("/")[0] for name in FLOORS), "__init__"}
    assert all((path.parent / "__init__.py").exists() for path in SOURCE.rglob("*.py"))


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("planner/planner.py", "from trunkattn.gpu import attention"),
        ("planner/planner.py", "from trunkattn import gpu"),
        ("planner/planner.py", "import trunkattn.cpu.parallel"),
        ("planner/planner.py", "from ..cpu.parallel import execute"),
        ("planner/planner.py", "def f():\n    from .. import kv_cache"),
        ("planner/planner.py", "if TYPE_CHECKING:\n    from trunkattn.engine.scheduling.request import Request"),
        ("planner/__init__.py", "from ..cpu import executor"),
        ("cpu/backend.py", "from trunkattn.gpu.tiles import GpuTile"),
        ("training/spec.py", "from trunkattn.gpu.kernel import Kernel"),
        ("gpu/cards.py", "from trunkattn.gpu.kernel import Kernel"),
        ("gpu/kernel.py", "from trunkattn.training.forward import forward"),
        ("gpu/hopper/spec.py", "import triton"),
        ("gpu/attention.py", "from trunkattn.attention import Plan"),
        ("config.py", "from trunkattn.planner.planner import Planner"),
        ("config.py", "from numba import njit"),
        ("training/flash_attention.py", "import numba"),
        ("dtypes.py", "from trunkattn.reference import paged_attention"),
        ("layer_inputs.py", "from trunkattn.kv_cache import tensors"),
        ("attention.py", "import importlib\nimportlib.import_module('trunkattn.engine')"),
        ("attention.py", "from importlib import import_module\nimport_module('.engine', 'trunkattn')"),
        ("engine/engine.py", "from trunkattn import BatchAttention"),
        ("engine/engine.py", "import trunkattn"),
        ("engine/engine.py", "from trunkattn.analysis import trees"),
        ("analysis/simulation/replay.py", "from trunkattn.cli import explain"),
        ("integrations/vllm/impl.py", "from trunkattn.cli import doctor"),
        ("integrations/vllm/route.py", "from ...cli import doctor"),
        ("analysis/trees.py", "import torch"),
        ("__init__.py", "from trunkattn.cli import main"),
        ("__init__.py", "def __getattr__(name):\n    from .cli import demo"),
        ("__init__.py", "import transformers"),
        ("__init__.py", "from trunkattn.__main__ import main"),
        ("cli/app.py", "from trunkattn.__main__ import main"),
        ("attention.py", "import transformers"),
        ("reference.py", "import triton.language as tl"),
        ("planner/planner.py", "def f():\n    from triton import jit"),
        ("kv_cache/page_pool.py", "import torch"),
        ("kv_cache/prefix_index.py", "from torch import Tensor"),
        ("kv_cache/manager.py", "import torch.nn"),
        ("engine/scheduling/scheduler.py", "import torch"),
        ("integrations/kv_traffic.py", "def f():\n    from vllm.logger import init_logger"),
        ("engine/scheduling/request.py", "if TYPE_CHECKING:\n    import torch"),
        ("helpers.py", "import math"),
    ],
)
def test_a_forbidden_import_is_found(path: str, source: str) -> None:
    assert len(floor_violations(PurePosixPath(path), source)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (
            "gpu/portable/decode.py",
            "import triton\nfrom trunkattn.planner.work_list import DIRECT\nfrom . import merge",
        ),
        ("gpu/hopper/decode.py", "from ..cards import Card"),
        ("gpu/kernel.py", "from trunkattn.training import spec"),
        ("attention.py", "from trunkattn.layer_inputs import check_layer"),
        ("layer_inputs.py", "from .config import AttentionConfig"),
        ("planner/planner.py", "from ..config import Capacity\nfrom .prefix_forest import Forest\nimport numba"),
        ("engine/runner.py", "import torch\nimport transformers\nfrom trunkattn.attention import BatchAttention"),
        (
            "cli/doctor/command.py",
            "import rich\nimport trunkattn\nfrom trunkattn.analysis import trees\nfrom ..demo import model",
        ),
        ("analysis/trees.py", "import numpy as np\nfrom trunkattn.analysis.batch import PagedBatch"),
        (
            "analysis/pricing/prices.py",
            "from trunkattn.gpu.step_planners import make_rule\nfrom trunkattn.kv_cache import x",
        ),
        ("__init__.py", "from trunkattn.attention import BatchAttention\nfrom .engine import LLM"),
        ("__main__.py", "from trunkattn.cli import main"),
    ],
)
def test_an_allowed_import_passes(path: str, source: str) -> None:
    assert floor_violations(PurePosixPath(path), source) == []
