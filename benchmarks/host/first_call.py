"""The first minute: what imports load and take, and what the first plan and run of README's library example take.

    python -m benchmarks.host.first_call                                     # results/first-call-cpu.json
    python -m benchmarks.host.first_call --source ../old --source .          # checkouts, in turns

Every figure is of a fresh process; medians of `--rounds`. `import_ms`: of only the name, after torch, and whether it
loaded Numba and LLVM. `cold`: with an empty folder for compiled code (NUMBA_CACHE_DIR); `warm`: with the folder that a
cold process left. `*_cpu_s` is the time that the process computed, which other load changes less than `*_s`.
`stderr`: what a cold process says there.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final

from benchmarks.lib.options import existing, integer
from benchmarks.lib.report import write_result

NAMES: Final = ("", "AttentionConfig", "BatchAttention", "Capacity", "flash_attention", "merge_states", "write_kv")

IMPORT: Final = """
import json, sys, time
start = time.perf_counter()
import torch
torch_s = time.perf_counter() - start
start = time.perf_counter()
import trunkattn
if {name!r}:
    getattr(trunkattn, {name!r})
own_s = time.perf_counter() - start
loaded = {{package: package in sys.modules for package in ("numba", "llvmlite", "triton", "transformers")}}
print(json.dumps({{"import_ms": own_s * 1e3, "torch_ms": torch_s * 1e3, "loaded": loaded}}))
"""

EXAMPLE: Final = """
import json, time
import torch, trunkattn

def clocks():
    return time.perf_counter(), time.process_time()

begin = clocks()
config = trunkattn.AttentionConfig(num_qo_heads=9, num_kv_heads=3, head_dim=64, page_size=16, dtype=torch.float32)
attn = trunkattn.BatchAttention(config, device="cpu")
k_cache = torch.randn(200, 16, 3, 64)
v_cache = torch.randn(200, 16, 3, 64)
trunk = torch.arange(128).expand(32, 128)
leaves = torch.arange(128, 160).view(32, 1)
block_table = torch.cat([trunk, leaves], dim=1).to(torch.int32)
seq_lens = torch.full((32,), 128 * 16 + 5, dtype=torch.int32)
made = clocks()
plan = attn.plan(block_table, seq_lens)
planned = clocks()
q = torch.randn(32, 9, 64)
out = attn.run(plan, q, k_cache, v_cache)
ran = clocks()
assert out.isfinite().all() and plan.stats.kv_tokens_read == 2208
found = {}
for name, (first, last) in {"make": (begin, made), "plan": (made, planned), "run": (planned, ran)}.items():
    found[f"{name}_s"], found[f"{name}_cpu_s"] = last[0] - first[0], last[1] - first[1]
found["plan_and_run_s"] = found["plan_s"] + found["run_s"]
found["plan_and_run_cpu_s"] = found["plan_cpu_s"] + found["run_cpu_s"]
print(json.dumps(found))
"""


def fresh(source: Path, program: str, cache: str) -> tuple[dict[str, Any], str]:
    """What a program prints in a process of its own, and what that says on stderr."""
    variables = os.environ | {"PYTHONPATH": str(source / "src"), "NUMBA_CACHE_DIR": cache}
    done = subprocess.run([sys.executable, "-c", program], cwd=cache, env=variables, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{source}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found, done.stderr.replace(cache, "CACHE").strip()


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Median of each figure."""
    return {name: round(median(each[name] for each in rounds), 3) for name in rounds[0]}


def commit(source: Path) -> str:
    done = subprocess.run(
        ["git", "-C", str(source), "describe", "--always", "--dirty=+"], capture_output=True, text=True
    )
    return done.stdout.strip()


class Measured:
    """The rounds of one checkout."""

    def __init__(self, source: Path) -> None:
        self.source = source
        self.imports: dict[str, list[dict[str, Any]]] = {name: [] for name in NAMES}
        self.cold: list[dict[str, float]] = []
        self.warm: list[dict[str, float]] = []
        self.stderr = ""

    def imports_once(self) -> None:
        with TemporaryDirectory() as cache:
            for name in NAMES:
                self.imports[name].append(fresh(self.source, IMPORT.format(name=name), cache)[0])

    def example_once(self) -> None:
        with TemporaryDirectory() as cache:
            found, self.stderr = fresh(self.source, EXAMPLE, cache)
            self.cold.append(found)
            self.warm.append(fresh(self.source, EXAMPLE, cache)[0])

    def figures(self) -> dict[str, Any]:
        imports = {
            f"trunkattn.{name}".rstrip("."): {
                "import_ms": round(median(each["import_ms"] for each in rounds), 1),
                "loads": [package for package, loaded in rounds[-1]["loaded"].items() if loaded],
            }
            for name, rounds in self.imports.items()
        }
        torch_ms = round(median(each["torch_ms"] for rounds in self.imports.values() for each in rounds), 1)
        return {
            "source": self.source.name,
            "commit": commit(self.source),
            "torch_ms": torch_ms,
            "imports": imports,
            "cold": medians(self.cold),
            "warm": medians(self.warm),
            "stderr": self.stderr,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=existing, action="append", help="root of a checkout; repeat it to compare")
    parser.add_argument("--rounds", type=integer(1, 100), default=3, help="of each figure; default 3")
    parser.add_argument("--output", type=Path, help="a file for the JSON; default: results/first-call-cpu.json")
    options = parser.parse_args()
    sources = options.source or [Path(__file__).parents[2]]
    measured = [Measured(source.resolve()) for source in sources]
    for turn in range(options.rounds):
        for each in measured if turn % 2 == 0 else reversed(measured):
            each.imports_once()
            each.example_once()
            print(turn, each.source, each.cold[-1], each.warm[-1], flush=True)
    figures = {"rounds": options.rounds, "rows": [each.figures() for each in measured]}
    print(write_result("first-call-cpu", figures, path=options.output))


if __name__ == "__main__":
    main()
