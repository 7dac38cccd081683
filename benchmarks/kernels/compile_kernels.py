"""The GPU kernels compiled without a GPU, each by a function of its own that has its variants, with `cross_compile`.

Not for a process in which Triton interprets (TRITON_INTERPRET).
"""

from dataclasses import replace
from typing import Any

from benchmarks.kernels.cross_compile import (
    PAGE_SIZE,
    TORCH_DTYPES,
    Target,
    compile_gluon,
    compile_triton,
    of_one_kind,
)
from benchmarks.kernels.tile_solver import Resources
from trunkattn.gpu.hopper.spec import Source, source_of
from trunkattn.gpu.layer import Pdl
from trunkattn.gpu.portable.arguments import Features
from trunkattn.gpu.portable.decode import decode_kernel
from trunkattn.gpu.portable.decode_arguments import Buckets, decode_tile
from trunkattn.gpu.portable.merge import merge_kernel, merge_shape
from trunkattn.gpu.portable.prefill import prefill_kernel, tile_shape
from trunkattn.gpu.portable.spec import merge_tile
from trunkattn.gpu.tiles import GpuTile, PrefillTile


def compile_decode(target: Target, tile: GpuTile, merges: bool = False, features: Features | None = None) -> Resources:
    """`decode_kernel` for one tile; `merges`: the variant that merges partials. features: None for none."""
    constants: dict[str, object] = {
        "SHAPE": target.shape,
        "TILE": decode_tile(tile, PAGE_SIZE),
        "FEATURES": features or target.no_features,
        "BUCKETS": Buckets(0, 2 if merges else -1, merges),
        "PDL": Pdl(False, merges and target.capability >= 90),
    }
    return compile_triton(decode_kernel, target, constants, tile.warps)


def compile_prefill(target: Target, tile: PrefillTile, features: Features | None = None) -> Resources:
    """`prefill_kernel` for one tile; features: None for none."""
    constants: dict[str, object] = {
        "SHAPE": target.shape,
        "TILE": tile_shape(tile, PAGE_SIZE),
        "FEATURES": features or target.no_features,
        "PDL": Pdl(target.capability >= 90, False),
    }
    return compile_triton(prefill_kernel, target, constants, tile.warps)


def compile_hopper_decode(
    target: Target,
    masked: bool = False,
    soft_cap: float = 0.0,
    sinks: bool = False,
    page_size: int = PAGE_SIZE,
) -> Resources:
    """`hopper_decode_kernel`, for an sm_90. registers: of a thread on average; producer and consumer warps have shares
    of their own. masked: requests have several query tokens. page_size: tokens; under 16 they are gathered."""
    from trunkattn.gpu.hopper import decode_arguments as decode
    from trunkattn.gpu.hopper import widen
    from trunkattn.gpu.hopper.decode import hopper_decode_kernel
    from trunkattn.gpu.hopper.segments import RowTiles

    tiles, kv_bytes = of_one_kind(RowTiles, "*i32"), TORCH_DTYPES[target.kv_dtype].itemsize
    source = source_of(kv_bytes, page_size)
    shape = decode.shape_of(target.head_dim, source)
    cache = "*i32" if source is Source.GATHERED else _tma_descriptor(target)
    arguments = of_one_kind(
        decode.DecodeArguments,
        "i32",
        layer=_layer(target),
        k_desc=cache,
        v_desc=cache,
        work=decode.DecodeWork(tiles, counts="*i32", window="i32", pdl=Pdl("u1", "u1")),
        C=decode.DecodeConstants(
            **_attention_constants(target, page_size, soft_cap, sinks),
            segment_size=min(page_size, PAGE_SIZE),
            masked=masked,
            source=int(source),
            kv_bytes=kv_bytes,
            kv_kind=widen.kind_of(TORCH_DTYPES[target.kv_dtype]),
            tile=decode.tile_of(target.head_dim, source, masked),
            producer_registers=shape.producer_registers,
        ),
    )
    return compile_gluon(hopper_decode_kernel, target, arguments, shape.registers)


def compile_hopper_prefill(
    target: Target, window: bool = False, ctas_per_sm: int = 1, soft_cap: float = 0.0, sinks: bool = False
) -> Resources:
    """`hopper_prefill_kernel`; as `compile_hopper_decode`."""
    from trunkattn.gpu.hopper import prefill_arguments as prefill
    from trunkattn.gpu.hopper.prefill import REGISTERS, hopper_prefill_kernel

    arguments = prefill.PrefillArguments(
        layer=_layer(target),
        k_desc=_tma_descriptor(target),
        v_desc=_tma_descriptor(target),
        work=prefill.PrefillWork(of_one_kind(prefill.Chunks, "*i32", table_stride="i32"), "*i32", "*i32", window="i32"),
        C=prefill.PrefillConstants(
            **_attention_constants(target, PAGE_SIZE, soft_cap, sinks),
            windowed=window,
            ctas_per_sm=ctas_per_sm,
            pdl_trigger=True,
        ),
    )
    return compile_gluon(hopper_prefill_kernel, target, arguments, REGISTERS[ctas_per_sm])


def compile_hopper_prefill_decode(
    target: Target, masked: bool = False, window: bool = False, soft_cap: float = 0.0, sinks: bool = False
) -> Resources:
    """`hopper_prefill_decode_kernel`; as `compile_hopper_decode`. With a window requests are masked, too."""
    from trunkattn.gpu.hopper import prefill_arguments as prefill
    from trunkattn.gpu.hopper.prefill_decode import REGISTERS, hopper_prefill_decode_kernel
    from trunkattn.gpu.hopper.segments import RowTiles

    chunks, tiles = of_one_kind(prefill.Chunks, "*i32", table_stride="i32"), of_one_kind(RowTiles, "*i32")
    arguments = prefill.PrefillDecodeArguments(
        layer=_layer(target),
        k_desc=_tma_descriptor(target),
        v_desc=_tma_descriptor(target),
        work=prefill.PrefillDecodeWork(chunks, "*i32", tiles, item_range="*i32", window="i32"),
        C=prefill.PrefillDecodeConstants(
            **_attention_constants(target, PAGE_SIZE, soft_cap, sinks),
            segment_size=PAGE_SIZE,
            masked=masked or window,
            windowed=window,
            pdl_trigger=True,
        ),
    )
    return compile_gluon(hopper_prefill_decode_kernel, target, arguments, REGISTERS)


def compile_hopper_latent(target: Target, masked: bool = False, page_size: int = 64) -> Resources:
    """`latent_decode_kernel`, of 512 + 64 columns; as `compile_hopper_decode`."""
    from trunkattn.gpu.hopper.segments import RowTiles
    from trunkattn.gpu.mla import decode
    from trunkattn.gpu.mla.spec import BLOCK_ROWS, NARROW_BLOCK_ROWS

    group_size = target.heads[2]
    strides = {name: "i32" for name in decode.LatentLayer._fields if name.endswith("_stride")}
    in_dtype = dict.fromkeys(("q_latent", "q_rope", "out"), f"*{target.dtype}")
    is_narrow = target.kv_dtype == "fp8e4nv"
    segment_size = min(page_size, NARROW_BLOCK_ROWS if is_narrow else BLOCK_ROWS)
    bits, cached = (8, "u8") if is_narrow else (16, target.kv_dtype)
    layout = f"NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth={bits}, rank=3)"
    arguments = of_one_kind(
        decode.LatentArguments,
        "i32",
        layer=of_one_kind(decode.LatentLayer, "*fp32", **in_dtype, **strides),
        desc=f"tensordesc<{cached}[1, {segment_size}, {1024 // bits}],{layout}>",
        work=decode.LatentWork(of_one_kind(RowTiles, "*i32"), counts="*i32", window="i32", pdl=Pdl("u1", "u1")),
        C=decode.constants(
            target.num_qo_heads, group_size, page_size, segment_size, masked, return_lse=True, kv_bytes=bits // 8
        ),
    )
    return compile_gluon(decode.latent_decode_kernel, target, arguments, decode.REGISTERS)


def compile_hopper_forward(
    target: Target,
    head_dim_v: int,
    causal: bool = True,
    packed: bool = False,
    tree: bool = False,
    window: bool = False,
    soft_cap: float = 0.0,
    sinks: bool = False,
) -> Resources:
    """`hopper_forward_kernel`, for sequences of a batch, packed ones or a tree; as `compile_hopper_decode`."""
    from trunkattn.training.arguments import Variant
    from trunkattn.training.hopper import forward_arguments as forward
    from trunkattn.training.hopper.forward import LAUNCH_REGISTERS, hopper_forward_kernel
    from trunkattn.training.spec import hopper_forward_tile

    dims = (target.head_dim, head_dim_v)
    tile = hopper_forward_tile(dims)
    variant = Variant(causal, packed, tree, window, soft_cap > 0, sinks, even_q=False, even_k=False)
    constants = forward.forward_constants(dims, tile, variant, soft_cap)
    keys, head_values = (shape.parts[-1].width for shape in (constants.mainloop, constants.value_shape))
    rows = (64, keys), (tile.block_n, keys), (tile.block_n, head_values), (64, head_values)
    q_desc, k_desc, v_desc, out_desc = (_training_descriptor(target, *box) for box in rows)
    arguments = forward.ForwardArguments(
        q_desc=q_desc, k_desc=k_desc, v_desc=v_desc, out_desc=out_desc,
        outputs=forward.Outputs(f"*{target.dtype}", "*fp32"),
        tables=_training_tables(packed, tree, window)._replace(sinks="*fp32" if sinks else None),
        num_sequences="i32", section="i32", scale="fp32", C=constants,
    )  # fmt: skip
    return compile_gluon(hopper_forward_kernel, target, arguments, LAUNCH_REGISTERS)


def compile_hopper_queries(
    target: Target,
    head_dim_v: int,
    causal: bool = True,
    packed: bool = False,
    tree: bool = False,
    window: bool = False,
    soft_cap: float = 0.0,
) -> Resources:
    """`query_gradients_kernel`, as `compile_hopper_forward`."""
    from trunkattn.training.arguments import Scales, Variant
    from trunkattn.training.hopper import query_gradients as backward

    dims = (target.head_dim, head_dim_v)
    variant = Variant(causal, packed, tree, window, soft_cap > 0, False, even_q=False, even_k=False)
    constants = backward.query_constants(dims, variant, soft_cap)
    keys, head_values = (shape.parts[-1].width for shape in (constants.mainloop, constants.value_shape))
    block_n = constants.tile.block_n
    rows = (64, keys), (block_n, keys), (block_n, head_values), (64, head_values)
    q_desc, k_desc, v_desc, dout_desc = (_training_descriptor(target, *box) for box in rows)
    arguments = backward.QueryArguments(
        q_desc=q_desc, k_desc=k_desc, v_desc=v_desc, dout_desc=dout_desc, dq_desc=q_desc,
        tensors=backward.RowTensors("*fp32", "*fp32", f"*{target.dtype}"),
        tables=_training_tables(packed, tree, window),
        num_sequences="i32", section="i32", scales=Scales("fp32", "fp32", "fp32"), C=constants,
    )  # fmt: skip
    kernel = backward.query_gradients_kernel
    return compile_gluon(kernel, target, arguments, backward.LAUNCH_REGISTERS)


def _training_tables(packed: bool, tree: bool, window: bool) -> Any:
    from trunkattn.training.hopper.query_tiles import Tables

    of_packed, of_tree = ("*i32" if given else None for given in (packed, tree))
    return Tables(
        cu_seqlens_q=of_packed, cu_seqlens_k=of_packed, subtree_end=of_tree, segment_of=of_tree, segments=of_tree,
        depths=of_tree if window else None, next_tile="*i32", window="i32", sinks=None,
    )  # fmt: skip


def _training_descriptor(target: Target, rows: int, width: int) -> str:
    layout = "NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)"
    return f"tensordesc<{target.dtype}[1, {rows}, 1, {width}],{layout}>"


def compile_portable_latent(target: Target, tile: GpuTile, masked: bool = False) -> Resources:
    """`portable_latent_kernel` for one tile, of 512 + 64 columns."""
    from trunkattn.gpu.mla import portable, spec

    dims = (spec.LATENT_DIM, spec.ROPE_DIM)
    constants: dict[str, object] = {
        "SHAPE": portable.LatentShape(*target.heads, PAGE_SIZE, *dims, *dims),
        "TILE": decode_tile(tile, PAGE_SIZE),
        "FEATURES": target.no_features._replace(masked=masked, return_lse=True),
        "BUCKETS": Buckets(0, -1, False),
        "PDL": Pdl(False, False),
    }
    return compile_triton(portable.portable_latent_kernel, target, constants, tile.warps)


def compile_merge(target: Target, features: Features | None = None, batch_invariant: bool = False) -> Resources:
    """`merge_kernel`; features: None for none."""
    features = features or target.no_features
    tile = merge_tile(target.num_qo_heads, target.head_dim, batch_invariant)
    constants: dict[str, object] = {
        "COUNT_AT": 5,
        "SHAPE": merge_shape(target.num_qo_heads, target.num_kv_heads, target.head_dim, tile),
        "SINKS": features.sinks,
        "RETURN_LSE": features.return_lse,
        "PDL": Pdl(False, target.capability >= 90),
    }
    return compile_triton(merge_kernel, target, constants, tile.warps)


def _attention_constants(target: Target, page_size: int, soft_cap: float, sinks: bool) -> Any:
    """The constants that all Hopper attention kernels have."""
    from trunkattn.gpu.hopper.arguments import attention_constants

    geometry = replace(target.geometry, page_size=page_size, soft_cap=soft_cap, sinks=sinks)
    return attention_constants(geometry, return_lse=False)


def _layer(target: Target) -> Any:
    """The types of a layer's tensors."""
    from trunkattn.gpu.hopper.arguments import Layer

    strides = {name: "i32" for name in Layer._fields if name.endswith("_stride")}
    return of_one_kind(Layer, "*fp32", q=f"*{target.dtype}", out=f"*{target.dtype}", **strides)


def _tma_descriptor(target: Target) -> str:
    kind, bits, dims = target.kv_dtype, 16, 64
    if TORCH_DTYPES[target.kv_dtype].itemsize == 1:
        kind, bits, dims = "u8", 8, min(target.head_dim, 128)
    layout = f"NVMMASharedLayout(swizzle_byte_width={dims * bits // 8}, element_bitwidth={bits}, rank=4)"
    return f"tensordesc<{kind}[1, 16, 1, {dims}],{layout}>"
