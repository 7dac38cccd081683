"""Float32 linear layers for the CPU, with the executor's register tile.

A decode step multiplies every weight by a few rows, so it streams the whole model from memory: the weights lie in
panels in the order of use, and the lines of the next slice are fetched one per step of the arithmetic.
"""

from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trunkattn.compiled import njit
from trunkattn.cpu.arguments import address_of, array_at
from trunkattn.cpu.microkernel import (
    LANES,
    LINEAR_FIRST,
    LINEAR_LATER,
    LINEAR_ROW_FIRST,
    LINEAR_ROW_LATER,
    TILES,
    LeftOperand,
    OutputTile,
    RightOperand,
    multiply_add_tile,
)
from trunkattn.cpu.threads import call_on_threads, kernel_address

_ROWS: Final = TILES.score_keys
PANEL: Final = TILES.score_vectors * LANES
_SLICE_BYTES: Final = 24_576  # of a panel: stays in L1 while all rows pass over it
_LINE_BYTES: Final = 64


def pack_weight(weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """[out_features, in_features] -> panels [ceil(out_features / PANEL), in_features, PANEL], padded with zeros."""
    out_features, in_features = weight.shape
    panels = -(-out_features // PANEL)
    padded = np.zeros((panels * PANEL, in_features), np.float32)
    padded[:out_features] = weight
    return np.ascontiguousarray(padded.reshape(panels, PANEL, in_features).transpose(0, 2, 1))


def unpack_weight(panels: NDArray[np.float32], out_features: int) -> NDArray[np.float32]:
    """The [out_features, in_features] weight, as a copy, of which `pack_weight` made the panels."""
    rows = panels.transpose(0, 2, 1).reshape(-1, panels.shape[1])
    return np.ascontiguousarray(rows[:out_features])


class _Arguments(NamedTuple):
    """Fields of what the kernel takes, all int64: addresses of contiguous float32 arrays, and sizes."""

    x: int  # [rows, depth]
    panels: int  # [num_panels, depth, PANEL]
    out: int  # [rows, num_panels * PANEL]
    rows: int
    depth: int
    num_panels: int
    num_threads: int


def multiply(x: NDArray[np.float32], panels: NDArray[np.float32], out: NDArray[np.float32], num_threads: int) -> None:
    """out[m, :] = panels · x[m, :]. x [rows, in_features], out [rows, len(panels) * PANEL]; contiguous, not checked."""
    if len(x):
        num_threads = min(num_threads, len(panels))
        rows, depth = x.shape
        given = _Arguments(
            x=address_of(x),
            panels=address_of(panels),
            out=address_of(out),
            rows=rows,
            depth=depth,
            num_panels=len(panels),
            num_threads=num_threads,
        )
        arguments = np.array(given, np.int64)
        call_on_threads(_kernel(), address_of(arguments), num_threads)


@cache
def _kernel() -> int:
    return kernel_address(_multiply_panels)


@njit(by_address=True, fastmath={"contract", "nsz"})
def _multiply_panels(arguments, thread):
    """A thread's panels, one by one, in slices of the depth: a slice stays in L1 while all rows pass over it."""
    numbers = array_at(arguments, np.int64)
    a = _Arguments(
        x=numbers[0],
        panels=numbers[1],
        out=numbers[2],
        rows=numbers[3],
        depth=numbers[4],
        num_panels=numbers[5],
        num_threads=numbers[6],
    )
    most = max(1, _SLICE_BYTES // (4 * PANEL))
    slices = (a.depth + most - 1) // most
    x_offsets, weight_offsets = np.empty(a.rows, np.int64), np.empty(most, np.int64)
    for m in range(a.rows):
        x_offsets[m] = m * a.depth
    for k in range(most):
        weight_offsets[k] = k * PANEL
    lines = np.empty((a.rows // _ROWS + _ROWS) * most, np.int64)
    for panel in range(a.num_panels * thread // a.num_threads, a.num_panels * (thread + 1) // a.num_threads):
        out = array_at(a.out + 4 * panel * PANEL, np.float32)
        for number in range(slices):
            first, last = a.depth * number // slices, a.depth * (number + 1) // slices
            weights = a.panels + 4 * (panel * a.depth + first) * PANEL
            _fill_lines(lines, weights + 4 * (last - first) * PANEL, a.panels)
            x = Operand(array_at(a.x + 4 * first, np.float32), x_offsets)
            w = Operand(array_at(weights, np.float32), weight_offsets)
            if number == 0:
                _multiply_slice(out, a.num_panels * PANEL, x, w, lines, last - first, LINEAR_FIRST, LINEAR_ROW_FIRST)
            else:
                _multiply_slice(out, a.num_panels * PANEL, x, w, lines, last - first, LINEAR_LATER, LINEAR_ROW_LATER)


class Operand(NamedTuple):
    """A flat array and the offsets of its rows."""

    array: Any
    offsets: Any


@njit(inline="always")
def _fill_lines(lines, following, harmless):
    """Addresses of the cache lines of the slice that follows; where there are more places, one that is harmless."""
    count = min(len(lines), _SLICE_BYTES // _LINE_BYTES)
    for i in range(count):
        lines[i] = following + i * _LINE_BYTES
    for i in range(count, len(lines)):
        lines[i] = harmless


@njit(inline="always")  # the tiles' shapes must stay literals
def _multiply_slice(out, width, x, weights, lines, depth, tile, row_tile):
    """out (+)= x · weights, for all rows and one panel."""
    right = RightOperand(weights.array, weights.offsets, 0)
    rows, m = len(x.offsets), 0
    while m + _ROWS <= rows:
        left, ahead = LeftOperand(x.array, x.offsets, m, 1), lines[m // _ROWS * depth :]
        multiply_add_tile(OutputTile(out, m * width, width), left, right, depth, ahead, tile)
        m += _ROWS
    while m < rows:
        left, ahead = LeftOperand(x.array, x.offsets, m, 1), lines[(m // _ROWS + m % _ROWS) * depth :]
        multiply_add_tile(OutputTile(out, m * width, width), left, right, depth, ahead, row_tile)
        m += 1
