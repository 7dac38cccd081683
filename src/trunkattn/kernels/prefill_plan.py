"""Work items of prompt chunks on a GPU: their arrays, for `kernels.prefill`, and the order in which programs take them.

Programs take the tasks of an item, one for each KV head, then those of the next; P programs compute P tasks at a time,
a round, forwards and backwards in turn (`hopper.task_of`). Of many KV heads an item is listed for a group of heads at a
time, so that a round's keys are those of few heads.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from trunkattn.kernels.tile_table import PrefillTile
from trunkattn.plan_format import ITEM_COLUMNS, KV_END, KV_ROW, KV_START, PrefillLimits, PrefillList

FIRST_HEAD: Final = ITEM_COLUMNS  # one column more, of items that are listed for groups of heads
_MOST_IN_TURN: Final = 8  # heads of a group: of one head at a time all programs would read the same keys at once
_ITEM_TOKENS: Final = 128  # in which a program could go on, while it ends an item and begins the next
_UNEVEN: Final = 16  # one part in so many, which programs may end later where memory is busy too


def heads_in_turn(num_kv_heads: int) -> int:
    """Heads of a group, in all of which programs take an item before they take the next."""
    return next(heads for heads in range(_MOST_IN_TURN, 0, -1) if num_kv_heads % heads == 0)


def aligned(size: int) -> int:
    """Numbers of 4 bytes in whole 16 bytes."""
    return -(-size // 4) * 4


@dataclass(frozen=True)
class Packed:
    """Arrays of `sizes` int32 on the device, one after the other in `flat`."""

    flat: torch.Tensor
    sizes: dict[str, int]

    @cached_property
    def arrays(self) -> dict[str, torch.Tensor]:
        """The parts of `flat` by name."""
        return dict(zip(self.sizes, self.flat.split(list(self.sizes.values())), strict=True))

    def send(self, host: dict[str, NDArray[np.int32]]) -> None:
        """Fills the arrays, in one copy up to the end of what the last one gets; host: in their order."""
        last = list(host)[-1]
        used = sum(self.sizes.values()) - self.sizes[last] + host[last].size
        staging = torch.empty(used, dtype=torch.int32, pin_memory=self.flat.is_cuda)
        at, flat = 0, staging.numpy()
        for name, array in host.items():
            flat[at : at + array.size] = array.ravel()
            at += self.sizes[name]
        self.flat[:used].copy_(staging, non_blocking=True)


@dataclass(frozen=True)
class PrefillPlan(Packed):
    """A PrefillList on the device. table_stride: columns of its block table. programs: of its
    launch."""

    tile: PrefillTile
    num_kv_heads: int
    table_stride: int
    programs: int

    def fill(self, listed: PrefillList, beside: bool) -> None:
        """Sends prompt chunks to the device. beside: decodes run beside them."""
        self.send(host_arrays(listed, self.table_stride, self.num_kv_heads, self.programs, beside))


@dataclass(frozen=True)
class Chunks:
    """The prompt chunks of a step, and the tile that computes them."""

    listed: PrefillList
    tile: PrefillTile


def upload(chunks: Chunks, num_kv_heads: int, processors: int, beside: bool, device: torch.device) -> PrefillPlan:
    """Sends prompt chunks to the device; a program for each item and head, or for each multiprocessor, where decodes
    run beside them."""
    columns = -(-chunks.listed.block_table.shape[1] // 16) * 16  # kernels compile anew for a stride of another kind
    programs = processors if beside else len(chunks.listed.items) * num_kv_heads
    host = host_arrays(chunks.listed, columns, num_kv_heads, programs, beside)
    sizes = {name: aligned(array.size) for name, array in host.items()}
    flat = torch.empty(sum(sizes.values()), dtype=torch.int32, device=device)
    plan = PrefillPlan(flat, sizes, chunks.tile, num_kv_heads, columns, programs)
    plan.send(host)
    return plan


def reserve(
    limits: PrefillLimits, tile: PrefillTile, num_kv_heads: int, processors: int, device: torch.device
) -> PrefillPlan:
    """Room for any prompt chunks within the limits."""
    sizes = {
        "items": limits.items * _columns(num_kv_heads), "queries": limits.queries, "slots": limits.queries,
        "block_table": limits.rows * limits.columns,
    }  # fmt: skip
    sizes = {name: aligned(size) for name, size in sizes.items()}
    flat = torch.zeros(sum(sizes.values()), dtype=torch.int32, device=device)
    return PrefillPlan(flat, sizes, tile, num_kv_heads, limits.columns, processors * tile.programs)


def host_arrays(
    listed: PrefillList, columns: int, num_kv_heads: int, programs: int, beside: bool
) -> dict[str, NDArray[np.int32]]:
    """What the kernel reads, the block table, with rows of so many columns, last."""
    table = np.zeros((len(listed.block_table), columns), np.int32)
    table[:, : listed.block_table.shape[1]] = listed.block_table
    items = order_items(listed.items, num_kv_heads, heads_in_turn(num_kv_heads), programs, beside)
    return {"items": items, "queries": listed.queries, "slots": listed.slots, "block_table": table}


def rows(listed: PrefillList | None, num_kv_heads: int) -> int:
    """Items as programs take them; None: there are no prompt chunks."""
    return len(listed.items) * (num_kv_heads // heads_in_turn(num_kv_heads)) if listed else 0


def _columns(num_kv_heads: int) -> int:
    """Numbers of an item, listed for all groups of heads."""
    groups = num_kv_heads // heads_in_turn(num_kv_heads)
    return ITEM_COLUMNS if groups == 1 else groups * (ITEM_COLUMNS + 1)


@njit(cache=True)
def order_items(items, num_kv_heads, in_turn, programs, beside):
    """[items, ITEM_COLUMNS] int32 or, of heads in groups, [items × groups, ITEM_COLUMNS + 1] with the group's first
    head, as programs take them. items: heaviest first.

    A group's items come after those of another, so that its keys are read in one round and not in each, unless programs
    then end later than with the heaviest items of all groups first.
    """
    groups, number = num_kv_heads // in_turn, len(items)
    weights = items[:, KV_END].astype(np.int64) - items[:, KV_START] + _ITEM_TOKENS
    order, end = _turned(np.arange(number * groups), weights, groups, in_turn, programs)
    if groups > 1:
        keys = items[:, KV_ROW].astype(np.int64) << 32 | items[:, KV_START]
        together = np.argsort(keys, kind="mergesort")
        by_group = np.empty(number * groups, np.int64)
        for group in range(groups):
            by_group[group * number : (group + 1) * number] = together * groups + group
        by_group, later = _turned(by_group, weights, groups, in_turn, programs)
        if later <= end + (end // _UNEVEN if beside else 0):
            order = by_group
    found = np.empty((len(order), ITEM_COLUMNS + (groups > 1)), np.int32)
    for place in range(len(order)):
        found[place, :ITEM_COLUMNS] = items[order[place] // groups]
        if groups > 1:
            found[place, FIRST_HEAD] = order[place] % groups * in_turn
    return found


@njit(cache=True)
def _turned(order, weights, groups, in_turn, programs):
    """The order, with what begins in a last round that is not full turned round if the rounds before would want that:
    programs take it forwards. And the most tokens of a program then."""
    tasks = len(order) * in_turn
    full = tasks // programs
    if full % 2 == 1 and tasks % programs:
        begin = full * programs // in_turn
        order = np.concatenate((order[:begin], order[begin:][::-1]))
    load = np.zeros(programs, np.int64)
    for task in range(tasks):
        turn, program = task // programs, task % programs
        backwards = turn % 2 == 1 and turn < full
        load[programs - 1 - program if backwards else program] += weights[order[task // in_turn] // groups]
    return order, load.max()


def run_tokens(tile: PrefillTile, page_size: int) -> int:
    """Tokens of a run, for which one page id is read: a power of two that divides a page and a block."""
    return min(tile.block_n, page_size & -page_size)
