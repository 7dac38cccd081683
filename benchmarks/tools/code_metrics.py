"""What can be counted of a checkout's code: a rewrite is to leave less of most of it.

    python -m benchmarks.tools.code_metrics                                 # this checkout, as JSON
    python -m benchmarks.tools.code_metrics --source ../old --source .      # several, one after the other
    python -m benchmarks.tools.code_metrics --list measurements             # and where they are

lines: Python lines by folder of src/trunkattn, and of tests, benchmarks and examples; Markdown lines of docs.
many_parameters: functions with over 12 parameters, compiled ones included. fmt_skip: places where the formatter is
switched off. measurements: comments and docstrings in src that report a measurement (a figure with a unit, a card, a
commit, "no faster"). circles: groups of modules that import each other, also inside functions or only for types.
"""

import argparse
import ast
import io
import json
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks.lib.options import existing

PACKAGE: Final = "trunkattn"
MOST_PARAMETERS: Final = 12

# A figure of a measurement: "142 µs", "3.4 %", "396 TFLOP/s", "370 to 396 GFLOP/s".
_FIGURE: Final = r"\d(?:[\d.,_]*\d)?\s*(?:µs|us|ms|ns|TFLOP/s|GFLOP/s|[GTM]B/s)(?![A-Za-z_])|\d\s*%"
_WORDS: Final = r"\b(?:no|was|were|is) (?:faster|slower)\b|\bfitted (?:by|with|likewise)\b|\bas was measured\b"
_CARDS: Final = r"\bon an? H[12]00\b"
_COMMIT: Final = r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7}\b"
MEASUREMENT: Final = re.compile("|".join((_FIGURE, _WORDS, _CARDS, _COMMIT)))


class Text(NamedTuple):
    """A comment of one or more lines, or a docstring, and the line where it begins."""

    line: int
    text: str


def comments(source: str) -> Iterator[Text]:
    """Lines of comments that follow one another are one."""
    begin, last, parts = 0, -1, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line = token.start[0]
        alone = token.line.lstrip().startswith("#")
        if not (alone and line == last + 1):
            if parts:
                yield Text(begin, " ".join(parts))
            begin, parts = line, []
        parts.append(token.string.lstrip("# "))
        last = line if alone else -1
    if parts:
        yield Text(begin, " ".join(parts))


def docstrings(tree: ast.AST) -> Iterator[Text]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text:
                yield Text(node.body[0].lineno, " ".join(text.split()))


def measurements(source: str) -> Iterator[Text]:
    """Comments and docstrings that tell of a measurement."""
    for text in (*comments(source), *docstrings(ast.parse(source))):
        if MEASUREMENT.search(text.text):
            yield text


def many_parameters(source: str) -> Iterator[Text]:
    """Functions, compiled ones included, with more than 12 parameters."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = node.args
            named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            count = len(named) + bool(arguments.vararg) + bool(arguments.kwarg)
            count -= bool(named) and named[0].arg in ("self", "cls")
            if count > MOST_PARAMETERS:
                yield Text(node.lineno, f"{node.name} has {count}")


def fmt_skips(source: str) -> Iterator[Text]:
    for text in comments(source):
        for _ in re.findall(r"fmt: (?:skip|off)", text.text):
            yield Text(text.line, "fmt: skip")


COUNTED: Final = {"many_parameters": many_parameters, "fmt_skip": fmt_skips, "measurements": measurements}


def imports(tree: ast.AST, package: str) -> Iterator[str]:
    """Dotted names that a module imports anywhere in its text. package: that its relative imports begin from."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def import_graph(files: dict[str, Path]) -> dict[str, set[str]]:
    """Which modules of the package each of them imports; the package's own lazy names lead nowhere."""
    graph = {}
    for module, file in files.items():
        package = module if file.name == "__init__.py" else module.rpartition(".")[0]
        named = imports(ast.parse(file.read_text()), package)
        targets = {name if name in files else name.rpartition(".")[0] for name in named}
        graph[module] = {target for target in targets if target in files and target != module}
    graph[PACKAGE] = set()
    return graph


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that reach each other."""
    reach = {module: set(targets) for module, targets in graph.items()}
    for middle in graph:
        for targets in reach.values():
            if middle in targets:
                targets |= reach[middle]
    groups = {
        tuple(sorted(other for other in {module, *reach[module]} if other == module or module in reach[other]))
        for module in graph
    }
    return [list(group) for group in sorted(groups) if len(group) > 1]


def modules(source: Path) -> dict[str, Path]:
    found = {}
    for file in sorted((source / PACKAGE).rglob("*.py")):
        parts = file.relative_to(source).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def lines_by_folder(root: Path) -> dict[str, int]:
    """Lines of Python files; those of src/trunkattn by its folders, `.` for the files that lie in it."""
    found: dict[str, int] = {}
    for name, folder, pattern in (
        ("src", root / "src" / PACKAGE, "*.py"),
        ("tests", root / "tests", "*.py"),
        ("benchmarks", root / "benchmarks", "*.py"),
        ("examples", root / "examples", "*.py"),
        ("docs", root / "docs", "*.md"),
    ):
        for file in sorted(folder.rglob(pattern)):
            inside = file.relative_to(folder).parts[:-1] if name == "src" else ()
            key = "/".join(["src", *(inside or ["."])]) if name == "src" else name
            found[key] = found.get(key, 0) + len(file.read_text().splitlines())
    found["src"] = sum(count for key, count in found.items() if key.startswith("src/"))
    return found


def metrics(root: Path, listed: tuple[str, ...] = ()) -> dict[str, Any]:
    files = modules(root / "src")
    if not files:
        raise SystemExit(f"no src/{PACKAGE} in {root}: expected the root of a checkout")
    found: dict[str, Any] = {"lines": lines_by_folder(root), "files": len(files)}
    found["readme_words"] = len((root / "README.md").read_text().split())
    for name, find in COUNTED.items():
        places = [
            f"{file.relative_to(root)}:{text.line}: {text.text[:160]}"
            for file in files.values()
            for text in find(file.read_text())
        ]
        found[name] = len(places)
        if name in listed:
            found[f"{name}_listed"] = places
    found["circles"] = circles(import_graph(files))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Counts of a checkout's code, as JSON.")
    parser.add_argument("--source", type=existing, action="append", help="root of a checkout; repeat it to compare")
    parser.add_argument("--list", action="append", choices=tuple(COUNTED), default=[], help="also list the places")
    options = parser.parse_args()
    roots = options.source or [Path(__file__).parents[2]]
    print(json.dumps({str(root): metrics(root, tuple(options.list)) for root in roots}, indent=1))


if __name__ == "__main__":
    main()
