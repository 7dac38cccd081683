"""`CapturedRun` without a GPU: what it is there, and what it keeps; tests/gpu captures for real."""

import pytest
import torch

from trunkattn import AttentionConfig, BatchAttention, attention_captured
from trunkattn.attention_captured import CapturedRun

CONFIG = AttentionConfig(4, 2, 32, page_size=16, dtype=torch.float32)


def make_plan(attention: BatchAttention) -> tuple:
    table, lens = torch.tensor([[1, 2], [1, 0]], dtype=torch.int32), torch.tensor([20, 16], dtype=torch.int32)
    q, cache = torch.randn(2, 4, 32), torch.randn(3, 16, 2, 32)
    return attention.plan(table, lens), q, cache


def test_on_a_cpu_it_is_run() -> None:
    attention = BatchAttention(CONFIG, "cpu")
    plan, q, cache = make_plan(attention)
    out = torch.empty_like(q)
    CapturedRun(plan)(q, cache, cache, out, k_scale=0.5, v_scale=2.0)
    assert torch.equal(out, attention.run(plan, q, cache, cache, k_scale=0.5, v_scale=2.0))
    with pytest.raises(TypeError, match="q has dtype"):
        CapturedRun(plan)(q.double(), cache, cache, out)


def test_work_runs_once_as_it_is_and_is_captured_when_it_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    class Graph:
        def replay(self) -> None:
            events.append("replay")

    monkeypatch.setattr(
        attention_captured, "capture", lambda work, pool: events.append(f"capture in {pool}") or Graph()
    )
    monkeypatch.setattr(attention_captured, "_MOST_GRAPHS", 2)
    run = CapturedRun(make_plan(BatchAttention(CONFIG, "cpu"))[0])
    for layer in ("first", "second", "first", "first", "third", "first"):
        run._repeat((layer,), lambda layer=layer: events.append(layer), "pool")
    assert events == ["first", "second", "capture in pool", "replay", "replay", "third", "first"], "two are kept"


def test_what_fails_is_not_kept() -> None:
    run = CapturedRun(make_plan(BatchAttention(CONFIG, "cpu"))[0])

    def fails() -> None:
        raise ValueError("refused")

    for _ in range(2):
        with pytest.raises(ValueError, match="refused"):
            run._repeat(("layer",), fails, None)


def test_layers_are_told_apart_by_where_their_tensors_are() -> None:
    cache = torch.zeros(2, 3, 4)
    place = attention_captured._place
    assert place(cache[0]) == place(cache[:1].squeeze(0))
    assert len({place(cache[0]), place(cache[1]), place(cache[0].T), place(cache[0].to(torch.float16)), 0.5, None}) == 6
