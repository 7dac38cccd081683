"""Code around the library may be compiled by torch: the kernels stay as they are."""

import math
from typing import Any

import pytest
import torch

from trunkattn import AttentionConfig, BatchAttention, merge_states, write_kv, write_latent
from trunkattn.attention import Plan

TABLE = torch.tensor([[0, 1, 2, 3 + row] for row in range(6)], dtype=torch.int32)
LENS = torch.full((6,), 60, dtype=torch.int32)
SLOTS = torch.arange(6)


def test_a_step_within_compiled_code_gives_the_same() -> None:
    attention = BatchAttention(AttentionConfig(4, 2, 32, 16, torch.float32), "cpu")
    plan = attention.plan(TABLE, LENS)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(6, 4, 32, generator=generator)
    k_cache, v_cache = torch.randn(2, 9, 16, 2, 32, generator=generator)

    def layer(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        write_kv(q[:, :2] + 1.0, q[:, 2:], k_cache, v_cache, SLOTS)
        out, lse = attention.run(plan, q * 2.0, k_cache, v_cache, return_lse=True)
        again, other = attention.run(attention.plan(TABLE, LENS), q, k_cache, v_cache, return_lse=True)
        return merge_states(out + 1.0, lse, again, other)

    expected = layer(q, k_cache.clone(), v_cache.clone())
    found = torch.compile(layer, backend="eager")(q, k_cache.clone(), v_cache.clone())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("strict", [False, True])
def test_a_plan_is_not_exported(strict: bool) -> None:
    """The program would hold the number of a plan, which another plan may have when the program runs."""
    attention = BatchAttention(AttentionConfig(4, 2, 32, 16, torch.float32), "cpu")
    plan = attention.plan(TABLE, LENS)

    class Layer(torch.nn.Module):
        def forward(self, q: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
            return attention.run(plan, q, cache, cache)

    with pytest.raises(Exception, match=r"in torch\.export: expected no export, as a plan lives in one process"):
        torch.export.export(Layer(), (torch.zeros(6, 4, 32), torch.zeros(9, 16, 2, 32)), strict=strict)


def test_steps_take_one_graph_without_a_break() -> None:
    attention = BatchAttention(AttentionConfig(4, 2, 32, 16, torch.float32), "cpu")
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(6, 4, 32, generator=generator)
    k_cache, v_cache = torch.randn(2, 9, 16, 2, 32, generator=generator)
    scales: dict[str, Any] = {"q_scale": 0.3, "k_scale": torch.tensor([0.5, 2.0])}

    def layer(plan: Plan, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = attention.run(plan, q * 2.0, k_cache, v_cache, return_lse=True, **scales)
        return merge_states(out + 1.0, lse, q, q[:, :, 0])

    graphs: list[object] = []

    def counted(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=counted, fullgraph=True)
    for rows in (6, 5, 4):
        plan = attention.plan(TABLE[:rows], LENS[:rows] - rows)
        for one, other in zip(compiled(plan, q[:rows]), layer(plan, q[:rows]), strict=True):
            assert torch.equal(one, other)
    assert len(graphs) == 2  # of the first step, and of steps of any size


def test_a_graph_of_a_latent_cache_writes_into_what_it_gets() -> None:
    config = AttentionConfig(4, 1, 24, 16, torch.float32, sm_scale=0.2, sinks=True, latent_dim=16)
    attention = BatchAttention(config, "cpu")
    plan = attention.plan(TABLE, LENS)
    generator = torch.Generator().manual_seed(0)
    absorbed, rope = torch.randn(6, 4, 24, generator=generator).split([16, 8], dim=-1)
    cache, sinks = torch.randn(9, 16, 24, generator=generator), torch.randn(4, generator=generator)

    def layer(out: torch.Tensor) -> torch.Tensor:
        attention.run(plan, (absorbed, rope), cache, out=out, k_scale=0.5, sinks=sinks)
        return out * 2.0

    given, expected = torch.zeros(2, 6, 4, 16)
    found = torch.compile(layer, backend="aot_eager", fullgraph=True)(given)
    assert torch.equal(found, layer(expected)) and torch.equal(given, expected) and expected.abs().sum() > 0


def test_a_graph_writes_into_caches_without_a_break() -> None:
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 6, 2, 32, generator=generator)

    def layer(k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        write_kv(k * 2.0, v, *cache.unbind(2), SLOTS)  # two caches in one memory
        write_latent(k[:, 0] + 1.0, v[:, 0, :8], rows, SLOTS + 16)
        return cache * 2.0

    given, expected = torch.zeros(2, 2, 16, 2, 2, 32)
    rows, expected_rows = torch.zeros(2, 3, 16, 40)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(k, v, given, rows), layer(k, v, expected, expected_rows))
    assert torch.equal(given, expected) and torch.equal(rows, expected_rows)
    assert torch.equal(given[0, :6], torch.stack([k * 2.0, v], dim=1)) and not given[1:].any()
    assert torch.equal(rows[1, :6], torch.cat([k[:, 0] + 1.0, v[:, 0, :8]], dim=1)) and not rows[0].any()


def test_a_graph_takes_views_of_any_size() -> None:
    """From the second step on sizes and strides are symbols, which no check may sort."""
    attention = BatchAttention(AttentionConfig(4, 2, 32, 16, torch.float32), "cpu")

    def layer(plan: Plan, new: torch.Tensor, cache: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        k_cache, v_cache = cache.unbind(2)
        write_kv(new[:, :2], new[:, 2:], k_cache, v_cache, SLOTS[: len(new)])
        attention.run(plan, new, k_cache, v_cache, out.mT)
        return out * 2.0

    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    generator = torch.Generator().manual_seed(0)
    for rows in (6, 5, 4):
        plan = attention.plan(TABLE[:rows], LENS[:rows])
        new, cache = (torch.randn(shape, generator=generator) for shape in ((rows, 4, 32), (rows + 4, 16, 2, 2, 32)))
        given, expected = cache.clone(), cache.clone()
        found = compiled(plan, new, given, torch.zeros(rows, 32, 4))
        assert torch.equal(found, layer(plan, new, expected, torch.zeros(rows, 32, 4)))
        assert torch.equal(given, expected)


def test_writing_is_exported_for_any_number_of_tokens() -> None:
    class Layer(torch.nn.Module):
        def forward(self, new: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
            write_kv(new[:, None, :8], new[:, None, 8:], cache[:, :, None, :8], cache[:, :, None, 8:], slots)
            write_latent(new[:, :8], new[:, 8:], cache, slots + 16)
            return cache * 2.0

    tokens = {0: torch.export.Dim("tokens", min=2, max=16)}
    cache = torch.zeros(2, 16, 12)
    exported = torch.export.export(
        Layer(), (torch.randn(3, 12), cache, SLOTS[:3]), dynamic_shapes=(tokens, None, tokens), strict=False
    )
    for count in (2, 6):
        given = torch.randn(count, 12), cache.clone(), SLOTS[:count]
        assert torch.equal(exported.module()(*given), Layer()(given[0], cache.clone(), given[2]))
        assert torch.equal(given[1][:, :count], given[0].expand(2, -1, -1))


def test_the_ops_are_what_torch_expects() -> None:
    attention = BatchAttention(AttentionConfig(4, 2, 32, 16, torch.float32), "cpu")
    plan, nothing = attention.plan(TABLE, LENS), [math.nan] * 3
    q, out, cache = torch.ones(6, 4, 32), torch.zeros(6, 4, 32), torch.ones(9, 16, 2, 32)
    ops, new = torch.ops.trunkattn, torch.ones(6, 2, 32)
    for op, arguments in (
        (ops.run, (plan.number, q, None, cache, cache, out, None, [None] * 3, nothing)),
        (ops.write_kv, (new, new, *torch.zeros(2, 16, 2, 2, 32).unbind(2), SLOTS)),
        (ops.write_latent, (new[:, 0], new[:, 1], torch.zeros(2, 16, 64), SLOTS)),
    ):
        assert set(torch.library.opcheck(op, arguments).values()) == {"SUCCESS"}


def test_a_graph_checks_what_tracing_cannot_see() -> None:
    attention = BatchAttention(AttentionConfig(4, 2, 32, 16, torch.float32), "cpu")
    plan = attention.plan(TABLE, LENS)
    q, cache = torch.ones(6, 4, 32), torch.ones(9, 16, 2, 32)
    compiled = torch.compile(attention.run, backend="eager", fullgraph=True)
    with pytest.raises(ValueError, match="q_scale=inf: expected finite numbers"):
        compiled(plan, q, cache, cache, q_scale=torch.tensor(float("inf")))
    with pytest.raises(ValueError, match="out lies in the memory of q: expected memory of its own"):
        compiled(plan, q, cache, cache, q)
    assert (q == 1).all()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="q requires grad: expected no gradient"):
        compiled(plan, q.clone().requires_grad_(), cache, cache)
    write = torch.compile(write_kv, backend="eager", fullgraph=True)
    with pytest.raises(ValueError, match="k_cache lies in the memory of k: expected memory of its own"):
        write(cache.view(-1, 2, 32)[:6], q[:, :2], cache, cache.clone(), SLOTS)
    with pytest.raises(ValueError, match=r"slot_mapping\[5\]=144: expected a slot from 0 to 143"):
        write(q[:, :2], q[:, 2:], cache, cache.clone(), SLOTS + 139)
    assert (cache == 1).all()
