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

import torch
import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.kernels.compile_ahead import signature_of
from trunkattn.training.backward import prepare_kernel
from trunkattn.training.backward_keys import keys_kernel
from trunkattn.training.backward_queries import queries_kernel
from trunkattn.training.common import Batch, Variant, attention_shape
from trunkattn.training.forward import ForwardTensors, forward_kernel
from trunkattn.training.spec import FlashTile, fitting_tile

KERNELS = MappingProxyType(
    {"forward": forward_kernel, "keys": keys_kernel, "queries": queries_kernel, "one_pass": keys_kernel}
)
TENSORS = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
SUMS = ("lse", "dlse", "shift", "delta")
OFFSETS = ("cu_seqlens_q", "cu_seqlens_k")
TABLES = ("subtree_end", "depths", "segment_of", "segments")
ALIGNED = ("seqlen_q", "seqlen_k", "num_qo_heads")


def compiled(name: str, tile: FlashTile, capability: int, head_dim: int, variant: str = "") -> dict[str, int]:
    """A causal kernel for aligned tensors, as a launch has them; bf16 in a batch, unless `variant` is packed, tree, all
    (a tree with every option) or fp32."""
    kernel, packed, tree = KERNELS.get(name, prepare_kernel), variant == "packed", variant in ("tree", "all")
    kind, options = variant if variant == "fp32" else "bf16", variant == "all"
    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    shape = attention_shape(4, (head_dim, head_dim), dtype)
    constants: dict[str, object] = {
        "SHAPE": shape,
        "WIDTH": shape.keys,
        "TILE": tile,
        "VARIANT": Variant(
            causal=True,
            packed=packed,
            tree=tree,
            window=options,
            soft_cap=options,
            sinks=options and name == "forward",
            even_q=not packed,
            even_k=not packed,
            one_pass=name == "one_pass",
        ),
        "BLOCK": 64,
    }
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    types = dict.fromkeys(TENSORS, f"*{kind}") | dict.fromkeys((*SUMS, "sinks"), "*fp32")
    types |= dict.fromkeys(("log2", "sm_scale", "soft_cap"), "fp32") | dict.fromkeys((*OFFSETS, *TABLES), "*i32")
    types |= {"dq": "*fp32"} if name == "one_pass" else {}
    signature, aligned = signature_of(kernel, constants, types)
    values = {(kernel.arg_names.index(key),): value for key, value in constants.items()}
    for prefix, fields in (((), kernel.arg_names), ((1,), Batch._fields if "batch" in kernel.arg_names else ())):
        for index, field in enumerate(fields):
            if field in ALIGNED:
                aligned[(*prefix, index)] = [["tt.divisibility", 16]]
    absent = [("batch", 1, Batch, field) for field in (*(() if packed else OFFSETS), *(() if tree else TABLES))]
    absent += [("tensors", 0, ForwardTensors, "sinks")] if name == "forward" and not options else []
    for parameter, place, fields_of, field in absent if "batch" in kernel.arg_names else []:
        signature[parameter] = signature[parameter]._replace(**{field: "constexpr"})
        index = (place, fields_of._fields.index(field))
        values[index] = None
        del aligned[index]
    source = ASTSource(kernel, signature, values, aligned)
    launch = {"num_warps": tile.warps, "num_stages": tile.stages}
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch)
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
        if head_dim == 128:
            of_tree = "forward_tree" if name == "forward" else name
            tile = fitting_tile(of_tree, head_dim, 2, limit, blackwell)
            report[f"{name} tree"] = compiled(name, tile, capability, head_dim, "tree")
        if (capability, head_dim) == (90, 128):
            report[f"{name} all"] = compiled(name, tile, capability, head_dim, "all")
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
