"""8-bit latent caches: TMA loads the parts of a block as they are, and producer warps widen them in place.

The buffers leave no room beside them. So TMA writes 128 columns of 8-bit numbers to the memory of the last 64 of their
16-bit numbers. Four warps load and widen one pair of blocks while the consumers compute the other.
"""

from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from trunkattn.gpu.hopper.common import reinterpret
from trunkattn.gpu.hopper.pipeline import warps_sync
from trunkattn.gpu.hopper.tasks import task_of
from trunkattn.gpu.hopper.widen import IS_E4M3, SWIZZLED_WORDS, widen
from trunkattn.gpu.mla.blocks import (
    FIRST,
    HALF_PARTS,
    LEFT,
    PART_COLUMNS,
    RIGHT,
    ROPE,
    SECOND,
    block_at,
    blocks_of,
    half_acquire,
    load_stage,
    locate,
    queries_sync,
    stage_of,
    stage_wait,
)
from trunkattn.gpu.mla.spec import NARROW_BLOCK_ROWS

_NARROW_WORDS, _WIDE_WORDS = gl.constexpr(16), gl.constexpr(32)  # of 64 columns
# Layouts of 64 and of 128 columns of 8 bits. A thread has one run of 16 bytes of a row, or two. The two rows that eight
# threads access at once differ in the bits of 5, so that neither 8-bit nor 16-bit rows of a swizzled tile share banks.
_NARROW, _NARROW_PAIR = (
    gl.constexpr(
        gl.DistributedLinearLayout(
            reg_bases=[[0, 1], [0, 2], [0, 16]][: 2 + wide],
            lane_bases=[[0, 4], [0, 8], [5, 0], [1, 0], [2, 0]],
            warp_bases=[[8, 0], [16, 0]],
            block_bases=[],
            shape=[NARROW_BLOCK_ROWS, 16 + 16 * wide],
        )
    )
    for wide in (False, True)
)


class Words(NamedTuple):
    """The memory of the buffers as words of 32 bits: `half` [2 * blocks, block rows, 128] and `rope` [blocks, block
    rows, 32]. 32 words are 64 columns of 16-bit numbers, or 128 of 8 bits."""

    half: Any
    rope: Any


@gluon.jit
def _words_of(buffers, C: gl.constexpr):
    """Returns the words of the buffers."""
    BLOCKS: gl.constexpr = 2 * C.pairs_held
    HALF: gl.constexpr = (2 * BLOCKS, C.block_rows, HALF_PARTS * _WIDE_WORDS)
    ROPE_WORDS: gl.constexpr = (BLOCKS, C.block_rows, _WIDE_WORDS)
    return Words(
        reinterpret(buffers.half_boxes, gl.int32, HALF, SWIZZLED_WORDS),
        reinterpret(buffers.rope_boxes, gl.int32, ROPE_WORDS, SWIZZLED_WORDS),
    )


@gluon.jit
def _read_half(words, at):
    """Returns the words [block rows, 128] of half of a block as float16. A barrier after each store to shared memory
    costs more than moving words between registers, so that one store writes all of them."""
    half = words.half.index(at)
    low = widen(half.slice(_WIDE_WORDS, _WIDE_WORDS, 1).load(_NARROW_PAIR), IS_E4M3)
    high = widen(half.slice(3 * _WIDE_WORDS, _WIDE_WORDS, 1).load(_NARROW_PAIR), IS_E4M3)
    both = gl.permute(gl.join(low, high), (0, 2, 1))
    return gl.reshape(both, [both.shape[0], 2 * both.shape[2]])


@gluon.jit
def _widen_rope(buffers, words, uses, C: gl.constexpr):
    """Waits until the rope columns of a pair have landed, and widens them."""
    stage_wait(buffers.landed, ROPE, uses, C)
    left, right = words.rope.index(block_at(uses, 0, C)), words.rope.index(block_at(uses, 1, C))
    left_columns = left.slice(0, _NARROW_WORDS, 1).load(_NARROW)
    right_columns = right.slice(0, _NARROW_WORDS, 1).load(_NARROW)
    warps_sync()
    left.store(widen(left_columns, IS_E4M3))
    right.store(widen(right_columns, IS_E4M3))
    fence_async_shared()
    mbarrier.arrive(stage_of(buffers.full, ROPE, uses, C), count=1)


@gluon.jit
def _widen_halves(buffers, words, STAGE: gl.constexpr, uses, C: gl.constexpr):
    """Waits until the first or the second halves of a pair have landed, and widens them."""
    stage_wait(buffers.landed, STAGE, uses, C)
    left = 2 * block_at(uses, 0, C) + STAGE
    right = 2 * block_at(uses, 1, C) + 1 - STAGE
    left_columns = _read_half(words, left)
    right_columns = _read_half(words, right)
    warps_sync()
    words.half.index(left).store(left_columns)
    words.half.index(right).store(right_columns)
    fence_async_shared()
    mbarrier.arrive(stage_of(buffers.full, STAGE, uses, C), count=1)


@gluon.jit
def widen_pairs(tasks, segments, desc, buffers, C: gl.constexpr):
    """Runs the producer warps, which load and widen one pair of blocks after another, in the order in which the scores
    are computed."""
    BLOCK_SEGMENTS: gl.constexpr = C.block_rows // C.segment_size
    words = _words_of(buffers, C)
    uses, is_first = 0, True
    for turn in range(tasks.cta, tasks.num_tasks, tasks.num_ctas):
        task = task_of(tasks, turn, C.num_head_groups)
        blocks = blocks_of(task.item, C)
        boxes = locate(segments, blocks.first, blocks.end, C)
        others = locate(segments, blocks.first + BLOCK_SEGMENTS, blocks.end, C)
        if is_first & (blocks.count > 0):
            queries_sync(C)
            is_first = False
        for nth in range(0, blocks.count, 2):
            next_at = blocks.first + (nth + 2) * BLOCK_SEGMENTS
            next_boxes = locate(segments, next_at, blocks.end, C)
            next_others = locate(segments, next_at + BLOCK_SEGMENTS, blocks.end, C)
            half_acquire(LEFT, uses, C)
            half_acquire(RIGHT, uses, C)
            load_stage(desc, buffers, boxes, others, ROPE, uses, C)
            load_stage(desc, buffers, boxes, others, FIRST, uses, C)
            load_stage(desc, buffers, boxes, others, SECOND, uses, C)
            _widen_rope(buffers, words, uses, C)
            _widen_halves(buffers, words, FIRST, uses, C)
            _widen_halves(buffers, words, SECOND, uses, C)
            uses += 1
            boxes, others = next_boxes, next_others


def narrow_descriptor(rows: torch.Tensor, segment_size: int) -> TensorDescriptor:
    """Returns the TMA descriptor of an 8-bit cache [pages, page_size, columns]. A box holds a segment's tokens and 128
    columns."""
    box = [1, segment_size, 2 * PART_COLUMNS.value]
    layout = gl.NVMMASharedLayout(2 * PART_COLUMNS.value, 8, 3)
    return TensorDescriptor(rows.view(torch.uint8), list(rows.shape), list(rows.stride()), box, layout)
