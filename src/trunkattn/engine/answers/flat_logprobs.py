"""Log-probabilities of a row of tokens, as numbers side by side. An entry is made when it is read."""

from array import array
from collections.abc import Sequence
from typing import Any, Generic, TypeVar, cast, overload

from trunkattn.engine.answers.token_bytes import TokenBytes
from trunkattn.engine.outputs import Logprob
from trunkattn.engine.sampling.sampler import TokenLogprobs

Entry = TypeVar("Entry", bound=dict[int, Logprob] | None)


class FlatLogprobs(Sequence[Entry], Generic[Entry]):
    """One entry per token, token id -> Logprob of the token and of the most likely ones; None if nothing is before it.

    Python's garbage collector stops every thread and visits every mapping and object. A few long prompts would have a
    million of these. Here they are three arrays, and an entry lives only as long as a reader uses it.

    Args:
        token_bytes: what tokens write.
    """

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._token_ids, self._logprobs, self._ranks = array("q"), array("d"), array("q")
        self._ends = array("q")  # of each entry, in the three
        self._length = 0

    def append(self, logprobs: TokenLogprobs | None) -> None:
        """Adds the next token's; None: it follows nothing."""
        if logprobs is not None:
            self._token_ids.extend(logprobs.token_ids)
            self._logprobs.extend(logprobs.logprobs)
            self._ranks.extend(logprobs.ranks)
        self._ends.append(len(self._token_ids))
        self._length += 1

    def so_far(self) -> "FlatLogprobs[Entry]":
        """The entries until now, whatever is added later. Nothing is copied."""
        found = FlatLogprobs[Entry](self._token_bytes)
        vars(found).update(vars(self))
        return found

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, place: int) -> Entry: ...

    @overload
    def __getitem__(self, place: slice) -> list[Entry]: ...

    def __getitem__(self, place: int | slice) -> Entry | list[Entry]:
        places = range(self._length)[place]
        return self._entry(places) if isinstance(places, int) else [self._entry(one) for one in places]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)  # a copy needs no tokenizer

    def _entry(self, place: int) -> Entry:
        start, end = self._ends[place - 1] if place else 0, self._ends[place]
        entry: dict[int, Logprob] = {}
        values = zip(self._token_ids[start:end], self._logprobs[start:end], self._ranks[start:end], strict=True)
        for token_id, value, rank in values:
            if token_id not in entry:  # the token itself comes first
                written = self._token_bytes.of(token_id)
                text = None if written is None else written.decode("utf-8", "replace")
                entry[token_id] = Logprob(value, rank, text, written)
        return cast(Entry, entry or None)
