"""Packages whose names are imported when they are asked for."""

from importlib import import_module

import pytest


@pytest.mark.parametrize("package", ["trunkattn", "trunkattn.engine", "trunkattn.server"])
def test_a_package_lists_all_of_its_names_and_finds_them(package: str) -> None:
    module = import_module(package)
    listed = dir(module)
    assert {*module.__all__, "__doc__", "__all__"} <= {*listed}
    for name in module.__all__:
        assert getattr(module, name).__name__ == name
    with pytest.raises(AttributeError, match=f"^module '{package}' has no attribute 'no_such_name'$"):
        _ = module.no_such_name
