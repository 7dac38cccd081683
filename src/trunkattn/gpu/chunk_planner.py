"""Prompt chunks on a GPU: selects the requests of a step that are chunks, and plans their work list."""

from dataclasses import dataclass, replace

import numpy as np

from trunkattn.config import AttentionConfig, Capacity
from trunkattn.gpu.tiles import PrefillTile, prefill_device
from trunkattn.planner.check import check_plan
from trunkattn.planner.from_config import make_planner
from trunkattn.planner.planner import Planned, StepTables
from trunkattn.planner.prompt_chunks import Division, chunk_limits, divide, limits_broken, whole_chunks
from trunkattn.planner.split_schedule import work_time
from trunkattn.planner.work_list import ChunkLimits, PlanStats


@dataclass(frozen=True)
class PlannedChunks:
    """The half of a step that is prompt chunks."""

    planned: Planned
    division: Division

    @property
    def num_requests(self) -> int:
        """Number of requests that are prompt chunks."""
        return len(self.planned.batch.seq_lens)

    def stats(self) -> PlanStats:
        """Statistics of the chunks."""
        return self.planned.stats()

    def check(self) -> None:
        """Raises AssertionError if the work list breaks an invariant, or a query token is in both halves or none."""
        check_plan(self.planned)
        tokens = np.sort(np.concatenate([self.division.rest_tokens, self.division.chunk_tokens]))
        assert np.array_equal(tokens, np.arange(len(tokens))), "a query token is in both halves of the step, or in none"


class ChunkPlanner:
    """Plans the requests with more query tokens than a decode tile holds."""

    def __init__(
        self, config: AttentionConfig, tile: PrefillTile, num_sms: int, capacity: Capacity | None = None
    ) -> None:
        self.tile, self._config = tile, config
        device = prefill_device(num_sms, tile)
        self._planner = make_planner(config, device)
        self._uncut = make_planner(config, replace(device, num_workers=1)).spec  # with a single worker nothing is cut
        spec = self._planner.spec
        self._above = tile.above_rows // spec.model.group_size
        self.limits: ChunkLimits | None = None
        if capacity:
            self.limits = chunk_limits(spec.rule, spec.model.queries_per_tile, self._above, capacity)

    def divide(self, batch: StepTables) -> Division | None:
        """Divides a batch into prompt chunks and the rest; None if no request has enough query tokens to be a chunk."""
        return divide(batch, self._above, self._config.page_size)

    def plan(self, division: Division, free_slots: int | None, keeps_whole: bool = False) -> PlannedChunks:
        """The work list of the chunks.

        Args:
            division: the division whose chunks are planned.
            free_slots: partial slots that the tiles leave in a plan of fixed size; None: the plan has any size.
            keeps_whole: with policy `auto`, chunks that share nothing are not cut.
        """
        chunks, auto = division.chunks, self._config.policy == "auto"
        keeps_whole = keeps_whole and auto
        if keeps_whole and bool(self._planner.forest(chunks)[0].is_leaf.all()):
            planned = self._keep_whole(chunks)
        else:
            planned = self._cheapest(chunks)
            if keeps_whole and planned.policy == "per_query" and planned.work.num_slots:
                planned = self._keep_whole(chunks)
        if self.limits and free_slots is not None:
            broken = limits_broken(planned.work, self.limits, free_slots)
            if broken and not auto:
                raise ValueError(no_room(self._config.policy, broken))
            if broken:
                reason = f"the cheapest makes {', '.join(broken)} that a plan of this capacity holds"
                planned = self._planner.plan_unshared(chunks, self._uncut, reason)
        return PlannedChunks(planned, division)

    def list_whole(self, chunks: StepTables) -> Planned:
        """The work list of chunks that share nothing and are not cut."""
        work = whole_chunks(chunks, self._uncut.model.queries_per_tile, self._uncut.rule)
        reason = "whole items, listed by the host, which does not know the pages"
        return Planned(
            work=work,
            batch=chunks,
            num_packs=len(chunks.seq_lens),
            policy="per_query",
            reason=reason,
            spec=self._uncut,
        )

    def _keep_whole(self, chunks: StepTables) -> Planned:
        reason = "whole items, as decodes fill what their last round leaves of the device"
        return self._planner.plan_unshared(chunks, self._uncut, reason)

    def _cheapest(self, chunks: StepTables) -> Planned:
        """The plan of the configured policy. `auto` does not share if the device would end sooner without, because
        sharing can leave too few items to fill it."""
        planned = self._planner.plan(chunks)
        if self._config.policy != "auto" or planned.policy == "per_query":
            return planned
        unshared, rule = self._planner.plan_unshared(chunks, self._planner.spec, ""), planned.spec.rule
        times = [int(work_time(rule, it.work.items, it.work.num_slots)) for it in (planned, unshared)]
        if times[1] >= times[0]:
            return planned
        share = 100 * times[1] // times[0]
        return replace(unshared, reason=f"{share} % of the predicted time of {planned.policy}: too few items to share")


def no_room(policy: str, broken: list[str]) -> str:
    """The message for a batch that a policy cuts into more items than a plan of fixed size holds."""
    return (
        f"policy={policy!r} makes {', '.join(broken)} that a plan of this capacity holds: expected a batch that is cut "
        "into fewer pieces, policy='auto', or a larger capacity"
    )
