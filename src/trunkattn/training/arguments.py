"""What the portable training kernels take, by name, and how it is made from tensors and sequences."""

from functools import cache
from typing import Any, Final, NamedTuple

import torch
import triton

from trunkattn.gpu.bound import BoundLaunch, Grid
from trunkattn.numerics import GPU_OFFSET_END, LOG2_E, padded_head_dim
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
    a tree (see `TreeTables`) are None without one. `window` is `sliding_window`, or `UNLIMITED`."""

    cu_seqlens_q: Any
    cu_seqlens_k: Any
    subtree_end: Any
    depths: Any
    segment_of: Any
    segments: Any
    window: Any
    num_qo_heads: Any


class Numbers(NamedTuple):
    """What differs between trees, and between batches of other lengths. Triton compiles for whether each number in a
    tuple is 1 or a multiple of 16, so kernels take these as parameters of their own (see `for_any_length`). The tensors
    have `seqlen_q` and `seqlen_k` tokens. Each head has `num_blocks` blocks, and a CTA computes one of them."""

    num_sequences: Any
    seqlen_q: Any
    seqlen_k: Any
    num_blocks: Any


NUMBERS: Final = Numbers._fields


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


class Arguments(NamedTuple):
    """What the launches of all passes have in common."""

    batch: Batch
    numbers: Numbers
    scales: Scales
    strides: Strides
    shape: Shape
    variant: Variant


def arguments(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences, tile: FlashTile, num_blocks: int
) -> Arguments:
    """Returns the arguments of the kernels for q, k and v with a batch dimension, without tables."""
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    num_sequences = 0 if sequences.cu_seqlens_q is None else len(sequences.cu_seqlens_q) - 1
    return Arguments(
        batch=Batch(
            **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", *TreeTables._fields)),
            window=sequences.window_within(seqlen_q + seqlen_k),
            num_qo_heads=q.shape[2],
        ),
        numbers=Numbers(num_sequences, seqlen_q, seqlen_k, num_blocks),
        scales=Scales(sequences.sm_scale * LOG2_E, sequences.sm_scale, sequences.soft_cap or 0.0),
        strides=Strides(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]),
        shape=attention_shape(q.shape[2] // k.shape[2], (q.shape[3], v.shape[3]), q.dtype),
        variant=Variant(
            causal=sequences.causal,
            packed=sequences.packed,
            tree=sequences.tree is not None,
            window=sequences.sliding_window is not None,
            soft_cap=sequences.soft_cap is not None,
            sinks=sequences.sinks is not None,
            even_q=not sequences.packed and seqlen_q % tile.block_m == 0,
            even_k=not sequences.packed and seqlen_k % tile.block_n == 0,
        ),
    )


@cache
def for_any_length(kernel: Any) -> Any:
    """Returns a kernel for packed sequences and trees, of which nearly every batch has other lengths: Triton compiles
    it for no values of `Numbers`."""
    return triton.jit(kernel.fn, do_not_specialize=NUMBERS)


def bind_pass(kernel: Any, num_ctas: int, given: Arguments, tile: FlashTile, variant: Variant) -> BoundLaunch:
    """Returns the launch of a kernel of a pass. A call brings the tensors and the batch."""
    fixed = given.numbers._asdict() | {
        "scales": given.scales,
        "strides": given.strides,
        "SHAPE": given.shape,
        "TILE": tile,
        "VARIANT": variant,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    if variant.packed or variant.tree:
        kernel = for_any_length(kernel)
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
