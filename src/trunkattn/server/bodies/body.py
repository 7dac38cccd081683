"""A body of named fields, and what happens to a name that is not among them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, ClassVar, Final

from pydantic import BaseModel, ConfigDict, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from trunkattn.server.limits import LIMITS
from trunkattn.validate import shown

_CLOSE: Final = 0.85  # how alike two names are that are taken for one, misspelt
LONGEST_NAME: Final = 64  # characters of a name in a message


@dataclass
class Reading:
    """How a body is read, and what is found. strict: unknown names are refused. ignored: unknown names, for the log."""

    strict: bool = False
    ignored: set[str] = field(default_factory=set)


def refuse(kind: str, message: str) -> PydanticCustomError:
    """The error of a field. kind: its name for pydantic."""
    written = message.encode("utf-8", "replace").decode()  # pydantic quotes nothing that no encoding has
    return PydanticCustomError(kind, "{message}", {"message": written})


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name that an unknown one seems to misspell, or None."""
    return next(iter(get_close_matches(name[:LONGEST_NAME], known, 1, _CLOSE)), None)


class Body(BaseModel):
    """Fields of a request. No type is converted to another.

    An unknown name that is close to a known one is refused with a suggestion, any other is ignored and logged; a
    `Reading` that is strict refuses both.

    Attributes:
        most_values: values that JSON of it may hold, in all.
        without_effect: documented names that change nothing here.
        refused: documented names that would change the answer, and what to do instead; but for False and what is empty.
    """

    model_config = ConfigDict(extra="ignore", strict=True)
    most_values: ClassVar[int] = LIMITS.nodes
    without_effect: ClassVar[frozenset[str]] = frozenset()
    refused: ClassVar[Mapping[str, str]] = MappingProxyType({})
    _names: ClassVar[frozenset[str]]  # of its fields, as JSON has them

    @model_validator(mode="before")
    @classmethod
    def _known(cls, given: Any, info: ValidationInfo) -> Any:
        if not isinstance(given, dict):
            return given
        reading = info.context if isinstance(info.context, Reading) else Reading()
        taken = {}
        for name, value in given.items():
            if value is None:
                continue
            if name in cls._names:
                taken[name] = value
            elif name in cls.refused:
                if value is False or value in ("", [], {}):  # it asks for nothing
                    continue
                raise refuse("refused_field", f"{name}={shown(value)}: {cls.refused[name]}")
            elif name not in cls.without_effect:
                cls._unknown(name, value, reading)
        return taken

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        super().__pydantic_init_subclass__(**options)
        cls._names = frozenset(field.alias or name for name, field in cls.model_fields.items())

    @classmethod
    def _unknown(cls, name: str, value: Any, reading: Reading) -> None:
        if name[:LONGEST_NAME] in reading.ignored:
            return
        close = closest(name, cls._names)
        if close is not None:
            raise refuse("unknown_field", f"{name[:LONGEST_NAME]}={shown(value)}: did you mean {close}?")
        if reading.strict:
            message = f"{name[:LONGEST_NAME]}={shown(value)}: there is no such field; leave it out"
            raise refuse("unknown_field", message)
        if len(reading.ignored) == LIMITS.unknown:
            message = f"{name[:LONGEST_NAME]}={shown(value)}: expected at most {LIMITS.unknown} names that do not exist"
            raise refuse("unknown_field", message)
        reading.ignored.add(name[:LONGEST_NAME])
