"""Tables of a prefix tree, made on a GPU by one launch each, so that a new tree in every training step takes little
time of the host."""

from typing import Any, Final

import torch
import triton
import triton.language as tl

from trunkattn.gpu.bound import BoundLaunch, Grid, kept
from trunkattn.training.sequences import TreeTables, table_length
from trunkattn.training.visibility import (
    TREE_SEGMENT_COLUMNS,
    TREE_SEGMENT_END,
    TREE_SEGMENT_LEVEL,
    TREE_SEGMENT_PARENT,
    TREE_SEGMENT_START,
)

_BLOCK: Final = 256
_WARPS: Final = 4
_CTAS: Final = 128  # which go through all blocks of tokens, so that a launch does not depend on the tree


@triton.jit(do_not_specialize=["num_segments", "length"])
def tables_kernel(numbers, flat, num_segments, length, BLOCK: tl.constexpr):
    """Writes the tables of a tree one after the other to flat [3 · length], from `numbers` as `TreeTables.of_segments`
    takes them."""
    for first in tl.range(tl.program_id(0) * BLOCK, length, tl.num_programs(0) * BLOCK):
        token = first + tl.arange(0, BLOCK)
        inside = token < length
        segment, behind = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32) + num_segments
        width = num_segments
        while width > 1:  # the segment begins at or before the token, and the one at `behind` after it
            middle = (segment + behind) // 2
            begun = tl.load(numbers + TREE_SEGMENT_COLUMNS * middle + TREE_SEGMENT_START) <= token
            segment, behind = tl.where(begun, middle, segment), tl.where(begun, behind, middle)
            width = (width + 1) // 2
        of_segment = numbers + TREE_SEGMENT_COLUMNS * num_segments + segment
        tl.store(flat + token, tl.load(of_segment), mask=inside)
        tl.store(flat + length + token, tl.load(of_segment + num_segments) + token, mask=inside)
        tl.store(flat + 2 * length + token, segment, mask=inside)


@triton.jit(do_not_specialize=["num_levels", "tokens"])
def intervals_kernel(segments, segment_of, ends, num_levels, tokens, BLOCK: tl.constexpr):
    """Writes what `cudnn_trees.intervals` returns."""
    for first in tl.range(tl.program_id(0) * BLOCK, tokens, tl.num_programs(0) * BLOCK):
        token = first + tl.arange(0, BLOCK)
        inside = token < tokens
        segment = tl.load(segment_of + token, mask=inside, other=0)
        tl.store(ends + token, tl.zeros([BLOCK], tl.int32), mask=inside)
        for below in tl.range(0, num_levels):
            above = num_levels - 1 - below
            own = segments + TREE_SEGMENT_COLUMNS * segment
            is_deeper = tl.load(own + TREE_SEGMENT_LEVEL) > above
            segment = tl.where(is_deeper, tl.load(own + TREE_SEGMENT_PARENT), segment)
            own = segments + TREE_SEGMENT_COLUMNS * segment
            on_path = tl.load(own + TREE_SEGMENT_LEVEL) == above
            start = tl.where(on_path, tl.load(own + TREE_SEGMENT_START), token + 1)
            stop = tl.where(on_path, tl.minimum(tl.load(own + TREE_SEGMENT_END), token + 1), token + 1)
            row = ends + (2 * above + 1).to(tl.int64) * tokens + token
            tl.store(row, start, mask=inside)
            tl.store(row + tokens, stop, mask=inside)


def tables_of_segments(numbers: torch.Tensor, tokens: int) -> TreeTables:
    """`TreeTables.of_segments` on a GPU."""
    count, length = len(numbers) // 7, table_length(tokens)
    flat = torch.empty(3 * length, dtype=torch.int32, device=numbers.device)
    _launch(tables_kernel, {"numbers": numbers, "flat": flat, "num_segments": count, "length": length}, flat)
    subtree_end, depths, segment_of, _ = flat.split_with_sizes([length, length, tokens, length - tokens])
    return TreeTables(subtree_end, depths, segment_of, numbers.as_strided((count, 4), (4, 1)))


def intervals(tables: TreeTables, num_levels: int) -> torch.Tensor:
    """`cudnn_trees.intervals` on a GPU."""
    tokens = len(tables.segment_of)
    ends = torch.empty(1, 2 * num_levels + 1, tokens, dtype=torch.int32, device=tables.segment_of.device)
    given = {"segments": tables.segments, "segment_of": tables.segment_of, "ends": ends}
    _launch(intervals_kernel, given | {"num_levels": num_levels, "tokens": tokens}, ends)
    return ends


def _launch(kernel: Any, given: dict[str, Any], out: torch.Tensor) -> None:
    """Launches a kernel on the device of `out`. given: its arguments by name, which differ from tree to tree."""
    grid = Grid(_CTAS, {"BLOCK": _BLOCK, "num_warps": _WARPS})
    bound = kept((kernel, out.device), lambda: BoundLaunch(kernel, grid, tuple(given)))
    with torch.cuda.device_of(out):  # launches go to the current device
        bound(tuple(given.values()))
