"""Finds blocks that spoil sharing, in logs without text whose hashes depend on a block's contents only.

Most logs chain their hashes: each covers everything up to the end of its block. Such hashes cannot show that prompts
are equal again after they part.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trunkattn.analysis.reading.tokens import chained
from trunkattn.analysis.records import Log, Spoiler
from trunkattn.analysis.requests import Requests
from trunkattn.analysis.spoilers.partings import Parting, partings

MAX_VARYING: Final = 256  # the longest varying part, in tokens; two blocks if those are longer
MIN_SHARED: Final = 64  # the shortest equal part after it, in tokens


@dataclass(frozen=True)
class BlockFinding:
    """A spoiler, and what is needed to replay the log without it.

    Attributes:
        spoiler: the report's entry.
        members: positions in the log of the requests that have it, int64.
        depth: blocks before the varying ones.
        varying: blocks that vary.
        shared: blocks after these that are equal in all members.
    """

    spoiler: Spoiler
    members: NDArray[np.int64] = field(repr=False)
    depth: int
    varying: int
    shared: int


def find_in_blocks(log: Log, least: int) -> list[BlockFinding]:
    """The places where prompts part although their blocks are equal again soon after, at the same distance.

    Args:
        log: a log with `contents`.
        least: the fewest requests outside the largest group at a place that is reported.
    """
    assert log.contents is not None
    found = []
    claimed = np.zeros(len(log.requests), dtype=np.int64)
    for parting in partings(Requests.of(log.requests).blocks, least):
        free = claimed[parting.members] <= parting.depth
        one = _at(log, log.contents, Parting(parting.depth, parting.members[free], parting.children[free]), least)
        if one is not None:
            claimed[one.members] = one.depth + one.varying
            found.append(one)
    return found


def _at(log: Log, contents: Sequence[NDArray[np.int64]], parting: Parting, least: int) -> BlockFinding | None:
    """The finding at one place with the fewest varying blocks. None if the blocks are not equal again."""
    if not len(parting.members):
        return None
    block_size = log.requests[parting.members[0]].block_size
    for varying in range(1, max(2, MAX_VARYING // block_size) + 1):
        place = parting.depth + varying
        goes_on = np.array([len(contents[member]) > place for member in parting.members.tolist()])
        members, children = parting.members[goes_on], parting.children[goes_on]
        if not len(members):
            return None
        ids = np.array([contents[member][place] for member in members.tolist()])
        values, counts = np.unique(ids, return_counts=True)
        is_equal = ids == values[counts.argmax()]
        members, children = members[is_equal], children[is_equal]
        shared = _num_equal([contents[member][place:] for member in members.tolist()])
        enough = len(members) - int(np.bincount(children).max()) >= least
        if enough and shared >= max(varying, -(-MIN_SHARED // block_size)):
            lines = [log.requests[member].line for member in members[:3].tolist()]
            spoiler = _spoiler(log, members, (parting.depth, varying, shared), lines)
            return BlockFinding(spoiler, members, parting.depth, varying, shared)
    return None


def _num_equal(blocks: list[NDArray[np.int64]]) -> int:
    """Number of leading blocks that all arrays have in common."""
    length = min(map(len, blocks))
    differs = np.zeros(length, dtype=bool)
    for some in blocks[1:]:
        differs |= some[:length] != blocks[0][:length]
    return int(differs.argmax()) if differs.any() else length


def _spoiler(log: Log, members: NDArray[np.int64], place: tuple[int, int, int], lines: list[int]) -> Spoiler:
    depth, varying, shared = place
    block_size = log.requests[members[0]].block_size
    mean = float(np.mean([log.requests[member].num_prompt_tokens for member in members.tolist()]))
    return Spoiler(
        kind="block",
        where=f"prompt, token {depth * block_size:,} of {round(mean):,}",
        num_requests=len(members),
        token=depth * block_size,
        shared_after=shared * block_size,
        varying_tokens=float(varying * block_size),
        examples=[],
        lines=lines,
        advice=f"Look for what varies in the {varying * block_size:,} tokens there, and move it after the "
        f"{shared * block_size:,} tokens that follow them, which are equal; the log has no text that names it.",
    )


def without_blocks(log: Log, finding: BlockFinding, members: Sequence[int]) -> Log:
    """The log as if, in these members of a finding, the shared blocks came before the varying ones."""
    assert log.contents is not None
    requests, contents = list(log.requests), list(log.contents)
    first, second = finding.depth, finding.depth + finding.varying
    for member in members:
        old, length = contents[member], len(requests[member].blocks)
        end = min(second + finding.shared, requests[member].num_prompt_tokens // requests[member].block_size)
        new = np.concatenate([old[:first], old[second:end], old[first:second], old[end:]])
        contents[member] = new
        # The log may leave out the last, incomplete block. Its contents are unknown then, so its number stays.
        blocks = np.concatenate([chained(new), requests[member].blocks[len(new) : length]])
        requests[member] = replace(requests[member], blocks=blocks)
    return replace(log, requests=requests, contents=contents)
