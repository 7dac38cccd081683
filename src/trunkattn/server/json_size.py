"""How much JSON holds, counted before it is read.

To read JSON, and to check, copy and write what it holds, keeps Python's lock from the engine, and a mapping or a list
is one more object for Python's search for garbage. To count some bytes takes a hundredth of that.
"""

from typing import NamedTuple


class JsonSize(NamedTuple):
    """What JSON holds outside of its texts. values: commas. nodes: texts, names among them, lists and mappings."""

    values: int
    nodes: int


def json_size(raw: bytes, most_nodes: int) -> JsonSize:
    """The size of JSON, right or wrong. One with more than `most_nodes` texts is not looked at further.

    Args:
        raw: the JSON.
        most_nodes: where counting ends.
    """
    plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in raw else raw  # no quote within a text
    num_texts = plain.count(b'"') // 2
    if num_texts > most_nodes:
        return JsonSize(0, num_texts)
    outside = b"".join(plain.split(b'"')[::2])
    return JsonSize(outside.count(b","), num_texts + outside.count(b"[") + outside.count(b"{"))
