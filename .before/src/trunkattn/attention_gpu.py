"""The GPU side of `BatchAttention`: row tiles over the prefix forest, prompt chunks, their upload, and the launches.

Requests with more than a few query tokens are work items of `kernels.prefill`, all others rows of tiles. Of a
batch-invariant plan all are rows of tiles: a token's bits must not depend on how many came with it.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from trunkattn.attention_config import AttentionConfig
from trunkattn.attention_device import DeviceStep, OnDevice, tile_stats
from trunkattn.attention_overlap import make_overlap, ways_beside
from trunkattn.attention_planner import make_planner, tile_kind
from trunkattn.attention_prefill import ChunkPlanner, PlannedChunks, no_room
from trunkattn.checks import LayerInputs, scale_tensor
from trunkattn.kernels import gpu
from trunkattn.kernels.prefill_plan import Chunks
from trunkattn.kernels.tile_table import (
    INVARIANT_CHUNK_TOKENS,
    GpuLimits,
    decode_tiles,
    gpu_device,
    gpu_limits,
    prefill_tile,
    runs_hopper_tiles,
    without_subtiles,
)
from trunkattn.plan_format import Capacity, PlanStats, PrefillList, TileList
from trunkattn.planner.build import Batch
from trunkattn.planner.check import check_tiles
from trunkattn.planner.forest import Forest
from trunkattn.planner.prefill import join
from trunkattn.planner.splitting import UNLIMITED
from trunkattn.planner.tiling import (
    Tiling,
    TilingRule,
    predict,
    query_positions,
    tile_forest,
    tile_limits,
    tile_work,
    ways_within,
)

_FUSE_UP_TO = 8  # partials that an item merges; more are spread over the merge kernel's programs


class _Said(NamedTuple):
    """policy: what a step is planned by; reason: why. For `stats`."""

    policy: str
    reason: str


@dataclass(frozen=True)
class _Choice:
    """A tiling, and what it was chosen by: put into words when asked for, as that takes as long as the choice itself.

    times: predicted ns of all tilings. num_fit: of them, those that fit the capacity. limits: whose they are. both_ns:
    predicted, of the chunks and the rest one after the other, and with some beside them; None: there are no chunks.
    overlapped: some are.
    """

    rule: TilingRule
    tiling: Tiling
    times: dict[Tiling, int]
    num_fit: int
    limits: str
    both_ns: tuple[int, int] | None = None
    overlapped: bool = False

    @property
    def policy(self) -> str:
        return self.tiling.name(self.rule) + (" beside chunks" if self.overlapped else "")

    @property
    def reason(self) -> str:
        number = len(self.times)
        passed = "" if self.num_fit == number else f" of the {self.num_fit} of {number} that fit the capacity"
        listed = ", ".join(f"{each.name(self.rule)} {time / 1e3:.3g} µs" for each, time in self.times.items())
        text = f"least predicted time{passed} on {self.limits}: {listed}"
        if self.both_ns is None:
            return text
        serial, beside = (time / 1e3 for time in self.both_ns)
        return f"{text}; with chunks {serial:.3g} µs one after the other, {beside:.3g} µs with some beside them"


class _Tiled(NamedTuple):
    """A step without its chunks. beside: items that run beside them. ns: predicted, alone."""

    tile_list: TileList
    choice: _Choice
    beside: int
    ns: int


@dataclass(frozen=True)
class GpuStep:
    """A planned step. tile_list, batch: without the prompt chunks, if there are any."""

    tile_list: TileList
    batch: Batch
    rule: TilingRule
    gpu_plan: gpu.GpuPlan
    choice: _Choice | _Said
    chunks: PlannedChunks | None

    @property
    def num_query_tokens(self) -> int:
        """Rows of q and out."""
        of_chunks = len(self.chunks.division.chunk_tokens) if self.chunks else 0
        return int(self.batch.query_start_loc[-1]) + of_chunks

    def stats(self) -> PlanStats:
        """See PlanStats."""
        stats = tile_stats(self.tile_list, self.batch, self.rule, self.choice.policy, self.choice.reason)
        return self.chunks.added_to(stats) if self.chunks else stats

    def check(self) -> None:
        """Raises AssertionError if the lists break an invariant."""
        check_tiles(self.tile_list, self.batch, self.rule)
        if self.chunks:
            self.chunks.check()


class GpuExecutor:
    """Plans, on the host or on the device, and runs on a GPU."""

    @torch.inference_mode(False)  # what it keeps is written to outside of it too
    def __init__(self, config: AttentionConfig, device: torch.device, capacity: Capacity | None = None) -> None:
        self.config, self.device, self._capacity = config, device, capacity
        # of a step that is not overlapped: no other was faster in the cases measured, but for `pat` in streams on one
        # of three trees, by 0.6 % (benchmarks/results/ablation-h200.json)
        self._execution = "serial" if config.execution in ("auto", "overlapped") else config.execution
        properties = torch.cuda.get_device_properties(device)
        self._processors = properties.multi_processor_count
        capability = 10 * properties.major + properties.minor
        hopper = capability == 90
        self._card = gpu.Card(self._processors, overlaps=properties.major >= 9, hopper=hopper)
        limits = gpu_limits(properties.name)
        self._tiled = config.policy == "auto" and not config.batch_invariant
        width, group = max(config.head_dim, config.value_dim), config.num_qo_heads // config.num_kv_heads
        in_turn = config.execution in ("auto", "serial", "overlapped")
        roles = hopper and in_turn and config.on_hopper and runs_hopper_tiles(properties.name)
        tiles = decode_tiles(config.tile_itemsize, width, group, roles, capability)
        self._tiles = tiles if self._tiled else without_subtiles(tiles)
        if config.batch_invariant:  # one tile for every row: another would sum the same numbers in another order
            self._tiles = self._tiles[-1:]
        self._planner = make_planner(config, gpu_device(self._processors, self._tiles[-1].block_m))
        self._chunks = self._overlap = None
        if not config.batch_invariant:
            tile = prefill_tile(config.tile_itemsize, width, capability)
            self._chunks = ChunkPlanner(config, tile, self._processors, capacity)
        self._rule = self._tiling_rule(limits, properties.L2_cache_size)
        if self._chunks and hopper:
            rows = self._chunks.tile.block_m
            self._overlap = make_overlap(config, properties.name, self._processors, rows, self._rule)
        heads = config.num_kv_heads
        self._ones = torch.ones(heads, device=device)
        scale = 1 / math.sqrt(config.head_dim) if config.sm_scale is None else config.sm_scale
        self._scale = self._ones * (scale * (1.0 if config.logits_soft_cap else math.log2(math.e)))
        self._partial = torch.empty(1, config.num_qo_heads, config.value_dim, device=device)
        self._partial_lse = torch.empty(1, config.num_qo_heads, device=device)
        self._counters = torch.zeros(2, dtype=torch.int32, device=device)
        self._limits_reason = limits.reason
        chunk = INVARIANT_CHUNK_TOKENS if config.batch_invariant else 0
        pieces = chunk and -(-(capacity.max_pages_per_request if capacity else 0) * config.page_size // chunk) + 1
        self._limits = None if capacity is None else tile_limits(self._rule, capacity, pieces)
        self._on_device: OnDevice | None = None
        if self._limits:
            self._reserve(self._limits.slots)
            if capacity and self._tiled:
                self._on_device = OnDevice(self._rule, capacity, self._limits, self._card, device)

    def _tiling_rule(self, limits: GpuLimits, l2_bytes: int) -> TilingRule:
        config, model = self.config, self._planner.spec.model
        # 8-bit keys and values take as much arithmetic as 16-bit ones
        size = (config.head_dim + config.value_dim) * max(2, config.cache_dtype.itemsize)
        return TilingRule(
            kinds=tuple(tile_kind(tile, self._processors, size) for tile in self._tiles),
            group_size=model.group_size,
            num_kv_heads=config.num_kv_heads,
            page_size=config.page_size,
            launch_ns=limits.launch_ns,
            bytes_per_us=limits.bytes_per_us,
            head_bytes=model.kv_bytes // config.num_kv_heads,
            partial_bytes=model.partial_bytes,
            fuse_up_to=_FUSE_UP_TO if self._may_fuse else 0,
            l2_bytes=l2_bytes,
            uniform=config.batch_invariant,
        )

    @property
    def _may_fuse(self) -> bool:
        """Whether items may merge partials: not if other executions or launches of fixed size could run them too early,
        nor if that depended on the batch."""
        if self.config.batch_invariant or self._execution == "persistent" or not self._tiles[0].merges:
            return False
        return self._capacity is None or (self._tiled and self._execution == "serial")

    def plan(self, batch: Batch, changed_rows: np.ndarray | None, into: GpuStep | DeviceStep | None = None) -> GpuStep:
        """Plans a checked batch and starts its upload; `into`: to the arrays of that step, of the same window."""
        try:
            return self._plan(batch, changed_rows, into)
        except Exception:
            self._planner.forget()  # the forest is of this batch by now, and no plan is
            raise

    @property
    def plans_on_device(self) -> bool:
        """Whether tables that lie on the device are planned there."""
        return self._on_device is not None

    def plan_on_device(self, tables: tuple, window: int, into: GpuStep | DeviceStep | None = None) -> DeviceStep:
        """Plans block_table, seq_lens and query_start_loc (or None) without waiting for the device; all requests become
        rows of tiles, prompt chunks too."""
        assert self._on_device is not None
        self._planner.forget()  # the host has not seen this batch: its next one may not be patched
        step = self._on_device.plan(tables, window, into.gpu_plan if into else self._reserved(window, None))
        step.gpu_plan.forget_prefill()  # whatever the host put there, before or between replays of a captured plan
        return step

    @property
    def errors(self) -> torch.Tensor | None:
        """See BatchAttention.errors."""
        return self._on_device.errors if self._on_device else None

    def check(self) -> None:
        """Raises ValueError if a plan made on the device met values that are wrong; waits for the device."""
        if self._on_device:
            self._on_device.check()

    def _plan(self, batch: Batch, changed_rows: np.ndarray | None, into: GpuStep | DeviceStep | None) -> GpuStep:
        chunk_planner = self._chunks_for(into)
        division = chunk_planner.divide(batch) if chunk_planner else None
        rest = division.rest if division else batch
        lens, starts = rest.seq_lens, rest.query_start_loc
        choice: _Choice | _Said
        beside, whole = 0, False
        if self._tiled:
            forest, table = self._planner.forest(rest, changed_rows)
            beside_chunks = division.chunks if division and self._overlap and starts[-1] else None
            tile_list, choice, beside, ns = self._tile(forest, Batch(table, lens, starts, rest.window), beside_chunks)
            whole = bool(beside_chunks and self._overlap and self._overlap.fills(beside_chunks, ns))
        else:
            planned = self._planner.plan(rest, changed_rows)
            table, choice = planned.batch.block_table, _Said(planned.policy, planned.reason)
            tile_list = tile_work(self._rule, planned.work, (table, lens, starts), rest.window)
        if self._limits and (broken := self._limits.broken_by(tile_list)):
            raise ValueError(no_room(self.config.policy, broken))
        joined, listed, chunks = tile_list, None, None
        if chunk_planner and division:
            free = self._limits.slots - tile_list.num_slots if self._limits else None
            chunks = chunk_planner.plan(division, free, whole)
            joined, listed = join(tile_list, chunks.planned.work, division)
        several = bool((np.diff(starts) > 1).any())
        positions = query_positions(batch.seq_lens, batch.query_start_loc)
        gpu_plan = self._place(joined, listed, beside, positions, self._geometry(batch.window, several), into)
        kept = Batch(table, lens.copy(), starts.copy(), batch.window)
        return GpuStep(tile_list, kept, self._rule, gpu_plan, choice, chunks)

    def _chunks_for(self, into: GpuStep | DeviceStep | None) -> ChunkPlanner | None:
        """What plans prompt chunks; None: they are rows of tiles too."""
        if self._chunks is None or self._capacity is None:
            return self._chunks
        room = self._chunks.limits if into is None else into.gpu_plan.prefill
        return self._chunks if room else None

    def _tile(self, forest: Forest, batch: Batch, chunks: Batch | None) -> _Tiled:
        """The tiling of least predicted time that fits the capacity; low tiles that are not cut always do. chunks: what
        decodes may run beside."""
        arrays = (batch.block_table, batch.seq_lens, batch.query_start_loc)
        times = predict(self._rule, forest, arrays[1:], batch.window)
        ways = list(times)
        if self._limits:
            ways = ways_within(self._rule, self._limits, forest, arrays[1:], batch.window)
        tiling = min(ways, key=lambda way: times[way])
        tile_list = tile_forest(self._rule, tiling, forest, arrays, batch.window)
        choice = _Choice(self._rule, tiling, times, len(ways), self._limits_reason)
        if chunks is None:
            return _Tiled(tile_list, choice, 0, times[tiling])
        assert self._overlap
        lists = {
            way: tile_list if way == tiling else tile_forest(self._rule, way, forest, arrays, batch.window)
            for way in ways_beside(ways, times, self._rule.group_size)
        }
        chunk_ns, reads_ns = self._overlap.chunks_ns(chunks), self._overlap.reads_ns(chunks)
        found = {way: self._overlap.beside(each, chunk_ns, reads_ns) for way, each in lists.items()}
        low = min(found, key=lambda way: found[way].total_ns)
        serial, total = chunk_ns + times[tiling], found[low].total_ns
        choice = replace(choice, both_ns=(serial, total))
        if self._overlap.worth(total, serial):
            choice = replace(choice, tiling=low, overlapped=True)
            return _Tiled(lists[low], choice, found[low].items, times[tiling])
        return _Tiled(tile_list, choice, 0, times[tiling])

    def _place(
        self,
        tile_list: TileList,
        listed: PrefillList | None,
        beside: int,
        positions: np.ndarray,
        geometry: gpu.Geometry,
        into: GpuStep | DeviceStep | None,
    ) -> gpu.GpuPlan:
        """Sends a tile list, and prompt chunks, to the device. beside: items that run beside those; geometry: of a plan
        that holds no other batch."""
        if self._limits is None:
            self._reserve(tile_list.num_slots)
            chunks = Chunks(listed, self._chunks.tile) if listed and self._chunks else None
            execution = "overlapped" if beside else self._execution
            return gpu.upload(tile_list, positions, geometry, self._card, execution, self.device, chunks, beside)
        placed = into.gpu_plan if into else self._reserved(geometry.window, self._chunks)
        gpu.refill(placed, tile_list, positions, listed, beside)
        return placed

    def _reserved(self, window: int, chunks: ChunkPlanner | None) -> gpu.GpuPlan:
        """An empty plan for any batch of the capacity. chunks: plans prompt chunks; None: they are rows of tiles."""
        assert self._limits and self._capacity
        several = (self._capacity.max_query_len or self._capacity.max_query_tokens) > 1
        geometry = self._geometry(window, several)
        room = (chunks.limits, chunks.tile) if chunks and chunks.limits else None
        execution = "overlapped" if room and self._overlap else self._execution
        return gpu.reserve(self._limits, self._tiles, geometry, self._card, execution, self.device, room)

    def _geometry(self, window: int, several: bool) -> gpu.Geometry:
        """several: query tokens of a request that is rows of tiles."""
        config = self.config
        return gpu.Geometry(
            config.num_qo_heads, config.num_kv_heads, config.head_dim, config.value_dim, config.page_size,
            self._rule.run, window, several or window != UNLIMITED, config.logits_soft_cap, config.sinks,
        )  # fmt: skip

    def _reserve(self, slots: int) -> None:
        if slots > len(self._partial):
            self._partial = torch.empty(slots, *self._partial.shape[1:], device=self.device)
            self._partial_lse = torch.empty(slots, self._partial.shape[1], device=self.device)

    def run(self, step: GpuStep | DeviceStep, inputs: LayerInputs, out: torch.Tensor) -> torch.Tensor:
        """Writes out; returns lse [num_query_tokens, num_qo_heads]."""
        lse = torch.empty(out.shape[:2], device=self.device) if inputs.return_lse else self._partial_lse
        scale, v_scale = self._scale, self._ones
        for value in (inputs.q_scale, inputs.k_scale):
            if value is not None and not _is_one(value):
                scale = scale * scale_tensor(value)
        if inputs.v_scale is not None and not _is_one(inputs.v_scale):
            v_scale = self._ones * scale_tensor(inputs.v_scale)
        # the kernels take any strides but that of the last dimension
        q = inputs.q if inputs.q.stride(2) == 1 else inputs.q.contiguous()
        computed = out if out.stride(2) == 1 else out.contiguous()
        tensors = gpu.Tensors(
            q, inputs.k_cache, inputs.v_cache, computed, lse, self._partial, self._partial_lse, scale, v_scale,
            self._ones if inputs.sinks is None else inputs.sinks.contiguous(), self._counters,
        )  # fmt: skip
        with torch.cuda.device(inputs.q.device):  # launches go to the current device
            gpu.execute(step.gpu_plan, tensors, self._tiles, self._card, inputs.return_lse)
        if computed is not out:
            out.copy_(computed)
        return lse


def _is_one(scale: float | torch.Tensor) -> bool:
    """Whether a scale changes nothing, as far as the host can see."""
    return not isinstance(scale, torch.Tensor) and scale == 1
