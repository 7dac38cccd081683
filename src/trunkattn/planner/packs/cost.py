"""What a packing costs, in bytes moved.

A pack reads its KV once for all of its queries. That saves reads, but a query whose KV lies in several packs has
several partial results, which are written, read again and merged:

    cost = tiles of the pack × (its tokens × kv_bytes + item_bytes)        summed over the packs
         + packs of the query × partial_bytes                              summed over the queries with several

Every cost is an int64, so that any planner on any device takes the same decisions, bit for bit.

Source: the profit model of PAT, https://arxiv.org/abs/2511.22333, §5.1. This model adds the group size, the dtypes and
the height of a tile. PAT's own rule, merge if 4·s > l, is the special case of float32 partials, 16-bit KV and group
size 2.
"""

from typing import Final, NamedTuple

import numpy as np

from trunkattn.compiled import njit
from trunkattn.planner.device import DeviceModel

_FLOAT32_BYTES: Final = 4
_WRITTEN_AND_READ: Final = 2


class CostModel(NamedTuple):
    """Prices in bytes, all integers; `cost_model()` makes one."""

    kv_bytes: int  # keys and values of one token, all KV heads
    partial_bytes: int  # one query token's partial output and lse, written and read, all query heads
    item_bytes: int  # fixed cost of one work item, all KV heads
    queries_per_tile: int  # query tokens that the tallest tile holds
    group_size: int  # query heads per KV head


def cost_model(
    device: DeviceModel, num_qo_heads: int, num_kv_heads: int, cached_numbers: int, head_dim_v: int, kv_itemsize: int
) -> CostModel:
    """The model for one attention shape on one device.

    Args:
        cached_numbers: numbers that a KV head caches for a token: its key and its value, or a latent row.
        kv_itemsize: bytes of a cached number.
    """
    group_size = num_qo_heads // num_kv_heads
    return CostModel(
        kv_bytes=num_kv_heads * cached_numbers * kv_itemsize,
        partial_bytes=num_qo_heads * (head_dim_v + 1) * _FLOAT32_BYTES * _WRITTEN_AND_READ,
        item_bytes=device.item_bytes * num_kv_heads,
        queries_per_tile=max(1, device.tile_rows // group_size),
        group_size=group_size,
    )


@njit(inline="always")
def tiles_of(model, queries):
    """Row tiles that `queries` query tokens need."""
    return (np.int64(queries) + model.queries_per_tile - 1) // model.queries_per_tile


@njit(inline="always")
def read_cost(model, tokens, queries):
    """Cost of one pack. Each of its pack tiles is a work item that reads the pack's KV."""
    return tiles_of(model, queries) * (np.int64(tokens) * model.kv_bytes + model.item_bytes)


@njit(inline="always")
def partial_cost(model, num_packs, queries):
    """Cost of the partials of `queries` query tokens whose KV lies in `num_packs` packs; 0 for one pack."""
    return np.int64(0) if num_packs <= 1 else np.int64(num_packs) * np.int64(queries) * model.partial_bytes
