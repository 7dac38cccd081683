"""Launches of training that were bound for some tensors, and then get others: addresses, streams, devices, shapes."""

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from trunkattn import flash_attention

from ..training.parallel_script import in_processes_of_its_own
from ..training.training_cases import FEATURES, TREES, Results, TrainingCase, check, longer, run

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("own_kernels", "one_pass")]
BF16 = torch.bfloat16
CASES = {
    "batch": TrainingCase(((300, 300), (300, 300)), False, True, (8, 2), 64, BF16, device="cuda"),
    "packed": TrainingCase(((200, 200), (0, 7), (312, 400)), True, True, (4, 2), 128, BF16, padding=9, device="cuda"),
    "tree": replace(longer(TREES[0], 1, "cuda", BF16), head_dim=128, heads=(4, 2)),
    "features": replace(longer(FEATURES[-1], 3, "cuda", BF16), head_dim=64, head_dim_v=64),
    "everything in a tree": replace(longer(TREES[3], 1, "cuda", BF16), head_dim=64, head_dim_v=64, heads=(4, 2)),
}


def moved(tensor: torch.Tensor, elements: int) -> torch.Tensor:
    """An equal tensor with the same strides, so many elements behind an address of whole 512 bytes."""
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    whole = torch.full((span + elements,), torch.nan, dtype=tensor.dtype, device=tensor.device)
    return whole[elements:].as_strided(tensor.shape, tensor.stride()).copy_(tensor)


def at(case: TrainingCase, elements: int) -> TrainingCase:
    """The case with all its tensors elsewhere."""
    other = replace(case)
    other.__dict__["inputs"] = tuple(moved(tensor, elements) for tensor in case.inputs)
    return other


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_tensors_at_any_address(name: str, deterministic: bool) -> None:
    """Launches are bound for the first, and serve the second; of the others some are at no multiple of 16 bytes."""
    for elements in (0, 0, 1, 8, 4, 0):
        check(at(CASES[name], elements), deterministic)


@pytest.mark.parametrize("elements", [1, 2, 4])
def test_small_tables_at_any_address(elements: int) -> None:
    case, sinks = CASES["packed"], torch.linspace(-1, 2, 4, device="cuda")
    q, k, v = case.inputs[:3]
    first, second = (sums for sums in case.cu_seqlens if sums is not None)

    def results(sinks: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> Results:
        leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v, sinks)]
        options: dict[str, Any] = {"sinks": leaves[3], "cu_seqlens_q": first, "cu_seqlens_k": second}
        out = flash_attention(*leaves[:3], True, **options, deterministic=True)
        assert isinstance(out, torch.Tensor)
        return out, *torch.autograd.grad(out, leaves, torch.ones_like(out))

    tables = sinks, first, second
    for _ in range(2):
        expected = results(*tables)
        for which in range(3):
            given = [_shifted(each, elements) if number == which else each for number, each in enumerate(tables)]
            assert all(torch.equal(a, b) for a, b in zip(results(*given), expected, strict=True))


def _shifted(tensor: torch.Tensor, elements: int) -> torch.Tensor:
    whole = torch.zeros(len(tensor) + elements, dtype=tensor.dtype, device=tensor.device)
    return whole[elements:].copy_(tensor)


def test_a_call_goes_to_the_stream_and_thread_of_its_caller() -> None:
    case = CASES["packed"]
    expected, found = run(case, True), list[Results]()

    def work() -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)  # results are there after that, in order, or not at all
            found.append(run(case, True))
        side.synchronize()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    for results in found:
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
def test_each_gpu_has_launches_of_its_own() -> None:
    for case in (CASES["packed"], CASES["tree"]):
        expected = run(case, True)
        for index in (1, 0, 1):
            found = run(replace(case, device=f"cuda:{index}"), True)
            assert all(torch.equal(a.cuda(0), b.cuda(0)) for a, b in zip(found, expected, strict=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
def test_data_parallel_and_fully_sharded() -> None:
    """Two processes on a GPU each, with a tree each: gradients are the mean of both."""
    assert in_processes_of_its_own("cuda") == ["ddp", "equal", "fsdp2", "equal"]


def test_launches_serve_lengths_that_alternate() -> None:
    """Lengths that are and are not multiples of 16, and one of 1, which Triton compiles for."""
    lengths = (128, 129, 1, 640, 128, 1, 129)
    for length in lengths:
        case = TrainingCase(((length, length),), False, True, (4, 2), 128, BF16, sliding_window=100, device="cuda")
        check(case, False)
        check(case, True)
