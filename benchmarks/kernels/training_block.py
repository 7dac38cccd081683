"""A training step of one block of a transformer of Llama-3-8B's shape: a prefix tree against repeated sequences.

    python -m benchmarks.kernels.training_block                        # five trees; results/training-block-CARD.json
    python -m benchmarks.kernels.training_block --trees "8192 + 8x1024" "4096 + 64x256"
    python -m benchmarks.kernels.training_block --device cpu --trees "16 + 3x8" --tiny               # keeps nothing

The block has RMSNorm, attention of 32/8 heads of 128 with RoPE, whose positions count a token's ancestors, and a SwiGLU
of 14,336; bf16. A step is a forward and a backward pass with gradients of all weights; the loss is the mean squared
distance of every sequence's outputs from random targets, so in a tree a token counts once for each sequence that holds
it. Tokens per second are of sequences, repeated ones included, in both ways. Times are medians by events.

The result has one row a tree: {"tree", "tokens", "repeated_tokens", "work_ratio" of attention, "token_ratio",
"tree_step" and "repeated_step": {"ms", "tokens_per_s", "peak_gb", "loss"} or {"missing": reason}, "gradient_error"}.
The last is the largest difference of a weight's gradients of both ways, over its largest gradient.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import linear, rms_norm, silu

from benchmarks.kernels.training_cells import event_milliseconds, relative_error
from benchmarks.kernels.trees import pairs_of
from benchmarks.lib.options import accepted_by, usable_device
from benchmarks.lib.report import short_name, with_earlier, write_result
from benchmarks.workloads.training_trees import TREES, parse_training_tree
from trunkattn import PrefixTree, flash_attention

FIVE_TREES = TREES[:5]
ROPE_BASE = 500_000.0
STEPS = 8
TOLERANCE = 0.05  # of gradients: sums of bf16 products in another order


class Sizes(NamedTuple):
    """Sizes of a block."""

    width: int = 4096
    num_qo_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    mlp: int = 14336


TINY = Sizes(64, 4, 2, 16, 128)


def random_weight(shape: tuple[int, int], device: str) -> nn.Parameter:
    """Normal numbers as bfloat16, whose products with unit inputs have unit variance."""
    return nn.Parameter(torch.randn(shape, device=device).mul_(shape[1] ** -0.5).bfloat16())


class Block(nn.Module):
    """Attention and MLP, each after a norm and with a residual."""

    def __init__(self, sizes: Sizes, device: str) -> None:
        super().__init__()
        self.sizes = sizes
        queries, keys = sizes.num_qo_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
        self.qkv = random_weight((queries + 2 * keys, sizes.width), device)
        self.out = random_weight((sizes.width, queries), device)
        self.gate_up = random_weight((2 * sizes.mlp, sizes.width), device)
        self.down = random_weight((sizes.width, sizes.mlp), device)
        self.attention_norm = nn.Parameter(torch.ones(sizes.width, device=device, dtype=torch.bfloat16))
        self.mlp_norm = nn.Parameter(torch.ones(sizes.width, device=device, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], attend: Callable[..., Any]) -> Any:
        """The outputs of tokens [..., width]. rope: cosines and sines of their positions, [..., 1, head_dim / 2]."""
        sizes, heads = self.sizes, (self.sizes.num_qo_heads, self.sizes.num_kv_heads, self.sizes.num_kv_heads)
        qkv = linear(rms_norm(x, (sizes.width,), self.attention_norm), self.qkv)
        q, k, v = qkv.unflatten(-1, (-1, sizes.head_dim)).split(heads, -2)
        x = x + linear(attend(rotated(q, *rope), rotated(k, *rope), v).flatten(-2), self.out)
        gate, up = linear(rms_norm(x, (sizes.width,), self.mlp_norm), self.gate_up).chunk(2, -1)
        return x + linear(silu(gate) * up, self.down)


def rotated(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """RoPE over halves of a head."""
    first, second = heads.chunk(2, -1)
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], -1)


class Way(NamedTuple):
    """What a step reads. x: tokens. counts: in how many sequences each is, [..., 1]."""

    x: torch.Tensor
    target: torch.Tensor
    counts: torch.Tensor
    rope: tuple[torch.Tensor, torch.Tensor]
    attend: Callable[..., Any]


def tree_way(tree: PrefixTree, sizes: Sizes, device: str) -> Way:
    """A tree's tokens, each once."""
    torch.manual_seed(1)
    x, target = (torch.randn(tree.num_tokens, sizes.width, device=device).bfloat16() for _ in range(2))
    packed = tree.pack()
    counts = torch.zeros(tree.num_tokens, 1)
    for index in tree.sequence_indices():
        counts[index] += 1
    frequencies = ROPE_BASE ** (-torch.arange(0, sizes.head_dim, 2) / sizes.head_dim)
    angles = (packed.position_ids[:, None] * frequencies)[:, None]
    rope = angles.cos().to(device, torch.bfloat16), angles.sin().to(device, torch.bfloat16)
    return Way(x, target, counts.to(device), rope, lambda q, k, v: flash_attention(q, k, v, tree=tree))


def repeated_way(tree: PrefixTree, way: Way) -> Way:
    """Tokens in every sequence that holds them: a batch, or packed where lengths differ."""
    indices = tree.sequence_indices()
    lengths = [len(index) for index in indices]
    whole = len(set(lengths)) == 1
    index = (torch.stack(indices) if whole else torch.cat(indices)).to(way.x.device)
    ends = torch.tensor([0, *lengths]).cumsum(0).int().to(way.x.device)
    bounds = None if whole else ends
    attend = partial(flash_attention, causal=True, cu_seqlens_q=bounds, cu_seqlens_k=bounds)
    cosines, sines = way.rope
    counts = torch.ones_like(way.counts[index])
    return Way(way.x[index], way.target[index], counts, (cosines[index], sines[index]), attend)


def step(block: Block, way: Way) -> tuple[torch.Tensor, ...]:
    """The loss, and the gradients of all weights."""
    out = block(way.x, way.rope, way.attend)
    distances = (out - way.target).float().square().mean(-1, keepdim=True)
    loss = (distances * way.counts).sum() / way.counts.sum()
    return loss.detach(), *torch.autograd.grad(loss, tuple(block.parameters()))


def measure(block: Block, way: Way, useful_tokens: int) -> tuple[dict[str, Any], tuple[torch.Tensor, ...]]:
    """The figures of a way, and its loss and gradients; none where it does not fit."""
    cuda = way.x.is_cuda
    try:
        results = tuple(result.cpu() for result in step(block, way))  # not to count for the peak of the other way
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        ms = event_milliseconds(lambda: step(block, way), STEPS)
    except torch.OutOfMemoryError as reason:
        return {"missing": f"{type(reason).__name__}: {str(reason)[:100]}"}, ()
    found: dict[str, Any] = {"ms": round(ms, 3), "tokens_per_s": round(useful_tokens / ms * 1e3)}
    if cuda:
        found["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 3)
    return found | {"loss": round(float(results[0]), 6)}, results


def row_of(name: str, sizes: Sizes, device: str) -> dict[str, Any]:
    """A row of the result."""
    tree = parse_training_tree(name)
    torch.manual_seed(0)
    block, useful = Block(sizes, device), sum(map(len, tree.sequence_indices()))
    own, repeated = pairs_of(tree)
    row: dict[str, Any] = {
        "tree": name, "tokens": tree.num_tokens, "repeated_tokens": useful, "work_ratio": round(repeated / own, 4),
        "token_ratio": round(useful / tree.num_tokens, 4),
    }  # fmt: skip
    way = tree_way(tree, sizes, device)
    row["tree_step"], by_tree = measure(block, way, useful)
    way = repeated_way(tree, way)
    row["repeated_step"], by_sequences = measure(block, way, useful)
    if by_tree and by_sequences:
        row["gradient_error"] = round(max(map(_error, by_tree, by_sequences)), 5)
        if row["gradient_error"] > TOLERANCE:
            row["wrong"] = f"gradient_error {row['gradient_error']}"
    return row


def _error(one: torch.Tensor, other: torch.Tensor) -> float:
    return relative_error((one,), (other,))


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
        default=FIVE_TREES,
        help='such as "2048 + 16x1024"; default: five',
    )
    parser.add_argument("--tiny", action="store_true", help="a block of 64 numbers a token, for a try")
    options = parser.parse_args()
    rows = []
    for text in options.trees:
        rows.append(row_of(text, TINY if options.tiny else Sizes(), options.device))
        print(rows[-1], flush=True)
        if options.device == "cuda" and not options.tiny:
            torch.cuda.empty_cache()
            card = torch.cuda.get_device_name()
            name = f"training-block-{short_name(card)}"
            figures = {"card": card, "rows": with_earlier(name, rows, ("tree",))}
            write_result(name, figures, "triton", "nvidia-cudnn-frontend")


if __name__ == "__main__":
    main()
