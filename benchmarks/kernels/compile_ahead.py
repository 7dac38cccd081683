"""The GPU kernels compiled without a GPU, and what they need of one: registers, spills, shared memory (PAT §5.2).

Not for a process in which Triton interprets (TRITON_INTERPRET).
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from benchmarks.kernels.tile_solver import PipelineOps, Resources
from trunkattn.gpu.hopper.spec import Source, source_of
from trunkattn.gpu.layer import Geometry, Pdl
from trunkattn.gpu.portable import arguments
from trunkattn.gpu.portable.arguments import Features, Shape
from trunkattn.gpu.portable.decode import decode_kernel
from trunkattn.gpu.portable.decode_arguments import Buckets, decode_tile
from trunkattn.gpu.portable.merge import merge_kernel, merge_shape
from trunkattn.gpu.portable.prefill import prefill_kernel, tile_shape
from trunkattn.gpu.portable.spec import merge_tile
from trunkattn.gpu.tiles import GpuTile, PrefillTile
from trunkattn.planner.work_list import UNLIMITED

_TYPES = MappingProxyType({
    "lse": "*fp32", "partial": "*fp32", "partial_lse": "*fp32", "logit_scale": "*fp32",
    "v_scale": "*fp32", "sinks": "*fp32", "soft_cap": "fp32",
})  # fmt: skip
_PAGE_SIZE = 16
_CACHES = ("k_cache", "v_cache", "cache")
_TORCH_DTYPES = MappingProxyType(
    {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}
)
_ARRAYS = (
    "items", "segments", "queries", "positions", "counts", "partial_slots", "merge_slots", "count",
    "ranges", "block_table",
)  # fmt: skip


@dataclass(frozen=True)
class Target:
    """A card and an attention with pages of 16. capability: 80, 90, 100, ...; dtype, kv_dtype: of queries and of keys
    and values, by Triton's names."""

    capability: int
    head_dim: int = 128
    num_qo_heads: int = 32
    num_kv_heads: int = 8
    dtype: str = "bf16"
    kv_dtype: str = "bf16"

    @property
    def types(self) -> dict[str, str]:
        """Types of the tensors in its dtypes."""
        of_q, of_kv = (
            dict.fromkeys(("q", "q_rope", "out"), f"*{self.dtype}"),
            dict.fromkeys(_CACHES, f"*{self.kv_dtype}"),
        )
        return of_q | of_kv

    @property
    def geometry(self) -> Geometry:
        """The attention, without masks and options."""
        return Geometry(
            num_qo_heads=self.num_qo_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim,
            head_dim_v=self.head_dim, page_size=_PAGE_SIZE, segment_size=_PAGE_SIZE, window=UNLIMITED, masked=False,
            soft_cap=None, sinks=False,
        )  # fmt: skip

    @property
    def shape(self) -> Shape:
        """Constants of the attention."""
        return arguments.shape(self.geometry)

    @property
    def no_features(self) -> Features:
        """The constants of an attention without masks and options."""
        precision = "ieee" if self.dtype == "fp32" else "tf32"
        return Features(masked=False, soft_cap=False, sinks=False, return_lse=False, precision=precision)

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, KV heads, query heads per KV head."""
        return self.num_qo_heads, self.num_kv_heads, self.num_qo_heads // self.num_kv_heads


def compile_decode(target: Target, tile: GpuTile, merges: bool = False, features: Features | None = None) -> Resources:
    """`decode_kernel` for one tile; `merges`: the variant that merges partials. features: None for none."""
    constants: dict[str, object] = {
        "SHAPE": target.shape,
        "TILE": decode_tile(tile, _PAGE_SIZE),
        "FEATURES": features or target.no_features,
        "BUCKETS": Buckets(0, 2 if merges else -1, merges),
        "PDL": Pdl(False, merges and target.capability >= 90),
    }
    return _compile(decode_kernel, target, constants, {"num_warps": tile.warps})


def compile_prefill(target: Target, tile: PrefillTile, features: Features | None = None) -> Resources:
    """`prefill_kernel` for one tile; features: None for none."""
    constants: dict[str, object] = {
        "SHAPE": target.shape,
        "TILE": tile_shape(tile, _PAGE_SIZE),
        "FEATURES": features or target.no_features,
        "PDL": Pdl(target.capability >= 90, False),
    }
    return _compile(prefill_kernel, target, constants, {"num_warps": tile.warps})


def compile_hopper_decode(
    target: Target,
    masked: bool = False,
    soft_cap: float = 0.0,
    sinks: bool = False,
    page_size: int = _PAGE_SIZE,
) -> Resources:
    """`hopper_decode_kernel`, for an sm_90. registers: of a thread on average; producer and consumer warps have shares
    of their own. masked: requests have several query tokens. page_size: tokens; under 16 they are gathered."""
    from trunkattn.gpu.hopper import decode_arguments as decode
    from trunkattn.gpu.hopper import widen
    from trunkattn.gpu.hopper.decode import hopper_decode_kernel
    from trunkattn.gpu.hopper.segments import RowTiles

    tiles, kv_bytes = _same(RowTiles, "*i32"), _TORCH_DTYPES[target.kv_dtype].itemsize
    source = source_of(kv_bytes, page_size)
    shape = decode.shape_of(target.head_dim, source)
    cache = "*i32" if source is Source.GATHERED else _tma_descriptor(target)
    arguments = _same(
        decode.DecodeArguments,
        "i32",
        layer=_layer(target),
        k_desc=cache,
        v_desc=cache,
        work=decode.DecodeWork(tiles, counts="*i32", window="i32", pdl=Pdl("u1", "u1")),
        C=decode.DecodeConstants(
            **_attention_constants(target, page_size, soft_cap, sinks),
            segment_size=min(page_size, _PAGE_SIZE),
            masked=masked,
            source=int(source),
            kv_bytes=kv_bytes,
            kv_kind=widen.kind_of(_TORCH_DTYPES[target.kv_dtype]),
            tile=decode.tile_of(target.head_dim, source, masked),
            producer_registers=shape.producer_registers,
        ),
    )
    return _compile_hopper(hopper_decode_kernel, target, arguments, shape.registers)


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
        work=prefill.PrefillWork(_same(prefill.Chunks, "*i32", table_stride="i32"), "*i32", "*i32", window="i32"),
        C=prefill.PrefillConstants(
            **_attention_constants(target, _PAGE_SIZE, soft_cap, sinks),
            windowed=window,
            ctas_per_sm=ctas_per_sm,
            pdl_trigger=True,
        ),
    )
    return _compile_hopper(hopper_prefill_kernel, target, arguments, REGISTERS[ctas_per_sm])


def compile_hopper_prefill_decode(
    target: Target, masked: bool = False, window: bool = False, soft_cap: float = 0.0, sinks: bool = False
) -> Resources:
    """`hopper_prefill_decode_kernel`; as `compile_hopper_decode`. With a window requests are masked, too."""
    from trunkattn.gpu.hopper import prefill_arguments as prefill
    from trunkattn.gpu.hopper.prefill_decode import REGISTERS, hopper_prefill_decode_kernel
    from trunkattn.gpu.hopper.segments import RowTiles

    chunks, tiles = _same(prefill.Chunks, "*i32", table_stride="i32"), _same(RowTiles, "*i32")
    arguments = prefill.PrefillDecodeArguments(
        layer=_layer(target),
        k_desc=_tma_descriptor(target),
        v_desc=_tma_descriptor(target),
        work=prefill.PrefillDecodeWork(chunks, "*i32", tiles, item_range="*i32", window="i32"),
        C=prefill.PrefillDecodeConstants(
            **_attention_constants(target, _PAGE_SIZE, soft_cap, sinks),
            segment_size=_PAGE_SIZE,
            masked=masked or window,
            windowed=window,
            pdl_trigger=True,
        ),
    )
    return _compile_hopper(hopper_prefill_decode_kernel, target, arguments, REGISTERS)


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
    arguments = _same(
        decode.LatentArguments,
        "i32",
        layer=_same(decode.LatentLayer, "*fp32", **in_dtype, **strides),
        desc=f"tensordesc<{cached}[1, {segment_size}, {1024 // bits}],{layout}>",
        work=decode.LatentWork(_same(RowTiles, "*i32"), counts="*i32", window="i32", pdl=Pdl("u1", "u1")),
        C=decode.constants(
            target.num_qo_heads, group_size, page_size, segment_size, masked, return_lse=True, kv_bytes=bits // 8
        ),
    )
    return _compile_hopper(decode.latent_decode_kernel, target, arguments, decode.REGISTERS)


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
    from trunkattn.training.hopper.query_tiles import Tables
    from trunkattn.training.spec import hopper_forward_tile

    dims = (target.head_dim, head_dim_v)
    tile = hopper_forward_tile(dims)
    variant = Variant(causal, packed, tree, window, soft_cap > 0, sinks, even_q=False, even_k=False)
    constants = forward.forward_constants(dims, tile, variant, soft_cap)
    keys, head_values = (shape.parts[-1].width for shape in (constants.mainloop, constants.value_shape))
    rows = (64, keys), (tile.block_n, keys), (tile.block_n, head_values), (64, head_values)
    q_desc, k_desc, v_desc, out_desc = (_training_descriptor(target, *box) for box in rows)
    of_packed, of_tree = ("*i32" if given else None for given in (packed, tree))
    arguments = forward.ForwardArguments(
        q_desc=q_desc, k_desc=k_desc, v_desc=v_desc, out_desc=out_desc,
        outputs=forward.Outputs(f"*{target.dtype}", "*fp32"),
        tables=Tables(
            cu_seqlens_q=of_packed, cu_seqlens_k=of_packed, subtree_end=of_tree, segment_of=of_tree, segments=of_tree,
            depths=of_tree if window else None, next_tile="*i32", window="i32", sinks="*fp32" if sinks else None,
        ),
        num_sequences="i32", section="i32", scale="fp32", C=constants,
    )  # fmt: skip
    return _compile_hopper(hopper_forward_kernel, target, arguments, LAUNCH_REGISTERS, checks_products=True)


def _training_descriptor(target: Target, rows: int, width: int) -> str:
    layout = "NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)"
    return f"tensordesc<{target.dtype}[1, {rows}, 1, {width}],{layout}>"


def compile_portable_latent(target: Target, tile: GpuTile, masked: bool = False) -> Resources:
    """`portable_latent_kernel` for one tile, of 512 + 64 columns."""
    from trunkattn.gpu.mla import portable, spec

    dims = (spec.LATENT_DIM, spec.ROPE_DIM)
    constants: dict[str, object] = {
        "SHAPE": portable.LatentShape(*target.heads, _PAGE_SIZE, *dims, *dims),
        "TILE": decode_tile(tile, _PAGE_SIZE),
        "FEATURES": target.no_features._replace(masked=masked, return_lse=True),
        "BUCKETS": Buckets(0, -1, False),
        "PDL": Pdl(False, False),
    }
    return _compile(portable.portable_latent_kernel, target, constants, {"num_warps": tile.warps})


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
    return _compile(merge_kernel, target, constants, {"num_warps": tile.warps})


def _compile(
    kernel: Any,
    target: Target,
    constants: dict[str, object],
    options: dict[str, int],
) -> Resources:
    """The arguments are typed and aligned as a launch on a GPU finds them."""
    for name, number in (("NUM_QO_HEADS", target.num_qo_heads), ("NUM_KV_HEADS", target.num_kv_heads)):
        if name in kernel.arg_names:
            constants[name] = number
    types = _TYPES | target.types | dict.fromkeys(_ARRAYS, "*i32")
    signature, aligned = signature_of(kernel, constants, types)
    source = ASTSource(kernel, signature, {(kernel.arg_names.index(k),): v for k, v in constants.items()}, aligned)
    return _resources(source, target, options)


def _same(named: Any, kind: str, **others: Any) -> Any:
    """A NamedTuple of one type in all fields but others."""
    return named(**dict.fromkeys(named._fields, kind) | others)


def _attention_constants(target: Target, page_size: int, soft_cap: float, sinks: bool) -> Any:
    """The constants that all Hopper attention kernels have."""
    from trunkattn.gpu.hopper.arguments import attention_constants

    geometry = replace(target.geometry, page_size=page_size, soft_cap=soft_cap, sinks=sinks)
    return attention_constants(geometry, return_lse=False)


def _layer(target: Target) -> Any:
    """The types of a layer's tensors."""
    from trunkattn.gpu.hopper.arguments import Layer

    strides = {name: "i32" for name in Layer._fields if name.endswith("_stride")}
    return _same(Layer, "*fp32", q=f"*{target.dtype}", out=f"*{target.dtype}", **strides)


def _tma_descriptor(target: Target) -> str:
    kind, bits, dims = target.kv_dtype, 16, 64
    if _TORCH_DTYPES[target.kv_dtype].itemsize == 1:
        kind, bits, dims = "u8", 8, min(target.head_dim, 128)
    layout = f"NVMMASharedLayout(swizzle_byte_width={dims * bits // 8}, element_bitwidth={bits}, rank=4)"
    return f"tensordesc<{kind}[1, 16, 1, {dims}],{layout}>"


def _compile_hopper(
    kernel: Any, target: Target, arguments: Any, registers: int, checks_products: bool = False
) -> Resources:
    """Compiles a Hopper kernel. arguments: types, but for the constants C and absent ones; aligned as a launch on a
    GPU finds them. checks_products: asks the assembler whether products are serialized, for which it runs again."""
    from triton.experimental.gluon._runtime import GluonASTSource

    signature = {name: _with_absent(kind) for name, kind in arguments._asdict().items()} | {"C": "constexpr"}
    constexprs = {(kernel.arg_names.index("C"),): arguments.C} | dict.fromkeys(_absent_paths(arguments))
    aligned = {path: [["tt.divisibility", 16]] for path in _aligned_paths(arguments)}
    source = GluonASTSource(kernel, signature, constexprs, aligned)
    options = {"num_warps": 4, "maxnreg": registers}
    used = _resources(source, target, options)
    if not checks_products:
        return used
    compiled = triton.compile(source, target=GPUTarget("cuda", target.capability, 32), options=options)
    return replace(used, serialized=_is_serialized(compiled.asm["ptx"], target.capability))


def _is_serialized(ptx: str, capability: int) -> bool:
    """Whether the assembler serializes matrix products, which its notes C7510 to C7519 say."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [get_ptxas(capability).path, f"-arch=sm_{capability}a", "-v", source, "-o", source.with_suffix(".o")]
        notes = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return re.search(r"\bC751\d", notes) is not None


def _with_absent(kind: Any) -> Any:
    """The types of an argument, with None in them as a constant."""
    return (
        kind._replace(**{name: "constexpr" for name, each in kind._asdict().items() if each is None})
        if hasattr(kind, "_fields")
        else kind
    )


def _absent_paths(named: Any) -> Iterator[tuple[int, ...]]:
    """Paths of what is None in the arguments."""
    for index, kind in enumerate(named):
        if hasattr(kind, "_fields") and index + 1 < len(named):
            yield from ((index, at) for at, each in enumerate(kind) if each is None)


def _aligned_paths(named: Any) -> Iterator[tuple[int, ...]]:
    """Paths of what a launch finds to be multiples of 16: pointers and strides."""
    for index, (name, kind) in enumerate(named._asdict().items()):
        if hasattr(kind, "_fields"):
            yield from ((index, *path) for path in _aligned_paths(kind))
        elif isinstance(kind, str) and (kind.startswith("*") or name.endswith("_stride")):
            yield (index,)


def _resources(source: Any, target: Target, options: dict[str, int]) -> Resources:
    compiled = triton.compile(source, target=GPUTarget("cuda", target.capability, 32), options=options)
    cuobjdump = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run([cuobjdump, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    used = {name: int(value) for name, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", text)}
    spilled, shared = used["STACK"] + used["LOCAL"], max(used["SHARED"], compiled.metadata.shared)
    named = re.findall(r"\bbar(?:rier)?(?:\.cta)?\.(?:sync|arrive|red\S*)(?:\.aligned)?\s+(\d+)", compiled.asm["ptx"])
    barriers = 1 + max(map(int, named), default=-1)
    return Resources(used["REG"], spilled, shared, barriers, _pipeline_ops(compiled.asm["ptx"]))


def signature_of(
    kernel: Any, constants: dict[str, object], types: dict[str, str]
) -> tuple[dict[str, Any], dict[tuple[int, ...], list[list[Any]]]]:
    """The types of a kernel's arguments, and which of them are multiples of 16: pointers and strides.

    A parameter that is annotated with a NamedTuple has a type for each of its fields. types: by name of a parameter or
    field; the others are int32.
    """
    signature: dict[str, Any] = {}
    aligned: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, name in enumerate(kernel.arg_names):
        group = kernel.fn.__annotations__.get(name)
        if name in constants:
            signature[name] = "constexpr"
        elif hasattr(group, "_fields"):
            signature[name] = group(*(types.get(field, "i32") for field in group._fields))
            strides = group.__name__.endswith("Strides")
            for at, kind in enumerate(signature[name]):
                if strides or kind.startswith("*"):
                    aligned[index, at] = [["tt.divisibility", 16]]
        else:
            signature[name] = types.get(name, "i32")
            if signature[name].startswith("*") or "_stride_" in name:
                aligned[index,] = [["tt.divisibility", 16]]
    return signature, aligned


def _pipeline_ops(ptx: str) -> PipelineOps | None:
    """The empty barriers of pipelines have numbers that are computed, other barriers have constant ones."""
    texts = (r"\.expect_tx\.", r"\bbar\.sync\s+%r", r"\bwgmma\.commit_group\.", r"\bbar\.arrive\s+%r")
    ops = PipelineOps(*(len(re.findall(text, ptx)) for text in texts))
    return ops if ops.releases else None
