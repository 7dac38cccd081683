"""`CapturedRun` without a GPU: what it is there, and what it keeps; tests/on_gpu captures for real."""

import pytest
import torch

from trunkattn import AttentionConfig, BatchAttention
from trunkattn.integrations import captured_run
from trunkattn.integrations.captured_run import CapturedRun

CONFIG = AttentionConfig(4, 2, 32, page_size=16, dtype=torch.float32)


def make_plan(attention: BatchAttention) -> tuple:
    table, lens = torch.tensor([[1, 2], [1, 0]], dtype=torch.int32), torch.tensor([20, 16], dtype=torch.int32)
    q, cache = torch.randn(2, 4, 32), torch.randn(3, 16, 2, 32)
    return attention.plan(table, lens), q, cache


def test_on_a_cpu_it_is_run() -> None:
    attention = BatchAttention(CONFIG, "cpu")
    plan, q, cache = make_plan(attention)
    out = torch.empty_like(q)
    CapturedRun(attention)(plan, q, cache, cache, out, k_scale=0.5, v_scale=2.0)
    assert torch.equal(out, attention.run(plan, q, cache, cache, k_scale=0.5, v_scale=2.0))
    with pytest.raises(TypeError, match="q has dtype"):
        CapturedRun(attention)(plan, q.double(), cache, cache, out)
    with pytest.raises(TypeError, match="multiple values for keyword argument 'return_lse'"):
        CapturedRun(attention)(plan, q, cache, cache, out, return_lse=True)


def test_layers_are_told_apart_by_where_their_tensors_are_and_how_they_lie() -> None:
    cache = torch.zeros(2, 4, 4)
    place, first = captured_run._place, cache[0]
    assert place(first) == place(cache[:1].squeeze(0))
    others = (cache[1], first.T, first[:3], first.view(torch.int32), 0.5, None)
    assert len({place(first), *map(place, others)}) == 1 + len(others)


def test_tensors_are_alike_if_one_can_be_copied_to_the_other_as_it_is() -> None:
    alike, own = captured_run._alike, torch.zeros(2, 3)
    assert alike(torch.zeros(3, 2).T, own)
    others = ([[0.0] * 3] * 2, torch.zeros(3, 3), own.double(), own.to("meta"), torch.zeros(2, 3, requires_grad=True))
    assert not any(alike(each, own) for each in others)
