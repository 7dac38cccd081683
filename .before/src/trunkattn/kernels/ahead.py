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

from trunkattn.kernels import gpu
from trunkattn.kernels.decode import decode_kernel
from trunkattn.kernels.merge_partials import merge_kernel
from trunkattn.kernels.persistent import persistent_kernel
from trunkattn.kernels.prefill import prefill_kernel
from trunkattn.kernels.tile_solver import Resources, Rings
from trunkattn.kernels.tile_table import GpuTile, Tile

_BOX = "tensordesc<bf16[1, 16, 1, 64],NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)>"
_TYPES = MappingProxyType({
    "lse_out": "*fp32", "partial": "*fp32", "partial_lse": "*fp32", "logit_scale": "*fp32", "v_scale": "*fp32",
    "sinks": "*fp32", "soft_cap": "fp32",
    "k_desc": _BOX, "v_desc": _BOX,  # of the copy engine
})  # fmt: skip
_CACHES = ("k_cache", "v_cache")
_ARRAYS = (
    "items", "runs", "queries", "slots", "parts", "positions", "counts", "merge_queries", "merge_ranges", "counters",
    "block_table", "beside", "chunk_items", "chunk_count", "chunk_queries", "chunk_slots",
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
    def precision(self) -> str:
        """Of products of float32."""
        return "ieee" if self.dtype == "fp32" else "tf32"


def compile_decode(target: Target, tile: GpuTile, merges: bool = False) -> Resources:
    """`decode_kernel` for one tile, without masks and options; `merges`: the variant that merges partials."""
    dim = target.head_dim
    constants: dict[str, object] = {
        "BUCKET": 0, "ALSO": 2 if merges else -1, "PAGE_SIZE": 16, "RUN": 16, "HEAD_DIM": dim, "HEAD_DIM_V": dim,
        "PADDED_DIM": gpu.padded(dim), "PADDED_DIM_V": gpu.padded(dim),
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "SUBTILES": tile.subtiles,
        "PRIVATE_N": tile.private_n, "MASKED": False, "MERGE": merges,
        "SOFT_CAP": False, "SINKS": False, "RETURN_LSE": False, "STAGES": tile.stages, "PRECISION": target.precision,
        "LEADS": False, "FOLLOWS": merges and target.capability >= 90,
    }  # fmt: skip
    return _compile(decode_kernel, target, constants, {"num_warps": tile.warps})


def compile_persistent(target: Target, tiles: tuple[GpuTile, ...]) -> Resources:
    """`persistent_kernel` for the tiles of a table, without masks and options."""
    dim = target.head_dim
    constants: dict[str, object] = {
        "PAGE_SIZE": 16, "RUN": 16, "HEAD_DIM": dim, "HEAD_DIM_V": dim, "PADDED_DIM": gpu.padded(dim),
        "PADDED_DIM_V": gpu.padded(dim), "MASKED": False, "SOFT_CAP": False, "SINKS": False, "RETURN_LSE": False,
        "PRECISION": target.precision, "HEIGHTS": len(tiles), **gpu.persistent_shapes(tiles),
    }  # fmt: skip
    _, warps = gpu.persistent_launch(tiles, target.capability >= 90)
    options = {"num_warps": warps, "launch_cooperative_grid": True}
    return _compile(persistent_kernel, target, constants, options)


def compile_prefill(target: Target, tile: Tile) -> Resources:
    """`prefill_kernel` for one tile, without options."""
    dim = target.head_dim
    constants: dict[str, object] = {
        "PAGE_SIZE": 16, "RUN": 16, "HEAD_DIM": dim, "HEAD_DIM_V": dim, "PADDED_DIM": gpu.padded(dim),
        "PADDED_DIM_V": gpu.padded(dim), "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "SOFT_CAP": False,
        "SINKS": False, "RETURN_LSE": False, "STAGES": tile.stages, "PRECISION": target.precision,
        "LEADS": target.capability >= 90,
    }  # fmt: skip
    return _compile(prefill_kernel, target, constants, {"num_warps": tile.warps})


def compile_prefill_hopper(target: Target, window: bool = False) -> Resources:
    """`prefill_hopper_kernel`, for an sm_90 and heads of 128. registers: of a thread in the mean; warps have shares of
    their own."""
    from triton.experimental.gluon._runtime import GluonASTSource

    from trunkattn.kernels import prefill_hopper

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

    from trunkattn.kernels import hybrid

    constants: dict[str, object] = {
        "PAGE_SIZE": 16, "RUN": 16, "MASKED": masked or window, "WINDOW": window, "RETURN_LSE": False, "LEADS": True,
        "SLOTS": hybrid.SLOTS, "CHUNK_REGISTERS": hybrid.CHUNK_REGISTERS, "DECODE_REGISTERS": hybrid.DECODE_REGISTERS,
    }  # fmt: skip
    options = {"num_warps": 4, "maxnreg": hybrid.REGISTERS}
    return _compile(hybrid.hybrid_kernel, target, constants, options, GluonASTSource)


def compile_decode_hopper(target: Target, masked: bool = False) -> Resources:
    """`decode_hopper_kernel`, for an sm_90 and heads of 128; registers and masked as of `compile_hybrid`."""
    from triton.experimental.gluon._runtime import GluonASTSource

    from trunkattn.kernels import decode_hopper

    constants: dict[str, object] = {
        "PAGE_SIZE": 16, "RUN": 16, "MASKED": masked, "RETURN_LSE": False,
    }  # fmt: skip
    options = {"num_warps": 4, "maxnreg": decode_hopper.REGISTERS}
    return _compile(decode_hopper.decode_hopper_kernel, target, constants, options, GluonASTSource)


def compile_merge(target: Target) -> Resources:
    """`merge_kernel`."""
    constants: dict[str, object] = {
        "COUNT_AT": 5, "HEAD_DIM_V": target.head_dim, "PADDED_DIM_V": gpu.padded(target.head_dim),
        "SINKS": False, "RETURN_LSE": False, "FOLLOWS": target.capability >= 90,
    }  # fmt: skip
    return _compile(merge_kernel, target, constants, {"num_warps": 1})


def _compile(
    kernel: Any,
    target: Target,
    constants: dict[str, object],
    options: dict[str, int],
    make_source: Any = ASTSource,
) -> Resources:
    """The arguments are typed and aligned as a launch on a GPU finds them."""
    constants |= {"NUM_QO_HEADS": target.num_qo_heads, "NUM_KV_HEADS": target.num_kv_heads}
    types = _TYPES | target.types | dict.fromkeys(_ARRAYS, "*i32")
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or "_stride_" in name
    }
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


def _rings(ptx: str) -> Rings | None:
    """Barriers of rings have numbers that are computed, others have constant ones."""
    texts = (r"\.expect_tx\.", r"\bbar\.sync\s+%r", r"\bwgmma\.commit_group\.", r"\bbar\.arrive\s+%r")
    rings = Rings(*(len(re.findall(text, ptx)) for text in texts))
    return rings if rings.fills else None
