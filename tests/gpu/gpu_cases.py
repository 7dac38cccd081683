"""The GPU kernels under Triton's interpreter: one step, tiled in any way, on CPU tensors."""

import math
import os
from dataclasses import dataclass
from functools import cached_property

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

import numpy as np
import torch

from trunkattn.gpu.arrays import Lists
from trunkattn.gpu.cards import HOPPER
from trunkattn.gpu.launch import execute
from trunkattn.gpu.layer import Geometry, Tensors
from trunkattn.gpu.portable.spec import tiles_of as decode_tiles
from trunkattn.gpu.portable.spec import without_subtiles
from trunkattn.gpu.tiles import GpuTile, PrefillTile, gpu_device, prefill_device
from trunkattn.planner.check import check_plan, check_tiles
from trunkattn.planner.device import DeviceModel
from trunkattn.planner.packs.cost import cost_model
from trunkattn.planner.planner import Planned, Planner, PlannerSpec, StepTables
from trunkattn.planner.prefix_forest import Forest, build_forest
from trunkattn.planner.prompt_chunks import Division, divide, join
from trunkattn.planner.splitting import split_rule
from trunkattn.planner.tiles.candidates import TilingRule, candidates
from trunkattn.planner.tiles.pack_items import tile_work
from trunkattn.planner.tiles.step import TiledStep
from trunkattn.planner.work_list import UNLIMITED, TileList

from ..attention.cases import Step
from ..planner.tile_cases import make_rule
from .guarded_loads import guarded_loads
from .kernel_cases import make_card, plan_with

POLICIES = ("pat", "cascade")
NARROW = (2, 128)
CACHES = {"16-bit": NARROW, "fp8": (1, 128), "wide": (2, 256)}  # bytes of an element, head_dim: which tiles are taken


# As many as any group that fits the lowest tile has, of any cache.
TILINGS = range(len(candidates(make_rule(1, 16, 1, shapes=decode_tiles(*NARROW, 1)))))


@dataclass(frozen=True)
class Interpreted:
    """A step on an imagined device with this number of multiprocessors.

    candidate: a tiling, by its number or name, or a packing policy. cache: whose tiles are taken, as a back end
    does for the step's group; those of a policy have no subtiles. prefill: requests with query tokens are prompt chunks
    if these have more rows than it says; None: none is. chunk_policy: how those are packed. capability: of the card.
    """

    step: Step
    num_sms: int
    candidate: int | str
    cache: tuple[int, int] = NARROW
    execution: str = "serial"
    prefill: PrefillTile | None = None
    chunk_policy: str = "auto"
    capability: int = HOPPER

    @property
    def tiles(self) -> tuple[GpuTile, ...]:
        tiles = decode_tiles(*self.cache, self.step.config.group_size, capability=self.capability)
        return without_subtiles(tiles) if self.candidate in POLICIES else tiles

    @property
    def rule(self) -> TilingRule:
        config = self.step.config
        return make_rule(
            config.group_size, config.page_size, self.num_sms, shapes=self.tiles, num_kv_heads=config.num_kv_heads
        )

    @property
    def batch(self) -> StepTables:
        paged, window = self.step.batch, self.step.window
        return StepTables(
            paged.block_table, paged.seq_lens, paged.query_start_loc, UNLIMITED if window is None else window
        )

    @cached_property
    def division(self) -> Division | None:
        """Into prompt chunks and others."""
        if self.prefill is None:
            return None
        config = self.step.config
        above = self.prefill.above_rows // config.group_size
        return divide(self.batch, above, config.page_size)

    @cached_property
    def chunks(self) -> Planned:
        """The prompt chunks' work list; checked."""
        assert self.division and self.prefill
        device = prefill_device(self.num_sms, self.prefill)
        planned = self._planner(self.chunk_policy, device).plan(self.division.chunks)
        check_plan(planned)
        return planned

    @cached_property
    def tile_list(self) -> TileList:
        """Of all that are no prompt chunks; checked."""
        rule, batch, candidate = self.rule, self.division.rest if self.division else self.batch, self.candidate
        query_lens = np.diff(batch.query_start_loc).astype(np.int32)
        if isinstance(candidate, str) and candidate in POLICIES:
            tile_list = tile_work(
                rule,
                self._planner(candidate, gpu_device(self.num_sms, self.tiles[-1].block_m)).plan(batch).work,
                batch,
            )
        else:
            forest = Forest(*build_forest(batch.block_table, batch.seq_lens, query_lens, rule.page_size, 1))
            found = candidates(rule)
            tiling = (
                found[candidate] if isinstance(candidate, int) else next(x for x in found if x.name(rule) == candidate)
            )
            tile_list = TiledStep(rule, forest, batch).emit(tiling)
        check_tiles(tile_list, batch, rule)
        return tile_list

    def _planner(self, policy: str, device: DeviceModel) -> Planner:
        config = self.step.config
        dims = (config.num_qo_heads, config.num_kv_heads, config.cached_numbers, config.value_dim)
        model = cost_model(device, *dims, config.cache_dtype.itemsize)
        split = split_rule(device, model, config.num_kv_heads, config.head_dim + config.value_dim, 0)
        return Planner(PlannerSpec(config.page_size, policy, model, split, tile_name=device.name))

    def run(self, return_lse: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """out and lse, from tensors that were full of NaN; so were the partials. Heads of q and out lie apart, between
        NaN that nothing writes to."""
        step, config, batch, tile_list, chunks = self.step, self.step.config, self.batch, self.tile_list, None
        if self.division and self.prefill:
            tile_list, listed = join(tile_list, self.chunks.work, self.division)
            chunks = listed
        tokens, card = len(step.q), make_card(self.num_sms, capability=80)
        geometry = Geometry(
            config.num_qo_heads, config.num_kv_heads, config.head_dim, config.value_dim, config.page_size,
            self.rule.segment_size, batch.window, step.window is not None or bool((step.batch.query_lens > 1).any()),
            config.logits_soft_cap, config.sinks,
        )  # fmt: skip
        positions = batch.query_positions
        lists, streams = Lists(tile_list, positions, chunks), self.execution == "streams"
        plan = plan_with(lists, geometry, self.tiles, card, self.prefill, streams)
        heads, slots = config.num_qo_heads, max(1, tile_list.num_slots)
        ones = torch.ones(config.num_kv_heads)
        scale = ones / math.sqrt(config.head_dim) * (1 if config.logits_soft_cap else math.log2(math.e))
        for name in ("q_scale", "k_scale"):
            scale = scale * torch.as_tensor(step.options.get(name, 1.0))
        wide_q, wide_out = (
            torch.full((tokens, heads + 1, width + 1), math.nan, dtype=config.dtype)
            for width in (config.head_dim, config.value_dim)
        )
        q, out = wide_q[:, 1:, :-1].copy_(step.q), wide_out[:, 1:, :-1]
        lse = torch.full((tokens, heads), math.nan)
        tensors = Tensors(
            q, step.k_cache, step.v_cache, out, lse, torch.full((slots, heads, config.value_dim), math.nan),
            torch.full((slots, heads), math.nan), scale, ones * torch.as_tensor(step.options.get("v_scale", 1.0)),
            step.options.get("sinks", ones),
        )  # fmt: skip
        with guarded_loads():
            execute(plan, tensors, return_lse)
        assert wide_out[:, 0].isnan().all() and wide_out[..., -1].isnan().all()
        return out, lse
