"""The back end for GPUs without one: plans and kernels are the CPU's, and steps come as SGLang's decode graphs send
them. The launch that fills the tables is tested under Triton's interpreter, in tests/integrations."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY
from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from trunkattn.integrations import device_traffic, prompt_plans
from trunkattn.integrations.sglang import cuda

from ..vllm.device_attention import PlannerCompilations
from .card import make_backend, replay
from .fakes import DIM, HEADS, KV_HEADS, PAGE, ROWS, Step, error, make_runner

LAYERS = ({}, {"sliding_window_size": 19}, {}, {"logit_cap": 5.0})
FIVE = Step([1] * 5, [130, 131, 132, 133, 134], shared=8, padding=3)


def capture(backend: Any, runner: Any, rows: int) -> None:
    """Two runs, then the capture, of rows that are all padding."""
    batch = Step([], [], padding=rows).batch(runner)
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    for _ in range(3):
        backend.init_forward_metadata_in_graph(batch)
        for layer in runner.model:
            backend.forward_decode(torch.randn(rows, HEADS * DIM), *torch.randn(2, rows, KV_HEADS, DIM), layer, batch)


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("page", [1, PAGE])
def test_graphs_with_padding(card: None, page: int, hybrid: bool) -> None:
    runner = make_runner(*LAYERS, page=page, hybrid=hybrid)
    backend = make_backend(runner)
    for rows in (8, 4, 1):
        capture(backend, runner, rows)
    plans = dict(backend._plans)
    assert len(plans) == 3 and len(backend._attentions) == (3 if hybrid else 2)
    for step in (FIVE, Step([1], [40]), Step([1] * 3, [60, 61, 62], padding=1)):
        batch = step.batch(runner)
        replay(backend, batch)
        for layer in runner.model:
            assert error(backend, runner, layer, batch) < 1e-5
    assert backend._plans == plans, "the graphs' plans"
    attention = next(iter(backend._attentions.values()))
    assert attention.host_planned == 0
    assert (attention.limits.max_requests, attention.limits.max_query_len) == (ROWS, 1)
    assert attention.limits.num_pages == len(runner.token_to_kv_pool.get_key_buffer(0)) // page


def test_a_rank_without_requests_plans_nothing(card: None) -> None:
    runner = make_runner()
    backend = make_backend(runner)
    batch = Step([24], [24]).batch(runner)
    batch._original_forward_mode = ForwardMode.IDLE
    backend.init_forward_metadata(batch)
    out = backend.forward_extend(torch.randn(24, HEADS * DIM), None, None, next(iter(runner.model)), batch)
    assert not out.any() and not backend._attentions


@pytest.mark.parametrize("hybrid", [False, True])
def test_prompts_between_graphs(card: None, hybrid: bool) -> None:
    runner = make_runner(*LAYERS, hybrid=hybrid)
    backend = make_backend(runner)
    capture(backend, runner, 8)
    for step in (Step([9, 24, 1], [41, 56, 33]), FIVE, Step([9, 24, 1], [41, 56, 33])):
        batch = step.batch(runner)
        if batch.forward_mode.is_decode():
            replay(backend, batch)
        else:
            backend.init_forward_metadata(batch)
        for layer in runner.model:
            assert error(backend, runner, layer, batch) < 1e-5


PROMPTS = {"chunked_prefill_size": 48}


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("page", [1, PAGE])
def test_prompts_are_planned_on_the_device(
    card: None, compilations: PlannerCompilations, page: int, hybrid: bool
) -> None:
    """From their lengths, which SGLang tells the host; between graphs, whose plans they leave alone."""
    runner = make_runner(*LAYERS, page=page, hybrid=hybrid, options=PROMPTS)
    backend = make_backend(runner)
    capture(backend, runner, 8)
    decodes, prompts = dict(backend._plans), dict(backend._prompt_plans)
    assert decodes.keys() == prompts.keys() and len(prompts) == 3, "no prompt waits for its kernels"
    for step in (Step([9, 24, 1], [41, 56, 33]), FIVE, Step([48], [80]), Step([1] * 8, [40] * 8, prompts=True)):
        batch = step.batch(runner)
        if batch.forward_mode.is_decode():
            replay(backend, batch)
        else:
            backend.init_forward_metadata(batch)
            assert (backend._step.chunks is None) == step.prompts, "prompts of one token share as decodes do"
        for layer in runner.model:
            assert error(backend, runner, layer, batch) < 1e-5
    read = backend.traffic.read
    backend._finish_step()
    assert (backend._plans, backend._prompt_plans) == (decodes, prompts)
    for attention, plan in prompts.values():
        assert attention.host_planned == 0 and attention.execution == "serial"
        assert (attention.limits.max_query_tokens, attention.limits.max_chunk_tokens) == (1, 48)
        assert attention is not decodes[next(kind for kind, each in prompts.items() if each[1] is plan)][0]
    assert compilations.waited == []
    assert dict(backend.stats.paths) == {"full_graph": 1, "prefill": 2, "decode": 1}
    full, width = 3, 2 * KV_HEADS * DIM * 4
    of_window = sum(min(length, queries + 19) for length, queries in ((41, 9), (56, 24), (33, 1), (80, 48)))
    assert read == (full * (41 + 56 + 33 + 80) + of_window) * width, "each prompt reads its own keys"
    assert dict(backend.stats.unshared) == {"nothing_shared": 1, "one_request": 1}


@pytest.mark.parametrize(
    ("step", "most"),
    [
        (Step([9, 24, 16], [41, 56, 33]), 64),  # more tokens than SGLang said
        (Step([9, 24, 15], [41, 56, 33]), 2),  # more requests
        (Step([9, 24, 1], [41, 56, 33], mixed=True), 64),
        (Step([24, 1, 1], [41, 56, 33]), 64),  # mixed, as SGLang 0.5.23 announces it
        (Step([2, 8, 1], [41, 56, 33]), 64),  # few tokens, which may share much
        (Step([9, 0, 1], [41, 56, 33]), 64),
    ],
)
def test_other_prompts_are_planned_on_the_host(
    card: None, compilations: PlannerCompilations, monkeypatch: pytest.MonkeyPatch, step: Step, most: int
) -> None:
    monkeypatch.setattr(prompt_plans, "MOST_PROMPTS", most)
    runner = make_runner(*LAYERS, options=PROMPTS)
    backend, batch = make_backend(runner), step.batch(runner)
    backend.init_forward_metadata(batch)
    assert not isinstance(backend._step, cuda.DeviceStep)
    for layer in runner.model:
        assert error(backend, runner, layer, batch) < 1e-5
    assert compilations.waited


def test_the_first_prompt_without_graphs(card: None) -> None:
    runner = make_runner(*LAYERS, options={"chunked_prefill_size": -1, "max_prefill_tokens": 48})
    backend, batch = make_backend(runner), Step([9, 24, 1], [41, 56, 33]).batch(runner)
    backend.init_forward_metadata(batch)
    assert backend._prompt_plans == {}
    for layer in runner.model:
        assert error(backend, runner, layer, batch) < 1e-5
    assert len(backend._prompt_plans) == 3 and backend._plans == {}


def test_the_first_prompt_waits_for_the_planner(card: None, compilations: PlannerCompilations) -> None:
    """Which compiles from when the back end is made; a step that is planned on the device waits for nothing."""
    runner = make_runner()
    backend = make_backend(runner)
    assert compilations.begun == [False]
    for step, waited in ((FIVE, 0), (Step([9], [41]), 1)):
        batch = step.batch(runner)
        backend.init_forward_metadata(batch)
        error(backend, runner, runner.model[0], batch)
        assert len(compilations.waited) == waited


def test_no_planner_is_compiled_where_another_back_end_runs_prompts(
    card: None, compilations: PlannerCompilations
) -> None:
    runner = make_runner()
    runner.server_args.get_attention_backends = lambda: ("triton", "trunk")
    make_backend(runner)
    assert compilations.begun == []


def test_decodes_without_graphs(card: None) -> None:
    """Planned on the device up to the largest graph, and on the host beyond."""
    runner = make_runner(*LAYERS)
    backend = make_backend(runner)
    backend._most_rows = 4
    for step, device in ((Step([1] * 3, [60, 61, 62]), True), (Step([1] * 5, [60, 61, 62, 63, 64]), False)):
        batch = step.batch(runner)
        backend.init_forward_metadata(batch)
        assert isinstance(backend._step, cuda.DeviceStep) is device
        for layer in runner.model:
            assert error(backend, runner, layer, batch) < 1e-5


def test_sinks_make_a_kind_of_their_own(card: None) -> None:
    runner = make_runner({}, {"sliding_window_size": 19})
    backend = make_backend(runner)
    batch = FIVE.batch(runner)
    backend.init_forward_metadata(batch)
    for layer in runner.model:
        assert error(backend, runner, layer, batch, torch.randn(HEADS)) < 1e-5
    assert all(kind.spec.sinks for kind in backend._plans)


def test_a_first_call_in_a_capture_is_refused(card: None, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner()
    backend, batch = make_backend(runner), FIVE.batch(runner)
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="expected a step before the capture"):
        backend.forward_decode(torch.randn(8, HEADS * DIM), None, None, runner.model[0], batch)


def test_a_full_graph_of_prompts_is_refused(card: None) -> None:
    backend = make_backend(make_runner())
    with pytest.raises(ValueError, match="prompts in full CUDA graphs"):
        backend.init_forward_metadata_out_graph(SimpleNamespace(forward_mode=ForwardMode.EXTEND))


def test_more_rows_than_earlier_steps_had(card: None) -> None:
    """SGLang may run steps before it says how large its graphs are."""
    runner = make_runner()
    backend, batch = make_backend(runner, 4), FIVE.batch(runner)
    backend._most_rows = 4
    small = Step([1] * 3, [60, 61, 62]).batch(runner)
    backend.init_forward_metadata(small)
    assert error(backend, runner, runner.model[0], small) < 1e-5
    backend.init_cuda_graph_state(8, 8)
    capture(backend, runner, 8)
    batch = FIVE.batch(runner)
    replay(backend, batch)
    assert error(backend, runner, runner.model[0], batch) < 1e-5


def test_the_request_table_is_read_before_a_replay(card: None) -> None:
    backend = make_backend(make_runner())
    assert backend.shared_read_ends(ForwardMode.DECODE) is SharedReadEnds.PRE_REPLAY
    assert backend.shared_read_ends(ForwardMode.EXTEND) is SharedReadEnds.UNKNOWN
    assert backend.needs_cpu_seq_lens is False and backend.get_cuda_graph_seq_len_fill_value() == 1


def test_counters(card: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step counts once the next one begins; captures do not, nor does padding."""
    monkeypatch.setattr(device_traffic, "SEND_INTERVAL", math.inf)
    lines: list[str] = []
    monkeypatch.setattr(cuda.logger, "info", lambda message, *values: lines.append(message % values))
    runner = make_runner({}, {"sliding_window_size": 15}, {}, tp_rank=23)
    backend = make_backend(runner)
    assert "prompts and decoding in 2 layers (4/2 heads of 32, torch.float32; pages of 16 tokens)" in lines[0]
    capture(backend, runner, 8)
    one = Step([1], [40], padding=3).batch(runner)
    for batch in (FIVE.batch(runner), one):
        replay(backend, batch)
        for layer in runner.model:
            error(backend, runner, layer, batch)
    batch = Step([9], [41]).batch(runner)
    backend.init_forward_metadata(batch)
    error(backend, runner, runner.model[0], batch)
    assert backend.traffic.read == 0, "nothing has arrived"
    backend._traffic.send()
    replay(backend, one)
    replay(backend, one)
    width = 2 * KV_HEADS * DIM * 4
    assert dict(backend.stats.paths) == {"full_graph": 3, "prefill": 1}
    decoded = 2 * sum(FIVE.lens) + 5 * 16 + 2 * 40 + 16
    assert backend.traffic.unshared == (decoded + 2 * 41) * width, "a prompt of the two full layers"
    assert backend.traffic.saved >= (2 * 4 * 8 * PAGE - 12) * width, "the CPU's plan reads padding row by row"
    assert dict(backend.stats.unshared) == {"one_request": 2}
    labels = {"model_name": "tiny", "engine": "0", "rank": "23", "attention": "window 16+full", "path": "full_graph"}
    assert REGISTRY.get_sample_value("trunkattn_steps_total", labels) == 3


def test_a_full_ring_is_fetched(card: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_traffic, "SEND_INTERVAL", math.inf)  # however slow the machine is
    runner = make_runner()
    backend, batch = make_backend(runner), Step([1], [40]).batch(runner)
    capture(backend, runner, 1)
    for _ in range(2 * device_traffic.RING_STEPS + 2):
        replay(backend, batch)
    assert backend.traffic.steps == 2 * device_traffic.RING_STEPS + 1
    assert backend.traffic.unshared == 2 * device_traffic.RING_STEPS * 40 * 2 * KV_HEADS * DIM * 4
