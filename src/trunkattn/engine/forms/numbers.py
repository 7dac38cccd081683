"""Numbers of a JSON schema that llguidance would follow as others: it reads them as float64, and makes of two bounds an
expression of their digits."""

from bisect import bisect_right
from collections.abc import Iterator
from math import ulp
from typing import Any, Final, NamedTuple, TypeGuard

from trunkattn.engine.forms.schema import parts
from trunkattn.validate import shown

_MOST_EXACT: Final = 1 << 53  # float64 has all integers up to here
_HIGHEST: Final = (1 << 63) - 1  # bounds beyond those of 64 bits are read as these
_NEAREST: Final = 1e-30  # to zero, of the numbers that are allowed beside it
# From any other integer to them, or 1 if that is less: llguidance may read a number as the next one that float64 has
_ULPS: Final = 4


class _Side(NamedTuple):
    """Names of bounds on one side and on the other, and the direction from the one to the other."""

    strict: str
    plain: str
    others: tuple[str, str]
    sign: int


_SIDES: Final = (
    _Side("exclusiveMinimum", "minimum", ("exclusiveMaximum", "maximum"), 1),
    _Side("exclusiveMaximum", "maximum", ("exclusiveMinimum", "minimum"), -1),
)


def check_numbers(schema: Any) -> None:
    """Raises ValueError, naming the place, where llguidance would follow another number than a schema has. A bound may
    become stricter, such as the highest one of 64 bits."""
    for path, part in parts(schema):
        given = [(name, value) for name in ("const", "enum") for value in _numbers(part.get(name))]
        for side in _SIDES:
            is_strict = part.get(side.strict) is True  # as drafts 3 and 4 have it
            given += [(side.strict if is_strict else side.plain, value) for value in _numbers(part.get(side.plain))]
            given += [(side.strict, value) for value in _numbers(part.get(side.strict))]
        for name, value in given:
            if not _is_kept(name, value):
                raise ValueError(
                    f"structured_outputs: json: {name} at {shown(str(path))} has {shown(value)}: expected a number "
                    f"between -2^53 and 2^53, because llguidance follows others as float64 has them; write it as a text"
                )


def separate_bounds(schema: Any) -> bool:
    """Replaces strict bounds that llguidance would not keep: with `exclusiveMinimum` 1 and `maximum` 1.5 it allows 1.

    Such a bound is an integer, and a bound of the other side lies less than 1 beyond it. It becomes a plain bound, a
    number just beyond the integer. All bounds of the schema are compared with each other, because references can make
    any two of them hold for one number. Returns whether a bound was replaced."""
    found, changed = [part for _, part in parts(schema)], False
    for strict, plain, others, sign in _SIDES:
        ends = sorted(part[name] for part in found for name in others if _is_number(part.get(name)))
        for part in found:
            bound = part.get(plain) if part.get(strict) is True else part.get(strict)
            if not _is_number(bound) or bound != int(bound) or not _is_number(part.get(plain, bound)):
                continue
            low, high = sorted((bound, bound + sign))
            place = bisect_right(ends, low)  # there may be thousands, for each of thousands of bounds
            if place < len(ends) and ends[place] < high:
                nearest = bound + sign * min(_ULPS * ulp(bound), 1) if bound else sign * _NEAREST
                part[plain] = sign * max(sign * part.get(plain, nearest), sign * nearest)
                del part[strict]
                changed = True
    return changed


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _numbers(value: Any) -> Iterator[int | float]:
    """The numbers within a value of JSON."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict | list):
            waiting.extend(one.values() if isinstance(one, dict) else one)
        elif _is_number(one):
            yield one


def _is_kept(name: str, value: int | float) -> bool:
    """Whether a number of a keyword means to llguidance what it says, or something stricter."""
    if abs(value) < _MOST_EXACT:
        return True
    read = min(int(float(max(-_HIGHEST - 1, min(value, _HIGHEST)))), _HIGHEST)
    return (name == "minimum" and read >= value) or (name == "maximum" and read <= value)
