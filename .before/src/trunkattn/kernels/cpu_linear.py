"""Float32 linear layers for the CPU, with the executor's register tile.

A decode step multiplies every weight by a few rows, so it streams the whole model from memory: the weights lie in
panels in the order of use, and the lines of the next chunk are fetched one per step of the arithmetic.
"""

from typing import Final

import numpy as np
from numba import njit, prange
from numpy.typing import NDArray

from trunkattn.kernels.cpu_threads import set_threads
from trunkattn.kernels.cpu_tile import ACCUMULATE_AHEAD, LANES, OVERWRITE_AHEAD, TILES, multiply_add_tile

_ROWS: Final = TILES.score_keys
PANEL: Final = TILES.score_vectors * LANES
_CHUNK_BYTES: Final = 24_576  # of a panel: stays in L1 while all rows pass over it
_LINE_BYTES: Final = 64
_FIRST: Final = _ROWS * 10000 + TILES.score_vectors * 100 + OVERWRITE_AHEAD
_LATER: Final = _ROWS * 10000 + TILES.score_vectors * 100 + ACCUMULATE_AHEAD
_FIRST_ROW: Final = 10000 + TILES.score_vectors * 100 + OVERWRITE_AHEAD
_LATER_ROW: Final = 10000 + TILES.score_vectors * 100 + ACCUMULATE_AHEAD


def pack_weight(weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """[out_features, in_features] -> panels [ceil(out_features / PANEL), in_features, PANEL], padded with zeros."""
    out_features, in_features = weight.shape
    panels = -(-out_features // PANEL)
    padded = np.zeros((panels * PANEL, in_features), np.float32)
    padded[:out_features] = weight
    return np.ascontiguousarray(padded.reshape(panels, PANEL, in_features).transpose(0, 2, 1))


def multiply(x: NDArray[np.float32], panels: NDArray[np.float32], out: NDArray[np.float32], num_threads: int) -> None:
    """out[m, :] = panels · x[m, :]. x [rows, in_features], out [rows, len(panels) * PANEL]; contiguous, not checked."""
    set_threads(num_threads)
    if len(x):
        _multiply(x, panels, out, min(num_threads, len(panels)))


@njit(cache=True, parallel=True, nogil=True)
def _multiply(x, panels, out, num_threads):
    for thread in prange(num_threads):
        _multiply_panels(x, panels, out, len(panels) * thread // num_threads, len(panels) * (thread + 1) // num_threads)


@njit(cache=True, fastmath={"contract", "nsz"})
def _multiply_panels(x, panels, out, begin, end):
    """Panel by panel in chunks of the depth: a chunk stays in L1 while all rows pass over it."""
    rows, depth = x.shape
    most = max(1, _CHUNK_BYTES // (4 * PANEL))
    chunks = (depth + most - 1) // most
    x_rows, weight_rows = np.arange(rows) * depth, np.arange(most) * PANEL
    lines = np.empty((rows // _ROWS + _ROWS) * most, np.int64)
    x_flat, weights, out_flat = x.reshape(-1), panels.reshape(-1), out.reshape(-1)
    for panel in range(begin, end):
        for chunk in range(chunks):
            first, last = depth * chunk // chunks, depth * (chunk + 1) // chunks
            at = (panel * depth + first) * PANEL
            _lines_after(lines, weights, at + (last - first) * PANEL)
            operands = (x_flat[first:], x_rows, weights[at:], weight_rows, lines)
            target = (out_flat[panel * PANEL :], out.shape[1])
            if chunk == 0:
                _multiply_chunk(target, operands, last - first, _FIRST, _FIRST_ROW)
            else:
                _multiply_chunk(target, operands, last - first, _LATER, _LATER_ROW)


@njit(cache=True)
def _lines_after(lines, weights, at):
    base = weights.ctypes.data + at * 4
    count = min(len(lines), _CHUNK_BYTES // _LINE_BYTES)
    for i in range(count):
        lines[i] = base + i * _LINE_BYTES
    lines[count:] = base


@njit(inline="always")  # the tile's shape must stay a literal
def _multiply_chunk(target, operands, depth, tile, row_tile):
    out, width = target
    x, x_rows, weights, weight_rows, lines = operands
    rows, m = len(x_rows), 0
    while m + _ROWS <= rows:
        ahead = lines[m // _ROWS * depth :]
        multiply_add_tile((out, m * width, width), (x, x_rows, m, 1), (weights, weight_rows, 0), depth, ahead, tile)
        m += _ROWS
    while m < rows:
        ahead = lines[(m // _ROWS + m % _ROWS) * depth :]
        multiply_add_tile((out, m * width, width), (x, x_rows, m, 1), (weights, weight_rows, 0), depth, ahead, row_tile)
        m += 1
