"""Tiles of the portable training kernels, timed on a GPU: the best belong in the table of `trunkattn.training.spec`.

    python -m benchmarks.kernels.training_tiles                                    # results/flash-tiles-CARD-...json
    python -m benchmarks.kernels.training_tiles --passes forward --head-dim 64

Each tile of a pass, with the table's tiles for the other passes: 16k tokens, bf16, times as in training_cells.py.
"""

import argparse
from typing import Any

import torch

from benchmarks.kernels.training_cells import milliseconds, random_inputs
from benchmarks.lib.options import integer, need_gpu
from benchmarks.lib.report import short_name, write_result

TOKENS, WIDTH = 16384, 4096  # WIDTH: of all heads together
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


def sweep(head_dim: int, passes: list[str]) -> list[dict[str, Any]]:
    """Each tile of a pass, with the table's tiles for the other passes; None ms where it does not fit the card."""
    from trunkattn.training.forward import forward
    from trunkattn.training.sequences import Sequences
    from trunkattn.training.spec import FlashTile

    rows = []
    for length, causal in ((2048, True), (8192, True), (8192, False)):
        heads = WIDTH // head_dim
        inputs = random_inputs((TOKENS // length, length), (heads, heads), head_dim, "cuda")
        q, k, v = (tensor.detach() for tensor in inputs.leaves)
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

    def call() -> tuple[torch.Tensor, ...]:
        if name == "forward":
            return forward(saved[0], saved[1], saved[2], sequences, tile)
        return backward(gradients, saved, sequences, name != "one_pass", {name: tile})

    try:
        return round(milliseconds(call, 6)[0], 4)
    except OutOfResources:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--passes", nargs="+", choices=TILES, default=list(TILES), help="kernels whose tiles are tried; default: all"
    )
    parser.add_argument("--head-dim", type=integer(1, 256), default=128, help="default: 128")
    options = parser.parse_args()
    need_gpu()
    card = torch.cuda.get_device_name()
    name = "-".join(["flash-tiles", short_name(card), str(options.head_dim), *options.passes])
    print(write_result(name, {"card": card, "rows": sweep(options.head_dim, options.passes)}, "triton"))


if __name__ == "__main__":
    main()
