"""Bandwidth and latency of every tile of the table where requests share nothing (PAT's Figure 7c-d).

    python -m benchmarks.kernels.tile_equivalence             # results/tile-equivalence-CARD.json

Bandwidth: batches of many lengths and sizes, tiles of one query token ("alone") or of as many requests as they hold
("filled", where their rows read different keys), cut into as many parts as fill the card. Chains: one item, uncut, so
that each KV head is one CTA on an idle card; ns of a block is the difference of a long and a short sequence. All
timed and checked as in decode.py. latency_ns: of a load that misses the L2 cache, for solve_tiles.py.
"""

import argparse
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from benchmarks.kernels.decode import HEAD_DIM, HEADS, PAGE_SIZE, Case, ceilings, make_case, measure, microseconds
from benchmarks.kernels.tile_lists import list_tiles, make_run, planned_bytes, rule_on_card
from benchmarks.lib.options import need_gpu
from benchmarks.lib.report import short_name, write_result
from trunkattn.gpu.hopper.spec import tiles_of as hopper_tiles
from trunkattn.gpu.portable.spec import DECODE_TILES, DECODE_TILES_FP8, without_subtiles
from trunkattn.gpu.tiles import GpuTile
from trunkattn.planner.tiles.candidates import Tiling, TilingRule
from trunkattn.planner.work_list import SEGMENT_END, SEGMENT_SHARED_END, SEGMENT_START, TileList

REQUESTS = (1, 8, 32, 64, 128, 256)
TOKENS = (1024, 4096)
STEPS = 4096
CHASE_BYTES, LINE_BYTES = 512 << 20, 128


@triton.jit
def chase_kernel(following, place, steps):
    """Goes on from place[0] for so many loads, each of which gives the address of the next."""
    at = tl.load(place)
    for _ in tl.range(0, steps, num_stages=1):
        at = tl.load(following + at)
    tl.store(place, at)


@dataclass(frozen=True)
class Listed:
    """A tile as the table has it, or without its subtiles, and the caches that it reads."""

    tile: GpuTile
    kv_dtype: torch.dtype

    @property
    def name(self) -> str:
        """Rows × keys."""
        tile = self.tile
        nested = f" in {tile.subtiles} subtiles" if tile.subtiles > 1 else ""
        kind = " fp8" if self.kv_dtype.itemsize == 1 else " warp specialized" if tile.one_launch else ""
        return f"{tile.block_m}x{tile.block_n}{nested}{kind}"


def listed_tiles() -> list[Listed]:
    """Every tile for bf16 caches that the card runs, and the low one for fp8."""
    flat = [tile for tile in without_subtiles(DECODE_TILES) if tile not in DECODE_TILES]
    hopper = hopper_tiles(2, HEAD_DIM, PAGE_SIZE)[1:] if torch.cuda.get_device_capability() == (9, 0) else ()
    found = [Listed(tile, torch.bfloat16) for tile in (*DECODE_TILES, *flat, *hopper)]
    return [*found, Listed(DECODE_TILES_FP8[0], torch.float8_e4m3fn)]


def links(num_lines: int, device: str) -> torch.Tensor:
    """[num_lines * 16] int64 of which the first of each line is where the next line begins: one cycle through all lines
    in random order."""
    order = torch.randperm(num_lines, device=device)
    following = torch.zeros(num_lines, LINE_BYTES // 8, device=device, dtype=torch.int64)
    following[order, 0] = order.roll(-1) * (LINE_BYTES // 8)
    return following.flatten()


def latency_ns() -> float:
    """Latency of a load from memory. Every run goes on where the last one ended, so none meets a line again."""
    following = links(CHASE_BYTES // LINE_BYTES, "cuda")
    place = torch.zeros(1, device="cuda", dtype=torch.int64)
    torch.ones(100_000_000, device="cuda").sum()  # leaves nothing of `following` in the L2 cache
    us = microseconds(lambda _: chase_kernel[(1,)](following, place, STEPS, num_warps=1), 1)
    return round(us * 1e3 / STEPS, 1)


def steps_of(rule: TilingRule, listed: TileList) -> int:
    """Blocks of keys that the longest item goes through, one after another."""
    (tile,), items = rule.tiles, listed.items
    shared = (items[:, SEGMENT_SHARED_END] - items[:, SEGMENT_START]) // (tile.block_tokens // rule.segment_size)
    masked_tokens = tile.subtiles * tile.private_tokens if tile.subtiles > 1 else tile.block_tokens
    masked = -(
        (items[:, SEGMENT_SHARED_END] - items[:, SEGMENT_END]) // (masked_tokens // rule.segment_size)
    )  # rounded up
    return int((shared + masked).max())


def bandwidth_row(case: Case, tile: Listed, alone: bool) -> dict[str, Any]:
    """One tile on one batch."""
    rule = rule_on_card(case, (tile.tile,))
    listed = list_tiles(case.batch, rule, Tiling(0, per_query=alone))
    row: dict[str, Any] = {"tile": tile.name, "items": "alone" if alone else "filled"}
    row |= {
        "requests": len(case.batch.seq_lens),
        "tokens": int(case.batch.seq_lens[0]),
        "programs": len(listed.items) * rule.num_kv_heads,
    }
    row |= measure(case, make_run(case, rule, listed, (tile.tile,)))
    moved = planned_bytes(case, listed)
    rate = round((moved.kv_memory + moved.q_and_out) / row["us"] / 1e6, 3) if "us" in row else None
    return row | {"tb_per_s": rate}


def bandwidth(heads: tuple[int, int]) -> list[dict[str, Any]]:
    """Every tile on every batch."""
    rows = []
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        tiles = [tile for tile in listed_tiles() if tile.kv_dtype == dtype]
        for tokens in TOKENS:
            for requests in REQUESTS:
                case = make_case(f"{requests}_{tokens}", *heads, torch.bfloat16, dtype)
                for alone in (True, False) if requests > 1 else (True,):
                    rows += [bandwidth_row(case, tile, alone) for tile in tiles]
                del case
                torch.cuda.empty_cache()
    return rows


def chain_row(heads: tuple[int, int], tile: Listed, alone: bool) -> dict[str, Any]:
    """One tile: µs of one item of a short sequence, and ns of each further block."""
    requests = 1 if alone else tile.tile.subtiles * (tile.tile.block_m // tile.tile.subtiles // (heads[0] // heads[1]))
    row: dict[str, Any] = {"tile": tile.name, "items": "alone" if alone else "filled", "requests": requests}
    points = []
    for tokens in TOKENS:
        case = make_case(f"{requests}_{tokens}", *heads, torch.bfloat16, tile.kv_dtype)
        rule = rule_on_card(case, (tile.tile,))
        listed = list_tiles(case.batch, rule, Tiling(0, per_query=alone, waves=0))
        found = measure(case, make_run(case, rule, listed, (tile.tile,)))
        if "us" not in found:
            return row | {"tokens": tokens} | found
        points.append((found["us"], steps_of(rule, listed)))
        row |= {f"us_{tokens}": found["us"], f"error_{tokens}": found["error"]}
    (short, fewer), (long, more) = points
    return row | {"blocks": fewer, "ns_per_block": round(1e3 * (long - short) / (more - fewer), 1)}


def print_bandwidth(rows: list[dict[str, Any]]) -> None:
    """A line for each tile, way of filling it and length; a column for each batch size."""
    print(f"{'TB/s, requests:':48}" + "".join(f"{requests:>8}" for requests in REQUESTS))
    cells = {(row["tile"], row["items"], row["tokens"], row["requests"]): row for row in rows}
    for tile, items, tokens in dict.fromkeys(key[:3] for key in cells):
        found = [cells.get((tile, items, tokens, requests)) for requests in REQUESTS]
        rates = ["" if row is None else row["tb_per_s"] or "wrong" for row in found]
        label = f"{tile}, {items}, {tokens} tokens"
        print(f"{label:48}" + "".join(f"{rate:>8}" for rate in rates))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", default="32/8", choices=HEADS, help="query heads / KV heads")
    arguments = parser.parse_args()
    need_gpu()
    hq, hkv = map(int, arguments.heads.split("/"))
    card, latency = torch.cuda.get_device_name(), latency_ns()
    torch.cuda.empty_cache()
    peak = ceilings()[0] / 1e6
    torch.cuda.empty_cache()
    print(f"{card}: {peak:.2f} TB/s read, {latency} ns of a load from memory", flush=True)
    chains = [chain_row((hq, hkv), tile, alone) for alone in (True, False) for tile in listed_tiles()]
    for row in chains:
        print(row, flush=True)
    rows = bandwidth((hq, hkv))
    print_bandwidth(rows)
    figures = {
        "card": card, "read_tb_per_s": round(peak, 3), "latency_ns": latency, "heads": arguments.heads,
        "chains": chains, "bandwidth": rows,
    }  # fmt: skip
    print(write_result(f"tile-equivalence-{short_name(card)}", figures, "triton"))


if __name__ == "__main__":
    main()
