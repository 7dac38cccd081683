"""The server's guide names every path, every option, every limit of a request with its value, every status, and every
field that changes nothing.

The row of the guide's table that is about a limit is written here, so that a limit without a row fails too.
"""

import re
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Final

import pytest
import typer

from trunkattn.cli.app import app
from trunkattn.cli.options.kinds import SERVER
from trunkattn.engine.forms.limits import FormLimits
from trunkattn.server.bodies import protocol
from trunkattn.server.bodies.body import Body
from trunkattn.server.limits import LIMITS, RequestLimits
from trunkattn.server.options import ServerOptions

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/guide/server.md").read_text()
UNITS: Final = MappingProxyType({"MiB": 1 << 20, "GiB": 1 << 30})
OPTIONS = {field.name: field.default for field in fields(ServerOptions)}
ROWS: Final = MappingProxyType(
    {
        "prompts, messages, parts of a message": ("prompts", "messages", "parts"),
        "tools; calls in a message": ("tools", "tool_calls"),
        "characters of the name of a tool, a role or a schema": ("name",),
        "characters of `model`, `user`, `cache_salt` or an id of a call": ("label",),
        "`stop`": ("stop", "stop_characters"),
        "`logprobs`, `top_logprobs`": ("logprobs",),
        "log-probabilities of prompts and answers: of a request, and of all at a time": ("logprob_entries",),
        "`temperature`": ("temperature",),
        "`top_k`": ("top_k",),
        "`logit_bias`": ("biases", "bias"),
        "`stop_token_ids`, `allowed_token_ids`": ("stop_token_ids", "allowed_token_ids"),
        "`modalities`": ("modalities",),
        "`bad_words`": ("bad_words", "word"),
        "answers: `n`, times the prompts": ("max_answers",),
        "a schema: properties, values of enums, characters": ("max_properties", "max_enum_values", "max_characters"),
        "a schema: references in a row, levels of JSON": ("max_chain", "max_depth"),
        "other fields of any JSON: levels": ("depth",),
        "a schema: values; characters as JSON text": ("max_values", "max_text"),
        "open live pages of a tenant": ("live_pages",),
        "a regular expression; a pattern": ("max_regex_characters",),
        "a grammar": ("max_characters", "max_rules", "max_chain"),
        "commas of a body, also within texts": ("values",),
        "values of a body that has no token ids; texts, names, lists, mappings and fractions of any": ("nodes",),
        "digits of a number in a row": ("digits",),
        "names that do not exist": ("unknown",),
        "a body; all large ones at a time": ("max_body_bytes", "bodies"),
        "the head of a request; its body": ("header_seconds", "body_seconds"),
        "a connection between two requests": ("idle_seconds",),
        "a client that does not read its answer": ("write_seconds",),
        "the model's template; a form, and a token of it": ("template_seconds", "form_seconds", "form_token_seconds"),
        "a token of all answers with forms at a time": ("form_token_seconds",),
        "memory of the process that tries a form; all forms that are kept": ("form_bytes", "cache_bytes"),
    }
)


def table(head: str) -> dict[str, str]:
    """The first two cells of each row of the table with this head."""
    lines = PAGE.partition(head)[2].partition("\n\n")[0].splitlines()[2:]
    return {cells[0]: cells[1] for cells in (re.split(r" ?\| ?", line.strip("| ")) for line in lines)}


def numbers(text: str) -> list[float]:
    """The numbers of a cell, in order; bytes where it has a unit of bytes."""
    found = re.findall(r"(?<![\w-])(\d[\d,]*(?:\.\d+)?)(?: (MiB|GiB))?", text)
    return [float(number.replace(",", "")) * UNITS.get(unit, 1) for number, unit in found]


def limit(name: str) -> float:
    for owner in (LIMITS, LIMITS.forms):
        if hasattr(owner, name):
            return float(getattr(owner, name))
    return float(OPTIONS[name])


def test_every_row_of_the_limits_says_what_the_server_does() -> None:
    rows = table("| what | here | OpenAI's |")
    assert rows.keys() == ROWS.keys()
    for row, names in ROWS.items():
        said, limits = numbers(rows[row]), [limit(name) for name in names]
        assert said[: len(names)] in (limits, sorted(set(limits))), row  # one number may be that of all


def test_every_limit_has_a_row() -> None:
    limits = {field.name for owner in (RequestLimits, FormLimits) for field in fields(owner)} - {"forms"}
    assert not limits - {name for names in ROWS.values() for name in names}


def test_a_wrong_number_of_the_table_is_seen() -> None:
    assert numbers("16 texts of 256 characters") == [16, 256]
    assert numbers("16 MiB (`--max-body-bytes`); 256 MiB") == [16 << 20, 256 << 20]
    assert numbers("1,024 tokens, -100 to 100") == [1024, 100]


def test_every_status_has_a_row() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "src/trunkattn/server").rglob("*.py"))
    values = dict(re.findall(r"^(\w+): Final = ([45]\d\d)\b", sources, re.MULTILINE))
    written = re.findall(r"(?:error_response\(|HTTPException\(|status_code == )([45]\d\d|[A-Z_]+)\b", sources)
    raised = {values[status] if status.strip("_").isupper() else status for status in written}
    assert {"404", "405", "408", "413", "429", "499", "500", "503", "505"} <= raised
    described = {status for cell in table("| status | when |") for status in cell.split(", ")}
    assert not raised - described


def test_every_path_is_named() -> None:
    source = (ROOT / "src/trunkattn/server/app.py").read_text()
    paths = set(re.findall(r'@app\.(?:get|post|api_route)\("([^"{]+)"', source))
    assert {"/v1/chat/completions", "/health", "/live"} <= paths
    assert not paths - set(re.findall(r"`(?:GET|POST) (/[^`]*)`", PAGE))


def test_every_option_of_the_server_is_named() -> None:
    given = typer.main.get_command(app).commands["serve"].params  # type: ignore[attr-defined]
    names = {option.opts[0] for option in given if getattr(option, "rich_help_panel", None) == SERVER}
    assert {"--port", "--quiet"} <= names
    assert not names - set(re.findall(r"--[a-z][a-z-]+", PAGE))


@pytest.mark.parametrize(
    ("where", "bodies"),
    [
        ("a request", (protocol.CompletionRequest, protocol.ChatCompletionRequest)),
        ("`stream_options`, `structured_outputs`", (protocol.StreamOptions, protocol.StructuredOutputs)),
        ("a message", (protocol.Message,)),
        ("a tool call", (protocol.ToolCall, protocol.FunctionCall)),
        ("a part", (protocol.TextPart,)),
        ("a tool", (protocol.Tool,)),
    ],
)
def test_every_field_without_effect_is_named(where: str, bodies: tuple[type[Body], ...]) -> None:
    named = set(re.findall(r"`(\w+)`", table("| where | accepted, without effect |")[where]))
    assert not {name for body in bodies for name in body.without_effect} - named
