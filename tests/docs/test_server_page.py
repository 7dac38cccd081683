"""The server's guide names every path, every option, every limit of a request with its value, every status, and every
field that changes nothing.

The rows of the guide's tables of limits are written here, so that a limit without a row fails too.
"""

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Final, get_args

import pytest
import typer
from annotated_types import Le, MaxLen

from trunkattn.cli.app import app
from trunkattn.cli.options.kinds import SERVER
from trunkattn.engine.forms.limits import FormLimits
from trunkattn.engine.sampling_params import MAX_REPETITION_PENALTY
from trunkattn.server.bodies import protocol
from trunkattn.server.bodies.body import Body
from trunkattn.server.limits import LIMITS, RequestLimits
from trunkattn.server.options import ServerOptions

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/guide/server.md").read_text()
UNITS: Final = MappingProxyType({"MiB": 1 << 20, "GiB": 1 << 30})
OPTIONS = {field.name: field.default for field in fields(ServerOptions)}
# The head of a table, its rows, and the limits that a row's numbers are, in order; a limit without a name is a number
ROWS: Final = MappingProxyType(
    {
        "| field | at most | OpenAI's |": {
            "`allowed_token_ids`": ("allowed_token_ids",),
            "`arguments` of a call": ("depth", "nodes"),
            "`bad_words`": ("bad_words", "word"),
            "`best_of`": (),
            "`cache_salt`": ("label",),
            "`chat_template_kwargs`": ("depth",),
            "`content` of a message": ("parts",),
            "`frequency_penalty`, `presence_penalty`": (2,),
            "`id` of a call, `tool_call_id`": ("label",),
            "`logit_bias`": ("biases", "bias"),
            "`logprobs`, `top_logprobs`": ("logprobs", "logprob_entries"),
            "`max_tokens`, `max_completion_tokens`": (),
            "`messages`": ("messages",),
            "`min_p`, `top_p`": (1,),
            "`min_tokens`": (),
            "`modalities`": ("modalities",),
            "`model`": ("label",),
            "`n`": ("max_answers",),
            "`name` of a message, tool, function or schema": ("name",),
            "`parameters` of a function": ("depth",),
            "`prompt`": ("prompts",),
            "`repetition_penalty`": (MAX_REPETITION_PENALTY, 1 / MAX_REPETITION_PENALTY),
            "`response_format`, `structured_outputs`": (),
            "`role`": ("name",),
            "`seed`": (64,),
            "`stop`": ("stop", "stop_characters"),
            "`stop_token_ids`": ("stop_token_ids",),
            "`temperature`": ("temperature",),
            "`tokens` of `/detokenize`": ("values",),
            "`tool_calls`": ("tool_calls",),
            "`tools`": ("tools",),
            "`top_k`": ("top_k",),
            "`truncate_prompt_tokens`": (),
            "`user`": ("label",),
        },
        "| of a form | at most | OpenAI's |": {
            "schema: properties": ("max_properties",),
            "schema: values of all enums; `choice`: texts": ("max_enum_values",),
            "schema: characters of all names and texts; `choice`: characters": ("max_characters",),
            "schema: values of any kind": ("max_values",),
            "schema: characters, where it is JSON text": ("max_text",),
            "schema: levels of lists and mappings": ("max_depth",),
            "schema: references in a row": ("max_chain",),
            "`regex`, or a `pattern` of a schema": ("max_regex_characters",),
            "`grammar`": ("max_characters", "max_rules", "max_chain"),
            "to compile it": ("form_seconds", "form_bytes"),
            "each token of an answer": ("form_token_seconds",),
        },
        "| of a body | at most |": {
            "bytes": ("max_body_bytes",),
            "chunks, with `Transfer-Encoding: chunked`": ("chunks", "chunk_bytes"),
            "commas, also within texts": ("values",),
            "texts, names, lists, mappings and fractions; in a chat, and for `/tokenize`, also all values": ("nodes",),
            "digits of a number in a row": ("digits",),
            "names that do not exist": ("unknown",),
        },
        "| what takes time | at most |": {
            "the head of a request arrives": ("header_seconds",),
            "the body of a request arrives": ("body_seconds",),
            "a connection is idle between two requests": ("timeout_keep_alive",),
            "a client does not read its answer": ("write_seconds",),
            "the model's chat template runs": ("template_seconds",),
        },
        "| of all requests at a time | at most | above that |": {
            "requests without a first token, also those that wait for the tokenizer": ("max_waiting",),
            "log-probabilities of prompts and answers": ("logprob_entries",),
            "forms of answers: time for the slowest token of each answer": ("form_token_seconds",),
            "forms of answers: memory of those that are kept": ("cache_bytes",),
            "bodies over 64 KiB that are read or answered": ("bodies",),
            "live pages of a tenant": ("live_pages",),
        },
    }
)
FIELDS: Final = "| field | at most | OpenAI's |"


def table(head: str) -> dict[str, str]:
    """The first two cells of each row of the table with this head."""
    lines = PAGE.partition(head)[2].partition("\n\n")[0].splitlines()[2:]
    return {cells[0]: cells[1] for cells in (re.split(r" ?\| ?", line.strip("| ")) for line in lines)}


def numbers(text: str) -> list[float]:
    """The numbers of a cell, in order; bytes where it has a unit of bytes."""
    found = re.findall(r"(?<![\w-])(\d[\d,]*(?:\.\d+)?)(?: (MiB|GiB))?", text)
    return [float(number.replace(",", "")) * UNITS.get(unit, 1) for number, unit in found]


def limit(name: str | float) -> float:
    if not isinstance(name, str):
        return name
    for owner in (LIMITS, LIMITS.forms):
        if hasattr(owner, name):
            return float(getattr(owner, name))
    return float(OPTIONS[name])


@pytest.mark.parametrize("head", ROWS)
def test_every_row_of_the_limits_says_what_the_server_does(head: str) -> None:
    rows = table(head)
    assert rows.keys() == ROWS[head].keys()
    for row, names in ROWS[head].items():
        assert numbers(rows[row])[: len(names)] == [limit(name) for name in names], row


def test_every_limit_has_a_row() -> None:
    limits = {field.name for owner in (RequestLimits, FormLimits) for field in fields(owner)} - {"forms"}
    assert not limits - {name for rows in ROWS.values() for names in rows.values() for name in names}


def bounded(body: type[Body]) -> Iterator[str]:
    """The fields of a body whose types are numbers, or have a largest size."""
    for name, field in body.model_fields.items():
        parts = [field]
        while parts:
            part = parts.pop()
            metadata = getattr(part, "metadata", getattr(part, "__metadata__", ()))
            bounds = [bound for each in metadata for bound in getattr(each, "metadata", (each,))]
            kind = getattr(part, "annotation", part)
            if kind in (int, float) or any(isinstance(bound, MaxLen | Le) for bound in bounds):
                yield field.alias or name
            parts.extend(get_args(kind))


def test_every_field_with_a_limit_has_a_row_in_alphabetical_order() -> None:
    named = [re.findall(r"`(\w+)`", cell) for cell in table(FIELDS)]
    assert named == sorted(named)
    bodies = [each for each in vars(protocol).values() if isinstance(each, type) and issubclass(each, Body)]
    limited = {name for body in bodies for name in bounded(body)}
    assert {"n", "seed", "temperature", "tools"} <= limited
    assert not limited - {name for names in named for name in names} - {"regex", "choice", "grammar"}


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
        ("a `json_schema`", (protocol.JsonSchema,)),
        ("a message", (protocol.Message,)),
        ("a tool call", (protocol.ToolCall, protocol.FunctionCall)),
        ("a part", (protocol.TextPart,)),
        ("a tool", (protocol.Tool,)),
    ],
)
def test_every_field_without_effect_is_named(where: str, bodies: tuple[type[Body], ...]) -> None:
    named = set(re.findall(r"`(\w+)`", table("| where | accepted, without effect |")[where]))
    assert not {name for body in bodies for name in body.without_effect} - named
