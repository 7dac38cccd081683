"""What the versions of SGLang differ in, without an SGLang."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from trunkattn.integrations.sglang import taken, versions


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("0.5.23", (0, 5, 23)),
        ("0.5.17.post1", (0, 5, 17)),
        ("0.5.23rc0", (0, 5, 23)),
        ("1.2.3", (1, 2, 3)),
        ("0.5.18.dev12+gabc", None),
        ("0.5.18-dev3", None),
        ("0.0.0.dev0", None),
        ("main", None),
    ],
)
def test_parse(version: str, release: tuple[int, int, int] | None) -> None:
    assert versions.TESTED.parse(version) == release


@pytest.mark.parametrize("version", ["0.5.17", "0.5.20.post1", "0.5.23"])
def test_a_tested_version_gets_no_caution(version: str) -> None:
    assert versions.TESTED.caution(version) is None


@pytest.mark.parametrize("version", ["0.5.16", "0.5.24", "0.6.0", "main"])
def test_any_other_version_gets_one(version: str) -> None:
    caution = versions.TESTED.caution(version)
    assert caution is not None and version in caution and "0.5.17 to 0.5.23" in caution and "\n" not in caution


def test_the_contract() -> None:
    whole = type("Base", (), dict.fromkeys(versions.CONTRACT))
    old = type("Old", (), dict.fromkeys(versions.CONTRACT[:-1]))
    runner = SimpleNamespace(**dict.fromkeys(versions.RUNNER))
    assert versions.missing(whole, runner) == []
    lacks = versions.missing(old, SimpleNamespace())
    assert lacks[0] == "Old.forward_extend" and len(lacks) == 1 + len(versions.RUNNER)
    message = versions.refusal("0.4.1", lacks[:2])
    assert "SGLang 0.4.1 has no Old.forward_extend, SimpleNamespace.model" in message and "0.5.17 to 0.5.23" in message


def test_options_that_are_off_or_absent_are_not_refused() -> None:
    off = {name: values[0] if values else None for name, (values, _) in versions.REFUSED_OPTIONS.items()}
    assert versions.refused_options(SimpleNamespace(**off)) == []
    assert versions.refused_options(SimpleNamespace()) == []
    assert versions.refused_options(SimpleNamespace(dcp_size=2)) == ["decode context parallelism (dcp_size=2)"]


def test_where_the_names_of_the_back_ends_are() -> None:
    new = SimpleNamespace(prefill_attention_backend_str="fa3", decode_attention_backend_str="trunk")
    old = SimpleNamespace(server_args=SimpleNamespace(get_attention_backends=lambda: ("fa3", "trunk")))
    assert versions.backends(new) == versions.backends(old) == ("fa3", "trunk")


def test_where_the_ranks_are() -> None:
    old = SimpleNamespace(ps=SimpleNamespace(tp_rank=3, dp_rank=2))
    assert (versions.rank(old), versions.data_rank(old)) == (3, 2)
    assert (versions.rank(SimpleNamespace(tp_rank=1)), versions.data_rank(SimpleNamespace())) == (1, 0)


def test_how_prompts_are_captured() -> None:
    config = SimpleNamespace(cuda_graph_config=SimpleNamespace(prefill=SimpleNamespace(backend="full")))
    assert versions.prompt_graphs(config) == "full"
    assert versions.prompt_graphs(SimpleNamespace()) is None


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"chunked_prefill_size": 8192, "max_prefill_tokens": 16384}, 8192),
        ({"chunked_prefill_size": -1, "max_prefill_tokens": 16384}, 16384),
        ({"chunked_prefill_size": None, "max_prefill_tokens": 100}, 100),
        ({}, 0),
    ],
)
def test_how_many_tokens_of_prompts_a_step_has(options: dict[str, int | None], most: int) -> None:
    assert versions.most_prompt_tokens(SimpleNamespace(**options)) == most


def test_another_plugin_is_named_in_one_line() -> None:
    message = taken("other.plugin")
    assert "other.plugin" in message and "SGLANG_PLUGINS" in message and "\n" not in message


def test_the_plugin_is_imported_without_a_compiler() -> None:
    code = (
        "import sys, trunkattn.integrations.sglang; "
        "print([n for n in ('numba', 'triton', 'sglang') if n in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
