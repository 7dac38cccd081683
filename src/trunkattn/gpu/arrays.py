"""The arrays of a plan on the device.

Only `Arrays.place` copies lists to the device. Without a capacity, a step gets arrays of its own size. With one,
`Arrays.reserve` makes arrays that hold any step of the capacity, and launches of fixed size for a CUDA graph.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from trunkattn.gpu.cards import Card
from trunkattn.gpu.kernel import Kernels, Work
from trunkattn.gpu.launch_order import Launch, LaunchOrder
from trunkattn.gpu.layer import Geometry, Tensors
from trunkattn.gpu.tiles import GpuTile, MergeTile, PrefillTile
from trunkattn.gpu.workspace import counted, counted_zeros
from trunkattn.planner.work_list import (
    ITEM_COLUMNS,
    QUERY_END,
    QUERY_START,
    SEGMENT_COLUMNS,
    ChunkLimits,
    ChunkList,
    TileLimits,
    TileList,
)

Int32Array = NDArray[np.int32]


@dataclass(frozen=True)
class Packed:
    """Arrays of `sizes` int32 on the device, one after the other in `flat`."""

    flat: torch.Tensor
    sizes: dict[str, int]

    @cached_property
    def arrays(self) -> dict[str, torch.Tensor]:
        """The arrays by name: views of `flat`."""
        return dict(zip(self.sizes, self.flat.split(list(self.sizes.values())), strict=True))

    @cached_property
    def _begins(self) -> list[int]:
        return list(accumulate(self.sizes.values(), initial=0))

    def send(self, host: dict[str, Int32Array]) -> None:
        """Fills the first arrays with those of `host`, which are in the same order, by one copy that ends with the
        last."""
        last = list(host)[-1]
        used = self._begins[len(host) - 1] + host[last].size
        staging = torch.empty(used, dtype=torch.int32, pin_memory=self.flat.is_cuda, device="cpu")
        flat = staging.numpy()
        for begin, array in zip(self._begins, host.values(), strict=False):
            flat[begin : begin + array.size] = array.ravel()
        self.flat[:used].copy_(staging, non_blocking=True)


@dataclass(frozen=True)
class ChunkArrays(Packed):
    """A ChunkList on the device. table_stride: columns of its block table. num_ctas: of its launch."""

    tile: PrefillTile
    num_kv_heads: int
    table_stride: int
    num_ctas: int

    def fill(self, chunks: ChunkList) -> None:
        """Sends prompt chunks to the device."""
        self.send(_chunk_arrays(chunks, self.table_stride, self.num_kv_heads, self.num_ctas))


@dataclass(frozen=True)
class GpuPlan(Packed):
    """A tile list on the device, the work items of prompt chunks if the plan can have any, and the launches of both.

    The array `overlapped` [3] is first, last and the most queries of one of the items [first, last) that are
    co-scheduled with the chunks. They are of the lowest tile, merge nothing, and are in no bucket of `counts`. The
    range is empty unless the plan has a launch of `Work.BOTH`.

    Attributes:
        launches: the launches in their order.
        tiles, merge_tile: the tiles that the launches compute.
        streams: whether independent launches run on separate streams (PAT §6).
        chunks: the arrays of prompt chunks; None if the plan cannot have any.
        summary: [3] int64: the number of the chosen candidate, KV tokens that its tiles read, and KV tokens without
            sharing. Only for lists that were made on the device.
        bound: layer key -> the launches bound for such layers (`gpu.launch`).
        unreadable: the reasons why a kernel could not read some layers, each once.
    """

    launches: tuple[Launch, ...]
    geometry: Geometry
    card: Card
    tiles: tuple[GpuTile, ...]
    merge_tile: MergeTile
    streams: bool = False
    chunks: ChunkArrays | None = None
    summary: torch.Tensor | None = None
    bound: dict[Hashable, Callable[[Tensors], None]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    unreadable: dict[str, None] = field(default_factory=dict, repr=False, compare=False)

    def without_chunks(self) -> "GpuPlan":
        """Returns a plan in the same arrays, without the launch that computes prompt chunks."""
        decodes = tuple(launch for launch in self.launches if launch.work not in (Work.PREFILL, Work.BOTH))
        return replace(self, launches=decodes, chunks=None)

    @cached_property
    def only_chunks(self) -> "GpuPlan":
        """A plan in the same arrays, with only the launch that computes prompt chunks."""
        return replace(self, launches=tuple(each for each in self.launches if each.work in (Work.PREFILL, Work.BOTH)))

    def forget_tiles(self) -> None:
        """Removes all rows of tiles, on the current stream, from a plan that is filled on the device."""
        assert self.summary is not None
        self.arrays["counts"].zero_()
        self.summary.zero_()

    def forget_chunks(self) -> None:
        """Removes the prompt chunks and the items that overlap them, on the current stream, from a plan that is filled
        on the device."""
        if self.chunks:
            self.arrays["chunk_count"].zero_()
            self.arrays["overlapped"].zero_()


class Lists(NamedTuple):
    """The lists that fill a plan. positions [num_query_tokens]: each query token's place in its sequence.
    num_overlapped: number of items of the first bucket that are co-scheduled with the chunks."""

    tiles: TileList
    positions: Int32Array
    chunks: ChunkList | None = None
    num_overlapped: int = 0


class Arrays:
    """Puts lists on a device, for the kernels of an attention."""

    def __init__(self, kernels: Kernels, card: Card, device: torch.device, streams: bool = False) -> None:
        """Makes arrays on a device. streams: independent launches run on separate streams (PAT §6)."""
        self._kernels, self._card, self._device, self._streams = kernels, card, device, streams
        self._order = LaunchOrder(kernels, card, streams)

    def place(self, lists: Lists, geometry: Geometry, into: GpuPlan | None = None) -> GpuPlan:
        """Starts the copy of lists to the device. into: a reserved plan with room for them, whose captured launches
        then read them; None: new arrays.

        Raises:
            OverflowError: the lists are longer than kernels count.
        """
        host = _tile_arrays(lists)
        if into is None:
            into = self._of_size(lists, host, geometry)
        if lists.chunks:
            assert into.chunks
            into.chunks.fill(lists.chunks)
        into.send(host)
        return into

    def _of_size(self, lists: Lists, host: dict[str, Int32Array], geometry: Geometry) -> GpuPlan:
        counts = np.diff(host["counts"][:-1])
        merged = len(lists.tiles.merge_queries) * geometry.num_qo_heads
        launches = self._order.decodes(counts, geometry.num_kv_heads, self._merge_early(lists))
        if num_merges := self._kernels.merge_tile.most_tasks(merged):
            launches.append(self._order.merge(num_merges))
        chunks = None
        if lists.chunks:
            overlapped = lists.num_overlapped > 0
            chunks = self._chunks_of_size(lists.chunks, geometry, overlapped)
            order = self._order
            launches.insert(0, order.chunks_and_decodes() if overlapped else order.chunks(chunks.num_ctas))
        sizes = {name: aligned(array.size) for name, array in host.items()}
        flat = torch.empty(counted(sum(sizes.values())), dtype=torch.int32, device=self._device)
        return self._plan(flat, sizes, launches, geometry, chunks)

    @torch.inference_mode(False)
    def reserve(self, limits: TileLimits, geometry: Geometry, chunk_limits: ChunkLimits | None = None) -> GpuPlan:
        """An empty plan with room for any tile list and any prompt chunks within the limits. Its launches have fixed
        sizes. Items of such a plan may merge only what taller tiles leave, and nothing with streams."""
        sizes = {
            "counts": 2 * len(self._kernels.tiles) + 2,
            "chunk_count": 1,
            "overlapped": 3,
            "positions": limits.query_tokens,
            "items": limits.items * ITEM_COLUMNS,
            "queries": limits.queries,
            "partial_slots": limits.queries,
            "merge_slots": 2 * limits.queries,
            "merge_queries": limits.merged,
            "merge_ranges": 2 * limits.merged,
            "segments": SEGMENT_COLUMNS * limits.segments,
        }
        sizes = {name: aligned(size) for name, size in sizes.items()}
        order, chunks = self._order, None
        launches = [*order.reserved_decodes(), order.merge()]
        if chunk_limits:
            chunks = self._reserve_chunks(chunk_limits, geometry)
            launches.insert(0, order.chunks_and_decodes() if self._kernels.both else order.chunks(chunks.num_ctas))
        flat = counted_zeros((sum(sizes.values()),), torch.int32, self._device)
        summary = torch.zeros(3, dtype=torch.int64, device=self._device)
        return self._plan(flat, sizes, launches, geometry, chunks, summary)

    def _plan(
        self,
        flat: torch.Tensor,
        sizes: dict[str, int],
        launches: list[Launch],
        geometry: Geometry,
        chunks: ChunkArrays | None,
        summary: torch.Tensor | None = None,
    ) -> GpuPlan:
        return GpuPlan(
            flat=flat,
            sizes=sizes,
            launches=tuple(launches),
            geometry=geometry,
            card=self._card,
            tiles=self._kernels.tiles,
            merge_tile=self._kernels.merge_tile,
            streams=self._streams,
            chunks=chunks,
            summary=summary,
        )

    def _merge_early(self, lists: Lists) -> bool:
        """Whether items that merge can share a launch with other items of their tile: this holds if nothing that they
        merge is computed in that launch or at the same time."""
        return lists.tiles.merges_taller and not self._streams and not lists.num_overlapped

    def _prefill_tile(self, window: int) -> PrefillTile:
        assert self._kernels.prefill_tile
        return self._kernels.prefill_tile.under(window)

    def _chunks_of_size(self, chunks: ChunkList, geometry: Geometry, overlapped: bool) -> ChunkArrays:
        """Room for these prompt chunks. With a persistent tile, or if decodes overlap, a CTA computes one item after
        the other and loads ahead; otherwise each item and KV head has its own CTA."""
        tile, num_sms = self._prefill_tile(geometry.window), self._card.num_sms
        columns = -(-chunks.block_table.shape[1] // 16) * 16  # or another variant is compiled
        num_ctas = len(chunks.items) * geometry.num_kv_heads
        if overlapped:
            num_ctas = num_sms
        elif tile.persistent:
            num_ctas = min(num_ctas, num_sms * tile.ctas_per_sm)
        host = _chunk_arrays(chunks, columns, geometry.num_kv_heads, num_ctas)
        sizes = {name: aligned(array.size) for name, array in host.items()}
        flat = torch.empty(counted(sum(sizes.values())), dtype=torch.int32, device=self._device)
        return ChunkArrays(
            flat, sizes, tile=tile, num_kv_heads=geometry.num_kv_heads, table_stride=columns, num_ctas=num_ctas
        )

    def _reserve_chunks(self, limits: ChunkLimits, geometry: Geometry) -> ChunkArrays:
        """Room for any prompt chunks within the limits. Its positions: those of their query tokens, on their way to the
        plan's."""
        sizes = {
            "items": limits.items * ITEM_COLUMNS,
            "queries": limits.queries,
            "partial_slots": limits.queries,
            "positions": limits.queries,
            "block_table": limits.rows * limits.columns,
        }
        sizes = {name: aligned(size) for name, size in sizes.items()}
        tile = self._prefill_tile(geometry.window)
        flat = counted_zeros((sum(sizes.values()),), torch.int32, self._device)
        num_ctas = self._card.num_sms * tile.ctas_per_sm
        return ChunkArrays(
            flat, sizes, tile=tile, num_kv_heads=geometry.num_kv_heads, table_stride=limits.columns, num_ctas=num_ctas
        )


def aligned(size: int) -> int:
    """Numbers of 4 bytes in whole 16 bytes."""
    return -(-size // 4) * 4


def _tile_arrays(lists: Lists) -> dict[str, Int32Array]:
    """The arrays that kernels read. The segment list, which is the longest, is the last. counts: where each bucket
    begins, then the number of merged queries."""
    tiles, num_overlapped = lists.tiles, lists.num_overlapped
    counts = np.empty(len(tiles.counts) + 1, np.int32)
    counts[:-1], counts[-1] = tiles.counts, len(tiles.merge_queries)
    counts[0] += num_overlapped
    overlapped = tiles.items[:num_overlapped]
    most = int((overlapped[:, QUERY_END] - overlapped[:, QUERY_START]).max()) if num_overlapped else 0
    return {
        "counts": counts,
        "chunk_count": np.array([len(lists.chunks.items) if lists.chunks else 0], np.int32),
        "overlapped": np.array([0, num_overlapped, most], np.int32),
        "positions": lists.positions,
        "items": tiles.items,
        "queries": tiles.queries,
        "partial_slots": tiles.partial_slots,
        "merge_slots": tiles.merge_slots,
        "merge_queries": tiles.merge_queries,
        "merge_ranges": tiles.merge_ranges,
        "segments": tiles.segments,
    }


def _chunk_arrays(chunks: ChunkList, columns: int, num_kv_heads: int, num_ctas: int) -> dict[str, Int32Array]:
    """The arrays of prompt chunks that kernels read. The block table, padded to `table_stride` columns, is the last."""
    table = np.zeros((len(chunks.block_table), columns), np.int32)
    table[:, : chunks.block_table.shape[1]] = chunks.block_table
    return {
        "items": even_rounds(chunks.items, num_kv_heads, num_ctas),
        "queries": chunks.queries,
        "partial_slots": chunks.partial_slots,
        "positions": np.zeros(0, np.int32),  # the plan's own are sent with it
        "block_table": table,
    }


def even_rounds(items: Int32Array, num_kv_heads: int, num_ctas: int) -> Int32Array:
    """Orders the items of prompt chunks, heaviest first, so that CTAs end at about the same time.

    A task is an item and a KV head. CTAs take the tasks of the first item, then those of the next: a round is one task
    for each CTA, forwards and backwards in turn. The last round, if it is not full, goes forwards. If the one before it
    did so too, the CTAs with the heaviest tasks would get the last ones, so those are listed lightest first.
    """
    full, left = divmod(len(items) * num_kv_heads, num_ctas)
    if full % 2 == 0 or left == 0:
        return items
    begin = full * num_ctas // num_kv_heads
    return np.concatenate([items[:begin], items[begin:][::-1]])
