"""The program of the process that `compile_ahead` starts: it compiles the planner into Numba's cache. It needs no GPU.

    python -m trunkattn.gpu.planner_compilation.program '["NVIDIA H100 80GB HBM3", 132, 90, 52428800, false]'

Of several processes of a machine, such as those of tensor-parallel ranks, one compiles, and the others find its work.
"""

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

import torch

from trunkattn.compiled import cache_folder
from trunkattn.config import AttentionConfig
from trunkattn.gpu.attention import GpuBackend
from trunkattn.gpu.cards import GpuFacts
from trunkattn.planner.planner import StepTables
from trunkattn.planner.tiles.batch_invariant import SPAN_TOKENS
from trunkattn.step_inputs import StepInputs, check_step

_CPU: Final = torch.device("cpu")
_PAGE_SIZE: Final = 16
_LENGTH: Final = 1000  # tokens of each request
_SHARED_PAGES: Final = SPAN_TOKENS // _PAGE_SIZE  # the shortest prefix that a batch-invariant plan shares
_STARTS: Final = (0, 1, 2, 202, 402)  # two requests decode and two are prompts


def plan_every_kind(facts: GpuFacts, batch_invariant: bool) -> None:
    """Plans steps that need every compiled function: requests that share pages, then requests that share none. Each
    step is planned again with one more token per request, for which the planner patches its forest."""
    config = AttentionConfig(8, 2, 128, _PAGE_SIZE, torch.bfloat16, batch_invariant=batch_invariant)
    backend = GpuBackend(config, _CPU, facts=facts)
    starts = torch.tensor(_STARTS, dtype=torch.int32, device="cpu")
    lens = torch.full((len(starts) - 1,), _LENGTH, dtype=torch.int32, device="cpu")
    own = torch.arange(len(lens) * 64, dtype=torch.int32, device="cpu").view(len(lens), 64)
    shared = own.clone()
    shared[:, :_SHARED_PAGES] = own[0, :_SHARED_PAGES]
    for table in (shared, own):
        for later in (0, 1):
            step = check_step(StepInputs(table, lens + later, starts, None, None), _PAGE_SIZE, None, _CPU)
            backend.plan(StepTables(step.block_table, step.seq_lens, step.query_start_loc)).stats()


def main(arguments: str) -> None:
    """Compiles for a card and attentions, as `compile_ahead` writes them, when no other process does."""
    *facts, batch_invariant = json.loads(arguments)
    folder = cache_folder()
    assert folder is not None, "expected a folder that Numba can write, see NUMBA_CACHE_DIR"
    with (Path(folder) / "trunkattn.lock").open("w") as lock:
        with suppress(ImportError, OSError):  # without file locks each process compiles
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX)
        plan_every_kind(GpuFacts(*facts), batch_invariant)


if __name__ == "__main__":
    main(sys.argv[1])
