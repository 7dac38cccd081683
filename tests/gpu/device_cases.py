"""A plan filled on the device beside the one that the host fills, for one rule and batch."""

from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch

from trunkattn.config import Capacity
from trunkattn.gpu.arrays import GpuPlan
from trunkattn.gpu.cards import Card
from trunkattn.gpu.device_planner.batch_invariant import InvariantPlanner
from trunkattn.gpu.device_planner.candidates import Candidates, candidates_of
from trunkattn.gpu.device_planner.planner import DevicePlanner, errors_of
from trunkattn.gpu.layer import Geometry
from trunkattn.gpu.tiles import GpuTile
from trunkattn.planner.planner import StepTables
from trunkattn.planner.prefix_forest import Forest
from trunkattn.planner.tiles import layout
from trunkattn.planner.tiles.candidates import TilingRule, candidates, stages_of
from trunkattn.planner.tiles.cost import shared_tokens, stage_tokens
from trunkattn.planner.work_list import TileLimits, TileList

from ..planner.specs import forest_of
from ..planner.tile_cases import arrays, make_rule, tile, tiled
from .guarded_loads import guarded_loads
from .kernel_cases import make_card, reserved

ROOMY = TileLimits(items=4096, segments=1 << 18, queries=1 << 14, merged=1 << 12, slots=1 << 14, query_tokens=1 << 12)
CANDIDATES = [tiling.name(make_rule(4, 16, 1)) for tiling in candidates(make_rule(4, 16, 1))]
GUARD, UNTOUCHED = 32, -77  # elements around every array, and what they hold


def some_candidates(rule: TilingRule, candidate: int | None = None) -> Candidates:
    """The candidates of a rule, or one of them."""
    found = candidates_of(rule)
    return found if candidate is None else replace(found, launches=found.launches[candidate : candidate + 1])


def capacity_for(batch: StepTables, num_pages: int = 1 << 20, spare: int = 3) -> Capacity:
    """Of a batch, with room for `spare` more of everything."""
    requests, pages = batch.block_table.shape
    tokens = int(batch.query_start_loc[-1])
    return Capacity(requests + spare, tokens + spare, pages + spare, num_pages)


def reserve(rule: TilingRule, limits: TileLimits, device: str, card: Card) -> GpuPlan:
    """An empty plan, every array of which stands between guards."""
    shapes = tuple(
        GpuTile(it.rows, it.block_tokens, 1, 1, 1, it.block_ns, it.chain_ns, it.subtiles, it.private_tokens)
        for it in rule.tiles
    )
    heads = rule.group_size * rule.num_kv_heads
    geometry = Geometry(heads, rule.num_kv_heads, 128, 128, rule.page_size, rule.segment_size, 0, True, None, False)
    plan = reserved(limits, geometry, shapes, card, device=device)
    sizes = {"guard": GUARD}
    for name, size in plan.sizes.items():
        sizes |= {name: size, f"guard after {name}": GUARD}
    flat = torch.full((sum(sizes.values()),), UNTOUCHED, dtype=torch.int32, device=device)
    return replace(plan, flat=flat, sizes=sizes)


@dataclass
class Planned:
    """A planner with guards around its buffers, and a plan that it fills."""

    rule: TilingRule
    planner: DevicePlanner
    plan: GpuPlan
    candidate: int | None
    buffers: dict[str, torch.Tensor]
    limits: TileLimits

    @property
    def errors(self) -> list[str]:
        return errors_of(int(self.planner.errors))

    def fill(self, batch: StepTables) -> None:
        device = self.plan.flat.device
        table, lens, starts = (torch.from_numpy(array).to(device) for array in arrays(batch))
        with guarded_loads() if device.type == "cpu" else nullcontext():
            self.planner.fill(self.plan, table, lens, starts, batch.window)

    def assert_guarded(self) -> None:
        """Nothing was written outside an array."""
        for name, array in self.plan.arrays.items():
            assert not name.startswith("guard") or bool((array == UNTOUCHED).all()), name
        for name, buffer in self.buffers.items():
            assert bool((buffer[:GUARD] == UNTOUCHED).all() and (buffer[-GUARD:] == UNTOUCHED).all()), name

    def chosen(self, batch: StepTables) -> int:
        """The candidate of least time of those that fit, as the host finds it. All times are the host's."""
        step = tiled(self.rule, batch, self.limits)
        times, fits = step.predict(), step.fits()
        assert np.array_equal(np.where(fits, times, 1 << 61), np.minimum(self.planner.times.cpu().numpy(), 1 << 61))
        return int(np.argmin(np.where(fits, times, 1 << 61)))

    def tokens_read(self, forest: Forest, batch: StepTables, candidate: int) -> int:
        """Returns the tokens that all tiles of a candidate read, as its prediction counts them."""
        entries = layout.make_entries(forest, batch.seq_lens, batch.query_start_loc)
        total = 0
        for _, stage in stages_of(self.rule, self.rule.priced.tilings[candidate]):
            shared, tall = shared_tokens(forest, entries, stage.least if stage.least > 1 else stage.below)
            once, _, again = stage_tokens(entries.position, shared, tall, stage, batch.window)
            total += int(once + again)
        return total

    def assert_equals_host(self, batch: StepTables) -> None:
        """Asserts bit equality with what the host writes for the only candidate, or for the best."""
        rule = self.rule
        candidate = self.chosen(batch) if self.candidate is None else self.candidate
        tiling = rule.priced.tilings[candidate]
        forest = forest_of(batch, rule.page_size)
        queries, lens = np.diff(batch.query_start_loc).astype(np.int64), batch.seq_lens.astype(np.int64)
        assert self.plan.summary is not None
        assert self.plan.summary.tolist() == [
            candidate if self.candidate is None else 0,
            self.tokens_read(forest, batch, candidate),
            np.minimum(lens, queries + batch.window - 1)[queries > 0].sum(),
        ]
        self.assert_holds(tile(rule, tiling, batch), batch)

    def assert_holds(self, host: TileList, batch: StepTables) -> None:
        """Bit equality with a list of the host, and nothing was written beside the arrays."""
        expected = {
            "counts": np.append(host.counts, len(host.merge_queries)), "items": host.items, "segments": host.segments,
            "positions": batch.query_positions, "queries": host.queries,
            "partial_slots": host.partial_slots, "merge_slots": host.merge_slots, "merge_queries": host.merge_queries,
            "merge_ranges": host.merge_ranges,
        }  # fmt: skip
        for name, array in expected.items():
            found = self.plan.arrays[name].cpu().numpy()[: array.size].reshape(array.shape)
            assert np.array_equal(found, array), name
        self.assert_guarded()


def prepare(
    rule: TilingRule,
    capacity: Capacity,
    candidate: int | None = None,
    limits: TileLimits = ROOMY,
    device: str = "cpu",
    card: Card | None = None,
) -> Planned:
    card = card or make_card(num_sms=1, capability=80)
    kind = InvariantPlanner if rule.batch_invariant else DevicePlanner
    planner = kind(some_candidates(rule, candidate), capacity, limits, card, torch.device(device))
    buffers = {}
    for name, buffer in planner._buffers.items():
        guarded = torch.full((buffer.numel() + 2 * GUARD,), UNTOUCHED, dtype=buffer.dtype, device=device)
        planner._buffers[name] = guarded[GUARD:-GUARD].view(buffer.shape).zero_()
        buffers[name] = guarded
    planner.errors = planner._buffers["errors"]
    return Planned(rule, planner, reserve(rule, limits, device, card), candidate, buffers, limits)
