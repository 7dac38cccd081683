"""Float32 linear layers for the CPU, with the executor's register tile, and weights in float32 or int8.

A decode step multiplies every weight by a few rows, so it streams the whole model from memory. The weights lie in
panels, in the order of use, and each step of the arithmetic fetches one cache line of the next slice. Weights in int8
take a quarter of the bytes. A group of inputs of an output shares a scale, as in GGUF's Q8_0.
"""

from array import array
from collections.abc import Sequence
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from trunkattn.compiled import njit
from trunkattn.cpu.arguments import array_at
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
    multiply_add_scaled,
    multiply_add_tile,
    widen_scaled,
)
from trunkattn.cpu.threads import call_on_threads, kernel_address

_ROWS: Final = TILES.score_keys
PANEL: Final = TILES.score_vectors * LANES
GROUP: Final = 32  # weights of an output that share a scale
_MOST: Final = 127  # steps of a scale, on either side of zero
_SLICE_BYTES: Final = 24_576  # of a panel: stays in L1 while all rows pass over it
_LINE_BYTES: Final = 64
_WIDENED_BY_ROW: Final = 2  # rows up to which each of them widens the weights for itself


class Panels(NamedTuple):
    """A weight as it is packed.

    Attributes:
        values: [ceil(out_features / PANEL), in_features, PANEL] float32 or int8, contiguous, padded with zeros.
        scales: of int8 values, [panels, ceil(in_features / GROUP), PANEL] float32; None: the values are the weight.
    """

    values: torch.Tensor
    scales: torch.Tensor | None = None

    def part(self, panels: slice) -> "Panels":
        """Some of the panels, as a view."""
        return Panels(self.values[panels], None if self.scales is None else self.scales[panels])


def pack_weight(weight: torch.Tensor, to_int8: bool = False) -> Panels:
    """Packs a float32 weight [out_features, in_features]. to_int8: rounded to 255 steps of its group, or as it is."""
    out_features, in_features = weight.shape
    panels = -(-out_features // PANEL)
    padded = np.zeros((panels * PANEL, in_features), np.float32)
    padded[:out_features] = weight.detach().numpy()
    values = np.ascontiguousarray(padded.reshape(panels, PANEL, in_features).transpose(0, 2, 1))
    if not to_int8:
        return Panels(torch.from_numpy(values))
    starts = np.arange(0, in_features, GROUP)
    scales = (np.maximum.reduceat(np.abs(values), starts, 1) / np.float32(_MOST)).astype(np.float32)
    divisors = np.where(scales > 0, scales, np.float32(1))
    steps = np.rint(values / np.repeat(divisors, GROUP, 1)[:, :in_features])
    return Panels(torch.from_numpy(steps.astype(np.int8)), torch.from_numpy(scales))


def unpack_weight(panels: Panels, out_features: int) -> torch.Tensor:
    """The [out_features, in_features] float32 weight that the panels stand for, as a copy."""
    values = panels.values
    if panels.scales is not None:
        values = values * panels.scales.repeat_interleave(GROUP, 1)[:, : values.shape[1]]
    return values.transpose(1, 2).reshape(-1, values.shape[1])[:out_features].clone()


def join_panels(packed: Sequence[Panels]) -> Panels:
    """Panels of weights of one input size, one after another."""
    scales = [panels.scales for panels in packed if panels.scales is not None]
    return Panels(torch.cat([panels.values for panels in packed]), torch.cat(scales) if scales else None)


class _Arguments(NamedTuple):
    """Fields of what the kernels take, all int64: addresses of contiguous arrays, and sizes."""

    x: int  # [rows, depth]
    panels: int  # [num_panels, depth, PANEL]
    scales: int  # [num_panels, groups, PANEL]; 0: there are none
    out: int  # [rows, num_panels * PANEL]
    rows: int
    depth: int
    num_panels: int
    num_threads: int


def multiply(rows: torch.Tensor, panels: Panels) -> torch.Tensor:
    """rows [T, in_features] times the packed weight, with torch's number of threads: [T, panels * PANEL] float32.

    rows: float32 on the CPU, contiguous; not checked.
    """
    values, scales = panels
    count, depth = rows.shape
    num_panels = len(values)
    out = rows.new_empty(count, num_panels * PANEL)
    if count:
        num_threads = min(torch.get_num_threads(), num_panels)
        given = _Arguments(
            x=rows.data_ptr(),
            panels=values.data_ptr(),
            scales=0 if scales is None else scales.data_ptr(),
            out=out.data_ptr(),
            rows=count,
            depth=depth,
            num_panels=num_panels,
            num_threads=num_threads,
        )
        arguments = array("q", given)
        call_on_threads(_kernel(), arguments.buffer_info()[0], num_threads)
    return out


@cache
def _kernel() -> int:
    return kernel_address(_multiply_panels)


@njit(by_address=True, fastmath={"contract", "nsz"})
def _multiply_panels(arguments, thread):
    """A thread's panels, one by one, in slices of the depth: a slice stays in L1 while all rows pass over it. One in
    int8 is widened first, into L1 or, for few rows, into registers, so that the sums have the bits that they have with
    the float32 weight."""
    numbers = array_at(arguments, np.int64)
    a = _Arguments(
        x=numbers[0],
        panels=numbers[1],
        scales=numbers[2],
        out=numbers[3],
        rows=numbers[4],
        depth=numbers[5],
        num_panels=numbers[6],
        num_threads=numbers[7],
    )
    if a.scales and a.rows <= _WIDENED_BY_ROW:
        return _multiply_scaled(a, thread)
    most, size = max(1, _SLICE_BYTES // (4 * PANEL)), 1 if a.scales else 4
    slices, groups = (a.depth + most - 1) // most, (a.depth + GROUP - 1) // GROUP
    x_offsets, weight_offsets = np.empty(a.rows, np.int64), np.empty(most, np.int64)
    for m in range(a.rows):
        x_offsets[m] = m * a.depth
    for k in range(most):
        weight_offsets[k] = k * PANEL
    lines = np.empty((a.rows // _ROWS + a.rows % _ROWS) * most, np.int64)
    room = np.empty(most * PANEL + _LINE_BYTES // 4, np.float32)
    widened = room[-(room.ctypes.data // 4) % (_LINE_BYTES // 4) :]  # where a vector is one cache line
    for panel in range(a.num_panels * thread // a.num_threads, a.num_panels * (thread + 1) // a.num_threads):
        out = array_at(a.out + 4 * panel * PANEL, np.float32)
        for number in range(slices):
            first, last = a.depth * number // slices, a.depth * (number + 1) // slices
            weights = a.panels + size * (panel * a.depth + first) * PANEL
            _fill_lines(lines, weights + size * (last - first) * PANEL, size * (last - first) * PANEL, a.panels)
            x = Operand(array_at(a.x + 4 * first, np.float32), x_offsets)
            if a.scales:
                scales = array_at(a.scales + 4 * panel * groups * PANEL, np.float32)
                _widen(widened, array_at(weights, np.int8), scales, first, last)
                w = Operand(widened, weight_offsets)
            else:
                w = Operand(array_at(weights, np.float32), weight_offsets)
            if number == 0:
                _multiply_slice(out, a.num_panels * PANEL, x, w, lines, last - first, LINEAR_FIRST, LINEAR_ROW_FIRST)
            else:
                _multiply_slice(out, a.num_panels * PANEL, x, w, lines, last - first, LINEAR_LATER, LINEAR_ROW_LATER)


@njit(inner=True)
def _multiply_scaled(a, thread):
    """A thread's panels in int8, row by row."""
    groups = (a.depth + GROUP - 1) // GROUP
    for panel in range(a.num_panels * thread // a.num_threads, a.num_panels * (thread + 1) // a.num_threads):
        for row in range(a.rows):
            out = array_at(a.out + 4 * (row * a.num_panels + panel) * PANEL, np.float32)
            for column in range(PANEL):
                out[column] = np.float32(0)
            for group in range(groups):
                first = group * GROUP
                x = array_at(a.x + 4 * (row * a.depth + first), np.float32)
                values = array_at(a.panels + (panel * a.depth + first) * PANEL, np.int8)
                scales = array_at(a.scales + 4 * (panel * groups + group) * PANEL, np.float32)
                multiply_add_scaled(out, x, values, scales, min(GROUP, a.depth - first))


@njit(inline="always")
def _widen(widened, values, scales, first, last):
    """Rows [first, last) of a panel in float32. values: of these rows. scales: of the whole panel."""
    for k in range(first, last):
        widen_scaled(widened, values, (k - first) * PANEL, scales, k // GROUP * PANEL)


class Operand(NamedTuple):
    """A flat array and the offsets of its rows."""

    array: Any
    offsets: Any


@njit(inline="always")
def _fill_lines(lines, following, num_bytes, harmless):
    """Addresses of the cache lines of the slice that follows; where there are more places, one that is harmless."""
    count = min(len(lines), num_bytes // _LINE_BYTES)
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
