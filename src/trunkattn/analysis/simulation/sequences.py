"""Token sequences made of a log's blocks, built when the cache first looks at them: no token of a log is needed."""

from array import array
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from trunkattn.analysis.records import LoggedRequest
from trunkattn.analysis.requests import UNKNOWN, Requests
from trunkattn.numerics import MAX_INT32


class LoggedTokens:
    """A sequence whose prompt stands for a log's blocks and whose answer is known from the beginning.

    Only its length grows. It does what the scheduler and the cache manager ask of a list of tokens: its length,
    slices, and to append a token. Nothing is built before the first slice.
    """

    def __init__(self, source: "TokenSource", request: LoggedRequest, number: int, max_tokens: int) -> None:
        """Makes the sequence of one answer. number: of the answer, in its request and among all: its tokens are new.
        max_tokens: length of the answer."""
        self._source, self._request, self._number, self._max_tokens = source, request, number, max_tokens
        self._length = request.num_prompt_tokens
        self._tokens: array[int] | None = None

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, key: slice) -> "array[int]":
        if self._tokens is None:
            self._tokens = self._source.tokens(self._request, self._number, self._max_tokens)
        start, stop, _ = key.indices(self._length)
        return self._tokens[start:stop]

    def append(self, token_id: int) -> None:
        """Takes one more token of the answer, whatever was sampled."""
        self._length += 1

    def grow(self, num_tokens: int) -> None:
        """Takes `num_tokens` more tokens of the answer."""
        self._length += num_tokens


class TokenSource:
    """The tokens that stand for a log's prompts and answers: equal wherever the log shows that the originals are equal.

    The tokens of a block alternate between the lower and the upper half of its number, because the cache compares whole
    prefixes. A later turn of a session begins with the earlier prompt and its answer, also within the block in which
    the earlier prompt ends.
    """

    def __init__(self, requests: Sequence[LoggedRequest]) -> None:
        """Reads the sessions of a log. Nothing is copied."""
        self._requests = Requests.of(requests)
        self._next: dict[tuple[int, int], int] = {}  # key -> place of the turn that follows
        self._heads: dict[int, tuple[int, int]] = {}  # block -> the block that begins it, and how many tokens of it
        sessions: dict[int, list[int]] = {}
        of_session, turns = (self._requests.rows[name] for name in ("session", "turn"))
        for place in np.flatnonzero(of_session != UNKNOWN).tolist():
            sessions.setdefault(int(of_session[place]), []).append(place)
        for places in sessions.values():
            for earlier, later in pairwise(sorted(places, key=turns.__getitem__)):
                self._link(self._requests[earlier], self._requests[later], later)

    @property
    def knows_answers(self) -> bool:
        """Whether some answer is part of a later prompt."""
        return bool(self._next)

    def tokens(self, request: LoggedRequest, number: int, max_tokens: int) -> "array[int]":
        """A prompt and its answer. See `LoggedTokens`."""
        prompt = self._prompt(request)
        answer = np.full(max_tokens, -1 - number % MAX_INT32, np.int32)
        later = self._next.get(request.key)
        if later is not None:
            known = self._prompt(self._requests[later])[len(prompt) : len(prompt) + max_tokens]
            answer[: len(known)] = known
        return array("i", np.concatenate((prompt, answer)).tobytes())

    def _prompt(self, request: LoggedRequest) -> NDArray[np.int32]:
        tokens = _spelled(request.blocks, request.block_size)[: request.num_prompt_tokens]
        if self._heads:
            for place, block in enumerate(request.blocks.tolist()):
                while block in self._heads:
                    block, count = self._heads[block]
                    start = place * request.block_size
                    tokens[start : start + count] = _spelled(np.array([block]), count)
        return tokens

    def _link(self, earlier: LoggedRequest, later: LoggedRequest, place: int) -> None:
        full, rest = divmod(earlier.num_prompt_tokens, earlier.block_size)
        longer = later.num_prompt_tokens > earlier.num_prompt_tokens and later.block_size == earlier.block_size
        if not longer or not np.array_equal(earlier.blocks[:full], later.blocks[:full]):
            return
        self._next[earlier.key] = place
        if rest:
            before, after = int(earlier.blocks[full]), int(later.blocks[full])
            if before != after:
                self._heads.setdefault(after, (before, rest))


def _spelled(blocks: NDArray[np.int64], block_size: int) -> NDArray[np.int32]:
    """The tokens that stand for blocks of `block_size` tokens."""
    halves = np.ascontiguousarray(blocks, "<i8").view(np.int32).reshape(-1, 2)
    return np.tile(halves, -(-block_size // 2))[:, :block_size].ravel()
