"""What the back end for GPUs compiles before the first step, without a GPU: kernels of prompts that ours run, and the
host's planner for them."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from vllm.config import VllmConfig

from trunkattn.integrations import warm_up

from .device_attention import DeviceAttention, PlannerCompilations
from .fakes import WIDTH, FlashRecorder, make_batch, make_builder, make_layer, run_step

pytestmark = pytest.mark.usefixtures("gpu_engine")


def runs_of_warm_up(builder: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, int]]:
    """The capacity of each attention that runs, and how many queries it has."""
    runs: list[tuple[Any, int]] = []
    with monkeypatch.context() as patched:
        patched.setattr(warm_up, "compiled_together", nullcontext)
        patched.setattr(
            DeviceAttention, "run", lambda self, _, q, *caches, **options: runs.append((self.limits, len(q)))
        )
        builder._warm_up(WIDTH)
    return runs


def test_prompts_of_our_own_kernels_are_warm_too(
    gpu_engine: VllmConfig,
    flash_kernel: FlashRecorder,
    compilations: PlannerCompilations,
    set_batch_invariance: Callable[[bool], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their kernel has other constants than that of decodes: a batch-invariant prompt has several query tokens."""
    set_batch_invariance(True)
    layer = make_layer()
    assert (compilations.begun, compilations.waited) == ([True], []), "it compiles while the model is loaded"
    builder = make_builder(gpu_engine, layer)
    builder.build(0, make_batch([1, 1], [20, 40]))
    runs = runs_of_warm_up(builder, monkeypatch)
    assert set(compilations.waited) == {True}
    assert runs == [(builder.attentions[layer.layer_spec].limits, 1), *[(None, 2 + 128)] * 2] * 2
    _, errors = run_step(builder, make_batch([1, 1, 30], [20, 40, 0]))
    assert max(errors) < 0.02


def test_no_planner_is_compiled_where_flash_attention_runs_prompts(
    gpu_engine: VllmConfig,
    flash_kernel: FlashRecorder,
    compilations: PlannerCompilations,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(warm_up, "compiled_together", nullcontext)
    builder = make_builder(gpu_engine, make_layer())
    builder.build(0, make_batch([1, 1], [20, 40]))
    builder._warm_up(WIDTH)
    assert (compilations.begun, compilations.waited) == ([], [])


def test_prompts_that_are_planned_on_the_device_are_warm_too(
    gpu_engine: VllmConfig,
    flash_kernel: FlashRecorder,
    compilations: PlannerCompilations,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And nothing waits for the host's planner, which many prompts alone need."""
    layer = make_layer(cache="fp8")
    builder = make_builder(gpu_engine, layer)
    builder.build(0, make_batch([1, 1], [20, 40]))
    runs = runs_of_warm_up(builder, monkeypatch)
    decodes = builder.attentions[layer.layer_spec].limits
    prompts = replace(decodes, max_query_tokens=1, max_chunk_tokens=2048)
    assert runs == [(decodes, 1), (prompts, 1)] * 2
    assert (compilations.begun, compilations.waited) == ([False], [])


@pytest.mark.parametrize("may_overlap", [False, True])
def test_an_engine_of_one_request_at_a_time(
    gpu_engine: VllmConfig, flash_kernel: FlashRecorder, monkeypatch: pytest.MonkeyPatch, may_overlap: bool
) -> None:
    """Its plans have no room for a second row, nor its attention for a second query."""
    monkeypatch.setattr(DeviceAttention, "may_overlap", may_overlap)
    monkeypatch.setattr(warm_up, "compiled_together", nullcontext)
    gpu_engine.scheduler_config.max_num_seqs = 1
    builder = make_builder(gpu_engine, make_layer())
    for batch in (make_batch([9], [0]), make_batch([1], [20])):
        _, errors = run_step(builder, batch)
        assert max(errors) < 0.02
    builder._warm_up(WIDTH)
