"""Which kernels and tiles compute an attention on a card, and why the portable ones where they do: in words for
`PlanStats.reason` and `trunkattn doctor`. Triton is not imported here."""

from dataclasses import replace
from typing import Final, NamedTuple

from trunkattn.config import AttentionConfig
from trunkattn.gpu.tuning.cards import Card
from trunkattn.gpu.tuning.decode import GpuTile, decode_tiles, hopper_tiles, invariant_tiles, without_subtiles
from trunkattn.gpu.tuning.prefill import PrefillTile, prefill_tile
from trunkattn.planner.work_list import PlanStats

_HOPPER: Final = 90  # compute capability of the cards that have kernels of their own


class WhyPortable(NamedTuple):
    """Reasons; empty: the fast kernel computes it. prompts: of prompt chunks."""

    decodes: tuple[str, ...]
    prompts: tuple[str, ...]


def why_portable(config: AttentionConfig, card: Card, capability: int) -> WhyPortable:
    """The reasons for an attention on a card of a compute capability, such as 90 for 9.0."""
    if capability != _HOPPER:
        reason = (f"compute capability {capability // 10}.{capability % 10}: the fast kernels are for 9.0",)
        return WhyPortable(reason, reason)
    decodes, prompts = card.why_portable_decodes(config), card.why_portable_prompts(config)
    if config.execution == "streams":  # for comparisons: PAT's launches side by side
        decodes.append("execution='streams': expected 'auto', 'serial' or 'overlapped'")
    if config.batch_invariant:  # all are rows of tiles
        prompts = decodes
    return WhyPortable(tuple(decodes), tuple(prompts))


def told(stats: PlanStats, reasons: tuple[str, ...]) -> PlanStats:
    """With the reasons, if there are any, behind that of the plan."""
    return replace(stats, reason=f"{stats.reason}; portable kernel: {', '.join(reasons)}") if reasons else stats


def choose_tiles(config: AttentionConfig, card: Card, capability: int) -> tuple[GpuTile, ...]:
    """The decode tiles of an attention on a card, ascending heights."""
    width, group_size = max(config.head_dim, config.value_dim), config.num_qo_heads // config.num_kv_heads
    hopper = None
    if not why_portable(config, card, capability).decodes:
        hopper = hopper_tiles(config.tile_itemsize, config.head_dim, config.page_size)
    tiles = decode_tiles(config.tile_itemsize, width, group_size, hopper, capability)
    if config.batch_invariant:
        return invariant_tiles(config.tile_itemsize, width, tiles, capability)
    return tiles if config.policy == "auto" else without_subtiles(tiles)


def choose_chunk_tile(config: AttentionConfig, card: Card, capability: int) -> PrefillTile:
    """The tile of prompt chunks of an attention on a card."""
    width = max(config.head_dim, config.value_dim)
    on_hopper = not why_portable(config, card, capability).prompts
    return prefill_tile(config.tile_itemsize, width, on_hopper, capability)
