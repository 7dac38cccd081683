"""8-bit latent caches: TMA loads the parts of a block as they are, and producer warps widen them in place.

The buffers leave no room beside them. So TMA writes 128 columns of 8-bit numbers to the memory of the last 64 of their
16-bit numbers, and those are widened last. Four producer warps do both for the buffers of a pair of blocks, in the
order in which the consumers release the parts.
"""

from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from trunkattn.gpu.hopper.common import opaque, reinterpret
from trunkattn.gpu.hopper.pipeline import warps_sync
from trunkattn.gpu.hopper.widen import SWIZZLED_WORDS, widen_e4m3
from trunkattn.gpu.mla.blocks import (
    BLOCK_ROWS,
    HALF_PARTS,
    LEFT,
    PART_COLUMNS,
    PARTS,
    RIGHT,
    ROPE,
    blocks_of,
    load_part,
    locate,
    queries_sync,
    task_of,
)

_NARROW_WORDS, _WIDE_WORDS = gl.constexpr(16), gl.constexpr(32)  # of 64 columns


class Words(NamedTuple):
    """The memory of the buffers as words of 32 bits [..., 64, 32]: 64 columns of 16-bit numbers, or 128 of 8 bits."""

    half: Any
    rope: Any


@gluon.jit
def _words_of(buffers):
    """Returns the words of the buffers."""
    HALF: gl.constexpr = (2 * 2 * HALF_PARTS, BLOCK_ROWS, _WIDE_WORDS)
    ROPE_WORDS: gl.constexpr = (2, BLOCK_ROWS, _WIDE_WORDS)
    return Words(
        reinterpret(buffers.halves, gl.int32, HALF, SWIZZLED_WORDS),
        reinterpret(buffers.rope, gl.int32, ROPE_WORDS, SWIZZLED_WORDS),
    )


@gluon.jit
def _widen_columns(source, to, first: gl.constexpr, DTYPE: gl.constexpr):
    """Widens 64 columns of a block, from word `first` of each row of `source` on. `to` may be the same memory."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    words = source.slice(first, _NARROW_WORDS, 1).load(LAYOUT)
    warps_sync()
    to.store(widen_e4m3(words, DTYPE))


@gluon.jit
def _widen_part(buffers, words, BUFFER: gl.constexpr, PART: gl.constexpr, uses, DTYPE: gl.constexpr):
    """Waits until a part has landed, and widens it."""
    number: gl.constexpr = BUFFER * PARTS + PART
    mbarrier.wait(buffers.landed.index(number), uses & 1)
    if PART == ROPE:
        rope = words.rope.index(BUFFER)
        _widen_columns(rope, rope, 0, DTYPE)
    else:
        for pair in range(opaque(HALF_PARTS // 2)):
            at = (2 * BUFFER + PART) * HALF_PARTS + 2 * pair
            narrow = words.half.index(at + 1)
            _widen_columns(narrow, words.half.index(at), 0, DTYPE)
            _widen_columns(narrow, narrow, _NARROW_WORDS, DTYPE)
    fence_async_shared()
    mbarrier.arrive(buffers.full.index(number), count=1)


@gluon.jit
def widen_items(tasks, segments, desc, buffers, C: gl.constexpr):
    """Runs the producer warps. A part is widened after two more have been acquired and loaded, so that memory answers
    meanwhile. `left` and `right` count the uses of the buffers of a pair's first and second block."""
    DTYPE: gl.constexpr = buffers.halves.dtype
    BLOCK_SEGMENTS: gl.constexpr = BLOCK_ROWS // C.segment_size
    words = _words_of(buffers)
    left, right, is_first = 0, 0, True
    for turn in range(tasks.cta, tasks.num_tasks, tasks.num_ctas):
        task = task_of(tasks, turn, C)
        blocks = blocks_of(task.item, C)
        if is_first & (blocks.count > 0):
            queries_sync(C)
            is_first = False
        for nth in range(0, blocks.count, 2):
            at = blocks.first + nth * BLOCK_SEGMENTS
            boxes = locate(segments, at, blocks.end, C)
            load_part(desc, buffers, boxes, 0, ROPE, left, C)
            if nth + 1 < blocks.count:
                others = locate(segments, at + BLOCK_SEGMENTS, blocks.end, C)
                load_part(desc, buffers, others, 1, ROPE, right, C)
                load_part(desc, buffers, boxes, 0, LEFT, left, C)
                _widen_part(buffers, words, 0, ROPE, left, DTYPE)
                load_part(desc, buffers, others, 1, RIGHT, right, C)
                _widen_part(buffers, words, 1, ROPE, right, DTYPE)
                load_part(desc, buffers, boxes, 0, RIGHT, left, C)
                _widen_part(buffers, words, 0, LEFT, left, DTYPE)
                load_part(desc, buffers, others, 1, LEFT, right, C)
                _widen_part(buffers, words, 1, RIGHT, right, DTYPE)
                _widen_part(buffers, words, 0, RIGHT, left, DTYPE)
                _widen_part(buffers, words, 1, LEFT, right, DTYPE)
                right += 1
            else:
                load_part(desc, buffers, boxes, 0, LEFT, left, C)
                load_part(desc, buffers, boxes, 0, RIGHT, left, C)
                _widen_part(buffers, words, 0, ROPE, left, DTYPE)
                _widen_part(buffers, words, 0, LEFT, left, DTYPE)
                _widen_part(buffers, words, 0, RIGHT, left, DTYPE)
            left += 1


def narrow_descriptor(rows: torch.Tensor, segment_size: int) -> TensorDescriptor:
    """Returns the TMA descriptor of an 8-bit cache [pages, page_size, columns]. A box holds a segment's tokens and 128
    columns."""
    box = [1, segment_size, 2 * PART_COLUMNS.value]
    layout = gl.NVMMASharedLayout(2 * PART_COLUMNS.value, 8, 3)
    return TensorDescriptor(rows.view(torch.uint8), list(rows.shape), list(rows.stride()), box, layout)
