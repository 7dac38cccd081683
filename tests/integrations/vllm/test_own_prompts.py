"""Prompts of layers whose prompts our kernels compute, in the back end for GPUs without one."""

from collections.abc import Callable

import pytest
import torch
from vllm.config import VllmConfig

from .device_attention import PlannerCompilations
from .fakes import PAGE, SEQUENCES, FlashRecorder, make_batch, make_builder, make_layer, run_step

pytestmark = pytest.mark.usefixtures("gpu_engine")


@pytest.mark.parametrize(
    ("dtype", "cache", "note"), [(torch.float32, "auto", "float32"), (torch.bfloat16, "fp8", "float8_e4m3fn")]
)
def test_what_flash_attention_cannot_do(
    dtype: torch.dtype,
    cache: str,
    note: str,
    gpu_engine: VllmConfig,
    flash_kernel: FlashRecorder,
    compilations: PlannerCompilations,
) -> None:
    layer = make_layer(dtype, cache=cache)
    assert layer.flash is None
    assert note in layer.flash_note
    builder = make_builder(gpu_engine, layer)
    plans = []
    for lens_known in (False, True, True):
        batch = make_batch([1, 5, 30], [20, 60, 0])
        if lens_known:
            batch.seq_lens_cpu_upper_bound = batch.seq_lens.clone()
        step, errors = run_step(builder, batch)
        assert max(errors) < (1e-5 if cache == "auto" else 0.02)
        plans.append(step.prefill.plans[layer.layer_spec])
    (attention, _), *on_device = plans
    assert (attention.host_planned, attention.limits) == (1, None), "the host waits where it knows no lengths"
    assert compilations.waited == [False]
    assert on_device[0] == on_device[1], "one plan serves every step"
    limits, chunks = on_device[0][0].limits, on_device[0][0].chunks
    assert (limits.max_requests, limits.max_query_tokens, limits.max_chunk_tokens) == (SEQUENCES, 1, 2048)
    assert (chunks.first_token, chunks.query_lens.tolist(), chunks.seq_lens.tolist()) == (0, [5, 30], [65, 30])
    assert flash_kernel.calls == []


def test_a_batch_invariant_engine_runs_prompts_on_our_kernels_too(
    gpu_engine: VllmConfig, flash_kernel: FlashRecorder, set_batch_invariance: Callable[[bool], None]
) -> None:
    set_batch_invariance(True)
    layer = make_layer()
    assert layer.layer_spec.config(PAGE).batch_invariant
    assert (layer.flash, "than decoding does" in layer.flash_note) == (None, True)
    builder = make_builder(gpu_engine, layer)
    for _ in range(2):
        step, errors = run_step(builder, make_batch([1, 1, 5, 30], [40, 40, 60, 0], shared=2))
        assert max(errors) < 0.02
    assert (step.decodes, step.prefill.tokens) == (2, slice(2, 37))
    assert flash_kernel.calls == []
    builder._device_traffic.send()
    run_step(builder, make_batch([1], [40]))
    assert builder.traffic.read > 0, "what was planned on the device has arrived"
