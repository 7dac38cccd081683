"""The segments of a prefix tree: checks, and the numbers of each from which the tables of kernels are made."""

from collections.abc import Sequence
from itertools import chain
from struct import Struct
from typing import Any

from trunkattn.training.sequences import TreeWork, table_length
from trunkattn.training.token_trie import Segments
from trunkattn.validate import check_int


def table_numbers(segments: Segments) -> bytearray:
    """What `TreeTables.of_segments` takes. It is made from lists, as calls of NumPy take longer for a hundred segments.

    Raises:
        ValueError: the segments have a cycle, or are not in depth-first pre-order.
    """
    parents, lengths, bounds = segments.parents, segments.lengths, segments.bounds
    count, num_tokens = len(parents), bounds[-1]
    ends = [num_tokens] * count
    levels, offsets = [0] * count + [-1], [0] * (count + 1)  # the last entries stand for the parent of a root, -1
    above = -1
    for segment, (parent, start) in enumerate(zip(parents, bounds, strict=False)):
        while above > parent:  # subtrees of the path to the segment before end here, up to this one's parent
            ends[above] = start
            above = parents[above]
        if above != parent:
            _check_cycles(parents)
            raise ValueError(
                f"parents[{segment}]={parent}: expected -1 or a segment on the path to the one before, as segments are "
                "in depth-first pre-order"
            )
        levels[segment] = levels[parent] + 1
        offsets[segment] = offsets[parent] + bounds[parent + 1] - start
        above = segment
    rows = chain.from_iterable(zip(bounds, bounds[1:], parents, levels, strict=False))
    aligned = [*lengths[:-1], lengths[-1] + table_length(num_tokens) - num_tokens]
    # not by struct.pack, which torch.compile traces without end for a second tree
    return bytearray(Struct(f"{7 * count}i").pack(*rows, *ends, *offsets[:-1], *aligned))


def path_lengths(parents: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """The tokens from a root to the end of each segment, as plain numbers: torch.compile traces this, and a tensor has
    no value within FakeTensorMode."""
    found: list[int] = []
    for parent, length in zip(parents, lengths, strict=True):
        found.append(length if parent < 0 else found[parent] + length)
    return found


def count_work(parents: Sequence[int], lengths: Sequence[int]) -> TreeWork:
    """The `TreeWork` of segments in depth-first pre-order."""
    pairs = tokens = largest = 0
    for parent, length, end in zip(parents, lengths, path_lengths(parents, lengths), strict=True):
        pairs += length * (end - length) + length * (length + 1) // 2
        tokens = tokens + length if parent >= 0 else length
        largest = max(largest, tokens)
    return TreeWork(pairs, largest)


def check_segments(parents: list[Any], lengths: list[Any]) -> None:
    """Raises unless there are segments, each with tokens and a parent that exists. Integers of NumPy become Python's
    own in place."""
    if not parents:
        raise ValueError("parents is empty: expected at least one segment")
    if len(lengths) != len(parents):
        raise ValueError(f"lengths has {len(lengths)} entries: expected {len(parents)}, one for each of parents")
    last = len(parents) - 1
    if {*map(type, lengths + parents)} != {int} or min(lengths) < 1 or min(parents) < -1 or max(parents) > last:
        for segment, length in enumerate(lengths):
            lengths[segment] = check_int(f"lengths[{segment}]", length, 1)
        for segment, parent in enumerate(parents):
            parents[segment] = check_int(f"parents[{segment}]", parent, -1, last)


def _check_cycles(parents: list[int]) -> None:
    """Raises ValueError if a path towards a root never ends."""
    seen_from = [-1] * len(parents)  # the segment from which a walk to the root came by
    for first in range(len(parents)):
        segment = first
        while segment >= 0 and seen_from[segment] < 0:
            seen_from[segment] = first
            segment = parents[segment]
        if segment >= 0 and seen_from[segment] == first:
            loop = [segment, parents[segment]]
            while loop[-1] != segment:
                loop.append(parents[loop[-1]])
            shown = " -> ".join(map(str, loop if len(loop) <= 8 else [*loop[:6], "…", loop[-1]]))
            raise ValueError(f"parents has a cycle, {shown}: expected that every path ends at a root, -1")
