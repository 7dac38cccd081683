"""Top-k and top-p over rows of probabilities, without sorting the vocabulary."""

from collections.abc import Sequence
from typing import Final

import torch

from trunkattn.cpu.truncation import truncate_rows
from trunkattn.engine.sampling_params import SamplingParams

MIN_CANDIDATES: Final = 256  # most likely tokens; few rows keep more


def truncate(probs: torch.Tensor, params: Sequence[SamplingParams]) -> None:
    """Sets all probabilities to zero but those of the top-k tokens, and of these keeps the fewest whose share of the
    top-k mass reaches top_p. On a CPU the tokens of a row that keeps more than a few are counted, not sorted. Such rows
    change no bit of the others.

    Args:
        probs: [rows, vocab_size] float32, contiguous, changed in place. Rows may hold NaN, and then keep any tokens.
        params: one per row.
    """
    rows = [row for row, p in enumerate(params) if p.top_k > 0 or p.top_p < 1]
    if rows:
        rest = _sort(probs, rows, [params[row] for row in rows], min(MIN_CANDIDATES, probs.shape[1]))
        if not rest:
            return
        those = [params[row] for row in rest]
        if probs.device.type == "cpu":
            truncate_rows(probs, rest, [p.top_k for p in those], [p.top_p for p in those])
        else:  # a GPU sorts faster than it counts
            _sort(probs, rest, those, probs.shape[1])


def _sort(probs: torch.Tensor, rows: list[int], params: Sequence[SamplingParams], width: int) -> list[int]:
    """Truncates those of some rows that keep only tokens among the `width` most likely ones, which it sorts. Returns
    the others; there are none if these are all tokens."""
    vocab_size, device = probs.shape[1], probs.device
    per_row = [[min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size] for p in params]
    top_k = torch.tensor(per_row, dtype=torch.int64, device=device)
    top_p = torch.tensor([[p.top_p] for p in params], dtype=torch.float32, device=device)
    values, token_ids = (probs if len(rows) == len(probs) else probs[rows]).topk(width)
    values = values.masked_fill(torch.arange(width, dtype=torch.int64, device=device) >= top_k, 0.0)
    mass = values.cumsum(dim=-1)
    total = torch.where(top_k <= width, mass[:, -1:], 1.0)
    is_beyond = mass - values >= top_p * total
    is_beyond[:, 0] = False  # a top_p that is 0 in float32 keeps the most likely token, too
    is_reached = ((top_k <= width) | ((top_k == vocab_size) & (mass[:, -1:] >= top_p)))[:, 0]
    kept = values.masked_fill_(is_beyond, 0.0)[is_reached]
    places = torch.tensor(rows, dtype=torch.int64, device=device)
    reached = places[is_reached]
    probs[reached] = 0.0
    probs[reached[:, None], token_ids[is_reached]] = kept
    return places[~is_reached].tolist()
