"""Which functions Numba compiles for plans of many kinds; each is printed. Run as a program with a cache of its own.

python -m tests.gpu.plan_script chunks           plans made on a device, beside prompt chunks
python -m tests.gpu.plan_script host ARGUMENTS   plans made on the host for random batches
python -m tests.gpu.plan_script ahead ARGUMENTS  the same, after another process has compiled the planner

ARGUMENTS are those of `planner_compilation.program`.
"""

import json
import sys
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import torch
from numba.core import event

from benchmarks.workloads import random_forest
from trunkattn import AttentionConfig, Capacity, PromptChunks
from trunkattn.gpu.attention import GpuBackend
from trunkattn.gpu.cards import GpuFacts
from trunkattn.gpu.device_planner import planner, prompt_chunks
from trunkattn.gpu.planner_compilation.process import compile_ahead
from trunkattn.planner.planner import StepTables
from trunkattn.planner.work_list import UNLIMITED
from trunkattn.step_inputs import StepInputs, check_step

CPU = torch.device("cpu")
PLAIN = AttentionConfig(8, 2, 128, 16, torch.bfloat16)
CONFIGS = (
    PLAIN,
    replace(PLAIN, num_kv_heads=8, head_dim=64, dtype=torch.float16, sinks=True),
    replace(PLAIN, num_kv_heads=1, head_dim=256, page_size=64, kv_dtype=torch.float8_e4m3fn),
    replace(PLAIN, head_dim=80, page_size=32, dtype=torch.float32),
)
CAPACITIES = (None, Capacity(64, 4000, 100, 10**6))


class Listener(event.Listener):
    """Prints what is compiled: Numba tells it of no function that it finds in its cache."""

    def on_start(self, event: Any) -> None:
        function = event.data["dispatcher"].py_func
        print(f"{function.__module__}.{function.__name__}{event.data['args']}")

    def on_end(self, event: Any) -> None:
        pass


def plan_on_host(facts: GpuFacts, batch_invariant: bool) -> None:
    """Decodes, prompts, both, and neither."""
    for config, capacity in product(CONFIGS, CAPACITIES):
        backend = GpuBackend(replace(config, batch_invariant=batch_invariant), CPU, capacity, facts=facts)
        for seed, most in product(range(6), (1, 40, 200)):
            rng = np.random.default_rng(seed)
            batch = random_forest(rng, page_size=config.page_size, max_query_len=most)
            decodes = len(batch.query_lens) > 0 and (batch.query_lens == 1).all()
            starts = None if decodes else torch.from_numpy(batch.query_start_loc)
            tables = (torch.from_numpy(batch.block_table), torch.from_numpy(batch.seq_lens), starts)
            window = int(rng.choice([50, UNLIMITED]))
            num_pages = None if seed % 2 else 10**6
            checked = check_step(StepInputs(*tables, None, num_pages), config.page_size, capacity, CPU)
            backend.plan(StepTables(*checked[:3], window)).stats()


def plan_beside_chunks() -> None:
    """As vLLM does on an H100. What is launched has nothing to do with Numba."""
    for module in (planner, prompt_chunks):
        module.launch = lambda kernel, grid: lambda *arguments, **options: None  # type: ignore[attr-defined]
    capacity = Capacity(8, 8, 256, 500, max_query_len=1, max_chunk_tokens=8192)
    backend = GpuBackend(PLAIN, CPU, capacity, facts=GpuFacts("NVIDIA H100 80GB HBM3", 132, 90, 50 << 20))
    table = torch.zeros(3, 256, dtype=torch.int32)
    lens, starts = (torch.tensor(numbers, dtype=torch.int32) for numbers in ([9, 4000, 30], [0, 1, 3001, 3021]))
    listed = PromptChunks(1, starts[1:].diff(), lens[1:], 8000)
    backend.overlaps(listed)
    for window in (UNLIMITED, 100):
        step = backend.plan_on_device((table[:1], lens[:1], starts[:2]), window)
        backend.plan_on_device((table, lens, starts), window, step, listed)


def main(what: str, *arguments: str) -> None:
    event.register("numba:compile", Listener())
    if what == "chunks":
        plan_beside_chunks()
        return
    *facts, batch_invariant = json.loads(arguments[0])
    if what == "ahead":
        compile_ahead(GpuFacts(*facts), batch_invariant).wait()
    plan_on_host(GpuFacts(*facts), batch_invariant)


if __name__ == "__main__":
    main(*sys.argv[1:])
