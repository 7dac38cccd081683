"""Types of the fields of requests: what each takes, and how much of it. A type raises the error of its field."""

from typing import Annotated, Any, Final

from pydantic import AfterValidator, Field, PlainValidator

from trunkattn.engine.forms.limits import depth_of
from trunkattn.server.bodies.body import refuse
from trunkattn.server.limits import LIMITS
from trunkattn.validate import shown

_SLICE: Final = 8_192  # items whose types are looked at by one call


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise refuse("number", "expected a number")
    try:
        float(value)
    except OverflowError:
        raise refuse("number", "expected a finite number") from None
    return value


def _shallow(value: Any) -> Any:
    if depth_of(value, LIMITS.depth) > LIMITS.depth:
        raise refuse("too_deep", f"expected at most {LIMITS.depth} levels of nesting")
    return value


def _prompt(value: Any) -> Any:
    """A text, token ids, or a list of either; the first item that is wrong ends the check."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise refuse("prompt", "expected a text, a list of token ids, or a list of these")
    lists = value if value and isinstance(value[0], list) else [value]
    kind = str if value and isinstance(value[0], str) else int
    num_prompts = len(lists) if lists is value else len(value) if kind is str else 1
    if num_prompts > LIMITS.prompts:
        raise refuse("prompt", f"{num_prompts} prompts: expected at most {LIMITS.prompts}")
    for items in lists:
        if not isinstance(items, list):
            raise refuse("prompt", f"{shown(items)} stands among lists: expected only lists of token ids")
        if (place := _first_other(items, kind)) is not None:
            expected = "only texts, as the first item" if kind is str else "token ids"
            raise refuse("prompt", f"item {place} is {shown(items[place])}: expected {expected}")
    return value


def _first_other(items: list[Any], kind: type) -> int | None:
    """The place of the first item that is of another type. It goes through a million in slices, because each of them
    holds Python's lock."""
    for start in range(0, len(items), _SLICE):
        part = items[start : start + _SLICE]
        if set(map(type, part)) != {kind}:
            return next(place for place, item in enumerate(part, start) if type(item) is not kind)
    return None


def _by_token_id(bias: dict[str, float]) -> dict[int, float]:
    """Biases by token id: JSON has texts as names."""
    found = {int(name): value for name, value in bias.items() if name.isascii() and name.isdecimal()}
    if len(found) < len(bias):
        raise refuse("token_ids", "expected token ids as keys, each of them once")
    return found


Number = Annotated[float, PlainValidator(_number)]
Temperature = Annotated[float, PlainValidator(_number), Field(le=LIMITS.temperature)]
Bias = Annotated[float, PlainValidator(_number), Field(ge=-LIMITS.bias, le=LIMITS.bias)]
TopK = Annotated[int, Field(le=LIMITS.top_k)]
Prompt = Annotated[str | list[str] | list[int] | list[list[int]], PlainValidator(_prompt)]
Name = Annotated[str, Field(max_length=LIMITS.name)]
Label = Annotated[str, Field(max_length=LIMITS.label)]
AnyJson = Annotated[dict[str, Any], AfterValidator(_shallow)]
StopText = Annotated[str, Field(max_length=LIMITS.stop_characters)]
Stops = Annotated[list[StopText], Field(max_length=LIMITS.stop, fail_fast=True)]
StopIds = Annotated[list[int], Field(max_length=LIMITS.stop_token_ids, fail_fast=True)]
AllowedIds = Annotated[list[int], Field(max_length=LIMITS.allowed_token_ids, fail_fast=True)]
BadWord = Annotated[str, Field(max_length=LIMITS.word)]
BadWords = Annotated[list[BadWord], Field(max_length=LIMITS.bad_words, fail_fast=True)]
Biases = Annotated[dict[Name, Bias], Field(max_length=LIMITS.biases), AfterValidator(_by_token_id)]
Choices = Annotated[list[str], Field(max_length=LIMITS.forms.max_enum_values, fail_fast=True)]
Regex = Annotated[str, Field(max_length=LIMITS.forms.max_regex_characters)]
Grammar = Annotated[str, Field(max_length=LIMITS.forms.max_characters)]
