"""Parts that the training kernels share: named arguments, tiles in memory, visible keys, and the queries of a CTA."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from trunkattn.gpu.bound import BoundLaunch, Grid
from trunkattn.gpu.portable.online_softmax import LOG2_E, soft_capped
from trunkattn.numerics import GPU_OFFSET_END, padded_head_dim
from trunkattn.training.sequences import LARGEST_BLOCK, Sequences, TreeTables
from trunkattn.training.spec import FlashTile


class Strides(NamedTuple):
    """Strides of q, k and v, in elements. The head dimension is contiguous, and so are all other tensors."""

    q_batch: Any
    q_token: Any
    q_head: Any
    k_batch: Any
    k_token: Any
    k_head: Any
    v_batch: Any
    v_token: Any
    v_head: Any


class Batch(NamedTuple):
    """The sequences of a launch. `cu_seqlens_q` and `cu_seqlens_k` are None unless sequences are packed. The tables of
    a tree (see `TreeTables`) are None without one. `window` is `sliding_window`, or `UNLIMITED`. `seqlen_q` and
    `seqlen_k` count the tokens of the tensors. Each head has `num_blocks` blocks, and a CTA computes one of them."""

    cu_seqlens_q: Any
    cu_seqlens_k: Any
    subtree_end: Any
    depths: Any
    segment_of: Any
    segments: Any
    window: Any
    num_sequences: Any
    seqlen_q: Any
    seqlen_k: Any
    num_qo_heads: Any
    num_blocks: Any


class Width(NamedTuple):
    """The elements of a key or a value of one head, and those of the tile that holds them."""

    dim: int
    padded: int


class Shape(NamedTuple):
    """Constants of an attention. `keys` is the width of queries and keys. `precision` is that of matrix products of
    float32."""

    group_size: int
    keys: Width
    head_values: Width
    precision: str


class Variant(NamedTuple):
    """Constants that turn code on. `even_q` and `even_k` say that every block of queries, or of keys, is full. With
    `one_pass` the kernel for the gradients of keys also adds to dq."""

    causal: bool
    packed: bool
    tree: bool
    window: bool
    soft_cap: bool
    sinks: bool
    even_q: bool
    even_k: bool
    one_pass: bool = False


class Scales(NamedTuple):
    """Scales of the logits. `log2` is sm_scale · log2(e). `soft_cap` is the largest logit, or 0."""

    log2: Any
    sm_scale: Any
    soft_cap: Any


class Keys(NamedTuple):
    """Keys and values of one head of a sequence. The fields are pointers to the first ones, the strides of a token, and
    the number of tokens."""

    k: Any
    v: Any
    k_token: Any
    v_token: Any
    length: Any


class QueryBlock(NamedTuple):
    """A block of queries of one head. `first` is its first query, counted in its sequence, and `q` points to the
    sequence's first query. The sequence begins at token `begin` of the tensors and has `length` tokens."""

    q: Any
    first: Any
    head: Any
    batch: Any
    begin: Any
    length: Any


class Rows(NamedTuple):
    """The numbers [M] that decide which keys each query of a block sees. `position` is its place among the keys.
    `depth` is the number of keys before it on its path, which in a tree differs from its place. It is set only if there
    is a window."""

    position: Any
    depth: Any


class Depths(NamedTuple):
    """The least and the largest depth of a block of queries in a tree. They are set only if there is a window."""

    least: Any
    largest: Any


class Ranges(NamedTuple):
    """A range of keys, or of queries, in whole blocks. Blocks before full_begin and from full_end on need a mask."""

    begin: Any
    full_begin: Any
    full_end: Any
    end: Any


@triton.jit
def find_sequence(block, cu_seqlens, num_sequences, BLOCK: tl.constexpr):
    """Returns the sequence of a block of packed sequences, and the number of the block in it. The blocks of sequence i
    begin at number cu_seqlens[i] // BLOCK + i. There are as many as it needs, and sometimes one more."""
    low, high = 0, num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        starts = tl.load(cu_seqlens + middle) // BLOCK + middle <= block
        low, high = tl.where(starts, middle, low), tl.where(starts, high, middle)
    number = block - tl.load(cu_seqlens + low) // BLOCK - low
    return low, tl.minimum(tl.maximum(number, 0), block)  # whatever cu_seqlens holds


@triton.jit
def sequence_range(cu_seqlens, sequence, tokens):
    """Returns the first token and the length of a packed sequence. Both are clamped to the `tokens` of the tensor,
    whatever cu_seqlens holds. The first token is int64, so that offsets computed from it do not overflow."""
    begin = tl.minimum(tl.maximum(tl.load(cu_seqlens + sequence), 0), tokens)
    end = tl.minimum(tl.maximum(tl.load(cu_seqlens + sequence + 1), begin), tokens)
    return begin.to(tl.int64), end - begin


@triton.jit
def sequence_range_32(cu_seqlens, sequence, tokens):
    """Returns the same as `sequence_range`, in int32 as TMA's coordinates are."""
    begin, length = sequence_range(cu_seqlens, sequence, tokens)
    return begin.to(tl.int32), length.to(tl.int32)


@triton.jit
def load_tile(base, first, stride, end, BLOCK: tl.constexpr, WIDTH: tl.constexpr, MASK_ROWS: tl.constexpr):
    """Loads rows [first, first + BLOCK) of a head, which are 0 from row `end` on. It masks only if necessary."""
    rows, columns = tl.arange(0, BLOCK)[:, None], tl.arange(0, WIDTH.padded)[None, :]
    pointers = base + tl.cast(first, tl.int64) * stride + rows * stride + columns
    if MASK_ROWS:
        return tl.load(pointers, mask=(first + rows < end) & (columns < WIDTH.dim), other=0.0)
    elif WIDTH.dim != WIDTH.padded:
        return tl.load(pointers, mask=(rows >= 0) & (columns < WIDTH.dim), other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def store_tile(base, first, stride, end, tile, WIDTH: tl.constexpr):
    """Stores rows [first, end) of a tile that begins at row `first`."""
    rows, columns = tl.arange(0, tile.shape[0])[:, None], tl.arange(0, WIDTH.padded)[None, :]
    pointers = base + tl.cast(first, tl.int64) * stride + rows * stride + columns
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=(first + rows < end) & (columns < WIDTH.dim))


@triton.jit
def sees(batch, n, length, position, depth, VARIANT: tl.constexpr):
    """Returns whether queries see keys `n` of a sequence of `length` tokens. `position` and `depth`, which `Rows`
    explains, broadcast with `n`."""
    seen = n < length
    if VARIANT.causal:
        seen = seen & (n <= position)
    key_depth = n
    if VARIANT.tree:
        seen = seen & (position < tl.load(batch.subtree_end + n, mask=n < length, other=0))
        if VARIANT.window:
            key_depth = tl.load(batch.depths + n, mask=n < length, other=0)
    if VARIANT.window:
        seen = seen & (depth - key_depth < batch.window)
        if not VARIANT.causal:
            seen = seen & (key_depth - depth < batch.window)
    return seen


@triton.jit
def logits_of(scores, scales, VARIANT: tl.constexpr):
    """Returns the logits of products of queries and keys, in base 2."""
    if VARIANT.soft_cap:
        return soft_capped(scores * scales.sm_scale, scales.soft_cap)
    else:
        return scores * scales.log2


@triton.jit
def through_cap(ds, logits, scales, VARIANT: tl.constexpr):
    """Returns the gradients of uncapped logits, from those of capped ones, because tanh' = 1 - tanh²."""
    if VARIANT.soft_cap:
        tanh = logits / (scales.soft_cap * LOG2_E)
        return ds * (1.0 - tanh * tanh)
    else:
        return ds


@triton.jit
def row_places(batch, m, length, len_k, VARIANT: tl.constexpr):
    """Returns the `Rows` of queries `m` of a sequence of `length` queries and `len_k` keys. The last query sees the
    last key."""
    position = m + (len_k - length)
    depth = position
    if VARIANT.tree and VARIANT.window:
        depth = tl.load(batch.depths + m, mask=m < length, other=0)
    return Rows(position, depth)


@triton.jit
def depths_of(rows, m, length, VARIANT: tl.constexpr):
    """Returns the `Depths` of queries `m` of a tree of `length` tokens."""
    if VARIANT.window:
        return Depths(tl.min(tl.where(m < length, rows.depth, 2147483647)), tl.max(rows.depth))
    else:
        return Depths(0, 0)


@triton.jit
def visible_keys(batch, first, len_q, len_k, TILE: tl.constexpr, VARIANT: tl.constexpr):
    """Returns the `Ranges` of the keys that a block of queries from `first` on sees if there is no tree."""
    BLOCK_N: tl.constexpr = TILE.block_n
    begin, full_begin, full_end, end = 0, 0, len_k, len_k
    last_seen = first + len_k - len_q  # by the first query
    if VARIANT.window:
        begin = tl.minimum(tl.maximum(last_seen + 1 - batch.window, 0), len_k) // BLOCK_N * BLOCK_N
        full_begin = tl.cdiv(tl.maximum(last_seen + TILE.block_m - batch.window, 0), BLOCK_N) * BLOCK_N
        if not VARIANT.causal:
            last_seen = last_seen + batch.window - 1
    if VARIANT.causal or VARIANT.window:
        full_end = tl.minimum(tl.maximum(last_seen + 1, 0), len_k)
        end = tl.minimum(tl.maximum(last_seen + TILE.block_m, 0), len_k)
    full_end = full_end // BLOCK_N * BLOCK_N
    if VARIANT.window:
        no_full = full_begin >= full_end
        full_begin, full_end = tl.where(no_full, begin, full_begin), tl.where(no_full, begin, full_end)
    some = first < len_q
    return Ranges(begin, full_begin, tl.where(some, full_end, begin), tl.where(some, end, begin))


@triton.jit
def masked_blocks(ranges, TILE: tl.constexpr):
    """Returns the number of blocks of keys that need a mask."""
    before, behind = ranges.full_begin - ranges.begin, tl.maximum(ranges.end - ranges.full_end, 0)
    return tl.cdiv(before, TILE.block_n) + tl.cdiv(behind, TILE.block_n)


@triton.jit
def masked_block(ranges, number, TILE: tl.constexpr):
    """Returns the first key of the masked block with this number."""
    at = ranges.begin + number * TILE.block_n
    return tl.where(at < ranges.full_begin, at, at - ranges.full_begin + ranges.full_end)


@triton.jit
def own_segment(batch, first, length, TILE: tl.constexpr):
    """Returns the keys of a tree's query block itself, as `Ranges`, and its segment."""
    begin = first // TILE.block_n * TILE.block_n
    end = tl.minimum(first + TILE.block_m, length)
    return Ranges(begin, begin, begin, end), tl.load(batch.segment_of + first)


@triton.jit
def path_keys(batch, segment, top, first, depths, length, TILE: tl.constexpr, VARIANT: tl.constexpr):
    """Returns the `Ranges` of the keys of one segment above a block of queries, and the segment's parent. `depths` are
    those of the block, see `depths_of`.

    Keys from `top` on are done. All keys that the block sees outside of itself are ancestors of its first query,
    because they come before it in pre-order and their subtrees end after it.
    """
    BLOCK_N: tl.constexpr = TILE.block_n
    segment = tl.maximum(segment, 0)
    start = tl.load(batch.segments + 4 * segment)
    end = tl.minimum(tl.load(batch.segments + 4 * segment + 1), top)
    parent = tl.load(batch.segments + 4 * segment + 2)
    low, full_low = start, start
    if VARIANT.window:
        at_depth_0 = start - tl.load(batch.depths + start)  # the number of a key of depth 0, were it in this segment
        low = tl.maximum(start, at_depth_0 + depths.least + 1 - batch.window)
        full_low = tl.maximum(start, at_depth_0 + depths.largest + 1 - batch.window)
    begin = low // BLOCK_N * BLOCK_N
    end = tl.where(end > low, end, begin)
    full_begin, full_end = tl.cdiv(full_low, BLOCK_N) * BLOCK_N, end // BLOCK_N * BLOCK_N
    all_see = tl.load(batch.subtree_end + start) >= tl.minimum(first + TILE.block_m, length)
    some = all_see & (full_begin < full_end)
    return Ranges(begin, tl.where(some, full_begin, begin), tl.where(some, full_end, begin), end), parent


@triton.jit
def find_queries(
    q, k, v, batch: Batch, strides: Strides, SHAPE: tl.constexpr, TILE: tl.constexpr, VARIANT: tl.constexpr
):
    """Returns the queries of a CTA, and their keys. CTAs are (batch, head, block) with the block as the fastest index,
    so that CTAs that run at the same time share keys in the L2 cache. Causal blocks begin with the last, which sees
    most keys."""
    block, other = tl.program_id(0) % batch.num_blocks, tl.program_id(0) // batch.num_blocks
    head, row = (other % batch.num_qo_heads).to(tl.int64), (other // batch.num_qo_heads).to(tl.int64)
    begin_q, begin_k, len_q, len_k = 0, 0, batch.seqlen_q, batch.seqlen_k
    if VARIANT.causal:
        block = batch.num_blocks - 1 - block
    if VARIANT.packed:
        sequence, block = find_sequence(block, batch.cu_seqlens_q, batch.num_sequences, TILE.block_m)
        begin_q, len_q = sequence_range(batch.cu_seqlens_q, sequence, batch.seqlen_q)
        begin_k, len_k = sequence_range(batch.cu_seqlens_k, sequence, batch.seqlen_k)
    q_head = q + row * strides.q_batch + begin_q * strides.q_token + head * strides.q_head
    kv_head = head // SHAPE.group_size
    k_head = k + row * strides.k_batch + begin_k * strides.k_token + kv_head * strides.k_head
    v_head = v + row * strides.v_batch + begin_k * strides.v_token + kv_head * strides.v_head
    queries = QueryBlock(q=q_head, first=block * TILE.block_m, head=head, batch=row, begin=begin_q, length=len_q)
    return queries, Keys(k_head, v_head, strides.k_token, strides.v_token, len_k)


class Arguments(NamedTuple):
    """What the launches of all passes have in common."""

    batch: Batch
    scales: Scales
    strides: Strides
    shape: Shape
    variant: Variant


def arguments(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences, tile: FlashTile, num_blocks: int
) -> Arguments:
    """Returns the arguments of the kernels for q, k and v with a batch dimension, without tables."""
    seqlen_q, seqlen_k, packed = q.shape[1], k.shape[1], sequences.packed
    num_sequences = 0 if sequences.cu_seqlens_q is None else len(sequences.cu_seqlens_q) - 1
    return Arguments(
        Batch(
            **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", *TreeTables._fields)),
            window=sequences.window_within(seqlen_q + seqlen_k),
            num_sequences=num_sequences,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            num_qo_heads=q.shape[2],
            num_blocks=num_blocks,
        ),
        Scales(sequences.sm_scale * LOG2_E.value, sequences.sm_scale, sequences.soft_cap or 0.0),
        Strides(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]),
        attention_shape(q.shape[2] // k.shape[2], (q.shape[3], v.shape[3]), q.dtype),
        Variant(
            causal=sequences.causal,
            packed=packed,
            tree=sequences.tree is not None,
            window=sequences.sliding_window is not None,
            soft_cap=sequences.soft_cap is not None,
            sinks=sequences.sinks is not None,
            even_q=not packed and seqlen_q % tile.block_m == 0,
            even_k=not packed and seqlen_k % tile.block_n == 0,
        ),
    )


def bind_pass(kernel: Any, num_ctas: int, given: Arguments, tile: FlashTile, variant: Variant) -> BoundLaunch:
    """Returns the launch of a kernel of a pass. A call brings the tensors and the batch."""
    fixed = {
        "scales": given.scales,
        "strides": given.strides,
        "SHAPE": given.shape,
        "TILE": tile,
        "VARIANT": variant,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    return BoundLaunch(kernel, Grid(num_ctas, fixed), ("tensors", "batch"))


def with_tables(batch: Batch, sequences: Sequences) -> Batch:
    """Returns the batch with the tables of the sequences."""
    if sequences.tree is not None:
        return batch._replace(**sequences.tree._asdict())
    if sequences.packed:
        return batch._replace(cu_seqlens_q=sequences.cu_seqlens_q, cu_seqlens_k=sequences.cu_seqlens_k)
    return batch


def attention_shape(group_size: int, head_dims: tuple[int, int], dtype: torch.dtype) -> Shape:
    """Returns the constants of an attention. `head_dims` are those of keys and of values."""
    keys, values = (Width(head_dim, padded_head_dim(head_dim)) for head_dim in head_dims)
    return Shape(group_size, keys, values, "ieee" if dtype == torch.float32 else "tf32")


def readable(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Returns the tensors [..., tokens, heads, head_dim], or contiguous copies of those that kernels do not read: whose
    last dimension is not contiguous, or whose tokens lie so far apart that a block of them reaches
    `GPU_OFFSET_END`."""
    return [tensor if _is_readable(*tensor.stride()[-3:]) else tensor.contiguous() for tensor in tensors]


def _is_readable(of_token: int, _: int, of_dim: int) -> bool:
    return of_dim == 1 and of_token * LARGEST_BLOCK < GPU_OFFSET_END


def contiguous_or_none(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Returns the tensor or a contiguous copy, if there is one."""
    return None if tensor is None else tensor.contiguous()


def with_batch(tensor: torch.Tensor, sequences: Sequences) -> torch.Tensor:
    """Returns the tensor as [batch, tokens, heads, head_dim]. Packed tensors and trees are a batch of 1."""
    return tensor if sequences.has_batch else tensor.unsqueeze(0)
