"""The planner on one CPU core: cold build, patch, growth with the table, and how far the policies are from the optimum.

python -m benchmarks.host.planner     # writes benchmarks/results/planner-cpu.json
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.options import no_options
from benchmarks.lib.report import time_ms, write_result
from benchmarks.workloads.forests import random_forest
from trunkattn.analysis.trees import parse_tree, tree_batch
from trunkattn.config import POLICIES
from trunkattn.cpu.tuning import cpu_device
from trunkattn.planner.packs import policies as packing
from trunkattn.planner.packs.cost import CostModel, cost_model
from trunkattn.planner.packs.optimal import optimal
from trunkattn.planner.planner import HEURISTICS, Planner, PlannerSpec, StepTables
from trunkattn.planner.prefix_forest import Forest, build_forest
from trunkattn.planner.splitting import split_rule

PAGE = 16
FORESTS = 10_000


def spec(policy: str) -> PlannerSpec:
    """SmolLM2's attention on two cores."""
    device = cpu_device(2)
    model = cost_model(device, 9, 3, 64, 64, 4)
    return PlannerSpec(PAGE, policy, model, split_rule(device, model, 3, 128, 0))


def tree_of(rows: int, pages: int, extra: int = 0) -> StepTables:
    """A decode batch: one root, 8 groups, 64 subgroups and private tails; `extra` more tokens per row."""
    quarter = pages // 4 * PAGE
    tree = f"1,{min(8, rows)},{min(64, rows)},{rows}_{quarter},{quarter},{quarter},{pages * PAGE - 3 * quarter}"
    batch = tree_batch(parse_tree(tree), page_size=PAGE)
    spare = np.arange(batch.num_pages, batch.num_pages + rows * 4, dtype=np.int32).reshape(rows, 4)
    table = np.concatenate([batch.block_table, spare], axis=1)
    lens = batch.seq_lens + np.int32(extra - 8)
    return StepTables(table, lens, np.arange(rows + 1, dtype=np.int32))


def cold_ms(policy: str, batch: StepTables, repeats: int = 50) -> dict[str, float]:
    return time_ms(lambda: Planner(spec(policy)).plan(batch), repeats)


def patch_ms(policy: str) -> dict[str, float]:
    """A decode step: every row is one token longer than at the plan before."""
    planner, steps = Planner(spec(policy)), 40
    batches = iter([tree_of(256, 256, extra) for extra in range(steps + 6)])
    planner.plan(next(batches))
    return time_ms(lambda: planner.plan(next(batches)), steps)


def growth() -> list[dict[str, float]]:
    """Cold build against table entries, policy auto and pat."""
    points = []
    for rows, pages in ((64, 64), (64, 256), (128, 256), (256, 256), (256, 512), (512, 512), (1024, 512), (1024, 1024)):
        batch = tree_of(rows, pages)
        auto, pat = cold_ms("auto", batch, 20)["median_ms"], cold_ms("pat", batch, 20)["median_ms"]
        points.append({"rows": rows, "pages": pages, "entries": rows * pages, "auto_ms": auto, "pat_ms": pat})
    return points


def costs(forest: Forest, start: np.ndarray, query_lens: np.ndarray, model: CostModel) -> tuple[int, int]:
    """(cost in bytes, KV bytes read)."""
    first_visible = np.zeros(len(query_lens), np.int32)
    packs = packing.collect_packs(forest, start, first_visible)
    reads = int((packs.token_end.astype(np.int64) - packs.token_start).sum()) * model.kv_bytes
    return int(packing.packing_cost(forest, start, first_visible, query_lens, model)), reads


def distances(model: CostModel) -> dict[str, dict[str, float]]:
    """Cost and KV bytes of each policy over the optimum's, on random decode batches that share something."""
    rng = np.random.default_rng(0)
    ratios: dict[str, list[tuple[float, float]]] = {name: [] for name in HEURISTICS}
    found = 0
    while found < FORESTS:
        batch = random_forest(rng, page_size=PAGE, max_requests=32, max_own_tokens=1024, max_query_len=1)
        forest = Forest(*build_forest(batch.block_table, batch.seq_lens, batch.query_lens, PAGE, 1))
        if len(forest.order) == 0 or forest.is_leaf.all() or forest.depth.max() > 12:
            continue
        found += 1
        queries = packing.queries_below(forest, batch.query_lens)
        best, best_reads = costs(forest, optimal(forest, queries, model), batch.query_lens, model)
        for name, policy in HEURISTICS.items():
            cost, reads = costs(forest, policy(forest, queries, model), batch.query_lens, model)
            assert cost >= best, f"{name} beats optimal: {cost} < {best}"
            ratios[name].append((cost / best, reads / best_reads))
    summary = {}
    for name, pairs in ratios.items():
        cost, reads = np.array(pairs).T
        summary[name] = {
            "cost_mean": cost.mean(), "cost_p99": np.quantile(cost, 0.99), "cost_max": cost.max(),
            "equal_share": (cost == 1).mean(), "bytes_mean": reads.mean(), "bytes_max": reads.max(),
        }  # fmt: skip
        summary[name] = {key: round(float(value), 4) for key, value in summary[name].items()}
    return summary


def plain_python_ms() -> float:
    """Milliseconds of the same cold build with numba switched off, in a process of its own."""
    call = "planner.Planner(planner.spec('pat')).plan(batch)"
    timed = f"report.time_ms(lambda: {call}, 3, 1)['median_ms']"
    imports = "from benchmarks.host import planner; from benchmarks.lib import report"
    code = f"{imports}; batch = planner.tree_of(256, 256); print({timed})"
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout)


def main() -> None:
    batch = tree_of(256, 256)
    table = {
        policy: {
            "cold": cold_ms(policy, batch),
            "patch": patch_ms(policy),
        }
        for policy in POLICIES
    }
    points = growth()
    models = {
        "SmolLM2 9/3 heads of 64, float32, CPU": spec("auto").model,
        "Llama-3-8B 32/8 heads of 128, bfloat16, tiles of 128 rows": CostModel(
            kv_bytes=4096, partial_bytes=33_024, item_bytes=65_536, queries_per_tile=32, group_size=4
        ),
    }
    figures: dict[str, Any] = {
        "batch": "256 requests × 256 pages of 16, tree 1,8,64,256",
        "policies_ms": table,
        "plain_python_cold_pat_ms": plain_python_ms(),
        "growth": points,
        "distance_from_optimal": {name: distances(model) for name, model in models.items()},
        "forests": FORESTS,
    }
    for policy, row in table.items():
        print(policy, {name: value["median_ms"] for name, value in row.items()})
    for name, summary in figures["distance_from_optimal"].items():
        print(name, *(f"{policy}: {row}" for policy, row in summary.items()), sep="\n  ")
    print(write_result("planner-cpu", figures))


if __name__ == "__main__":
    no_options(__doc__)
    main()
