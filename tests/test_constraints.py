"""The versions of constraints.txt: what an extra asks for has one, and `make` installs no extra for a card."""

import re
from pathlib import Path

import tomllib
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = Path(__file__).parents[1]
OWN_VERSIONS = {"vllm", "sglang"}  # `make test-vllm` and `make test-sglang` install each version that is supported
FOR_A_CARD = {"cudnn", *OWN_VERSIONS}


def pins() -> dict[str, str]:
    lines = (PROJECT / "constraints.txt").read_text().splitlines()
    parts = [line.split("==") for line in lines if "==" in line]
    return {str(canonicalize_name(name)): version for name, version in parts}


def extras() -> dict[str, list[Requirement]]:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    every = {"": project["dependencies"]} | project["optional-dependencies"]
    return {name: [Requirement(each) for each in required] for name, required in every.items()}


def test_what_is_asked_for_has_a_version() -> None:
    found = pins()
    for name, required in extras().items():
        for each in required if name not in OWN_VERSIONS else ():
            if each.name != "trunkattn":
                assert each.specifier.contains(found[canonicalize_name(each.name)]), f"{name}: {each}"


def test_make_installs_nothing_for_a_card() -> None:
    installed = re.findall(r'-e "\.\[([a-z,]+)\]"', (PROJECT / "Makefile").read_text())
    assert installed and not FOR_A_CARD & {name for names in installed for name in names.split(",")}
