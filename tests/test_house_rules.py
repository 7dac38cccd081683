"""House rules that a syntax tree or a token shows: sizes, annotations, names instead of numbers, comments, state."""

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType

import pytest

PROJECT = Path(__file__).parents[1]
SOURCE = PROJECT / "src" / "trunkattn"
TOP_FLOOR = ("integrations", "cli")
MAX_FILE_LINES = 450  # a file has one reason to change; from about 400 lines on look twice
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 120
MAX_PARAMETERS = 8
MAX_COMPILED_PARAMETERS = 12
MAX_UNFORMATTED = 7  # places in src at which the formatter is switched off
MAX_MEASUREMENTS = 8  # comments in src that hold a measurement: these belong in docs/lab
# Signatures that the public interface or torch fixes; everything that they call takes dataclasses.
PUBLIC_PARAMETERS = MappingProxyType(
    {"paged_attention": 10, "BatchAttention.run": 10, "flash_attention": 13, "attention": 11, "_backward": 15}
)
# Compiled functions get their types from their compiler.
KERNELS = ("triton.jit", "gluon.jit")
COMPILED = (*KERNELS, "njit", "intrinsic", "overload")

MUTABLE_LITERALS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
MUTABLE_CALLS = frozenset({"list", "dict", "set", "bytearray", "deque", "defaultdict", "OrderedDict", "Counter"})
ENVIRONMENT_READS = frozenset({"environ", "environb", "getenv", "getenvb"})

# Names under which values have travelled without names of their own.
TUPLES = frozenset({
    "arrays", "barriers", "batch", "bounds", "chunk", "costs", "kind", "limits", "options", "plan", "rows", "rule",
    "scales", "shape", "state", "strides", "tasks", "tensors", "tile", "tiles", "work",
})  # fmt: skip
LAUNCH_OPTIONS = frozenset({"num_ctas", "num_warps", "num_stages", "maxnreg", "launch_pdl", "grid", "warmup", "debug"})
TUPLE_ATTRIBUTES = frozenset({"values", "type"})
HASH = re.compile(r"\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*[0-9])[0-9a-f]{7,40}\b")
MEASUREMENT = re.compile(
    r"\d[\d,.]* ?(µs|ms|TFLOP/s|GFLOP/s|GB/s|TB/s)\b|\d[\d,.]* ?% (faster|slower|less|more|longer)"
    r"|\b(was|were|is|are) (\d\S* )?(times )?(as fast|faster|slower)\b|\b20\d\d-\d\d-\d\d\b",
)

FunctionDef = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST, owner: str = "") -> Iterator[tuple[str, FunctionDef]]:
    """Every function with its qualified name, nested ones included. Expressions, most of a tree, have none."""
    for node in (child for child in ast.iter_child_nodes(tree) if not isinstance(child, ast.expr)):
        if isinstance(node, FunctionDef):
            yield owner + node.name, node
        scope = f"{node.name}." if isinstance(node, FunctionDef | ast.ClassDef) else ""
        yield from functions(node, owner + scope)


def parameters(name: str, function: FunctionDef) -> list[ast.arg]:
    """Parameters that a caller sees: `self` or `cls` of a method is not one."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    if "." in name and positional and positional[0].arg in ("self", "cls"):
        positional = positional[1:]
    variadic = [argument for argument in (arguments.vararg, arguments.kwarg) if argument]
    return [*positional, *arguments.kwonlyargs, *variadic]


def is_compiled(function: FunctionDef, compilers: tuple[str, ...] = COMPILED) -> bool:
    decorators = " ".join(ast.unparse(decorator) for decorator in function.decorator_list)
    return any(compiler in decorators for compiler in compilers)


def size_violations(source: str) -> list[str]:
    """Files, functions and signatures over their limits."""
    found = []
    num_lines = len(source.splitlines())
    if num_lines > MAX_FILE_LINES:
        found.append(f"{num_lines} lines, over {MAX_FILE_LINES}")
    for name, function in functions(ast.parse(source)):
        length = (function.end_lineno or function.lineno) - function.lineno + 1
        longest = MAX_KERNEL_LINES if is_compiled(function, KERNELS) else MAX_FUNCTION_LINES
        if length > longest:
            found.append(f"{function.lineno}: {name} has {length} lines, over {longest}")
        most = MAX_COMPILED_PARAMETERS if is_compiled(function) else PUBLIC_PARAMETERS.get(name, MAX_PARAMETERS)
        count = len(parameters(name, function))
        if count > most:
            found.append(f"{function.lineno}: {name} has {count} parameters, over {most}")
    return found


def missing_annotations(source: str) -> list[str]:
    """Functions with a parameter or a result whose type is not written down, outside compiled code."""
    found = []
    compiled: list[str] = []
    for name, function in functions(ast.parse(source)):
        if is_compiled(function) or name.startswith(tuple(f"{outer}." for outer in compiled)):
            compiled.append(name)
            continue
        missing = [parameter.arg for parameter in parameters(name, function) if parameter.annotation is None]
        missing += ["return"] if function.returns is None else []
        if missing:
            found.append(f"{function.lineno}: {name} has no annotation of {', '.join(missing)}")
    return found


def numbered_fields(source: str) -> list[str]:
    """Compiled functions that take a parameter apart by numbers: a NamedTuple has names for its fields."""
    found = []
    for name, function in functions(ast.parse(source)):
        if not is_compiled(function):
            continue
        names = {parameter.arg for parameter in parameters(name, function)}
        for node in ast.walk(function):
            if (
                isinstance(node, ast.Subscript)
                and isinstance(node.value, ast.Name)
                and node.value.id in names & TUPLES
                and isinstance(node.slice, ast.Constant)
            ):
                found.append(f"{node.lineno}: {name} reads {ast.unparse(node)}")
    return found


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of every comment and docstring."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | FunctionDef) and (text := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), text


def commit_hashes(source: str) -> list[str]:
    """Comments that name a commit: history is in git and in docs/lab."""
    return [f"{line}: {found.group()}" for line, text in texts(source) for found in HASH.finditer(text)]


def measurements(source: str) -> list[str]:
    """Comments that hold a measurement."""
    return [f"{line}: {found.group()}" for line, text in texts(source) if (found := MEASUREMENT.search(text))]


def clashing_names(source: str) -> list[str]:
    """Names that mean something else to Triton: options of a launch as parameters of a launched kernel, and attributes
    of Triton's own tuples as fields of a NamedTuple."""
    found = []
    for name, function in functions(ast.parse(source)):
        if is_compiled(function, KERNELS) and name.endswith("_kernel"):
            clashes = sorted({parameter.arg for parameter in parameters(name, function)} & LAUNCH_OPTIONS)
            found += [f"{function.lineno}: {name} has a parameter {clash}" for clash in clashes]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and "NamedTuple" in [ast.unparse(base) for base in node.bases]:
            fields = {ast.unparse(it.target) for it in node.body if isinstance(it, ast.AnnAssign)}
            found += [f"{node.lineno}: {node.name} has a field {clash}" for clash in sorted(fields & TUPLE_ATTRIBUTES)]
    return found


def environment_reads(source: str) -> list[str]:
    """Places that read an environment variable."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT_READS:
            found.append(f"{node.lineno}: reads {ast.unparse(node)}")
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            names = [alias.name for alias in node.names if alias.name in ENVIRONMENT_READS]
            found += [f"{node.lineno}: imports {name} from os" for name in names]
    return found


def is_mutable_container(value: ast.expr | None) -> bool:
    """Whether an expression makes a list, dict or set, by display or by call."""
    if isinstance(value, ast.Call):
        return ast.unparse(value.func).split(".")[-1] in MUTABLE_CALLS
    return isinstance(value, MUTABLE_LITERALS)


def module_level_statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run on import, those under `if`, `try`, `with` and loops included."""
    for statement in body:
        yield statement
        if not isinstance(statement, FunctionDef | ast.ClassDef):
            for block in ("body", "orelse", "finalbody"):
                yield from module_level_statements(getattr(statement, block, []))
            for handler in getattr(statement, "handlers", []):
                yield from module_level_statements(handler.body)


def mutable_state(source: str) -> list[str]:
    """Module-level containers that anyone could change, and `global` statements."""
    tree = ast.parse(source)
    found = [
        f"{node.lineno}: global {', '.join(node.names)}" for node in ast.walk(tree) if isinstance(node, ast.Global)
    ]
    for statement in module_level_statements(tree.body):
        if isinstance(statement, ast.Assign):
            targets, is_final = [ast.unparse(target) for target in statement.targets], False
        elif isinstance(statement, ast.AnnAssign):
            targets, is_final = [ast.unparse(statement.target)], "Final" in ast.unparse(statement.annotation)
        else:
            continue
        if is_mutable_container(statement.value) and not is_final and targets != ["__all__"]:
            found.append(f"{statement.lineno}: {targets[0]} is a mutable container at module level")
    return found


def violations(check: Callable[[str], list[str]], *folders: Path) -> list[str]:
    files = sorted(file for folder in folders for file in folder.rglob("*.py"))
    assert files, f"no Python files under {folders}"
    return [f"{file.relative_to(PROJECT)}: {found}" for file in files for found in check(file.read_text())]


def test_sizes_keep_their_limits() -> None:
    found = violations(size_violations, SOURCE, PROJECT / "tests", PROJECT / "benchmarks")
    assert not found, "\n".join(found)


def test_compiled_functions_name_the_fields_of_what_they_take() -> None:
    found = violations(numbered_fields, SOURCE)
    assert not found, "\n".join(found)


def test_no_name_means_something_else_to_triton() -> None:
    found = violations(clashing_names, SOURCE / "gpu", SOURCE / "training")
    assert not found, "\n".join(found)


def test_comments_tell_no_history() -> None:
    hashes, measured = violations(commit_hashes, SOURCE), violations(measurements, SOURCE)
    assert not hashes, "\n".join(hashes)
    assert len(measured) <= MAX_MEASUREMENTS, "\n".join(measured)


def test_the_formatter_is_rarely_off() -> None:
    places = [file for file in SOURCE.rglob("*.py") for _ in range(file.read_text().count("# fmt: skip"))]
    assert len(places) <= MAX_UNFORMATTED, "\n".join(f"{file.relative_to(PROJECT)}" for file in sorted(set(places)))


def test_every_file_is_python_of_the_oldest_version_that_is_allowed() -> None:
    for folder in ("src", "tests", "benchmarks", "examples"):
        for file in (PROJECT / folder).rglob("*.py"):
            ast.parse(file.read_text(), str(file), feature_version=(3, 10))


def test_functions_are_annotated() -> None:
    found = violations(missing_annotations, SOURCE)
    assert not found, "\n".join(found)


def test_no_environment_variable_is_read_below_the_top_floor() -> None:
    allowed = tuple(f"src/trunkattn/{unit}/" for unit in TOP_FLOOR)
    found = [violation for violation in violations(environment_reads, SOURCE) if not violation.startswith(allowed)]
    assert not found, "\n".join(found)


def test_no_module_level_mutable_state() -> None:
    found = violations(mutable_state, SOURCE)
    assert not found, "\n".join(found)


def function_source(parameters: str, lines: int, decorator: str = "") -> str:
    return f"{decorator}\ndef f({parameters}):\n" + "    x = 1\n" * (lines - 1)


NINE = "a, b, c, d, e, f, g, h, i"


@pytest.mark.parametrize(
    "source",
    [
        "x = 1\n" * 451,
        function_source("", 61),
        "class A:\n    def f(self):\n" + "        x = 1\n" * 60,
        "def g():\n    async def f():\n" + "        x = 1\n" * 60 + "g = 1",
        function_source("", 121, "@triton.jit"),
        function_source("", 61, "@njit"),
        function_source(f"{NINE}, j, k, l, m", 2, "@triton.jit"),
        function_source(NINE, 2),
        function_source("a, b, /, c, d, *, e, f, g, h, i", 2),
        function_source("a, b, c, d, e, f, g, *args, **kwargs", 2),
        function_source(f"self, {NINE[3:]}", 2),
        f"class A:\n    def run(self, {NINE}): ...",
        f"class BatchAttention:\n    def run(self, {NINE}, j, k): ...",
    ],
)
def test_a_size_over_the_limit_is_found(source: str) -> None:
    assert size_violations(source)


@pytest.mark.parametrize(
    "source",
    [
        "x = 1\n" * 450,
        function_source("a, b, c, d, e, f, g, h", 60),
        function_source(NINE, 120, "@triton.autotune(configs=CONFIGS, key=[])\n@triton.jit"),
        function_source(NINE, 60, "@numba.njit(cache=True)"),
        function_source(NINE, 60, "@intrinsic(prefer_literal=True)"),
        f"class A:\n    def f(self, {NINE[3:]}): ...",
        f"class BatchAttention:\n    def run(self, {NINE}, j): ...",
    ],
)
def test_a_size_at_the_limit_passes(source: str) -> None:
    assert size_violations(source) == []


@pytest.mark.parametrize(
    "source",
    [
        "def f(): ...",
        "def f(a: int): ...",
        "def f(a) -> None: ...",
        "def f(*, a: int, b) -> None: ...",
        "def f(*args: int, **kwargs) -> None: ...",
        "class A:\n    def f(self, a) -> None: ...",
        "@cache\ndef f(a) -> None: ...",
        "def f() -> None:\n    def g(): ...",
        "@njit\ndef f(a): ...\ndef f_more(a) -> None: ...",
    ],
)
def test_a_missing_annotation_is_found(source: str) -> None:
    assert len(missing_annotations(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "def f(a: int, *args: int, **kwargs: int) -> None: ...",
        "class A:\n    def f(self) -> None: ...",
        "@njit(cache=True)\ndef f(a): ...",
        "@triton.jit\ndef f(a): ...",
        "@overload(as_float)\ndef f(a):\n    def g(b): ...\n    return g",
    ],
)
def test_an_annotated_or_compiled_function_passes(source: str) -> None:
    assert missing_annotations(source) == []


@pytest.mark.parametrize(
    "source",
    [
        "import os\nx = os.environ['A']",
        "import os\ndef f():\n    return os.getenv('A')",
        "import os as o\nx = o.environ.get('A')",
        "from os import environ",
        "from os import getenv as get",
    ],
)
def test_an_environment_read_is_found(source: str) -> None:
    assert len(environment_reads(source)) == 1


def test_os_without_its_environment_passes() -> None:
    assert environment_reads("import os\nfrom os import path\nx = os.cpu_count()") == []


@pytest.mark.parametrize(
    "source",
    [
        "CACHE = {}",
        "CACHE: dict[str, int] = {}",
        "a = b = []",
        "a = {1, 2}",
        "a = [i for i in range(3)]",
        "a = {i: i for i in range(3)}",
        "a = dict(b=1)",
        "import collections\na = collections.defaultdict(list)",
        "if True:\n    a = []",
        "try:\n    a = 1\nexcept ImportError:\n    a = []",
        "A = None\ndef f():\n    global A\n    A = 1",
    ],
)
def test_mutable_state_is_found(source: str) -> None:
    assert len(mutable_state(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "__all__ = ['a']",
        "A: Final = {1: 2}",
        "A: typing.Final[dict[int, int]] = {1: 2}",
        "A = MappingProxyType({1: 2})",
        "A = tuple([1])\nB = frozenset({1})\nC = (1, 2)",
        "def f():\n    a = []\n    return a",
        "@dataclass\nclass A:\n    b: list[int]",
    ],
)
def test_constants_and_local_containers_pass(source: str) -> None:
    assert mutable_state(source) == []


@pytest.mark.parametrize(
    "source",
    [
        "@triton.jit\ndef f(strides):\n    return strides[7]",
        "@njit\ndef f(a, batch):\n    return a + batch[2]",
        "@gluon.jit\ndef f(tiles):\n    return tiles[0].index(1)",
    ],
)
def test_a_field_by_its_number_is_found(source: str) -> None:
    assert len(numbered_fields(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "@njit\ndef f(a, rows):\n    return a[0] + rows[a]",
        "def f(batch):\n    return batch[0]",
        "@triton.jit\ndef f(strides):\n    return strides.k_page",
    ],
)
def test_arrays_and_names_pass(source: str) -> None:
    assert numbered_fields(source) == []


@pytest.mark.parametrize(
    "source",
    [
        "@triton.jit\ndef decode_kernel(a, num_ctas): ...",
        "@gluon.jit\ndef decode_kernel(num_warps): ...",
        "class Keys(NamedTuple):\n    values: Any",
    ],
)
def test_a_name_of_tritons_is_found(source: str) -> None:
    assert len(clashing_names(source)) == 1


def test_other_names_pass() -> None:
    assert clashing_names("@triton.jit\ndef helper(num_ctas): ...\nclass A(NamedTuple):\n    v: Any") == []


@pytest.mark.parametrize(
    "source", ["# with the kernel of 5273126f\n", '"""As of e7b6892."""\n', "x = 1  # see 9ba32d2\n"]
)
def test_a_commit_in_a_comment_is_found(source: str) -> None:
    assert len(commit_hashes(source)) == 1


@pytest.mark.parametrize("source", ["# 1234567 tokens\n", "# defaced\n", "x = 'e7b6892'\n", "# a feedback loop\n"])
def test_other_words_and_numbers_pass(source: str) -> None:
    assert commit_hashes(source) == measurements(source) == []


@pytest.mark.parametrize(
    "source", ["# takes 142 µs\n", "x = 1  # 3.5 % slower\n", '"""It was faster."""\n', "# on 2026-11-22\n"]
)
def test_a_measurement_in_a_comment_is_found(source: str) -> None:
    assert len(measurements(source)) == 1
