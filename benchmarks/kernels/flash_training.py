r"""FlashAttention for training beside its peers: forward and backward of batches of one length, bf16.

    python -m benchmarks.kernels.flash_training                     # five shapes; results/flash-training-CARD.json
    python -m benchmarks.kernels.flash_training --grid --wide --attentions default with_flash_attention_4 own \
        torch_cudnn flash_attention_4
    python -m benchmarks.kernels.flash_training --grid --wide --add flex_attention flash_attention_3 deterministic
    python -m benchmarks.kernels.flash_training --shapes "full 4x4096 32/32 D 128" "causal 2x8192 16/16 D 192/128"
    python -m benchmarks.kernels.flash_training --device cpu --shapes "causal 2x64 4/2 D 32"  # keeps nothing

`default` is what a user gets without extras, `with_flash_attention_4` with that one, `own` and `deterministic` are
kernels of our own. Beside them in the same process:
PyTorch's scaled_dot_product_attention by its flash and its cuDNN back end, FlexAttention, FlashAttention-4
(`flash_attn.cute`) and FlashAttention-3's forward pass (`fa3` of vLLM's wheels), each if it imports. training_cells.py
says how times are taken. Outputs and gradients of one sequence and one KV head are compared with plain PyTorch in
float32. --untimed only compares, which compiles every kernel: several processes can do so at once, before one measures.

The result has one row a shape, {"shape", "date", "commit", ATTENTION: cell, ...}, and each row is of one process: rows
of shapes that are measured again are replaced whole. --add measures what rows lack, with `default` and `own` beside it:
training_rows.py says how it is kept. Each shape is kept when it is measured, so that a run that was ended goes on by
the same command. A cell is {"forward", "backward", "both": {"ms", "tflops"},
"timed_by", "error", "peak_mb"}, or {"missing": reason}, or {"wrong": error}; of the first two it names the "kernel",
too.
`checks` are from training_checks.py.
"""

import argparse
import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch

from benchmarks.kernels.training_cells import Inputs, Results, measure, random_inputs, relative_error, shown
from benchmarks.kernels.training_peers import ATTENTIONS, Shape, parse_shape
from benchmarks.kernels.training_rows import earlier_rows, to_add, with_added
from benchmarks.lib.internals import training_kernel
from benchmarks.lib.options import parsed_by, usable_device
from benchmarks.lib.report import read_result, short_name, with_earlier, write_result
from trunkattn.gpu.kernel import Work

TOKENS = 16384
TAKEN_BY_TABLE = ("default", "with_flash_attention_4")  # cells that name the kernel
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
SHAPES = tuple(
    map(
        parse_shape,
        (
            "causal 1x16384 32/32 D 128", "causal 8x2048 32/8 D 128", "causal 2x8192 32/8 D 128",
            "full 4x4096 32/32 D 128", "causal 4x4096 16/8 D 64",
        ),
    )
)  # fmt: skip
GRID = tuple(
    Shape(causal, TOKENS // length, length, 32, kv_heads, head_dim)
    for head_dim, kv_heads, causal, length in product((128, 64), (32, 8), (True, False), LENGTHS)
)
WIDE = tuple(
    Shape(causal, 4, 4096, num_qo_heads, num_kv_heads, *head_dims)
    for num_qo_heads, num_kv_heads, *head_dims in (
        (32, 32, 80),
        (32, 32, 96),
        (32, 8, 96),
        (16, 16, 192, 128),
        (16, 16, 256),
        (16, 4, 256),
    )
    for causal in (True, False)
)


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """The textbook formula over [batch, length, heads, head_dim], every intermediate in the inputs' dtype. One KV head
    may serve all query heads."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    logits = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        logits = logits.masked_fill(torch.ones_like(logits[0, 0], dtype=torch.bool).triu(1), -math.inf)
    return (logits.softmax(-1) @ v).transpose(1, 2)


def error_by_plain(inputs: Inputs, shape: Shape) -> Callable[[Results], float]:
    """The error of results in the last sequence and KV head, with its query heads, against plain PyTorch in float32."""
    group = shape.num_qo_heads // shape.num_kv_heads

    def part(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[-1:, :, -(tensor.shape[2] * group // shape.num_qo_heads) :].detach().float()

    q, k, v = (part(tensor).requires_grad_() for tensor in inputs.leaves)
    out = plain(q, k, v, shape.causal)
    expected = out.detach(), *torch.autograd.grad(out, (q, k, v), part(inputs.dout))
    return lambda results: relative_error(tuple(part(result) for result in results), expected)


def row_of(shape: Shape, attentions: list[str], device: str, timed: bool = True) -> dict[str, Any]:
    """A row of the result."""
    heads = shape.num_qo_heads, shape.num_kv_heads
    inputs = random_inputs((shape.batch, shape.length), heads, shape.head_dim, device, head_dim_v=shape.head_dim_v)
    error_of = error_by_plain(inputs, shape)
    row: dict[str, Any] = {"shape": shape.name}
    for name in attentions:
        attention = ATTENTIONS[name]
        with attention.surroundings():
            row[name] = measure(
                partial(attention.make, shape, device),
                inputs, error_of, shape.gigaflops, attention.trains, timed,
            )  # fmt: skip
            if name in TAKEN_BY_TABLE:
                row[name]["kernel"] = training_kernel(*inputs.leaves, Work.BATCH)
        print(f"{shape.name}: {name} {shown(row[name])}", flush=True)
    return row


def keep(card: str, rows: list[dict[str, Any]]) -> None:
    """Writes the result, with earlier rows of other shapes and the checks that were made before."""
    name = f"flash-training-{short_name(card)}"
    checks = {part: value for part, value in read_result(name).items() if part == "checks"}
    write_result(name, {"card": card, "rows": with_earlier(name, rows, ("shape",)), **checks}, "triton")


def rows_of(shapes: Iterable[Shape], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows as they are measured, and with --add those that the result has, once they lack nothing."""
    earlier = earlier_rows("flash-training", "shape", options.device)
    for shape in shapes:
        row = earlier.get(shape.name, {})
        if attentions := to_add(row, options.add) if options.add else options.attentions:
            found = row_of(shape, attentions, options.device, not options.untimed)
            yield with_added(row, found) if options.add else found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument(
        "--device", type=usable_device, choices=("cuda", "cpu"), default=here, help="default: a GPU if there is one"
    )
    parser.add_argument(
        "--shapes",
        nargs="+",
        type=parsed_by(parse_shape),
        default=[],
        help='such as "causal 8x2048 32/8 D 128"; default: five',
    )
    parser.add_argument("--grid", action="store_true", help="lengths of 512 to 16k, 16k tokens in all")
    parser.add_argument("--wide", action="store_true", help="heads of 96, 192 with values of 128, and 256")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument(
        "--attentions", nargs="+", choices=ATTENTIONS, default=list(ATTENTIONS), help="what to measure; default: all"
    )
    chosen.add_argument(
        "--add", nargs="+", choices=ATTENTIONS, default=[], help="measure these where rows of the result lack them"
    )
    parser.add_argument("--untimed", action="store_true", help="compare results only; keep nothing")
    options = parser.parse_args()
    shapes = [*options.shapes, *GRID * options.grid, *WIDE * options.wide] or list(SHAPES)
    rows: list[dict[str, Any]] = []
    for row in rows_of(shapes, options):
        rows.append(row)
        if options.device == "cuda" and not options.untimed:
            keep(torch.cuda.get_device_name(), rows)


if __name__ == "__main__":
    main()
