"""The specification of the kernels of latent attention (MLA): what they refuse, and their tiles with the prices of
these. This module does not import Triton.

All query heads share a cached row, so a work item may compute them all. If a query has more heads than a tile has rows,
the heads are divided into groups, and an item is computed once for each group. The planner and the merge treat a group
like a KV head.
"""

from dataclasses import replace
from typing import Final

import torch

from trunkattn.config import AttentionConfig
from trunkattn.dtypes import dtype_name
from trunkattn.gpu.cards import Card
from trunkattn.gpu.layer import Geometry, Tensors, why_not_by_tma
from trunkattn.gpu.portable.spec import refuses_card
from trunkattn.gpu.tiles import GpuTile

MODULE: Final = "trunkattn.gpu.mla"
DECODE: Final = "Hopper latent decode"
PORTABLE: Final = "portable latent decode"

ROWS: Final = 64  # of the Hopper kernel's tile
BLOCK_ROWS: Final = 64  # cached rows that the Hopper kernel reads at once
NARROW_BLOCK_ROWS: Final = 32  # the same for a cache of 8 bits
_PORTABLE_ROWS: Final = 32  # of the tallest tile of the portable kernel
LATENT_DIM: Final = 512  # of the Hopper kernel
ROPE_DIM: Final = 64
PAGE_UNIT: Final = 16  # tokens of its smallest TMA box
_DTYPES: Final = (torch.bfloat16, torch.float16)
_NARROW: Final = torch.float8_e4m3fn  # a cache that the Hopper kernel widens
_READS_LATENT: Final = "keys and values apart: expected a latent cache"

# A block takes as long whether its rows are used or not. The times are those of blocks that the L2 cache holds.
_TILE: Final = GpuTile(
    ROWS,
    BLOCK_ROWS,
    warps=4,
    stages=2,
    ctas_per_sm=1,
    block_ns=(1660, 1180),
    chain_ns=(1650, 1210),
    private_n=BLOCK_ROWS,
    kernel=DECODE,
    one_launch=True,
    blocks_at_once=2,
    item_blocks=4,
)
_NARROW_TILE: Final = replace(
    _TILE,
    block_n=NARROW_BLOCK_ROWS,
    private_n=NARROW_BLOCK_ROWS,
    block_ns=(1200, 860),
    chain_ns=(1200, 875),
    item_blocks=6,
)


def head_groups(config: AttentionConfig, tiles: tuple[GpuTile, ...]) -> int:
    """Returns the number of groups of query heads that a work item computes one by one. Other caches have one group for
    each KV head. A latent cache has as few groups as the tiles allow."""
    return config.num_kv_heads if config.latent_dim is None else _fewest_groups(config, tiles[-1].block_m)


def _fewest_groups(config: AttentionConfig, rows: int) -> int:
    heads = config.num_qo_heads
    return next(groups for groups in range(1, heads + 1) if heads % groups == 0 and heads // groups <= rows)


def refuses_decode(config: AttentionConfig, card: Card) -> list[str]:
    """Returns why the Hopper kernel does not compute a latent attention on a card. The list is empty if it does."""
    if reasons := card.why_not_hopper or card.why_hopper_untimed:
        return reasons
    if config.latent_dim is None:
        return [_READS_LATENT]
    latent, rope = config.latent_dim, config.head_dim - config.latent_dim
    if (latent, rope) != (LATENT_DIM, ROPE_DIM):
        reasons.append(f"rows of {latent} + {rope} numbers: expected {LATENT_DIM} + {ROPE_DIM}")
    if config.dtype not in _DTYPES:
        reasons.append(f"{dtype_name(config.dtype)} queries: expected bfloat16 or float16")
    elif config.cache_dtype not in (config.dtype, _NARROW):
        as_queries = f"{dtype_name(config.dtype)}, as the queries"
        reasons.append(f"{dtype_name(config.cache_dtype)} caches: expected {as_queries}, or {dtype_name(_NARROW)}")
    if config.page_size % PAGE_UNIT:
        reasons.append(f"page_size {config.page_size}: expected a multiple of {PAGE_UNIT}")
    if config.logits_soft_cap is not None:
        reasons.append("a soft cap: expected none")
    if config.sinks:
        reasons.append("sinks: expected none")
    if config.batch_invariant:  # where a segment's tokens end decides where they lie in a block
        reasons.append("batch_invariant=True: expected False")
    if config.execution == "streams":
        reasons.append("execution='streams': expected 'auto', 'serial' or 'overlapped'")
    return reasons


def refuses_layer(t: Tensors, geometry: Geometry) -> list[str]:
    """Returns why the Hopper kernel cannot read the tensors of a layer. The list is empty if it can. A latent cache has
    one head, so TMA needs no stride of heads."""
    reasons = [] if t.q.is_cuda else ["tensors on a CPU: expected a GPU"]
    return reasons + why_not_by_tma("k_cache", t.k_cache, dims=2)


def decode_tiles(config: AttentionConfig, card: Card) -> tuple[GpuTile, ...]:
    """Returns the tile of the Hopper kernel."""
    return (_NARROW_TILE if config.cache_dtype == _NARROW else _TILE,)


def refuses_portable(config: AttentionConfig, card: Card) -> list[str]:
    """Returns why the portable kernel does not compute a latent attention on a card. The list is empty if it does."""
    if config.latent_dim is None:
        return [_READS_LATENT]
    reasons = refuses_card(config, card)
    if config.value_dim > LATENT_DIM:
        reasons.append(f"latent_dim={config.latent_dim}: expected at most {LATENT_DIM}; use the CPU")
    if config.head_dim - config.value_dim > ROPE_DIM:
        rope = config.head_dim - config.value_dim
        reasons.append(f"head_dim - latent_dim = {rope}: expected at most {ROPE_DIM} rope columns; use the CPU")
    return reasons


def portable_tiles(config: AttentionConfig, card: Card) -> tuple[GpuTile, ...]:
    """Returns the tile of the portable kernel. It is the lowest one that holds a group, because all rows are computed
    whether they are used or not, and a taller one would spill."""
    group = config.num_qo_heads // _fewest_groups(config, _PORTABLE_ROWS)
    rows = next(rows for rows in (16, _PORTABLE_ROWS) if rows >= group)
    keys = 16 if max(config.dtype.itemsize, config.cache_dtype.itemsize) > 2 else 32
    return (portable_tile(rows, keys),)


def portable_tile(rows: int, keys: int) -> GpuTile:
    """Returns a tile of the portable kernel. Four warps would spill an output of 512 columns and more than 16 rows. 64
    rows spill in eight warps, too, where this kernel stands in for the Hopper kernel."""
    warps = 4 if rows == 16 else 8
    shape = replace(_TILE, block_m=rows, block_n=keys, warps=warps, stages=1, private_n=keys)
    return replace(shape, kernel=PORTABLE, blocks_at_once=1, item_blocks=0)
