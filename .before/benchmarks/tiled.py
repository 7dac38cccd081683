"""Tile lists that no policy made: their rule, how to run one, and the bytes that one is planned to move."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from kernels import PAGE_SIZE, Case, Run
from numpy.typing import NDArray
from trunkattn.attention_planner import tile_kind
from trunkattn.kernels import gpu
from trunkattn.kernels.tile_table import GpuLimits, GpuTile, gpu_limits
from trunkattn.plan_format import TileList
from trunkattn.planner.forest import Forest, build_forest
from trunkattn.planner.tiling import Tiling, TilingRule, query_positions, tile_forest

from trunkattn.planner.splitting import UNLIMITED
from trunkattn.workloads import PagedBatch


@dataclass(frozen=True)
class PlannedBytes:
    """Of one layer.

    kv_memory: every token that any tile reads, once: what leaves memory. kv_tiles: every token as often as tiles read
    it: what the L2 cache serves. partials: float32 states with their log-sum-exp, written and read. q_and_out: once.
    """

    kv_memory: int
    kv_tiles: int
    partials: int
    q_and_out: int


def tile_rule(
    tiles: tuple[GpuTile, ...],
    heads: tuple[int, int, int],
    card: tuple[int, int],
    limits: GpuLimits,
    kv_itemsize: int = 2,
) -> TilingRule:
    """The rule of `BatchAttention` without options. heads: query heads, KV heads, head_dim; card: multiprocessors and
    bytes of the L2 cache."""
    (hq, hkv, dim), (processors, l2_bytes) = heads, card
    kinds = tuple(
        tile_kind(tile, processors)
        for tile in tiles
    )  # fmt: skip
    return TilingRule(
        kinds=kinds,
        group_size=hq // hkv,
        num_kv_heads=hkv,
        page_size=PAGE_SIZE,
        launch_ns=limits.launch_ns,
        bytes_per_us=limits.bytes_per_us,
        head_bytes=2 * dim * kv_itemsize,
        partial_bytes=hq * (dim + 1) * 8,
        fuse_up_to=8,
        l2_bytes=l2_bytes,
    )


def rule_on_card(case: Case, tiles: tuple[GpuTile, ...]) -> TilingRule:
    """The rule for a batch on the card that holds it."""
    properties = torch.cuda.get_device_properties(case.q.device)
    limits = gpu_limits(properties.name)
    card = properties.multi_processor_count, properties.L2_cache_size
    return tile_rule(tiles, case.heads, card, limits, case.kv[0][0].itemsize)


def arrays_of(batch: PagedBatch) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """block_table, seq_lens, query_start_loc."""
    return batch.block_table, batch.seq_lens, batch.query_start_loc


def list_tiles(batch: PagedBatch, rule: TilingRule, way: Tiling) -> TileList:
    """A batch tiled one way."""
    table, lens, _ = arrays_of(batch)
    forest = Forest(*build_forest(table, lens, batch.query_lens, rule.page_size, 1))
    return tile_forest(rule, way, forest, arrays_of(batch), UNLIMITED)


def make_run(
    case: Case, rule: TilingRule, listed: TileList, tiles: tuple[GpuTile, ...], execution: str = "serial"
) -> Run:
    """A decode batch through a tile list made with `rule`, whose kinds are `tiles`; out is NaN where nothing writes."""
    hq, hkv, dim = case.heads
    device, properties = case.q.device, torch.cuda.get_device_properties(case.q.device)
    hopper = (properties.major, properties.minor) == (9, 0)
    card = gpu.Card(properties.multi_processor_count, overlaps=properties.major >= 9, hopper=hopper)
    geometry = gpu.Geometry(
        hq, hkv, dim, dim, rule.page_size, rule.run, UNLIMITED, masked=False, soft_cap=None, sinks=False
    )
    positions = query_positions(*arrays_of(case.batch)[1:])
    plan = gpu.upload(listed, positions, geometry, card, execution, device)
    slots = max(1, listed.num_slots)
    partial, partial_lse = torch.empty(slots, hq, dim, device=device), torch.empty(slots, hq, device=device)
    ones, counters = torch.ones(hkv, device=device), torch.zeros(2, dtype=torch.int32, device=device)
    scale, out = ones * (math.log2(math.e) / math.sqrt(dim)), torch.full_like(case.q, math.nan)

    def run(copy: int) -> torch.Tensor:
        tensors = gpu.Tensors(
            case.q, *case.kv[copy], out, partial_lse, partial, partial_lse, scale, ones, ones, counters
        )
        gpu.execute(plan, tensors, tiles, card, return_lse=False)
        return out

    return run


def planned_bytes(case: Case, listed: TileList) -> PlannedBytes:
    """Of a tile list of the batch."""
    hq, hkv, dim = case.heads
    tokens = listed.runs[:, 1].astype(np.int64) >> 16
    ends = np.cumsum(tokens)
    places = np.repeat(listed.runs[:, 0] - (ends - tokens), tokens) + np.arange(tokens.sum())
    read = np.zeros(case.batch.num_pages * case.batch.page_size, np.bool_)
    read[places] = True
    token_bytes = sum(cache.itemsize * hkv * dim for cache in case.kv[0])
    states = int((listed.slots >= 0).sum())
    return PlannedBytes(
        kv_memory=int(read.sum()) * token_bytes,
        kv_tiles=int(tokens.sum()) * token_bytes,
        partials=2 * states * hq * (dim + 1) * 4,
        q_and_out=2 * case.q.nbytes,
    )
