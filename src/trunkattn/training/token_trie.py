"""Sequences of tokens to a compressed trie: the segments that they share, in depth-first pre-order."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

Tokens: TypeAlias = Sequence[int] | torch.Tensor | np.ndarray


class Segments(NamedTuple):
    """The parent (-1: a root) and the length of each segment in depth-first pre-order, the last segment of each
    sequence, and all tokens in order, int64, or None."""

    parents: list[int]
    lengths: list[int]
    leaves: Sequence[int]
    tokens: np.ndarray | None


@dataclass
class _Node:
    """A segment of a trie that grows. children: by their first token. sequence: the first that ends here."""

    tokens: np.ndarray
    children: "dict[int, _Node]" = field(default_factory=dict)
    sequence: int | None = None


def token_array(name: str, tokens: Tokens) -> np.ndarray:
    """Integers of one dimension as int64, a copy, at least one.

    Raises:
        TypeError, ValueError: naming the argument, its value and what was expected.
    """
    array = tokens.detach().cpu().numpy() if isinstance(tokens, torch.Tensor) else np.asarray(tokens)
    if array.ndim != 1:
        raise ValueError(f"{name} has shape {array.shape}: expected one dimension of integers")
    if array.size == 0:
        raise ValueError(f"{name} is empty: expected at least one token")
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{name} has dtype {array.dtype}: expected integers")
    return array.astype(np.int64)


def token_arrays(name: str, given: Sequence[Tokens]) -> list[np.ndarray]:
    """Each of several sequences by `token_array`, at least one."""
    if len(given) == 0:
        raise ValueError(f"{name} is empty: expected at least one sequence")
    return [token_array(f"{name}[{number}]", tokens) for number, tokens in enumerate(given)]


def build_trie(name: str, sequences: list[np.ndarray]) -> Segments:
    """The segments of sequences that each have tokens; equal sequences end at one segment. name: of the argument.

    Raises:
        ValueError: a sequence is a prefix of another.
    """
    root = _Node(np.empty(0, np.int64))
    ends = [_insert(root, name, number, sequence) for number, sequence in enumerate(sequences)]
    parents: list[int] = []
    nodes: list[_Node] = []
    numbers: dict[int, int] = {}
    stack = [(-1, child) for child in reversed(root.children.values())]
    while stack:
        parent, node = stack.pop()
        numbers[id(node)] = number = len(nodes)
        nodes.append(node)
        parents.append(parent)
        stack += [(number, child) for child in reversed(node.children.values())]
    return Segments(
        parents,
        [len(node.tokens) for node in nodes],
        [numbers[id(node)] for node in ends],
        np.concatenate([node.tokens for node in nodes]),
    )


def _insert(root: _Node, name: str, number: int, sequence: np.ndarray) -> _Node:
    """The node at which a sequence ends, after it is in the trie. A node that is split keeps its end, so that nodes of
    sequences before stay theirs."""
    node, at = root, 0
    while at < len(sequence):
        child = node.children.get(int(sequence[at]))
        if child is None:
            if node.sequence is not None:
                _refuse(name, node.sequence, number)
            leaf = _Node(sequence[at:], sequence=number)
            node.children[int(sequence[at])] = leaf
            return leaf
        common = min(len(child.tokens), len(sequence) - at)
        differs = np.flatnonzero(child.tokens[:common] != sequence[at : at + common])
        shared = int(differs[0]) if len(differs) else common
        if shared < len(child.tokens):
            upper = _Node(child.tokens[:shared], {int(child.tokens[shared]): child})
            child.tokens = child.tokens[shared:]
            node.children[int(upper.tokens[0])] = upper
            child = upper
        node, at = child, at + shared
    if node.sequence is None:
        while node.sequence is None:
            node = next(iter(node.children.values()))
        _refuse(name, number, node.sequence)
    return node


def _refuse(name: str, shorter: int, longer: int) -> None:
    raise ValueError(
        f"{name}[{shorter}] is a prefix of {name}[{longer}]: expected that none is, so end each with a token of its "
        "own, such as the end of a sequence"
    )
