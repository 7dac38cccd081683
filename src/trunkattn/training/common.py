"""Parts that the training kernels share: packed sequences, tiles in memory, logits, and the queries of a CTA."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from trunkattn.gpu.portable.online_softmax import LOG2_E, soft_capped
from trunkattn.training.arguments import Batch, Strides


class Keys(NamedTuple):
    """Keys and values of one head of a sequence. The fields are pointers to the first ones, the strides of a token, and
    the number of tokens."""

    k: Any
    v: Any
    k_token: Any
    v_token: Any
    length: Any


class SequenceTokens(NamedTuple):
    """The tokens of a sequence in the tensors: where its queries and its keys begin, and how many they are."""

    begin_q: Any
    begin_k: Any
    len_q: Any
    len_k: Any


class QueryBlock(NamedTuple):
    """A block of queries of one head. `first` is its first query, counted in its sequence, and `q` points to the
    sequence's first query. The sequence begins at token `begin` of the tensors and has `length` tokens."""

    q: Any
    first: Any
    head: Any
    batch: Any
    begin: Any
    length: Any


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
def find_tokens(batch, numbers, block, cu_seqlens, BLOCK: tl.constexpr, VARIANT: tl.constexpr):
    """Returns the `SequenceTokens` of a block of `BLOCK` tokens, and its number in the sequence. `cu_seqlens` is
    the one of `batch` that counts these tokens."""
    begin_q, begin_k, len_q, len_k = 0, 0, numbers.seqlen_q, numbers.seqlen_k
    if VARIANT.packed:
        sequence, block = find_sequence(block, cu_seqlens, numbers.num_sequences, BLOCK)
        begin_q, len_q = sequence_range(batch.cu_seqlens_q, sequence, numbers.seqlen_q)
        begin_k, len_k = sequence_range(batch.cu_seqlens_k, sequence, numbers.seqlen_k)
    return SequenceTokens(begin_q, begin_k, len_q, len_k), block


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
def find_queries(
    q, k, v, batch: Batch, numbers, strides: Strides, SHAPE: tl.constexpr, TILE: tl.constexpr, VARIANT: tl.constexpr
):
    """Returns the queries of a CTA, and their keys. CTAs are (batch, head, block) with the block as the fastest index,
    so that CTAs that run at the same time share keys in the L2 cache. Causal blocks begin with the last, which sees
    most keys."""
    block, other = tl.program_id(0) % numbers.num_blocks, tl.program_id(0) // numbers.num_blocks
    head, row = (other % batch.num_qo_heads).to(tl.int64), (other // batch.num_qo_heads).to(tl.int64)
    if VARIANT.causal:
        block = numbers.num_blocks - 1 - block
    sequence, block = find_tokens(batch, numbers, block, batch.cu_seqlens_q, TILE.block_m, VARIANT)
    begin_q, begin_k, len_q, len_k = sequence
    q_head = q + row * strides.q_batch + begin_q * strides.q_token + head * strides.q_head
    kv_head = head // SHAPE.group_size
    k_head = k + row * strides.k_batch + begin_k * strides.k_token + kv_head * strides.k_head
    v_head = v + row * strides.v_batch + begin_k * strides.v_token + kv_head * strides.v_head
    queries = QueryBlock(q=q_head, first=block * TILE.block_m, head=head, batch=row, begin=begin_q, length=len_q)
    return queries, Keys(k_head, v_head, strides.k_token, strides.v_token, len_k)
