"""Places at which many prompts that share a beginning part: inner nodes of the prefix tree of all prompts."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Parting(NamedTuple):
    """Prompts that share their first blocks, and not the next one.

    Attributes:
        depth: blocks that all share.
        members: int64, positions of the prompts that go on, those with equal next blocks beside each other.
        children: int64, one for each member: equal where the next blocks are.
    """

    depth: int
    members: NDArray[np.int64]
    children: NDArray[np.int64]


def partings(blocks: Sequence[NDArray[np.int64]], least: int) -> list[Parting]:
    """The places at which at least `least` prompts leave the largest group that goes on together, shallow ones first.

    Sorted prompts have equal beginnings beside each other, so the tree's nodes are the intervals over which the number
    of blocks shared with the next prompt does not fall below a value. One pass with a stack finds them.

    Args:
        blocks: chained block numbers of each prompt.
        least: the number of prompts.
    """
    order = in_prefix_order(blocks)
    found = []
    stack: list[tuple[int, int, list[int]]] = []  # shared blocks, first prompt, and where a new child begins
    for place in range(1, len(order) + 1):
        shared = num_shared(blocks[order[place - 1]], blocks[order[place]]) if place < len(order) else -1
        start = place - 1
        while stack and stack[-1][0] > shared:
            depth, start, splits = stack.pop()
            parting = _parting(depth, order[start:place], [split - start for split in splits], blocks)
            if num_leaving(parting) >= least:
                found.append(parting)
        if stack and stack[-1][0] == shared:
            stack[-1][2].append(place)
        elif shared >= 0:
            stack.append((shared, start, [place]))
    return sorted(found, key=lambda parting: parting.depth)


def in_prefix_order(blocks: Sequence[NDArray[np.int64]]) -> list[int]:
    """Positions of prompts in an order in which those with equal beginnings stand beside each other."""
    keys = [some.tobytes() for some in blocks]
    return sorted(range(len(blocks)), key=keys.__getitem__)


def num_shared(one: NDArray[np.int64], other: NDArray[np.int64]) -> int:
    """Leading blocks that two prompts have in common."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length


def _parting(depth: int, order: list[int], splits: list[int], blocks: Sequence[NDArray[np.int64]]) -> Parting:
    children = np.zeros(len(order), dtype=np.int64)
    children[splits] = 1
    goes_on = np.array([len(blocks[position]) > depth for position in order])
    return Parting(depth, np.array(order)[goes_on], np.cumsum(children)[goes_on])


def num_leaving(parting: Parting) -> int:
    """Prompts that leave the largest group that goes on together."""
    if not len(parting.children):
        return 0
    return len(parting.children) - int(np.bincount(parting.children).max())
