"""Compiles one GPU kernel without a GPU, for any card, and says what it needs of one: registers, spills, shared memory
(PAT §5.2). `compile_kernels` has a function for each kernel.

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
from trunkattn.gpu.layer import Geometry
from trunkattn.gpu.portable import arguments
from trunkattn.gpu.portable.arguments import Features, Shape
from trunkattn.planner.work_list import UNLIMITED

_TYPES = MappingProxyType({
    "lse": "*fp32", "partial": "*fp32", "partial_lse": "*fp32", "logit_scale": "*fp32",
    "v_scale": "*fp32", "sinks": "*fp32", "soft_cap": "fp32",
})  # fmt: skip
PAGE_SIZE = 16
_CACHES = ("k_cache", "v_cache", "cache")
TORCH_DTYPES = MappingProxyType(
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
            head_dim_v=self.head_dim, page_size=PAGE_SIZE, segment_size=PAGE_SIZE, window=UNLIMITED, masked=False,
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


def compile_triton(kernel: Any, target: Target, constants: dict[str, object], num_warps: int) -> Resources:
    """What a Triton kernel needs. Its other arguments are typed and aligned as a launch on a GPU finds them."""
    types = _TYPES | target.types | dict.fromkeys(_ARRAYS, "*i32")
    signature, aligned = signature_of(kernel, constants, types)
    source = ASTSource(kernel, signature, {(kernel.arg_names.index(k),): v for k, v in constants.items()}, aligned)
    return _resources(source, target, {"num_warps": num_warps})


def of_one_kind(named: Any, kind: str, **others: Any) -> Any:
    """A NamedTuple of one type in all fields but others."""
    return named(**dict.fromkeys(named._fields, kind) | others)


def compile_gluon(kernel: Any, target: Target, arguments: Any, registers: int) -> Resources:
    """What a Gluon kernel for Hopper needs. arguments: types, but for the constants C and absent ones; aligned as a
    launch on a GPU finds them. The assembler runs a second time to say whether products are serialized."""
    from triton.experimental.gluon._runtime import GluonASTSource

    signature = {name: _with_absent(kind) for name, kind in arguments._asdict().items()} | {"C": "constexpr"}
    constexprs = {(kernel.arg_names.index("C"),): arguments.C} | dict.fromkeys(_absent_paths(arguments))
    aligned = {path: [["tt.divisibility", 16]] for path in _aligned_paths(arguments)}
    source = GluonASTSource(kernel, signature, constexprs, aligned)
    options = {"num_warps": 4, "maxnreg": registers}
    used = _resources(source, target, options)
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
