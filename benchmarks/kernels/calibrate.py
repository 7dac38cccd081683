"""Measures every tiling of PAT's trees and of ragged batches on this card, and fits the tile table's times to them.

    python -m benchmarks.kernels.calibrate [--heads 32/8 16/8]     # results/calibration-CARD.json
    python -m benchmarks.kernels.calibrate --trees 3_16384 --ragged      # only these; the file keeps the other batches
    python -m benchmarks.kernels.calibrate --fit FILE              # only the fit, on what was measured; needs no GPU

The fit looks for the times (block_ns and chain_ns of each tile, and launch_ns) with the least error of the predicted
times and the least loss of the tiling that they would choose against the best one, by random steps from today's table.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.kernels.decode import (
    HEAD_DIM,
    HEADS,
    PAGE_SIZE,
    TOLERANCE,
    TREE,
    ceilings,
    largest_error,
    make_case,
    microseconds,
)
from benchmarks.kernels.ragged_batches import make_batches
from benchmarks.kernels.ragged_batches import make_case as make_ragged_case
from benchmarks.kernels.tile_lists import list_tiles, make_run, tile_rule
from benchmarks.lib.options import existing, integer, need_gpu
from benchmarks.lib.report import short_name, with_earlier, write_result
from benchmarks.workloads import PagedBatch
from benchmarks.workloads.pat_trees import PAT_TREES
from trunkattn.analysis.trees import parse_tree, tree_batch
from trunkattn.gpu.cards import H200
from trunkattn.gpu.hopper.spec import tiles_of as hopper_tiles
from trunkattn.gpu.portable.spec import DECODE_TILES
from trunkattn.gpu.tiles import GpuTile
from trunkattn.planner.device import CardTimes
from trunkattn.planner.prefix_forest import Forest, build_forest
from trunkattn.planner.tiles import candidates as tiling
from trunkattn.planner.tiles import cost as tile_costs
from trunkattn.planner.tiles import layout
from trunkattn.planner.work_list import UNLIMITED

RAGGED = ("conversation:64", "conversation:256", "toolagent:64", "toolagent:256")


@dataclass(frozen=True)
class MeasuredCard:
    """What the rule takes from the device."""

    num_sms: int
    bytes_per_us: int
    l2_bytes: int = 50 << 20
    hopper: bool = False

    @classmethod
    def of_result(cls, figures: dict[str, Any]) -> "MeasuredCard":
        """What `figures` has written."""
        return cls(figures["processors"], figures["bytes_per_us"], figures["l2_bytes"], figures["hopper"])

    @property
    def figures(self) -> dict[str, Any]:
        """Figures for a result."""
        fields = {"bytes_per_us": self.bytes_per_us, "l2_bytes": self.l2_bytes, "hopper": self.hopper}
        return {"processors": self.num_sms} | fields

    @property
    def tiles(self) -> tuple[GpuTile, ...]:
        """Tiles that it runs."""
        return hopper_tiles(2, HEAD_DIM, PAGE_SIZE) if self.hopper else DECODE_TILES


def rule_of(card: MeasuredCard, heads: str, tiles: tuple[GpuTile, ...], times: CardTimes) -> tiling.TilingRule:
    """The rule of `BatchAttention` for bf16."""
    hq, hkv = map(int, heads.split("/"))
    return tile_rule(tiles, (hq, hkv, HEAD_DIM), (card.num_sms, card.l2_bytes), times)


def make_rule(card: MeasuredCard, heads: str, times: NDArray[np.float64] | None = None) -> tiling.TilingRule:
    """The rule with other times of tiles and launches, in the order of `start`; None: today's."""
    table = start(card) if times is None else times
    timed = tuple(
        replace(tile, block_ns=(int(row[0]), int(row[1])), chain_ns=(int(row[2]), int(row[3])))
        for tile, row in zip(card.tiles, table[:-1].reshape(-1, 4), strict=True)
    )
    fitted = H200.times._replace(bytes_per_us=card.bytes_per_us, launch_ns=int(table[-1]))
    return rule_of(card, heads, timed, fitted)


def start(card: MeasuredCard) -> NDArray[np.float64]:
    """Today's times: block_ns and chain_ns (full, masked) of each tile, then launch_ns."""
    return np.array(
        [value for tile in card.tiles for value in (*tile.block_ns, *tile.chain_ns)] + [H200.times.launch_ns],
        np.float64,
    )


def batch_of(name: str) -> tuple[PagedBatch, Forest]:
    """A tree, as kernels.make_case has it, or a workload without a trace, such as "conversation 64"; and its forest."""
    workload, _, count = name.partition(" ")
    batch = make_batches((), int(count))[workload] if count else tree_batch(parse_tree(name), PAGE_SIZE, page_seed=1)
    return batch, Forest(*build_forest(batch.block_table, batch.seq_lens, batch.query_lens, PAGE_SIZE, 1))


def measure(heads: str, name: str, card: MeasuredCard) -> dict[str, Any]:
    """Microseconds of every tiling of one batch."""
    hq, hkv = map(int, heads.split("/"))
    if " " in name:
        case = make_ragged_case(batch_of(name)[0], heads, torch.bfloat16)
    else:
        case = make_case(name, hq, hkv, torch.bfloat16, torch.bfloat16)
    rule = make_rule(card, heads)
    found = {}
    for candidate in tiling.candidates(rule):
        run = make_run(case, rule, list_tiles(case.batch, rule, candidate), card.tiles)
        error = largest_error(case, run(0))
        if error > TOLERANCE:
            raise SystemExit(f"{heads} {name} {candidate.name(rule)}: error {error:.3g}")
        found[candidate.name(rule)] = round(microseconds(run, len(case.kv)), 2)
    return {"heads": heads, "batch": name, "us": found}


@dataclass(frozen=True)
class Measured:
    """One batch: what the prediction needs, and the ns of each tiling that was measured, by its number in the rule."""

    heads: str
    loads: tile_costs.StageLoads
    numbers: list[int]
    ns: NDArray[np.float64]
    names: list[str]


def prepare(row: dict[str, Any], card: MeasuredCard) -> Measured:
    """Everything of a measured batch that does not depend on the times."""
    rule = make_rule(card, row["heads"])
    batch, forest = batch_of(row["batch"])
    entries = layout.make_entries(forest, batch.seq_lens, batch.query_start_loc)
    tilings, stages, costs = rule.priced.tilings, rule.priced.stages, rule.priced.costs
    loads = tile_costs.stage_loads(forest, entries, stages, costs.l2_tokens, UNLIMITED, rule.segment_size)
    numbers = [number for number, candidate in enumerate(tilings) if candidate.name(rule) in row["us"]]
    names = [tilings[number].name(rule) for number in numbers]
    return Measured(row["heads"], loads, numbers, 1e3 * np.array([row["us"][name] for name in names]), names)


def predict(rows: list[Measured], card: MeasuredCard, times: NDArray[np.float64]) -> list[NDArray[np.int64]]:
    """Predicted ns of every measured tiling of every batch."""
    priced = {heads: make_rule(card, heads, times).priced for heads in {row.heads for row in rows}}
    return [predicted(row, priced[row.heads]) for row in rows]


def predicted(row: Measured, priced: tiling.PricedTilings) -> NDArray[np.int64]:
    """Predicted time of every measured tiling of a batch."""
    return tile_costs.tilings_ns(row.loads, priced.stages, priced.launches, priced.costs)[row.numbers]


def losses(rows: Sequence[Any], predicted: list[NDArray[np.int64]]) -> tuple[float, float]:
    """Mean |log| error of the predictions up to a constant of the batch, and mean log loss of the choice."""
    errors, regrets = [], []
    for row, times in zip(rows, predicted, strict=True):
        ratio = np.log(times / row.ns)
        errors.append(np.abs(ratio - np.median(ratio)).mean())
        regrets.append(math.log(row.ns[np.argmin(times)] / row.ns.min()))
    return float(np.mean(errors)), float(np.mean(regrets))


def fit(rows: list[Measured], card: MeasuredCard, seconds: float) -> NDArray[np.float64]:
    """The times with the least error and the least loss of the choice."""
    return random_steps(start(card), lambda times: losses(rows, predict(rows, card, times)), seconds)


def random_steps(
    start: NDArray[np.float64], losses_of: Callable[[NDArray[np.float64]], tuple[float, float]], seconds: float
) -> NDArray[np.float64]:
    """Random steps that shrink; the last ones by a few per cent. losses_of: error of the prediction and loss of the
    choice, which counts twice."""
    rng = np.random.default_rng(0)

    def loss(times: NDArray[np.float64]) -> float:
        error, regret = losses_of(times)
        return error + 2 * regret

    best, least = start, loss(start)
    begin = time.perf_counter()
    while (share := (time.perf_counter() - begin) / seconds) < 1:
        step = np.exp(rng.normal(0, 0.25 if share < 0.5 else 0.06, len(best)) * (rng.random(len(best)) < 0.25))
        if (found := loss(best * step)) < least:
            best, least = best * step, found
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=("32/8", "16/8"), help="query heads / KV heads")
    parser.add_argument(
        "--trees", nargs="*", type=TREE, default=PAT_TREES, help="nodes per level _ tokens per level; default: PAT's 20"
    )
    parser.add_argument(
        "--ragged", nargs="*", default=RAGGED, help="workloads and their requests, such as conversation:64"
    )
    parser.add_argument("--fit", type=existing, help="a result of this script; measures nothing")
    parser.add_argument("--seconds", type=integer(0, 100_000), default=120, help="that the fit may take; 0: no fit")
    arguments = parser.parse_args()
    if arguments.fit:
        result = json.loads(arguments.fit.read_text())
        card, rows = MeasuredCard.of_result(result["card"]), result["rows"]
    else:
        need_gpu(", or --fit")
        properties = torch.cuda.get_device_properties(0)
        hopper = (properties.major, properties.minor) == (9, 0)
        card = MeasuredCard(properties.multi_processor_count, int(ceilings()[0]), properties.L2_cache_size, hopper)
        rows = []
        for heads in arguments.heads:
            for name in (*arguments.trees, *(each.replace(":", " ") for each in arguments.ragged)):
                rows.append(measure(heads, name, card))
                print(heads, name, sorted(rows[-1]["us"].items(), key=lambda item: item[1])[:4], flush=True)
                torch.cuda.empty_cache()
        name = f"calibration-{short_name(torch.cuda.get_device_name())}"
        rows = with_earlier(name, rows, ("heads", "batch"))
        print(write_result(name, {"card": card.figures, "rows": rows}, "triton"))
    prepared = [prepare(row, card) for row in rows]
    print(
        "today's table: error {:.3f}, loss of the choice {:.4f}".format(
            *losses(prepared, predict(prepared, card, start(card)))
        )
    )
    if not arguments.seconds:
        return
    best = fit(prepared, card, arguments.seconds)
    fitted = predict(prepared, card, best)
    print("fitted: error {:.3f}, loss of the choice {:.4f}".format(*losses(prepared, fitted)))
    for tile, row in zip(card.tiles, best[:-1].reshape(-1, 4).round(-1).astype(int).tolist(), strict=True):
        print(replace(tile, block_ns=tuple(row[:2]), chain_ns=tuple(row[2:])))
    print(f"launch_ns={best[-1]:.0f}")
    for batch, times, source in zip(prepared, fitted, rows, strict=True):
        chosen, least = int(np.argmin(times)), int(np.argmin(batch.ns))
        if batch.ns[chosen] > 1.02 * batch.ns[least]:
            ours, other = (f"{batch.names[i]} {batch.ns[i] / 1e3:.1f} µs" for i in (chosen, least))
            print(f"{source['heads']} {source['batch']}: chooses {ours}, best {other}")


if __name__ == "__main__":
    main()
