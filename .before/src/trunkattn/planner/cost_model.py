"""What a packing costs, in bytes (PAT §5.1 "profit model", with the group size, the dtypes and the tile height in it).

All costs are int64 bytes moved, so that a planner on another processor reproduces every decision exactly. PAT's own
rule (merge when 4·s > l) is the special case of float32 partials, 16-bit KV and group size 2.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from trunkattn.plan_format import DeviceModel


class CostModel(NamedTuple):
    """Integers only; built by `cost_model()`."""

    kv_bytes: int  # keys and values of one token, all KV heads
    partial_bytes: int  # one query token's partial output and lse written and read, all query heads
    item_bytes: int  # fixed cost of one work item, all KV heads
    queries_per_tile: int  # query tokens of the tallest tile
    group_size: int


def cost_model(
    device: DeviceModel, num_qo_heads: int, num_kv_heads: int, head_dim: int, head_dim_v: int, kv_itemsize: int
) -> CostModel:
    """The model for one attention shape on one device. `kv_itemsize` in bytes."""
    group_size = num_qo_heads // num_kv_heads
    return CostModel(
        kv_bytes=num_kv_heads * (head_dim + head_dim_v) * kv_itemsize,
        partial_bytes=num_qo_heads * (head_dim_v + 1) * 4 * 2,
        item_bytes=device.item_bytes * num_kv_heads,
        queries_per_tile=max(1, device.tile_rows // group_size),
        group_size=group_size,
    )


@njit(cache=True)
def tiles_of(model, queries):
    """Row tiles that `queries` query tokens need."""
    return (np.int64(queries) + model.queries_per_tile - 1) // model.queries_per_tile


@njit(cache=True)
def read_cost(model, tokens, queries):
    """One pack: its KV once per row tile, and the fixed cost of its work items."""
    return tiles_of(model, queries) * (np.int64(tokens) * model.kv_bytes + model.item_bytes)


@njit(cache=True)
def partial_cost(model, pieces, queries):
    """Partials of `queries` query tokens whose KV is cut into `pieces`; one piece is written straight to the output."""
    return np.int64(0) if pieces <= 1 else np.int64(pieces) * np.int64(queries) * model.partial_bytes
