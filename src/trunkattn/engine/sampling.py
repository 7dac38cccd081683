"""From logits to tokens: greedy, temperature, top-k, top-p, seeds and log-probabilities, vectorised over the batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trunkattn.engine.sampling_params import SamplingParams

MIN_CANDIDATES = 256  # top-p first considers this many most likely tokens, then more while their mass is too small


@dataclass(frozen=True)
class SampleSpec:
    """How one row of logits is sampled. `index` and `position` select the random stream of a seeded row.

    Attributes:
        params: the request's parameters.
        index: number of the answer among the request's `n`.
        position: tokens of the answer before this one.
    """

    params: SamplingParams
    index: int
    position: int


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of one row's unmodified logits: the sampled token first, then the most likely ones."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


class Sampler:
    """Samples one token per row.

    A seeded row draws its number from its own stream, a function of (seed, index, position), so neither the rest of the
    batch nor a preemption changes its token. Greedy rows draw no number. The other rows share one generator.
    """

    def __init__(self) -> None:
        self._shared = torch.Generator()
        self._shared.seed()
        self._seeded = torch.Generator()  # each row sets its seed

    def sample(self, logits: torch.Tensor, specs: Sequence[SampleSpec]) -> list[int]:
        """Token ids, one per row.

        Args:
            logits: [len(specs), vocab_size], any floating dtype. They are not changed.
            specs: one per row.
        """
        token_ids = logits.argmax(dim=-1)
        rows = [row for row, spec in enumerate(specs) if not spec.params.is_greedy]
        if rows:
            probs = _probabilities(logits[rows].float(), [specs[row].params for row in rows])
            token_ids[rows] = _draw(probs, self._uniform([specs[row] for row in rows]).to(logits.device))
        return token_ids.tolist()

    def _uniform(self, specs: Sequence[SampleSpec]) -> torch.Tensor:
        """[len(specs), 1] float64 in [0, 1), drawn on the CPU, so that a seed means the same on every device."""
        drawn = torch.empty(len(specs), 1, dtype=torch.float64)
        for row, spec in zip(drawn, specs, strict=True):
            generator = self._shared
            if spec.params.seed is not None:
                generator = self._seeded.manual_seed(_stream(spec.params.seed, spec.index, spec.position))
            row.uniform_(generator=generator)
        return drawn


def _draw(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """[rows] token ids drawn from `probs`, which need not be normalised, by inversion of the cumulative distribution.

    The sum is in float64: in float32 its rounding over a whole vocabulary exceeds many tokens' probabilities.
    """
    cumulative = probs.double().cumsum(dim=-1)
    drawn = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    return drawn[:, 0].clamp_(max=probs.shape[1] - 1)


def token_logprobs(
    logits: torch.Tensor, specs: Sequence[SampleSpec], token_ids: Sequence[int]
) -> list[TokenLogprobs | None]:
    """Log-probabilities of each row's sampled token and `params.logprobs` most likely ones; None where that is None.

    Args:
        logits: [len(specs), vocab_size], unmodified.
        specs: one per row.
        token_ids: the sampled tokens, one per row.
    """
    results: list[TokenLogprobs | None] = [None] * len(specs)
    rows = [row for row, spec in enumerate(specs) if spec.params.logprobs is not None]
    if not rows:
        return results
    logprobs = logits[rows].float().log_softmax(dim=-1)
    sampled = logprobs.gather(1, torch.tensor([[token_ids[row]] for row in rows], device=logits.device))
    ranks = (logprobs > sampled).sum(dim=-1) + 1
    most = max(specs[row].params.logprobs or 0 for row in rows)
    top_values, top_ids = (part.tolist() for part in logprobs.topk(most))
    for i, row in enumerate(rows):
        count = specs[row].params.logprobs or 0
        results[row] = TokenLogprobs(
            token_ids=[token_ids[row], *top_ids[i][:count]],
            logprobs=[sampled[i].item(), *top_values[i][:count]],
            ranks=[int(ranks[i]), *range(1, count + 1)],
        )
    return results


def _probabilities(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """[rows, vocab_size] float32 probabilities after temperature, top-k and top-p; not normalised after the cuts."""
    temperature = torch.tensor([[p.temperature] for p in params], device=logits.device)
    # Subtract the maximum first, so that a small temperature cannot overflow.
    probs = ((logits - logits.amax(dim=-1, keepdim=True)) / temperature).softmax(dim=-1)
    rows = [row for row, p in enumerate(params) if p.top_k > 0 or p.top_p < 1]
    if rows:
        probs[rows] = _truncate(probs[rows], [params[row] for row in rows])
    return probs


def _truncate(probs: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Sets all probabilities to zero but those of the top-k tokens, and of these keeps the fewest whose share of the
    top-k mass reaches top_p."""
    vocab_size = probs.shape[1]
    top_k = torch.tensor([[p.top_k if p.top_k > 0 else vocab_size] for p in params], device=probs.device)
    top_p = torch.tensor([[p.top_p] for p in params], device=probs.device)
    width = min(vocab_size, max(MIN_CANDIDATES, *(p.top_k for p in params)))
    while True:
        values, token_ids = probs.topk(width)
        values = values.masked_fill(torch.arange(width, device=probs.device) >= top_k, 0.0)
        mass = values.cumsum(dim=-1)
        total = torch.where(top_k <= width, mass[:, -1:], 1.0)
        if width == vocab_size or bool(((top_k <= width) | (mass[:, -1:] >= top_p)).all()):
            break
        width = min(vocab_size, 8 * width)
    kept = values.masked_fill(mass - values >= top_p * total, 0.0)
    return torch.zeros_like(probs).scatter_(1, token_ids, kept)


def _stream(seed: int, index: int, position: int) -> int:
    """A 63-bit generator seed that mixes (seed, index, position) well, with SplitMix64's finaliser."""
    mask = (1 << 64) - 1
    mixed = seed
    for part in (index, position):
        mixed = (mixed + 0x9E3779B97F4A7C15 * (part + 1)) & mask
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
        mixed ^= mixed >> 31
    return mixed >> 1
