"""What a source file imports, for the rules of who may import whom."""

import ast
from collections.abc import Iterator


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
