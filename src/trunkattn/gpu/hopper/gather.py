"""Blocks of keys and of values that producer warps gather token by token, and convert on the way.

For caches of 8 bits, which tensor cores do not multiply with 16-bit queries, and for pages that are too small for TMA.
The producers load rows of a block into registers, 16 bytes a thread, and store them as the 16-bit tile that the matrix
products read. Keys are on their way while values are stored, and the other way round.

8-bit numbers become 16-bit ones exactly: their bits are shifted to where exponent and mantissa of the wider type begin,
which leaves a power of two to multiply by. In float8_e4m3fn, and with bfloat16 queries in float8_e5m2, what is infinite
or NaN becomes a large number.
"""

from types import MappingProxyType
from typing import Final

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from trunkattn.gpu.hopper.common import SWIZZLED
from trunkattn.gpu.hopper.pipeline import Pipeline, producer_acquire
from trunkattn.planner.work_list import SEGMENT_COLUMNS, SEGMENT_QUERIES

_SEGMENT_COLUMNS, _SEGMENT_QUERIES = gl.constexpr(SEGMENT_COLUMNS), gl.constexpr(SEGMENT_QUERIES)

# Of four numbers in $2: each byte becomes the upper half of 16 bits, of which all but the sign move down.
_WIDEN: Final = """
{{
    .reg .b32 pair, sign, rest, factor;
    mov.b32 factor, {factor};
    prmt.b32 pair, $2, 0, 0x1404;
    and.b32 sign, pair, 0x80008000;
    shr.b32 rest, pair, {shift};
    lop3.b32 rest, rest, {mask}, sign, 0xEA;
    mul.{type}x2 $0, rest, factor;
    prmt.b32 pair, $2, 0, 0x3424;
    and.b32 sign, pair, 0x80008000;
    shr.b32 rest, pair, {shift};
    lop3.b32 rest, rest, {mask}, sign, 0xEA;
    mul.{type}x2 $1, rest, factor;
}}
"""
_SAME, _E4M3, _E5M2 = 0, 1, 2
_KINDS: Final = MappingProxyType({torch.float8_e4m3fn: _E4M3, torch.float8_e5m2: _E5M2})
_IS_E4M3 = gl.constexpr(_E4M3)
_E4M3_TO_BF16 = gl.constexpr(_WIDEN.format(type="bf16", shift=4, mask="0x07f007f0", factor="0x7B807B80"))  # 2^120
_E5M2_TO_BF16 = gl.constexpr(_WIDEN.format(type="bf16", shift=3, mask="0x0fe00fe0", factor="0x77807780"))  # 2^112
_E4M3_TO_FP16 = gl.constexpr(_WIDEN.format(type="f16", shift=1, mask="0x3f803f80", factor="0x5C005C00"))  # 2^8
_E5M2_TO_FP16 = gl.constexpr("prmt.b32 $0, $2, 0, 0x1404; prmt.b32 $1, $2, 0, 0x3424;")


def kind_of(dtype: torch.dtype) -> int:
    """How a cache's numbers become those of the queries; 0: they are of their type."""
    return _KINDS.get(dtype, _SAME)


def as_numbers(cache: torch.Tensor) -> torch.Tensor:
    """A cache as the kernels take it: 8-bit numbers as bytes."""
    return cache.view(torch.uint8) if cache.element_size() == 1 else cache


@gluon.jit
def allocate_gathered(dtype: gl.constexpr, T: gl.constexpr):
    """A pipeline that producer warps fill, all stages empty."""
    NUM_STAGES: gl.constexpr = T.num_stages
    tiles = gl.allocate_shared_memory(dtype, [NUM_STAGES, T.block_n, T.head_dim], SWIZZLED)
    full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM_STAGES):
        mbarrier.init(full.index(i), count=1)
    return Pipeline(tiles, tiles, full)


@gluon.jit
def locate_rows(segments, at, end, C: gl.constexpr, T: gl.constexpr, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    """The places in the cache of the tokens of a block that begins with segment `at`, ROWS at a time; -1 where there is
    none."""
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
def load_rows(cache, places, page_stride, token_stride, C: gl.constexpr, T: gl.constexpr, LAYOUT: gl.constexpr):
    """The rows of a block, zeros where there are none: what lies behind the last token may be NaN."""
    d = gl.arange(0, T.head_dim, gl.SliceLayout(0, LAYOUT))
    rows: gl.tuple = ()
    for i in gl.static_range(len(places)):
        place = places[i]
        at = (place // C.page_size).to(gl.int64) * page_stride + place % C.page_size * token_stride
        rows += (gl.load(cache + at[:, None] + d[None, :], mask=(place >= 0)[:, None], other=0),)
    return rows


@gluon.jit
def widen(values, dtype: gl.constexpr, KIND: gl.constexpr):
    """Values of a cache in the type of the queries."""
    if KIND == 0:
        return values
    elif KIND == _IS_E4M3:
        if dtype == gl.bfloat16:
            return gl.inline_asm_elementwise(_E4M3_TO_BF16, "=r,=r,r", [values], gl.bfloat16, True, 4)
        else:
            return gl.inline_asm_elementwise(_E4M3_TO_FP16, "=r,=r,r", [values], gl.float16, True, 4)
    elif dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(_E5M2_TO_BF16, "=r,=r,r", [values], gl.bfloat16, True, 4)
    else:
        return gl.inline_asm_elementwise(_E5M2_TO_FP16, "=r,=r,r", [values], gl.float16, True, 4)


@gluon.jit
def store_rows(pipeline, index, rows, BAR_EMPTY: gl.constexpr, KIND: gl.constexpr, T: gl.constexpr):
    """Acquires the stage of block `index` and fills it."""
    producer_acquire(index, BAR_EMPTY, T)
    stage = index % T.num_stages
    tile = pipeline.tiles.index(stage)
    ROWS: gl.constexpr = T.block_n // len(rows)
    for i in gl.static_range(len(rows)):
        tile.slice(i * ROWS, ROWS).store(widen(rows[i], tile.dtype, KIND))
    fence_async_shared()
    mbarrier.arrive(pipeline.full.index(stage), count=1)
