"""Caches of 8-bit numbers. Tensor cores do not multiply them with 16-bit queries, so TMA loads the blocks as they are,
and producer warps widen them.

An 8-bit number becomes float16 without rounding, and one instruction converts two of them. Queries and weights are then
float16, too (`as_float16`).
"""

from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from trunkattn.gpu.hopper.common import BOX_TOKENS, SWIZZLED, reinterpret
from trunkattn.gpu.hopper.pipeline import producer_acquire, tma_load, warps_sync

# Converts word $2, which holds four numbers, to two words of two numbers each.
_E4M3_TO_FP16 = gl.constexpr("""
{
    .reg .b16 low, high;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
}
""")
# The upper byte of a float16 is a float8_e5m2.
_E5M2_TO_FP16 = gl.constexpr("prmt.b32 $0, $2, 0, 0x1404; prmt.b32 $1, $2, 0, 0x3424;")
_SAME, _E4M3, _E5M2 = 0, 1, 2
_KINDS: Final = MappingProxyType(
    {
        torch.bfloat16: _SAME,
        torch.float16: _SAME,
        torch.float8_e4m3fn: _E4M3,
        torch.float8_e5m2: _E5M2,
    }
)
IS_SAME, IS_E4M3 = gl.constexpr(_SAME), gl.constexpr(_E4M3)
SWIZZLED_WORDS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))  # swizzles the same bytes as SWIZZLED
# Queries in float16: the exponent that the largest number of a row gets, and the bias of exponents in a float32
_LARGEST_EXPONENT, _BIAS = gl.constexpr(14), gl.constexpr(127)
_LINE_BYTES: Final = 128  # TMA swizzles at most this many bytes
_AHEAD = gl.constexpr(2)  # TMA loads this many blocks ahead


class WordPipeline(NamedTuple):
    """A `Pipeline` that producer warps fill. `words` are its tiles as int32 [stages, block_n, head_dim / 2]."""

    tiles: Any
    words: Any
    full: Any


class Staging(NamedTuple):
    """Blocks that TMA has written, alternately of keys and of values. `boxes` are as in `Pipeline`. `words` are the
    same memory as int32 [2 * blocks ahead, block_n, head_dim / 4]. `full` are the full barriers."""

    boxes: Any
    words: Any
    full: Any


def kind_of(dtype: torch.dtype) -> int:
    """Returns how the numbers of a cache become 16-bit numbers. 0 means that they already are."""
    return _KINDS[dtype]


def staged_descriptor(cache: torch.Tensor) -> TensorDescriptor:
    """Returns the TMA descriptor of an 8-bit cache. A box has 16 tokens and up to 128 dims."""
    cache = cache.view(torch.uint8)
    dims = min(cache.shape[-1], _LINE_BYTES)
    layout = gl.NVMMASharedLayout(dims, 8, 4)
    return TensorDescriptor(cache, list(cache.shape), list(cache.stride()), [1, BOX_TOKENS.value, 1, dims], layout)


@gluon.jit
def allocate_words(dtype: gl.constexpr, num_arrivals: gl.constexpr, T: gl.constexpr):
    """Allocates a pipeline that producer warps fill. All stages are empty. A stage is full after `num_arrivals`
    arrivals."""
    NUM_STAGES: gl.constexpr = T.num_stages
    WORDS: gl.constexpr = (NUM_STAGES, T.block_n, T.head_dim // 2)
    tiles = gl.allocate_shared_memory(dtype, [NUM_STAGES, T.block_n, T.head_dim], SWIZZLED)
    words = reinterpret(tiles, gl.int32, WORDS, SWIZZLED_WORDS)
    full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM_STAGES):
        mbarrier.init(full.index(i), count=num_arrivals)
    return WordPipeline(tiles, words, full)


@gluon.jit
def allocate_staging(desc, T: gl.constexpr):
    """Allocates room for the blocks ahead. All of it is empty."""
    SLOTS: gl.constexpr = 2 * _AHEAD
    LINE: gl.constexpr = desc.block_type.shape[3]
    BOXES: gl.constexpr = SLOTS * (T.head_dim // LINE) * (T.block_n // BOX_TOKENS)
    WORDS: gl.constexpr = (SLOTS, T.block_n, T.head_dim // 4)
    WORD_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(LINE, 32, 2)
    boxes = gl.allocate_shared_memory(desc.dtype, [BOXES, 1, BOX_TOKENS, 1, LINE], desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
    return Staging(boxes, reinterpret(boxes, gl.int32, WORDS, WORD_LAYOUT), full)


@gluon.jit
def stage(desc, staging, turn, boxes, kv_head, T: gl.constexpr):
    """Starts the TMA loads of the block in `turn`, a block of keys or of values. All warps have read what its slot held
    before."""
    LINE: gl.constexpr = desc.block_type.shape[3]
    BOXES: gl.constexpr = T.block_n // BOX_TOKENS
    PARTS: gl.constexpr = T.head_dim // LINE
    slot = turn % (2 * _AHEAD)
    full = staging.full.index(slot)
    mbarrier.expect(full, T.block_n * T.head_dim)
    for part in gl.static_range(PARTS):
        for i in gl.static_range(BOXES):
            box = staging.boxes.index((slot * PARTS + part) * BOXES + i)
            tma_load(desc, [boxes.page[i], boxes.token[i], kv_head, part * LINE], full, box)


@gluon.jit
def read_staged(staging, turn, LAYOUT: gl.constexpr):
    """Waits until TMA has written the block in `turn`, and returns its words."""
    slot = turn % (2 * _AHEAD)
    mbarrier.wait(staging.full.index(slot), turn // (2 * _AHEAD) % 2)
    words = staging.words.index(slot).load(LAYOUT)
    warps_sync()
    return words


@gluon.jit
def widen(words, KIND: gl.constexpr):
    """Converts words of 8-bit numbers to words of float16."""
    return _convert(words, _E4M3_TO_FP16 if KIND == IS_E4M3 else _E5M2_TO_FP16)


@gluon.jit
def _convert(words, ASM: gl.constexpr):
    low, high = gl.inline_asm_elementwise(ASM, "=r,=r,r", [words], (gl.int32, gl.int32), True, 1)
    return gl.reshape(gl.join(low, high), [words.shape[0], 2 * words.shape[1]])


@gluon.jit
def store_words(pipeline, index, words, BAR_EMPTY: gl.constexpr, KIND: gl.constexpr, T: gl.constexpr):
    """Acquires the stage of block `index` and fills it with words of 8-bit numbers. `words` is a tuple of parts of the
    rows. The consumers fence what is stored here (`consumer_wait`), because a fence in the producers would wait for
    what they load meanwhile."""
    producer_acquire(index, BAR_EMPTY, T)
    at = index % T.num_stages
    tile = pipeline.words.index(at)
    ROWS: gl.constexpr = T.block_n // len(words)
    for i in gl.static_range(len(words)):
        tile.slice(i * ROWS, ROWS).store(widen(words[i], KIND))
    mbarrier.arrive(pipeline.full.index(at), count=1)


@gluon.jit
def largest_of(rows):
    """Returns the largest absolute value of each row in float32."""
    return gl.max(gl.abs(rows.to(gl.float32)), 1)


@gluon.jit
def float16_factors(largest):
    """Returns the factors by which rows of queries become float16, and their inverses, which restore the logits.
    `largest` are the rows' largest absolute values. float16 has fewer exponents than bfloat16, so each row is
    multiplied by a power of two that gives its largest number exponent 14. A number that is 2^29 times smaller than the
    largest of its row loses bits, and one that is 2^40 times smaller becomes 0."""
    exponent = gl.minimum(_LARGEST_EXPONENT + 2 * _BIAS - (largest.to(gl.int32, bitcast=True) >> 23), 2 * _BIAS)
    factor, inverse = exponent << 23, (2 * _BIAS - exponent) << 23
    return factor.to(gl.float32, bitcast=True), inverse.to(gl.float32, bitcast=True)


@gluon.jit
def as_float16(rows):
    """Returns rows of queries as float16, and the factor [rows] that restores each row's logits (`float16_factors`)."""
    factor, inverse = float16_factors(largest_of(rows))
    return (rows.to(gl.float32) * factor[:, None]).to(gl.float16), inverse
