"""Prompt chunks on a GPU: which requests of a step they are, and their work list."""

from dataclasses import dataclass, replace

import numpy as np

from trunkattn.attention_config import AttentionConfig
from trunkattn.attention_planner import make_planner
from trunkattn.kernels.tile_table import PrefillTile, prefill_device
from trunkattn.plan_format import Capacity, PlanStats, PrefillLimits
from trunkattn.planner.build import Batch, Planned, Planner
from trunkattn.planner.check import check_plan
from trunkattn.planner.prefill import Division, divide, limits_broken, prefill_limits
from trunkattn.planner.schedule import work_time


@dataclass(frozen=True)
class PlannedChunks:
    """The half of a step that is prompt chunks."""

    planned: Planned
    division: Division

    def check(self) -> None:
        """Raises AssertionError if the work list breaks an invariant, or a query token is in both halves or none."""
        check_plan(self.planned)
        tokens = np.sort(np.concatenate([self.division.rest_tokens, self.division.chunk_tokens]))
        assert np.array_equal(tokens, np.arange(len(tokens))), "a query token is in both halves of the step, or in none"

    def added_to(self, rest: PlanStats) -> PlanStats:
        """Statistics of the whole step."""
        own = self.planned.stats()
        both = rest.num_work_items > 0
        return PlanStats(
            rest.kv_tokens_read + own.kv_tokens_read,
            rest.kv_tokens_per_query + own.kv_tokens_per_query,
            rest.num_packs + own.num_packs,
            rest.num_work_items + own.num_work_items,
            rest.tiles | own.tiles,
            f"{rest.policy}, prefill {own.policy}" if both else f"prefill {own.policy}",
            f"{rest.reason}; prefill: {own.reason}" if both else own.reason,
        )


class ChunkPlanner:
    """Plans the requests with more query tokens than a decode tile holds."""

    def __init__(
        self, config: AttentionConfig, tile: PrefillTile, processors: int, capacity: Capacity | None = None
    ) -> None:
        self.tile, self._config = tile, config
        device = prefill_device(processors, tile)
        self._planner = make_planner(config, device)
        alone = replace(config, policy="per_query")
        self._alone = make_planner(alone, device)
        self._spare = make_planner(alone, replace(device, num_slots=1))  # of one slot: nothing is cut
        spec = self._planner.spec
        self._above = tile.above_rows // spec.model.group_size
        self.limits: PrefillLimits | None = None
        if capacity and (capacity.max_query_len or capacity.max_query_tokens) > self._above:
            self.limits = prefill_limits(spec.rule, spec.model.queries_per_tile, self._above, capacity)

    def divide(self, batch: Batch) -> Division | None:
        """None: no request has so many query tokens."""
        return divide(batch, self._above, self._config.page_size)

    def plan(self, division: Division, free_slots: int | None, whole: bool = False) -> PlannedChunks:
        """free_slots: partial slots that a plan of fixed size has left; None: of any size. whole: `auto` does not cut
        chunks that share nothing."""
        planned = self._cheapest(division)
        if whole and self._config.policy == "auto" and planned.policy == "per_query" and planned.work.num_slots:
            reason = "whole items, as decodes fill what their last round leaves of the device"
            planned = replace(self._plan(self._spare, division), reason=reason)
        if self.limits and free_slots is not None:
            broken = limits_broken(planned.work, self.limits, free_slots)
            if broken and self._config.policy != "auto":
                raise ValueError(no_room(self._config.policy, broken))
            if broken:
                planned = self._plan(self._spare, division)
                reason = f"the cheapest makes {', '.join(broken)} that a plan of this capacity holds"
                planned = replace(planned, reason=reason)
        return PlannedChunks(planned, division)

    def _cheapest(self, division: Division) -> Planned:
        """As the policy has it; `auto` shares nothing where the device would end sooner so, for sharing may leave it
        with too few items."""
        planned = self._plan(self._planner, division)
        if self._config.policy != "auto" or planned.policy == "per_query":
            return planned
        alone, rule = self._plan(self._alone, division), planned.spec.rule
        times = [int(work_time(rule, it.work.items, it.work.num_slots)) for it in (planned, alone)]
        if times[1] >= times[0]:
            return planned
        share = 100 * times[1] // times[0]
        return replace(alone, reason=f"{share} % of the predicted time of {planned.policy}: too few items to share")

    def _plan(self, planner: Planner, division: Division) -> Planned:
        planner.forget()  # the rows may be other requests than in the step before
        return planner.plan(division.chunks)


def no_room(policy: str, broken: list[str]) -> str:
    """Message for a batch that a policy cuts into more pieces than a plan of fixed size holds."""
    return (
        f"policy={policy!r} makes {', '.join(broken)} that a plan of this capacity holds: expected a batch that is cut "
        "into fewer pieces, policy='auto', or a larger capacity"
    )
