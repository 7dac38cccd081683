"""How much JSON holds, counted before it is read.

To read JSON, and to check, copy and write what it holds, keeps Python's lock from the engine, and a mapping or a list
is one more object for Python's search for garbage. To count some bytes takes a hundredth of that.
"""

from typing import Final, NamedTuple

_DIGITS: Final = bytes(ord("0") if chr(byte) in "0123456789" else ord(" ") for byte in range(256))


class JsonSize(NamedTuple):
    """What JSON holds outside of its texts.

    Attributes:
        values: commas.
        nodes: texts, names among them, lists, mappings, and points and exponents of numbers. To read a number with one
            takes up to ten times as long as a token id.
        has_long_number: whether a number has more digits than it may. To read one takes quadratic time.
    """

    values: int
    nodes: int
    has_long_number: bool = False


def json_size(raw: bytes, most_nodes: int, most_digits: int) -> JsonSize:
    """The size of JSON, right or wrong. One with more than `most_nodes` texts is not looked at further.

    Args:
        raw: the JSON.
        most_nodes: where counting ends.
        most_digits: the most digits of a number in a row.
    """
    plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in raw else raw  # no quote within a text
    num_texts = plain.count(b'"') // 2
    if num_texts > most_nodes:
        return JsonSize(0, num_texts)
    outside = b"".join(plain.split(b'"')[::2])
    words = outside.count(b"true") + outside.count(b"false")
    fractions = outside.count(b".") + outside.count(b"E") + outside.count(b"e") - words
    nodes = num_texts + outside.count(b"[") + outside.count(b"{") + fractions
    return JsonSize(outside.count(b","), nodes, b"0" * (most_digits + 1) in outside.translate(_DIGITS))
