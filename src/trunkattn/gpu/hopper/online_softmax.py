"""The online softmax of the Hopper kernels, and FlashAttention-3's main loop over blocks of keys and values.

For each block, with the scores s = scale · q·k in units of log2:

    new_max = max(row_max, max(s))        p = exp2(s - new_max)
    row_sum = row_sum · exp2(row_max - new_max) + sum(p)
    acc     = acc · exp2(row_max - new_max) + p·v

The main loop overlaps the softmax of a block with the product p·v of the block before (FlashAttention-3, section 3.2,
https://arxiv.org/abs/2407.08608).
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from trunkattn.gpu.hopper.common import NEG_INF, WARPGROUP_ROWS
from trunkattn.gpu.hopper.pipeline import BAR_K_EMPTY, BAR_KV_EMPTY, BAR_V_EMPTY, consumer_release, consumer_wait
from trunkattn.numerics import LN_2, LOG2_E

_LN_2, _LOG2_E = gl.constexpr(LN_2), gl.constexpr(LOG2_E)


class Part(NamedTuple):
    """A part of the dims of a head. It starts with dim `begin`, and its width is a power of two."""

    begin: int
    width: int


class KeyPart(NamedTuple):
    """Dims of a key that one product multiplies: `width` dims, which start with dim `begin` of part `memory` in shared
    memory."""

    memory: int
    begin: int
    width: int


class MainloopTile(NamedTuple):
    """Constants of a main loop. Fields that `PipelineShape` has, too, hold for both of its pipelines.

    Attributes:
        num_producer_warps: warps that fill one pipeline.
        k_empty, v_empty: numbers of the empty barriers of stage 0.
        mask_ahead: masks are computed while the product q·k runs, because they read memory. Otherwise they are computed
            after it, which takes fewer registers.
        parts: the parts of head_dim, which lie one after the other in memory. A tile in memory is a tuple of parts if
            there are several.
        value_parts: the parts of values and outputs.
        key_parts: the parts of a key, which are multiplied one after the other. What lies behind them is padding.
        scores, acc: layouts of the scores of a block, and of the output.
        copy: the layout in which a tile of queries or outputs is copied to and from memory, 16 bytes a thread.
    """

    head_dim: int
    block_n: int
    num_stages: int
    num_threads: int
    num_producer_warps: int
    stored: bool
    k_empty: int
    v_empty: int
    mask_ahead: bool
    parts: tuple[Part, ...]
    value_parts: tuple[Part, ...]
    key_parts: tuple[KeyPart, ...]
    scores: Any
    acc: Any
    copy: Any


def mainloop_tile(
    head_dim: int,
    block_n: int,
    num_stages: int,
    num_consumer_warps: int,
    mask_ahead: bool,
    num_producer_warps: int = 1,
    value_dim: int | None = None,
    key_dim: int | None = None,
) -> MainloopTile:
    """Returns the constants of a main loop. One producer warp fills a pipeline by TMA; several write it with stores.
    `value_dim` and `key_dim` are head_dim if they are None. `key_dim` is the width of a key without padding, a multiple
    of 8."""
    value_dim = value_dim or head_dim
    parts, value_parts = _parts_of(head_dim), _parts_of(value_dim)
    k_empty, v_empty = BAR_K_EMPTY.value, BAR_V_EMPTY.value
    assert k_empty + num_stages <= v_empty <= v_empty + num_stages <= BAR_KV_EMPTY
    columns = min(value_parts[-1].width, max(block_n, value_dim // 2))
    scores, acc = (
        gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])
        for columns in (block_n, columns)
    )
    num_threads = 32 * (num_producer_warps + num_consumer_warps)
    return MainloopTile(
        head_dim=head_dim,
        block_n=block_n,
        num_stages=num_stages,
        num_threads=num_threads,
        num_producer_warps=num_producer_warps,
        stored=num_producer_warps > 1,
        k_empty=k_empty,
        v_empty=v_empty,
        mask_ahead=mask_ahead,
        parts=parts,
        value_parts=value_parts,
        key_parts=tuple(_key_part(part, parts) for part in _parts_of(key_dim or head_dim)),
        scores=scores,
        acc=acc,
        copy=copy_layout(value_parts[0].width),
    )


def _parts_of(dim: int) -> tuple[Part, ...]:
    """Returns the parts of a head of `dim` dims, which is rounded up to a multiple of 16. The largest part comes
    first."""
    whole = -(-dim // 16) * 16
    widths = [1 << bit for bit in reversed(range(whole.bit_length())) if whole >> bit & 1]
    return tuple(Part(sum(widths[:number]), width) for number, width in enumerate(widths))


def _key_part(part: Part, memory: tuple[Part, ...]) -> KeyPart:
    """Returns where a part of a key lies. Each part in memory holds whole parts of a key."""
    number = max(number for number, place in enumerate(memory) if place.begin <= part.begin)
    return KeyPart(number, part.begin - memory[number].begin, part.width)


def copy_layout(head_dim: int) -> gl.BlockedLayout:
    """Returns the layout in which four warps copy [rows, head_dim] 16-bit numbers, 16 bytes a thread."""
    across = min(head_dim // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])


class AttentionState(NamedTuple):
    """The state between two blocks.

    Attributes:
        row_max, row_sum: the maximum and the sum of each row [64].
        p: the weights of the last block [64, block_n]. Their products with its values are not yet in acc.
        acc: the output before it is divided by row_sum, as a tuple of parts.
    """

    row_max: Any
    row_sum: Any
    p: Any
    acc: Any


@gluon.jit
def _columns(scale):
    """Returns the scale in a shape that multiplies scores, whether it is one number or one for each row."""
    if scale.type.is_block():
        return scale[:, None]
    else:
        return scale


@gluon.jit
def soft_capped(scores, scale, SOFT_CAP: gl.constexpr):
    """Returns tanh(scale · scores / SOFT_CAP), the capped logits in units of the cap, computed with exp2. `scale` is
    the one of `softmax_step`. One approximate instruction divides. It treats the smallest numbers as 0, but the divisor
    is always 1 or more."""
    divisor = 1.0 + gl.exp2(scores * _columns(scale * (2.0 * _LOG2_E / SOFT_CAP)))
    inverse = gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [divisor], gl.float32, True, 1)
    return 1.0 - 2.0 * inverse


@gluon.jit
def softmax_step(row_max, row_sum, scores, scale, mask, MASK: gl.constexpr, SOFT_CAP: gl.constexpr):
    """Returns p of a block, the factor by which earlier sums shrink, and the new row_max and row_sum. `scale` is one
    number for all rows, or one for each row. SOFT_CAP is the soft cap of logits, or 0 for none. With a soft cap the
    scaled scores are in base e."""
    if SOFT_CAP > 0:
        scores = soft_capped(scores, scale, SOFT_CAP)
        scale = gl.to_tensor(SOFT_CAP * _LOG2_E)
    if MASK:
        scores = gl.where(mask, scores, -float("inf"))
    new_max = gl.maximum(row_max, gl.max(scores, 1) * scale)
    p = gl.exp2(gl.fma(scores, _columns(scale), -new_max[:, None]))
    rescale = gl.exp2(row_max - new_max)
    return p, rescale, new_max, row_sum * rescale + gl.sum(p, 1)


@gluon.jit
def finalize(row_max, row_sum):
    """Returns 1 / row_sum and lse. A row that sees no key of its item gets a zero output and NEG_INF."""
    safe_sum = gl.where(row_sum == 0, 1.0, row_sum)
    lse = gl.where(row_sum == 0, NEG_INF, row_max * _LN_2 + gl.log(safe_sum))
    return 1.0 / safe_sum, lse


@gluon.jit
def part_of(tiles, PART: gl.constexpr, T: gl.constexpr):
    """Returns a part of tiles in memory."""
    if len(T.parts) == 1:
        return tiles
    else:
        return tiles[PART]


@gluon.jit
def _stage_of(pipeline, index, PART: gl.constexpr, T: gl.constexpr):
    """Returns a part of block `index` of a pipeline."""
    return part_of(pipeline.tiles, PART, T).index(index % T.num_stages)


@gluon.jit
def _add_part(scores, q_tile, keys, index, PART: gl.constexpr, T: gl.constexpr):
    """Starts the product of one part of queries and keys, which is added to the parts before it."""
    MEMORY: gl.constexpr = T.key_parts[PART].memory
    BEGIN: gl.constexpr = T.key_parts[PART].begin
    WIDTH: gl.constexpr = T.key_parts[PART].width
    q_part = part_of(q_tile, MEMORY, T).slice(BEGIN, WIDTH, dim=1)
    k_part = _stage_of(keys, index, MEMORY, T).slice(BEGIN, WIDTH, dim=1)
    return warpgroup_mma(q_part, k_part.permute((1, 0)), scores, use_acc=PART > 0, is_async=True)


@gluon.jit
def start_scores(q_tile, keys, index, T: gl.constexpr):
    """Starts the product q·k [64, block_n] with block `index` of the pipeline of keys."""
    BLOCK_N: gl.constexpr = T.block_n
    NUM_PARTS: gl.constexpr = len(T.key_parts)
    SCORES: gl.constexpr = T.scores
    scores = gl.zeros([WARPGROUP_ROWS, BLOCK_N], gl.float32, SCORES)
    if NUM_PARTS == 1:
        k_tile = keys.tiles.index(index % T.num_stages)
        scores = warpgroup_mma(q_tile, k_tile.permute((1, 0)), scores, use_acc=False, is_async=True)
    else:
        for i in gl.static_range(NUM_PARTS):
            scores = _add_part(scores, q_tile, keys, index, i, T)
    return scores


@gluon.jit
def add_values(acc, p, values, index, T: gl.constexpr):
    """Starts to add the products of p and block `index` of the pipeline of values to the parts of acc."""
    NUM_PARTS: gl.constexpr = len(T.value_parts)
    stage = index % T.num_stages
    sums: gl.tuple = ()
    for i in gl.static_range(NUM_PARTS):
        v_tile = values.tiles.index(stage) if NUM_PARTS == 1 else values.tiles[i].index(stage)
        sums += (warpgroup_mma(p, v_tile, acc[i], is_async=True),)
    return sums


@gluon.jit
def no_output(PART: gl.constexpr, T: gl.constexpr):
    WIDTH: gl.constexpr = T.value_parts[PART].width
    ACC: gl.constexpr = T.acc
    return gl.zeros([WARPGROUP_ROWS, WIDTH], gl.float32, ACC)


@gluon.jit
def attend_first_block(
    q_tile, kv, index, has_next, scale, mask_fn: gl.constexpr, mask_args, C: gl.constexpr, T: gl.constexpr
):
    """Computes the scores of an item's first block, which is always masked, and returns the state after it. It is block
    `index` of the pipelines."""
    ACC: gl.constexpr = T.acc
    NUM_PARTS: gl.constexpr = len(T.value_parts)
    consumer_wait(kv.k, index, T)
    scores = start_scores(q_tile, kv.k, index, T)
    if T.mask_ahead:
        mask = mask_fn(mask_args, C, T)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    consumer_release(index, T.k_empty, T)
    if not T.mask_ahead:
        mask = mask_fn(mask_args, C, T)
    row_max = gl.full([WARPGROUP_ROWS], NEG_INF, gl.float32, gl.SliceLayout(1, T.scores))
    row_sum = gl.zeros([WARPGROUP_ROWS], gl.float32, gl.SliceLayout(1, T.scores))
    p, _, row_max, row_sum = softmax_step(row_max, row_sum, scores, scale, mask, True, C.soft_cap)
    p = gl.convert_layout(p.to(part_of(q_tile, 0, T).dtype), gl.DotOperandLayout(0, ACC, 2))
    acc: gl.tuple = ()
    for i in gl.static_range(NUM_PARTS):
        acc += (no_output(i, T),)
    consumer_wait(kv.k, index + 1, T, has_next)
    return AttentionState(row_max, row_sum, p, acc)


@gluon.jit
def attend_block(
    state, q_tile, kv, index, has_next, scale, mask_fn: gl.constexpr, mask_args, C: gl.constexpr, T: gl.constexpr
):
    """Adds block `index`, whose keys have been written. `mask_fn` is None if every row sees every key.

    The wait for the keys of the next block comes before the wait for acc. Its branch keeps ptxas from moving the
    softmax behind the wait for acc."""
    scores = start_scores(q_tile, kv.k, index, T)  # S = Q·Kᵀ
    MASK: gl.constexpr = mask_fn is not None
    mask = 0
    if MASK and T.mask_ahead:
        mask = mask_fn(mask_args, C, T)
    consumer_wait(kv.v, index - 1, T)
    NUM_PARTS: gl.constexpr = len(T.value_parts)
    acc = add_values(state.acc, state.p, kv.v, index - 1, T)  # O += P·V
    scores = warpgroup_mma_wait(NUM_PARTS, deps=(scores,))
    consumer_release(index, T.k_empty, T)
    if MASK and not T.mask_ahead:
        mask = mask_fn(mask_args, C, T)
    row_max, row_sum = state.row_max, state.row_sum
    p, rescale, row_max, row_sum = softmax_step(row_max, row_sum, scores, scale, mask, MASK, C.soft_cap)
    p = gl.convert_layout(p.to(state.p.dtype), gl.DotOperandLayout(0, T.acc, 2))
    consumer_wait(kv.k, index + 1, T, has_next)
    acc += (state.p, p)
    done = warpgroup_mma_wait(0, deps=acc)
    consumer_release(index - 1, T.v_empty, T)
    return AttentionState(row_max, row_sum, done[NUM_PARTS + 1], times_rows(done[:NUM_PARTS], rescale, T))


@gluon.jit
def finish_attention(state, kv, index, T: gl.constexpr):
    """Adds the values of an item's last block, which is the one before block `index`. Returns the parts of the outputs,
    and lse."""
    consumer_wait(kv.v, index - 1, T)
    NUM_PARTS: gl.constexpr = len(T.value_parts)
    acc = add_values(state.acc, state.p, kv.v, index - 1, T)  # O += P·V
    acc += (state.p,)
    acc = warpgroup_mma_wait(0, deps=acc)[:NUM_PARTS]
    consumer_release(index - 1, T.v_empty, T)
    inverse_sum, lse = finalize(state.row_max, state.row_sum)
    return times_rows(acc, inverse_sum, T), _to_acc_layout(lse, T)


@gluon.jit
def times_rows(parts, factor, T: gl.constexpr):
    """Returns the parts of outputs, with each row multiplied by its factor."""
    factor = _to_acc_layout(factor, T)[:, None]
    products: gl.tuple = ()
    for i in gl.static_range(len(T.value_parts)):
        products += (parts[i] * factor,)
    return products


@gluon.jit
def _to_acc_layout(rows, T: gl.constexpr):
    """Converts a number of each row to the layout of the output. Both layouts give a thread the same rows, so no data
    moves."""
    return gl.convert_layout(rows, gl.SliceLayout(1, T.acc))


@gluon.jit
def to_scores_layout(rows, T: gl.constexpr):
    """Converts a number of each row to the layout of the scores. This is the inverse of `_to_acc_layout`, and as
    cheap."""
    return gl.convert_layout(rows, gl.SliceLayout(1, T.scores))


@gluon.jit
def sink_divisor(lse, sinks, used):
    """Returns the divisor of the outputs of rows with sinks. A sink is one more logit that has no value."""
    sink = gl.load(sinks, mask=used, other=0.0)
    return 1.0 + gl.exp2((sink - lse) * _LOG2_E)
