"""Measures every tiling of PAT's trees on this card and fits the block times of the tile table to them.

    python benchmarks/calibrate.py [--heads 32/8 16/8]     # results/calibration-CARD.json
    python benchmarks/calibrate.py --fit FILE              # the fit alone, on what was measured; needs no GPU

The fit looks for the times (block_ns and chain_ns of each tile, and launch_ns) with the least error of the predicted
times and the least loss of the tiling that they would choose against the best one, by random steps from today's table.
"""

import argparse
import json
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kernels import TOLERANCE, ceilings, largest_error, make_case, microseconds
from numpy.typing import NDArray
from report import write_result
from tiled import list_tiles, make_run, tile_rule

from trunkattn.kernels.tile_table import DECODE_TILES, GpuLimits, gpu_limits
from trunkattn.planner import tile_costs, tiles, tiling
from trunkattn.planner.forest import Forest, build_forest
from trunkattn.planner.splitting import UNLIMITED
from trunkattn.workloads.trees import PAT_TREES, parse_tree, tree_batch

PAGE_SIZE, HEAD_DIM = 16, 128


@dataclass(frozen=True)
class Card:
    """What the rule takes from the device."""

    processors: int
    bytes_per_us: int
    l2_bytes: int = 50 << 20


def make_rule(card: Card, heads: str, times: NDArray[np.float64] | None = None) -> tiling.TilingRule:
    """The rule of `BatchAttention` for bf16; times: see `start`."""
    hq, hkv = map(int, heads.split("/"))
    table = start() if times is None else times
    timed = tuple(
        replace(tile, block_ns=(int(row[0]), int(row[1])), chain_ns=(int(row[2]), int(row[3])))
        for tile, row in zip(DECODE_TILES, table[:-1].reshape(-1, 4), strict=True)
    )
    limits = GpuLimits(card.bytes_per_us, int(table[-1]), "as measured")
    return tile_rule(timed, (hq, hkv, HEAD_DIM), (card.processors, card.l2_bytes), limits)


def start() -> NDArray[np.float64]:
    """Today's times: block_ns and chain_ns (full, masked) of each tile, then launch_ns."""
    return np.array(
        [value for tile in DECODE_TILES for value in (*tile.block_ns, *tile.chain_ns)]
        + [gpu_limits("NVIDIA H200").launch_ns],
        np.float64,
    )


def batch_of(tree: str) -> tuple[Any, Forest]:
    """The batch of a tree, as kernels.make_case has it, and its forest."""
    batch = tree_batch(parse_tree(tree), PAGE_SIZE, page_seed=1)
    return batch, Forest(*build_forest(batch.block_table, batch.seq_lens, batch.query_lens, PAGE_SIZE, 1))


def measure(heads: str, tree: str, card: Card) -> dict[str, Any]:
    """Microseconds of every tiling of one tree."""
    hq, hkv = map(int, heads.split("/"))
    case = make_case(tree, hq, hkv, torch.bfloat16, torch.bfloat16)
    rule = make_rule(card, heads)
    found = {}
    for way in tiling.candidates(rule):
        run = make_run(case, rule, list_tiles(case.batch, rule, way), DECODE_TILES)
        error = largest_error(case, run(0))
        if error > TOLERANCE:
            raise SystemExit(f"{heads} {tree} {way.name(rule)}: error {error:.3g}")
        found[way.name(rule)] = round(microseconds(run, len(case.kv)), 2)
    return {"heads": heads, "tree": tree, "us": found}


@dataclass(frozen=True)
class Measured:
    """One batch: what the prediction needs, and the measured ns of each tiling."""

    heads: str
    stages: list[list[tuple[int, tiles.Stage]]]
    blocks: list[list[NDArray[np.int64]]]
    num_queries: int
    memory: list[int]
    ns: NDArray[np.float64]
    names: list[str]


def prepare(row: dict[str, Any], card: Card) -> Measured:
    """Everything of a measured batch that does not depend on the times."""
    rule = make_rule(card, row["heads"])
    batch, forest = batch_of(row["tree"])
    entries = tiles.make_entries(forest, batch.seq_lens, batch.query_start_loc)
    ways = [way for way in tiling.candidates(rule) if way.name(rule) in row["us"]]
    stages = [tiling.stages_of(rule, way) for way in ways]
    blocks = [
        [tile_costs.stage_blocks(forest, entries, stage, UNLIMITED, rule.run) for _, stage in each] for each in stages
    ]
    names = [way.name(rule) for way in ways]
    memory = [tiling.memory_ns(rule, forest, entries, each, UNLIMITED) for each in stages]
    return Measured(
        row["heads"], stages, blocks, len(entries.query), memory, 1e3 * np.array([row["us"][n] for n in names]), names
    )


def predict(rows: list[Measured], card: Card, times: NDArray[np.float64]) -> list[NDArray[np.float64]]:
    """Predicted ns of every tiling of every batch."""
    rules = {heads: make_rule(card, heads, times) for heads in {row.heads for row in rows}}
    return [
        np.array(
            [
                tiling.predict_ns(rules[row.heads], stages, blocks, row.num_queries, memory)
                for stages, blocks, memory in zip(row.stages, row.blocks, row.memory, strict=True)
            ],
            np.float64,
        )
        for row in rows
    ]


def losses(rows: list[Measured], predicted: list[NDArray[np.float64]]) -> tuple[float, float]:
    """Mean |log| error of the predictions up to a constant of the batch, and mean log loss of the choice."""
    errors, regrets = [], []
    for row, times in zip(rows, predicted, strict=True):
        ratio = np.log(times / row.ns)
        errors.append(np.abs(ratio - np.median(ratio)).mean())
        regrets.append(math.log(row.ns[np.argmin(times)] / row.ns.min()))
    return float(np.mean(errors)), float(np.mean(regrets))


def fit(rows: list[Measured], card: Card, seconds: float) -> NDArray[np.float64]:
    """Random steps that shrink; the last ones by a few per cent."""
    rng = np.random.default_rng(0)

    def loss(times: NDArray[np.float64]) -> float:
        error, regret = losses(rows, predict(rows, card, times))
        return error + 2 * regret

    best = start()
    least = loss(best)
    begin = time.perf_counter()
    while (share := (time.perf_counter() - begin) / seconds) < 1:
        step = np.exp(rng.normal(0, 0.25 if share < 0.5 else 0.06, len(best)) * (rng.random(len(best)) < 0.25))
        if (found := loss(best * step)) < least:
            best, least = best * step, found
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", nargs="+", default=("32/8", "16/8"), help="query heads / KV heads")
    parser.add_argument("--trees", nargs="+", default=PAT_TREES)
    parser.add_argument("--fit", type=Path, help="a result of this script; measures nothing")
    parser.add_argument("--seconds", type=float, default=120, help="that the fit may take")
    arguments = parser.parse_args()
    if arguments.fit:
        result = json.loads(arguments.fit.read_text())
        card, rows = Card(**result["card"]), result["rows"]
    else:
        properties = torch.cuda.get_device_properties(0)
        card = Card(properties.multi_processor_count, int(ceilings()[0]), properties.L2_cache_size)
        rows = []
        for heads in arguments.heads:
            for tree in arguments.trees:
                rows.append(measure(heads, tree, card))
                print(heads, tree, sorted(rows[-1]["us"].items(), key=lambda item: item[1])[:4], flush=True)
                torch.cuda.empty_cache()
        name = torch.cuda.get_device_name().split()[-1].lower()
        print(write_result(f"calibration-{name}", {"card": card.__dict__, "rows": rows}, "triton"))
    prepared = [prepare(row, card) for row in rows]
    print(
        "today's table: error {:.3f}, loss of the choice {:.4f}".format(
            *losses(prepared, predict(prepared, card, start()))
        )
    )
    best = fit(prepared, card, arguments.seconds)
    predicted = predict(prepared, card, best)
    print("fitted: error {:.3f}, loss of the choice {:.4f}".format(*losses(prepared, predicted)))
    for tile, row in zip(DECODE_TILES, best[:-1].reshape(-1, 4).round(-1).astype(int).tolist(), strict=True):
        print(replace(tile, block_ns=tuple(row[:2]), chain_ns=tuple(row[2:])))
    print(f"launch_ns={best[-1]:.0f}")
    for row, times, source in zip(prepared, predicted, rows, strict=True):
        chosen, least = int(np.argmin(times)), int(np.argmin(row.ns))
        if row.ns[chosen] > 1.02 * row.ns[least]:
            ours, other = (f"{row.names[i]} {row.ns[i] / 1e3:.1f} µs" for i in (chosen, least))
            print(f"{source['heads']} {source['tree']}: chooses {ours}, best {other}")


if __name__ == "__main__":
    main()
