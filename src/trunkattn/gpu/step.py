"""A planned step on a GPU: its rows of tiles, its prompt chunks, and the statistics of both."""

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch

from trunkattn.backend import Counters, Part
from trunkattn.gpu.arrays import GpuPlan
from trunkattn.gpu.kernel import Kernels
from trunkattn.gpu.step_choice import BATCH_INVARIANT, PackingChoice, StepChoice
from trunkattn.planner.check import check_tiles
from trunkattn.planner.planner import StepTables, tokens_per_query
from trunkattn.planner.tiles.candidates import TilingRule
from trunkattn.planner.work_list import PlanStats, TileList


class StepTiles(Protocol):
    """The requests of a step that are rows of tiles, planned on the host or on the device."""

    def tile_list(self) -> TileList:
        """The work list of these requests. Waits for the device if the list was made there."""

    def batch(self) -> StepTables:
        """The tables from which the list was made. Waits for the device if the list was made there."""

    def described(self) -> tuple[str, str]:
        """What was chosen, and why."""

    @property
    def in_spans(self) -> bool:
        """Whether items are cut at spans of sequences that no batch changes."""

    @property
    def kv_tokens(self) -> torch.Tensor | None:
        """int64 [2] on the device: KV tokens read, and KV tokens without sharing. None: planned on the host."""


class StepChunks(Protocol):
    """The requests of a step that are prompt chunks, planned with or without their pages."""

    @property
    def num_requests(self) -> int:
        """Number of requests that are prompt chunks."""

    def stats(self) -> PlanStats:
        """Statistics of the chunks, without a wait."""

    def check(self) -> None:
        """Raises AssertionError if their work list breaks an invariant."""


class HostTiles(NamedTuple):
    """Rows of tiles that the host planned. tables: the batch, with the copy of the block table that the forest
    describes."""

    tables: StepTables
    tiles: TileList
    choice: StepChoice | PackingChoice

    def tile_list(self) -> TileList:
        """The work list of these requests."""
        return self.tiles

    def batch(self) -> StepTables:
        """The tables that the list was made from."""
        return self.tables

    def described(self) -> tuple[str, str]:
        """What was chosen, and why."""
        return self.choice.policy, self.choice.reason

    @property
    def in_spans(self) -> bool:
        """Whether items are cut at spans of sequences that no batch changes."""
        return self.choice is BATCH_INVARIANT

    @property
    def kv_tokens(self) -> None:
        """Always None: the host counts."""


@dataclass(frozen=True)
class GpuStep:
    """A planned step.

    Attributes:
        tiles: the requests that are rows of tiles.
        chunks: the requests that are prompt chunks; None if there are none.
        rule: the rule of the tiles.
        kernels: the kernels that compute the step.
        gpu_plan: its arrays and launches on the device.
        num_query_tokens: rows of q and out; a lower bound for a step planned on the device.
        num_decodes: requests that are rows of tiles.
    """

    tiles: StepTiles
    chunks: StepChunks | None
    rule: TilingRule
    kernels: Kernels
    gpu_plan: GpuPlan
    num_query_tokens: int
    num_decodes: int

    @property
    def num_chunks(self) -> int:
        """Requests that are prompt chunks for a kernel of their own."""
        return self.chunks.num_requests if self.chunks else 0

    def only(self, part: Part) -> "GpuStep | None":
        """Returns a step in the same arrays without the launches for the other part: itself if there are none, and None
        if the other part has work."""
        if part == "decodes":
            if self.chunks:
                return None
            return replace(self, gpu_plan=self.gpu_plan.without_chunks()) if self.gpu_plan.chunks else self
        is_all = self.tiles.kv_tokens is not None and self.chunks is not None and self.num_decodes == 0
        # chunks that the host plans may be cut, and then the launches of tiles merge their partials
        return replace(self, gpu_plan=self.gpu_plan.only_chunks) if is_all else None

    @property
    def counters(self) -> Counters:
        """What can be counted without a wait."""
        return Counters(self.tiles.kv_tokens, self._chunk_stats())

    def _chunk_stats(self) -> PlanStats | None:
        if self.chunks is None or self.kernels.prefill is None:
            return None
        return with_reasons(self.chunks.stats(), self.kernels.prefill.reasons)

    def stats(self) -> PlanStats:
        """Statistics of the whole step. Planned on the device, it waits for it."""
        stats = tile_stats(self.tiles.tile_list(), self.tiles.batch(), self.rule, self.tiles.described())
        stats = with_reasons(stats, self.kernels.decode.reasons)
        of_chunks = self._chunk_stats()
        stats = stats.with_chunks(of_chunks) if of_chunks else stats
        if unreadable := list(self.gpu_plan.unreadable):
            return replace(stats, reason=f"{stats.reason}; some layers in portable kernels: {', '.join(unreadable)}")
        return stats

    def check(self) -> None:
        """Raises AssertionError if the lists break an invariant."""
        check_tiles(self.tiles.tile_list(), self.tiles.batch(), self.rule, in_spans=self.tiles.in_spans)
        if self.chunks:
            self.chunks.check()


def with_reasons(stats: PlanStats, reasons: tuple[str, ...]) -> PlanStats:
    """Statistics that also say why a portable kernel computes the plan, if one does."""
    return replace(stats, reason=f"{stats.reason}; portable kernel: {', '.join(reasons)}") if reasons else stats


def tile_stats(tile_list: TileList, batch: StepTables, rule: TilingRule, described: tuple[str, str]) -> PlanStats:
    """Statistics of rows of tiles. A trunk counts once for each tile that reads it, although only the first read goes
    to memory and the others to the L2 cache. described: policy and reason."""
    heights, counts = len(rule.tiles), np.diff(tile_list.counts)
    tiles = {
        f"{tile.rows}x{tile.block_tokens}": int(counts[i] + counts[i + heights]) for i, tile in enumerate(rule.tiles)
    }
    tallest = rule.tiles[-1].entries(rule.group_size)
    unshared = int(tokens_per_query(batch.seq_lens, batch.query_start_loc, batch.window, tallest))
    policy, reason = described
    return PlanStats(
        kv_tokens_read=int(tile_list.segment_tokens.sum()),
        kv_tokens_per_query=unshared,
        num_packs=len(tile_list.items),
        num_work_items=len(tile_list.items),
        tiles=tiles,
        policy=policy,
        reason=reason,
    )
