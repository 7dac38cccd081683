"""What the Hopper decode kernel takes, and how it is made from a plan and the tensors of a layer."""

from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from trunkattn.gpu.arrays import GpuPlan
from trunkattn.gpu.hopper import spec
from trunkattn.gpu.hopper.arguments import Layer, attention_constants, layer_of, of_layer
from trunkattn.gpu.hopper.gather import as_words
from trunkattn.gpu.hopper.online_softmax import MainloopTile, mainloop_tile
from trunkattn.gpu.hopper.segments import RowTiles, row_tiles_of
from trunkattn.gpu.hopper.widen import kind_of, staged_descriptor
from trunkattn.gpu.layer import Geometry, Pdl, Tensors
from trunkattn.gpu.portable.spec import WIDE


class DecodeShape(NamedTuple):
    """Warps and registers of a CTA. `producer_warps` warps fill a pipeline, each thread with `producer_registers`.
    Every thread has `registers` at launch, when Triton rounds the number of warps up to a multiple of four. An SM holds
    two CTAs, or one if heads of 256 are in 8 bits."""

    producer_warps: int
    producer_registers: int
    registers: int


_SHAPES: Final = MappingProxyType(
    {
        spec.Source.LOADED: {64: DecodeShape(1, 56, 128), 128: DecodeShape(1, 24, 128), 256: DecodeShape(1, 24, 128)},
        spec.Source.WIDENED: {
            64: DecodeShape(4, 64, 128),
            128: DecodeShape(4, 88, 128),
            256: DecodeShape(8, 128, 168),
        },
        spec.Source.GATHERED: {
            64: DecodeShape(4, 88, 128),
            128: DecodeShape(4, 88, 128),
            256: DecodeShape(8, 128, 168),
        },
    }
)


class DecodeConstants(NamedTuple):
    """What the kernel is compiled for.

    Attributes:
        head_dim: dims of a head in memory. The main loop may pad them.
        segment_size: tokens of a whole segment.
        masked: queries of one sequence see different tokens.
        soft_cap: the soft cap of logits, or 0 for none.
        source: where keys and values come from, a `Source`.
        kv_bytes, kv_kind: bytes of a number in the cache, and its `widen.kind_of`.
        tile: constants of the main loop.
        producer_registers: registers of each thread of the producer warps.
    """

    num_qo_heads: int
    num_kv_heads: int
    group_size: int
    head_dim: int
    page_size: int
    segment_size: int
    masked: bool
    soft_cap: float
    sinks: bool
    return_lse: bool
    source: int
    kv_bytes: int
    kv_kind: int
    tile: MainloopTile
    producer_registers: int


def shape_of(head_dim: int, source: spec.Source) -> DecodeShape:
    """Returns the shape of the kernel."""
    return _SHAPES[source][spec.width_of(head_dim)]


def tile_of(head_dim: int, source: spec.Source, masked: bool = False) -> MainloopTile:
    """Returns the constants of the main loop. Masks of positions are computed after the product where few registers are
    left: heads of 64 have twice the scores, and heads of 256 twice the output. Masks of gathered blocks are computed
    ahead of it, because after it they would wait for memory."""
    width, producer_warps = spec.width_of(head_dim), shape_of(head_dim, source).producer_warps
    mask_ahead = width == WIDE or not masked or source is spec.Source.GATHERED
    return mainloop_tile(width, spec.TILES[source, width].block_n, 2, 4, mask_ahead, producer_warps)


class DecodeWork(NamedTuple):
    """The arrays of a plan. `counts` says where buckets begin. `window` is in tokens, and 2^31 - 1 hides nothing."""

    tiles: RowTiles
    counts: Any
    window: Any
    pdl: Pdl


class DecodeArguments(NamedTuple):
    """The parameters of `hopper_decode_kernel`. `k_desc` and `v_desc` are the TMA descriptors of the caches. If the
    kernel gathers, they are the caches as int32."""

    layer: Layer
    k_desc: Any
    v_desc: Any
    work: DecodeWork
    first_bucket: int
    last_bucket: int
    items_size: int
    queries_size: int
    segments_size: int
    first_cta: int
    total_ctas: int
    C: DecodeConstants


# Numbers of a plan and of a launch. Triton must not compile special code for their values: launches that run at the
# same time then share their code, and an SM's instruction cache holds it once.
UNSPECIALIZED: Final = DecodeArguments._fields[4:-1]


def kv_source(t: Tensors, geometry: Geometry) -> spec.Source:
    """Returns where keys and values come from."""
    return spec.source_of(t.k_cache.element_size(), geometry.page_size)


class CtaRange(NamedTuple):
    """The CTAs of one of several launches that compute the items of some buckets together. All of them have
    `total_ctas` CTAs, and this one begins with `first_cta`."""

    first_cta: int
    total_ctas: int
    pdl: Pdl


def decode_arguments(
    t: Tensors, plan: GpuPlan, buckets: tuple[int, int], ctas: CtaRange, return_lse: bool
) -> DecodeArguments:
    """Returns the arguments of one launch. `buckets` are the first and the last bucket that it computes."""
    g, source = plan.geometry, kv_source(t, plan.geometry)
    layer, keys, values = OF_LAYER[source](t)
    return DecodeArguments(
        layer=layer,
        k_desc=keys,
        v_desc=values,
        work=DecodeWork(tiles=row_tiles_of(plan), counts=plan.arrays["counts"], window=g.window, pdl=ctas.pdl),
        first_bucket=buckets[0],
        last_bucket=buckets[1],
        items_size=plan.sizes["items"],
        queries_size=plan.sizes["queries"],
        segments_size=plan.sizes["segments"],
        first_cta=ctas.first_cta,
        total_ctas=ctas.total_ctas,
        C=DecodeConstants(
            **attention_constants(g, return_lse),
            segment_size=g.segment_size,
            masked=g.masked,
            source=int(source),
            kv_bytes=t.k_cache.element_size(),
            kv_kind=kind_of(t.k_cache.dtype),
            tile=tile_of(g.head_dim, source, g.masked),
            producer_registers=shape_of(g.head_dim, source).producer_registers,
        ),
    )


def _of_gathered_layer(t: Tensors) -> tuple[Layer, torch.Tensor, torch.Tensor]:
    """Returns the values of the arguments `LAYER` if the kernel gathers."""
    return layer_of(t), as_words(t.k_cache), as_words(t.v_cache)


def _of_widened_layer(t: Tensors) -> tuple[Layer, TensorDescriptor, TensorDescriptor]:
    """Returns the values of the arguments `LAYER` if the kernel widens."""
    return layer_of(t), staged_descriptor(t.k_cache), staged_descriptor(t.v_cache)


# Makes the values of the arguments `LAYER`.
OF_LAYER: Final = MappingProxyType(
    {
        spec.Source.LOADED: of_layer,
        spec.Source.WIDENED: _of_widened_layer,
        spec.Source.GATHERED: _of_gathered_layer,
    }
)
