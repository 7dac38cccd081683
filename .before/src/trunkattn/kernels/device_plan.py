"""The planner's twin on a GPU (PAT §5.1, §5.2): fills a reserved plan from tensors on the device.

`DevicePlanner.fill` gives, bit for bit, what the host gives with `planner.tiling.tile_forest` and `gpu.refill`, for the
tiling that the host predicts to be the fastest, without reading anything back, and in the same seven launches for every
batch, so that a CUDA graph that holds them plans whatever its tensors hold when it is replayed.
"""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from trunkattn.kernels import device_choice, device_items, device_lists, device_order, device_tiles
from trunkattn.kernels.gpu import Card, GpuPlan
from trunkattn.plan_format import Capacity, TileLimits

ERRORS: Final = MappingProxyType({
    device_order.BAD_QUERIES.value: "query_start_loc is not ascending from 0, or has more tokens than the sequence "
    "or the capacity: these requests were left out",
    device_order.LONG_SEQUENCE.value: "a sequence is longer than its row of block_table: it was cut short",
    device_order.BAD_PAGE.value: "block_table holds a page outside the cache: another page was read",
    device_order.MANY_ITEMS.value: "more items than the plan holds",
    device_order.MANY_RUNS.value: "more runs than the plan holds",
    device_order.MANY_QUERIES.value: "more queries than the plan holds",
    device_order.MANY_SLOTS.value: "more partial states than the plan holds",
})  # fmt: skip
# What a row hangs on is one int64: see `device_order`
MOST_ROWS: Final = device_order.ALL_ROWS.value
MOST_COLUMNS: Final = device_order.ALL_COLUMNS.value
_PAIRS: Final = 1024  # other rows that a program compares its row with at once
_RADIX: Final = 9  # parts that a round of the search over the columns tells apart
_BLOCK: Final = 512  # elements of a program's pass over rows, tiles, items or tokens
_HASHED: Final = 256  # columns of a row that are hashed at once


def errors_of(bits: int) -> list[str]:
    """What the error word of a `DevicePlanner` says; empty: nothing."""
    return [text for bit, text in ERRORS.items() if bits & bit]


@dataclass(frozen=True)
class TileWays:
    """The candidates for a step, as `planner.tiling.price` lists them; int64.

    stages [stages, 7]: fields of `planner.tiles.Stage`. uses [ways, 2, 3]: stage or -1, tile kind and num_parts. kinds
    [kinds, 8]: ns of a block and of a chained block, full and masked each; slots; percent of the bandwidth; programs of
    a multiprocessor; entries of a subtile. costs [11]: launch_ns, bytes_per_us, token_bytes, partial_bytes,
    l2_tokens, run, FILLED_NS, ALONE_PERCENT, HIDDEN_PARTS, IDLE_PERCENT, l2_percent. run: tokens of a run. fuse_up_to:
    partial states an item may merge.
    """

    stages: NDArray[np.int64]
    uses: NDArray[np.int64]
    kinds: NDArray[np.int64]
    costs: NDArray[np.int64]
    run: int
    fuse_up_to: int


@dataclass(frozen=True)
class _Sizes:
    """Constants of the kernels; powers of two but for the numbers of stages and ways."""

    stages: int
    ways: int
    nodes: int  # of a tile: two an entry
    least: int
    windows: int
    subtiles: int
    rounds: int  # of a search over the columns


def _sizes(ways: TileWays, max_pages: int) -> _Sizes:
    unlimited = device_order.BIG.value
    height, least, below = (ways.stages[:, column] for column in range(3))
    limits = [*least[least > 1].tolist(), *below[below < unlimited].tolist(), 2]
    rounds = next(n for n in range(1, 33) if _RADIX**n > max_pages)
    return _Sizes(
        stages=len(ways.stages),
        ways=len(ways.uses),
        nodes=2 * _power(int(height.max())),
        least=_power(max(limits)),
        windows=_power(int(height.max()) + max(limits)),
        subtiles=int(ways.stages[:, 5].max()),
        rounds=rounds,
    )


def _use_rows(ways: TileWays) -> NDArray[np.int64]:
    """[ways, 2, USE_COLUMNS]: a use, its stage and its kind's entries of a subtile, so that one load finds them."""
    stage, kind, _ = np.moveaxis(np.maximum(ways.uses, 0), 2, 0)
    return np.concatenate([ways.uses, ways.stages[stage], ways.kinds[kind, 7:]], 2)


def _power(size: int) -> int:
    """The power of two that holds it."""
    return 1 << (size - 1).bit_length()


class DevicePlanner:
    """Buffers for batches within a capacity, and the launches that plan one.

    errors [1] int32, on the device: what was ever wrong with a batch (`errors_of`); the caller sets it back.
    """

    def __init__(
        self,
        ways: TileWays,
        capacity: Capacity,
        limits: TileLimits,
        page_size: int,
        card: Card,
        device: torch.device,
    ) -> None:
        """limits: those that the plans were reserved with."""
        self._ways, self._capacity, self._limits = ways, capacity, limits
        self._page_size, self._card, self._device = page_size, card, device
        self._most_queries = capacity.max_query_len or capacity.max_query_tokens  # of a request
        self._sizes = _sizes(ways, capacity.max_pages_per_request)
        self._tables = {
            "stages": torch.from_numpy(ways.stages.astype(np.int32)).to(device),
            "uses": torch.from_numpy(_use_rows(ways).astype(np.int32)).to(device),
            "kinds": torch.from_numpy(ways.kinds[:, :7].astype(np.int64)).contiguous().to(device),
            "costs": torch.from_numpy(ways.costs.astype(np.int64)).to(device),
        }
        rows, tokens, sizes = capacity.max_requests, capacity.max_query_tokens, self._sizes
        shapes: dict[str, tuple[int, ...]] = {
            "family": (rows,), "state": (device_order.STATE_FIELDS.value,),
            "entry_token": (tokens,), "entry_position": (tokens,), "entry_row": (tokens,), "entry_length": (tokens,),
            "entry_shared": (tokens,), "pieces": (device_items.PIECE_FIELDS.value, tokens),
            "nodes": (sizes.stages, device_tiles.NODE_FIELDS.value, 2 * tokens),
            "tiles": (sizes.stages, device_tiles.TILE_FIELDS.value, tokens),
            "cuts": (sizes.ways, 2, device_choice.CUT_FIELDS.value), "item_starts": (sizes.ways, 2, tokens),
            "items": (device_items.ITEM_FIELDS.value, limits.items), "errors": (1,),
        }  # fmt: skip
        self._buffers = {
            name: torch.zeros(shape, dtype=torch.int32, device=device) for name, shape in shapes.items()
        } | {
            "hashes": torch.zeros(capacity.max_pages_per_request, rows, dtype=torch.int64, device=device),
            "hangs": torch.zeros(rows, dtype=torch.int64, device=device),
            "totals": torch.zeros(sizes.stages, device_tiles.TOTALS.value, dtype=torch.int64, device=device),
            "times": torch.zeros(sizes.ways, 2, dtype=torch.int64, device=device),
        }
        self.errors = self._buffers["errors"]

    @property
    def times(self) -> torch.Tensor:
        """[ways] int64: predicted ns of each candidate in the last batch; at least 2**61 where it may not fit."""
        return self._buffers["times"].sum(1)

    def fill(
        self,
        plan: GpuPlan,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        query_start_loc: torch.Tensor,
        window: int,
    ) -> None:
        """Plans a step into a plan reserved with the same limits, on the current stream of the device.

        block_table [rows, columns], seq_lens [rows], query_start_loc [rows + 1], all int32 and contiguous in their last
        dimension, rows at most the capacity's; rows without query tokens are padding. Columns beyond the capacity's are
        not looked at. Values are clamped to the capacity and flagged in `errors`.

        Raises:
            TypeError: if a tensor is not int32.
            ValueError: if a tensor has another shape, stride or device.
        """
        self.check(block_table, seq_lens, query_start_loc)
        batch = (block_table, seq_lens, query_start_loc)
        self._order(plan, batch, window)
        self._tile(window)
        self._list(plan, batch, window)

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
            if tensor.device != self._buffers["state"].device or (tensor.numel() and tensor.stride(-1) != 1):
                found = f"on {tensor.device} with strides {tensor.stride()}"
                raise ValueError(f"{name} {found}: expected contiguous rows on {self._device}")

    def _order(self, plan: GpuPlan, batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor], window: int) -> None:
        """Hashes, what each row hangs on, entries."""
        table, seq_lens, starts = batch
        b, capacity = self._buffers, self._capacity
        rows, tokens = capacity.max_requests, capacity.max_query_tokens
        width, most = min(table.shape[1], capacity.max_pages_per_request), self._most_queries
        bounds = (len(table), width, tokens, most)
        shape = {"PAGE_SIZE": self._page_size, "ROWS": rows}
        device_order.hash_kernel[(rows + 1,)](
            table, seq_lens, starts, b["hashes"], b["pieces"], b["totals"], b["state"], b["errors"], len(table), width,
            table.stride(0), tokens, most, capacity.num_pages, window, **shape, ENTRIES=tokens,
            TOTALS=b["totals"].numel(), BLOCK=_HASHED, num_warps=8, **self._turn(follows=False),
        )  # fmt: skip
        block = min(_power(rows), _PAIRS)
        device_order.hang_kernel[(rows,)](
            seq_lens, starts, b["hashes"], b["hangs"], b["family"], *bounds, **shape, ROUNDS=self._sizes.rounds,
            RADIX=_RADIX, BLOCK=block, num_warps=max(1, block // (32 if block <= 256 else 64)), **self._turn(),
        )  # fmt: skip
        device_order.entries_kernel[(rows,)](
            table, seq_lens, starts, b["hangs"], b["family"],
            *(b["entry_" + name] for name in ("token", "position", "row", "length", "shared")),
            plan.arrays["positions"], len(table), width, table.stride(0), tokens, most,
            PAGE_SIZE=self._page_size, ENTRIES=tokens, BLOCK=min(_power(rows), _BLOCK),
            COLUMNS=min(_power(capacity.max_pages_per_request), _BLOCK), num_warps=8, **self._turn(),
        )  # fmt: skip

    def _tile(self, window: int) -> None:
        """The tiles of every stage, and the time of every tiling."""
        b, tables, sizes = self._buffers, self._tables, self._sizes
        tokens = self._capacity.max_query_tokens
        tasks = int((-(-tokens // self._ways.stages[:, 0])).sum())
        device_tiles.tiles_kernel[(tasks,)](
            b["entry_position"], b["entry_length"], b["entry_shared"], b["state"], tables["stages"], b["nodes"],
            b["tiles"], b["totals"], window, ENTRIES=tokens, RUN=self._ways.run, NODES=sizes.nodes,
            NUM_STAGES=sizes.stages, STAGES=_power(sizes.stages), MOST_LEAST=sizes.least, WINDOWS=sizes.windows,
            MOST_SUBTILES=sizes.subtiles, num_warps=min(16, max(4, sizes.nodes // 8)), **self._turn(),
        )  # fmt: skip
        device_choice.choice_kernel[(sizes.ways, 2)](
            tables["uses"], tables["kinds"], tables["costs"], b["tiles"], b["totals"], b["state"], b["times"],
            b["cuts"], b["item_starts"], self._limits.items, self._limits.runs, self._limits.slots,
            ENTRIES=tokens, BLOCK=256, num_warps=8, **self._turn(),
        )  # fmt: skip

    def _list(self, plan: GpuPlan, batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor], window: int) -> None:
        """Items, lists."""
        table = batch[0]
        row_tokens = min(table.shape[1], self._capacity.max_pages_per_request) * self._page_size
        b, tables, sizes, limits = self._buffers, self._tables, self._sizes, self._limits
        arrays, kinds = plan.arrays, len(self._ways.kinds)
        # batches that share have fewer items than multiprocessors
        most = min(8, -(-self._capacity.max_query_tokens // 256))
        programs = min(limits.items, self._card.processors * most)
        device_items.items_kernel[(programs,)](
            *batch[1:], len(table), row_tokens, self._capacity.max_query_tokens, self._most_queries, window,
            b["entry_token"], b["state"], tables["uses"], b["nodes"], b["tiles"], b["totals"], b["times"],
            b["cuts"], b["item_starts"], b["items"], b["pieces"], b["errors"], plan.summary, limits.items,
            self._ways.fuse_up_to, kinds, ENTRIES=self._capacity.max_query_tokens, NODES=sizes.nodes,
            NUM_WAYS=sizes.ways, WAYS=_power(sizes.ways), MOST_SUBTILES=sizes.subtiles, BLOCK=_BLOCK, **self._turn(),
        )  # fmt: skip
        names = ("counts", "items", "queries", "slots", "parts", "merge_queries", "merge_ranges", "runs")
        # of 4 warps and 168 registers all programs run at once; without a limit the compiler aims at 128, and spills.
        # 8 warps, of groups of one head, take turns
        warps = max(4, sizes.nodes // 16)
        device_lists.lists_kernel[(max(4, 3 * self._card.processors),)](
            table, b["entry_token"], b["entry_row"], b["state"], tables["uses"], b["nodes"], b["items"], b["pieces"],
            b["errors"], *(arrays[name] for name in names), table.stride(0), self._capacity.num_pages, kinds,
            limits.items, limits.runs, limits.queries, limits.merged, limits.slots,
            ENTRIES=self._capacity.max_query_tokens, NODES=sizes.nodes, BUCKETS=_power(2 * kinds + 1),
            RUN=self._ways.run, PAGE_SIZE=self._page_size, BLOCK=_BLOCK,
            RUN_BLOCK=max(32, 2048 // max(32, sizes.nodes)), num_warps=warps, maxnreg=168 if warps == 4 else 255,
            **self._turn(leads=False),
        )  # fmt: skip

    def _turn(self, follows: bool = True, leads: bool = True) -> dict[str, Any]:
        """How a launch follows the one ahead of it: it starts before that one ends, where the card can, and waits."""
        follows, leads = follows and self._card.overlaps, leads and self._card.overlaps
        return {"FOLLOWS": follows, "LEADS": leads} | ({"launch_pdl": True} if follows else {})
