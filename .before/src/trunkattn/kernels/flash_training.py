"""FlashAttention for training on a GPU (lecture §5): the forward pass, and what its backward pass shares with it.

One program computes BLOCK_M queries of one head: it streams their keys and values with an online softmax and stores
outputs and log-sum-exps, never the scores. Keys that all its queries see come first and need no mask. Sequences are
equally long ones of a batch, or packed one after the other; then a program looks up which of them its block is of.
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl

_NOTHING = tl.constexpr(-1e30)  # maximum of no logit: finite, so that differences are never NaN
_LN_2 = tl.constexpr(0.6931471805599453)
LOG2_E: Final = 1.4426950408889634


class FlashTile(NamedTuple):
    """block_m queries × block_n keys, warps of a program, and tiles in flight (stages)."""

    block_m: int
    block_n: int
    warps: int
    stages: int


# (pass, bytes of an element, head_dim up to) -> tiles, the preferred one first; a card takes the first that fits its
# shared memory. Passes: `forward`; `keys`, gradients of keys and values; `queries`, of queries; `one_pass`, of all.
# 16-bit tiles were chosen for few spills on sm_90; on an H200 at head_dim 128 they are 1.03 to 1.16 times as fast as
# PyTorch's flash backend (results/flash-training-h200.json); others were not timed. float32 has no tensor cores here.
TILES: Final = MappingProxyType(
    {
        ("forward", 2, 64): (FlashTile(128, 128, 8, 3), FlashTile(128, 64, 4, 3), FlashTile(64, 64, 4, 2)),
        ("forward", 2, 128): (FlashTile(128, 128, 8, 2), FlashTile(128, 64, 8, 3), FlashTile(64, 64, 4, 2)),
        ("forward", 2, 256): (FlashTile(128, 64, 8, 2), FlashTile(64, 32, 4, 2)),
        ("forward", 4, 64): (FlashTile(64, 32, 8, 2),),
        ("forward", 4, 128): (FlashTile(32, 32, 8, 2), FlashTile(64, 32, 8, 2)),
        ("forward", 4, 256): (FlashTile(32, 32, 8, 2), FlashTile(16, 16, 4, 2)),
        ("keys", 2, 64): (FlashTile(64, 128, 8, 2), FlashTile(64, 64, 4, 2)),
        ("keys", 2, 128): (FlashTile(64, 128, 8, 2), FlashTile(32, 128, 8, 2), FlashTile(32, 64, 4, 2)),
        ("keys", 2, 256): (FlashTile(32, 64, 8, 2), FlashTile(16, 64, 8, 2), FlashTile(16, 32, 4, 2)),
        ("keys", 4, 64): (FlashTile(32, 32, 8, 2),),
        ("keys", 4, 128): (FlashTile(16, 32, 8, 2), FlashTile(32, 32, 8, 2)),
        ("keys", 4, 256): (FlashTile(16, 16, 8, 2),),
        ("queries", 2, 64): (FlashTile(128, 64, 8, 3), FlashTile(64, 64, 4, 2)),
        ("queries", 2, 128): (FlashTile(128, 64, 8, 2), FlashTile(64, 64, 4, 2), FlashTile(64, 32, 4, 2)),
        ("queries", 2, 256): (FlashTile(64, 32, 8, 2), FlashTile(32, 16, 4, 2)),
        ("queries", 4, 64): (FlashTile(32, 32, 8, 2),),
        ("queries", 4, 128): (FlashTile(32, 32, 8, 2), FlashTile(32, 16, 8, 2)),
        ("queries", 4, 256): (FlashTile(16, 16, 8, 2),),
        ("one_pass", 2, 64): (FlashTile(64, 128, 8, 2), FlashTile(64, 64, 4, 2)),
        ("one_pass", 2, 128): (FlashTile(64, 128, 8, 2), FlashTile(32, 128, 8, 2), FlashTile(32, 64, 8, 2)),
        ("one_pass", 2, 256): (FlashTile(32, 64, 8, 2), FlashTile(16, 64, 8, 2), FlashTile(16, 32, 4, 2)),
        ("one_pass", 4, 64): (FlashTile(32, 32, 8, 2),),
        ("one_pass", 4, 128): (FlashTile(16, 32, 8, 2), FlashTile(32, 32, 8, 2)),
        ("one_pass", 4, 256): (FlashTile(16, 16, 8, 2), FlashTile(16, 16, 8, 1)),
    }
)


# From sm_100 on, products stand in tensor memory. Pass, padded head_dim and tile that need 576 of its 512 columns: such
# a kernel compiles to a trap.
_OVER_TENSOR_MEMORY: Final = ("one_pass", 128, FlashTile(64, 128, 8, 2))


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
        """Of one head: the blocks of each sequence of a batch, or of all packed ones (see `find_sequence`)."""
        if cu_seqlens is None:
            return -(-tokens // block)
        return tokens // block + len(cu_seqlens) - 1 if len(cu_seqlens) > 1 else 0


def padded(head_dim: int) -> int:
    """The power of two that holds a head."""
    return max(16, 1 << (head_dim - 1).bit_length())


def candidates(name: str, head_dim: int, itemsize: int) -> tuple[FlashTile, ...]:
    """The tiles of a pass for heads of up to 256 elements of 2 or 4 bytes, the preferred one first."""
    return TILES[name, itemsize, max(64, padded(head_dim))]


def shared_bytes(name: str, tile: FlashTile, head_dim: int, itemsize: int) -> int:
    """About what a program needs: its own rows and those in flight; in backward passes tiles in other layouts, of
    weights and, where dq is added to memory, of that in float32 and of keys."""
    m, n, row = tile.block_m, tile.block_n, padded(head_dim) * itemsize
    if name == "forward":
        return (m + 2 * tile.stages * n) * row
    own, streamed = (m, n) if name == "queries" else (n, m)
    needed, weights = 2 * (own + tile.stages * streamed) * row + 1024, 4 * m * n
    return needed + (4 * m * padded(head_dim) + max(weights, own * row) if name == "one_pass" else weights)


def fitting_tile(name: str, head_dim: int, itemsize: int, limit: int, tensor_memory: bool) -> FlashTile:
    """The first candidate within `limit` bytes of shared memory, and the columns of tensor memory if the card has it;
    or the last, the smallest."""
    tiles = [
        tile
        for tile in candidates(name, head_dim, itemsize)
        if not (tensor_memory and (name, padded(head_dim), tile) == _OVER_TENSOR_MEMORY)
    ]
    return next((tile for tile in tiles if shared_bytes(name, tile, head_dim, itemsize) <= limit), tiles[-1])


def card_tile(name: str, tensor: torch.Tensor) -> FlashTile:
    """The tile of a pass for a tensor's card; the preferred one under the interpreter, which has no limit."""
    if not tensor.is_cuda:
        return candidates(name, tensor.shape[-1], tensor.itemsize)[0]
    card = torch.cuda.get_device_properties(tensor.device)
    limit = getattr(card, "shared_memory_per_block_optin", card.shared_memory_per_block)  # the former only on NVIDIA
    return fitting_tile(name, tensor.shape[-1], tensor.itemsize, limit, card.major >= 10)


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
def load_tile(base, first, stride, end, BLOCK: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
              MASK_ROWS: tl.constexpr):  # fmt: skip
    """Rows [first, first + BLOCK) of a head, 0 from row `end` on; masks only what needs one."""
    rows, columns = tl.arange(0, BLOCK)[:, None], tl.arange(0, PADDED)[None, :]
    pointers = base + tl.cast(first, tl.int64) * stride + rows * stride + columns
    if MASK_ROWS:
        return tl.load(pointers, mask=(first + rows < end) & (columns < WIDTH), other=0.0)
    elif WIDTH != PADDED:
        return tl.load(pointers, mask=(rows >= 0) & (columns < WIDTH), other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def store_tile(base, first, stride, end, tile, BLOCK: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Rows [first, end) of a tile that begins at row `first`."""
    rows, columns = tl.arange(0, BLOCK)[:, None], tl.arange(0, PADDED)[None, :]
    pointers = base + tl.cast(first, tl.int64) * stride + rows * stride + columns
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=(first + rows < end) & (columns < WIDTH))


@triton.jit
def visible_keys(first, len_q, len_k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr):
    """For queries [first, first + BLOCK_M): the keys before which all see all, whole blocks; and the end of what any
    sees. The last query sees the last key."""
    full, end = len_k, len_k
    if CAUSAL:
        full = tl.minimum(tl.maximum(first + len_k - len_q + 1, 0), len_k)
        end = tl.minimum(tl.maximum(first + len_k - len_q + BLOCK_M, 0), len_k)
    some = first < len_q
    return tl.where(some, full // BLOCK_N * BLOCK_N, 0), tl.where(some, end, 0)


@triton.jit
def _attend(state, q_tile, k_head, v_head, at, end, k_stride_t, v_stride_t, position, scale,
            BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, MASK: tl.constexpr,
            CAUSAL: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """One step of the online softmax, in base 2: acc [M, D], maximum and sum [M]."""
    acc, top, total = state
    keys = load_tile(k_head, at, k_stride_t, end, BLOCK_N, HEAD_DIM, PADDED_DIM, MASK and not EVEN_K)
    scores = tl.dot(q_tile, tl.trans(keys), input_precision=PRECISION)
    if MASK:
        n = at + tl.arange(0, BLOCK_N)[None, :]
        seen = n < end
        if CAUSAL:
            seen = seen & (n <= position[:, None])
        scores = tl.where(seen, scores, -float("inf"))
    higher = tl.maximum(top, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - higher[:, None])
    rescale = tl.exp2(top - higher)
    total = total * rescale + tl.sum(weights, 1)
    values = load_tile(v_head, at, v_stride_t, end, BLOCK_N, HEAD_DIM, PADDED_DIM, MASK and not EVEN_K)
    acc = tl.dot(weights.to(values.dtype), values, acc * rescale[:, None], input_precision=PRECISION)
    return acc, higher, total


@triton.jit
def find_queries(q, k, v, cu_seqlens_q, cu_seqlens_k, num_sequences, seqlen_q, seqlen_k, num_qo_heads, blocks,
                 q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h,
                 v_stride_b, v_stride_t, v_stride_h, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, CAUSAL: tl.constexpr,
                 PACKED: tl.constexpr):  # fmt: skip
    """What a program (batch, head, block of queries) computes, block fastest: programs that run together share keys in
    the L2 cache. Causal blocks go from the last, which sees most. Returns the first query, head, batch, the sequence's
    first query, its lengths, and where its queries, keys and values begin."""
    block, other = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    head, batch = (other % num_qo_heads).to(tl.int64), (other // num_qo_heads).to(tl.int64)
    begin_q, begin_k, len_q, len_k = 0, 0, seqlen_q, seqlen_k
    if CAUSAL:
        block = blocks - 1 - block
    if PACKED:
        sequence, block = find_sequence(block, cu_seqlens_q, num_sequences, BLOCK_M)
        begin_q, len_q = span(cu_seqlens_q, sequence, seqlen_q)
        begin_k, len_k = span(cu_seqlens_k, sequence, seqlen_k)
    q_head = q + batch * q_stride_b + begin_q * q_stride_t + head * q_stride_h
    k_head = k + batch * k_stride_b + begin_k * k_stride_t + head // GROUP * k_stride_h
    v_head = v + batch * v_stride_b + begin_k * v_stride_t + head // GROUP * v_stride_h
    return block * BLOCK_M, head, batch, begin_q, len_q, len_k, q_head, k_head, v_head


@triton.jit
def forward_kernel(
    q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k,
    num_sequences, seqlen_q, seqlen_k, num_qo_heads, blocks, scale,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, PACKED: tl.constexpr,
    EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of queries; see `find_queries`. scale: sm_scale · log2(e). EVEN_K: key blocks are all full."""
    first, head, batch, begin_q, len_q, len_k, q_head, k_head, v_head = find_queries(
        q, k, v, cu_seqlens_q, cu_seqlens_k, num_sequences, seqlen_q, seqlen_k, num_qo_heads, blocks,
        q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h,
        GROUP, BLOCK_M, CAUSAL, PACKED,
    )  # fmt: skip
    q_tile = load_tile(q_head, first, q_stride_t, len_q, BLOCK_M, HEAD_DIM, PADDED_DIM, True)
    m = first + tl.arange(0, BLOCK_M)
    state = (
        tl.zeros([BLOCK_M, PADDED_DIM], tl.float32),
        tl.full([BLOCK_M], _NOTHING, tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
    )
    full, end = visible_keys(first, len_q, len_k, BLOCK_M, BLOCK_N, CAUSAL)
    for at in tl.range(0, full, BLOCK_N):
        state = _attend(
            state, q_tile, k_head, v_head, at, len_k, k_stride_t, v_stride_t, m, scale,
            BLOCK_N, HEAD_DIM, PADDED_DIM, False, CAUSAL, EVEN_K, PRECISION,
        )  # fmt: skip
    if CAUSAL or not EVEN_K:
        position = m + (len_k - len_q)
        for at in tl.range(full, end, BLOCK_N):
            state = _attend(
                state, q_tile, k_head, v_head, at, len_k, k_stride_t, v_stride_t, position, scale,
                BLOCK_N, HEAD_DIM, PADDED_DIM, True, CAUSAL, EVEN_K, PRECISION,
            )  # fmt: skip
    acc, top, total = state
    result = acc / tl.where(total > 0, total, 1.0)[:, None]  # a query may see nothing
    stride_t = num_qo_heads * HEAD_DIM
    out_head = out + (batch * seqlen_q + begin_q) * stride_t + head * HEAD_DIM
    store_tile(out_head, first, stride_t, len_q, result, BLOCK_M, HEAD_DIM, PADDED_DIM)
    natural = tl.where(total > 0, top * _LN_2 + tl.log(tl.where(total > 0, total, 1.0)), -float("inf"))
    tl.store(lse + (batch * num_qo_heads + head) * seqlen_q + begin_q + m, natural, mask=m < len_q)


def arguments(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences, tile: FlashTile
) -> dict[str, Any]:
    """What the launches of all passes have in common; q, k, v with a batch dimension."""
    sums = (sequences.cu_seqlens_q, sequences.cu_seqlens_k)
    return {
        "q": q, "k": k, "v": v, "cu_seqlens_q": sums[0], "cu_seqlens_k": sums[1],
        "num_sequences": 0 if sums[0] is None else len(sums[0]) - 1,
        "seqlen_q": q.shape[1], "seqlen_k": k.shape[1], "num_qo_heads": q.shape[2],
        "scale": sequences.sm_scale * LOG2_E,
        **{f"{name}_stride_{axis}": tensor.stride(index) for name, tensor in (("q", q), ("k", k), ("v", v))
           for index, axis in enumerate("bth")},
        "GROUP": q.shape[2] // k.shape[2], "HEAD_DIM": q.shape[3], "PADDED_DIM": padded(q.shape[3]),
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "CAUSAL": sequences.causal, "PACKED": sequences.packed,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip


def with_batch(tensor: torch.Tensor, sequences: Sequences) -> torch.Tensor:
    """[batch, tokens, heads, head_dim] with a contiguous last dimension; packed tensors are a batch of one."""
    tensor = tensor if tensor.stride(-1) == 1 else tensor.contiguous()
    return tensor.unsqueeze(0) if sequences.packed else tensor


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences, tile: FlashTile | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """out like q, contiguous, and lse [batch, num_qo_heads, seqlen_q] or, packed, [num_qo_heads, total_q], float32, of
    checked arguments on the current stream and device. Packed tokens of no sequence: 0 and -inf.

    tile: None for the table's.
    """
    tile = card_tile("forward", q) if tile is None else tile
    q4, k4, v4 = (with_batch(tensor, sequences) for tensor in (q, k, v))
    batch, seqlen_q, heads, _ = q4.shape
    out = torch.empty(q4.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads, seqlen_q, device=q.device)
    if sequences.packed:  # tokens of no sequence are nobody's
        out.zero_()
        lse.fill_(-torch.inf)
    blocks = sequences.blocks(sequences.cu_seqlens_q, seqlen_q, tile.block_m)
    if out.numel() and blocks:
        forward_kernel[(blocks * heads * batch,)](
            **arguments(q4, k4, v4, sequences, tile), out=out, lse=lse, blocks=blocks,
            EVEN_K=not sequences.packed and k4.shape[1] % tile.block_n == 0,
        )  # fmt: skip
    return (out[0], lse[0]) if sequences.packed else (out, lse)
