"""What steps compile after a warm-up. Run as a program, since it needs Triton's compiler, which a process in which
Triton interprets does not have. No GPU: a driver is made up, and the compiler notes what it is asked for.

Prints a JSON object: by case, the kernels that are compiled before and after.
"""

import json
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from trunkattn import AttentionConfig, Capacity, PromptChunks
from trunkattn.gpu.attention import GpuBackend
from trunkattn.gpu.cards import GpuFacts
from trunkattn.gpu.compiling import compiled_together
from trunkattn.integrations.warm_up import warm_prompts
from trunkattn.layer_inputs import LayerInputs
from trunkattn.planner.planner import StepTables
from trunkattn.planner.work_list import UNLIMITED

CPU = torch.device("cpu")
CARD = GpuFacts("NVIDIA H100 80GB HBM3", 132, 90, 50 << 20)
CONFIG = AttentionConfig(32, 8, 128, 16, torch.bfloat16)
CAPACITY = Capacity(8, 8, 256, 500, max_query_len=1, max_chunk_tokens=8192)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def note(asked: list[str]) -> None:
    """Makes Triton append each kernel that it is to compile, and compile nothing."""

    def compile_nothing(self: Any, key: Any, signature: Any, device: Any, *rest: Any) -> Any:
        asked.append(self.__name__)
        return self.device_caches[device][0].setdefault(key, SimpleNamespace(result=lambda: None))

    JITFunction._do_compile = compile_nothing
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
        )
    )
    torch.cuda.device = lambda device: nullcontext()  # type: ignore[misc,assignment]


def run(backend: GpuBackend, step: Any, rows: int) -> None:
    q, cache = torch.zeros(rows, 32, 128, dtype=torch.bfloat16), torch.zeros(500, 16, 8, 128, dtype=torch.bfloat16)
    backend.run(step, LayerInputs(q, cache, cache), torch.empty_like(q))


def chunks_beside_decodes(asked: list[str]) -> list[list[str]]:
    """As vLLM warms up, with a chunk too small to overlap decodes, and a real step, in which they overlap."""
    backend = GpuBackend(CONFIG, CPU, CAPACITY, facts=CARD)
    found: list[list[str]] = []
    step = None
    for chunk in (1, 4000):
        listed = PromptChunks(1, int32(chunk), int32(chunk), 10**6)
        assert backend.overlaps(listed) == (chunk > 1)
        tables = torch.zeros(2, 256, dtype=torch.int32), int32(1, chunk), int32(0, 1, 1 + chunk)
        step = backend.plan_on_device(tables, UNLIMITED, step, listed)
        run(backend, step, 1 + chunk)
        found.append(asked.copy())
        asked.clear()
    return found


def batch_invariant_prompts(asked: list[str]) -> list[list[str]]:
    """As vLLM warms up, and real steps of prompts, cut and not."""
    backend = GpuBackend(replace(CONFIG, batch_invariant=True), CPU, facts=CARD)
    found: list[list[str]] = []
    pages = torch.arange(3 * 64, dtype=torch.int32).view(3, 64)
    real = [(pages[:1], int32(37), int32(0, 37)), (pages, int32(900, 700, 64), int32(0, 300, 1000, 1064))]
    for steps in (warm_prompts(64, 16, CPU), real):
        for tables in steps:
            step = backend.plan(StepTables(*(table.numpy() for table in tables), UNLIMITED))
            run(backend, step, step.num_query_tokens)
        found.append(asked.copy())
        asked.clear()
    return found


def main() -> None:
    asked: list[str] = []
    note(asked)
    with compiled_together():
        cases = (chunks_beside_decodes, batch_invariant_prompts)
        print(json.dumps({case.__name__: case(asked) for case in cases}))


if __name__ == "__main__":
    main()
