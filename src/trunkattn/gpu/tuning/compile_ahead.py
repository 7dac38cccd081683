"""The GPU kernels compiled without a GPU, and what they need of one: registers, spills, shared memory (PAT §5.2).

Not for a process in which Triton interprets (TRITON_INTERPRET).
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from trunkattn.gpu.plan import Geometry
from trunkattn.gpu.triton import arguments
from trunkattn.gpu.triton.arguments import Features, Shape
from trunkattn.gpu.triton.decode import Buckets, decode_kernel, decode_tile
from trunkattn.gpu.triton.merge import merge_kernel, merge_shape
from trunkattn.gpu.triton.prefill import prefill_kernel, tile_shape
from trunkattn.gpu.tuning.decode import GpuTile
from trunkattn.gpu.tuning.prefill import PrefillTile
from trunkattn.gpu.tuning.tile_solver import Resources, Rings

_BOX = "tensordesc<bf16[1, 16, 1, 64],NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)>"
_TYPES = MappingProxyType({
    "lse": "*fp32", "lse_out": "*fp32", "partial": "*fp32", "partial_lse": "*fp32", "logit_scale": "*fp32",
    "v_scale": "*fp32", "sinks": "*fp32", "soft_cap": "fp32",
    "k_desc": _BOX, "v_desc": _BOX,  # of the copy engine
})  # fmt: skip
_PAGE_SIZE = 16
_CACHES = ("k_cache", "v_cache")
_ARRAYS = (
    "items", "runs", "queries", "slots", "parts", "positions", "counts", "segments", "partial_slots", "merge_slots",
    "count", "ranges", "block_table", "beside", "chunk_items", "chunk_count", "chunk_queries", "chunk_slots",
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
        """Of the tensors in its dtypes."""
        of_q, of_kv = dict.fromkeys(("q", "out"), f"*{self.dtype}"), dict.fromkeys(_CACHES, f"*{self.kv_dtype}")
        return of_q | of_kv

    @property
    def shape(self) -> Shape:
        """Constants of the attention."""
        geometry = Geometry(
            num_qo_heads=self.num_qo_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim,
            head_dim_v=self.head_dim, page_size=_PAGE_SIZE, run=_PAGE_SIZE, window=0, masked=False, soft_cap=None,
            sinks=False,
        )  # fmt: skip
        return arguments.shape(geometry)

    @property
    def no_features(self) -> Features:
        """The constants of an attention without masks and options."""
        precision = "ieee" if self.dtype == "fp32" else "tf32"
        return Features(masked=False, soft_cap=False, sinks=False, return_lse=False, precision=precision)


def compile_decode(target: Target, tile: GpuTile, merges: bool = False, features: Features | None = None) -> Resources:
    """`decode_kernel` for one tile; `merges`: the variant that merges partials. features: None for none."""
    constants: dict[str, object] = {
        "SHAPE": target.shape,
        "TILE": decode_tile(tile, _PAGE_SIZE),
        "FEATURES": features or target.no_features,
        "BUCKETS": Buckets(0, 2 if merges else -1, merges),
        "PDL_TRIGGER": False,
        "PDL_WAIT": merges and target.capability >= 90,
    }
    return _compile(decode_kernel, target, constants, {"num_warps": tile.warps})


def compile_prefill(target: Target, tile: PrefillTile, features: Features | None = None) -> Resources:
    """`prefill_kernel` for one tile; features: None for none."""
    constants: dict[str, object] = {
        "SHAPE": target.shape,
        "TILE": tile_shape(tile, _PAGE_SIZE),
        "FEATURES": features or target.no_features,
        "PDL_TRIGGER": target.capability >= 90,
    }
    return _compile(prefill_kernel, target, constants, {"num_warps": tile.warps})


def compile_prefill_hopper(target: Target, window: bool = False) -> Resources:
    """`prefill_hopper_kernel`, for an sm_90 and heads of 128. registers: of a thread in the mean; warps have shares of
    their own."""
    from triton.experimental.gluon._runtime import GluonASTSource

    from trunkattn.gpu.hopper import prefill as prefill_hopper

    constants: dict[str, object] = {
        "PAGE_SIZE": 16, "WINDOW": window, "RETURN_LSE": False, "LEADS": True, "BLOCK_N": prefill_hopper.BLOCK_N,
        "STAGES": prefill_hopper.STAGES,
    }  # fmt: skip
    options = {"num_warps": 4, "maxnreg": prefill_hopper.REGISTERS}
    return _compile(prefill_hopper.prefill_hopper_kernel, target, constants, options, GluonASTSource)


def compile_hybrid(target: Target, masked: bool = False, window: bool = False) -> Resources:
    """`hybrid_kernel`, for an sm_90 and heads of 128; registers as of `compile_prefill_hopper`. masked: requests have
    several query tokens; with a window they are masked too."""
    from triton.experimental.gluon._runtime import GluonASTSource

    from trunkattn.gpu.hopper import prefill_decode as hybrid

    constants: dict[str, object] = {
        "PAGE_SIZE": 16, "RUN": 16, "MASKED": masked or window, "WINDOW": window, "RETURN_LSE": False, "LEADS": True,
        "SLOTS": hybrid.SLOTS, "CHUNK_REGISTERS": hybrid.CHUNK_REGISTERS, "DECODE_REGISTERS": hybrid.DECODE_REGISTERS,
    }  # fmt: skip
    options = {"num_warps": 4, "maxnreg": hybrid.REGISTERS}
    return _compile(hybrid.hybrid_kernel, target, constants, options, GluonASTSource)


def compile_decode_hopper(target: Target, masked: bool = False) -> Resources:
    """`decode_hopper_kernel`, for an sm_90 and heads of 128; registers and masked as of `compile_hybrid`."""
    from triton.experimental.gluon._runtime import GluonASTSource

    from trunkattn.gpu.hopper import decode as decode_hopper

    constants: dict[str, object] = {
        "PAGE_SIZE": 16, "RUN": 16, "MASKED": masked, "RETURN_LSE": False,
    }  # fmt: skip
    options = {"num_warps": 4, "maxnreg": decode_hopper.REGISTERS}
    return _compile(decode_hopper.decode_hopper_kernel, target, constants, options, GluonASTSource)


def compile_merge(target: Target, features: Features | None = None) -> Resources:
    """`merge_kernel`; features: None for none."""
    features = features or target.no_features
    constants: dict[str, object] = {
        "COUNT_AT": 5,
        "SHAPE": merge_shape(target.num_qo_heads, target.num_kv_heads, target.head_dim),
        "SINKS": features.sinks,
        "RETURN_LSE": features.return_lse,
        "PDL_WAIT": target.capability >= 90,
    }
    return _compile(merge_kernel, target, constants, {"num_warps": 1})


def _compile(
    kernel: Any,
    target: Target,
    constants: dict[str, object],
    options: dict[str, int],
    make_source: Any = ASTSource,
) -> Resources:
    """The arguments are typed and aligned as a launch on a GPU finds them."""
    for name, number in (("NUM_QO_HEADS", target.num_qo_heads), ("NUM_KV_HEADS", target.num_kv_heads)):
        if name in kernel.arg_names:
            constants[name] = number
    types = _TYPES | target.types | dict.fromkeys(_ARRAYS, "*i32")
    signature, aligned = signature_of(kernel, constants, types)
    source = make_source(kernel, signature, {(kernel.arg_names.index(k),): v for k, v in constants.items()}, aligned)
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
    return Resources(used["REG"], spilled, shared, barriers, _rings(compiled.asm["ptx"]))


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


def _rings(ptx: str) -> Rings | None:
    """Barriers of rings have numbers that are computed, others have constant ones."""
    texts = (r"\.expect_tx\.", r"\bbar\.sync\s+%r", r"\bwgmma\.commit_group\.", r"\bbar\.arrive\s+%r")
    rings = Rings(*(len(re.findall(text, ptx)) for text in texts))
    return rings if rings.fills else None
