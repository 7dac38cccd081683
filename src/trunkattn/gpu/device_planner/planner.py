"""The planner's twin on a GPU (PAT §5.1, §5.2): fills a reserved plan from tensors on the device.

`DevicePlanner.fill` writes the same bits as the host's `planner.tiles.step.TiledStep.emit` and
`gpu.arrays.Arrays.place` do for the tiling that the host predicts to be the fastest. It reads nothing back and makes
the same launches for every batch, so a CUDA graph of them plans whatever its tensors hold when it is replayed.
"""

from functools import cached_property
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch

from trunkattn.config import Capacity
from trunkattn.gpu.arrays import GpuPlan
from trunkattn.gpu.cards import Card
from trunkattn.gpu.compiling import launch
from trunkattn.gpu.device_planner import common, cost, items, layout, prefix_forest, tile_list
from trunkattn.gpu.device_planner.candidates import Candidates, sizes_of
from trunkattn.gpu.device_planner.common import EntryArrays, Limits, Status, Tables
from trunkattn.gpu.device_planner.prefix_forest import Links
from trunkattn.gpu.layer import Pdl
from trunkattn.gpu.workspace import counted_zeros
from trunkattn.planner.tiles.layout import Stage
from trunkattn.planner.work_list import TileLimits

ERRORS: Final = MappingProxyType(
    {
        common.BAD_QUERIES.value: "query_start_loc is not ascending from 0, or has more tokens than the sequence or "
        "the capacity: these requests were left out",
        common.LONG_SEQUENCE.value: "a sequence is longer than its row of block_table: it was cut short",
        common.BAD_PAGE.value: "block_table holds a page outside the cache: another page was read",
        common.MANY_ITEMS.value: "more items than the plan holds",
        common.MANY_SEGMENTS.value: "more segments than the plan holds",
        common.MANY_QUERIES.value: "more queries than the plan holds",
        common.MANY_SLOTS.value: "more partial results than the plan holds",
    }
)
# A row's link is one int64: see `prefix_forest`
MOST_ROWS: Final = prefix_forest.ALL_ROWS.value
MOST_COLUMNS: Final = prefix_forest.ALL_COLUMNS.value


def errors_of(bits: int) -> list[str]:
    """Returns in words the errors that the error word of a `DevicePlanner` stands for. The list is empty if there are
    none."""
    return [text for bit, text in ERRORS.items() if bits & bit]


class _Arrays(NamedTuple):
    status: Status
    links: Links
    entries: EntryArrays
    layout: layout.Layout
    choice: cost.ChoiceArrays


class DevicePlanner:
    """Buffers for batches within a capacity, and the launches that plan one.

    errors [1] int32 on the device: everything that was wrong with any batch so far (`errors_of`). The caller resets it.
    """

    def __init__(
        self,
        candidates: Candidates,
        capacity: Capacity,
        limits: TileLimits,
        card: Card,
        device: torch.device,
    ) -> None:
        """Reserves the planner's buffers. limits: the limits with which the plans are reserved."""
        self._capacity, self._card, self._device = capacity, card, device
        self._limits = Limits(
            num_pages=capacity.num_pages,
            max_query_len=capacity.max_query_len or capacity.max_query_tokens,
            items=limits.items,
            segments=limits.segments,
            queries=limits.queries,
            merged=limits.merged,
            slots=limits.slots,
        )
        self._sizes = sizes_of(candidates, capacity)
        self._tallest = max((Stage(*each) for each in candidates.stages.tolist()), key=lambda stage: stage.height)
        self._num_tiles = int((-(-capacity.max_query_tokens // candidates.stages[:, 0])).sum())
        self._stages = torch.from_numpy(candidates.stages.astype("int32")).to(device)
        self._launches = torch.from_numpy(candidates.launches.astype("int32")).to(device)
        self._lowest = torch.from_numpy(candidates.lowest).to(device)
        self._every = torch.ones_like(self._lowest)
        tiles = torch.from_numpy(candidates.costs.tiles.astype("int32")).to(device)
        self._costs = candidates.costs._replace(tiles=tiles)  # type: ignore[arg-type]  # as kernels take it
        self._buffers = self._allocate()
        self.errors = self._buffers["errors"]

    def _allocate(self) -> dict[str, torch.Tensor]:
        sizes, capacity = self._sizes, self._capacity
        rows, tokens, stages, candidates = sizes.rows, sizes.tokens, sizes.stages, sizes.candidates
        int32: dict[str, tuple[int, ...]] = {
            "subtree_queries": (rows,),
            "counts": (len(common.Counts._fields),),
            "errors": (1,),
            "entry_token": (tokens,),
            "entry_position": (tokens,),
            "entry_row": (tokens,),
            "entry_length": (tokens,),
            "entry_shared": (tokens,),
            "partials": (common.NUM_PARTIALS.value, tokens),
            "nodes": (stages, layout.NODE_FIELDS.value, 2 * tokens),
            "tiles": (stages, layout.TILE_FIELDS.value, tokens),
            "num_items": (candidates, 2),
            "target": (candidates, 2),
            "item_starts": (candidates, 2, tokens),
            "leads": (candidates, 2, tokens),
            "items": (items.ITEM_FIELDS.value, self._limits.items),
        }
        int64: dict[str, tuple[int, ...]] = {
            "hashes": (capacity.max_pages_per_request, rows),
            "links": (rows,),
            "totals": (stages, layout.TOTAL_FIELDS.value),
            "times": (candidates, 2),
        }
        return {
            name: counted_zeros(shape, dtype, self._device)
            for dtype, shapes in ((torch.int32, int32), (torch.int64, int64))
            for name, shape in shapes.items()
        }

    @property
    def num_pages(self) -> int:
        """The number of pages of the cache."""
        return self._capacity.num_pages

    @property
    def times(self) -> torch.Tensor:
        """The predicted time of each candidate in the last batch: [candidates] int64, in ns, at least 2**61 where the
        candidate may not fit."""
        return self._buffers["times"].sum(1)

    def fill(
        self,
        plan: GpuPlan,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        query_start_loc: torch.Tensor,
        window: int,
        lowest_tile: bool = False,
    ) -> None:
        """Plans a step into a plan reserved with the same limits, on the current stream of the device.

        block_table [rows, columns], seq_lens [rows], query_start_loc [rows + 1], all int32 and contiguous in their last
        dimension, rows at most the capacity's; rows without query tokens are padding. Columns beyond the capacity's are
        not looked at. Values are clamped to the capacity and flagged in `errors`. lowest_tile: only the
        tilings of the lowest tile by itself are considered.

        Raises:
            TypeError: if a tensor is not int32.
            ValueError: if a tensor has another shape, stride or device.
        """
        self.check(block_table, seq_lens, query_start_loc)
        tables = Tables(block_table, seq_lens, query_start_loc)
        self._forest(plan, tables, window)
        self._choose(window, lowest_tile)
        self._emit(plan, tables, window)

    def check(self, block_table: torch.Tensor, seq_lens: torch.Tensor, query_start_loc: torch.Tensor) -> None:
        """Raises what `fill` does."""
        rows = block_table.shape[0] if block_table.ndim == 2 else 0
        expected = {
            "block_table": (block_table, block_table.ndim == 2 and rows <= self._capacity.max_requests),
            "seq_lens": (seq_lens, seq_lens.shape == (rows,)),
            "query_start_loc": (query_start_loc, query_start_loc.shape == (rows + 1,)),
        }
        for name, (tensor, fits) in expected.items():
            if tensor.dtype != torch.int32:
                raise TypeError(f"{name} of {tensor.dtype}: expected torch.int32")
            if not fits:
                shape = f"at most {self._capacity.max_requests} rows, one each, query_start_loc one more"
                raise ValueError(f"{name} of shape {tuple(tensor.shape)}: expected {shape}")
            if tensor.device != self.errors.device or (tensor.numel() and tensor.stride(-1) != 1):
                found = f"on {tensor.device} with strides {tensor.stride()}"
                raise ValueError(f"{name} {found}: expected contiguous rows on {self._device}")

    @cached_property
    def _arrays(self) -> _Arrays:
        """Returns the buffers as the kernels take them."""
        b = self._buffers
        return _Arrays(
            Status(b["counts"], b["errors"]),
            Links(b["links"], b["subtree_queries"]),
            EntryArrays(*(b[f"entry_{name}"] for name in EntryArrays._fields)),
            layout.Layout(b["nodes"], b["tiles"], b["totals"]),
            cost.ChoiceArrays(
                launches=self._launches,
                allowed=self._every,
                times=b["times"],
                num_items=b["num_items"],
                target=b["target"],
                item_starts=b["item_starts"],
                leads=b["leads"],
            ),
        )

    def _forest(self, plan: GpuPlan, tables: Tables, window: int) -> None:
        """Finds the hashes, links and entries of the rows."""
        b, arrays, sizes, limits = self._buffers, self._arrays, self._sizes, self._limits
        num_rows, num_columns, row_stride = len(tables.block_table), self._columns(tables), tables.block_table.stride(0)
        launch(prefix_forest.hash_kernel, (sizes.rows + 1,))(
            *(tables, num_rows, num_columns, row_stride, window, b["hashes"], b["partials"], b["totals"]),
            *(arrays.status, limits),
            SIZES=sizes,
            num_warps=8,
            **self._pdl(wait=False),
        )
        launch(prefix_forest.links_kernel, (sizes.rows,))(
            *(tables, num_rows, num_columns, b["hashes"], arrays.links, limits),
            SIZES=sizes,
            num_warps=max(1, sizes.pairs // (32 if sizes.pairs <= 256 else 64)),
            **self._pdl(),
        )
        launch(prefix_forest.entries_kernel, (sizes.rows,))(
            *(tables, num_rows, num_columns, row_stride, arrays.links, arrays.entries, plan.arrays["positions"]),
            limits,
            SIZES=sizes,
            num_warps=8,
            **self._pdl(),
        )

    def _choose(self, window: int, lowest_tile: bool) -> None:
        """Finds the tiles of every stage and the time of every candidate that may be chosen."""
        arrays, sizes = self._arrays, self._sizes
        choice = arrays.choice._replace(allowed=self._lowest) if lowest_tile else arrays.choice
        launch(layout.tiles_kernel, (self._num_tiles,))(
            *(arrays.entries, arrays.status, self._stages, arrays.layout, window),
            SIZES=sizes,
            num_warps=min(16, max(4, sizes.nodes // 8)),
            **self._pdl(),
        )
        launch(cost.candidates_kernel, (sizes.candidates, 2))(
            *(self._costs, arrays.layout, arrays.status, choice, self._limits),
            SIZES=sizes,
            num_warps=8,
            **self._pdl(),
        )

    def _emit(self, plan: GpuPlan, tables: Tables, window: int) -> None:
        """Writes the items and the plan's arrays."""
        arrays, sizes, limits = self._arrays, self._sizes, self._limits
        tiled = items.TiledBatch(arrays.entries, arrays.status, arrays.layout, arrays.choice)
        work = items.WorkArrays(self._buffers["items"], self._buffers["partials"], plan.summary)
        # Batches that share have fewer items than the device has SMs.
        num_ctas = min(limits.items, self._card.num_sms * min(8, -(-sizes.tokens // 256)))
        launch(items.items_kernel, (num_ctas,))(
            *(tables, len(tables.block_table), self._columns(tables), window, tiled, work, limits),
            SIZES=sizes,
            **self._pdl(),
        )
        # With 4 warps and 168 registers all CTAs run at once; without a limit the compiler aims at 128 and spills.
        # With 8 warps, for groups of one head, they take turns.
        warps = max(4, sizes.nodes // 16)
        lists = tile_list.PlanArrays(*(plan.arrays[name] for name in tile_list.PlanArrays._fields))
        launch(tile_list.lists_kernel, (max(4, 3 * self._card.num_sms),))(
            *(tables, tables.block_table.stride(0), tiled, work, lists, limits),
            SIZES=sizes,
            num_warps=warps,
            maxnreg=168 if warps == 4 else 255,
            **self._pdl(trigger=False),
        )

    def _columns(self, tables: Tables) -> int:
        """Returns how many columns of the block table are looked at."""
        columns: int = tables.block_table.shape[1]
        return min(columns, self._capacity.max_pages_per_request)

    def _pdl(self, trigger: bool = True, wait: bool = True) -> dict[str, Any]:
        """Returns how a launch follows the one ahead of it: where the card can, it starts before that one ends, and
        waits for it."""
        trigger, wait = trigger and self._card.has_pdl, wait and self._card.has_pdl
        return {"PDL": Pdl(trigger, wait)} | ({"launch_pdl": True} if wait else {})
