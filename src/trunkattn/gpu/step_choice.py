"""How a step is computed: the one place that decides on its tiling, its overlap and the cutting of its chunks."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trunkattn.gpu.overlap import Overlap, overlap_candidates
from trunkattn.planner.planner import StepTables
from trunkattn.planner.tiles.candidates import Tiling, TilingRule
from trunkattn.planner.tiles.step import TiledStep


@dataclass(frozen=True)
class PackingChoice:
    """The choice for a step that a packing policy planned, for `stats`."""

    policy: str
    reason: str
    num_overlapped: int = 0
    keeps_chunks_whole: bool = False


BATCH_INVARIANT: Final = PackingChoice("batch invariant", "each request is cut alike in any batch")


@dataclass(frozen=True)
class StepChoice:
    """The tiling of a step, and why it was chosen. The text is made when `stats` asks, because it takes as long as the
    choice itself.

    Attributes:
        rule: the rule whose candidates were compared.
        card: the card's description.
        times_ns: [candidates] predicted times without chunks.
        num_fit: candidates that fit the capacity.
        tiling: what was chosen.
        num_overlapped: number of leading items of the tile list that are co-scheduled with the prompt chunks.
        keeps_chunks_whole: prompt chunks that share nothing are not cut, because decodes fill the SMs that they leave.
        serial_ns, overlapped_ns: predicted times of the step if decodes come after the chunks, and if they overlap
            them; None: there is nothing to overlap.
    """

    rule: TilingRule
    card: str
    times_ns: NDArray[np.int64]
    num_fit: int
    tiling: Tiling
    num_overlapped: int = 0
    keeps_chunks_whole: bool = False
    serial_ns: int | None = None
    overlapped_ns: int | None = None

    @property
    def policy(self) -> str:
        """The name of the chosen tiling."""
        return self.tiling.name(self.rule) + (" overlapped with chunks" if self.num_overlapped else "")

    @property
    def reason(self) -> str:
        """The predicted times that were compared, in words."""
        tilings, number = self.rule.priced.tilings, len(self.times_ns)
        passed = "" if self.num_fit == number else f" of the {self.num_fit} of {number} that fit the capacity"
        times = zip(tilings, self.times_ns.tolist(), strict=True)
        listed = ", ".join(f"{tiling.name(self.rule)} {time / 1e3:.3g} µs" for tiling, time in times)
        text = f"least predicted time{passed} on {self.card}: {listed}"
        if self.serial_ns is None or self.overlapped_ns is None:
            return text
        serial, overlapped = self.serial_ns / 1e3, self.overlapped_ns / 1e3
        return f"{text}; with chunks {serial:.3g} µs one after the other, {overlapped:.3g} µs overlapped"


def choose_step(step: TiledStep, card: str, overlap: Overlap | None, chunks: StepTables | None) -> StepChoice:
    """The candidate with the least predicted time among those that surely fit. Low tiles that are not cut always fit.

    Args:
        step: the requests that are rows of tiles.
        card: its description, for the reason.
        overlap: the predictor for the kernel that computes chunks and decodes at once; None: there is no such kernel.
        chunks: the prompt chunks of the step; None: there are none.
    """
    rule, tilings, times_ns = step.rule, step.rule.priced.tilings, step.predict()
    times = times_ns.tolist()
    numbers = [number for number, fits in enumerate(step.fits().tolist()) if fits]
    fastest = min(numbers, key=times.__getitem__)
    if overlap is None or chunks is None or step.num_queries == 0:
        return StepChoice(rule, card, times_ns, len(numbers), tilings[fastest])
    work = overlap.work_of(chunks)
    chunk_times = overlap.chunk_times(work)
    candidates = overlap_candidates(tilings, numbers, times, rule.group_size)
    low, overlapped = step.overlap(candidates, chunk_times, overlap.costs, overlap.leftover)
    serial_ns = chunk_times.without_decodes_ns + times[fastest]
    is_worth = overlap.is_worth(overlapped.total_ns, serial_ns)
    return StepChoice(
        rule=rule,
        card=card,
        times_ns=times_ns,
        num_fit=len(numbers),
        tiling=tilings[low if is_worth else fastest],
        num_overlapped=overlapped.items if is_worth else 0,
        keeps_chunks_whole=overlap.fills(work, times[fastest]),
        serial_ns=serial_ns,
        overlapped_ns=overlapped.total_ns,
    )
