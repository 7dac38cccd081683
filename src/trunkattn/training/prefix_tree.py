"""Prefix trees for training: sequences that share prefixes, with each shared token stored and computed once.

Tokens lie in depth-first pre-order, so that the subtree of token t is the range [t, subtree_end[t]), and token t sees
the keys s with s <= t < subtree_end[s]: itself and its ancestors.
"""

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any, Final, NamedTuple, NoReturn, TypeAlias, TypeVar

import numpy as np
import torch

from trunkattn.derivatives import check_none
from trunkattn.numerics import MAX_INT32
from trunkattn.training.sequences import LARGEST_BLOCK, TreeTables, TreeWork
from trunkattn.training.token_trie import (
    Segments,
    Tokens,
    after_prompt,
    build_trie,
    check_equal,
    check_list,
    integer_list,
    token_array,
    token_arrays,
)
from trunkattn.training.tree_segments import check_segments, count_work, path_lengths, table_numbers
from trunkattn.validate import check_dense, check_memory, described, has_memory

Weights: TypeAlias = Sequence[float] | torch.Tensor | np.ndarray

_Made = TypeVar("_Made")
_MOST_TOKENS: Final = MAX_INT32 // 4 * 4 - LARGEST_BLOCK  # for `table_length` fits in int32, too


class PackedTree(NamedTuple):
    """The inputs of a model and its loss for a packed tree, with one entry per packed token, on the CPU.

    tokens: int64, or None if the tree has none. position_ids: int64, the number of ancestors of each token.
    predictors: int64, the token whose logits predict this one, and -1 where a sequence begins. weights: float32, the
    sum of the weights of all copies of the token, 0 where a sequence begins.
    """

    tokens: torch.Tensor | None
    position_ids: torch.Tensor
    predictors: torch.Tensor
    weights: torch.Tensor


class PrefixTree:
    """A forest of sequences that share prefixes; one of the class methods makes it.

    starts, lengths, parents: of each segment, in depth-first pre-order; the parent of a root is -1. leaves: the last
    segment of each sequence. num_tokens: of all packed. work: what attention over it costs. tokens: int64, or None.

    Example:
        >>> tree = PrefixTree.from_prompt([1, 2, 3], [[4, 5], [6]])
        >>> tree.subtree_end.tolist(), tree.pack().position_ids.tolist()
        ([6, 6, 6, 5, 5, 6], [0, 1, 2, 3, 4, 3])
        >>> first, second = tree.unpack(tree.pack().tokens)
        >>> second.tolist()
        [1, 2, 3, 6]
    """

    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    parents: tuple[int, ...]
    leaves: tuple[int, ...]
    num_tokens: int
    work: TreeWork
    tokens: torch.Tensor | None
    _by_segment: torch.Tensor
    _cache: dict[Any, Any]

    # No dataclass, which FSDP would replace field by field for every layer that a tree is given to.
    def __init__(self, segments: Segments) -> None:
        """The tree of segments, which are checked but for their order.

        Raises:
            ValueError, TypeError: they are in another order, have too many tokens, or are no segments.
        """
        if not isinstance(segments, Segments):
            raise TypeError(
                f"segments is {described(segments)}: make a tree by a class method, such as PrefixTree.from_sequences"
            )
        num_tokens = segments.bounds[-1]
        if num_tokens > _MOST_TOKENS:
            raise ValueError(f"lengths sum to {num_tokens}: expected at most {_MOST_TOKENS} tokens a tree")
        numbers = table_numbers(segments)
        with _outside_inference():
            self.__dict__.update(
                starts=tuple(segments.bounds[:-1]),
                lengths=tuple(segments.lengths),
                parents=tuple(segments.parents),
                leaves=tuple(segments.leaves),
                num_tokens=num_tokens,
                work=count_work(segments.parents, segments.lengths),
                tokens=None if segments.tokens is None else torch.from_numpy(segments.tokens),
                _by_segment=torch.frombuffer(numbers, dtype=torch.int32),
                _cache={},
            )

    def __setattr__(self, name: str, value: Any) -> None:
        """Raises, because kernels have tables of what a tree is."""
        raise AttributeError(f"{name} of a PrefixTree is fixed: make another tree")

    def __delattr__(self, name: str) -> None:
        """Raises, as `__setattr__` does."""
        raise AttributeError(f"{name} of a PrefixTree is fixed: make another tree")

    def __repr__(self) -> str:
        """Returns its size, as its tokens may be many."""
        return f"PrefixTree(num_sequences={self.num_sequences}, num_tokens={self.num_tokens})"

    @classmethod
    def from_sequences(cls, sequences: Sequence[Tokens]) -> "PrefixTree":
        """The tree of sequences by their tokens, each a list or a 1-dimensional tensor of integers.

        Equal sequences are one leaf, which counts for each of them.

        Raises:
            ValueError, TypeError: a sequence has no tokens, or is a prefix of another.
        """
        return cls(build_trie("sequences", token_arrays("sequences", sequences)))

    @classmethod
    def from_prompt(cls, prompt: Tokens, answers: Sequence[Tokens]) -> "PrefixTree":
        """The tree of one prompt and its answers; sequence i is the prompt and answer i.

        Answers that begin alike share that beginning, too.

        Raises:
            ValueError, TypeError: the prompt or an answer has no tokens, or an answer is a prefix of another.
        """
        first = token_array("prompt", prompt)
        return cls(after_prompt(first, build_trie("answers", token_arrays("answers", answers))))

    @classmethod
    def from_segments(
        cls,
        parents: Tokens,
        lengths: Tokens,
        *,
        starts: Tokens | None = None,
        tokens: Tokens | None = None,
        position_ids: Tokens | None = None,
    ) -> "PrefixTree":
        """The tree of segments in depth-first pre-order; every segment without children ends a sequence.

        Args:
            parents: the number of each segment's parent, -1 for a root.
            lengths: tokens of each segment, at least one.
            starts: the first token of each segment; None if not at hand. They are checked against `lengths`.
            tokens: all tokens in order, or None.
            position_ids: of each token, to be checked: the number of its ancestors.

        Raises:
            ValueError, TypeError: naming the argument, its value and what was expected.
        """
        above, counts = integer_list("parents", parents), integer_list("lengths", lengths)
        check_segments(above, counts)
        bounds = [0, *accumulate(counts)]
        if starts is not None:
            check_equal("starts", token_array("starts", starts), bounds[:-1], "the sum of the lengths before")
        inner = set(above)
        leaves = [segment for segment in range(len(above)) if segment not in inner]
        own = None if tokens is None else token_array("tokens", tokens).copy()
        if own is not None and len(own) != bounds[-1]:
            raise ValueError(f"tokens has {len(own)} entries: expected {bounds[-1]}, the sum of lengths")
        tree = cls(Segments(above, counts, bounds, leaves, own))
        if position_ids is not None:
            found = token_array("position_ids", position_ids)
            check_equal("position_ids", found, tree._position_ids(), "the number of the token's ancestors")
        return tree

    @classmethod
    def from_subtree_end(
        cls, subtree_end: Tokens, *, tokens: Tokens | None = None, position_ids: Tokens | None = None
    ) -> "PrefixTree":
        """The tree of tokens in depth-first pre-order; token t is an ancestor of [t + 1, subtree_end[t]).

        tokens, position_ids: as in `from_segments`.

        Raises:
            ValueError, TypeError: naming the argument, its value and what was expected.
        """
        all_ends = token_array("subtree_end", subtree_end)
        # An only child lies in the subtree of the token before and ends where that ends: it continues its segment.
        continues = (all_ends[1:] == all_ends[:-1]) & (all_ends[:-1] > np.arange(1, len(all_ends)))
        first = np.flatnonzero(np.concatenate([[True], ~continues]))
        starts, ends = first.tolist(), all_ends[first].tolist()
        parents: list[int] = []
        path: list[int] = []  # segments from the root to the one before
        for segment, (start, end) in enumerate(zip(starts, ends, strict=True)):
            while path and ends[path[-1]] <= start:
                path.pop()
            limit = ends[path[-1]] if path else len(all_ends)
            if not start < end <= limit:
                raise ValueError(
                    f"subtree_end[{start}]={end}: expected {start + 1} to {limit}, the end of its parent's subtree"
                )
            parents.append(path[-1] if path else -1)
            path.append(segment)
        lengths = np.diff([*starts, len(all_ends)]).tolist()
        return cls.from_segments(parents, lengths, tokens=tokens, position_ids=position_ids)

    @property
    def _host(self) -> TreeTables:
        return self.tables(torch.device("cpu"))

    @property
    def subtree_end(self) -> torch.Tensor:
        """The end of the range of tokens that see a token, [num_tokens] int32, on a CPU; a copy."""
        return self._host.subtree_end[: self.num_tokens].clone()

    @property
    def _segments(self) -> np.ndarray:
        """`TreeTables.segments`."""
        count = len(self.starts)
        return self._by_segment.numpy()[: 4 * count].reshape(count, 4)

    @property
    def _offsets(self) -> np.ndarray:
        """The number of ancestors of each segment's tokens less the numbers of these tokens."""
        count = len(self.starts)
        return self._by_segment.numpy()[5 * count : 6 * count]

    @property
    def num_levels(self) -> int:
        """The number of segments on the longest path from a root to a leaf."""
        return self.cached("num_levels", lambda: max(path_lengths(self.parents, [1] * len(self.parents))))

    @property
    def num_sequences(self) -> int:
        """The number of sequences."""
        return len(self.leaves)

    def sequence_indices(self) -> list[torch.Tensor]:
        """The packed tokens of each sequence, in order, int64."""
        of_leaf = dict(self.paths(set(self.leaves)))
        return [torch.from_numpy(of_leaf[leaf]) for leaf in self.leaves]

    def paths(self, segments: Container[int]) -> Iterator[tuple[int, np.ndarray]]:
        """Each of some segments, in order, with the tokens from a root to its end, int64."""
        ends = path_lengths(self.parents, self.lengths)
        path = np.empty(max(ends), np.int64)
        for segment, (start, length, end) in enumerate(zip(self.starts, self.lengths, ends, strict=True)):
            path[end - length : end] = np.arange(start, start + length)
            if segment in segments:
                yield segment, path[:end].copy()

    def _position_ids(self) -> np.ndarray:
        positions: np.ndarray = np.arange(self.num_tokens) + np.repeat(self._offsets, self.lengths)
        return positions

    def tables(self, device: torch.device) -> TreeTables:
        """The tree as kernels on a device read it; it is made there once, from what is known of each segment."""
        return self.cached(device, lambda: self._tables(device))

    def _tables(self, device: torch.device) -> TreeTables:
        make, numbers = TreeTables.of_segments, self._by_segment.to(device)
        if device.type == "cuda" and not torch.compiler.is_compiling() and has_memory(numbers):
            from trunkattn.training.tree_tables import tables_of_segments as make  # which needs Triton
        return make(numbers, self.num_tokens)

    def cached(self, key: Any, make: Callable[[], _Made]) -> _Made:
        """The result of `make`, which is called once for each key and kept with the tree."""
        if key in self._cache:
            found: _Made = self._cache[key]
            return found
        with _outside_inference():
            made = make()
        if _lasts(made):
            self._cache[key] = made
        return made

    def __getstate__(self) -> dict[str, Any]:
        """The state for copies and other processes. It has no tables on devices, which belong to this process, and no
        `work`, whose class torch.load would have to be told of, too."""
        return {name: value for name, value in self.__dict__.items() if name != "work"} | {"_cache": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """The state of a copy, on the CPU: torch.load puts tensors where its map_location says."""
        tensors = {name: value.cpu() for name, value in state.items() if isinstance(value, torch.Tensor)}
        self.__dict__.update(state | tensors, work=count_work(state["parents"], state["lengths"]))

    def pack(self, weights: Sequence[Weights] | None = None) -> PackedTree:
        """Packs the tree: its tokens, their positions, and the weights with which the packed loss equals that of all
        sequences.

        The loss of a next token is `weights[t] * cross_entropy(logits[predictors[t]], tokens[t])`, summed over the
        tokens with a predictor: the last token of a prompt has one label for each answer, and a shared token counts
        once for each sequence that holds it.

        Args:
            weights: for each sequence the weight [length] of each token's loss, a tensor or a list; None for 1.

        Raises:
            ValueError, TypeError: the weights are no finite real numbers, one for each token of each sequence, or
                require a gradient.
        """
        sums = self._counts() if weights is None else self._sums(weights)
        starts, stops, parents, _ = self._segments.T
        predictors = np.arange(-1, self.num_tokens - 1)
        predictors[starts] = np.where(parents < 0, -1, stops[parents] - 1)
        sums[predictors < 0] = 0
        tokens = None if self.tokens is None else self.tokens.clone()  # labels are often made in place
        return PackedTree(tokens, *map(torch.from_numpy, (self._position_ids(), predictors, sums)))

    def _counts(self) -> np.ndarray:
        """The number of sequences that hold each token, float32."""
        counts = [0] * len(self.starts)
        for leaf in self.leaves:
            counts[leaf] += 1
        for segment in range(len(counts) - 1, 0, -1):
            if self.parents[segment] >= 0:
                counts[self.parents[segment]] += counts[segment]
        return np.repeat(np.array(counts, np.float32), self.lengths)

    def _sums(self, weights: Sequence[Weights]) -> np.ndarray:
        """The sum of the weights of all copies of each token, float32."""
        indices = self.sequence_indices()
        weights = check_list("weights", weights, "lists or tensors")
        if len(weights) != len(indices):
            raise ValueError(f"weights has {len(weights)} entries: expected {len(indices)}, one for each sequence")
        sums = torch.zeros(self.num_tokens, dtype=torch.float64, device="cpu")  # of many copies, rounded once
        for number, (own, given) in enumerate(zip(indices, weights, strict=True)):
            weight = _real_numbers(f"weights[{number}]", given)
            if tuple(weight.shape) != (len(own),):
                expected = f"({len(own)},), the length of sequence {number}"
                raise ValueError(f"weights[{number}] has shape {tuple(weight.shape)}: expected {expected}")
            sums.index_add_(0, own, weight.detach().to("cpu", torch.float64))
        found = sums.float()
        if not torch.compiler.is_compiling() and not found.isfinite().all():
            _refuse_weights(weights, sums)
        return found.numpy()

    def unpack(self, values: torch.Tensor) -> list[torch.Tensor]:
        """The values [length, ...] of each sequence from those of all packed tokens [num_tokens, ...].

        Gradients flow back; a shared token sums those of its copies.

        Raises:
            TypeError, ValueError: `values` is no tensor, or has not one row for each packed token.
        """
        if not isinstance(values, torch.Tensor):
            raise TypeError(f"values is {described(values)}: expected a torch.Tensor")
        check_dense("values", values)
        if values.dim() < 1 or values.shape[0] != self.num_tokens:
            raise ValueError(f"values has shape {tuple(values.shape)}: expected ({self.num_tokens}, ...)")
        indices = self.sequence_indices()
        # one gather, because each of many would have a gradient as large as all values
        rows, lengths = values[torch.cat(indices).to(values.device)], [len(own) for own in indices]
        if torch._C._are_functorch_transforms_active():  # torch.vmap has no rule for the other one
            return list(torch.ops.aten.split_with_sizes_copy(rows, lengths))
        return list(rows.unsafe_split_with_sizes(lengths))  # they may be written to


def _outside_inference() -> AbstractContextManager[None]:
    """A context whose tensors a backward pass takes. To ask whether one is needed takes less than to enter one, but
    torch.compile does not trace the question."""
    needed = torch.compiler.is_compiling() or torch.is_inference_mode_enabled()
    return torch.inference_mode(False) if needed else nullcontext()


def _lasts(made: Any) -> bool:
    """Whether something may be kept. Fake tensors and those of torch.func end with the context that they are made in;
    torch.compile makes others of those that it traces."""
    tables = made if isinstance(made, TreeTables) else ()
    return torch.compiler.is_dynamo_compiling() or all(map(has_memory, tables))


def check_is_tree(tree: Any) -> None:
    """Raises unless it is a `PrefixTree`.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(tree, PrefixTree):
        raise TypeError(f"tree is {described(tree)}: expected a trunkattn.PrefixTree")


def _real_numbers(name: str, value: Weights) -> torch.Tensor:
    """Returns a tensor as it is, and a list or an array as one. Raises unless it is dense and holds real numbers that
    no gradient is asked of."""
    expected = "expected a list or a torch.Tensor of real numbers, one for each token of the sequence"
    if not isinstance(value, torch.Tensor):
        return torch.from_numpy(_array_of_reals(name, value, expected))
    if value.is_complex():
        raise TypeError(f"{name} has dtype {value.dtype}: {expected}")
    check_dense(name, value)
    if value.is_meta:
        raise ValueError(f"{name} is on meta: expected a tensor that holds its numbers")
    if not torch.compiler.is_compiling():
        check_memory(name, value)
    check_none(name, value, "packing records none; weigh the losses that unpack returns")
    return value


def _refuse_weights(weights: Sequence[Weights], sums: torch.Tensor) -> NoReturn:
    """Raises ValueError, as float32 does not hold the sum of some token's weights. It names the first weight that alone
    is to blame, or else the token."""
    expected = f"a finite number, at most {torch.finfo(torch.float32).max:.4g} in size"
    for number, given in enumerate(weights):
        weight = _real_numbers(f"weights[{number}]", given).detach().to("cpu", torch.float64)
        for at in (~weight.float().isfinite()).nonzero().flatten().tolist():
            raise ValueError(f"weights[{number}][{at}]={weight[at]:g}: expected {expected}; 0 leaves a token out")
    token = int(sums.abs().argmax())
    raise ValueError(f"weights of token {token} sum to {sums[token]:g}: expected {expected}")


def _array_of_reals(name: str, value: Any, expected: str) -> np.ndarray:
    try:
        array = np.asarray(value)
    except (RuntimeError, TypeError, ValueError) as error:  # lists of different lengths, tensors without data
        raise TypeError(f"{name} is {described(value)}: {expected}") from error
    if array.dtype.kind not in "biuf":
        raise TypeError(f"{name} is {described(value)}: {expected}")
    if np.ma.is_masked(value):
        raise ValueError(f"{name} hides entries behind a mask: expected all of them; use {name}.filled(0)")
    return array.astype(np.float64)
