"""Places at which many prompts that share a beginning part: inner nodes of the prefix tree of all prompts."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trunkattn.analysis.requests import Blocks


class Parting(NamedTuple):
    """Prompts that share their first blocks but not the next one.

    Attributes:
        depth: blocks that all share.
        members: int64, positions of the prompts that have a next block, grouped by that block.
        children: int64, the group of each member: equal numbers mean equal next blocks.
    """

    depth: int
    members: NDArray[np.int64]
    children: NDArray[np.int64]


def partings(blocks: Sequence[NDArray[np.int64]], least: int) -> list[Parting]:
    """The places at which at least `least` prompts part from the largest group, by ascending depth.

    In sorted order, prompts with equal beginnings are neighbours. So each node of the prefix tree is an interval in
    which neighbours share at least a certain number of blocks. One pass with a stack finds all such intervals.

    Args:
        blocks: chained block numbers of each prompt.
        least: the number of prompts.
    """
    order = in_prefix_order(blocks)
    in_order = Blocks.joined(blocks)[order]
    lengths = in_order.ends - in_order.starts
    found = []
    stack: list[tuple[int, int, list[int]]] = []  # shared blocks, first prompt, and where a new child begins
    for place in range(1, len(order) + 1):
        shared = num_shared(in_order[place - 1], in_order[place]) if place < len(order) else -1
        start = place - 1
        while stack and stack[-1][0] > shared:
            depth, start, splits = stack.pop()
            if place - start < least:
                continue
            children = np.zeros(place - start, np.int64)
            children[np.array(splits) - start] = 1
            goes_on = lengths[start:place] > depth
            parting = Parting(depth, order[start:place][goes_on], np.cumsum(children)[goes_on])
            if num_leaving(parting) >= least:
                found.append(parting)
        if stack and stack[-1][0] == shared:
            stack[-1][2].append(place)
        elif shared >= 0:
            stack.append((shared, start, [place]))
    return sorted(found, key=lambda parting: parting.depth)


def in_prefix_order(blocks: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Positions of the prompts in an order in which prompts with equal beginnings are neighbours."""
    keys = [some.tobytes() for some in blocks]
    return np.array(sorted(range(len(blocks)), key=keys.__getitem__), np.int64)


def num_shared(one: NDArray[np.int64], other: NDArray[np.int64]) -> int:
    """Number of leading blocks that two prompts have in common."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length


def num_leaving(parting: Parting) -> int:
    """Number of members outside the largest group."""
    if not len(parting.children):
        return 0
    return len(parting.children) - int(np.bincount(parting.children).max())
