"""Top-k and top-p over rows of probabilities, without sorting the vocabulary."""

from collections.abc import Sequence
from typing import Final

import torch

from trunkattn.engine.sampling_params import SamplingParams

MIN_CANDIDATES: Final = 256  # most likely tokens; few rows keep more
ROWS_AT_ONCE: Final = 4  # of those that keep more, on a CPU: what is computed of them then stays in its cache
# A float32 that is not negative has the order of its bits. Their upper half has the exponent and 7 bits of the
# mantissa, so that floats with equal ones are added in float64 without rounding, in any order.
HALF: Final = 16
LOWER: Final = (1 << HALF) - 1
NUM_UPPER: Final = 1 << (HALF - 1)
NO_SIGN: Final = (NUM_UPPER << HALF) - 1


def truncate(probs: torch.Tensor, params: Sequence[SamplingParams]) -> None:
    """Sets all probabilities to zero but those of the top-k tokens, and of these keeps the fewest whose share of the
    top-k mass reaches top_p. On a CPU the tokens of a row that keeps more than a few are counted, not sorted. Such rows
    change no bit of the others.

    Args:
        probs: [rows, vocab_size] float32, changed in place. Rows may hold NaN, and then keep any tokens.
        params: one per row.
    """
    rows = [row for row, p in enumerate(params) if p.top_k > 0 or p.top_p < 1]
    if rows:
        rest = _sort(probs, rows, [params[row] for row in rows], min(MIN_CANDIDATES, probs.shape[1]))
        if rest and probs.device.type != "cpu":  # a GPU sorts faster than it counts
            rest = _sort(probs, rest, [params[row] for row in rest], probs.shape[1])
        for first in range(0, len(rest), ROWS_AT_ONCE):
            some = rest[first : first + ROWS_AT_ONCE]
            probs[some] = _count(probs[some], [params[row] for row in some])


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


def _count(probs: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """What `truncate` makes of any rows, which this changes."""
    limited = [row for row, p in enumerate(params) if 0 < p.top_k < probs.shape[1]]
    if limited:
        probs[limited] = _fewest(probs[limited], [params[row].top_k for row in limited], by_mass=False)
    cut = [row for row, p in enumerate(params) if p.top_p < 1]
    if cut:
        probs[cut] = _fewest(probs[cut], [params[row].top_p for row in cut], by_mass=True)
    return probs


def _fewest(probs: torch.Tensor, least: Sequence[float], by_mass: bool) -> torch.Tensor:
    """Rows with only the fewest most likely tokens that reach what is asked for; of equally likely ones those that come
    first. This is a radix selection: a count by the upper halves of the bits, and one by the lower halves of those that
    are left, find the least likely token that is kept.

    Args:
        probs: [rows, vocab_size] float32.
        least: of each row.
        by_mass: whether it is a share of the row's mass; else a number of tokens.
    """
    bits = probs.view(torch.int32) & NO_SIGN  # a NaN may have one
    upper = bits >> HALF
    sums = _sums_of(upper, NUM_UPPER, probs if by_mass else None).double()
    rest = torch.tensor(least, dtype=torch.float64, device=probs.device)[:, None]
    upper_of_last, rest = _reach(sums, rest * sums.sum(dim=-1, keepdim=True) if by_mass else rest)
    counts = _sums_of((bits & LOWER).masked_fill_(upper != upper_of_last.int(), LOWER + 1), LOWER + 2)[:, : LOWER + 1]
    values = (upper_of_last.int() << HALF) + torch.arange(LOWER + 1, dtype=torch.int32, device=probs.device)
    each = values.view(torch.float32).double() if by_mass else torch.ones_like(counts, dtype=torch.float64)
    lower_of_last, rest = _reach(counts * each, rest)
    last = values.gather(1, lower_of_last)
    kept = probs.masked_fill(bits < last, 0.0)
    num_last = (rest / each.gather(1, lower_of_last)).ceil()  # kept tokens that are as likely as the last one
    tied = (num_last < counts.gather(1, lower_of_last))[:, 0].nonzero()[:, 0]
    if len(tied):
        is_equal = bits[tied] == last[tied]
        kept[tied] = kept[tied].masked_fill_(is_equal & (is_equal.cumsum(dim=-1) > num_last[tied].long()), 0.0)
    return kept


def _sums_of(bins: torch.Tensor, num_bins: int, weights: torch.Tensor | None = None) -> torch.Tensor:
    """[rows, num_bins] the number of each row's elements in each bin, or float64 sums of their weights.

    Args:
        bins, weights: [rows, columns] int32 and float32.
    """
    first = torch.arange(0, len(bins) * num_bins, num_bins, dtype=torch.int32, device=bins.device)
    sums = torch.bincount(
        (bins + first[:, None]).flatten(),
        None if weights is None else weights.flatten().double(),  # torch adds in the type of the weights
        minlength=len(first) * num_bins,
    )
    return sums.view(len(first), num_bins)


def _reach(sums: torch.Tensor, least: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, 1] the bins in which the sums of bins, from the last one down, reach a number, and what is left of it for
    these bins. Both are float64."""
    cumulative = sums.flip(1).cumsum(dim=-1)
    found = torch.searchsorted(cumulative, least).clamp_(max=sums.shape[1] - 1)
    bins = sums.shape[1] - 1 - found
    return bins, least - (cumulative.gather(1, found) - sums.gather(1, bins))
