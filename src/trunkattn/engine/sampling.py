"""Sampling of tokens from logits, batched over the rows: greedy, temperature, min-p, top-k, top-p, seeds and
log-probabilities.

What else a request's parameters do to its logits, such as penalties, is in `engine.logits`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trunkattn.engine.logits import LogitsState, adjust_logits
from trunkattn.engine.sampling_params import SamplingParams

NOT_FINITE = -1  # in place of a token: the model's logits have none that is largest, because of a NaN or infinity
NO_TOKEN_LEFT = -2  # in place of a token: the request's own parameters leave none
MIN_CANDIDATES = 256  # top-p first considers this many most likely tokens, then more while their mass is too small


@dataclass(frozen=True)
class SampleSpec:
    """How one row of logits is sampled. `index` and `position` select the random stream of a seeded row.

    Attributes:
        params: the request's parameters.
        index: number of the answer among the request's `n`.
        position: tokens of the answer before this one.
        state: what the parameters do to the logits before the temperature; None: nothing.
    """

    params: SamplingParams
    index: int
    position: int
    state: LogitsState | None = None


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

    Args:
        seed: of the shared generator; None: another one each time.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._shared = torch.Generator()
        if seed is None:
            self._shared.seed()
        else:
            self._shared.manual_seed(seed)
        self._seeded = torch.Generator()  # each row sets its seed

    def sample(self, logits: torch.Tensor, specs: Sequence[SampleSpec]) -> list[int]:
        """Token ids, one per row; `NOT_FINITE` or `NO_TOKEN_LEFT` for a row that has none.

        Args:
            logits: [len(specs), vocab_size], any floating dtype. They are not changed.
            specs: one per row.
        """
        token_ids, is_finite = _largest(logits)
        has_token = is_finite
        adjusted = {row: spec.state for row, spec in enumerate(specs) if spec.state is not None}
        if adjusted:
            logits, rows = logits.to(torch.float32, copy=True), list(adjusted)
            changed = logits[rows]
            adjust_logits(changed, list(adjusted.values()))
            logits[rows] = changed
            token_ids, has_token = _largest(logits)
        rows = [row for row, spec in enumerate(specs) if not spec.params.is_greedy]
        if rows:
            probs = _probabilities(logits[rows].float(), [specs[row].params for row in rows])
            token_ids[rows] = _draw(probs, self._uniform([specs[row] for row in rows]).to(logits.device))
        return token_ids.masked_fill_(~has_token, NO_TOKEN_LEFT).masked_fill_(~is_finite, NOT_FINITE).tolist()

    def _uniform(self, specs: Sequence[SampleSpec]) -> torch.Tensor:
        """[len(specs), 1] float64 in [0, 1), drawn on the CPU, so that a seed means the same on every device."""
        drawn = torch.empty(len(specs), 1, dtype=torch.float64, device="cpu")
        for row, spec in zip(drawn, specs, strict=True):
            generator = self._shared
            if spec.params.seed is not None:
                generator = self._seeded.manual_seed(_stream(spec.params.seed, spec.index, spec.position))
            row.uniform_(generator=generator)
        return drawn


def _largest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows] the most likely tokens, and whether their logits are finite. A NaN counts as the largest."""
    token_ids = logits.argmax(dim=-1)
    return token_ids, logits.gather(1, token_ids[:, None])[:, 0].isfinite()


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
    """Log-probabilities of each row's sampled token and `params.logprobs` most likely ones; None where that is None,
    or where no token was sampled.

    Args:
        logits: [len(specs), vocab_size], unmodified.
        specs: one per row.
        token_ids: the sampled tokens, one per row.
    """
    results: list[TokenLogprobs | None] = [None] * len(specs)
    rows = [row for row, spec in enumerate(specs) if spec.params.logprobs is not None and token_ids[row] >= 0]
    if rows:
        counts = [specs[row].params.logprobs or 0 for row in rows]
        found = most_likely(logits[rows], [token_ids[row] for row in rows], counts)
        for row, logprobs in zip(rows, found, strict=True):
            results[row] = logprobs
    return results


def most_likely(logits: torch.Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """Log-probabilities of one token per row and of the row's most likely ones.

    Args:
        logits: [len(token_ids), vocab_size].
        token_ids: the tokens.
        counts: how many most likely ones, per row.
    """
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = logprobs.gather(1, torch.tensor(token_ids, dtype=torch.int64, device=logits.device)[:, None])
    ranks = ((logprobs > chosen).sum(dim=-1) + 1).tolist()
    top_values, top_ids = (part.tolist() for part in logprobs.topk(max(counts)))
    return [
        TokenLogprobs(
            token_ids=[token_id, *top_ids[row][:count]],
            logprobs=[value, *top_values[row][:count]],
            ranks=[rank, *range(1, count + 1)],
        )
        for row, (token_id, count, value, rank) in enumerate(
            zip(token_ids, counts, chosen[:, 0].tolist(), ranks, strict=True)
        )
    ]


def _probabilities(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """[rows, vocab_size] float32 probabilities after temperature, min-p, top-k and top-p; not normalised after the last
    two."""
    temperature = torch.tensor([[p.temperature] for p in params], dtype=torch.float32, device=logits.device)
    # Subtract the maximum first, so that a small temperature cannot overflow.
    probs = ((logits - logits.amax(dim=-1, keepdim=True)) / temperature).softmax(dim=-1)
    rows = [row for row, p in enumerate(params) if p.min_p > 0]
    if rows:
        probs[rows] = _drop_unlikely(probs[rows], [params[row].min_p for row in rows])
    rows = [row for row, p in enumerate(params) if p.top_k > 0 or p.top_p < 1]
    if rows:
        probs[rows] = _truncate(probs[rows], [params[row] for row in rows])
    return probs


def _drop_unlikely(probs: torch.Tensor, min_p: Sequence[float]) -> torch.Tensor:
    """Probabilities without the tokens that are less than min_p times as likely as the most likely one."""
    least = torch.tensor(min_p, dtype=torch.float32, device=probs.device)[:, None] * probs.amax(dim=-1, keepdim=True)
    kept = probs.masked_fill(probs < least, 0.0)
    return kept / kept.sum(dim=-1, keepdim=True)


def _truncate(probs: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Sets all probabilities to zero but those of the top-k tokens, and of these keeps the fewest whose share of the
    top-k mass reaches top_p."""
    vocab_size = probs.shape[1]
    device = probs.device
    top_k = torch.tensor([[p.top_k if p.top_k > 0 else vocab_size] for p in params], dtype=torch.int64, device=device)
    top_p = torch.tensor([[p.top_p] for p in params], dtype=torch.float32, device=device)
    width = min(vocab_size, max(MIN_CANDIDATES, *(p.top_k for p in params)))
    while True:
        values, token_ids = probs.topk(width)
        values = values.masked_fill(torch.arange(width, dtype=torch.int64, device=device) >= top_k, 0.0)
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
