"""Run by test_compile in a process of its own, in which Triton compiles. Arguments: compute capability, head_dim.

Prints JSON: kernel -> registers, spilled bytes, shared bytes, and programs that fit a multiprocessor.
"""

import json
import sys
from dataclasses import asdict

from trunkattn.kernels.ahead import (
    Target,
    compile_decode,
    compile_decode_hopper,
    compile_hybrid,
    compile_merge,
    compile_persistent,
    compile_prefill,
    compile_prefill_hopper,
)
from trunkattn.kernels.tile_solver import ARCHITECTURES
from trunkattn.kernels.tile_table import Tile, decode_tiles, prefill_tile


def main() -> None:
    target = Target(int(sys.argv[1]), int(sys.argv[2]))
    report = {"merge": asdict(compile_merge(target))}
    group = target.num_qo_heads // target.num_kv_heads
    tiles = decode_tiles(2, target.head_dim, group)
    used = compile_persistent(target, tiles)
    widest = max(tiles, key=lambda tile: tile.warps)
    programs = ARCHITECTURES[target.capability].resident(widest, used)
    report["persistent"] = asdict(used) | {"programs": programs}
    chunk_tile = prefill_tile(2, target.head_dim)
    used = compile_prefill(target, chunk_tile)
    programs = ARCHITECTURES[target.capability].resident(chunk_tile, used)
    report["prefill"] = asdict(used) | {"programs": programs}
    if (target.capability, target.head_dim) == (90, 128):
        for window in (False, True):
            used = compile_prefill_hopper(target, window)
            report[f"prefill hopper{' window' if window else ''}"] = asdict(used) | {"programs": 1}
        for name, masked in (("decode hopper", False), ("decode hopper masked", True)):
            used = compile_decode_hopper(target, masked)
            report[name] = asdict(used) | {"programs": ARCHITECTURES[90].resident(Tile(64, 64, 8, 2, 2), used)}
        for name, variant in (("hybrid", {}), ("hybrid masked", {"masked": True}), ("hybrid window", {"window": True})):
            report[name] = asdict(compile_hybrid(target, **variant)) | {"programs": 1}
    hopper = decode_tiles(2, target.head_dim, group, hopper=(target.capability, target.head_dim) == (90, 128))
    for tile in dict.fromkeys((*tiles, *hopper)):
        for merges in (False,) if tile.hopper else (False, True):
            used = compile_decode(target, tile, merges)
            programs = ARCHITECTURES[target.capability].resident(tile, used)
            report[f"{tile.block_m}x{tile.block_n}{' flat' * tile.hopper}{' merging' * merges}"] = asdict(used) | {
                "programs": programs
            }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
