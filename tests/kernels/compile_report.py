"""Run by test_compile in a process of its own: compiles the GPU kernels without a GPU and prints what ptxas made.

Arguments: compute capability, head_dim. Prints JSON: name -> registers, spilled bytes, shared memory bytes.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from trunkattn.kernels.decode import decode_kernel
from trunkattn.kernels.merge_partials import merge_kernel
from trunkattn.kernels.tile_table import GpuTile, decode_tiles

CUOBJDUMP = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
POINTERS = {
    "q": "*bf16", "k_cache": "*bf16", "v_cache": "*bf16", "out": "*bf16", "lse_out": "*fp32", "partial": "*fp32",
    "partial_lse": "*fp32", "logit_scale": "*fp32", "v_scale": "*fp32", "sinks": "*fp32", "soft_cap": "fp32",
}  # fmt: skip
ARRAYS = ("items", "runs", "queries", "slots", "parts", "positions", "counts", "merge_queries", "merge_ranges")
# A layer of Llama-3 8B; the strides of its tensors are multiples of 16.
HEADS: dict[str, object] = {"NUM_QO_HEADS": 32, "NUM_KV_HEADS": 8}


def compile_kernel(kernel: Any, constants: dict[str, object], capability: int, options: dict[str, int]) -> Any:
    """The arguments are typed and aligned as a launch on a GPU finds them."""
    types = POINTERS | dict.fromkeys(ARRAYS, "*i32")
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or "_stride_" in name
    }
    source = ASTSource(kernel, signature, {(kernel.arg_names.index(k),): v for k, v in constants.items()}, aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def compile_tile(tile: GpuTile, capability: int, head_dim: int, merges: bool) -> Any:
    constants: dict[str, object] = HEADS | {
        "BUCKET": 0, "PAGE_SIZE": 16, "RUN": 16, "HEAD_DIM": head_dim, "HEAD_DIM_V": head_dim,
        "PADDED_DIM": head_dim, "PADDED_DIM_V": head_dim, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
        "MASKED": False, "MERGE": merges, "SOFT_CAP": False, "SINKS": False, "RETURN_LSE": False,
        "STAGES": tile.stages, "PRECISION": "tf32", "OVERLAP": merges and capability >= 90,
    }  # fmt: skip
    options = {"num_warps": tile.warps} | ({"maxnreg": tile.max_registers} if tile.max_registers else {})
    return compile_kernel(decode_kernel, constants, capability, options)


def compile_merge(capability: int, head_dim: int) -> Any:
    constants: dict[str, object] = HEADS | {
        "COUNT_AT": 10, "HEAD_DIM_V": head_dim, "PADDED_DIM_V": head_dim, "BLOCK_P": 16, "SINKS": False,
        "RETURN_LSE": False,
    }  # fmt: skip
    return compile_kernel(merge_kernel, constants, capability, {"num_warps": 2})


def resources(compiled: Any) -> dict[str, int]:
    """Registers of a thread, bytes of its stack and local memory (spills), shared memory of a program."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    used = {name: int(value) for name, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", text)}
    spilled = used["STACK"] + used["LOCAL"]
    return {"registers": used["REG"], "spilled": spilled, "shared": max(used["SHARED"], compiled.metadata.shared)}


def main() -> None:
    capability, head_dim = int(sys.argv[1]), int(sys.argv[2])
    report = {"merge": resources(compile_merge(capability, head_dim))}
    for tile in decode_tiles(batch_invariant=False, kv_itemsize=2, width=head_dim):
        for merges in (False, True):
            name = f"{tile.block_m}x{tile.block_n}{' merging' if merges else ''}"
            report[name] = resources(compile_tile(tile, capability, head_dim, merges))
    print(json.dumps(report))


if __name__ == "__main__":
    main()
