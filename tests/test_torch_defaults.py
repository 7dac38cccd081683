"""What a program sets for itself, torch's default dtype and device, changes nothing here."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "trunkattn"

# Functions of torch that take the default dtype or device where none is given.
FACTORIES = frozenset({
    "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand",
    "randint", "randn", "randperm", "range", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros",
})  # fmt: skip


def taken_defaults(source: str) -> list[str]:
    """Calls that make a tensor without naming its dtype and its device."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        given = {keyword.arg for keyword in node.keywords}
        if ast.unparse(node.func.value) == "torch" and node.func.attr in FACTORIES and not given >= {"dtype", "device"}:
            found.append(f"{node.lineno}: {ast.unparse(node)} names no dtype or no device")
    return found


def test_every_new_tensor_names_its_dtype_and_device() -> None:
    files = sorted(SOURCE.rglob("*.py"))
    found = [f"{file.relative_to(SOURCE)}: {each}" for file in files for each in taken_defaults(file.read_text())]
    assert files, "no sources"
    assert not found, "\n".join(found)


@pytest.mark.parametrize("call", ["torch.empty(3)", "torch.zeros(3, dtype=x)", "torch.tensor([1], device=x)"])
def test_a_tensor_of_the_default_dtype_or_device_is_found(call: str) -> None:
    assert len(taken_defaults(call)) == 1


@pytest.mark.parametrize("call", ["torch.empty(3, dtype=x, device=y)", "torch.zeros_like(x)", "np.empty(3)"])
def test_other_tensors_pass(call: str) -> None:
    assert taken_defaults(call) == []
