"""Batches of prompts that engines decode: what requests share, by levels, and the batches that are measured."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Workload:
    """A tree. levels: (number of groups, tokens), from the root; a request is in one group of each, in turn."""

    requests: int
    levels: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        parts = [f"{groups} groups x {tokens}" if 1 < groups < self.requests else f"{tokens}"
                 for groups, tokens in self.levels]  # fmt: skip
        return f"{self.requests} x ({' + '.join(parts)})"

    def prompts(self, vocabulary: int) -> list[list[int]]:
        """Random tokens, the same at every call; prompts of two workloads share nothing."""
        rng = random.Random(str(self))
        texts = [[rng.choices(range(vocabulary), k=tokens) for _ in range(groups)] for groups, tokens in self.levels]
        return [[token for level in texts for token in level[i % len(level)]] for i in range(self.requests)]


WORKLOADS = (
    Workload(64, ((1, 8192), (64, 512))),
    Workload(64, ((1, 1024), (8, 3072), (64, 256))),
    Workload(256, ((1, 1024), (256, 128))),
    Workload(64, ((1, 2048), (64, 256))),
    Workload(8, ((1, 4096), (8, 128))),
    Workload(32, ((32, 2048),)),
    Workload(64, ((4, 12000), (64, 64))),
    Workload(128, ((8, 512), (128, 128))),
    Workload(128, ((1, 640), (128, 64))),
    Workload(128, ((128, 704),)),
    Workload(8, ((8, 8192),)),
    Workload(1, ((1, 2048),)),
)
COLD_WORKLOADS = (WORKLOADS[5],)
SIX = tuple(WORKLOADS[place] for place in (0, 1, 5, 6, 7, 9))
CHOICES = MappingProxyType({"six": SIX, "all": WORKLOADS})
SHARED_WORKLOADS = (Workload(64, ((1, 65536), (64, 128))),)
QUICK_WORKLOADS = (Workload(8, ((1, 256), (8, 32))), Workload(4, ((4, 64),)))


def workloads_named(names: Sequence[str]) -> tuple[Workload, ...]:
    """One of CHOICES, or batches by name.

    Raises:
        ValueError: there is no such batch.
    """
    if len(names) == 1 and names[0] in CHOICES:
        return CHOICES[names[0]]
    known = {str(workload): workload for workload in WORKLOADS}
    for name in names:
        if name not in known:
            raise ValueError(f"{name!r}: expected six or all alone, or some of {', '.join(map(repr, known))}")
    return tuple(known[name] for name in dict.fromkeys(names))
