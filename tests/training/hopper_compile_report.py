"""Run by test_hopper_backward in a process of its own, in which Triton compiles for an sm_90. Arguments: names of
kernels, each a head_dim, or that of keys and of values such as "192/128", a group size and a kind of attention: causal,
full, packed or tree, and features such as "causal+window+cap". With "+parts" a CTA has one query head of a group.

Prints JSON: kernel -> registers, spilled bytes, shared bytes, and what ptxas says of matrix products one by one.
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
from triton.experimental.gluon._runtime import GluonASTSource

from trunkattn.training.arguments import Batch, Scales, Variant
from trunkattn.training.hopper.backward import REGISTERS, hopper_backward_kernel
from trunkattn.training.hopper.key_blocks import BackwardConstants, KeyWork
from trunkattn.training.hopper.key_loads import DQ_BOX
from trunkattn.training.hopper.key_tile import NARROW, backward_tile

OFFSETS = ("cu_seqlens_q", "cu_seqlens_k")
TABLES = ("subtree_end", "depths", "segment_of", "segments")


def descriptor(kind: str, box: tuple[int, ...], swizzle: int) -> str:
    bits = 32 if kind == "fp32" else 16
    layout = f"NVMMASharedLayout(swizzle_byte_width={swizzle}, element_bitwidth={bits}, rank={len(box)})"
    return f"tensordesc<{kind}[{', '.join(map(str, box))}],{layout}>"


def compiled(head_dims: tuple[int, int], group_size: int, kind: str, dtype: str = "bf16") -> dict[str, Any]:
    """The main kernel. Packed sequences and trees end inside blocks of keys."""
    kind, *features = kind.split("+")
    tile = backward_tile(*head_dims)
    adds_dq = tile.consumers == NARROW and "deterministic" not in features
    packed, tree, window = kind == "packed", kind == "tree", "window" in features
    variant = Variant(kind != "full", packed, tree, window, "cap" in features, False, False, not (packed or tree))
    members = 1 if "parts" in features else group_size
    out = f"*{dtype}" if members == group_size else "*fp32"
    rows, keys = descriptor(dtype, (1, tile.block_m, 1, 64), 128), descriptor(dtype, (1, 64, 1, 64), 128)
    present = (*(OFFSETS if packed else ()), *(TABLES if tree else ()))
    batch = Batch(*("*i32" if field in present else "i32" for field in Batch._fields))
    absent = {field: "constexpr" for field in (*OFFSETS, *TABLES) if field not in present}
    names = hopper_backward_kernel.arg_names
    types = {
        "q_desc": rows, "k_desc": keys, "v_desc": keys, "dout_desc": rows,
        "dq_desc": descriptor("fp32", DQ_BOX, 128) if adds_dq else "constexpr",
        "rows_desc": descriptor("fp32", (2, tile.block_m), 0),
        "work": KeyWork(out, out, "*i32" if tree and window else "constexpr", *["constexpr"] * 4),
        "batch": batch._replace(**absent), "num_sequences": "i32", "section": "i32",
        "scales": Scales("fp32", "fp32", "fp32"), "C": "constexpr",
    }  # fmt: skip
    place = names.index("batch")
    values: dict[tuple[int, ...], Any] = {(place, Batch._fields.index(field)): None for field in absent}
    values[names.index("C"),] = BackwardConstants(tile, variant, *head_dims, group_size, members, adds_dq)
    pointers = [0, 1, 2] if tree and window else [0, 1]
    values |= {(names.index("work"), at): None for at in range(len(pointers), len(KeyWork._fields))}
    aligned = {(place, Batch._fields.index(field)): [["tt.divisibility", 16]] for field in present}
    aligned |= {(names.index("work"), at): [["tt.divisibility", 16]] for at in pointers}
    if not adds_dq:
        values[names.index("dq_desc"),] = None
    source = GluonASTSource(hopper_backward_kernel, {name: types[name] for name in names}, values, aligned)
    options = {"num_warps": 4, "maxnreg": REGISTERS}
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    said = assembled(binary.asm["ptx"])
    (spilled,) = (int(number) for number in re.findall(r"(\d+) bytes stack frame", said))
    (registers,) = (int(number) for number in re.findall(r"Used (\d+) registers", said))
    serialized = sorted(set(re.findall(r"\(C75\d\d\)", said)))
    return {"registers": registers, "spilled": spilled, "shared": binary.metadata.shared, "serialized": serialized}


def assembled(ptx: str) -> str:
    """What the first of Triton's ptxas says that knows the version of the PTX."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        for name in ("ptxas", "ptxas-blackwell"):
            program = Path(nvidia.__file__).parent / "bin" / name
            command = [program, "-v", "-arch=sm_90a", source, "-o", source.with_suffix(".cubin")]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode == 0:
                return done.stderr
    raise RuntimeError(done.stderr)


def main() -> None:
    report = {}
    for name in sys.argv[1:]:
        dims, group_size, kind = name.split()
        keys, _, head_values = dims.partition("/")
        report[name] = compiled((int(keys), int(head_values or keys)), int(group_size), kind)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
