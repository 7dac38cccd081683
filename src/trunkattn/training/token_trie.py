"""Sequences of tokens to a compressed trie: the segments that they share, in depth-first pre-order."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import torch

from trunkattn.validate import described, shown

Tokens: TypeAlias = Sequence[int] | torch.Tensor | np.ndarray

_MOST: Final = (1 << 63) - 1


class Segments(NamedTuple):
    """The parent (-1: a root) and the length of each segment in depth-first pre-order, where each one begins and the
    last one ends, the last segment of each sequence, and all tokens in order, int64, or None."""

    parents: list[int]
    lengths: list[int]
    bounds: list[int]
    leaves: Sequence[int]
    tokens: np.ndarray | None


@dataclass
class _Node:
    """A segment of a trie: tokens [start, end) of sequence `first`, the first that begins so."""

    first: int
    start: int
    end: int
    children: "list[_Node]" = field(default_factory=list)


def token_array(name: str, tokens: Tokens) -> np.ndarray:
    """Integers of one dimension as int64, at least one; a view where they lie so in memory.

    Raises:
        TypeError, ValueError: naming the argument, its value and what was expected.
    """
    try:
        array = tokens.numpy(force=True) if isinstance(tokens, torch.Tensor) else np.asarray(tokens)
    except (RuntimeError, TypeError, ValueError) as error:  # nested lists, tensors without data
        raise TypeError(f"{name} is {described(tokens)} without integers of one dimension: expected them") from error
    if np.ma.is_masked(tokens):
        raise ValueError(f"{name} hides entries behind a mask: expected all of them; use {name}.compressed()")
    if array.ndim == 0:
        raise TypeError(f"{name}={shown(tokens)}: expected token ids, a list or an array of integers")
    if array.ndim != 1:
        raise ValueError(f"{name} has shape {array.shape}: expected one dimension of integers")
    if array.size == 0:
        raise ValueError(f"{name} is empty: expected at least one token")
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} has dtype {array.dtype}: expected integers")
    if array.dtype.kind == "u" and array.max() > _MOST:
        raise ValueError(f"{name} holds {array.max()}: expected integers of at most {_MOST}")
    return array.astype(np.int64, copy=False)


def check_list(name: str, value: Any, of: str) -> Any:
    """Returns a list, tuple or array as it is, and a tensor as the tuple of its parts. of: what it should hold, for
    people.

    Raises:
        TypeError, ValueError: the value is something else, or an array without a dimension.
    """
    if not isinstance(value, Sequence | torch.Tensor | np.ndarray) or isinstance(value, str | bytes):
        raise TypeError(f"{name} is {described(value)}: expected a list of {of}")
    if isinstance(value, torch.Tensor | np.ndarray) and value.ndim == 0:
        raise ValueError(f"{name} has shape (): expected a list of {of}")
    return value.unbind() if isinstance(value, torch.Tensor) else value


def check_equal(
    name: str, found: Sequence[Any] | np.ndarray, expected: Sequence[int] | np.ndarray, meaning: str
) -> None:
    """Raises ValueError at the first entry that differs. meaning: what an entry is, for people."""
    if len(found) != len(expected):
        raise ValueError(f"{name} has {len(found)} entries: expected {len(expected)}")
    if np.array_equal(found, expected):
        return
    for index, (value, right) in enumerate(zip(found, expected, strict=True)):
        if value != right:
            raise ValueError(f"{name}[{index}]={value}: expected {right}, {meaning}")


def integer_list(name: str, values: Any) -> list[Any]:
    """A list of integers, also from an array. The caller checks each entry of what was a list."""
    if isinstance(values, torch.Tensor | np.ndarray):
        found: list[Any] = token_array(name, values).tolist()
        return found
    return list(check_list(name, values, "integers"))


def token_arrays(name: str, given: Sequence[Tokens]) -> list[np.ndarray]:
    """Each of several sequences by `token_array`, at least one."""
    listed = check_list(name, given, "sequences")
    if len(listed) == 0:
        raise ValueError(f"{name} is empty: expected at least one sequence")
    return [token_array(f"{name}[{number}]", tokens) for number, tokens in enumerate(listed)]


def build_trie(name: str, sequences: list[np.ndarray]) -> Segments:
    """The segments of sequences that each have tokens; equal sequences end at one segment. name: of the argument.

    Children of a segment are in the order of the first sequence that each one holds. Sequences that begin alike are
    neighbours when they are sorted, so one pass over these with a path from the root finds all segments.

    Raises:
        ValueError: a sequence is a prefix of another.
    """
    keys = [sequence.tobytes() for sequence in sequences]  # any order of tokens does
    root = _Node(0, 0, 0)
    path, leaf_of = [root], dict[int, _Node]()
    last = -1
    for number in sorted(range(len(sequences)), key=keys.__getitem__):  # equal ones in their order
        size = len(sequences[number])
        shared = 0 if last < 0 else _shared(sequences[last], sequences[number])
        if shared == size:
            leaf_of[number] = leaf_of[last]
            continue
        if shared == len(sequences[last]):
            _refuse(name, last, number)
        _leave(path, shared)
        path.append(_Node(number, shared, size))
        leaf_of[number], last = path[-1], number
    _leave(path, 0)
    parents: list[int] = []
    nodes: list[_Node] = []
    numbers: dict[int, int] = {}
    stack = [(-1, child) for child in _later_first(root)]
    while stack:
        parent, node = stack.pop()
        numbers[id(node)] = number = len(nodes)
        nodes.append(node)
        parents.append(parent)
        stack += [(number, child) for child in _later_first(node)]
    lengths = [node.end - node.start for node in nodes]
    return Segments(
        parents,
        lengths,
        [0, *accumulate(lengths)],
        [numbers[id(leaf_of[number])] for number in range(len(sequences))],
        np.concatenate([sequences[node.first][node.start : node.end] for node in nodes]),
    )


def after_prompt(prompt: np.ndarray, answers: Segments) -> Segments:
    """The segments of sequences that are a prompt and an answer each, from those of the answers."""
    assert answers.tokens is not None
    parents, lengths, leaves = answers.parents, answers.lengths, answers.leaves
    if parents.count(-1) == 1:  # all answers begin alike
        lengths = [len(prompt) + lengths[0], *lengths[1:]]
    else:
        parents, lengths = [-1, *(parent + 1 for parent in parents)], [len(prompt), *lengths]
        leaves = [leaf + 1 for leaf in leaves]
    return Segments(parents, lengths, [0, *accumulate(lengths)], leaves, np.concatenate([prompt, answers.tokens]))


def _shared(one: np.ndarray, other: np.ndarray) -> int:
    """How many tokens two sequences begin with alike."""
    if one[0] != other[0]:  # as most answers do: no array of differences is made
        return 0
    common = min(len(one), len(other))
    differs = one[:common] != other[:common]
    first = int(differs.argmax())
    return first if differs[first] else common


def _leave(path: list[_Node], depth: int) -> None:
    """Hangs the nodes of a path that lie below `depth` tokens to their parents, and cuts the one across it in two."""
    while path[-1].end > depth:
        node = path.pop()
        above = path[-1]
        if above.end < depth:
            above = _Node(node.first, node.start, depth)
            node.start = depth
            path.append(above)
        above.children.append(node)
        above.first = min(above.first, node.first)


def _later_first(node: _Node) -> list[_Node]:
    return sorted(node.children, key=lambda child: -child.first)


def _refuse(name: str, shorter: int, longer: int) -> None:
    raise ValueError(
        f"{name}[{shorter}] is a prefix of {name}[{longer}]: expected that none is, so end each with a token of its "
        "own, such as the end of a sequence"
    )
