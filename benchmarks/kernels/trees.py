"""Attention over prefix trees in training, beside peers and beside repeated sequences: forward and backward, bf16.

    python -m benchmarks.kernels.trees                                              # results/trees-CARD.json
    python -m benchmarks.kernels.trees --trees "2048 + 16x1024" --attentions default cudnn_flex
    python -m benchmarks.kernels.trees --add deterministic                          # what rows lack
    python -m benchmarks.kernels.trees --plans                                      # only new trees' plans
    python -m benchmarks.kernels.trees --device cpu --trees "16 + 3x8" --heads 4/2 --head-dim 32    # keeps nothing

A tree is its levels, from the root: training_trees.py. `default` is `flash_attention(tree=...)` as a user gets it,
`own` and `deterministic` are kernels of our own, `cudnn_flex` is cuDNN's flex_attention called directly,
`flex_attention` PyTorch's with a tree's mask, and `paths_flash_attention_4` TRL's way: FlashAttention-4 over the
gathered paths from the roots to all segments. `repeated` is `flash_attention` of every sequence by itself, packed where
lengths differ. Each is measured if it imports. training_cells.py says how times are taken. TFLOP/s are of the tree's
own work, of `repeated` of its own. Outputs and gradients are compared with those of repeated sequences in our own
kernels.

The result has one row a tree, of one process each: rows of trees that are measured again are replaced whole. --add
measures what rows lack, with `default` and `own` beside it: training_rows.py says how it is kept. Besides
cells, as in flash_training.py, a row has "tokens", "repeated_tokens", "heads", "head_dim", "work_ratio" (repeated work
over the tree's own: what `repeated` should take more), "token_ratio", and "plan": milliseconds of the host and the
device until a new tree is ready, of the tree itself ("tree"), its tables on the device ("tables"), cuDNN's plan of it
("cudnn") and FlexAttention's block mask ("flex_attention"). --plans measures only these, those that can run, and
keeps them with their date and commit in rows that the file has.
"""

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch

from benchmarks.kernels.training_cells import (
    Inputs,
    Results,
    measure,
    random_inputs,
    relative_error,
    shown,
)
from benchmarks.kernels.training_rows import earlier_rows, to_add, with_added
from benchmarks.kernels.tree_attentions import ATTENTIONS, cudnn_plan, flex_mask, repeat, repeated
from benchmarks.lib.internals import own_flash_attention, own_training_kernels, training_kernel
from benchmarks.lib.options import accepted_by, integer, usable_device
from benchmarks.lib.report import date_and_commit, read_result, short_name, with_earlier, write_result
from benchmarks.workloads.training_trees import TREES, parse_training_tree
from trunkattn import PrefixTree
from trunkattn.gpu.kernel import Work

CUDNN = "nvidia-cudnn-frontend"
PLANS = 20  # whose median is taken
NAMES = (*ATTENTIONS, "repeated")


def pairs_of(tree: PrefixTree) -> tuple[int, int]:
    """Pairs of a query and a key that it sees: in the tree, and in all its sequences, each by itself."""
    lengths = [len(each) for each in tree.sequence_indices()]
    return tree.work.pairs, sum(length * (length + 1) // 2 for length in lengths)


def gigaflops(pairs: int, inputs: Inputs) -> float:
    """The work of the forward pass."""
    return 4 * pairs * inputs.q.shape[-2] * inputs.q.shape[-1] / 1e9


def by_repeated_sequences(tree: PrefixTree, inputs: Inputs) -> Results:
    """out, dq, dk and dv of the tree from its sequences one by one. A shared token's output is that of its first copy,
    and the gradient of its output counts there only."""
    out = torch.empty_like(inputs.q)
    sums = [torch.zeros_like(leaf, dtype=torch.float32) for leaf in inputs.leaves]
    seen = torch.zeros(tree.num_tokens, dtype=torch.bool, device=inputs.q.device)
    for index in tree.sequence_indices():
        own = index.to(inputs.q.device)
        leaves = [leaf.detach()[own][None].requires_grad_() for leaf in inputs.leaves]
        dout = inputs.dout[own].masked_fill(seen[own][:, None, None], 0.0)
        with own_training_kernels():
            found = own_flash_attention(leaves[0], leaves[1], leaves[2], causal=True, deterministic=True)
            gradients = torch.autograd.grad(found, leaves, dout[None])
        out[own] = found[0].detach()
        for total, part in zip(sums, gradients, strict=True):
            total.index_add_(0, own, part[0].float())
        seen[own] = True
    return out, *(total.to(out.dtype) for total in sums)


def plan_ms(tree: PrefixTree, inputs: Inputs) -> dict[str, float]:
    """Medians of the parts of a new tree's plan; what cannot run is left out. Kernels are compiled before."""
    device = inputs.q.device
    parts: dict[str, Callable[[PrefixTree], object]] = {
        "tables": lambda fresh: fresh.tables(device),
        "cudnn": lambda fresh: cudnn_plan(fresh, inputs),
        "flex_attention": lambda fresh: flex_mask(fresh, device.type),
    }
    found: dict[str, list[float]] = {}
    for name, make in parts.items():
        for _ in range(PLANS + 1):
            begun = perf_counter()
            fresh = PrefixTree.from_segments(tree.parents, tree.lengths)
            found.setdefault("tree", []).append((perf_counter() - begun) * 1e3)
            _synchronize(device)
            begun = perf_counter()
            try:
                make(fresh)
            except Exception:  # not installed, or too large a mask
                continue
            _synchronize(device)
            found.setdefault(name, []).append((perf_counter() - begun) * 1e3)
    return {name: round(median(taken[1:]), 3) for name, taken in found.items() if len(taken) > 1}


def measure_plans(trees: Sequence[str], heads: tuple[int, int], head_dim: int, device: str) -> None:
    """Prints the plans of trees, and on a card keeps them in the rows that the result has of these trees."""
    card = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    result_name = f"trees-{short_name(card)}"
    result, now = {"rows": []} | read_result(result_name), date_and_commit()
    for name in trees:
        tree = parse_training_tree(name)
        found = plan_ms(tree, random_inputs((tree.num_tokens,), heads, head_dim, device))
        print(f"{name}: plan {found}", flush=True)
        for row in result["rows"]:
            if row["tree"] == name:
                row["plan"] |= found | now
    if device == "cuda":
        write_result(result_name, result)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def row_of(
    name: str, heads: tuple[int, int], head_dim: int, attentions: list[str], device: str, timed: bool = True
) -> dict[str, Any]:
    """A row of the result."""
    tree = parse_training_tree(name)
    inputs = random_inputs((tree.num_tokens,), heads, head_dim, device)
    pairs, repeated_pairs = pairs_of(tree)
    repeated_tokens = sum(map(len, tree.sequence_indices()))
    row: dict[str, Any] = {
        "tree": name, "tokens": tree.num_tokens, "repeated_tokens": repeated_tokens,
        "heads": "{}/{}".format(*heads), "head_dim": head_dim, "work_ratio": round(repeated_pairs / pairs, 4),
        "token_ratio": round(repeated_tokens / tree.num_tokens, 4),
    }  # fmt: skip
    expected = by_repeated_sequences(tree, inputs)
    for way in attentions:
        if way == "repeated":
            continue
        row[way] = measure(
            partial(ATTENTIONS[way], tree, inputs), inputs, lambda found: relative_error(found, expected),
            gigaflops(pairs, inputs), timed=timed,
        )  # fmt: skip
        print(f"{name}: {way} {shown(row[way])}", flush=True)
    if "default" in row:
        row["default"]["kernel"] = training_kernel(*inputs.leaves, Work.TREE)
    if timed:
        row["plan"] = plan_ms(tree, inputs)
        print(f"{name}: plan {row['plan']}", flush=True)
    if "repeated" in attentions:
        row["repeated"] = _repeated(tree, inputs, expected[0], gigaflops(repeated_pairs, inputs), timed)
        print(f"{name}: repeated {shown(row['repeated'])}, work {row['work_ratio']}", flush=True)
    return row


def _repeated(tree: PrefixTree, inputs: Inputs, expected: torch.Tensor, work: float, timed: bool) -> dict[str, Any]:
    """The cell of repeated sequences, whose tokens are copied before the clock starts. expected: the tree's output."""
    with torch.no_grad():
        q, k, v, dout, out = (repeat(tree, tensor) for tensor in (*inputs, expected))
    many = Inputs(q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout)
    return measure(
        lambda: repeated(tree, many), many, lambda found: relative_error(found[:1], (out,)), work, timed=timed
    )


def parse_heads(text: str) -> tuple[int, int]:
    """Query heads and KV heads, such as "32/8"."""
    found = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", text)
    if not found or int(found[1]) % int(found[2]):
        raise argparse.ArgumentTypeError(f"expected query heads / KV heads such as '32/8', got {text!r}")
    return int(found[1]), int(found[2])


def rows_of(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows as they are measured, and with --add those that the result has, once they lack nothing.

    Raises:
        SystemExit: those have other heads.
    """
    earlier = earlier_rows("trees", "tree", options.device)
    heads = "{}/{}".format(*options.heads), options.head_dim
    for name in options.trees:
        row = earlier.get(name, {})
        if options.add and row and heads != (there := (row["heads"], row["head_dim"])):
            raise SystemExit("--add: the row of {} has heads of {} × {}; add to it with these".format(name, *there))
        if attentions := to_add(row, options.add) if options.add else options.attentions:
            found = row_of(name, options.heads, options.head_dim, attentions, options.device, not options.untimed)
            yield with_added(row, found) if options.add else found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument(
        "--device", type=usable_device, choices=("cuda", "cpu"), default=here, help="default: a GPU if there is one"
    )
    parser.add_argument(
        "--trees",
        nargs="+",
        type=accepted_by(parse_training_tree),
        default=TREES,
        help='such as "2048 + 16x1024"; default: eleven',
    )
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument(
        "--attentions", nargs="+", choices=NAMES, default=list(NAMES), help="what to measure; default: all"
    )
    chosen.add_argument(
        "--add", nargs="+", choices=NAMES, default=[], help="measure these where rows of the result lack them"
    )
    parser.add_argument("--heads", type=parse_heads, default=(32, 8), help="query heads / KV heads; default: 32/8")
    parser.add_argument("--head-dim", type=integer(1, 256), default=128, help="default: 128")
    parser.add_argument("--untimed", action="store_true", help="compare results only, which compiles; keep nothing")
    parser.add_argument("--plans", action="store_true", help="measure only plans, for rows that the result has")
    options = parser.parse_args()
    if options.plans:
        measure_plans(options.trees, options.heads, options.head_dim, options.device)
        return
    rows: list[dict[str, Any]] = []
    for row in rows_of(options):
        rows.append(row)
        if options.device == "cuda" and not options.untimed:
            card = torch.cuda.get_device_name()
            name = f"trees-{short_name(card)}"
            write_result(name, {"card": card, "rows": with_earlier(name, rows, ("tree",))}, "triton", CUDNN)


if __name__ == "__main__":
    main()
