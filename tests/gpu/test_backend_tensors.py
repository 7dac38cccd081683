"""What `GpuBackend` hands to launches: nothing is computed, so these are the arguments and not their results."""

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from trunkattn import AttentionConfig, Capacity
from trunkattn.gpu import attention
from trunkattn.gpu.attention import GpuBackend
from trunkattn.gpu.cards import GpuFacts
from trunkattn.gpu.layer import Tensors
from trunkattn.layer_inputs import LayerInputs
from trunkattn.planner.planner import StepTables
from trunkattn.planner.work_list import UNLIMITED

from .kernel_cases import CPU

CONFIG = AttentionConfig(4, 2, 32, 16, torch.float32, sinks=True)
LATENT = AttentionConfig(4, 1, 48, 16, torch.float32, latent_dim=32, sm_scale=0.1)
A100 = GpuFacts("NVIDIA A100", 108, 80, 40 << 20)


def tables(*query_lens: int, window: int = UNLIMITED) -> StepTables:
    """Requests of 40 tokens."""
    starts = np.cumsum([0, *query_lens]).astype(np.int32)
    table = np.arange(3 * len(query_lens), dtype=np.int32).reshape(-1, 3)
    return StepTables(table, np.full(len(query_lens), 40, np.int32), starts, window)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensors, bool]]:
    """The tensors of each layer, and whether it returns log-sum-exps."""
    found: list[tuple[Tensors, bool]] = []
    monkeypatch.setattr(attention, "execute", lambda plan, t, return_lse: found.append((t, return_lse)))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return found


def run(config: AttentionConfig, q: Any, return_lse: bool = False, **others: Any) -> torch.Tensor:
    backend = GpuBackend(config, CPU, facts=A100)
    k_cache = torch.zeros(6, 16, config.num_kv_heads, config.head_dim)
    tensors = {"q": q, "k_cache": k_cache, "v_cache": k_cache[..., : config.value_dim]}
    inputs = LayerInputs(**tensors, **others, return_lse=return_lse)
    return backend.run(backend.plan(tables(1, 1)), inputs, torch.zeros(2, 4, config.value_dim))


def test_sinks_are_one_behind_the_other(given: list[tuple[Tensors, bool]]) -> None:
    """Kernels know of no stride of theirs."""
    sinks = torch.arange(8.0)
    run(CONFIG, torch.zeros(2, 4, 32), sinks=sinks[::2])
    (t, _) = given[0]
    assert t.sinks.is_contiguous() and t.sinks.tolist() == [0, 2, 4, 6]


def test_both_parts_of_latent_queries_have_contiguous_heads(given: list[tuple[Tensors, bool]]) -> None:
    q = torch.randn(48, 2, 4).movedim(0, -1)
    run(LATENT, q)
    run(LATENT, q.contiguous(), q_rope=None)
    run(LATENT, q[..., :32], q_rope=q[..., 32:])
    for t, _ in given:
        assert t.q_rope is not None and t.q.stride(2) == t.q_rope.stride(2) == 1
        assert torch.equal(t.q, q[..., :32]) and torch.equal(t.q_rope, q[..., 32:])


@pytest.mark.parametrize("return_lse", [False, True])
def test_log_sum_exps_have_a_row_for_each_row_of_the_output(
    return_lse: bool, given: list[tuple[Tensors, bool]]
) -> None:
    found = run(CONFIG, torch.zeros(2, 4, 32), return_lse, sinks=torch.zeros(4))
    ((t, asked),) = given
    assert asked is return_lse and t.lse is found
    assert not return_lse or (found.shape, found.dtype) == ((2, 4), torch.float32)


@pytest.mark.parametrize(
    ("query_lens", "window", "masked"),
    [((1, 1), UNLIMITED, False), ((1, 2), UNLIMITED, True), ((0, 1), UNLIMITED, False), ((1, 1), 7, True)],
)
def test_positions_are_compared_where_queries_see_different_tokens(
    query_lens: tuple[int, ...], window: int, masked: bool
) -> None:
    step = GpuBackend(CONFIG, CPU, facts=A100).plan(tables(*query_lens, window=window))
    assert step.gpu_plan.geometry.masked is masked


def test_a_capacity_for_two_query_tokens_of_a_request_compares_positions() -> None:
    for tokens, longest, masked in ((1, None, False), (2, None, True), (4, 1, False), (4, 2, True)):
        backend = GpuBackend(CONFIG, CPU, Capacity(2, tokens, 3, 20, max_query_len=longest), facts=A100)
        assert backend._reserve(UNLIMITED).geometry.masked is masked
        assert backend._reserve(7).geometry.masked


def test_a_plan_keeps_lengths_of_its_own() -> None:
    given = tables(1, 3)
    step = GpuBackend(CONFIG, CPU, facts=A100).plan(given)
    before = step.stats()
    given.seq_lens[:] = 1
    given.query_start_loc[:] = 0
    assert step.stats() == before
    step.check()


def test_heads_of_a_token_lie_within_what_a_kernel_counts() -> None:
    for apart, readable in ((2**29, True), (2**29 + 8, False)):
        rows = torch.empty_strided((1, 4, 32), (1, apart, 1), device="meta")
        assert attention._is_readable(rows) is readable
    assert not attention._is_readable(torch.zeros(3, 4, 64)[..., ::2])
