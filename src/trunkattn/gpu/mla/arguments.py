"""What the Hopper kernel of latent attention takes: its constants, a layer's tensors, and the arguments of a launch."""

from typing import Any, Final, NamedTuple

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from trunkattn.gpu.arrays import GpuPlan
from trunkattn.gpu.hopper.online_softmax import copy_layout
from trunkattn.gpu.hopper.segments import row_tiles_of
from trunkattn.gpu.launch_order import Launch, LaunchOptions
from trunkattn.gpu.layer import Tensors
from trunkattn.gpu.mla.blocks import HALF_DIM, PART_COLUMNS, ROPE_DIM
from trunkattn.gpu.mla.spec import BLOCK_ROWS, NARROW_BLOCK_ROWS
from trunkattn.gpu.mla.widen import narrow_descriptor

FEW_THREADS_A_ROW = gl.constexpr(copy_layout(ROPE_DIM.value))  # a maximum over columns takes few steps


class LatentConstants(NamedTuple):
    """What the kernel is compiled for.

    Attributes:
        num_qo_heads, group_size: the number of query heads, and how many of them an item computes at once.
        segment_size: tokens of a whole segment, and rows of a TMA box.
        block_rows, pairs_held: cached rows of a block, and pairs of blocks that shared memory holds.
        masked: queries of one sequence see different tokens.
        widened: the cache has 8 bits, and producer warps widen its rows to float16.
        box_columns: columns of a TMA box: 64, or 128 if the cache has 8 bits.
        part_threads, producer_threads: of the producer warps, those that fill one part, and all.
        scores, acc: layouts of a block's scores and of half of the output.
        copy: the layout in which half of the output is copied to memory.
    """

    num_qo_heads: int
    num_head_groups: int
    group_size: int
    page_size: int
    segment_size: int
    block_rows: int
    pairs_held: int
    masked: bool
    return_lse: bool
    widened: bool
    box_columns: int
    part_threads: int
    producer_threads: int
    scores: Any
    acc: Any
    copy: Any


def constants(
    num_qo_heads: int,
    group_size: int,
    page_size: int,
    segment_size: int,
    masked: bool,
    return_lse: bool,
    kv_bytes: int,
) -> LatentConstants:
    """Returns the constants of an attention. kv_bytes: bytes of a number in the cache."""
    widened = kv_bytes == 1
    part_threads, producer_threads = (128, 128) if widened else (32, 64)
    block_rows, pairs_held = (NARROW_BLOCK_ROWS, 2) if widened else (BLOCK_ROWS, 1)
    scores, acc = (
        gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])
        for columns in (block_rows, HALF_DIM.value)
    )
    return LatentConstants(
        num_qo_heads=num_qo_heads,
        num_head_groups=num_qo_heads // group_size,
        group_size=group_size,
        page_size=page_size,
        segment_size=segment_size,
        block_rows=block_rows,
        pairs_held=pairs_held,
        masked=masked,
        return_lse=return_lse,
        widened=widened,
        box_columns=128 // kv_bytes,
        part_threads=part_threads,
        producer_threads=producer_threads,
        scores=scores,
        acc=acc,
        copy=FEW_THREADS_A_ROW.value if widened else copy_layout(HALF_DIM.value),
    )


class LatentLayer(NamedTuple):
    """Tensors of one layer, and their strides.

    q_latent and out are [T, Hq, 512], and q_rope is [T, Hq, 64]. The other tensors are float32: lse [T, Hq], partial
    [slots, Hq, 512], partial_lse [slots, Hq], logit_scale and v_scale [1]. logit_scale includes log2(e)."""

    q_latent: Any
    q_rope: Any
    out: Any
    lse: Any
    partial: Any
    partial_lse: Any
    logit_scale: Any
    v_scale: Any
    q_latent_token_stride: Any
    q_latent_head_stride: Any
    q_rope_token_stride: Any
    q_rope_head_stride: Any
    out_token_stride: Any
    out_head_stride: Any


class LatentWork(NamedTuple):
    """The arrays of a plan. `counts` says where buckets begin. `window` is in tokens, and 2^31 - 1 hides nothing. `pdl`
    is a `Pdl`; Triton compiles no special code for its bools."""

    tiles: Any
    counts: Any
    window: Any
    pdl: Any


class LatentArguments(NamedTuple):
    """The parameters of `latent_decode_kernel`. `desc` is the TMA descriptor of the cache."""

    layer: LatentLayer
    desc: Any
    work: LatentWork
    first_bucket: int
    last_bucket: int
    items_size: int
    queries_size: int
    segments_size: int
    C: LatentConstants


def tma_descriptor(cache: torch.Tensor, segment_size: int) -> TensorDescriptor:
    """Returns the argument `desc`. A TMA box holds a segment's tokens and 64 columns. The cache is [pages, page_size,
    1, columns]."""
    rows = cache[:, :, 0]
    if rows.itemsize == 1:
        return narrow_descriptor(rows, segment_size)
    box = [1, segment_size, PART_COLUMNS.value]
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), box, gl.NVMMASharedLayout(128, 16, 3))


def layer_of(t: Tensors) -> LatentLayer:
    """Returns the argument `layer`."""
    assert t.q_rope is not None
    return LatentLayer(
        q_latent=t.q,
        q_rope=t.q_rope,
        out=t.out,
        lse=t.lse,
        partial=t.partial,
        partial_lse=t.partial_lse,
        logit_scale=t.logit_scale,
        v_scale=t.v_scale,
        q_latent_token_stride=t.q.stride(0),
        q_latent_head_stride=t.q.stride(1),
        q_rope_token_stride=t.q_rope.stride(0),
        q_rope_head_stride=t.q_rope.stride(1),
        out_token_stride=t.out.stride(0),
        out_head_stride=t.out.stride(1),
    )


LAYER: Final = ("layer", "desc")  # the arguments that differ from layer to layer


def arguments(t: Tensors, plan: GpuPlan, launch: Launch, options: LaunchOptions) -> LatentArguments:
    """Returns the arguments of a launch, for layers like `t`."""
    g, sizes = plan.geometry, plan.sizes
    group_size = g.num_qo_heads // g.num_kv_heads
    return LatentArguments(
        layer=layer_of(t),
        desc=tma_descriptor(t.k_cache, g.segment_size),
        work=LatentWork(tiles=row_tiles_of(plan), counts=plan.arrays[launch.counts], window=g.window, pdl=options.pdl),
        first_bucket=launch.buckets[0],
        last_bucket=launch.buckets[-1],
        items_size=sizes["items"],
        queries_size=sizes["queries"],
        segments_size=sizes["segments"],
        C=constants(
            g.num_qo_heads, group_size, g.page_size, g.segment_size, g.masked, options.return_lse, t.k_cache.itemsize
        ),
    )
