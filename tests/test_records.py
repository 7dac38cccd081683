"""Records with many fields are filled by name, in kernels too: a swap of two numbers would be silent."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "trunkattn"
MOST_WITHOUT_NAMES = 5


def records(tree: ast.AST) -> Iterator[str]:
    """Names of the named tuples and data classes that a file defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            parts = [ast.unparse(part) for part in (*node.bases, *node.decorator_list)]
            if any(part == "NamedTuple" or part.startswith("dataclass") for part in parts):
                yield node.name


def unnamed(tree: ast.AST, known: frozenset[str]) -> Iterator[str]:
    """Calls of records that give more than a few fields by their place. A record that is one other, such as
    `Forest(*build_forest(...))`, and strides of one tensor after the other have no places that could be swapped."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or ast.unparse(node.func).rpartition(".")[2] not in known:
            continue
        starred = [argument for argument in node.args if isinstance(argument, ast.Starred)]
        is_mixed = 0 < len(starred) < len(node.args) and len(node.args) + len(node.keywords) > 2
        if is_mixed or (not starred and len(node.args) > MOST_WITHOUT_NAMES):
            yield f"line {node.lineno}: {ast.unparse(node.func)} gets {len(node.args)} fields by their place; name them"


def test_records_with_many_fields_are_filled_by_name() -> None:
    trees = {file: ast.parse(file.read_text()) for file in SOURCE.rglob("*.py")}
    known = frozenset(name for tree in trees.values() for name in records(tree))
    assert len(known) > 100
    found = [f"{file.relative_to(SOURCE)}, {text}" for file, tree in trees.items() for text in unnamed(tree, known)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "is_found"),
    [
        ("R(1, 2, 3, 4, 5, 6)", True),
        ("R(1, 2, *rest)", True),
        ("R(*some, *others, 3)", True),
        ("R(1, 2, 3, 4, 5, f=6)", False),
        ("R(*found)", False),
        ("R(*q.stride()[:2], *k.stride())", False),
    ],
)
def test_a_field_without_its_name_is_found(source: str, is_found: bool) -> None:
    tree = ast.parse(f"class R(NamedTuple):\n    a: int\n{source}")
    assert bool(list(unnamed(tree, frozenset(records(tree))))) == is_found
