"""Training with `flash_attention`: a small causal transformer layer learns two documents by heart.

    python examples/training.py [--device cuda] [--steps 60]

The memory of forward and backward is linear in the length. Two documents are packed into one row of tokens, and
`cu_seqlens` keeps them apart.
"""

import argparse

import torch
from torch import nn

from trunkattn import flash_attention

HEADS, KV_HEADS, DIM, VOCABULARY = 4, 2, 32, 16


class Attention(nn.Module):
    """Grouped-query attention of packed documents."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, (HEADS + 2 * KV_HEADS) * DIM)
        self.out = nn.Linear(HEADS * DIM, width)

    def forward(self, x: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        """Attention of x [tokens, width]."""
        heads = self.qkv(x).view(len(x), -1, DIM)
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        mixed = flash_attention(q, k, v, causal=True, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)
        return self.out(mixed.flatten(1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="(default: cpu)")
    parser.add_argument("--steps", type=int, default=60, help="(default: 60)")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU; expected cpu")
    torch.manual_seed(0)
    width = 64
    embed, places = nn.Embedding(VOCABULARY, width), nn.Embedding(64, width)
    attention, head = Attention(width), nn.Linear(width, VOCABULARY)
    model = nn.ModuleList([embed, places, attention, head]).to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    lengths = (40, 24)
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=options.device)
    position = torch.cat([torch.arange(length) for length in lengths]).to(options.device)
    predicted = position[1:] > 0  # no token of the first document predicts the second one's first

    # The second half of each document repeats its first half.
    halves = [torch.randint(VOCABULARY, (length // 2,)) for length in lengths]
    tokens = torch.cat([half.repeat(2) for half in halves]).to(options.device)
    for step in range(options.steps):
        x = embed(tokens) + places(position)
        logits = head(x + attention(x, cu_seqlens))
        loss = nn.functional.cross_entropy(logits[:-1][predicted], tokens[1:][predicted])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in (0, options.steps - 1):
            print(f"step {step + 1}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
