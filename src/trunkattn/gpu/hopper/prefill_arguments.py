"""What the Hopper kernels for prompt chunks take, with decodes or without, and how it is made from a plan and the
tensors of a layer."""

from typing import Any, NamedTuple

from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from trunkattn.gpu.arrays import ChunkArrays, GpuPlan
from trunkattn.gpu.hopper.arguments import Layer, attention_constants, layer_of, tma_descriptors
from trunkattn.gpu.hopper.segments import RowTiles, row_tiles_of
from trunkattn.gpu.layer import Tensors
from trunkattn.planner.work_list import UNLIMITED


class PrefillConstants(NamedTuple):
    """What the kernel is compiled for. `ctas_per_sm` is that of the tile. `soft_cap` is the soft cap of logits, or 0
    for none."""

    num_qo_heads: int
    num_kv_heads: int
    group_size: int
    head_dim: int
    page_size: int
    windowed: bool
    ctas_per_sm: int
    soft_cap: float
    sinks: bool
    return_lse: bool
    pdl_trigger: bool


class Chunks(NamedTuple):
    """Arrays of a `ChunkList` on the device. `table_stride` is the number of columns of the block table."""

    items: Any
    block_table: Any
    queries: Any
    partial_slots: Any
    table_stride: Any


class PrefillWork(NamedTuple):
    """The arrays of a plan. `num_items` [1] counts the items, which `even_rounds` has ordered. `positions` [T] are
    those of query tokens in their sequences. `window` is in tokens, and 2^31 - 1 hides nothing."""

    chunks: Chunks
    num_items: Any
    positions: Any
    window: Any


class PrefillArguments(NamedTuple):
    """The parameters of `hopper_prefill_kernel`."""

    layer: Layer
    k_desc: TensorDescriptor
    v_desc: TensorDescriptor
    work: PrefillWork
    C: PrefillConstants


class PrefillDecodeConstants(NamedTuple):
    """What the kernel is compiled for: fields of `DecodeConstants` and of `PrefillConstants`. `ctas_per_sm` is missing,
    because it is always 1."""

    num_qo_heads: int
    num_kv_heads: int
    group_size: int
    head_dim: int
    page_size: int
    segment_size: int
    masked: bool
    windowed: bool
    soft_cap: float
    sinks: bool
    return_lse: bool
    pdl_trigger: bool


class PrefillDecodeWork(NamedTuple):
    """The arrays of a plan.

    Attributes:
        chunks: prompt chunks.
        num_chunk_items: how many items they have [1].
        tiles: the tile list. The launch computes its items [first, last), which merge nothing.
        item_range: first, last, and the largest number of queries of one of these items [3].
        window: in tokens; 2^31 - 1 hides nothing.
    """

    chunks: Chunks
    num_chunk_items: Any
    tiles: RowTiles
    item_range: Any
    window: Any


class PrefillDecodeArguments(NamedTuple):
    """The parameters of `hopper_prefill_decode_kernel`."""

    layer: Layer
    k_desc: TensorDescriptor
    v_desc: TensorDescriptor
    work: PrefillDecodeWork
    C: PrefillDecodeConstants


def _chunks_of(chunks: ChunkArrays) -> Chunks:
    """Returns the arrays of a plan's prompt chunks."""
    arrays = chunks.arrays
    return Chunks(
        items=arrays["items"],
        block_table=arrays["block_table"],
        queries=arrays["queries"],
        partial_slots=arrays["partial_slots"],
        table_stride=chunks.table_stride,
    )


def prefill_arguments(t: Tensors, plan: GpuPlan, pdl_trigger: bool, return_lse: bool) -> PrefillArguments:
    """Returns the arguments of a launch, from the tensors of a layer, a plan, and options."""
    assert plan.chunks
    arrays, g = plan.arrays, plan.geometry
    k_desc, v_desc = tma_descriptors(t)
    return PrefillArguments(
        layer=layer_of(t),
        k_desc=k_desc,
        v_desc=v_desc,
        work=PrefillWork(
            chunks=_chunks_of(plan.chunks),
            num_items=arrays["chunk_count"],
            positions=arrays["positions"],
            window=g.window,
        ),
        C=PrefillConstants(
            **attention_constants(g, return_lse),
            windowed=g.window != UNLIMITED,
            ctas_per_sm=plan.chunks.tile.ctas_per_sm,
            pdl_trigger=pdl_trigger,
        ),
    )


def prefill_decode_arguments(t: Tensors, plan: GpuPlan, pdl_trigger: bool, return_lse: bool) -> PrefillDecodeArguments:
    """Returns the arguments of a launch, from the tensors of a layer, a plan, and options."""
    assert plan.chunks
    arrays, g = plan.arrays, plan.geometry
    k_desc, v_desc = tma_descriptors(t)
    return PrefillDecodeArguments(
        layer=layer_of(t),
        k_desc=k_desc,
        v_desc=v_desc,
        work=PrefillDecodeWork(
            chunks=_chunks_of(plan.chunks),
            num_chunk_items=arrays["chunk_count"],
            tiles=row_tiles_of(plan),
            item_range=arrays["overlapped"],
            window=g.window,
        ),
        C=PrefillDecodeConstants(
            **attention_constants(g, return_lse),
            segment_size=g.segment_size,
            masked=g.masked,
            windowed=g.window != UNLIMITED,
            pdl_trigger=pdl_trigger,
        ),
    )
