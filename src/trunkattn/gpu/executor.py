"""The GPU side of `BatchAttention`: row tiles over the prefix forest, prompt chunks, their upload, and the launches.

Requests with more than a few query tokens are prompt chunks, which the prefill kernel computes. All others are rows of
tiles. In a batch-invariant plan all are rows of tiles: a token's bits must not depend on how many came with it.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from trunkattn.config import AttentionConfig, Capacity
from trunkattn.gpu.chunk_planner import ChunkPlanner, PlannedChunks, no_room
from trunkattn.gpu.device_planner.chunks import ListedChunks, tables_of
from trunkattn.gpu.device_planner.step import DeviceStep, OnDevice, tile_stats
from trunkattn.gpu.launch import execute
from trunkattn.gpu.overlap import Overlap, make_overlap
from trunkattn.gpu.plan import DeviceInfo, Geometry, GpuPlan, Tensors, refill, reserve, upload
from trunkattn.gpu.prefill_plan import Chunks
from trunkattn.gpu.step_choice import BATCH_INVARIANT, PackingChoice, StepChoice, choose_step
from trunkattn.gpu.tuning.cards import Card, GpuFacts, card_of, facts_of
from trunkattn.gpu.tuning.choice import WhyPortable, choose_chunk_tile, choose_tiles, told, why_portable
from trunkattn.gpu.tuning.decode import GpuTile, gpu_device, tile_config
from trunkattn.gpu.workspace import Scales, Workspace
from trunkattn.inputs import LayerInputs, PromptChunks
from trunkattn.planner.from_config import make_planner
from trunkattn.planner.invariants import check_tiles
from trunkattn.planner.packing.cost import CostModel
from trunkattn.planner.planner import StepTables
from trunkattn.planner.prompt_chunks import Division, join
from trunkattn.planner.row_tiles.choice import TilingRule, query_positions, tile_limits, tile_work
from trunkattn.planner.row_tiles.invariant import invariant_limits, invariant_list
from trunkattn.planner.row_tiles.step import TiledStep
from trunkattn.planner.splitting import UNLIMITED
from trunkattn.planner.work_list import INVARIANT_CHUNK_TOKENS, PlanStats, TileLimits, TileList

_FUSE_UP_TO = 8  # partials that an item merges; more are spread over the merge kernel's programs


class _Halves(NamedTuple):
    """A step before it is planned: what becomes rows of tiles, and what becomes prompt chunks, if anything does."""

    rest: StepTables
    division: Division | None


class _Lists(NamedTuple):
    """The planned halves. rest: with the block table that its forest was made of."""

    rest: StepTables
    tile_list: TileList
    choice: StepChoice | PackingChoice
    chunks: PlannedChunks | None


@dataclass(frozen=True)
class GpuStep:
    """A planned step. tile_list, batch: without the prompt chunks, if there are any."""

    tile_list: TileList
    batch: StepTables
    rule: TilingRule
    gpu_plan: GpuPlan
    choice: StepChoice | PackingChoice
    chunks: PlannedChunks | None
    why_portable: WhyPortable

    @property
    def num_query_tokens(self) -> int:
        """Rows of q and out."""
        of_chunks = len(self.chunks.division.chunk_tokens) if self.chunks else 0
        return int(self.batch.query_start_loc[-1]) + of_chunks

    @property
    def traffic(self) -> None:
        """The host made the plan: see `stats`."""

    @property
    def has_chunks(self) -> bool:
        """Whether some requests are prompt chunks for a kernel of their own."""
        return self.chunks is not None

    @property
    def launches_chunks(self) -> bool:
        """Whether the plan holds the launch of that kernel."""
        return self.gpu_plan.prefill is not None

    def without_chunks(self) -> "GpuStep":
        """The same arrays without that launch."""
        return replace(self, gpu_plan=self.gpu_plan.without_chunks())

    def of_chunks_alone(self) -> None:
        """Chunks that the host plans may be cut, and then other kernels merge them."""

    def stats(self) -> PlanStats:
        """See PlanStats."""
        stats = tile_stats(self.tile_list, self.batch, self.rule, self.choice.policy, self.choice.reason)
        stats, of_chunks = told(stats, self.why_portable.decodes), self.chunk_stats()
        return stats.with_chunks(of_chunks) if of_chunks else stats

    def chunk_stats(self) -> PlanStats | None:
        """Of the prompt chunks alone; None: there are none."""
        return told(self.chunks.planned.stats(), self.why_portable.prompts) if self.chunks else None

    def check(self) -> None:
        """Raises AssertionError if the lists break an invariant."""
        check_tiles(self.tile_list, self.batch, self.rule, in_chunks=self.choice is BATCH_INVARIANT)
        if self.chunks:
            self.chunks.check()


class GpuExecutor:
    """Plans, on the host or on the device, and runs on a GPU."""

    @torch.inference_mode(False)  # what it keeps is written to outside of it too
    def __init__(
        self,
        config: AttentionConfig,
        device: torch.device,
        capacity: Capacity | None = None,
        *,
        facts: GpuFacts | None = None,
    ) -> None:
        """facts: of another card than `device`, to plan for it."""
        facts = facts or facts_of(device)
        card = card_of(facts.name, facts.num_sms)
        self.config, self.device, self._capacity = config, device, capacity
        self._card_description = card.description
        self._device_info = DeviceInfo(facts.num_sms, overlaps=facts.capability >= 90, hopper=facts.capability == 90)
        self._execution = "serial" if config.execution in ("auto", "overlapped") else config.execution
        self._is_tiled = config.policy == "auto" and not config.batch_invariant
        self._is_chunked = config.policy == "auto" and config.batch_invariant
        self._why_portable = why_portable(config, card, facts.capability)
        self._tiles = choose_tiles(config, card, facts.capability)
        packing = replace(config, batch_invariant=False) if self._is_chunked else config
        self._planner = make_planner(packing, gpu_device(facts.num_sms, self._tiles[-1].block_m))
        in_order = capacity is None or (self._is_tiled and self._execution == "serial")
        self._rule = make_rule(config, self._tiles, card, facts, self._planner.spec.model, may_fuse=in_order)
        self._chunks = make_chunk_planner(config, card, facts, capacity)
        self._overlap: Overlap | None = None
        if self._chunks and self._device_info.hopper:
            self._overlap = make_overlap(config, card, facts.num_sms, self._chunks.tile.block_m, self._rule)
        self._limits = _limits_of(config, self._rule, capacity) if capacity else None
        self._workspace = Workspace(config, self._limits.slots if self._limits else 1, device)
        self._scales = Scales(config, device)
        self._on_device: OnDevice | None = None
        if capacity and self._limits and (self._is_tiled or self._is_chunked):
            self._on_device = OnDevice(
                self._rule, capacity, self._limits, self._device_info, device, self._why_portable
            )

    def plan(self, batch: StepTables, into: GpuStep | DeviceStep | None = None) -> GpuStep:
        """Plans a checked batch and starts its upload; `into`: to the arrays of that step, of the same window."""
        try:
            return self._plan(batch, into)
        except Exception:
            self._planner.forget()  # the forest is of this batch by now, and no plan is
            raise

    @property
    def plans_on_device(self) -> bool:
        """Whether tables that lie on the device are planned there."""
        return self._on_device is not None

    def plan_on_device(
        self,
        tables: tuple,
        window: int,
        into: GpuStep | DeviceStep | None = None,
        chunks: PromptChunks | None = None,
    ) -> DeviceStep:
        """Plans block_table, seq_lens and query_start_loc (or None) without waiting for the device. All requests become
        rows of tiles, but for those of which the host says that they are prompt chunks."""
        assert self._on_device is not None and self._capacity is not None
        self._planner.forget()  # the host has not seen this batch: its next one may not be patched
        with_room = self._chunks if self._capacity.max_chunk_tokens else None
        gpu_plan = into.gpu_plan if into else self._reserved(window, with_room)
        listed = self._list_chunks(chunks, window) if chunks else None
        step = self._on_device.plan(tables, window, gpu_plan, listed)
        if listed is None:
            step.gpu_plan.forget_prefill()  # whatever the host put there, before or between replays of a captured plan
        return step

    def overlaps(self, chunks: PromptChunks) -> bool:
        """Whether one kernel is to compute these chunks and what decodes beside them."""
        if self._overlap is None or self._capacity is None or not self._capacity.max_chunk_tokens:
            return False
        tables = tables_of(chunks, self.config.page_size, UNLIMITED)
        return self._overlap.is_worth_for(tables, chunks.other_kv_tokens)

    def _list_chunks(self, chunks: PromptChunks, window: int) -> ListedChunks:
        assert self._chunks is not None
        tables = tables_of(chunks, self.config.page_size, window)
        return ListedChunks(self._chunks.list_whole(tables), int(chunks.first_token), self.overlaps(chunks))

    @property
    def errors(self) -> torch.Tensor | None:
        """See BatchAttention.errors."""
        return self._on_device.errors if self._on_device else None

    def check(self) -> None:
        """Raises ValueError if a plan made on the device met values that are wrong; waits for the device."""
        if self._on_device:
            self._on_device.check()

    def _plan(self, batch: StepTables, into: GpuStep | DeviceStep | None) -> GpuStep:
        lists = self._plan_halves(self._split(batch, into))
        gpu_plan = self._place(lists, batch, into)
        rest = lists.rest
        kept = StepTables(rest.block_table, rest.seq_lens.copy(), rest.query_start_loc.copy(), rest.window)
        return GpuStep(lists.tile_list, kept, self._rule, gpu_plan, lists.choice, lists.chunks, self._why_portable)

    def _split(self, batch: StepTables, into: GpuStep | DeviceStep | None) -> _Halves:
        """Takes out prompt chunks, if the plan has room for any."""
        chunk_planner = self._chunks_for(into)
        division = chunk_planner.divide(batch) if chunk_planner else None
        return _Halves(division.rest if division else batch, division)

    def _plan_halves(self, halves: _Halves) -> _Lists:
        """Plans the rest, then the chunks in what is left of the capacity."""
        rest, division = halves
        chunks = division.chunks if division else None
        rest, tile_list, choice = self._plan_rest(rest, chunks)
        if self._limits and (broken := self._limits.broken_by(tile_list)):
            raise ValueError(no_room(self.config.policy, broken))
        if division is None or self._chunks is None:
            return _Lists(rest, tile_list, choice, None)
        free_slots = self._limits.slots - tile_list.num_slots if self._limits else None
        return _Lists(rest, tile_list, choice, self._chunks.plan(division, free_slots, choice.keeps_chunks_whole))

    def _plan_rest(
        self, rest: StepTables, chunks: StepTables | None
    ) -> tuple[StepTables, TileList, StepChoice | PackingChoice]:
        """What becomes rows of tiles; its table is the one that the forest was made of."""
        if self._is_tiled:
            return self._plan_tiles(rest, chunks)
        return self._plan_chunks(rest) if self._is_chunked else self._plan_packs(rest)

    def _plan_tiles(self, rest: StepTables, chunks: StepTables | None) -> tuple[StepTables, TileList, StepChoice]:
        forest, table = self._planner.forest(rest)
        rest = StepTables(table, rest.seq_lens, rest.query_start_loc, rest.window)
        step = TiledStep(self._rule, forest, rest, self._limits)
        choice = choose_step(step, self._card_description, self._overlap, chunks)
        return rest, step.emit(choice.tiling), choice

    def _plan_chunks(self, rest: StepTables) -> tuple[StepTables, TileList, PackingChoice]:
        forest, table = self._planner.forest(rest)
        rest = StepTables(table, rest.seq_lens, rest.query_start_loc, rest.window)
        return rest, invariant_list(self._rule, forest, rest), BATCH_INVARIANT

    def _plan_packs(self, rest: StepTables) -> tuple[StepTables, TileList, PackingChoice]:
        planned = self._planner.plan(rest)
        rest = StepTables(planned.batch.block_table, rest.seq_lens, rest.query_start_loc, rest.window)
        tables = rest.block_table, rest.seq_lens, rest.query_start_loc
        tile_list = tile_work(self._rule, planned.work, tables, rest.window)
        return rest, tile_list, PackingChoice(planned.policy, planned.reason)

    def _chunks_for(self, into: GpuStep | DeviceStep | None) -> ChunkPlanner | None:
        """What plans prompt chunks; None: they are rows of tiles too."""
        if self._chunks is None or self._capacity is None:
            return self._chunks
        room = self._chunks.limits if into is None else into.gpu_plan.prefill
        return self._chunks if room else None

    def _place(self, lists: _Lists, batch: StepTables, into: GpuStep | DeviceStep | None) -> GpuPlan:
        """Sends the lists of a batch to the device."""
        tile_list, listed = lists.tile_list, None
        if lists.chunks:
            tile_list, listed = join(tile_list, lists.chunks.planned.work, lists.chunks.division)
        positions = query_positions(batch.seq_lens, batch.query_start_loc)
        if self._limits is not None:
            placed = into.gpu_plan if into else self._reserved(batch.window, self._chunks)
            refill(placed, tile_list, positions, listed, lists.choice.num_overlapped)
            return placed
        self._workspace.grow(tile_list.num_slots)
        num_overlapped = lists.choice.num_overlapped
        execution = "overlapped" if num_overlapped else self._execution
        chunks = Chunks(listed, self._chunks.tile) if listed and self._chunks else None
        geometry = self._geometry(batch.window, bool((np.diff(lists.rest.query_start_loc) > 1).any()))
        return upload(tile_list, positions, geometry, self._device_info, execution, self.device, chunks, num_overlapped)

    def _reserved(self, window: int, chunks: ChunkPlanner | None) -> GpuPlan:
        """An empty plan for any batch of the capacity. chunks: plans prompt chunks; None: they are rows of tiles."""
        assert self._limits and self._capacity
        several = (self._capacity.max_query_len or self._capacity.max_query_tokens) > 1
        geometry = self._geometry(window, several)
        room = (chunks.limits, chunks.tile) if chunks and chunks.limits else None
        execution = "overlapped" if room and self._overlap else self._execution
        return reserve(self._limits, self._tiles, geometry, self._device_info, execution, self.device, room)

    def _geometry(self, window: int, several: bool) -> Geometry:
        """several: some request that is rows of tiles may have several query tokens."""
        config = self.config
        return Geometry(
            num_qo_heads=config.num_qo_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            head_dim_v=config.value_dim,
            page_size=config.page_size,
            segment_size=self._rule.segment_size,
            window=window,
            masked=several or window != UNLIMITED,
            soft_cap=config.logits_soft_cap,
            sinks=config.sinks,
            batch_invariant=config.batch_invariant,
        )

    def run(self, step: GpuStep | DeviceStep, inputs: LayerInputs, out: torch.Tensor) -> torch.Tensor:
        """Writes out; returns lse [num_query_tokens, num_qo_heads]."""
        workspace, (logit_scale, v_scale) = self._workspace, self._scales.of(inputs)
        lse = workspace.partial_lse
        if inputs.return_lse:
            lse = torch.empty(out.shape[:2], dtype=torch.float32, device=self.device)
        # the kernels take any strides but that of the last dimension
        q = inputs.q if inputs.q.stride(2) == 1 else inputs.q.contiguous()
        computed = out if out.stride(2) == 1 else out.contiguous()
        tensors = Tensors(
            q=q,
            k_cache=inputs.k_cache,
            v_cache=inputs.v_cache,
            out=computed,
            lse=lse,
            partial=workspace.partial,
            partial_lse=workspace.partial_lse,
            logit_scale=logit_scale,
            v_scale=v_scale,
            sinks=self._scales.ones if inputs.sinks is None else inputs.sinks.contiguous(),
        )
        with torch.cuda.device(inputs.q.device):  # launches go to the current device
            execute(step.gpu_plan, tensors, self._tiles, self._device_info, inputs.return_lse)
        if computed is not out:
            out.copy_(computed)
        return lse


def make_rule(
    config: AttentionConfig,
    tiles: tuple[GpuTile, ...],
    card: Card,
    facts: GpuFacts,
    model: CostModel,
    *,
    may_fuse: bool,
) -> TilingRule:
    """What the planner must know of tiles on a card.

    may_fuse: items may merge partials, because no execution or launch of fixed size could run them too early. A
    batch-invariant plan never does, since which items merge depends on the batch.
    """
    # 8-bit keys and values take as much arithmetic as 16-bit ones
    key_bytes = (config.head_dim + config.value_dim) * max(2, config.cache_dtype.itemsize)
    fuses = may_fuse and tiles[0].merges and not config.batch_invariant
    return TilingRule(
        kinds=tuple(tile_config(tile, facts.num_sms, key_bytes) for tile in tiles),
        group_size=model.group_size,
        num_kv_heads=config.num_kv_heads,
        page_size=config.page_size,
        card_times=card.times,
        head_bytes=model.kv_bytes // config.num_kv_heads,
        partial_bytes=model.partial_bytes,
        fuse_up_to=_FUSE_UP_TO if fuses else 0,
        l2_bytes=facts.l2_bytes,
        uniform=config.batch_invariant,
    )


def make_chunk_planner(
    config: AttentionConfig, card: Card, facts: GpuFacts, capacity: Capacity | None
) -> ChunkPlanner | None:
    """None: all requests are rows of tiles, because a token's bits must not depend on how many came with it."""
    if config.batch_invariant:
        return None
    return ChunkPlanner(config, choose_chunk_tile(config, card, facts.capability), facts.num_sms, capacity)


def _limits_of(config: AttentionConfig, rule: TilingRule, capacity: Capacity) -> TileLimits:
    """What every batch of a capacity keeps within."""
    tokens = capacity.max_pages_per_request * config.page_size
    if not config.batch_invariant:
        return tile_limits(rule, capacity)
    if config.policy == "auto":
        return invariant_limits(capacity.max_query_tokens, tokens, rule.segment_size)
    return tile_limits(rule, capacity, -(-tokens // INVARIANT_CHUNK_TOKENS) + 1)
