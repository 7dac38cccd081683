"""Prefix trees of training by their names, such as "2048 + 16x1024" or "3072 / 4x1024 / 16x896"."""

import re

import numpy as np

from trunkattn import PrefixTree

TREES = (
    "2048 + 16x1024", "8192 + 8x1024", "1024 + 8x4096", "3072 / 4x1024 / 16x896", "4096 + 64x256",
    "3000 + 24x128-2048", "4096 / 2x1024 / 4x1024 / 8x512 / 16x512", "2048 + 128x128", "700 + 64x300",
    "1000 + 32x300-900", "300 + 16x500-2000",
)  # fmt: skip


def parse_training_tree(text: str) -> PrefixTree:
    """A tree by its levels from the root, each COUNTxTOKENS or, of one segment, TOKENS.

    The segments of a level are dealt out evenly among those above. LOW-HIGH instead of TOKENS: each segment draws its
    own length, the same ones each time.

    Raises:
        ValueError: it is no such tree.
    """
    levels = [re.fullmatch(r"(?:([1-9]\d*)x)?([1-9]\d*)(?:-([1-9]\d*))?", part) for part in re.split(r" [+/] ", text)]
    counts = [int(level[1] or 1) if level else 0 for level in levels]
    if any(not below or below % above for above, below in zip([1, *counts], counts, strict=False)):
        expected = "levels such as '3072 / 4x1024 / 16x896', each with a multiple of the segments above"
        raise ValueError(f"tree {text!r}: expected {expected}")
    rng = np.random.default_rng(0)
    tokens = [
        rng.integers(int(level[2]), int(level[3] or level[2]) + 1, count).tolist()
        for level, count in zip(levels, counts, strict=True)
        if level
    ]
    parents: list[int] = []
    lengths: list[int] = []

    def add(level: int, number: int, parent: int) -> None:
        """Appends a segment of a level and all below it."""
        own = len(parents)
        parents.append(parent)
        lengths.append(tokens[level][number])
        if level + 1 < len(counts):
            fan_out = counts[level + 1] // counts[level]
            for child in range(number * fan_out, (number + 1) * fan_out):
                add(level + 1, child, own)

    for root in range(counts[0]):
        add(0, root, -1)
    return PrefixTree.from_segments(parents, lengths)
