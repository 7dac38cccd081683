"""Blocks of keys and of values that producer warps gather token by token, because pages are too small for TMA. Each
thread reads 16 bytes at a time. Rows of 16-bit numbers are copied to shared memory asynchronously. Rows of 8-bit
numbers pass through registers and are widened on the way.
"""

from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from trunkattn.gpu.hopper.pipeline import producer_acquire
from trunkattn.planner.work_list import SEGMENT_COLUMNS, SEGMENT_QUERIES

_SEGMENT_COLUMNS, _SEGMENT_QUERIES = gl.constexpr(SEGMENT_COLUMNS), gl.constexpr(SEGMENT_QUERIES)
# Triton 3.9 and Triton 3.6 have different names for this
_async_load = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared


class HeadWords(NamedTuple):
    """A KV head of a cache, viewed as int32 words. `words` points to the head of the first token. Strides are in
    words."""

    words: Any
    page_stride: Any
    token_stride: Any


def as_words(cache: torch.Tensor) -> torch.Tensor:
    """Returns a view of a cache as int32, as the kernel gathers it."""
    return cache.view(torch.int32)


@gluon.jit
def locate_rows(segments, at, end, C: gl.constexpr, T: gl.constexpr, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """Returns where the tokens of a block lie in the cache, as a tuple with `ROWS` places in each element. The block
    begins with segment `at`. A row without a token has place -1."""
    places: gl.tuple = ()
    for i in gl.static_range(T.block_n // ROWS):
        row = i * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
        index = at + row // C.segment_size
        segment = segments + index * _SEGMENT_COLUMNS
        place = gl.load(segment, mask=index < end, other=0) + row % C.segment_size
        tokens = gl.load(segment + _SEGMENT_QUERIES, mask=index < end, other=0) >> 16
        places += (gl.where(row % C.segment_size < tokens, place, -1),)
    return places


@gluon.jit
def _addresses(cache, place, C: gl.constexpr, T: gl.constexpr, LAYOUT: gl.constexpr):
    """Returns the addresses [places, words] of the words of the tokens at these places."""
    w = gl.arange(0, T.head_dim * C.kv_bytes // 4, gl.SliceLayout(0, LAYOUT))
    at = (place // C.page_size).to(gl.int64) * cache.page_stride + place % C.page_size * cache.token_stride
    return cache.words + at[:, None] + w[None, :]


@gluon.jit
def copy_rows(
    pipeline, index, cache, places, BAR_EMPTY: gl.constexpr, C: gl.constexpr, T: gl.constexpr, LAYOUT: gl.constexpr
):
    """Acquires the stage of block `index` and starts to copy its 16-bit rows. Rows without a token are filled with
    zeros, since what lies behind the last token may be NaN."""
    producer_acquire(index, BAR_EMPTY, T)
    stage = index % T.num_stages
    tile = pipeline.words.index(stage)
    ROWS: gl.constexpr = T.block_n // len(places)
    for i in gl.static_range(len(places)):
        at = _addresses(cache, places[i], C, T, LAYOUT)
        _async_load(tile.slice(i * ROWS, ROWS), at, mask=(places[i] >= 0)[:, None])
    async_copy.mbarrier_arrive(pipeline.full.index(stage), increment_count=False)


@gluon.jit
def load_rows(cache, places, C: gl.constexpr, T: gl.constexpr, LAYOUT: gl.constexpr):
    """Loads the rows of a block as words. Rows without a token are zeros."""
    rows: gl.tuple = ()
    for i in gl.static_range(len(places)):
        at = _addresses(cache, places[i], C, T, LAYOUT)
        rows += (gl.load(at, mask=(places[i] >= 0)[:, None], other=0),)
    return rows
