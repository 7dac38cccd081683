"""Reads the fields of a body from its bytes, on a thread, and stops at the first thing that is wrong."""

import json
import re
from collections.abc import Sequence
from typing import Any, Final, NoReturn, TypeVar

from pydantic import ValidationError

from trunkattn.server.bodies.body import Body, Reading
from trunkattn.server.bodies.json_size import json_size
from trunkattn.server.errors import BadRequest
from trunkattn.server.limits import LIMITS
from trunkattn.validate import shown

AnyBody = TypeVar("AnyBody", bound=Body)

_TYPE_NAMES: Final = frozenset({"str", "int", "float", "bool", "list", "dict"})
_OWN_MESSAGES: Final = frozenset({"refused_field", "unknown_field"})  # they name the field and the value themselves


def read_body(raw: bytes, model: type[AnyBody], reading: Reading) -> AnyBody:
    """The fields of a body.

    Args:
        raw: the body.
        model: its fields.
        reading: how to take unknown names; those that are ignored are added to it.

    Raises:
        BadRequest: naming the first field that is wrong.
    """
    if not raw.strip():
        raise BadRequest("the body is missing: expected a JSON object")
    _check_size(raw, model.most_values)
    try:
        given = json.loads(raw.decode("utf-8-sig"), parse_constant=_no_constant)
    except RecursionError:
        raise BadRequest(f"the body is nested too deeply: expected at most {LIMITS.depth} levels") from None
    except ValueError as error:
        raise BadRequest(f"the body is not JSON ({shown(str(error))[1:-1]}): expected a JSON object") from error
    try:
        return model.model_validate(given, context=reading)
    except ValidationError as error:
        raise _first(error) from None


def _check_size(raw: bytes, most_values: int) -> None:
    """Raises BadRequest if a body holds too much to be read."""
    if raw.count(b",") > LIMITS.values:
        raise BadRequest(f"the body has {raw.count(b',')} commas: expected at most {LIMITS.values}; send less")
    size = json_size(raw, LIMITS.nodes, LIMITS.digits)
    if size.nodes > LIMITS.nodes:
        raise BadRequest(
            f"the body has {size.nodes} or more texts, lists, mappings and fractions: expected at most {LIMITS.nodes}"
        )
    if size.values > most_values:
        raise BadRequest(f"the body has {size.values} values: expected at most {most_values}")
    if size.has_long_number:
        raise BadRequest(f"the body has a number of too many digits: expected at most {LIMITS.digits}")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _first(error: ValidationError) -> BadRequest:
    """The first thing that is wrong, as an error of the API."""
    try:
        first = _first_of(error.errors(include_url=False))
    except UnicodeEncodeError:  # a name that pydantic cannot quote
        return BadRequest("the body names a field with half of a surrogate pair: expected Unicode text")
    location, kind, reason = first["loc"], first["type"], first["msg"]
    name = _name(location)
    if kind in _OWN_MESSAGES:
        inner = reason.partition("=")[0]
        return BadRequest(f"{name}.{reason}" if name else reason, f"{name}.{inner}" if name else inner)
    if kind == "missing":
        return BadRequest(f"{name} is missing: expected a value", name or None)
    if kind in ("model_type", "dict_type"):
        reason = "expected a JSON object"
    if kind == "too_long" and isinstance(first["input"], list | dict):
        context: Any = first.get("ctx", {})
        message = f"{name} has {len(first['input'])} items: expected at most {context.get('max_length')}"
        return BadRequest(message, name)
    if kind == "too_short":
        reason = "expected at least one item"
    if kind == "string_unicode":
        reason = "expected Unicode text, and this has half of a surrogate pair"
    if kind == "string_too_short":
        reason = "expected a text that is not empty"
    return BadRequest(f"{name or 'the body'}={shown(first['input'])}: {reason[:1].lower()}{reason[1:]}", name or None)


def _first_of(errors: Sequence[Any]) -> Any:
    """The first error; of alternatives that a value could be, that of the one in which most of it is right."""
    if not _is_of_type(errors[0]):
        return errors[0]
    place = errors[0]["loc"][:-1]
    alike = [each for each in errors if each["loc"][: len(place)] == place] if place else errors[:1]
    return max(alike, key=lambda each: (len(each["loc"]), not _is_of_type(each)))


def _is_of_type(error: Any) -> bool:
    """Whether an error says that a value is not of an alternative's type."""
    return str(error["type"]).endswith("_type") or error["type"] == "literal_error"


def _name(location: Sequence[int | str]) -> str:
    """("messages", 0, "role") -> "messages[0].role". Names of alternatives of a union are left out."""
    name = ""
    for part in location:
        if isinstance(part, int):
            name += f"[{part}]"
        elif re.fullmatch(r"[a-z_]\w*", part) and part not in _TYPE_NAMES:
            name += f".{part}" if name else part
    return name
