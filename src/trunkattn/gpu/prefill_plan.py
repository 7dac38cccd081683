"""Work items of prompt chunks on a GPU: their arrays, and the order in which programs take them.

Programs take the tasks of an item, one for each KV head, then those of the next; P programs compute P tasks at a time,
a round, forwards and backwards in turn.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

from trunkattn.gpu.tuning.prefill import PrefillTile
from trunkattn.planner.work_list import ITEM_COLUMNS, PrefillLimits, PrefillList


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

    @cached_property
    def _begins(self) -> list[int]:
        return list(accumulate(self.sizes.values(), initial=0))

    def send(self, host: dict[str, NDArray[np.int32]]) -> None:
        """Fills the first arrays, in one copy up to the end of what the last of them gets; host: in their order."""
        last = list(host)[-1]
        used = self._begins[len(host) - 1] + host[last].size
        staging = torch.empty(used, dtype=torch.int32, device="cpu", pin_memory=self.flat.is_cuda)
        flat = staging.numpy()
        for begin, array in zip(self._begins, host.values(), strict=False):
            flat[begin : begin + array.size] = array.ravel()
        self.flat[:used].copy_(staging, non_blocking=True)


@dataclass(frozen=True)
class PrefillPlan(Packed):
    """A PrefillList on the device. table_stride: columns of its block table. num_programs: of its launch."""

    tile: PrefillTile
    num_kv_heads: int
    table_stride: int
    num_programs: int

    def fill(self, listed: PrefillList) -> None:
        """Sends prompt chunks to the device."""
        self.send(host_arrays(listed, self.table_stride, self.num_kv_heads, self.num_programs))


@dataclass(frozen=True)
class Chunks:
    """The prompt chunks of a step, and the tile that computes them."""

    listed: PrefillList
    tile: PrefillTile


def upload(chunks: Chunks, num_kv_heads: int, num_sms: int, overlapped: bool, device: torch.device) -> PrefillPlan:
    """Sends prompt chunks to the device. Programs of a Hopper tile take one item after the other and load ahead, as
    those do that decodes overlap; of another tile each item and head has its own program."""
    columns = -(-chunks.listed.block_table.shape[1] // 16) * 16  # kernels compile anew for a stride of another kind
    num_programs = len(chunks.listed.items) * num_kv_heads
    if overlapped:
        num_programs = num_sms
    elif chunks.tile.hopper:
        num_programs = min(num_programs, num_sms * chunks.tile.ctas_per_sm)
    host = host_arrays(chunks.listed, columns, num_kv_heads, num_programs)
    sizes = {name: aligned(array.size) for name, array in host.items()}
    flat = torch.empty(sum(sizes.values()), dtype=torch.int32, device=device)
    plan = PrefillPlan(flat, sizes, chunks.tile, num_kv_heads, columns, num_programs)
    plan.send(host)
    return plan


def reserve(
    limits: PrefillLimits, tile: PrefillTile, num_kv_heads: int, num_sms: int, device: torch.device
) -> PrefillPlan:
    """Room for any prompt chunks within the limits. positions: of their query tokens, on their way to the plan's."""
    sizes = {
        "items": limits.items * ITEM_COLUMNS, "queries": limits.queries, "slots": limits.queries,
        "positions": limits.queries, "block_table": limits.rows * limits.columns,
    }  # fmt: skip
    sizes = {name: aligned(size) for name, size in sizes.items()}
    flat = torch.zeros(sum(sizes.values()), dtype=torch.int32, device=device)
    return PrefillPlan(flat, sizes, tile, num_kv_heads, limits.columns, num_sms * tile.ctas_per_sm)


def host_arrays(
    listed: PrefillList, columns: int, num_kv_heads: int, num_programs: int
) -> dict[str, NDArray[np.int32]]:
    """What the kernel reads, the block table, with rows of so many columns, last."""
    table = np.zeros((len(listed.block_table), columns), np.int32)
    table[:, : listed.block_table.shape[1]] = listed.block_table
    items = even_rounds(listed.items, num_kv_heads, num_programs)
    on_the_way = np.zeros(0, np.int32)  # the plan's own positions are sent with it
    return {
        "items": items, "queries": listed.queries, "slots": listed.slots, "positions": on_the_way, "block_table": table,
    }  # fmt: skip


def even_rounds(items: NDArray[np.int32], num_kv_heads: int, num_programs: int) -> NDArray[np.int32]:
    """Items, heaviest first, in the order in which programs end at about the same time.

    A last round that is not full is taken forwards, whatever the one before, by the programs that have the heaviest if
    that was forwards too: then they take the lightest first."""
    full, left = divmod(len(items) * num_kv_heads, num_programs)
    if full % 2 == 0 or left == 0:
        return items
    begin = full * num_programs // num_kv_heads
    return np.concatenate([items[:begin], items[begin:][::-1]])


def segment_size(tile: PrefillTile, page_size: int) -> int:
    """Tokens of a segment, for which one page id is read: a power of two that divides a page and a block."""
    return min(tile.block_n, page_size & -page_size)
