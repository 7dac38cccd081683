"""A replay over time: sums of steps in a bounded number of intervals, and prefix trees at a few moments."""

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from trunkattn.analysis.pricing.prices import DecodeBatch
from trunkattn.analysis.records import Moment, Snapshot, TrieNode

MAX_MOMENTS: Final = 200
MAX_SNAPSHOTS: Final = 12
_FIRST_SECONDS: Final = 1 / 64  # length of an interval at first; it doubles whenever there are too many intervals


@dataclass
class Sums:
    """Sums over steps. Times in µs, KV in bytes, prompt tokens as they are."""

    num_steps: float = 0.0
    decode_steps: float = 0.0
    decoding: float = 0.0
    waiting: float = 0.0
    kv_bytes: float = 0.0
    unique_kv_bytes: float = 0.0
    attention_us: float = 0.0
    shared_attention_us: float = 0.0
    step_us: float = 0.0
    shared_step_us: float = 0.0
    prompt_tokens: float = 0.0
    cached_tokens: float = 0.0

    def add(self, other: "Sums") -> None:
        """Adds the sums of other steps."""
        mine = vars(self)
        for name, value in vars(other).items():
            mine[name] += value


@dataclass
class Timeline:
    """Intervals of equal length from the beginning; their length doubles when they become too many."""

    seconds: float = _FIRST_SECONDS
    sums: dict[int, Sums] = field(default_factory=dict)

    def add(self, time: float, sums: Sums) -> None:
        """Adds steps that begin at a time."""
        while time >= self.seconds * MAX_MOMENTS:
            self.seconds *= 2
            merged: dict[int, Sums] = {}
            for place, each in self.sums.items():
                merged.setdefault(place // 2, Sums()).add(each)
            self.sums = merged
        self.sums.setdefault(int(time / self.seconds), Sums()).add(sums)

    def moments(self) -> list[Moment]:
        """The intervals in which there were steps."""
        return [self._moment(place, self.sums[place]) for place in sorted(self.sums)]

    def _moment(self, place: int, sums: Sums) -> Moment:
        steps, decodes = max(1.0, sums.num_steps), max(1.0, sums.decode_steps)
        return Moment(
            start=place * self.seconds,
            seconds=self.seconds,
            num_steps=int(sums.num_steps),
            decoding=sums.decoding / steps,
            waiting=sums.waiting / steps,
            kv_bytes=sums.kv_bytes / decodes,
            unique_kv_bytes=sums.unique_kv_bytes / decodes,
            attention_us=sums.attention_us / steps,
            shared_attention_us=sums.shared_attention_us / steps,
            step_us=sums.step_us / steps,
            shared_step_us=sums.shared_step_us / steps,
            prompt_tokens=int(sums.prompt_tokens),
            cached_tokens=int(sums.cached_tokens),
        )


@dataclass
class Album:
    """Prefix trees at moments that are spread about evenly over the time so far."""

    seconds: float = _FIRST_SECONDS
    snapshots: list[Snapshot] = field(default_factory=list)

    def wants(self, time: float) -> bool:
        """Whether a tree of this time is to be kept."""
        return not self.snapshots or time >= self.snapshots[-1].time + self.seconds

    def add(self, time: float, batch: DecodeBatch, keys: list[tuple[int, int]]) -> None:
        """Keeps the tree of a decode batch. keys: line and part of the log of each of its rows."""
        self.snapshots.append(Snapshot(time, tree_of(batch, keys)))
        if len(self.snapshots) > MAX_SNAPSHOTS:
            self.snapshots = self.snapshots[::2]
            self.seconds = 2 * max(self.seconds, time / MAX_SNAPSHOTS / 2)


def tree_of(batch: DecodeBatch, keys: list[tuple[int, int]]) -> list[TrieNode]:
    """The nodes of a prefix forest that have tokens."""
    forest, nodes = batch.forest, list[TrieNode]()
    places = np.full(len(forest.parent) + 1, -1)  # the last one stands for no parent
    for node, parent in enumerate(forest.parent.tolist()):
        start, end = int(forest.token_start[node]), int(forest.token_end[node])
        if end <= start:
            continue
        places[node] = len(nodes)
        first, last = int(forest.row_start[node]), int(forest.row_end[node])
        line, part = keys[int(forest.order[first])]
        nodes.append(
            TrieNode(
                parent=int(places[parent]),
                start=start,
                tokens=end - start,
                sequences=last - first,
                line=line,
                part=part,
            )
        )
    return nodes
