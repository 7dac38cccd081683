"""The backward pass of FlashAttention by recomputation (FlashAttention-2, §3.1; https://arxiv.org/abs/2307.08691).

The probabilities p are computed again from q, k and lse, tile by tile. The row sums of dout · out are called delta.
Then dv = pᵀ dout, ds = p · (dout vᵀ - delta), dk = dsᵀ q and dq = ds k, and the latter two are multiplied by sm_scale.
A soft cap multiplies ds by its slope.

Deterministic gradients take two kernels: one holds a block of keys and streams queries, the other holds a block of
queries and streams keys, and both compute the scores. Others take one pass, which is faster: the first kernel also adds
its part of dq to memory in float32, in the order in which its CTAs happen to run.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from trunkattn.gpu.bound import BoundLaunch, Grid, kept, tensor_kind
from trunkattn.gpu.portable.online_softmax import LOG2_E
from trunkattn.numerics import padded_head_dim
from trunkattn.training.arguments import Batch, Width, arguments, contiguous_or_none, readable, with_batch, with_tables
from trunkattn.training.backward_keys import KeysTensors, bind_key_gradients
from trunkattn.training.backward_queries import QueriesTensors, bind_query_gradients
from trunkattn.training.common import load_tile
from trunkattn.training.sequences import Sequences
from trunkattn.training.spec import FlashTile, card_tile


class PrepareTensors(NamedTuple):
    """The tensors of `prepare_kernel`. `out` and `dout` are [batch, seqlen_q, num_qo_heads, head_dim of values]. The
    others are [batch, num_qo_heads, seqlen_q] in float32. `dlse` is None if it is 0."""

    out: Any
    dout: Any
    lse: Any
    dlse: Any
    delta: Any
    shift: Any


class RowValues(NamedTuple):
    """Two numbers for each query of a block. `delta` is the row sum of dout · out minus dlse, because a gradient of lse
    adds p · dlse to ds. `shift` is lse in base 2, or +inf for a query that sees nothing, so that its p is 0."""

    delta: Any
    shift: Any


@triton.jit
def row_values(tensors, at, row_at, first, length, token_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the `RowValues` of a block of queries from `first` on, in a sequence of `length` tokens. They are 0 and
    +inf after its end. `at` is the offset of a head of the sequence in out and dout, and `row_at` is its offset in lse
    and dlse."""
    out = load_tile(tensors.out + at, first, token_stride, length, BLOCK, WIDTH, True)
    dout = load_tile(tensors.dout + at, first, token_stride, length, BLOCK, WIDTH, True)
    dout = tl.where(out == 0.0, out, dout)  # It may be NaN where a query sees no key, whose out is 0.
    if tensors.out.dtype.element_ty == tl.float32:  # It is summed as dout vᵀ is, so that both cancel for one key.
        products = tl.dot(dout, tl.trans(out), input_precision="ieee")
        diagonal = tl.arange(0, BLOCK)[:, None] == tl.arange(0, BLOCK)[None, :]
        delta = tl.sum(tl.where(diagonal, products, 0.0), 1)
    else:
        delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    m = first + tl.arange(0, BLOCK)
    inside = m < length
    lse = tl.load(tensors.lse + row_at + m, mask=inside, other=-float("inf"))
    sees_nothing = lse == -float("inf")
    if tensors.dlse is not None:
        delta -= tl.load(tensors.dlse + row_at + m, mask=inside, other=0.0)  # may be NaN where a query sees nothing
    return RowValues(tl.where(sees_nothing, 0.0, delta), tl.where(sees_nothing, float("inf"), lse * LOG2_E))


@triton.jit(do_not_specialize=["seqlen_q", "num_blocks"])
def prepare_kernel(
    tensors: PrepareTensors, seqlen_q, num_qo_heads, num_blocks, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Writes delta and shift of a block of queries."""
    first, other = tl.program_id(0) % num_blocks * BLOCK, tl.program_id(0) // num_blocks
    head, batch = (other % num_qo_heads).to(tl.int64), (other // num_qo_heads).to(tl.int64)
    token_stride = num_qo_heads * WIDTH.dim
    at = batch * seqlen_q * token_stride + head * WIDTH.dim
    row_at = (batch * num_qo_heads + head) * seqlen_q
    found = row_values(tensors, at, row_at, first, seqlen_q, token_stride, WIDTH, BLOCK)
    m = first + tl.arange(0, BLOCK)
    inside = m < seqlen_q
    tl.store(tensors.delta + row_at + m, found.delta, mask=inside)
    tl.store(tensors.shift + row_at + m, found.shift, mask=inside)


class _Bound(NamedTuple):
    """Bound launches, which do not depend on the addresses of tensors, and their batches without tables. A launch is
    None if there is nothing to compute."""

    prepare: BoundLaunch | None
    keys: BoundLaunch | None
    keys_batch: Batch
    queries: BoundLaunch | None
    queries_batch: Batch


def backward(
    gradients: tuple[torch.Tensor, torch.Tensor | None],
    saved: tuple[torch.Tensor, ...],
    sequences: Sequences,
    deterministic: bool,
    tiles: dict[str, FlashTile] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Returns dq, dk and dv, which are contiguous, and dsinks, which is empty without sinks.

    Args:
        gradients: of out and of lse. The latter is None if it is 0.
        saved: q, k, v, out and lse of `forward`, with the shapes that they have there.
        sequences: those of `forward`.
        deterministic: two kernels compute gradients that are bit-equal over repeated runs. Otherwise one pass does.
        tiles: the tile of each pass. None takes those of the table.
    """
    q, k, v = readable(*saved[:3])
    out, lse, dout = (tensor.contiguous() for tensor in (*saved[3:5], gradients[0]))
    dlse = contiguous_or_none(gradients[1])
    kinds = [None if each is None else tensor_kind(each) for each in (q, k, v, out, lse, dout, dlse)]
    key = "backward", q.device, *kinds, sequences.kind, deterministic, *(tiles or {}).items()
    bound = kept(key, lambda: _bind(q, k, v, sequences, deterministic, tiles or {}))
    shift, delta = torch.empty_like(lse), torch.empty_like(lse)
    make = torch.zeros if sequences.packed else torch.empty
    dk, dv = (make(tensor.shape, dtype=q.dtype, device=q.device) for tensor in (k, v))
    dq = (make if deterministic else torch.zeros)(
        q.shape, dtype=q.dtype if deterministic else torch.float32, device=q.device
    )
    if bound.prepare is not None:
        bound.prepare((PrepareTensors(out=out, dout=dout, lse=lse, dlse=dlse, delta=delta, shift=shift),))
    tensors = KeysTensors(q=q, k=k, v=v, dout=dout, shift=shift, delta=delta, dq=dq, dk=dk, dv=dv)
    if bound.keys is not None:
        bound.keys((tensors, with_tables(bound.keys_batch, sequences)))
    if bound.queries is not None:
        bound.queries((QueriesTensors(*tensors[:7]), with_tables(bound.queries_batch, sequences)))
    return dq.to(q.dtype), dk, dv, sequences.sink_gradients(delta, lse)


def _bind(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sequences: Sequences,
    deterministic: bool,
    tiles: dict[str, FlashTile],
) -> _Bound:
    """Returns the launches for tensors and sequences of these kinds."""
    name = "keys" if deterministic else "one_pass"
    keys_tile, queries_tile = (tiles.get(each) or card_tile(each, q, v) for each in (name, "queries"))
    q, k, v = (with_batch(tensor, sequences) for tensor in (q, k, v))
    keys_blocks = sequences.blocks(sequences.cu_seqlens_k, k.shape[1], keys_tile.block_n)
    queries_blocks = sequences.blocks(sequences.cu_seqlens_q, q.shape[1], queries_tile.block_m)
    keys = arguments(q, k, v, sequences, keys_tile, keys_blocks)
    queries = arguments(q, k, v, sequences, queries_tile, queries_blocks)
    has_queries, has_keys = q.numel() > 0, k.numel() > 0
    writes_queries = deterministic and has_queries and queries_blocks > 0
    return _Bound(
        prepare=_bind_prepare(q, v.shape[-1]) if has_queries else None,
        keys=bind_key_gradients(keys, k, keys_tile, not deterministic) if has_keys and keys_blocks else None,
        keys_batch=keys.batch,
        queries=bind_query_gradients(queries, q, queries_tile) if writes_queries else None,
        queries_batch=queries.batch,
    )


def _bind_prepare(q: torch.Tensor, head_dim_v: int) -> BoundLaunch:
    batch, seqlen_q, heads, _ = q.shape
    block = 16 if q.dtype == torch.float32 else 64
    num_blocks = -(-seqlen_q // block)
    fixed = {
        "seqlen_q": seqlen_q,
        "num_qo_heads": heads,
        "num_blocks": num_blocks,
        "WIDTH": Width(head_dim_v, padded_head_dim(head_dim_v)),
        "BLOCK": block,
        "num_warps": 4,
    }
    return BoundLaunch(prepare_kernel, Grid(num_blocks * heads * batch, fixed), ("tensors",))
