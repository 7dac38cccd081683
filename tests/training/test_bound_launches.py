"""Launches of the training kernels, which are bound once for all calls of a kind: what a call brings, what binds anew.

Stand-ins take the place of the kernels; on a card: tests/on_gpu/test_flash_attention.py.
"""

import cProfile
import gc
import pstats
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from trunkattn import PrefixTree, flash_attention
from trunkattn.gpu import bound
from trunkattn.training import arguments, backward_keys, backward_queries, op, torch_cudnn
from trunkattn.training import backward as portable_backward
from trunkattn.training import forward as portable_forward
from trunkattn.training.hopper import backward as hopper_backward
from trunkattn.training.hopper import forward as hopper_forward
from trunkattn.training.sequences import Sequences

from ..gpu.bound_cases import Kernel

BF16 = torch.bfloat16
SUMS = torch.tensor([0, 40, 160], dtype=torch.int32)
THREE = torch.tensor([0, 40, 100, 160], dtype=torch.int32)  # sequences of the same tokens have more blocks
PLANTED = PrefixTree.from_segments([-1, 0, 0], [80, 48, 32])
TREE = PLANTED.tables(torch.device("cpu"))
KINDS = {
    "batch": Sequences(True, 0.1),
    "packed": Sequences(True, 0.1, SUMS, SUMS),
    "tree": Sequences(True, 0.1, tree=TREE),
    "everything": Sequences(True, 0.1, sliding_window=7, soft_cap=3.0, sinks=torch.zeros(4)),
}
PASSES = {
    "forward": ((portable_forward, "forward_kernel"),),
    "deterministic": (
        (portable_backward, "prepare_kernel"),
        (backward_keys, "keys_kernel"),
        (backward_queries, "queries_kernel"),
    ),
    "one pass": ((portable_backward, "prepare_kernel"), (backward_keys, "keys_kernel")),
    "Hopper forward": ((hopper_forward, "hopper_forward_kernel"),),
    "Hopper backward": (
        (hopper_backward, "prepare_rows_kernel"),
        (hopper_backward, "hopper_backward_kernel"),
        (hopper_backward, "write_gradients_kernel"),
    ),
}
Tensors = dict[str, Any]


def unspecialized(kernel: Any) -> set[str]:
    """Parameters for whose values Triton does not compile a kernel, which may be an interpreted one."""
    options = getattr(kernel, "kwargs", {})
    return {*(options.get("do_not_specialize") or getattr(kernel, "do_not_specialize", None) or ())}


class StandIn(Kernel):
    """A kernel with the parameters of another."""

    def __init__(self, kernel: Any) -> None:
        super().__init__()
        self.arg_names = tuple(kernel.arg_names)
        self.any_value = unspecialized(kernel)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, StandIn]:
    """Every kernel of training by its name, none of which computes."""
    card = SimpleNamespace(multi_processor_count=132, major=9, shared_memory_per_block_optin=232448)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    places: dict[str, ModuleType] = {name: module for rows in PASSES.values() for module, name in rows}
    made = {name: StandIn(getattr(module, name)) for name, module in places.items()}

    def for_any_length(kernel: StandIn) -> StandIn:
        kernel.any_value |= {*arguments.NUMBERS}
        return kernel

    monkeypatch.setattr(arguments, "for_any_length", for_any_length)
    for name, module in places.items():
        monkeypatch.setattr(module, name, made[name])
    return made


def make_tensors(kind: str, dtype: torch.dtype = BF16) -> Tensors:
    lead = (160,) if kind in ("packed", "tree") else (2, 160)
    made = {name: torch.zeros(*lead, 4, 64, dtype=dtype) for name in ("q", "out", "dout")}
    made |= {name: torch.zeros(*lead, 2, 64, dtype=dtype) for name in ("k", "v")}
    return made | {name: torch.zeros(*lead[:-1], 4, 160) for name in ("lse", "dlse")}


def call(name: str, t: Tensors, sequences: Sequences) -> tuple[torch.Tensor, ...]:
    if "forward" in name:
        module = hopper_forward if "Hopper" in name else portable_forward
        return module.forward(t["q"], t["k"], t["v"], sequences)
    saved = tuple(t[each] for each in ("q", "k", "v", "out", "lse"))
    gradients = t["dout"], t["dlse"]
    if "Hopper" in name:
        return hopper_backward.backward(gradients, saved, sequences, False)
    return portable_backward.backward(gradients, saved, sequences, name == "deterministic")


def addresses(value: Any) -> set[int]:
    """Addresses of the tensors among the arguments of a launch."""
    if isinstance(value, torch.Tensor):
        return {value.data_ptr()}
    if hasattr(value, "base"):
        return addresses(value.base)
    return set().union(*map(addresses, value)) if isinstance(value, tuple) else set()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PASSES)
def test_the_first_call_of_a_kind_goes_through_triton_and_others_do_not(
    name: str, kind: str, kernels: dict[str, StandIn]
) -> None:
    first, second = make_tensors(kind), make_tensors(kind)
    call(name, first, KINDS[kind])
    found = call(name, second, KINDS[kind])
    call(name, first, KINDS[kind])
    assert [tuple(each.shape) for each in found[:1]] == [tuple(second["q"].shape)]
    used = [kernels[each] for _, each in PASSES[name]]
    for kernel in used:
        (((grid, *_), named),) = kernel.calls
        assert len(kernel.compiled.calls) == 2
        for (bound_grid, *positional), given in zip(kernel.compiled.calls, (second, first), strict=True):
            assert bound_grid == (grid, 1, 1) and len(positional) == len(kernel.arg_names)
            by_name = dict(zip(kernel.arg_names, positional, strict=True))
            assert {each: value for each, value in by_name.items() if not addresses(value)} == {
                each: value for each, value in named.items() if each in kernel.arg_names and not addresses(value)
            }
            others = first if given is second else second
            brought = addresses(tuple(positional))
            assert brought & {t.data_ptr() for t in given.values()} and not brought & {
                t.data_ptr() for t in others.values()
            }


def compiled_for(value: Any) -> Any:
    """What Triton compiles for of an argument: whether each number is 1, and whether it is a multiple of 16. Constants
    are compiled for as they are."""
    if isinstance(value, tuple):
        return tuple(map(compiled_for, value))
    return (value == 1, value % 16 == 0) if type(value) is int else None


@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("window", [None, 4096])
@pytest.mark.parametrize("kind", ["packed", "tree"])
def test_other_lengths_and_trees_compile_nothing(
    name: str, kind: str, window: int | None, kernels: dict[str, StandIn]
) -> None:
    """None of the lengths fills the last block of keys or of queries, for which there are kernels of their own."""
    for tokens in (160, 2049, 1):
        if kind == "packed":
            sums = torch.tensor([0, *range(40, tokens, 40), tokens], dtype=torch.int32)
            sequences = Sequences(True, 0.1, sums, sums, sliding_window=window)
        else:
            tables = PrefixTree.from_segments([-1], [tokens]).tables(torch.device("cpu"))
            sequences = Sequences(True, 0.1, tree=tables, sliding_window=window)
        made = make_tensors(kind)
        t = {each: torch.zeros(tokens, *tensor.shape[1:], dtype=BF16) for each, tensor in made.items()}
        call(name, t | {each: torch.zeros(4, tokens) for each in ("lse", "dlse")}, sequences)
    for _, each in PASSES[name]:
        kernel = kernels[each]
        found = [
            {key: compiled_for(value) for key, value in given.items() if key not in {*kernel.any_value, "C", "VARIANT"}}
            for _, given in kernel.calls
        ]
        assert len(found) == 3 and found[0] == found[1] == found[2]
        constants = [[given.get(key) for key in ("C", "VARIANT")] for _, given in kernel.calls]
        assert name == "Hopper backward" or constants[0] == constants[1] == constants[2]


def test_kernels_for_any_length_are_made_once() -> None:
    kernel = arguments.for_any_length(portable_forward.forward_kernel)
    assert unspecialized(kernel) == {*arguments.NUMBERS} and not unspecialized(portable_forward.forward_kernel)
    assert arguments.for_any_length(portable_forward.forward_kernel) is kernel


def moved(tensor: torch.Tensor) -> torch.Tensor:
    """An equal tensor whose address is no multiple of 16 bytes."""
    return torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize(
    "which", ["q", "k", "v", "out", "dout", "lse", "dlse", "cu_seqlens_q", "cu_seqlens_k", "sinks"]
)
@pytest.mark.parametrize("name", ["forward", "deterministic", "one pass"])
def test_a_launch_for_aligned_tensors_serves_no_other(name: str, which: str, kernels: dict[str, StandIn]) -> None:
    kind = "packed" if "cu" in which else "everything"
    sequences, t = KINDS[kind], make_tensors(kind)
    call(name, t, sequences)
    given = getattr(sequences, which, None)
    other = sequences if given is None else replace(sequences, **{which: moved(given)})
    tensors = t | ({which: moved(t[which])} if which in t else {})
    is_read = "forward" not in name or which not in ("out", "dout", "lse", "dlse")
    for _ in range(2):
        call(name, tensors, other)
    for each in {each for _, each in PASSES[name]}:
        assert len(kernels[each].calls) == 1 + is_read
        assert len(kernels[each].compiled.calls) == 1 + (not is_read)


@pytest.mark.parametrize("which", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("name", ["Hopper forward", "Hopper backward"])
def test_tma_gets_a_copy_of_what_it_does_not_read(name: str, which: str, kernels: dict[str, StandIn]) -> None:
    t = make_tensors("batch")
    call(name, t | {which: moved(t[which])}, KINDS["batch"])
    (kernel,) = (kernels[each] for _, each in PASSES[name] if each.startswith("hopper"))
    descriptors = [value for _, named in kernel.calls for value in named.values() if hasattr(value, "base")]
    assert len(descriptors) >= 4 and all(each.base.data_ptr() % 16 == 0 for each in descriptors)


@pytest.mark.parametrize("name", ["deterministic", "one pass", "Hopper backward"])
def test_a_launch_without_a_gradient_of_lse_serves_no_call_with_one(name: str, kernels: dict[str, StandIn]) -> None:
    t = make_tensors("batch")
    first = kernels[PASSES[name][0][1]]
    for given in (t, t | {"dlse": None}, t, t | {"dlse": None}):
        call(name, given, KINDS["batch"])
    assert [named["tensors"].dlse is None for _, named in first.calls] == [False, True]
    assert len(first.compiled.calls) == 2


CHANGES: dict[str, Callable[[Tensors, Sequences], tuple[Tensors, Sequences]]] = {
    "dtype": lambda t, s: (make_tensors("batch", torch.float16), s),
    "length": lambda t, s: ({n: x[:, :96] if x.dim() == 4 else x[..., :96] for n, x in t.items()}, s),
    "batch": lambda t, s: ({n: x[:1] for n, x in t.items()}, s),
    "heads": lambda t, s: (t | {n: x[:, :, :1].contiguous() for n, x in t.items() if n in ("k", "v")}, s),
    "strides": lambda t, s: (t | {"k": torch.zeros(2, 160, 3, 64, dtype=BF16)[:, :, :2]}, s),
    "causal": lambda t, s: (t, replace(s, causal=False)),
    "scale": lambda t, s: (t, replace(s, sm_scale=0.2)),
    "window": lambda t, s: (t, replace(s, sliding_window=7)),
    "cap": lambda t, s: (t, replace(s, soft_cap=2.0)),
    "sinks": lambda t, s: (t, replace(s, sinks=torch.zeros(4))),
    "sequences": lambda t, s: (t, replace(s, cu_seqlens_q=THREE, cu_seqlens_k=THREE)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", PASSES)
def test_what_a_launch_was_not_bound_for_is_bound_anew(name: str, change: str, kernels: dict[str, StandIn]) -> None:
    kind = "packed" if change == "sequences" else "batch"
    t, sequences = make_tensors(kind), KINDS[kind]
    changed = CHANGES[change](t, sequences)
    for _ in range(2):
        call(name, t, sequences)
        call(name, *changed)
    for _, each in PASSES[name]:
        assert len(kernels[each].calls) == len(kernels[each].compiled.calls) == 2


def test_a_device_has_launches_of_its_own(kernels: dict[str, StandIn]) -> None:
    t = make_tensors("batch")
    elsewhere = {name: torch.empty_like(tensor, device="meta") for name, tensor in t.items()}
    for name in ("forward", "Hopper forward"):
        for tensors in (t, elsewhere, t, elsewhere):
            out, _ = call(name, tensors, KINDS["batch"])
            assert out.device == tensors["q"].device
        assert [len(kernels[each].calls) for _, each in PASSES[name]] == [2]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PASSES)
def test_what_is_kept_holds_no_tensor(name: str, kind: str, kernels: dict[str, StandIn]) -> None:
    t = make_tensors(kind)
    results = call(name, t, KINDS[kind])
    kept = [weakref.ref(tensor) for tensor in (*t.values(), *results)]
    for kernel in kernels.values():
        kernel.calls.clear()
    del t, results
    gc.collect()
    assert not any(each() is not None for each in kept)


@pytest.mark.parametrize("kind", KINDS)
def test_an_eager_call_does_little(kind: str, kernels: dict[str, StandIn], monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions that Python calls, its own and those of extensions, from the second call of a kind on."""
    sequences, t = KINDS[kind], make_tensors(kind)
    options: dict[str, Any] = {"sliding_window": sequences.sliding_window, "logits_soft_cap": sequences.soft_cap}
    options |= {"sinks": sequences.sinks, "cu_seqlens_q": sequences.cu_seqlens_q}
    options |= {"cu_seqlens_k": sequences.cu_seqlens_k, "tree": PLANTED if kind == "tree" else None}
    leaves = [t[name].requires_grad_() for name in ("q", "k", "v")]

    def forward() -> torch.Tensor:
        out = flash_attention(*leaves, True, **options)
        assert isinstance(out, torch.Tensor)
        return out

    def both() -> None:
        torch.autograd.grad(forward(), leaves, t["dout"])

    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch_cudnn, "reads", lambda *_: False)  # a build for GPUs would ask the card
    with torch.library._scoped_library("trunkattn", "IMPL") as ops:
        ops.impl("flash_attention", op._forward_gpu, "CPU", allow_override=True)
        ops.impl("flash_attention_backward", op._backward_gpu, "CPU", allow_override=True)
        for _ in range(2):  # after a process's first call Python forgets once which classes it has compared
            both()
        through_triton = [len(kernel.calls) for kernel in kernels.values()]
        for call, most in ((forward, 240), (both, 490)):
            profile = cProfile.Profile()
            profile.runcall(call)
            assert pstats.Stats(profile).total_calls <= most  # type: ignore[attr-defined]
        assert [len(kernel.calls) for kernel in kernels.values()] == through_triton


def test_only_so_many_launches_are_kept() -> None:
    for number in range(3 * bound._MOST_KEPT):
        assert bound.kept(("test", number), lambda: "first") == "first"
    assert bound._holder.cache_info().currsize == bound._MOST_KEPT
    assert bound.kept(("test", 3 * bound._MOST_KEPT - 1), lambda: "second") == "first"
    assert bound.kept(("test", 0), lambda: "second") == "second", "it was forgotten"


def test_an_error_while_binding_is_raised_each_time() -> None:
    def fail() -> int:
        raise ValueError("no such tile")

    for _ in range(2):
        with pytest.raises(ValueError, match="no such tile"):
            bound.kept("test of an error", fail)
