"""Run by test_compile in a process of its own, in which Triton compiles. Arguments: compute capability, head_dim,
dtypes of queries and of keys by Triton's names, and names of kernels (all, if there are none).

Prints JSON: kernel -> registers, spilled bytes, shared bytes, and CTAs that fit an SM.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from benchmarks.kernels.compile_kernels import (
    compile_decode,
    compile_hopper_decode,
    compile_hopper_prefill,
    compile_hopper_prefill_decode,
    compile_merge,
    compile_prefill,
)
from benchmarks.kernels.cross_compile import Target
from benchmarks.kernels.tile_solver import ARCHITECTURES, Resources
from trunkattn.gpu.hopper.decode_arguments import shape_of
from trunkattn.gpu.hopper.spec import PADDED_HEAD_DIMS, source_of
from trunkattn.gpu.hopper.spec import prefill_tile as hopper_prefill_tile
from trunkattn.gpu.hopper.spec import tiles_of as hopper_tiles
from trunkattn.gpu.portable.spec import INVARIANT_TILE, invariant_tiles, prefill_tile, without_subtiles
from trunkattn.gpu.portable.spec import tiles_of as decode_tiles
from trunkattn.gpu.tiles import SHORT_WINDOW, Tile

OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    " masked": {"masked": True},
    " with all options": {"masked": True, "soft_cap": 30.0, "sinks": True},
}
Compile = Callable[[], dict[str, Any]]
ITEMSIZE = {"bf16": 2, "fp32": 4, "fp8e4nv": 1, "fp8e5": 1}


def tiles_of(target: Target) -> dict[str, Compile]:
    """Every tile that is listed for such an attention: nested, flat, and merging if it may; and of prompt chunks."""
    group, size = target.num_qo_heads // target.num_kv_heads, ITEMSIZE[target.kv_dtype]
    tiles = decode_tiles(size, target.head_dim, group, capability=target.capability)
    variants = {f"{it.block_m}x{it.block_n}": (it, False) for it in tiles}
    variants |= {f"{it.block_m}x{it.block_n} merging": (it, True) for it in tiles if it.merges}
    (alike,) = invariant_tiles(size, target.head_dim, tiles, target.capability)
    variants |= {f"{it.block_m}x{it.block_n} invariant": (it, False) for it in [alike] if it is INVARIANT_TILE}
    variants |= {f"{it.block_m}x{it.block_n} flat": (it, False) for it in without_subtiles(tiles) if it not in tiles}
    report = {
        name: described(target, tile, partial(compile_decode, target, tile, merging))
        for name, (tile, merging) in variants.items()
    }
    chunk_tile = prefill_tile(size, target.head_dim, capability=target.capability)
    return report | {"prefill": described(target, chunk_tile, partial(compile_prefill, target, chunk_tile))}


def described(target: Target, tile: Tile, compile: Callable[[], Resources]) -> Compile:
    """Adds the CTAs that fit an SM at once, and those that the table counts on."""

    def compiled() -> dict[str, Any]:
        used = compile()
        ctas_per_sm = ARCHITECTURES[target.capability].resident(tile, used)
        return asdict(used) | {"ctas_per_sm": ctas_per_sm, "expected": tile.ctas_per_sm}

    return compiled


def alone(compile: Callable[[], Resources], **more: int) -> Compile:
    """For a kernel that has no tile in the table."""
    return lambda: asdict(compile()) | more


def others(target: Target) -> dict[str, Compile]:
    """The kernels that have no tile of their own, or a fixed one."""
    group = target.num_qo_heads // target.num_kv_heads
    merges = {"merge": False, "invariant merge": True}
    report = {
        name: alone(partial(compile_merge, target, batch_invariant=invariant)) for name, invariant in merges.items()
    }
    if target.capability != 90:
        return report
    for tile in (tile for tile in hopper_tiles(2, target.head_dim, 16) if tile.block_m >= group):
        name = f"{tile.block_m}x{tile.block_n} portable"  # where the Hopper kernel cannot compute them
        report[name] = described(target, tile, partial(compile_decode, target, tile))
    if target.head_dim in PADDED_HEAD_DIMS:  # for decoding alone
        return report
    options: dict[str, dict[str, Any]] = {"": {}, " window": {"window": True}}
    options[" with all options"] = {"window": True, "soft_cap": 30.0, "sinks": True}
    for name, chosen in options.items():
        report[f"hopper prefill{name}"] = alone(partial(compile_hopper_prefill, target, **chosen), ctas_per_sm=1)
    chunk_tile = hopper_prefill_tile(target.head_dim)
    if chunk_tile.ctas_under_short_window:
        tile = replace(chunk_tile.under(SHORT_WINDOW), warps=12)  # those that compute, and a whole four of producers
        for name in (" window", " with all options"):
            compile = partial(compile_hopper_prefill, target, ctas_per_sm=tile.ctas_per_sm, **options[name])
            report[f"hopper prefill short{name}"] = described(target, tile, compile)
    report["prefill portable"] = described(target, chunk_tile, partial(compile_prefill, target, chunk_tile))
    if target.head_dim != 128:
        return report
    for name, variant in (options | {" masked": {"masked": True}}).items():
        compile = partial(compile_hopper_prefill_decode, target, **variant)
        report[f"hopper prefill and decode{name}"] = alone(compile, ctas_per_sm=1)
    return report


def hopper_decodes(target: Target) -> dict[str, Compile]:
    """The Hopper decode kernel: by TMA, of 8-bit caches that producer warps widen, and of pages that they gather."""
    if target.capability != 90 or target.kv_dtype == "fp32":
        return {}
    size = ITEMSIZE[target.kv_dtype]
    report: dict[str, Compile] = {}
    for page_size in (16,) if target.head_dim in PADDED_HEAD_DIMS else (16, 4):
        source = source_of(size, page_size)
        producers = shape_of(target.head_dim, source).producer_warps
        tile = hopper_tiles(size, target.head_dim, page_size)[-1]
        tile = replace(tile, warps=4 + -(-producers // 4) * 4)  # those that compute, and whole fours of those that load
        for option, chosen in OPTIONS.items():
            compile = partial(compile_hopper_decode, target, page_size=page_size, **chosen)
            report[f"{source.name.lower()} decode{option}"] = described(target, tile, compile)
    return report


def main() -> None:
    capability, head_dim, dtype, kv_dtype, *names = sys.argv[1:]
    target = Target(int(capability), int(head_dim), dtype=dtype, kv_dtype=kv_dtype)
    kernels = tiles_of(target) | hopper_decodes(target) | (others(target) if kv_dtype == "bf16" else {})
    print(json.dumps({name: kernels[name]() for name in names or kernels}))


if __name__ == "__main__":
    main()
