"""The back end's classes over SGLang's own pools and layers, against the float64 reference; the one for GPUs too, with
plans and kernels of the CPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from trunkattn.integrations.sglang.backend import TrunkBackend

from .fakes import CONTEXT, DIM, HEADS, KV_HEADS, PAGE, Step, error, make_runner

DECODES = Step([1, 1, 1], [40, 57, 33])
PROMPTS = Step([9, 24, 1], [41, 24 + 32, 33])
LAYERS = ({}, {"sliding_window_size": 19}, {"logit_cap": 5.0}, {"logit_cap": 5.0, "sliding_window_size": 7})


def layers_of(runner: Any) -> list[RadixAttention]:
    return list(runner.model)


@pytest.mark.parametrize("page", [1, PAGE])
@pytest.mark.parametrize("step", [DECODES, PROMPTS], ids=["decodes", "prompts"])
@pytest.mark.parametrize("hybrid", [False, True])
def test_windows_and_caps(page: int, step: Step, hybrid: bool) -> None:
    runner = make_runner(*LAYERS, page=page, hybrid=hybrid)
    backend, batch = TrunkBackend(runner), step.batch(runner)
    backend.init_forward_metadata(batch)
    for layer in layers_of(runner):
        assert error(backend, runner, layer, batch) < 1e-5


@pytest.mark.parametrize("step", [DECODES, PROMPTS], ids=["decodes", "prompts"])
def test_sinks(step: Step) -> None:
    runner = make_runner({}, {"sliding_window_size": 19})
    backend, batch = TrunkBackend(runner), step.batch(runner)
    backend.init_forward_metadata(batch)
    for layer in layers_of(runner):
        assert error(backend, runner, layer, batch, torch.randn(HEADS).to(torch.bfloat16)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16])
@pytest.mark.parametrize("scaled", [False, True])
def test_narrow_caches(dtype: torch.dtype, scaled: bool) -> None:
    runner = make_runner(kv_dtype=dtype)
    (layer,) = layers_of(runner)
    if scaled and dtype.itemsize == 1:
        layer.k_scale, layer.v_scale = torch.tensor(0.5), torch.tensor(2.0)
        layer.k_scale_float, layer.v_scale_float = 0.5, 2.0
    backend, batch = TrunkBackend(runner), DECODES.batch(runner)
    backend.init_forward_metadata(batch)
    assert error(backend, runner, layer, batch) < 1e-5


def test_scales_that_are_loaded_again() -> None:
    """SGLang changes the tensors that it divides by. Weights from tensors leave its numbers as they were."""
    runner = make_runner(kv_dtype=torch.float8_e4m3fn)
    (layer,) = layers_of(runner)
    layer.k_scale, layer.v_scale = (torch.nn.Parameter(torch.tensor(x), requires_grad=False) for x in (0.5, 2.0))
    layer.k_scale_float, layer.v_scale_float = 0.5, 2.0
    backend, batch = TrunkBackend(runner), DECODES.batch(runner)
    for k_scale, v_scale in ((0.5, 2.0), (0.25, 0.75)):
        layer.k_scale.data.fill_(k_scale)
        layer.v_scale.data.fill_(v_scale)
        backend.init_forward_metadata(batch)
        assert error(backend, runner, layer, batch) < 1e-5


def test_a_layer_that_reads_what_another_has_stored() -> None:
    runner = make_runner()
    (layer,) = layers_of(runner)
    backend, batch = TrunkBackend(runner), DECODES.batch(runner)
    backend.init_forward_metadata(batch)
    q, k, v = torch.randn(3, HEADS * DIM), torch.randn(3, KV_HEADS, DIM), torch.randn(3, KV_HEADS, DIM)
    stored = backend.forward_decode(q, k, v, layer, batch)
    assert torch.equal(backend.forward_decode(q, None, None, layer, batch), stored)
    assert torch.equal(backend.forward_decode(q, 7 * k, v, layer, batch, save_kv_cache=False), stored)


def test_layers_that_share_what_is_stored_have_each_its_own_attention() -> None:
    shared = {"layer_id": 0}
    runner = make_runner({}, {**shared, "sliding_window_size": 7}, {**shared, "logit_cap": 5.0})
    backend, batch = TrunkBackend(runner), DECODES.batch(runner)
    backend.init_forward_metadata(batch)
    for layer in layers_of(runner):
        assert error(backend, runner, layer, batch) < 1e-5
    backend.init_forward_metadata(batch)
    of_one = 2 * KV_HEADS * DIM * 4
    assert backend.traffic.unshared == (2 * sum(DECODES.lens) + 3 * 8) * of_one, "each layer reads"


def test_a_rank_without_requests_computes_nothing() -> None:
    """SGLang makes up a prompt for it, so that all ranks run the same graph. It may be longer than the context."""
    runner = make_runner()
    (layer,) = layers_of(runner)
    backend, tokens = TrunkBackend(runner), CONTEXT + 1
    batch = Step([1], [1], prompts=True).batch(runner)
    batch.seq_lens = batch.seq_lens_cpu = batch.extend_seq_lens = torch.tensor([tokens])
    batch.extend_seq_lens_cpu, batch._original_forward_mode = [tokens], ForwardMode.IDLE
    batch.out_cache_loc = torch.zeros(tokens, dtype=torch.int64)
    stored = runner.token_to_kv_pool.get_key_buffer(0).clone()
    backend.init_forward_metadata(batch)
    q, k, v = torch.randn(tokens, HEADS * DIM), *torch.randn(2, tokens, KV_HEADS, DIM)
    out = backend.forward_extend(q, k, v, layer, batch)
    assert out.shape == (tokens, HEADS * DIM) and not out.any()
    assert torch.equal(runner.token_to_kv_pool.get_key_buffer(0), stored)
    assert backend.traffic.steps == 0


class Padded(SimpleNamespace):
    """A step that SGLang's own code pads; what it does not have is None."""

    _pad_tensor_to_size = ForwardBatch._pad_tensor_to_size

    def __getattr__(self, name: str) -> None:
        return None


def test_ranks_pad_their_decodes_on_a_cpu() -> None:
    """So that all data-parallel ranks have as many tokens."""
    runner = make_runner()
    (layer,) = layers_of(runner)
    backend, plain = TrunkBackend(runner), DECODES.batch(runner)
    batch = Padded(**vars(plain), positions=torch.zeros(3), input_ids=torch.zeros(3, dtype=torch.int64))
    ForwardBatch._pad_inputs_to_size(batch, SimpleNamespace(attn_backend=backend), 5, 5)
    assert batch.seq_lens.tolist() == [*DECODES.lens, 1, 1]
    q = torch.randn(5, HEADS * DIM)
    backend.init_forward_metadata(batch)
    padded = backend.forward_decode(q, None, None, layer, batch)
    backend.init_forward_metadata(plain)
    torch.testing.assert_close(padded[:3], backend.forward_decode(q[:3], None, None, layer, plain))
    assert padded.isfinite().all()


def test_rows_after_the_tokens_of_a_step_are_zeros() -> None:
    """A prompt graph pads a step, and gives the output."""
    runner = make_runner()
    (layer,) = layers_of(runner)
    backend, batch = TrunkBackend(runner), PROMPTS.batch(runner)
    backend.init_forward_metadata(batch)
    batch._attn_output = torch.full((40, HEADS * DIM), 7.0)
    out = backend.forward_extend(torch.randn(40, HEADS * DIM), None, None, layer, batch)
    assert out.data_ptr() == batch._attn_output.data_ptr()
    assert (out[34:] == 0).all() and (out[:34] != 7).all()


def test_counts() -> None:
    runner = make_runner({}, {}, {"sliding_window_size": 15})
    backend = TrunkBackend(runner)
    lens = list(range(130, 136))
    for step in (Step([1] * 6, lens, shared=8), Step([1] * 5 + [7], lens, shared=8), Step([1], [40], shared=0)):
        batch = step.batch(runner)
        backend.init_forward_metadata(batch)
        for layer in layers_of(runner):
            error(backend, runner, layer, batch)
    backend.init_forward_metadata(batch)
    assert dict(backend.stats.paths) == {"decode": 2, "mixed": 1}
    assert dict(backend.stats.unshared) == {"one_request": 1}
    width = 2 * KV_HEADS * DIM * 4
    assert backend.traffic.saved >= 2 * 5 * 8 * PAGE * 2 * width, "two layers, two steps, five rows of eight pages"
