"""The highest hit rate that any cache can reach: each prompt finds its longest prefix among all earlier prompts."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trunkattn.analysis.records import Ceiling, LoggedRequest
from trunkattn.analysis.requests import Blocks, Requests
from trunkattn.analysis.spoilers.partings import in_prefix_order, num_shared


def ceiling_of(requests: Sequence[LoggedRequest]) -> Ceiling:
    """The share of the prompt tokens that an unbounded cache finds: for all requests, and for the later half of them.

    Blocks of the log are found or missed as a whole. The last block of a prompt counts with the tokens in it.
    """
    taken = Requests.of(requests)
    lengths, sizes = taken.rows["num_prompt_tokens"], taken.rows["block_size"]
    found = np.minimum(_known_blocks(taken.blocks) * sizes, lengths)
    half = len(requests) // 2
    return Ceiling(_share(found, lengths), _share(found[half:], lengths[half:]))


def _share(found: NDArray[np.int64], lengths: NDArray[np.int64]) -> float:
    return int(found.sum()) / max(1, int(lengths.sum()))


def _known_blocks(blocks: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Number of leading blocks that each prompt shares with some earlier prompt.

    In prefix order, the prompts that share most with a prompt are its neighbours. Prompts are removed from that order
    from the last one of the log to the first, so the neighbours of the removed prompt are all earlier in the log.
    """
    order, count = in_prefix_order(blocks), len(blocks)
    in_order = Blocks.joined(blocks)[order]
    shared = [num_shared(in_order[place], in_order[place + 1]) for place in range(count - 1)]
    behind = [0, *shared, 0]  # [place + 1]: blocks that the prompt shares with its successor in the order
    before, after = list(range(-1, count + 1)), list(range(1, count + 3))
    places = np.empty(count, np.int64)
    places[order] = np.arange(1, count + 1)
    known = np.zeros(count, np.int64)
    for number in range(count - 1, -1, -1):
        place = int(places[number])
        first, last = before[place], after[place]
        known[number] = max(behind[first], behind[place])
        behind[first] = min(behind[first], behind[place])
        after[first], before[last] = last, first
    return known
