"""Run by test_flash_compile in a process of its own, in which Triton compiles. Arguments: compute capability, head_dim,
bytes of shared memory that a program may have.

Prints JSON: kernel -> registers, spilled bytes, shared bytes, with the tile that such a card takes.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import MappingProxyType

import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from trunkattn.training.backward import keys_kernel, prepare_kernel, queries_kernel
from trunkattn.training.forward import FlashTile, fitting_tile, forward_kernel, padded

KERNELS = MappingProxyType(
    {"forward": forward_kernel, "keys": keys_kernel, "queries": queries_kernel, "one_pass": keys_kernel}
)
TENSORS = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
SUMS = ("lse", "dlse", "shift", "delta")
ALIGNED = ("seqlen_q", "seqlen_k", "num_qo_heads")


def compiled(name: str, tile: FlashTile, capability: int, head_dim: int, variant: str = "") -> dict[str, int]:
    """A causal kernel for aligned tensors, as a launch has them; bf16 in a batch, unless `variant` is packed or
    fp32."""
    kernel, packed = KERNELS.get(name, prepare_kernel), variant == "packed"
    kind = variant if variant == "fp32" else "bf16"
    constants: dict[str, object] = {
        "GROUP": 4, "HEAD_DIM": head_dim, "PADDED_DIM": padded(head_dim), "BLOCK": 64, "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n, "CAUSAL": True, "PACKED": packed, "EVEN_Q": not packed, "EVEN_K": not packed,
        "ONE_PASS": name == "one_pass", "PRECISION": "ieee" if kind == "fp32" else "tf32",
        **({} if packed else {"cu_seqlens_q": None, "cu_seqlens_k": None}),
    }  # fmt: skip
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    types = dict.fromkeys(TENSORS, f"*{kind}") | dict.fromkeys(SUMS, "*fp32") | {"scale": "fp32", "sm_scale": "fp32"}
    types |= {"cu_seqlens_q": "*i32", "cu_seqlens_k": "*i32"} | ({"dq": "*fp32"} if name == "one_pass" else {})
    signature = {arg: "constexpr" if arg in constants else types.get(arg, "i32") for arg in kernel.arg_names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, (arg, type_name) in enumerate(signature.items())
        if type_name.startswith("*") or "_stride_" in arg or arg in ALIGNED
    }
    source = ASTSource(kernel, signature, {(kernel.arg_names.index(k),): v for k, v in constants.items()}, aligned)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        command = [Path(nvidia.__file__).parent / "bin" / "cuobjdump", "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = {key: int(value) for key, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", text)}
    spilled, shared = used["STACK"] + used["LOCAL"], max(used["SHARED"], binary.metadata.shared)
    return {"registers": used["REG"], "spilled": spilled, "shared": shared}


def main() -> None:
    capability, head_dim, limit = (int(argument) for argument in sys.argv[1:])
    report, blackwell = {}, capability >= 100
    for name in KERNELS:
        tile = fitting_tile(name, head_dim, 2, limit, blackwell)
        report[name] = compiled(name, tile, capability, head_dim)
    if (capability, head_dim) == (90, 128):
        report["prepare"] = compiled("prepare", FlashTile(64, 64, 4, 1), capability, head_dim)
        report["keys packed"] = compiled(
            "keys", fitting_tile("keys", head_dim, 2, limit, blackwell), capability, head_dim, "packed"
        )
        report["keys fp32"] = compiled(
            "keys", fitting_tile("keys", head_dim, 4, limit, blackwell), capability, head_dim, "fp32"
        )
    print(json.dumps(report))


if __name__ == "__main__":
    main()
