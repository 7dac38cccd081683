"""Work items of prompt chunks on a GPU: their arrays, for `kernels.prefill`, and which program computes which.

A task is an item for one KV head. Program p of P computes the tasks p, p + P, p + 2P, …: a round of tasks runs at a
time, and the host deals each round out so that all programs end at about the same time.
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

TASK_HEAD: Final = ITEM_COLUMNS  # columns of a task: those of its item, and the KV head
TASK_COLUMNS: Final = ITEM_COLUMNS + 1
_ITEM_TOKENS: Final = 128  # in which a program could go on, while it ends an item and begins the next
_IN_TURN: Final = 8  # KV heads of a group
_UNEVEN: Final = 16  # one part in so many, which programs may end later where memory is busy too


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
    """A PrefillList on the device, its items as tasks. table_stride: columns of its block table. programs: of its
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
    """Sends prompt chunks to the device; a program for each task or, where decodes run beside them, multiprocessor."""
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
        "tasks": limits.items * num_kv_heads * TASK_COLUMNS, "queries": limits.queries, "slots": limits.queries,
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
    tasks = deal_tasks(listed.items, num_kv_heads, programs, beside)
    return {"tasks": tasks, "queries": listed.queries, "slots": listed.slots, "block_table": table}


@njit(cache=True)
def deal_tasks(items, num_kv_heads, programs, beside):
    """[items × KV heads, TASK_COLUMNS] int32 tasks in rounds of `programs`.

    items: heaviest first. Of many heads, groups take turns, so that keys are read in one round and not in each, unless
    programs then end later than with all of them in turn. The heads of a group keep the L2 cache's slices busy: with
    one at a time chunks beside decodes take up to 4 % longer.
    """
    number = len(items)
    tasks = number * num_kv_heads
    order = np.arange(tasks)  # task t: item t // num_kv_heads
    if tasks > programs:
        weights = items[:, KV_END].astype(np.int64) - items[:, KV_START] + _ITEM_TOKENS
        order, end = _deal(order, weights, num_kv_heads, programs)
        if num_kv_heads > _IN_TURN:
            by_group, later = _deal(_by_group(items, num_kv_heads), weights, num_kv_heads, programs)
            if later <= end + (end // _UNEVEN if beside else 0):
                order = by_group
    found = np.empty((tasks, TASK_COLUMNS), np.int32)
    for place in range(tasks):
        found[place, :TASK_HEAD] = items[order[place] // num_kv_heads]
        found[place, TASK_HEAD] = order[place] % num_kv_heads
    return found


@njit(cache=True)
def _by_group(items, num_kv_heads):
    """All tasks, group of heads after group, of each those of the same keys together."""
    keys = items[:, KV_ROW].astype(np.int64) << 32 | items[:, KV_START]
    together = np.argsort(keys, kind="mergesort")
    order, count = np.empty(len(items) * num_kv_heads, np.int64), 0
    for first in range(0, num_kv_heads, _IN_TURN):
        for item in together:
            for head in range(first, min(first + _IN_TURN, num_kv_heads)):
                order[count] = item * num_kv_heads + head
                count += 1
    return order


@njit(cache=True)
def _deal(order, weights, num_kv_heads, programs):
    """The same rounds of tasks, and the most that a program has: from the last round on, of each the heaviest goes to
    the program that has the least so far. Programs without a task of the last round are the last ones."""
    load, dealt = np.zeros(programs, np.int64), np.empty_like(order)
    for first in range((len(order) - 1) // programs * programs, -1, -programs):
        tasks = order[first : first + programs]
        tasks = tasks[np.argsort(-weights[tasks // num_kv_heads], kind="mergesort")]
        least = np.argsort(load, kind="mergesort")[: len(tasks)]
        dealt[first + least] = tasks
        load[least] += weights[tasks // num_kv_heads]
    return dealt, load.max()


def run_tokens(tile: PrefillTile, page_size: int) -> int:
    """Tokens of a run, for which one page id is read: a power of two that divides a page and a block."""
    return min(tile.block_n, page_size & -page_size)
