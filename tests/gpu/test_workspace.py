"""Scales of layers: made once if they are numbers. Partial states: as many as plans of a capacity can need."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from trunkattn import AttentionConfig, Capacity
from trunkattn.gpu import workspace
from trunkattn.gpu.arrays import Arrays
from trunkattn.gpu.attention import GpuBackend
from trunkattn.gpu.cards import GpuFacts, card_of
from trunkattn.gpu.device_planner.planner import DevicePlanner
from trunkattn.gpu.kernel import kernels_of
from trunkattn.gpu.step_planners import make_step_planner
from trunkattn.gpu.workspace import Scales, Workspace
from trunkattn.layer_inputs import LayerInputs
from trunkattn.numerics import MAX_INT32
from trunkattn.planner.planner import StepTables
from trunkattn.planner.splitting import UNLIMITED

CONFIG = AttentionConfig(num_qo_heads=4, num_kv_heads=2, head_dim=16, page_size=16, dtype=torch.bfloat16)
H100 = GpuFacts("NVIDIA H100 80GB HBM3", 132, 90, 50 << 20)
SMALL, ONE, STARTS = Capacity(1, 1, 1, 1), np.ones(1, np.int32), np.arange(2, dtype=np.int32)
NO_MEMORY = r"capacity=Capacity\(max_requests=1, .* makes plans for which there is no memory on cpu: expected smaller"


def no_memory(*arguments: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")


def inputs(**scales: Any) -> LayerInputs:
    unread: Any = None
    return LayerInputs(unread, unread, unread, **scales)


@pytest.mark.parametrize("scale", [0.5, torch.tensor([0.5]), torch.tensor([0.25, 2.0])])
def test_products_of_scales_stay_equal_when_cached(scale: Any) -> None:
    scales = Scales(CONFIG, CONFIG.num_kv_heads, torch.device("cpu"))
    for _ in range(2):
        logits, values = scales.of(inputs(q_scale=3.0, k_scale=scale, v_scale=scale))
        expected = torch.as_tensor(scale).expand(2)
        assert torch.allclose(logits, CONFIG.logit_scale * 3.0 * expected)
        assert torch.equal(values, expected)


def test_numbers_are_multiplied_once_and_tensors_each_time() -> None:
    scales = Scales(CONFIG, CONFIG.num_kv_heads, torch.device("cpu"))
    first, again = (scales.of(inputs(k_scale=0.5, v_scale=0.5)) for _ in range(2))
    assert all(a is b for a, b in zip(first, again, strict=True))
    assert first[0] is not first[1], "a logit's 0.5 is not a value's"
    changing = torch.tensor([0.5])
    assert scales.of(inputs(v_scale=changing))[1].tolist() == [0.5, 0.5]
    changing.fill_(2.0)
    assert scales.of(inputs(v_scale=changing))[1].tolist() == [2.0, 2.0]
    assert scales.of(inputs(k_scale=1.0))[0] is scales.of(inputs())[0]


def test_what_a_capture_makes_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """It lies in the graph's memory, which the next replay writes to."""
    scales = Scales(CONFIG, CONFIG.num_kv_heads, torch.device("cpu"))
    with monkeypatch.context() as patch:
        patch.setattr(workspace, "_is_capturing", lambda device: True)
        captured = scales.of(inputs(k_scale=0.5))[0]
    kept = scales.of(inputs(k_scale=0.5))[0]
    assert kept is not captured and torch.equal(kept, captured)
    with monkeypatch.context() as patch:
        patch.setattr(workspace, "_is_capturing", lambda device: True)
        assert scales.of(inputs(k_scale=0.5))[0] is kept


def test_only_so_many_products_of_scales_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "_MOST_KEPT", 2)
    scales = Scales(CONFIG, CONFIG.num_kv_heads, torch.device("cpu"))
    found = [[scales.of(inputs(v_scale=scale))[1] for scale in (2.0, 3.0, 4.0)] for _ in range(2)]
    assert [first is again for first, again in zip(*found, strict=True)] == [True, False, False]


def test_not_more_than_so_many_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "_MOST_KEPT", 3)
    scales = Scales(CONFIG, CONFIG.num_kv_heads, torch.device("cpu"))
    made = [scales.of(inputs(v_scale=float(number)))[1] for number in range(2, 8)]
    assert [tensor[0].item() for tensor in made] == list(range(2, 8))
    assert len(scales._kept) == 3
    assert scales.of(inputs(v_scale=2.0))[1] is made[0]
    assert scales.of(inputs(v_scale=7.0))[1] is not made[-1]


@pytest.mark.parametrize(("policy", "advice"), [("cascade", "a batch that is cut"), ("auto", "fewer or shorter")])
def test_partial_states_that_no_memory_holds_are_refused(
    monkeypatch: pytest.MonkeyPatch, policy: str, advice: str
) -> None:
    """A workspace that could not grow stays as it was: its log-sum-exps are as many as its outputs."""
    space = Workspace(replace(CONFIG, policy=policy), 3, torch.device("cpu"))
    made = torch.empty

    def no_memory(*shape: Any, **options: Any) -> torch.Tensor:
        if len(shape) == 1:  # the log-sum-exps come last
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return made(*shape, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", no_memory)
        message = f"policy='{policy}' makes 9 partial results of 4 heads × 16 numbers, for which there is no memory: "
        with pytest.raises(ValueError, match=message + f"expected {advice}"):
            space.grow(9)
    assert len(space.partial) == len(space.partial_lse) == 3
    space.grow(9)
    assert len(space.partial) == len(space.partial_lse) == 9


def test_lists_that_no_memory_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = GpuBackend(replace(CONFIG, policy="cascade"), torch.device("cpu"), facts=H100)
    with monkeypatch.context() as patch:
        patch.setattr(Arrays, "place", no_memory)
        with pytest.raises(ValueError, match="policy='cascade' makes lists for which there is no memory: expected a"):
            backend.plan(StepTables(ONE[:, None], ONE, STARTS))
    backend.plan(StepTables(ONE[:, None], ONE, STARTS)).check()


@pytest.mark.parametrize("queries", [1, 40], ids=["tiles", "chunks"])
def test_lists_that_kernels_cannot_count_are_refused(monkeypatch: pytest.MonkeyPatch, queries: int) -> None:
    """Also without a capacity. Any other list needs gigabytes until it is too long, so here kernels count to 50."""
    backend = GpuBackend(CONFIG, torch.device("cpu"), facts=H100)
    tables = StepTables(np.arange(4, dtype=np.int32)[None], np.array([40], np.int32), queries * STARTS)
    with monkeypatch.context() as patch:
        patch.setattr(workspace, "MAX_INT32", 50)
        with pytest.raises(ValueError, match=r"policy='auto' makes lists that have over 2\^31 numbers: expected fewer"):
            backend.plan(tables)
    step = backend.plan(tables)
    step.check()
    assert step.num_chunks == (queries > 1)
    assert workspace.counted(MAX_INT32) == MAX_INT32


@pytest.mark.parametrize("owner", [Workspace, DevicePlanner])
def test_a_capacity_that_no_memory_holds_is_refused(monkeypatch: pytest.MonkeyPatch, owner: type) -> None:
    monkeypatch.setattr(owner, "_allocate", no_memory)
    with pytest.raises(ValueError, match=NO_MEMORY):
        GpuBackend(CONFIG, torch.device("cpu"), SMALL, facts=H100)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_capacity_that_kernels_cannot_count_is_refused(batch_invariant: bool) -> None:
    config, sizes = replace(CONFIG, batch_invariant=batch_invariant), (2**14, 2**14, 2**20, 1)
    with pytest.raises(ValueError, match=r"makes plans that have over 2\^31 numbers: expected smaller bounds"):
        GpuBackend(config, torch.device("meta"), Capacity(*sizes), facts=H100)._reserve(UNLIMITED)


@pytest.mark.parametrize("on_device", [False, True])
def test_a_plan_within_a_capacity_that_no_memory_holds_is_refused(
    monkeypatch: pytest.MonkeyPatch, on_device: bool
) -> None:
    backend = GpuBackend(CONFIG, torch.device("cpu"), SMALL, facts=H100)
    tables = 0 * ONE[:, None], ONE, STARTS
    monkeypatch.setattr(Arrays, "reserve", no_memory)
    with pytest.raises(ValueError, match=NO_MEMORY):
        if on_device:
            backend.plan_on_device(tuple(map(torch.from_numpy, tables)), UNLIMITED)  # type: ignore[arg-type]
        else:
            backend.plan(StepTables(*tables))


@pytest.mark.parametrize("heads", [8, 16, 20, 128])
def test_partial_states_of_latent_attention_do_not_grow_with_query_tokens(heads: int) -> None:
    """As `docs/guide/cuda-graphs-and-capacity.md` says; a plan with prompt chunks has slots for these, too."""
    card = card_of(H100)
    latent = AttentionConfig(heads, 1, 576, 64, torch.bfloat16, latent_dim=512, sm_scale=0.1)
    apart = AttentionConfig(32, 8, 128, 16, torch.bfloat16)

    def megabytes(config: AttentionConfig, tokens: int) -> float:
        kernels, capacity = kernels_of(config, card), Capacity(64, tokens, 512, 8192)
        limits = make_step_planner(config, kernels, card, torch.device("cpu"), capacity).limits
        assert limits is not None
        return limits.slots * config.num_qo_heads * (config.value_dim + 1) * 4 / 1e6

    assert megabytes(latent, 64) < megabytes(latent, 8192) == megabytes(latent, 16384) < 93
    assert (round(megabytes(apart, 64)), round(megabytes(apart, 8192))) == (29, 297)
