"""Run by test_compile in a process of its own, in which Triton compiles. Arguments: compute capability, head_dim, bytes
of shared memory that a program may have, and names of kernels (all, if there are none).

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

from benchmarks.kernels.cross_compile import signature_of
from trunkattn.training.arguments import NUMBERS, Batch, Variant, attention_shape
from trunkattn.training.backward import prepare_kernel
from trunkattn.training.backward_keys import keys_kernel
from trunkattn.training.backward_queries import queries_kernel
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
    any_length = packed or tree or name == "prepare"
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
            if field in ALIGNED and not (any_length and field in NUMBERS):
                aligned[(*prefix, index)] = [["tt.divisibility", 16]]
    absent = [("batch", 1, Batch, field) for field in (*(() if packed else OFFSETS), *(() if tree else TABLES))]
    absent += [("tensors", 0, ForwardTensors, "sinks")] if name == "forward" and not options else []
    for parameter, place, fields_of, field in absent if "batch" in kernel.arg_names else []:
        signature[parameter] = signature[parameter]._replace(**{field: "constexpr"})
        index = (place, fields_of._fields.index(field))
        values[index] = None
        aligned.pop(index, None)
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


def tile_of(name: str, variant: str, target: tuple[int, int, int]) -> FlashTile:
    """The tile of a pass on a card: (capability, head_dim, bytes of shared memory)."""
    capability, head_dim, limit = target
    if name == "prepare":
        return FlashTile(64, 64, 4, 1)
    name = "forward_tree" if name == "forward" and variant in ("tree", "all") else name
    return fitting_tile(name, head_dim, 4 if variant == "fp32" else 2, limit, capability >= 100)


def main() -> None:
    capability, head_dim, limit = (int(argument) for argument in sys.argv[1:4])
    hopper = (capability, head_dim) == (90, 128)
    variants = ["", *(["tree"] if head_dim == 128 else []), *(["all"] if hopper else [])]
    kernels = {f"{name} {variant}".strip(): (name, variant) for name in KERNELS for variant in variants}
    if hopper:
        kernels |= {"prepare": ("prepare", ""), "keys packed": ("keys", "packed"), "keys fp32": ("keys", "fp32")}
    report = {}
    for chosen in sys.argv[4:] or kernels:
        name, variant = kernels[chosen]
        report[chosen] = compiled(
            name, tile_of(name, variant, (capability, head_dim, limit)), capability, head_dim, variant
        )
    print(json.dumps(report))


if __name__ == "__main__":
    main()
