"""Tile lists that no policy made: their rule, how to run one, and the bytes that one is planned to move."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.kernels.decode import PAGE_SIZE, Case, Run
from benchmarks.workloads import PagedBatch
from trunkattn.gpu.arrays import Arrays, Lists
from trunkattn.gpu.cards import card_at
from trunkattn.gpu.kernel import Choice, Kernels, Work, kernel_named, portable_kernel
from trunkattn.gpu.launch import execute
from trunkattn.gpu.layer import Geometry, Tensors
from trunkattn.gpu.portable.spec import merge_tile
from trunkattn.gpu.tiles import GpuTile, tile_config
from trunkattn.planner.device import CardTimes
from trunkattn.planner.planner import StepTables
from trunkattn.planner.prefix_forest import Forest, build_forest
from trunkattn.planner.tiles.candidates import Tiling, TilingRule
from trunkattn.planner.tiles.step import TiledStep
from trunkattn.planner.work_list import UNLIMITED, TileList


@dataclass(frozen=True)
class PlannedBytes:
    """Bytes of one layer.

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
    times: CardTimes,
    kv_itemsize: int = 2,
) -> TilingRule:
    """The rule of `BatchAttention` without options. heads: query heads, KV heads, head_dim; card: SMs and bytes of
    the L2 cache."""
    (hq, hkv, dim), (num_sms, l2_bytes) = heads, card
    return TilingRule(
        tiles=tuple(tile_config(tile, num_sms) for tile in tiles),
        group_size=hq // hkv,
        num_kv_heads=hkv,
        page_size=PAGE_SIZE,
        card_times=times,
        token_bytes=hkv * 2 * dim * kv_itemsize,
        partial_bytes=hq * (dim + 1) * 8,
        fuse_up_to=8,
        l2_bytes=l2_bytes,
    )


def rule_on_card(case: Case, tiles: tuple[GpuTile, ...]) -> TilingRule:
    """The rule for a batch on the card that holds it."""
    card = card_at(case.q.device)
    size = (card.num_sms, card.facts.l2_bytes)
    return tile_rule(tiles, case.heads, size, card.model.times, case.kv[0][0].itemsize)


def arrays_of(batch: PagedBatch) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """block_table, seq_lens, query_start_loc."""
    return batch.block_table, batch.seq_lens, batch.query_start_loc


def list_tiles(batch: PagedBatch, rule: TilingRule, tiling: Tiling) -> TileList:
    """A batch tiled one way."""
    table, lens, starts = arrays_of(batch)
    forest = Forest(*build_forest(table, lens, batch.query_lens, rule.page_size, 1))
    return TiledStep(rule, forest, StepTables(table, lens, starts)).emit(tiling)


def make_run(case: Case, rule: TilingRule, listed: TileList, tiles: tuple[GpuTile, ...]) -> Run:
    """A decode batch through a tile list made with `rule`, whose tiles are `tiles`; out is NaN where nothing writes."""
    hq, hkv, dim = case.heads
    device = case.q.device
    geometry = Geometry(
        hq, hkv, dim, dim, rule.page_size, rule.segment_size, UNLIMITED, masked=False, soft_cap=None, sinks=False
    )
    positions = StepTables(*arrays_of(case.batch)).query_positions
    decode = Choice(kernel_named(tiles[-1].kernel), {})
    kernels = Kernels(
        decode=decode,
        prefill=None,
        both=None,
        tiles=tiles,
        prefill_tile=None,
        merge=portable_kernel(Work.MERGE),
        merge_tile=merge_tile(hq, dim),
    )
    arrays = Arrays(kernels, card_at(device), device)
    plan = arrays.place(Lists(listed, positions), geometry)
    slots = max(1, listed.num_slots)
    partial, partial_lse = torch.empty(slots, hq, dim, device=device), torch.empty(slots, hq, device=device)
    ones = torch.ones(hkv, device=device)
    scale, out = ones * (math.log2(math.e) / math.sqrt(dim)), torch.full_like(case.q, math.nan)

    def run(copy: int) -> torch.Tensor:
        tensors = Tensors(case.q, *case.kv[copy], out, partial_lse, partial, partial_lse, scale, ones, ones)
        execute(plan, tensors, return_lse=False)
        return out

    return run


def planned_bytes(case: Case, listed: TileList) -> PlannedBytes:
    """Bytes of a tile list of the batch."""
    hq, hkv, dim = case.heads
    tokens = listed.segments[:, 1].astype(np.int64) >> 16
    ends = np.cumsum(tokens)
    places = np.repeat(listed.segments[:, 0] - (ends - tokens), tokens) + np.arange(tokens.sum())
    read = np.zeros(case.batch.num_pages * case.batch.page_size, np.bool_)
    read[places] = True
    token_bytes = sum(cache.itemsize * hkv * dim for cache in case.kv[0])
    states = int((listed.partial_slots >= 0).sum())
    return PlannedBytes(
        kv_memory=int(read.sum()) * token_bytes,
        kv_tiles=int(tokens.sum()) * token_bytes,
        partials=2 * states * hq * (dim + 1) * 4,
        q_and_out=2 * case.q.nbytes,
    )
