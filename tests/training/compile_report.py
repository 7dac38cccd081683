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

from benchmarks.kernels.compile_ahead import signature_of
from trunkattn.numerics import padded_head_dim
from trunkattn.training.backward import prepare_kernel
from trunkattn.training.backward_keys import KeysVariant, keys_kernel
from trunkattn.training.backward_queries import queries_kernel
from trunkattn.training.common import Batch, Shape, Variant
from trunkattn.training.forward import forward_kernel
from trunkattn.training.spec import FlashTile, fitting_tile

KERNELS = MappingProxyType(
    {"forward": forward_kernel, "keys": keys_kernel, "queries": queries_kernel, "one_pass": keys_kernel}
)
TENSORS = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
SUMS = ("lse", "dlse", "shift", "delta")
OFFSETS = ("cu_seqlens_q", "cu_seqlens_k")
ALIGNED = ("seqlen_q", "seqlen_k", "num_qo_heads")


def compiled(name: str, tile: FlashTile, capability: int, head_dim: int, variant: str = "") -> dict[str, int]:
    """A causal kernel for aligned tensors, as a launch has them; bf16 in a batch, unless `variant` is packed or
    fp32."""
    kernel, packed = KERNELS.get(name, prepare_kernel), variant == "packed"
    kind = variant if variant == "fp32" else "bf16"
    constants: dict[str, object] = {
        "SHAPE": Shape(4, head_dim, padded_head_dim(head_dim), "ieee" if kind == "fp32" else "tf32"),
        "TILE": tile,
        "VARIANT": Variant(causal=True, packed=packed, even_k=not packed),
        "BLOCK": 64,
    }
    if kernel is keys_kernel:
        one_pass = name == "one_pass"
        constants["VARIANT"] = KeysVariant(
            causal=True, packed=packed, even_q=not packed, even_k=not packed, one_pass=one_pass
        )
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    types = dict.fromkeys(TENSORS, f"*{kind}") | dict.fromkeys(SUMS, "*fp32")
    types |= dict.fromkeys(("scale", "log2", "sm_scale"), "fp32") | dict.fromkeys(OFFSETS, "*i32")
    types |= {"dq": "*fp32"} if name == "one_pass" else {}
    signature, aligned = signature_of(kernel, constants, types)
    values = {(kernel.arg_names.index(key),): value for key, value in constants.items()}
    for prefix, fields in (((), kernel.arg_names), ((1,), Batch._fields if "batch" in kernel.arg_names else ())):
        for index, field in enumerate(fields):
            if field in ALIGNED:
                aligned[(*prefix, index)] = [["tt.divisibility", 16]]
    if not packed and "batch" in kernel.arg_names:
        signature["batch"] = signature["batch"]._replace(**dict.fromkeys(OFFSETS, "constexpr"))
        for field in OFFSETS:
            place = (1, Batch._fields.index(field))
            values[place] = None
            del aligned[place]
    source = ASTSource(kernel, signature, values, aligned)
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
