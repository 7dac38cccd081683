"""The planners of a step's rows of tiles, with one interface: tilings, packs, or batch-invariant spans.

Each is a planner on the host. Two of them have a twin that plans on the device (`device_planner`).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Final

import torch

from trunkattn.config import AttentionConfig, Capacity
from trunkattn.gpu.cards import Card
from trunkattn.gpu.device_planner.step import OnDevice
from trunkattn.gpu.kernel import Kernels
from trunkattn.gpu.mla.spec import head_groups
from trunkattn.gpu.overlap import Overlap, make_overlap
from trunkattn.gpu.step import HostTiles
from trunkattn.gpu.step_choice import BATCH_INVARIANT, PackingChoice, choose_step
from trunkattn.gpu.tiles import GpuTile, gpu_device, tile_config
from trunkattn.planner.from_config import make_planner
from trunkattn.planner.packs.cost import CostModel
from trunkattn.planner.planner import Planner, StepTables
from trunkattn.planner.prefix_forest import Forest
from trunkattn.planner.tiles.batch_invariant import invariant_limits, invariant_list
from trunkattn.planner.tiles.candidates import TilingRule, tile_limits, tiling_limits
from trunkattn.planner.tiles.pack_items import tile_work
from trunkattn.planner.tiles.step import TiledStep
from trunkattn.planner.work_list import PACK_SPAN_TOKENS, TileLimits

_FUSE_UP_TO: Final = 8  # the most partials that an item merges; more are spread over the merge kernel's CTAs


@dataclass(frozen=True)
class _Setting:
    """What step planners are made for. forests: the planner that makes prefix forests and packs."""

    config: AttentionConfig
    card: Card
    device: torch.device
    capacity: Capacity | None
    forests: Planner
    rule: TilingRule


class StepPlanner(ABC):
    """Plans the requests of a step that are rows of tiles.

    Attributes:
        rule: the tiles that it may choose from.
        forests: the planner that makes prefix forests and packs.
        limits: upper bounds of every tile list within the capacity; None if there is no capacity.
        overlap: the predictor for the kernel that computes prompt chunks and decodes at once; None if none is used.
        on_device: the planner's twin on the device; None if there is none, or no capacity.
    """

    def __init__(self, setting: _Setting, limits: TileLimits | None) -> None:
        self.rule, self.forests, self.limits = setting.rule, setting.forests, limits
        self.overlap: Overlap | None = None
        self.on_device: OnDevice | None = None

    @abstractmethod
    def plan(self, batch: StepTables, chunks: StepTables | None) -> HostTiles:
        """Plans a batch. chunks: the prompt chunks of the step; None: there are none."""

    def _forest(self, batch: StepTables) -> tuple[Forest, StepTables]:
        """The prefix forest of a batch, and the batch with the block table that the forest was made of."""
        forest, table = self.forests.forest(batch)
        return forest, replace(batch, block_table=table)


class TilePlanner(StepPlanner):
    """Tilings of the prefix forest: the candidate of least predicted time."""

    def __init__(self, setting: _Setting, overlap: Overlap | None, has_chunks: bool) -> None:
        """Makes a planner. has_chunks: prompt chunks have their own kernel and use the partial slots that tiles
        leave."""
        limits_of = tile_limits if has_chunks else tiling_limits
        super().__init__(setting, limits_of(setting.rule, setting.capacity) if setting.capacity else None)
        self.overlap, self.on_device = overlap, _twin(setting, self.limits)
        self._card = setting.card.description

    def plan(self, batch: StepTables, chunks: StepTables | None) -> HostTiles:
        """Plans a batch; see StepPlanner."""
        forest, batch = self._forest(batch)
        step = TiledStep(self.rule, forest, batch, self.limits)
        choice = choose_step(step, self._card, self.overlap, chunks)
        return HostTiles(batch, step.emit(choice.tiling), choice)


class SpanPlanner(StepPlanner):
    """Spans of sequences that no batch changes: a request is cut alike in any batch (batch invariance)."""

    def __init__(self, setting: _Setting) -> None:
        limits = None
        if setting.capacity:
            tokens = setting.capacity.max_pages_per_request * setting.config.page_size
            limits = invariant_limits(setting.capacity.max_query_tokens, tokens, setting.rule.segment_size)
        super().__init__(setting, limits)
        self.on_device = _twin(setting, limits)

    def plan(self, batch: StepTables, chunks: StepTables | None) -> HostTiles:
        """Plans a batch; see StepPlanner."""
        forest, batch = self._forest(batch)
        return HostTiles(batch, invariant_list(self.rule, forest, batch), BATCH_INVARIANT)


class PackPlanner(StepPlanner):
    """Packs of one of the packing policies: an item of a pack in the lowest tile that holds it. It has no twin on the
    device."""

    def __init__(self, setting: _Setting) -> None:
        config, capacity, limits = setting.config, setting.capacity, None
        if capacity:
            tokens = capacity.max_pages_per_request * config.page_size
            num_partials = -(-tokens // PACK_SPAN_TOKENS) + 1 if config.batch_invariant else 0
            limits = tile_limits(setting.rule, capacity, num_partials)
        super().__init__(setting, limits)

    def plan(self, batch: StepTables, chunks: StepTables | None) -> HostTiles:
        """Plans a batch; see StepPlanner."""
        planned = self.forests.plan(batch)
        batch = replace(batch, block_table=planned.batch.block_table)
        tile_list = tile_work(self.rule, planned.work, batch, planned.spec.rule.fixed_chunk)
        return HostTiles(batch, tile_list, PackingChoice(planned.policy, planned.reason))


def _twin(setting: _Setting, limits: TileLimits | None) -> OnDevice | None:
    """The planner on the device that makes the same lists; None without a capacity."""
    if setting.capacity is None or limits is None:
        return None
    return OnDevice(setting.rule, setting.capacity, limits, setting.card, setting.device)


def make_step_planner(
    config: AttentionConfig, kernels: Kernels, card: Card, device: torch.device, capacity: Capacity | None
) -> StepPlanner:
    """The planner of the rows of tiles of an attention on a card. Items may merge partials only if all earlier launches
    have ended when they run. Launches of fixed size keep such an order only for tilings, and streams keep none."""
    has_spans = config.policy == "auto" and config.batch_invariant
    is_tiled = config.policy == "auto" and not config.batch_invariant
    packing = replace(config, batch_invariant=False) if has_spans else config
    forests = make_planner(packing, gpu_device(card.num_sms, kernels.tiles[-1].block_m))
    in_order = capacity is None or (is_tiled and config.execution != "streams")
    rule = make_rule(config, kernels.tiles, card, forests.spec.model, may_fuse=in_order)
    setting = _Setting(config=config, card=card, device=device, capacity=capacity, forests=forests, rule=rule)
    if is_tiled:
        return TilePlanner(setting, make_overlap(config, kernels, card, rule), has_chunks=kernels.prefill is not None)
    return SpanPlanner(setting) if has_spans else PackPlanner(setting)


def make_rule(
    config: AttentionConfig, tiles: tuple[GpuTile, ...], card: Card, model: CostModel, *, may_fuse: bool
) -> TilingRule:
    """The planner's description of the tiles on a card.

    may_fuse: items may merge partials. In a batch-invariant plan no item does, because which items merge depends on the
    batch.
    """
    # A tile's times follow its arithmetic, which is the same for 8-bit and 16-bit keys and values.
    key_bytes = config.cached_numbers * max(2, config.cache_dtype.itemsize)
    num_groups = head_groups(config, tiles)
    fuses = may_fuse and tiles[0].merges and not config.batch_invariant
    return TilingRule(
        tiles=tuple(tile_config(tile, card.num_sms, key_bytes) for tile in tiles),
        group_size=config.num_qo_heads // num_groups,
        num_kv_heads=num_groups,
        page_size=config.page_size,
        card_times=card.model.times,
        token_bytes=model.kv_bytes,
        partial_bytes=model.partial_bytes,
        fuse_up_to=_FUSE_UP_TO if fuses else 0,
        l2_bytes=card.facts.l2_bytes,
        batch_invariant=config.batch_invariant,
    )
