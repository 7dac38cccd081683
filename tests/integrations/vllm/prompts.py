"""Prompts that share, and how answers to them are compared."""

import random
from collections.abc import Sequence

from .models import VOCABULARY

NUM_PROMPTS = 20


def prompts() -> list[list[int]]:
    """A trunk of 300 tokens, three branches, leaves of all lengths; two equal up to the last tokens; some alone."""
    rng = random.Random(0)

    def text(length: int) -> list[int]:
        return [rng.randrange(3, VOCABULARY) for _ in range(length)]

    trunk, branches = text(300), [text(60) for _ in range(3)]
    shared = [trunk + branches[i % 3] + text(5 + 7 * i) for i in range(10)]
    phrase = text(12)
    return [*shared, trunk + text(3), trunk + text(3), phrase * 6, trunk[:40] + phrase * 5] + [
        text(20 + 30 * i) for i in range(NUM_PROMPTS - 14)
    ]


def equal(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> int:
    """How many sequences have the same tokens."""
    return sum(list(a) == list(b) for a, b in zip(ours, theirs, strict=True))
