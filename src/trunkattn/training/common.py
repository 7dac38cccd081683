"""What the training kernels share: sequences, arguments by name, tiles in memory, and which queries a CTA computes."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from trunkattn.numerics import LOG2_E, padded_head_dim
from trunkattn.training.spec import FlashTile


@dataclass(frozen=True)
class Sequences:
    """What is attended to. cu_seqlens_q, cu_seqlens_k [num_sequences + 1] int32 of packed tensors, else None."""

    causal: bool
    sm_scale: float
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None

    @property
    def packed(self) -> bool:
        """Whether tensors are [tokens, heads, head_dim] instead of [batch, tokens, heads, head_dim]."""
        return self.cu_seqlens_q is not None

    def blocks(self, cu_seqlens: torch.Tensor | None, tokens: int, block: int) -> int:
        """The blocks of each sequence of a batch, or of all packed ones (see `find_sequence`), for one head."""
        if cu_seqlens is None:
            return -(-tokens // block)
        return tokens // block + len(cu_seqlens) - 1 if len(cu_seqlens) > 1 else 0


class Strides(NamedTuple):
    """Strides of q, k and v, in elements; the head dimension is contiguous. All other tensors are contiguous."""

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
    """The sequences. cu_seqlens_q and cu_seqlens_k are None if they are not packed. seqlen_q, seqlen_k: tokens of the
    tensors. num_blocks: of each head; a CTA computes one."""

    cu_seqlens_q: Any
    cu_seqlens_k: Any
    num_sequences: Any
    seqlen_q: Any
    seqlen_k: Any
    num_qo_heads: Any
    num_blocks: Any


class Shape(NamedTuple):
    """Constants of an attention. precision: of matrix products of float32."""

    group_size: int
    head_dim: int
    padded_dim: int
    precision: str


class Variant(NamedTuple):
    """Constants that turn code on. even_k: every block of keys is full."""

    causal: bool
    packed: bool
    even_k: bool


class Scales(NamedTuple):
    """Scales of the logits in the backward pass: log2 is sm_scale · log2(e)."""

    log2: Any
    sm_scale: Any


class Keys(NamedTuple):
    """Keys and values of one head of a sequence: where they begin, the stride of a token, and the number of tokens."""

    k: Any
    v: Any
    k_token: Any
    v_token: Any
    length: Any


class QueryBlock(NamedTuple):
    """A block of queries of one head: `first` of its sequence, which begins at token `begin` of the tensors and has
    `length` tokens. q: where the queries of the sequence begin."""

    q: Any
    first: Any
    head: Any
    batch: Any
    begin: Any
    length: Any


@triton.jit
def find_sequence(block, cu_seqlens, num_sequences, BLOCK: tl.constexpr):
    """The packed sequence of a block, and the block's number in it. Sequence i has the blocks from
    cu_seqlens[i] // BLOCK + i on: as many as it needs, at times one more."""
    low, high = 0, num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        starts = tl.load(cu_seqlens + middle) // BLOCK + middle <= block
        low, high = tl.where(starts, middle, low), tl.where(starts, high, middle)
    number = block - tl.load(cu_seqlens + low) // BLOCK - low
    return low, tl.minimum(tl.maximum(number, 0), block)  # whatever cu_seqlens holds


@triton.jit
def span(cu_seqlens, sequence, tokens):
    """First token and length of a packed sequence; never outside the tensor, whatever cu_seqlens holds."""
    begin = tl.minimum(tl.maximum(tl.load(cu_seqlens + sequence), 0), tokens)
    end = tl.minimum(tl.maximum(tl.load(cu_seqlens + sequence + 1), begin), tokens)
    return begin.to(tl.int64), end - begin


@triton.jit
def load_tile(base, first, stride, end, BLOCK: tl.constexpr, SHAPE: tl.constexpr, MASK_ROWS: tl.constexpr):
    """Rows [first, first + BLOCK) of a head, 0 from row `end` on. It masks only what needs a mask."""
    rows, columns = tl.arange(0, BLOCK)[:, None], tl.arange(0, SHAPE.padded_dim)[None, :]
    pointers = base + tl.cast(first, tl.int64) * stride + rows * stride + columns
    if MASK_ROWS:
        return tl.load(pointers, mask=(first + rows < end) & (columns < SHAPE.head_dim), other=0.0)
    elif SHAPE.head_dim != SHAPE.padded_dim:
        return tl.load(pointers, mask=(rows >= 0) & (columns < SHAPE.head_dim), other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def store_tile(base, first, stride, end, tile, SHAPE: tl.constexpr):
    """Rows [first, end) of a tile that begins at row `first`."""
    rows, columns = tl.arange(0, tile.shape[0])[:, None], tl.arange(0, SHAPE.padded_dim)[None, :]
    pointers = base + tl.cast(first, tl.int64) * stride + rows * stride + columns
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=(first + rows < end) & (columns < SHAPE.head_dim))


@triton.jit
def visible_keys(first, len_q, len_k, TILE: tl.constexpr, CAUSAL: tl.constexpr):
    """Returns two ends of keys, for a block of queries from `first` on. All of its queries see all keys before the
    first end, in whole blocks; none sees a key behind the second. The last query sees the last key."""
    full, end = len_k, len_k
    if CAUSAL:
        full = tl.minimum(tl.maximum(first + len_k - len_q + 1, 0), len_k)
        end = tl.minimum(tl.maximum(first + len_k - len_q + TILE.block_m, 0), len_k)
    some = first < len_q
    return tl.where(some, full // TILE.block_n * TILE.block_n, 0), tl.where(some, end, 0)


@triton.jit
def visible(keys, first, position, TILE: tl.constexpr, CAUSAL: tl.constexpr):
    """The mask [M, N] of a block of keys from `first` on. position [M]: of the last key that each query sees."""
    n = first + tl.arange(0, TILE.block_n)[None, :]
    seen = n < keys.length
    if CAUSAL:
        seen = seen & (n <= position[:, None])
    return seen


@triton.jit
def find_queries(
    q, k, v, batch: Batch, strides: Strides, SHAPE: tl.constexpr, TILE: tl.constexpr, VARIANT: tl.constexpr
):
    """The queries of a CTA (batch, head, block), block fastest, so that CTAs that run at the same time share keys in
    the L2 cache; and their keys. Causal blocks go from the last, which sees most."""
    block, other = tl.program_id(0) % batch.num_blocks, tl.program_id(0) // batch.num_blocks
    head, row = (other % batch.num_qo_heads).to(tl.int64), (other // batch.num_qo_heads).to(tl.int64)
    begin_q, begin_k, len_q, len_k = 0, 0, batch.seqlen_q, batch.seqlen_k
    if VARIANT.causal:
        block = batch.num_blocks - 1 - block
    if VARIANT.packed:
        sequence, block = find_sequence(block, batch.cu_seqlens_q, batch.num_sequences, TILE.block_m)
        begin_q, len_q = span(batch.cu_seqlens_q, sequence, batch.seqlen_q)
        begin_k, len_k = span(batch.cu_seqlens_k, sequence, batch.seqlen_k)
    q_head = q + row * strides.q_batch + begin_q * strides.q_token + head * strides.q_head
    kv_head = head // SHAPE.group_size
    k_head = k + row * strides.k_batch + begin_k * strides.k_token + kv_head * strides.k_head
    v_head = v + row * strides.v_batch + begin_k * strides.v_token + kv_head * strides.v_head
    queries = QueryBlock(q_head, block * TILE.block_m, head, row, begin_q, len_q)
    return queries, Keys(k_head, v_head, strides.k_token, strides.v_token, len_k)


class Arguments(NamedTuple):
    """What the launches of all passes have in common; scale: sm_scale · log2(e)."""

    batch: Batch
    scale: float
    strides: Strides
    shape: Shape
    variant: Variant


def arguments(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences, tile: FlashTile, num_blocks: int
) -> Arguments:
    """Returns the arguments of the kernels for q, k and v with a batch dimension."""
    seqlen_q, seqlen_k, packed = q.shape[1], k.shape[1], sequences.packed
    num_sequences = 0 if sequences.cu_seqlens_q is None else len(sequences.cu_seqlens_q) - 1
    return Arguments(
        Batch(
            sequences.cu_seqlens_q, sequences.cu_seqlens_k, num_sequences, seqlen_q, seqlen_k, q.shape[2], num_blocks
        ),
        sequences.sm_scale * LOG2_E,
        Strides(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]),
        attention_shape(q.shape[2] // k.shape[2], q.shape[3], q.dtype),
        Variant(sequences.causal, packed, even_k=not packed and seqlen_k % tile.block_n == 0),
    )


def attention_shape(group_size: int, head_dim: int, dtype: torch.dtype) -> Shape:
    """The constants of an attention."""
    return Shape(group_size, head_dim, padded_head_dim(head_dim), "ieee" if dtype == torch.float32 else "tf32")


def with_batch(tensor: torch.Tensor, sequences: Sequences) -> torch.Tensor:
    """[batch, tokens, heads, head_dim] with a contiguous last dimension; packed tensors are a batch of one."""
    tensor = tensor if tensor.stride(-1) == 1 else tensor.contiguous()
    return tensor.unsqueeze(0) if sequences.packed else tensor
