"""Random requests and decode batches like those of assistants and agents.

Sources: PAT's workloads (https://arxiv.org/abs/2511.22333, §8.2) and POD-Attention's (https://arxiv.org/abs/2410.18038,
§5.3).
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trunkattn.analysis.batch import PagedBatch, pages_for, require_positive

# Tokens per level of PAT's conversation workload: a system instruction with a random language and country.
CONVERSATION_LEVELS = (46, 348, 2123)

# Agents: a common root, then a tool's instructions, then a session of several turns. With these numbers an input has
# 8,596 tokens and an output 182 on average, and an unlimited cache holds 59 % of the input tokens.
_ROOT_TOKENS, _TOOL_TOKENS, _NUM_TOOLS, _ZIPF = 256, 1290, 64, 1.0
_NEW_TOKENS, _OUTPUT_TOKENS, _MORE_TURNS = 3524, 182, 0.5

# Mooncake's conversation trace: inputs are nearly log-normal, outputs have 343 tokens on average.
_CONVERSATION_INPUT, _CONVERSATION_SIGMA, _CONVERSATION_OUTPUT = 6900, 1.4, 343


@dataclass(frozen=True)
class AgentRequest:
    """One turn of an agent's session.

    Attributes:
        tool, session, turn: the input begins with this tool's instructions and this session's earlier turns.
        prefix: (name, tokens) of each part of the input with which other requests can begin, in order.
        new_tokens: input tokens of only this turn.
        output_tokens: generated tokens.
    """

    tool: int
    session: int
    turn: int
    prefix: tuple[tuple[Hashable, int], ...]
    new_tokens: int
    output_tokens: int

    @property
    def input_tokens(self) -> int:
        """Length of the prompt."""
        return sum(tokens for _, tokens in self.prefix) + self.new_tokens


def batch_of_prefixes(
    prefixes: Sequence[Sequence[tuple[Hashable, int]]], private_tokens: Sequence[int], page_size: int
) -> PagedBatch:
    """A decode batch of requests that begin with named parts and end with private tokens.

    Two requests share a page if it is full of tokens of parts and all parts up to its end are equal.

    Args:
        prefixes: per request, (name, tokens) of the parts in order. Equal names after equal parts mean equal tokens.
        private_tokens: per request, tokens after the parts, at least 1.
        page_size: tokens per page.

    Raises:
        ValueError: `page_size` or an entry of `private_tokens` is below 1.
    """
    require_positive(page_size=page_size, private_tokens=min(private_tokens, default=1))
    known: dict[Hashable, int] = {}
    rows: list[list[int]] = []
    num_pages = 0
    for parts, private in zip(prefixes, private_tokens, strict=True):
        names = tuple(name for name, _ in parts)
        ends = np.cumsum([tokens for _, tokens in parts])
        total = int(ends[-1]) if len(parts) else 0
        row = []
        for column in range(pages_for(total + private, page_size)):
            page = num_pages
            if (column + 1) * page_size <= total:
                depth = int(np.searchsorted(ends, (column + 1) * page_size)) + 1
                page = known.setdefault((names[:depth], column), num_pages)
            num_pages += page == num_pages
            row.append(page)
        rows.append(row)
    block_table = np.zeros((len(rows), max((len(row) for row in rows), default=1)), np.int32)
    for row, columns in zip(rows, block_table, strict=True):
        columns[: len(row)] = row
    lengths = [sum(tokens for _, tokens in parts) + own for parts, own in zip(prefixes, private_tokens, strict=True)]
    seq_lens = np.array(lengths, np.int32)
    return PagedBatch(block_table, seq_lens, np.ones(len(rows), np.int32), page_size, max(1, num_pages))


def conversation_batch(
    private_tokens: Sequence[int], page_size: int, seed: int, num_languages: int = 4, num_countries: int = 8
) -> PagedBatch:
    """One decoding request per entry of `private_tokens`, with PAT's three-level system instruction.

    The language (second level) and the country (third) are uniformly random. PAT does not give their numbers.
    """
    require_positive(num_languages=num_languages, num_countries=num_countries)
    rng = np.random.default_rng(seed)
    root, language_tokens, country_tokens = CONVERSATION_LEVELS
    prefixes = []
    for _ in private_tokens:
        language, country = int(rng.integers(num_languages)), int(rng.integers(num_countries))
        prefixes.append(
            (("root", root), (("language", language), language_tokens), (("country", country), country_tokens))
        )
    return batch_of_prefixes(prefixes, private_tokens, page_size)


def agent_requests(num_requests: int, seed: int) -> tuple[AgentRequest, ...]:
    """Turns of agents' sessions in order of arrival. The tools follow Zipf's law."""
    require_positive(num_requests=num_requests)
    rng = np.random.default_rng(seed)
    popularity = 1 / np.arange(1, _NUM_TOOLS + 1) ** _ZIPF
    popularity /= popularity.sum()
    lengths = rng.gamma(4, size=_NUM_TOOLS)
    lengths *= _TOOL_TOKENS / (lengths @ popularity)  # the average over requests, not over tools
    found: list[AgentRequest] = []
    open_sessions: list[AgentRequest] = []
    while len(found) < num_requests:
        if open_sessions and rng.random() < _MORE_TURNS:
            last = open_sessions.pop(int(rng.integers(len(open_sessions))))
            history = (("turn", last.session, last.turn), last.new_tokens + last.output_tokens)
            tool, session, turn, prefix = last.tool, last.session, last.turn + 1, (*last.prefix, history)
        else:
            tool, session, turn = int(rng.choice(_NUM_TOOLS, p=popularity)), len(found), 0
            prefix = (("root", _ROOT_TOKENS), (("tool", tool), max(1, round(lengths[tool]))))
        new, output = (max(1, round(mean * rng.gamma(2) / 2)) for mean in (_NEW_TOKENS, _OUTPUT_TOKENS))
        request = AgentRequest(
            tool=tool, session=session, turn=turn, prefix=prefix, new_tokens=new, output_tokens=output
        )
        found.append(request)
        if rng.random() < _MORE_TURNS:
            open_sessions.append(request)
    return tuple(found)


def agent_batch(num_requests: int, page_size: int, seed: int) -> PagedBatch:
    """A decode batch of the requests at one moment: at most one turn per session, at a random place in its output."""
    rng = np.random.default_rng(seed)
    latest = {request.session: request for request in agent_requests(4 * num_requests, seed)}
    chosen = [list(latest.values())[int(index)] for index in rng.permutation(len(latest))[:num_requests]]
    private = [request.new_tokens + int(rng.integers(request.output_tokens)) for request in chosen]
    return batch_of_prefixes([request.prefix for request in chosen], private, page_size)


def conversation_lengths(num_requests: int, seed: int) -> NDArray[np.int64]:
    """[num_requests, 2] prompt and output tokens, with nearly the distribution of Mooncake's conversation trace."""
    require_positive(num_requests=num_requests)
    rng = np.random.default_rng(seed)
    prompts = _CONVERSATION_INPUT * np.exp(_CONVERSATION_SIGMA * rng.standard_normal(num_requests))
    outputs = _CONVERSATION_OUTPUT * rng.gamma(2, size=num_requests) / 2
    return np.maximum(1, np.stack([prompts, outputs], axis=1).round()).astype(np.int64)


def poisson_arrivals(num_requests: int, rate: float, seed: int) -> NDArray[np.float64]:
    """[num_requests] seconds of a Poisson process with `rate` requests per second. The first is 0."""
    require_positive(num_requests=num_requests)
    if not (rate > 0 and np.isfinite(rate)):
        raise ValueError(f"rate={rate!r}: expected a finite number above 0")
    gaps = np.random.default_rng(seed).exponential(1 / rate, num_requests)
    return np.cumsum(gaps) - gaps[0]
