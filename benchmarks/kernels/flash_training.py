"""FlashAttention for training against PyTorch's own: speed, memory, errors of gradients, counted work.

    python -m benchmarks.kernels.flash_training  # NVIDIA GPU: results/flash-training-CARD.json
    python -m benchmarks.kernels.flash_training --device cpu  # memory and errors only
    python -m benchmarks.kernels.flash_training --sweep  # every tile of a list; the best belong in the table

Speed: 16k tokens in sequences of 512 to 16k, 32 heads of 128, bf16, causal and not. Times are medians of replayed CUDA
graphs, without Python; the backward pass is forward and backward less forward. TFLOP/s count 4 · L² · D a head forward
and 10 · L² · D backward, half of it where causal, whatever a kernel computes twice. `default` is what a user gets,
`one_pass` and `deterministic` are kernels of our own. Beside them: scaled_dot_product_attention with its flash, its
cuDNN and, where it fits, its math backend.
"""

import argparse
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.lib.report import short_name, write_result
from trunkattn import flash_attention

TOKENS, HEADS, HEAD_DIM = 16384, 32, 128
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
MATH_AT_MOST = 2048  # tokens of a sequence: some 25 GB, twice for the graph
MEMORY_HEADS = {"cuda": (8, 128), "cpu": (4, 64)}
MEMORY_LENGTHS = {"cuda": LENGTHS, "cpu": (512, 1024, 2048, 4096)}
ERROR_LENGTH = {"cuda": 2048, "cpu": 512}
ERROR_DTYPES = {"cuda": (torch.float16, torch.bfloat16, torch.float32), "cpu": (torch.bfloat16, torch.float32)}
TILES = {
    "forward": ((128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 8, 3), (128, 64, 8, 2), (128, 64, 4, 3), (64, 128, 4, 2),
                (64, 64, 4, 3), (128, 32, 4, 3)),
    "keys": ((64, 128, 8, 2), (64, 128, 8, 3), (32, 128, 8, 2), (32, 128, 8, 3), (64, 64, 8, 3), (64, 64, 4, 2),
             (32, 64, 4, 3), (128, 64, 8, 2)),
    "queries": ((128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 1), (64, 128, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3),
                (128, 32, 8, 3)),
    "one_pass": ((64, 128, 8, 2), (64, 128, 8, 3), (32, 128, 8, 2), (64, 64, 8, 2), (64, 64, 4, 2), (32, 64, 4, 2),
                 (64, 128, 16, 2)),
}  # fmt: skip
Leaves = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def ours(deterministic: bool, own_kernels: bool = True) -> Callable[..., torch.Tensor]:
    """`flash_attention`; unless held to our own kernels, what it takes by default, which may be PyTorch's cuDNN."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        torch.backends.cuda.enable_cudnn_sdp(not own_kernels)
        out = flash_attention(q, k, v, causal, deterministic=deterministic)
        assert isinstance(out, torch.Tensor)
        return out

    return attend


def torchs(backend: SDPBackend) -> Callable[..., torch.Tensor]:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        with sdpa_kernel(backend):
            heads_first = (tensor.transpose(1, 2) for tensor in (q, k, v))
            return scaled_dot_product_attention(*heads_first, is_causal=causal).transpose(1, 2)

    return attend


ATTENTIONS = {
    "default": ours(False, own_kernels=False),
    "one_pass": ours(False),
    "deterministic": ours(True),
    "torch_flash": torchs(SDPBackend.FLASH_ATTENTION),
    "torch_cudnn": torchs(SDPBackend.CUDNN_ATTENTION),
    "torch_math": torchs(SDPBackend.MATH),
}


def make(batch: int, length: int, heads: int, head_dim: int, dtype: torch.dtype, device: str) -> Leaves:
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, length, heads, head_dim, device=device).to(dtype) for _ in range(3))
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def milliseconds(call: Callable[[], object], replays: int = 12) -> float:
    """Of one call, captured in a graph."""
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # autograd runs a backward pass on the stream of its forward pass
        for _ in range(2):
            call()
    side.synchronize()
    with torch.cuda.graph(graph, stream=side):
        call()
    times = []
    for _ in range(replays + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return median(times[2:])


def speeds() -> list[dict[str, Any]]:
    rows = []
    for causal in (True, False):
        for length in LENGTHS:
            batch = TOKENS // length
            leaves = make(batch, length, HEADS, HEAD_DIM, torch.bfloat16, "cuda")
            dout = torch.randn_like(leaves[0])
            gigaflops = 4 * batch * HEADS * length**2 * HEAD_DIM / (2 if causal else 1) / 1e9
            row: dict[str, Any] = {"causal": causal, "length": length, "batch": batch}
            for name, attend in ATTENTIONS.items():
                if name == "torch_math" and length > MATH_AT_MOST:
                    continue

                def both(attend: Any = attend, leaves: Leaves = leaves, causal: bool = causal, dout: Any = dout) -> Any:
                    return torch.autograd.grad(attend(*leaves, causal), leaves, dout)

                def forward(attend: Any = attend, leaves: Leaves = leaves, causal: bool = causal) -> Any:
                    with torch.no_grad():
                        return attend(*leaves, causal)

                times = {"forward": milliseconds(forward), "both": milliseconds(both)}
                times["backward"] = times["both"] - times["forward"]
                work = {"forward": 1.0, "backward": 2.5, "both": 3.5}
                row[name] = {
                    key: {"ms": round(time, 4), "tflops": round(gigaflops * work[key] / time, 1)}
                    for key, time in times.items()
                }
                torch.cuda.empty_cache()
            rows.append(row)
            print(
                {key: value if not isinstance(value, dict) else _short(value) for key, value in row.items()}, flush=True
            )
    return rows


def _short(times: dict[str, dict[str, float]]) -> str:
    return " ".join(f"{key} {value['tflops']:.0f}" for key, value in times.items()) + " TFLOP/s"


def ratios(rows: list[dict[str, Any]], peer: str) -> dict[str, float]:
    """Geometric means of our speed over that of a back end of torch."""
    return {
        f"{name} {part} {'causal' if causal else 'full'}": round(
            geometric_mean(row[peer][part]["ms"] / row[name][part]["ms"] for row in rows if row["causal"] == causal),
            3,
        )
        for name in ("one_pass", "deterministic")
        for part in ("forward", "backward", "both")
        for causal in (True, False)
    }


def peak_bytes(name: str, length: int, device: str) -> int:
    """What a forward and a backward pass of one sequence take at their peak, inputs and their gradients included."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def step(length: int) -> None:
        leaves = make(1, length, *MEMORY_HEADS[device], dtype, device)
        ATTENTIONS[name](*leaves, True).sum().backward()

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
    """On a CPU each figure comes from a process of its own, which has not kept what another freed."""
    rows = []
    for length in MEMORY_LENGTHS[device]:
        row: dict[str, Any] = {"length": length}
        for name in ("one_pass", "torch_flash", "torch_math"):
            if device == "cuda":
                row[name] = peak_bytes(name, length, device)
            else:
                command = [
                    sys.executable,
                    "-m",
                    "benchmarks.kernels.flash_training",
                    "--device",
                    "cpu",
                    "--peak",
                    name,
                    str(length),
                ]
                row[name] = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        rows.append(row)
        print({key: value if key == "length" else f"{value / 1e6:.0f} MB" for key, value in row.items()}, flush=True)
    return rows


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """The textbook formula, every intermediate in the inputs' dtype."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    logits = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), -math.inf)
    return (logits.softmax(-1) @ v).transpose(1, 2)


def errors(device: str) -> list[dict[str, Any]]:
    """Largest errors against float64 over those of plain PyTorch in the same dtype."""
    rows = []
    for dtype in ERROR_DTYPES[device]:
        leaves = make(1, ERROR_LENGTH[device], 2, 128, dtype, device)
        dout = torch.randn_like(leaves[0])
        results: dict[str, list[torch.Tensor]] = {}
        exact = [tensor.detach().double().requires_grad_() for tensor in leaves]
        for name, attend, inputs in (
            ("exact", plain, exact), ("plain", plain, leaves),
            ("one_pass", ATTENTIONS["one_pass"], leaves), ("deterministic", ATTENTIONS["deterministic"], leaves),
        ):  # fmt: skip
            q, k, v = inputs
            out = attend(q, k, v, True)
            results[name] = [out, *torch.autograd.grad(out, (q, k, v), dout.to(out.dtype))]
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


def counted(length: int, head_dim: int, size: int = 2) -> dict[str, float]:
    """Of one head, forward and backward, not causal: matrix products, and bytes that must cross the memory bus.

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


def sweep(head_dim: int, passes: list[str]) -> list[dict[str, Any]]:
    """Each tile of a pass, with the table's tiles for the other passes; None ms where it does not fit the card."""
    from trunkattn.training.forward import forward
    from trunkattn.training.sequences import Sequences
    from trunkattn.training.spec import FlashTile

    rows = []
    for length, causal in ((2048, True), (8192, True), (8192, False)):
        leaves = make(TOKENS // length, length, HEADS * 128 // head_dim, head_dim, torch.bfloat16, "cuda")
        q, k, v = (tensor.detach() for tensor in leaves)
        sequences = Sequences(causal, head_dim**-0.5)
        saved = (q, k, v, *forward(q, k, v, sequences))
        for name in passes:
            for sizes in TILES[name]:
                time = _tile_time(name, FlashTile(*sizes), saved, sequences)
                rows.append({"pass": name, "tile": sizes, "length": length, "causal": causal, "ms": time})
                print(rows[-1], flush=True)
    return rows


def _tile_time(name: str, tile: Any, saved: tuple[torch.Tensor, ...], sequences: Any) -> float | None:
    from triton.runtime.errors import OutOfResources

    from trunkattn.training.backward import backward
    from trunkattn.training.forward import forward

    gradients = (torch.ones_like(saved[3]), torch.zeros_like(saved[4]))

    def call() -> object:
        if name == "forward":
            return forward(saved[0], saved[1], saved[2], sequences, tile)
        return backward(gradients, saved, sequences, name != "one_pass", {name: tile})

    try:
        return round(milliseconds(call, 6), 4)
    except OutOfResources:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sweep", action="store_true", help="time tiles instead")
    parser.add_argument("--passes", nargs="+", choices=TILES, default=list(TILES), help="of the sweep")
    parser.add_argument("--head-dim", type=int, default=HEAD_DIM, help="of the sweep")
    parser.add_argument("--peak", nargs=2, metavar=("NAME", "LENGTH"), help="print the bytes of one memory figure")
    options = parser.parse_args()
    if options.peak:
        print(peak_bytes(options.peak[0], int(options.peak[1]), options.device))
        return
    card = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    short = short_name(card)
    if options.sweep:
        name = "-".join(["flash-tiles", short, str(options.head_dim), *options.passes])
        rows = sweep(options.head_dim, options.passes)
        print(write_result(name, {"card": card, "rows": rows}, "triton"))
        return
    figures: dict[str, Any] = {"card": card}
    if options.device == "cuda":
        figures["speeds"] = speeds()
        for peer in ("torch_flash", "torch_cudnn"):
            figures[f"speed_over_{peer}"] = ratios(figures["speeds"], peer)
            print(peer, figures[f"speed_over_{peer}"])
    figures["errors"] = errors(options.device)
    figures["memory"] = memory(options.device)
    figures["counted"] = [counted(length, HEAD_DIM) for length in LENGTHS]
    print(write_result(f"flash-training-{short}", figures, "triton"))


if __name__ == "__main__":
    main()
