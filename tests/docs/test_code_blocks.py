"""What README and the documentation show runs: Python blocks, commands, and the files that they name.

The Python blocks of a page run in order, in one namespace. A block after `<!-- compile only -->` needs a GPU or vLLM,
and is compiled. `print(...)  # text` says what is printed. docs/lab is frozen and not looked at.
"""

import ast
import builtins
import re
import shlex
import subprocess
from collections.abc import Iterator
from itertools import dropwhile
from pathlib import Path

import pytest

from trunkattn.server.bodies.protocol import CompletionRequest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FOLDERS = ("", "guide/", "how-it-works/")
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(page for folder in FOLDERS for page in DOCS.glob(f"{folder}*.md"))]
)
BLOCK = re.compile(r"(<!-- compile only -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PRINTED = re.compile(r"^\s*print\(.*\)(?:  |\n)# (.+)$", re.MULTILINE)
MODEL = "path/to/model"
COLUMNS = 96  # of code that the site shows on a screen of 1280 pixels; docs/ruff.toml has the same


def blocks(page: Path, language: str) -> list[tuple[str, bool]]:
    """(text, whether it is only compiled) of each block of a language."""
    return [(text, bool(mark)) for mark, name, text in BLOCK.findall(page.read_text()) if name == language]


def pages(language: str) -> list[Path]:
    return [page for page in PAGES if blocks(page, language)]


def by_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", pages("python"), ids=by_name)
def test_python_of_a_page_prints_what_it_says(
    page: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    capsys = request.getfixturevalue("capsys")
    namespace: dict[str, object] = {}
    for number, (text, only_compiled) in enumerate(blocks(page, "python")):
        if MODEL in text and not only_compiled:
            text = text.replace(MODEL, request.getfixturevalue("small_model"))
        code = compile(text, f"{page.name}, block {number}", "exec")
        if not only_compiled:
            exec(code, namespace)
    printed = capsys.readouterr().out
    for text, only_compiled in blocks(page, "python"):
        for expected in PRINTED.findall(text):
            assert only_compiled or expected.rstrip("… ") in printed, f"{page.name} says {expected!r}: {printed}"


def unbound(texts: Iterator[str]) -> set[str]:
    """Classes and packages that a page's Python blocks use and neither import nor define. Other free names stand for
    what a reader has."""
    nodes = [node for text in texts for node in ast.walk(ast.parse(text))]
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    bound = {alias.asname or alias.name for node in imports for alias in node.names}
    names = [node for node in nodes if isinstance(node, ast.Name)]
    bound |= {node.id for node in names if isinstance(node.ctx, ast.Store)} | vars(builtins).keys()
    free = {node.id for node in names} - bound
    return {name for name in free if name[0].isupper() or name in ("trunkattn", "torch", "np", "vllm", "sglang")}


@pytest.mark.parametrize("page", pages("python"), ids=by_name)
def test_python_imports_what_it_uses(page: Path) -> None:
    assert not unbound(text for text, _ in blocks(page, "python"))


def test_a_missing_import_is_found() -> None:
    assert unbound(iter(["import torch", "x = torch.zeros(n); y = trunkattn.PromptChunks(Trainer(x))"])) == {
        "trunkattn",
        "Trainer",
    }


def commands() -> Iterator[tuple[Path, list[str]]]:
    for page in PAGES:
        texts = [text.replace("\\\n", " ") for text, _ in blocks(page, "console")]  # a command may have several lines
        lines = [line[2:] for text in texts for line in text.splitlines() if line.startswith("$ ")]
        inline = re.findall(r"`((?:make|trunkattn|python|pytest) [^`]+)`", page.read_text())
        for words in (shlex.split(line, comments=True) for line in (*lines, *inline)):
            yield page, list(dropwhile(lambda word: re.match(r"[A-Z_]+=", word), words))  # settings come first


@pytest.mark.parametrize(("page", "command"), [pytest.param(*each, id=" ".join(each[1])) for each in commands()])
def test_what_a_command_of_a_page_names_exists(page: Path, command: list[str]) -> None:
    match command:
        case ["make", target, *_]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE) or target.startswith(
                "test-vllm-"
            )
        case ["trunkattn", name, *arguments]:
            check_trunkattn(name, arguments)
        case ["python", "-m", module, *_] if module.startswith("vllm."):
            pass  # tests/integrations/vllm/test_process.py knows vLLM's modules
        case ["python", "-m", module, *_]:
            assert (ROOT / f"{module.replace('.', '/')}.py").is_file()
        case ["python", script, *_]:
            assert (ROOT / script).is_file()
        case ["pip", "install", *arguments]:
            extras = re.findall(r"\.\[(\w+)\]", " ".join(arguments))
            assert all(
                re.search(rf"^{extra} = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE) for extra in extras
            )
        case ["curl", "http://127.0.0.1:8000/v1/completions", *_, "-d", body]:
            CompletionRequest.model_validate_json(body)
        case ["pytest", folder, *_] if folder != "tests/PART":
            assert (ROOT / folder).exists()
        case _:
            assert command[0] in ("pip", "export", "vllm", "sglang", "pytest"), (
                f"{page.name} shows {command}: who checks that?"
            )


def check_trunkattn(name: str, arguments: list[str]) -> None:
    typer = pytest.importorskip("typer")
    from trunkattn.cli.app import app

    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert name in known
    options = {option for parameter in known[name].params for option in parameter.opts} | {"--help"}
    assert {argument for argument in arguments if argument.startswith("--")} <= options


FILES = subprocess.run(
    ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
).stdout.splitlines()
NOT_HERE = ("gpu/mla/", "server/", "config.json", "generation_config.json")  # where these would go, and files of models


@pytest.mark.skipif(not FILES, reason="needs a git checkout")
@pytest.mark.parametrize("page", PAGES, ids=by_name)
def test_named_files_are_there(page: Path) -> None:
    spans = re.findall(r"`([\w./-]+/|[\w./-]+\.(?:py|md|json|txt|yml))`", BLOCK.sub("", page.read_text()))
    for span in set(spans) - set(NOT_HERE):
        pattern = re.compile(rf"(^|/){re.escape(span)}{'' if span.endswith('/') else '$'}")
        assert any(pattern.search(path) for path in FILES), f"{page.name} names {span}, which is not there"


@pytest.mark.parametrize("page", [page for page in PAGES if DOCS in page.parents], ids=by_name)
def test_code_fits_the_page(page: Path) -> None:
    wide = [line for block in BLOCK.findall(page.read_text()) for line in block[2].splitlines() if len(line) > COLUMNS]
    assert not wide, f"{page.name}: the site shows {COLUMNS} columns of code on a screen of 1280 pixels: {wide}"


def test_a_page_with_a_wrong_claim_fails(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1 + 1)  # 3\n```\n")
    with pytest.raises(AssertionError, match="says '3'"):
        test_python_of_a_page_prints_what_it_says(page, request, monkeypatch)
