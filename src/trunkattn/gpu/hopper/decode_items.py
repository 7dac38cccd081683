"""The producer warps of the Hopper decode kernel. They bring keys and values of its items in the order in which blocks
are computed. Either two warps load them by TMA, or more warps widen or gather them."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from trunkattn.gpu.hopper.gather import HeadWords, copy_rows, load_rows, locate_rows
from trunkattn.gpu.hopper.pipeline import BAR_K_EMPTY, BAR_V_EMPTY, load_block
from trunkattn.gpu.hopper.segments import ITEM_SEGMENT_END, ITEM_SEGMENT_START, ITEM_SHARED_END, locate_boxes
from trunkattn.gpu.hopper.tasks import task_of
from trunkattn.gpu.hopper.widen import IS_SAME, read_staged, stage, store_words


class Blocks(NamedTuple):
    """Blocks of an item's keys: segments [first, end) in `count` blocks. All rows see the first `num_full` blocks, and
    the others are masked. `num_masked_first` of the masked blocks are computed before the full ones."""

    first: Any
    end: Any
    count: Any
    num_full: Any
    num_masked_first: Any


@gluon.jit
def blocks_of(item, tasks, C: gl.constexpr, T: gl.constexpr):
    """Returns the blocks of an item.

    Every other CTA computes the masked blocks first. Full blocks are shared by many items and come from the L2 cache,
    while masked blocks come from memory. This order keeps both busy all the time, and one CTA of an SM uses the cache
    while the other uses memory."""
    BLOCK_SEGMENTS: gl.constexpr = T.block_n // C.segment_size
    start, shared_end = gl.load(item + ITEM_SEGMENT_START), gl.load(item + ITEM_SHARED_END)
    end = gl.load(item + ITEM_SEGMENT_END)
    count, num_full = (end - start + BLOCK_SEGMENTS - 1) // BLOCK_SEGMENTS, (shared_end - start) // BLOCK_SEGMENTS
    half = gl.maximum(tasks.num_ctas // 2, 1)
    masked_first = (tasks.cta + tasks.cta // half) % 2 == 1
    return Blocks(start, end, count, num_full, gl.where(masked_first, count - num_full, 0))


@gluon.jit
def segment_of(blocks, nth, C: gl.constexpr, T: gl.constexpr):
    """Returns the first segment of the block that is computed as the nth."""
    block = gl.where(nth < blocks.num_masked_first, blocks.num_full + nth, nth - blocks.num_masked_first)
    return blocks.first + block * (T.block_n // C.segment_size)


@gluon.jit
def load_items(tasks, segments, desc, pipeline, BAR_EMPTY: gl.constexpr, C: gl.constexpr, T: gl.constexpr):
    """Runs the producer warp of keys or of values."""
    index = 0
    for turn in range(tasks.cta, tasks.num_tasks, tasks.num_ctas):
        task = task_of(tasks, turn, C.num_kv_heads)
        blocks = blocks_of(task.item, tasks, C, T)
        boxes = locate_boxes(segments, segment_of(blocks, 0, C, T), blocks.end, C, T.block_n)
        for nth in range(blocks.count):
            # These loads overlap the waits below
            next_boxes = locate_boxes(segments, segment_of(blocks, nth + 1, C, T), blocks.end, C, T.block_n)
            load_block(desc, pipeline, index, boxes, task.kv_head, BAR_EMPTY, T)
            index += 1
            boxes = next_boxes


@gluon.jit
def widen_items(tasks, segments, k_desc, v_desc, staging, kv, C: gl.constexpr, T: gl.constexpr):
    """Runs the producer warps of 8-bit keys and values. TMA loads two blocks ahead of the block that is widened."""
    ACROSS: gl.constexpr = min(T.head_dim // 8, 32)  # threads of a row; each reads 8 bytes and stores 16
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 2], [32 // ACROSS, ACROSS], [T.num_producer_warps, 1], [1, 0])
    index = 0
    for turn in range(tasks.cta, tasks.num_tasks, tasks.num_ctas):
        task = task_of(tasks, turn, C.num_kv_heads)
        blocks = blocks_of(task.item, tasks, C, T)
        for nth in gl.static_range(2):
            if nth < blocks.count:
                boxes = locate_boxes(segments, segment_of(blocks, nth, C, T), blocks.end, C, T.block_n)
                stage(k_desc, staging, 2 * (index + nth), boxes, task.kv_head, T)
                stage(v_desc, staging, 2 * (index + nth) + 1, boxes, task.kv_head, T)
        for nth in range(blocks.count):
            boxes = locate_boxes(segments, segment_of(blocks, nth + 2, C, T), blocks.end, C, T.block_n)
            keys = read_staged(staging, 2 * index, LAYOUT)
            if nth + 2 < blocks.count:
                stage(k_desc, staging, 2 * index + 4, boxes, task.kv_head, T)
            store_words(kv.k, index, (keys,), BAR_K_EMPTY, C.kv_kind, T)
            values = read_staged(staging, 2 * index + 1, LAYOUT)
            if nth + 2 < blocks.count:
                stage(v_desc, staging, 2 * index + 5, boxes, task.kv_head, T)
            store_words(kv.v, index, (values,), BAR_V_EMPTY, C.kv_kind, T)
            index += 1


@gluon.jit
def gather_items(tasks, segments, k_cache, v_cache, layer, kv, C: gl.constexpr, T: gl.constexpr):
    """Runs the producer warps that gather keys and values. They load the places of tokens two blocks ahead, so that no
    thread waits for them. 8-bit keys are loaded while values are stored, and 8-bit values while keys are stored."""
    ACROSS: gl.constexpr = T.head_dim * C.kv_bytes // 16  # threads of a row; each loads 16 bytes
    WARPS: gl.constexpr = T.num_producer_warps
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [32 // ACROSS, ACROSS], [WARPS, 1], [1, 0])
    PER_WORD: gl.constexpr = 4 // C.kv_bytes
    ROWS: gl.constexpr = min(T.block_n, 2 * 32 * WARPS // ACROSS)  # a thread has 32 bytes of them
    index = 0
    for turn in range(tasks.cta, tasks.num_tasks, tasks.num_ctas):
        task = task_of(tasks, turn, C.num_kv_heads)
        blocks = blocks_of(task.item, tasks, C, T)
        head = task.kv_head.to(gl.int64)
        k_words = k_cache + head * (layer.k_head_stride // PER_WORD)
        v_words = v_cache + head * (layer.v_head_stride // PER_WORD)
        k = HeadWords(k_words, layer.k_page_stride // PER_WORD, layer.k_token_stride // PER_WORD)
        v = HeadWords(v_words, layer.v_page_stride // PER_WORD, layer.v_token_stride // PER_WORD)
        places = _places_of(segments, blocks, 0, C, T, ROWS, LAYOUT)
        next_places = _places_of(segments, blocks, 1, C, T, ROWS, LAYOUT)
        if C.kv_kind != IS_SAME:
            keys = load_rows(k, places, C, T, LAYOUT)
        for nth in range(blocks.count):
            if C.kv_kind == IS_SAME:
                places_behind = _places_of(segments, blocks, nth + 2, C, T, ROWS, LAYOUT)
                copy_rows(kv.k, index, k, places, BAR_K_EMPTY, C, T, LAYOUT)
                copy_rows(kv.v, index, v, places, BAR_V_EMPTY, C, T, LAYOUT)
            else:
                values = load_rows(v, places, C, T, LAYOUT)
                places_behind = _places_of(segments, blocks, nth + 2, C, T, ROWS, LAYOUT)
                store_words(kv.k, index, keys, BAR_K_EMPTY, C.kv_kind, T)
                keys = load_rows(k, next_places, C, T, LAYOUT)
                store_words(kv.v, index, values, BAR_V_EMPTY, C.kv_kind, T)
            places, next_places = next_places, places_behind
            index += 1


@gluon.jit
def _places_of(segments, blocks, nth, C: gl.constexpr, T: gl.constexpr, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Returns the places of the block that is computed as the nth. Behind the last block there are none."""
    end = gl.where(nth < blocks.count, blocks.end, 0)
    return locate_rows(segments, segment_of(blocks, nth, C, T), end, C, T, ROWS, LAYOUT)
