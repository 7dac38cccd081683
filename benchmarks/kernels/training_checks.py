"""Training besides speed: errors of gradients, peak memory, and counted work of `flash_attention`.

    python -m benchmarks.kernels.training_checks                    # into results/flash-training-CARD.json, `checks`
    python -m benchmarks.kernels.training_checks --device cpu

Errors are the largest ones against float64, over those of plain PyTorch in the same dtype. Memory is that of a forward
and a backward pass of one sequence, beside PyTorch's flash and math back ends. Repeats count the runs with
`deterministic=True` whose output or gradients differ in a bit from those of the first run.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from benchmarks.kernels.flash_training import plain
from benchmarks.kernels.training_cells import Inputs, both_passes, random_inputs
from benchmarks.kernels.training_peers import Shape, ours, torchs
from benchmarks.kernels.tree_attentions import ours as ours_over_trees
from benchmarks.lib.internals import own_training_kernels
from benchmarks.lib.options import usable_device
from benchmarks.lib.report import date_and_commit, read_result, short_name, write_result
from benchmarks.workloads.training_trees import parse_training_tree

HEAD_DIM = 128
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
MEMORY_HEADS = {"cuda": (8, 128), "cpu": (4, 64)}
MEMORY_LENGTHS = {"cuda": LENGTHS, "cpu": (512, 1024, 2048, 4096)}
ERROR_LENGTH = {"cuda": 2048, "cpu": 512}
ERROR_DTYPES = {"cuda": (torch.float16, torch.bfloat16, torch.float32), "cpu": (torch.bfloat16, torch.float32)}
REPEATS = {"cuda": 1000, "cpu": 20}
REPEATED = {"cuda": (2048, "2048 + 16x1024"), "cpu": (128, "32 + 4x16")}  # a length and a tree
ATTENTIONS = {
    "own": ours(False),
    "deterministic": ours(True),
    "torch_flash": torchs(SDPBackend.FLASH_ATTENTION),
    "torch_math": torchs(SDPBackend.MATH),
}
MEASURED_MEMORY = ("own", "torch_flash", "torch_math")


def peak_bytes(name: str, length: int, device: str) -> int:
    """What a forward and a backward pass of one sequence take at their peak, inputs and their gradients included."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    heads, head_dim = MEMORY_HEADS[device]

    def step(length: int) -> None:
        attend = ATTENTIONS[name](Shape(True, 1, length, heads, heads, head_dim), device)
        both_passes(attend, random_inputs((1, length), (heads, heads), head_dim, device, dtype))

    step(64)
    if device == "cuda":
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step(length)
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = _status("VmRSS")
    step(length)
    return _status("VmHWM") - before


def _status(field: str) -> int:
    """Bytes of a figure that Linux keeps of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def memory(device: str) -> list[dict[str, Any]]:
    """Peak memory. On a CPU each figure comes from a process of its own, which has not kept what another freed."""
    rows = []
    for length in MEMORY_LENGTHS[device]:
        row: dict[str, Any] = {"length": length}
        for name in MEASURED_MEMORY:
            if device == "cuda":
                row[name] = peak_bytes(name, length, device)
            else:
                command = [sys.executable, "-m", "benchmarks.kernels.training_checks", "--device", "cpu"]
                command += ["--peak", name, str(length)]
                row[name] = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        rows.append(row)
        print({key: value if key == "length" else f"{value / 1e6:.0f} MB" for key, value in row.items()}, flush=True)
    return rows


def plain_causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The textbook formula, causal."""
    return plain(q, k, v, True)


def errors(device: str) -> list[dict[str, Any]]:
    """Largest errors against float64 over those of plain PyTorch in the same dtype."""
    rows = []
    length = ERROR_LENGTH[device]
    shape = Shape(True, 1, length, 2, 2, HEAD_DIM)
    for dtype in ERROR_DTYPES[device]:
        inputs = random_inputs((1, length), (2, 2), HEAD_DIM, device, dtype)
        q, k, v = (tensor.detach().double().requires_grad_() for tensor in inputs.leaves)
        exact = Inputs(q, k, v, inputs.dout.double())
        results = {"exact": both_passes(plain_causal, exact), "plain": both_passes(plain_causal, inputs)}
        for name in ("own", "deterministic"):
            results[name] = both_passes(ATTENTIONS[name](shape, device), inputs)
        for index, name in enumerate(("out", "dq", "dk", "dv")):
            of = {
                key: float((value[index] - results["exact"][index]).detach().abs().max())
                for key, value in results.items()
                if key != "exact"
            }
            row = {"dtype": str(dtype).removeprefix("torch."), "result": name, "plain_error": of["plain"]}
            rows.append(row | {f"{key}_over_plain": round(of[key] / of["plain"], 3) for key in list(of)[1:]})
            print(rows[-1], flush=True)
    return rows


def repeats(device: str) -> list[dict[str, Any]]:
    """How many of many runs of a sequence and of a tree differ from the first one."""
    length, name = REPEATED[device]
    heads, head_dim = (8, 2), 64
    tree = parse_training_tree(name)
    one = random_inputs((1, length), heads, head_dim, device)
    packed = random_inputs((tree.num_tokens,), heads, head_dim, device)
    rows = []
    for of, attend, inputs in (
        (f"causal 1x{length}", ATTENTIONS["deterministic"](Shape(True, 1, length, *heads, head_dim), device), one),
        (name, ours_over_trees(True)(tree, packed), packed),
    ):
        first = both_passes(attend, inputs)
        runs = (both_passes(attend, inputs) for _ in range(REPEATS[device]))
        different = sum(not all(map(torch.equal, first, run)) for run in runs)
        rows.append({"of": of, "runs": REPEATS[device], "different": different})
        print(rows[-1], flush=True)
    return rows


def counted(length: int, head_dim: int, size: int = 2) -> dict[str, float]:
    """Counts of one head, forward and backward, not causal: matrix products, and bytes that must cross the memory bus.

    Stored: 2 and 4 products. Of L² numbers, scores and weights are written and read; backward weights are read twice,
    their gradients written and read, and those of scores written and read twice: 4 + 7. Of L × D, 4 forward and 8
    backward. Recomputed: 2 and 5 products, or 7 in two kernels. Of L × D, 4 forward; backward out and dout to prepare,
    then q, k, v and dout in and the gradients out, twice the former in two kernels; one pass also zeroes, fills and
    reads dq in float32. Keys that several blocks of queries read are counted once: the L2 cache holds them.
    """
    square, thin, row = length**2, length * head_dim, 4 * length
    return {
        "length": length,
        "stored_gflop": 12 * square * head_dim / 1e9,
        "one_pass_gflop": 14 * square * head_dim / 1e9,
        "deterministic_gflop": 18 * square * head_dim / 1e9,
        "stored_mb": (11 * square + 12 * thin) * size / 1e6,
        "one_pass_mb": (13 * thin * size + 12 * thin + 7 * row) / 1e6,
        "deterministic_mb": (17 * thin * size + 9 * row) / 1e6,
    }


@own_training_kernels()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument(
        "--device", type=usable_device, choices=("cuda", "cpu"), default=here, help="default: a GPU if there is one"
    )
    parser.add_argument("--peak", nargs=2, metavar=("NAME", "LENGTH"), help="print the bytes of one memory figure")
    options = parser.parse_args()
    if options.peak:
        print(peak_bytes(options.peak[0], int(options.peak[1]), options.device))
        return
    card = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    name = f"flash-training-{short_name(card)}"
    checks = date_and_commit() | {
        "errors": errors(options.device),
        "memory": memory(options.device),
        "repeats": repeats(options.device),
        "counted": [counted(length, HEAD_DIM) for length in LENGTHS],
    }
    rows = read_result(name).get("rows", [])
    print(write_result(name, {"card": card, "rows": rows, "checks": checks}, "triton"))


if __name__ == "__main__":
    main()
