"""Sampling of tokens from logits, batched over the rows: greedy, temperature, min-p, top-k, top-p, seeds and
log-probabilities.

What else a request's parameters do to its logits, such as penalties, is in `logits`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trunkattn.engine.sampling.logits import LogitsState, adjust_logits
from trunkattn.engine.sampling.truncation import truncate
from trunkattn.engine.sampling_params import SamplingParams

NOT_FINITE = -1  # in place of a token: the model's logits have none that is largest, because of a NaN or infinity
NO_TOKEN_LEFT = -2  # in place of a token: the request's own parameters leave none
NO_TOKEN_WANTED = -3  # in place of a token: the request asks only for its prompt
BLOCK = 256  # tokens; a draw chooses a block of them first
_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class SampleSpec:
    """How one row of logits is sampled. `index` and `position` select the random stream of a seeded row.

    Attributes:
        params: the request's parameters.
        index: number of the answer among the request's `n`.
        position: tokens of the answer before this one.
        state: what the parameters do to the logits before the temperature; None: nothing.
        row: its row of logits. Specs of one row, such as the first tokens of a request's answers, differ in their index
            at most. None: the row at the spec's own place.
    """

    params: SamplingParams
    index: int
    position: int
    state: LogitsState | None = None
    row: int | None = None


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
        seed: the shared generator's; None: another one each time.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._shared = torch.Generator()
        if seed is None:
            self._shared.seed()
        else:
            self._shared.manual_seed(seed)
        self._seeded = torch.Generator()  # each row sets its seed

    def sample(self, logits: torch.Tensor, specs: Sequence[SampleSpec]) -> list[int]:
        """Token ids, one per spec; `NOT_FINITE` or `NO_TOKEN_LEFT` for a row that has none.

        Args:
            logits: [rows, vocab_size], any floating dtype. They are not changed.
            specs: how tokens are sampled; at least one of every row.
        """
        rows = _rows_of(specs)
        spec_of = dict(zip(rows, specs, strict=True))
        has_token = is_finite = _is_finite(logits)
        adjusted = {row: spec.state for row, spec in spec_of.items() if spec.state is not None}
        if adjusted:
            changed = _rows(logits, list(adjusted)).to(torch.float32, copy=True)
            adjust_logits(changed, list(adjusted.values()))
            logits = _with_rows(logits, list(adjusted), changed)
            has_token = _is_finite(logits)
            for row, spec in zip(rows, specs, strict=True):
                if spec.state is not None:
                    spec.state.error = adjusted[row].error
        token_ids = torch.empty(len(specs), dtype=torch.int64, device=logits.device)
        greedy = [at for at, spec in enumerate(specs) if spec.params.is_greedy]
        if greedy:
            token_ids[greedy] = _rows(logits, [rows[at] for at in greedy]).argmax(dim=-1)
        drawn = [at for at, spec in enumerate(specs) if not spec.params.is_greedy]
        if drawn:
            place_of = {row: place for place, row in enumerate(dict.fromkeys(rows[at] for at in drawn))}
            probs = _probabilities(_rows(logits, list(place_of)).float(), [spec_of[row].params for row in place_of])
            uniform = self._uniform([specs[at] for at in drawn]).to(logits.device)
            token_ids[drawn] = _draw(probs, uniform, [place_of[rows[at]] for at in drawn])
        token_ids.masked_fill_(~_rows(has_token, rows), NO_TOKEN_LEFT)
        return token_ids.masked_fill_(~_rows(is_finite, rows), NOT_FINITE).tolist()

    def _uniform(self, specs: Sequence[SampleSpec]) -> torch.Tensor:
        """[len(specs), 1] float64 in [0, 1), drawn on the CPU, so that a seed means the same on every device."""
        drawn = torch.empty(len(specs), 1, dtype=torch.float64, device="cpu")
        for row, spec in zip(drawn, specs, strict=True):
            generator = self._shared
            if spec.params.seed is not None:
                generator = self._seeded.manual_seed(_stream(spec.params.seed, spec.index, spec.position))
            row.uniform_(generator=generator)
        return drawn


def _rows_of(specs: Sequence[SampleSpec]) -> list[int]:
    """The row of logits of each spec."""
    return [at if spec.row is None else spec.row for at, spec in enumerate(specs)]


def _is_finite(logits: torch.Tensor) -> torch.Tensor:
    """[rows] whether the largest logits are finite. A NaN counts as the largest."""
    return logits.amax(dim=-1).isfinite()


def _rows(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """Some rows; no copy if they are all in their order."""
    return logits if _are_all(rows, logits) else logits[rows]


def _are_all(rows: list[int], logits: torch.Tensor) -> bool:
    """Whether some rows are all of them in their order."""
    return rows == list(range(len(logits)))


def _with_rows(logits: torch.Tensor, rows: list[int], changed: torch.Tensor) -> torch.Tensor:
    """The logits with some rows changed, in float32; the caller's stay as they are."""
    if _are_all(rows, logits):
        return changed
    copy = logits.to(torch.float32, copy=True)
    copy[rows] = changed
    return copy


def _draw(probs: torch.Tensor, uniform: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """[draws] token ids drawn from `probs`, which need not be normalised, by inversion of the cumulative distribution:
    first a block of tokens, then one of them.

    The sum over the blocks and the one within a block are in float64: in float32 their rounding over a whole vocabulary
    exceeds many tokens' probabilities.

    Args:
        probs: [rows, vocab_size] float32.
        uniform: [draws, 1] float64 in [0, 1).
        rows: the row of each draw.
    """
    vocab_size = probs.shape[1]
    whole = vocab_size - vocab_size % BLOCK
    sums = probs[:, :whole].unflatten(1, (-1, BLOCK)).sum(dim=-1)
    if whole < vocab_size:
        sums = torch.cat((sums, probs[:, whole:].sum(dim=-1, keepdim=True)), dim=1)
    sums = sums.double()
    cumulative = sums.cumsum(dim=-1)
    sums, cumulative = _rows(sums, rows), _rows(cumulative, rows)
    target = uniform * cumulative[:, -1:]
    block = _first_above(cumulative, target)
    share = (target - (cumulative - sums).gather(1, block)) / sums.gather(1, block)
    places = block * BLOCK + torch.arange(BLOCK, dtype=torch.int64, device=probs.device)
    inside = places.clamp(max=vocab_size - 1)
    if _are_all(rows, probs):
        within = probs.gather(1, inside)
    else:
        within = probs[torch.tensor(rows, dtype=torch.int64, device=probs.device)[:, None], inside]
    within = within.double().masked_fill_(places >= vocab_size, 0.0)
    cumulative = within.cumsum(dim=-1)
    return (block * BLOCK + _first_above(cumulative, share.clamp_(min=0.0) * cumulative[:, -1:]))[:, 0]


def _first_above(cumulative: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """[rows, 1] the first places where a cumulative sum exceeds a number. What rounding has made too large counts as
    less than the whole sum, so that a place without a share is never found. A row of NaN has any place."""
    below = torch.nextafter(cumulative[:, -1:], torch.zeros_like(target))
    found = torch.searchsorted(cumulative, torch.minimum(target, below), right=True)
    return found.clamp_(max=cumulative.shape[1] - 1)


def token_logprobs(
    logits: torch.Tensor,
    specs: Sequence[SampleSpec],
    token_ids: Sequence[int],
) -> list[TokenLogprobs | None]:
    """Log-probabilities of each sampled token and of the `params.logprobs` most likely ones of its row; None where that
    is None, or where no token was sampled.

    Args:
        logits: [rows, vocab_size], unmodified.
        specs: how the tokens were sampled.
        token_ids: the sampled tokens, one per spec.
    """
    results: list[TokenLogprobs | None] = [None] * len(specs)
    wanted = [at for at, spec in enumerate(specs) if spec.params.logprobs is not None and token_ids[at] >= 0]
    if wanted:
        counts = [specs[at].params.logprobs or 0 for at in wanted]
        rows = _rows_of(specs)
        found = most_likely(logits, [token_ids[at] for at in wanted], counts, [rows[at] for at in wanted])
        for at, logprobs in zip(wanted, found, strict=True):
            results[at] = logprobs
    return results


def most_likely(
    logits: torch.Tensor, token_ids: Sequence[int], counts: Sequence[int], rows: Sequence[int]
) -> list[TokenLogprobs]:
    """Log-probabilities of some tokens and of their rows' most likely ones.

    Args:
        logits: [num_rows, vocab_size].
        token_ids: the tokens.
        counts: how many most likely ones, per token.
        rows: the row of each token. Several tokens may have one.
    """
    place_of = {row: place for place, row in enumerate(dict.fromkeys(rows))}
    logits, places = _rows(logits, list(place_of)).float(), [place_of[row] for row in rows]
    chosen = logits[places, list(token_ids)][:, None]
    ranks = ((_rows(logits, places) > chosen).sum(dim=-1, dtype=torch.float32).long() + 1).tolist()
    whole = logits.logsumexp(dim=-1, keepdim=True)
    top = logits.topk(max(counts))
    top_values, top_ids = (top.values - whole).tolist(), top.indices.tolist()
    values = (chosen - whole[places])[:, 0].tolist()
    return [
        TokenLogprobs(
            token_ids=[token_id, *top_ids[row][:count]],
            logprobs=[value, *top_values[row][:count]],
            ranks=[rank, *range(1, count + 1)],
        )
        for row, token_id, count, value, rank in zip(places, token_ids, counts, values, ranks, strict=True)
    ]


def _probabilities(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """[rows, vocab_size] float32 probabilities after temperature, min-p, top-k and top-p; not normalised after the last
    two. `logits` are not changed."""
    if any(p.temperature != 1 for p in params):
        # An infinite temperature would make NaN of a token that is banned.
        finite = [[min(p.temperature, _LARGEST)] for p in params]
        temperature = torch.tensor(finite, dtype=torch.float32, device=logits.device)
        # Subtract the maximum first, so that a small temperature cannot overflow.
        logits = (logits - logits.amax(dim=-1, keepdim=True)).div_(temperature)
    probs = logits.softmax(dim=-1)
    rows = [row for row, p in enumerate(params) if p.min_p > 0]
    if rows:
        _drop_unlikely(probs, rows, [params[row].min_p for row in rows])
    truncate(probs, params)
    return probs


def _drop_unlikely(probs: torch.Tensor, rows: list[int], min_p: Sequence[float]) -> None:
    """Makes some rows probabilities without the tokens that are less than min_p times as likely as the most likely
    one."""
    some = _rows(probs, rows)
    least = torch.tensor(min_p, dtype=torch.float32, device=probs.device)[:, None] * some.amax(dim=-1, keepdim=True)
    some.masked_fill_(some < least, 0.0)
    some.div_(some.sum(dim=-1, keepdim=True))
    if some is not probs:
        probs[rows] = some


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
