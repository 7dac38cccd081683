"""What each part of the design is worth on an NVIDIA GPU: packing policies, executions, tiles, merging, suffix packing
and nested subtiles (PAT's Figures 5a and 11).

    python -m benchmarks.kernels.ablation                     # results/ablation-CARD.json
    python -m benchmarks.kernels.ablation --no-ncu            # only times

Times and errors are measured as in decode.py. Bytes are those that the tile list is planned to move and, where Nsight
Compute's `ncu` is on PATH, those that it counts between the L2 cache and DRAM, each variant run once on a cold cache.
"""

import argparse
import csv
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from benchmarks.kernels.decode import HEADS, PAGE_SIZE, TREE, Case, Run, make_case, measure
from benchmarks.kernels.decode_cases import FLUSH_BYTES
from benchmarks.kernels.tile_lists import arrays_of, list_tiles, make_run, planned_bytes, rule_on_card
from benchmarks.lib.internals import step_of
from benchmarks.lib.options import need_gpu
from benchmarks.lib.report import short_name, write_result
from trunkattn import AttentionConfig, BatchAttention
from trunkattn.gpu.portable.spec import tiles_of as decode_tiles
from trunkattn.gpu.portable.spec import without_subtiles
from trunkattn.gpu.tiles import GpuTile, gpu_device
from trunkattn.planner.from_config import make_planner
from trunkattn.planner.planner import StepTables
from trunkattn.planner.tiles.candidates import Tiling, TilingRule, candidates
from trunkattn.planner.tiles.pack_items import tile_work
from trunkattn.planner.work_list import TileList

TREES = ("1,256_256,32", "1,4,16,512_1024,256,128,32", "1,8,512_32,2048,256")
POLICIES = ("auto", "per_query", "cascade", "fasttree", "pat", "optimal")
# 4 warps spill 64 to 112 bytes of a thread on sm_90, 8 warps none or 24
FIXED = tuple(GpuTile(64, 128, warps, 2, ctas_per_sm=1, block_ns=(1, 1), chain_ns=(1, 1)) for warps in (4, 8))
METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
NCU_SECONDS = 240
FLUSH_KERNEL = "reduce_kernel"  # torch.sum
KERNELS = f"(hopper_)?decode_kernel|merge_kernel|{FLUSH_KERNEL}"


@dataclass(frozen=True)
class Variant:
    """A variant. part: of the design, that is varied. tiling: what was chosen."""

    part: str
    name: str
    tiling: str
    listed: TileList
    run: Run


@dataclass(frozen=True)
class Setting:
    """A batch and the tiles of the table for it, with their rule."""

    case: Case
    tiles: tuple[GpuTile, ...]
    rule: TilingRule

    @property
    def config(self) -> AttentionConfig:
        """Configuration of the batch, policy `auto`."""
        return AttentionConfig(*self.case.heads, PAGE_SIZE, self.case.q.dtype, kv_dtype=self.case.kv[0][0].dtype)

    def with_tiles(self, tiles: tuple[GpuTile, ...]) -> "Setting":
        """This batch with other tiles."""
        return Setting(self.case, tiles, rule_on_card(self.case, tiles))

    def with_fuse_up_to(self, partials: int) -> "Setting":
        """This batch where items merge at most so many partials."""
        return replace(self, rule=replace(self.rule, fuse_up_to=partials))


def setting_of(case: Case) -> Setting:
    """A setting as `BatchAttention` has it on any card; on an sm_90 its `auto`, run serially, has its own tiles."""
    hq, hkv, dim = case.heads
    tiles = decode_tiles(case.kv[0][0].itemsize, dim, hq // hkv)
    return Setting(case, tiles, rule_on_card(case, tiles))


def through_api(setting: Setting, policy: str, execution: str) -> Variant:
    """A variant that `BatchAttention` offers."""
    case = setting.case
    attention = BatchAttention(replace(setting.config, policy=policy, execution=execution), case.q.device)
    plan = attention.plan(torch.from_numpy(case.batch.block_table), torch.from_numpy(case.batch.seq_lens))
    out = torch.full_like(case.q, math.nan)

    def run(copy: int) -> torch.Tensor:
        attention.run(plan, case.q, *case.kv[copy], out=out)
        return out

    part, name = ("policy", policy) if execution == "serial" else ("execution", f"{policy}, {execution}")
    return Variant(part, name, plan.stats.policy, step_of(plan).tile_list, run)


def packed(setting: Setting, part: str, name: str) -> Variant:
    """PAT's packing in any tiles, merged in any way."""
    case, rule = setting.case, setting.rule
    num_sms = torch.cuda.get_device_properties(case.q.device).multi_processor_count
    planner = make_planner(replace(setting.config, policy="pat"), gpu_device(num_sms, setting.tiles[-1].block_m))
    work = planner.plan(StepTables(*arrays_of(case.batch))).work
    listed = tile_work(rule, work, StepTables(*arrays_of(case.batch)))
    return Variant(part, name, "pat", listed, make_run(case, rule, listed, setting.tiles))


def tiled(setting: Setting, tiling: Tiling, part: str, name: str, planned_as: TilingRule | None = None) -> Variant:
    """Row tiles over the forest. planned_as: the rule that the planner is given, if that is not the tiles' own."""
    case, rule = setting.case, setting.rule
    listed = list_tiles(case.batch, planned_as or rule, tiling)
    return Variant(part, name, tiling.name(rule), listed, make_run(case, rule, listed, setting.tiles))


def variants(case: Case) -> list[Variant]:
    """All of them, `auto` first."""
    setting = setting_of(case)
    flat = setting.with_tiles(without_subtiles(setting.tiles))
    rule = setting.rule
    both = next(tiling for tiling in candidates(rule) if tiling.tall is not None)
    both_uncut, tall_uncut = replace(both, waves=0), Tiling(len(rule.tiles) - 1, waves=0)
    # low tiles of so few rows hold one query token; the kernel computes as many rows as ever
    low_rows = replace(rule.tiles[both.low], rows=rule.group_size)
    tiles = tuple(low_rows if index == both.low else tile for index, tile in enumerate(rule.tiles))
    return [
        *(through_api(setting, policy, "serial") for policy in POLICIES),
        *(through_api(setting, policy, execution) for policy in ("auto", "pat") for execution in ("streams",)),
        *(packed(setting.with_tiles((tile,)), "tile", f"pat, 64x128, {tile.warps} warps") for tile in FIXED),
        packed(flat, "merge", "pat, by items"),
        packed(flat.with_fuse_up_to(0), "merge", "pat, by a kernel"),
        tiled(setting, both, "merge", "two tiles, by items"),
        tiled(setting.with_fuse_up_to(0), both, "merge", "two tiles, by a kernel"),
        tiled(setting, both_uncut, "suffix packing", "several suffixes a low tile"),
        tiled(setting, both_uncut, "suffix packing", "one suffix a low tile", replace(rule, tiles=tiles)),
        tiled(setting, tall_uncut, "subtiles", "nested"),
        tiled(flat, tall_uncut, "subtiles", "none"),
    ]


def cases(arguments: argparse.Namespace) -> Iterator[tuple[str, str, Case]]:
    """(heads, tree, case) of every cell."""
    for heads in arguments.heads:
        for tree in arguments.trees:
            hq, hkv = map(int, heads.split("/"))
            yield heads, tree, make_case(tree, hq, hkv, torch.bfloat16, torch.bfloat16)


def rows_of(heads: str, tree: str, case: Case) -> list[dict[str, Any]]:
    """One cell: every variant's time, error and planned bytes."""
    found = []
    for variant in variants(case):
        found.append(
            {
                "heads": heads, "tree": tree, "part": variant.part, "variant": variant.name, "tiling": variant.tiling,
                "items": len(variant.listed.items), **measure(case, variant.run),
                "planned_bytes": asdict(planned_bytes(case, variant.listed)), "dram_bytes": None,
            }
        )  # fmt: skip
    auto = found[0].get("us")
    for row in found:
        row["times_auto"] = round(row["us"] / auto, 3) if auto and "us" in row else None
    return found


def run_once(arguments: argparse.Namespace) -> None:
    """What `ncu` watches: each variant once, after a read that leaves nothing of it in the L2 cache. A read, because
    what a fill leaves there is written to memory when the variant evicts it."""
    flush = torch.ones(FLUSH_BYTES // 4, device="cuda")
    for _, _, case in cases(arguments):
        prepared = variants(case)
        for variant in prepared:
            variant.run(0)
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        for variant in prepared:
            flush.sum()
            variant.run(0)
        flush.sum()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def dram_bytes(text: str) -> list[dict[str, int]]:
    """Bytes that each variant of `run_once` read from memory and wrote there, from what `ncu --csv` printed.

    What a variant leaves in the L2 cache is written by the flush after it, so that flush's writes are counted too.

    Raises:
        ValueError: if that is no table of these kernels.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise ValueError(f"ncu printed no table, but {' / '.join(lines[-3:])!r}")
    found: list[dict[str, int]] = []
    flushed = False
    for row in csv.DictReader(lines[start:]):
        if row["Metric Unit"] != "byte" or row["Metric Name"] not in METRICS:
            raise ValueError(f"{row['Metric Name']} in {row['Metric Unit']!r}: expected {METRICS} in byte")
        is_flush, direction = FLUSH_KERNEL in row["Kernel Name"], ("read", "written")[METRICS.index(row["Metric Name"])]
        if flushed and not is_flush:
            found.append({"read": 0, "written": 0})
        flushed = is_flush
        if is_flush and (direction == "read" or not found):
            continue
        if not found:
            raise ValueError(f"{row['Kernel Name']} comes first: expected {FLUSH_KERNEL}")
        found[-1][direction] += int(float(row["Metric Value"].replace(",", "")))
    return found


def count_bytes(arguments: argparse.Namespace, num_variants: int) -> list[dict[str, int]]:
    """Counts the bytes of each variant of each cell: runs this script under `ncu`.

    Raises:
        ValueError: with the reason, if that does not count all of them.
    """
    ncu = shutil.which("ncu")
    if ncu is None:
        raise ValueError("ncu is not on PATH")
    options = ["--csv", "--print-units", "base", "--clock-control", "none", "--cache-control", "none"]
    options += ["--profile-from-start", "off", "--metrics", ",".join(METRICS), "--kernel-name", f"regex:{KERNELS}"]
    script = [
        sys.executable,
        "-m",
        "benchmarks.kernels.ablation",
        "--once",
        "--heads",
        *arguments.heads,
        "--trees",
        *arguments.trees,
    ]
    try:
        done = subprocess.run([ncu, *options, *script], capture_output=True, text=True, timeout=NCU_SECONDS)
    except subprocess.TimeoutExpired as late:
        raise ValueError(f"ncu took over {NCU_SECONDS} s") from late
    if done.returncode:
        raise ValueError(f"ncu ended with {done.returncode}: {(done.stdout + done.stderr)[-600:]}")
    found = dram_bytes(done.stdout)
    if len(found) != num_variants:
        raise ValueError(f"ncu saw {len(found)} variants: expected {num_variants}")
    return found


def add_dram_bytes(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> str | None:
    """Fills in what `ncu` counts; or says why there is nothing."""
    try:
        counted = count_bytes(arguments, len(rows))
    except ValueError as reason:
        return str(reason)
    for row, counts in zip(rows, counted, strict=True):
        row["dram_bytes"] = counts
    return None


def print_table(rows: list[dict[str, Any]]) -> None:
    """One cell, in MB and µs."""
    print(f"\n{rows[0]['heads']} {rows[0]['tree']}")
    print(f"{'':15}{'':28}{'µs':>8} {'× auto':>7} {'KV':>7} {'of tiles':>8} {'partials':>8} {'DRAM':>7}  tiling")
    for row in rows:
        planned, dram = row["planned_bytes"], row["dram_bytes"]
        sizes = [f"{planned[name] / 1e6:.1f}" for name in ("kv_memory", "kv_tiles", "partials")]
        sizes.append(f"{(dram['read'] + dram['written']) / 1e6:.1f}" if dram else "-")
        us, times = row.get("us", row.get("wrong")), row["times_auto"] or "-"
        cells = f"{us:>8} {times:>7} {sizes[0]:>7} {sizes[1]:>8} {sizes[2]:>8} {sizes[3]:>7}"
        print(f"{row['part']:15}{row['variant']:28}{cells}  {row['tiling']}, {row['items']} items", flush=True)


def parse_arguments() -> argparse.Namespace:
    """Checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", nargs="+", default=("32/8",), choices=HEADS, help="query heads / KV heads")
    parser.add_argument("--trees", nargs="+", type=TREE, default=TREES, help="nodes per level _ tokens per level")
    parser.add_argument("--no-ncu", action="store_true", help="count no bytes")
    parser.add_argument("--once", action="store_true", help="run each variant once and print nothing: for ncu")
    parsed = parser.parse_args()
    need_gpu()
    return parsed


def main() -> None:
    arguments = parse_arguments()
    if arguments.once:
        return run_once(arguments)
    cells = []
    for heads, tree, case in cases(arguments):
        cells.append(rows_of(heads, tree, case))
        print_table(cells[-1])
    rows = [row for cell in cells for row in cell]
    missing = "--no-ncu was given" if arguments.no_ncu else add_dram_bytes(rows, arguments)
    if missing:
        print(f"\nno DRAM bytes: {missing}")
    else:
        for cell in cells:
            print_table(cell)
    card = torch.cuda.get_device_name()
    figures = {"card": card, "dtype": "bfloat16", "page_size": PAGE_SIZE, "no_dram_bytes": missing, "rows": rows}
    print(write_result(f"ablation-{short_name(card)}", figures, "triton"))


if __name__ == "__main__":
    main()
