"""Rows of a comparison in training: what a later process adds to them, and which cells compare.

A cell that was added has `beside`: the date, the commit, and what its process measured of cells that the row had. Times
of two processes do not compare, because a card is not equally fast each day.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks.lib.report import date_and_commit, read_result, short_name

OURS = ("default", "own")  # what is measured beside whatever is added
Row = Mapping[str, Any]


def earlier_rows(benchmark: str, key: str, device: str) -> dict[str, Row]:
    """The rows that a benchmark's result on this device has, by the field that tells them apart."""
    card = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    return {row[key]: row for row in read_result(f"{benchmark}-{short_name(card)}").get("rows", ())}


def lacks(row: Row, name: str) -> bool:
    """Whether a row has no cell of a name, or one that says why it is missing."""
    return "missing" in row.get(name, {"missing": ""})


def to_add(row: Row, names: Sequence[str]) -> list[str]:
    """What to measure so that a row has cells of all names: those that it lacks, with ours; nothing if it has all."""
    lacking = [name for name in names if lacks(row, name)]
    return list(dict.fromkeys((*OURS, *lacking))) if lacking else []


def with_added(row: Row, later: dict[str, Any]) -> dict[str, Any]:
    """A row with the cells of a later process that it lacks, or that process's row if there was none."""
    if not row:
        return later
    cells = {name: cell for name, cell in later.items() if isinstance(cell, dict) and name != "plan"}
    beside = {name: cell for name, cell in cells.items() if not lacks(row, name)} | date_and_commit()
    added = {name: cell | {"beside": beside} for name, cell in cells.items() if lacks(row, name)}
    return {**row, **added}


def of_one_process(row: Row, one: str, other: str) -> Row:
    """A row in which the cells of two names, if both are there, are of one process."""
    runs = [row.get(name, {}).get("beside") for name in (one, other)]
    if runs[0] == runs[1]:
        return row
    name, run = (one, runs[0]) if runs[0] else (other, runs[1])
    return {**run, name: row[name]}
