"""What torch does with an operator: batches of gradients, vmap, nested tensors, checkpoints, compilation, processes."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from trunkattn import PrefixTree, flash_attention
from trunkattn.validate import has_memory

from .parallel_script import in_processes_of_its_own
from .training_cases import BF16, TREE

ATTENTION: Callable[..., Any] = flash_attention
SMALL = PrefixTree.from_segments([-1, 0, 0, 2], [3, 2, 4, 1])
SUMS = torch.tensor([0, 4, 10], dtype=torch.int32)
KINDS: dict[str, dict[str, Any]] = {
    "dense": {"causal": True},
    "packed": {"causal": True, "cu_seqlens_q": SUMS, "cu_seqlens_k": SUMS},
    "tree": {"tree": SMALL, "sliding_window": 4},
}


def leaves(kind: str, tokens: int = 10) -> list[torch.Tensor]:
    torch.manual_seed(0)
    lead = (2, tokens) if kind == "dense" else (tokens,)
    return [torch.randn(*lead, heads, 8, requires_grad=True) for heads in (4, 2, 2)]


@pytest.mark.parametrize("kind", KINDS)
def test_batched_gradients_and_vmap_give_the_same(kind: str) -> None:
    given = leaves(kind)
    sinks = torch.randn(4, requires_grad=True)
    out, lse = ATTENTION(*given, **KINDS[kind], sinks=sinks, return_lse=True)
    wanted = torch.randn(3, *out.shape), torch.randn(3, *lse.shape)
    found = torch.autograd.grad((out, lse), (*given, sinks), wanted, is_grads_batched=True, retain_graph=True)
    for index in range(3):
        one = torch.autograd.grad((out, lse), (*given, sinks), tuple(each[index] for each in wanted), retain_graph=True)
        for batched, alone in zip(found, one, strict=True):
            torch.testing.assert_close(batched[index], alone)
    many = [torch.stack([tensor.detach(), tensor.detach() * 2]) for tensor in given]
    mapped = torch.vmap(lambda q, k, v: ATTENTION(q, k, v, **KINDS[kind]), in_dims=(0, 0, None))(
        many[0], many[1], many[2][0]
    )
    for index in range(2):
        assert torch.equal(mapped[index], ATTENTION(many[0][index], many[1][index], many[2][0], **KINDS[kind]))


@pytest.mark.parametrize("kind", KINDS)
def test_vmap_over_nothing_is_empty(kind: str) -> None:
    q, k, v = (tensor.detach() for tensor in leaves(kind))
    found = torch.vmap(lambda q, k: ATTENTION(q, k, v, **KINDS[kind]), in_dims=(1, None))(q[:, None][:, :0], k)
    assert found.shape == (0, *q.shape)


@pytest.mark.parametrize("kind", KINDS)
def test_transformations_of_torch_func_give_the_same_gradients(kind: str) -> None:
    given = [tensor.detach() for tensor in (*leaves(kind), torch.randn(4))]

    def loss(*tensors: torch.Tensor) -> torch.Tensor:
        out, lse = ATTENTION(*tensors[:3], **KINDS[kind], sinks=tensors[3], return_lse=True)
        result: torch.Tensor = out.square().sum() + lse.sum()
        return result

    def expected_of(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        own = [tensor.clone().requires_grad_() for tensor in tensors]
        return torch.autograd.grad(loss(*own), own)

    of_all = torch.func.grad(loss, argnums=(0, 1, 2, 3))
    with torch.no_grad():
        found = of_all(*given)
    torch.testing.assert_close(found, expected_of(*given))
    many = torch.stack([given[0], given[0] * 2])
    per_sample = torch.vmap(of_all, in_dims=(0, None, None, None))(many, *given[1:])
    for index in range(2):
        torch.testing.assert_close([each[index] for each in per_sample], list(expected_of(many[index], *given[1:])))
    summed = torch.func.grad(lambda q: torch.vmap(loss, in_dims=(0, None, None, None))(q, *given[1:]).sum())(many)
    torch.testing.assert_close(summed, per_sample[0])
    outer = given[1].clone().requires_grad_()  # which the tape around a transformation records
    value, _ = torch.func.vjp(lambda q: loss(q, outer, *given[2:]), given[0])
    torch.testing.assert_close(torch.autograd.grad(value, outer)[0], expected_of(*given)[1])
    assert torch.func.jacrev(loss)(*given).equal(found[0])


def test_second_derivatives_by_torch_func_are_refused() -> None:
    """Not those that are 0 because nothing is recorded."""
    given = [tensor.detach() for tensor in leaves("tree")]

    def loss(q: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = ATTENTION(q, *given[1:], **KINDS["tree"]).square().sum()
        return total

    with pytest.raises(RuntimeError, match="flash_attention_backward has no gradients: expected first derivatives"):
        torch.func.grad(lambda q: torch.func.grad(loss)(q).sum())(given[0])
    for transformation in (torch.func.hessian, torch.func.jacfwd):
        with pytest.raises(RuntimeError, match="no forward-mode derivatives: expected tensors without tangents"):
            transformation(loss)(given[0])


def test_values_are_unpacked_under_transformations_of_torch_func() -> None:
    values, indices = torch.randn(10, 3, 2), SMALL.sequence_indices()
    for dim in (1, 2):
        found = torch.vmap(lambda each: tuple(SMALL.unpack(each)), in_dims=dim, out_dims=dim)(values)
        assert all(torch.equal(part, values[own]) for part, own in zip(found, indices, strict=True))
    gradient = torch.func.grad(lambda given: sum(part.sum() for part in SMALL.unpack(given)))(values)
    assert torch.equal(gradient[:, 0, 0], SMALL.pack().weights + torch.eye(10)[0] * 2)
    _, tangents = torch.func.jvp(SMALL.unpack, (values,), (values,))
    assert all(torch.equal(part, values[own]) for part, own in zip(tangents, indices, strict=True))


def test_nested_tensors_are_packed_sequences() -> None:
    parts = [[torch.randn(tokens, heads, 8) for tokens in (4, 6)] for heads in (4, 2, 2)]
    nested = [torch.nested.nested_tensor(each, layout=torch.jagged, requires_grad=True) for each in parts[:2]]
    values = torch.cat(parts[2]).requires_grad_()
    v = torch.nested.nested_tensor_from_jagged(values, nested[1].offsets())
    v_same = torch.nested.nested_tensor_from_jagged(values, v.offsets())
    k = torch.nested.nested_tensor_from_jagged(nested[1].values(), v.offsets())
    out, lse = ATTENTION(nested[0], k, v_same, True, return_lse=True)
    flat = [torch.cat(each).requires_grad_() for each in parts]
    expected = ATTENTION(*flat, **KINDS["packed"])
    assert torch.equal(out.values(), expected) and lse.values().shape == (10, 4)
    out.values().square().sum().backward()
    expected.square().sum().backward()
    assert nested[0].grad is not None and torch.equal(nested[0].grad.values(), flat[0].grad)
    assert torch.equal(values.grad, flat[2].grad)


def test_nested_tensors_compile_whole() -> None:
    compiled = torch.compile(lambda q: ATTENTION(q, q, q, True), backend="aot_eager", fullgraph=True)
    for lengths in ((4, 6), (3, 9)):
        parts = [torch.randn(tokens, 2, 8) for tokens in lengths]
        found, expected = (torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True) for _ in range(2))
        for given, attention in ((found, compiled), (expected, lambda q: ATTENTION(q, q, q, True))):
            attention(given).values().square().sum().backward()
        assert found.grad is not None and torch.equal(found.grad.values(), expected.grad.values())


JAGGED = torch.nested.nested_tensor([torch.zeros(3, 2, 8), torch.zeros(1, 2, 8)], layout=torch.jagged)
ONE_HEAD = torch.nested.nested_tensor([torch.zeros(3, 1, 8), torch.zeros(1, 1, 8)], layout=torch.jagged)
THREE_DIMENSIONS = torch.nested.nested_tensor([torch.zeros(3, 8)], layout=torch.jagged)
PLAIN = torch.zeros(2, 3, 2, 8)
BAD: tuple[tuple[str, dict[str, Any]], ...] = (
    ("tree is given and q is nested: expected one of them", {"tree": SMALL}),
    ("cu_seqlens_q is given and q is nested", {"cu_seqlens_q": SUMS, "cu_seqlens_k": SUMS}),
    ("k is not nested, as q is: expected a nested tensor", {"k": PLAIN}),
    ("v is not nested, as q is: expected a nested tensor", {"v": [PLAIN]}),
    ("q has layout torch.strided: expected a nested tensor of layout torch.jagged", {"q": torch.nested.nested_tensor(
        [torch.zeros(3, 2, 8), torch.zeros(1, 2, 8)])}),
    ("v has shape", {"v": JAGGED.transpose(1, 2)}),
    ("v has shape", {"v": ONE_HEAD.transpose(1, 2)}),  # its values are contiguous
    ("expected (batch, tokens of each, heads, head_dim), contiguous", {"v": JAGGED.transpose(2, 3)}),
    ("expected (batch, tokens of each, heads, head_dim), contiguous", {"q": THREE_DIMENSIONS}),
    ("v has sequences of shape", {"v": torch.nested.nested_tensor(list(JAGGED), layout=torch.jagged)}),
)  # fmt: skip


@pytest.mark.parametrize(("message", "changes"), BAD, ids=[message for message, _ in BAD])
def test_nested_tensors_that_do_not_fit_are_refused(message: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        ATTENTION(**({"q": JAGGED, "k": JAGGED, "v": JAGGED} | changes))


@pytest.mark.parametrize("kind", KINDS)
def test_checkpointing_computes_again_what_it_forgot(kind: str) -> None:
    given = leaves(kind)

    def loss(*tensors: torch.Tensor) -> torch.Tensor:
        return ATTENTION(*tensors, **KINDS[kind]).square().sum()

    expected = torch.autograd.grad(loss(*given), given)
    for again in (True, False):
        found = torch.autograd.grad(checkpoint(loss, *given, use_reentrant=False), given) if again else expected
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_trees_compile_whole_and_not_again() -> None:
    compilations = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        compilations.append(graph)
        return graph

    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tree: PrefixTree) -> torch.Tensor:
        return ATTENTION(q.sin(), k, v, tree=tree).square().sum()

    compiled = torch.compile(loss, backend=backend, fullgraph=True)
    trees = [PrefixTree.from_segments([-1, *[0] * n], [5 + n, *[3] * n]) for n in (2, 3, 4, 5, 6)]
    for tree in trees:
        given = leaves("tree", tree.num_tokens)
        found, expected = compiled(*given, tree), loss(*given, tree)
        for a, b in zip(torch.autograd.grad(found, given), torch.autograd.grad(expected, given), strict=True):
            torch.testing.assert_close(a, b)
    assert len(compilations) <= 2  # shapes as they are, then any


def test_trees_are_packed_and_unpacked_in_a_whole_graph() -> None:
    def packed(tree: PrefixTree, values: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
        batch = tree.pack()
        return tree.unpack(values * 2), batch.weights, batch.position_ids

    values = torch.randn(10, 2)
    for found, expected in zip(
        torch.compile(packed, backend="eager", fullgraph=True)(SMALL, values), packed(SMALL, values), strict=True
    ):
        torch.testing.assert_close(found, expected)


def test_a_tree_is_made_within_what_is_compiled() -> None:
    """By Python, between two graphs."""
    made = torch.compile(PrefixTree.from_sequences, backend="eager")
    for sequences, tokens in (([[1, 2], [1, 3]], 3), ([[1, 2, 5, 6], [1, 3, 4], [2, 2]], 8)):
        tree = made(sequences)
        assert tree.num_tokens == tokens
        assert [own.tolist() for own in tree.unpack(tree.tokens)] == sequences


def test_autocast_applies_to_trees() -> None:
    given = leaves("tree", TREE.num_tokens)
    with torch.autocast("cpu", BF16):
        out = ATTENTION(*given, tree=TREE)
    assert out.dtype == BF16 and torch.equal(out, ATTENTION(*(tensor.to(BF16) for tensor in given), tree=TREE))


class TreeLayer(torch.nn.Module):
    """A tree as a module, which export needs."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = ATTENTION(q, k, v, tree=SMALL, sliding_window=4)
        return out


def test_it_exports_with_a_tree() -> None:
    given = tuple(tensor.detach() for tensor in leaves("tree"))
    exported = torch.export.export(TreeLayer(), given)
    assert torch.equal(exported.module()(*given), TreeLayer()(*given))


def with_fake_tensors(layer: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        layer(*(torch.empty_like(tensor) for tensor in given))


def under_a_transformation(layer: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
    gradient = torch.func.grad(lambda q: layer(q, *given[1:]).sum())(given[0])
    own = given[0].clone().requires_grad_()
    assert torch.equal(gradient, torch.autograd.grad(layer(own, *given[1:]).sum(), own)[0])


def functionalized(layer: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
    assert torch.equal(torch.func.functionalize(layer)(*given), layer(*given))


@pytest.mark.parametrize("use", [torch.export.export, with_fake_tensors, under_a_transformation, functionalized])
def test_a_tree_outlives_what_traces_it(use: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of fake tensors and of torch.func are not those of later calls."""
    given = tuple(tensor.detach() for tensor in leaves("tree"))
    expected = TreeLayer()(*given)
    monkeypatch.setitem(globals(), "SMALL", PrefixTree.from_segments(SMALL.parents, SMALL.lengths))
    use(TreeLayer(), given)
    for _ in range(2):
        assert torch.equal(TreeLayer()(*given), expected)
    assert all(map(has_memory, SMALL.tables(torch.device("cpu"))))


def test_a_tensor_of_several_processes_is_refused(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        q, k, v = (distribute_tensor(tensor.detach(), mesh, [Shard(1)]) for tensor in leaves("tree"))
        with pytest.raises(
            ValueError, match=r"k is a DTensor: expected a tensor of this process alone; use k.to_local"
        ):
            ATTENTION(q.to_local(), k, v, tree=SMALL)
        assert ATTENTION(q.to_local(), k.to_local(), v.to_local(), tree=SMALL).shape == q.shape
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_processes_in_data_parallel_or_fully_sharded_agree() -> None:
    """Two processes on this CPU, a tree each: gradients are the mean of both."""
    assert in_processes_of_its_own("cpu") == ["ddp", "equal", "fsdp2", "equal"]
