"""Merge of attention states: the empty state, any order and any grouping, float64 as the judge, bad input."""

import itertools
import math
from typing import Any

import pytest
import torch

from trunkattn import merge_states

State = tuple[torch.Tensor, torch.Tensor]


def random_state(seed: int, dtype: torch.dtype = torch.float32, lse_dtype: torch.dtype = torch.float32) -> State:
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(5, 3, 8, generator=generator).to(dtype)
    return out, (10 * torch.randn(5, 3, generator=generator)).to(lse_dtype)


def empty_state(fill: float = 0.0) -> State:
    return torch.full((5, 3, 8), fill), torch.full((5, 3), -math.inf)


def merged_in_float64(states: list[State]) -> State:
    lses = torch.stack([lse.double() for _, lse in states])
    weights = torch.softmax(lses, dim=0).unsqueeze(-1)
    return (weights * torch.stack([out.double() for out, _ in states])).sum(0), torch.logsumexp(lses, dim=0)


@pytest.mark.parametrize("fill", [0.0, math.nan], ids=["zeros", "uninitialised"])
def test_the_empty_state_is_the_identity(fill: float) -> None:
    out, lse = random_state(0)
    for found in (merge_states(out, lse, *empty_state(fill)), merge_states(*empty_state(fill), out, lse)):
        assert torch.equal(found[0], out)
        assert torch.equal(found[1], lse)


def test_two_empty_states_are_empty() -> None:
    out, lse = merge_states(*empty_state(), *empty_state())
    assert torch.equal(out, torch.zeros(5, 3, 8))
    assert torch.equal(lse, torch.full((5, 3), -math.inf))


def test_each_row_is_merged_by_itself() -> None:
    (out_a, lse_a), (out_b, lse_b) = random_state(1), random_state(2)
    lse_a[0], lse_b[1] = -math.inf, -math.inf
    out, lse = merge_states(out_a, lse_a, out_b, lse_b)
    assert torch.equal(out[0], out_b[0])
    assert torch.equal(out[1], out_a[1])
    for row in range(5):
        alone = merge_states(out_a[row], lse_a[row], out_b[row], lse_b[row])
        assert torch.equal(alone[0], out[row])
        assert torch.equal(alone[1], lse[row])


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_states_may_be_merged_in_any_order(order: tuple[int, ...]) -> None:
    states = [random_state(seed) for seed in range(4)]
    expected_out, expected_lse = merged_in_float64(states)
    one, two, three, four = (states[i] for i in order)
    chained = merge_states(*merge_states(*merge_states(*one, *two), *three), *four)
    paired = merge_states(*merge_states(*one, *two), *merge_states(*three, *four))
    for out, lse in (chained, paired):
        assert (out - expected_out).abs().max() < 2e-6
        assert (lse - expected_lse).abs().max() < 4e-6


def test_far_apart_states_do_not_overflow() -> None:
    (out_a, lse_a), (out_b, _) = random_state(1), random_state(2)
    out, lse = merge_states(out_a, lse_a + 1e4, out_b, lse_a - 1e4)
    assert torch.equal(out, out_a)
    assert torch.equal(lse, lse_a + 1e4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("lse_dtype", [torch.float32, torch.float64], ids=str)
def test_the_result_has_the_dtypes_of_the_first_state(dtype: torch.dtype, lse_dtype: torch.dtype) -> None:
    first = random_state(1, dtype, lse_dtype)
    for second in (random_state(2), random_state(2, lse_dtype=torch.float64)):
        out, lse = merge_states(*first, *second)
        expected_out, expected_lse = merged_in_float64([first, second])
        assert (out.dtype, lse.dtype) == (dtype, lse_dtype)
        assert (out - expected_out).abs().max() < max(torch.finfo(dtype).eps * 4, 2e-6)
        assert (lse - expected_lse).abs().max() < 4e-6


def test_the_inputs_are_unchanged() -> None:
    a, b = random_state(1), random_state(2)
    merge_states(*a, *b)
    for state, seed in ((a, 1), (b, 2)):
        assert all(torch.equal(found, kept) for found, kept in zip(state, random_state(seed), strict=True))


OUT, LSE = random_state(0)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"out_a": 1}, TypeError, "out_a is an int: expected a torch.Tensor"),
        ({"lse_b": None}, TypeError, "lse_b is None"),
        ({"out_a": OUT.int()}, TypeError, r"out_a has dtype torch\.int32: expected a floating dtype"),
        (
            {"out_b": OUT.to(torch.float8_e4m3fn)},
            TypeError,
            r"out_b has dtype torch\.float8_e4m3fn: expected a floating dtype of 16 bits or more",
        ),
        ({"out_b": OUT.to_sparse()}, ValueError, r"out_b has layout torch\.sparse_coo: expected a dense tensor"),
        (
            {"lse_a": LSE.half()},
            TypeError,
            r"lse_a has dtype torch\.float16: expected torch\.float32 or",
        ),
        ({"lse_b": LSE.long()}, TypeError, r"lse_b has dtype torch\.int64"),
        ({"out_b": OUT[:4]}, ValueError, r"out_b has shape \(4, 3, 8\): expected \(5, 3, 8\), like out_a"),
        ({"lse_a": LSE[:, :2]}, ValueError, r"lse_a has shape \(5, 2\): expected \(5, 3\), that of out_a without"),
        ({"lse_b": LSE.unsqueeze(-1)}, ValueError, r"lse_b has shape \(5, 3, 1\): expected \(5, 3\)"),
        ({"out_b": OUT.to("meta")}, ValueError, "out_b is on meta: expected cpu, like out_a"),
        ({"lse_a": LSE.to("meta")}, ValueError, "lse_a is on meta"),
        (
            {"out_a": LSE[0, 0], "out_b": LSE[0, 0]},
            ValueError,
            r"out_a has shape \(\): expected \(\.\.\., head_dim_v\)",
        ),
    ],
)
def test_bad_input_is_named(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        merge_states(**({"out_a": OUT, "lse_a": LSE, "out_b": OUT, "lse_b": LSE} | changed))


@pytest.mark.parametrize("broken", ["a", "b"])
def test_what_is_not_a_number_is_not_taken_for_an_empty_state(broken: str) -> None:
    states = {"a": random_state(1), "b": random_state(2)}
    states[broken][1][0, 0] = math.nan
    out, lse = merge_states(*states["a"], *states["b"])
    assert out[0, 0].isnan().all() and lse[0, 0].isnan()
    assert out.isnan().sum() == 8 and lse.isnan().sum() == 1


def test_of_infinite_states_one_outweighs_all_and_two_are_nobodys() -> None:
    (out_a, lse_a), (out_b, lse_b) = random_state(1), random_state(2)
    lse_a[0], lse_b[0], lse_b[1] = math.inf, math.inf, math.inf
    out, lse = merge_states(out_a, lse_a, out_b, lse_b)
    assert out[0].isnan().all() and (lse[:2] == math.inf).all()
    assert torch.equal(out[1], out_b[1]) and out[2:].isfinite().all()


@pytest.mark.parametrize("level", [0.0, 10.0, 100.0, 1e4, -5e4, 1e6, 1e8, -3e38, 3e38])
def test_the_weights_sum_to_one_at_any_size_of_lse(level: float) -> None:
    (out_a, lse_a), (out_b, lse_b) = random_state(1), random_state(2)
    lse_a, lse_b = lse_a + level, lse_b + level
    weight_a = torch.sigmoid(lse_a.double() - lse_b.double()).unsqueeze(-1)
    exact = weight_a * out_a.double() + (1 - weight_a) * out_b.double()
    out, lse = merge_states(out_a, lse_a, out_b, lse_b)
    assert (out - exact).abs().max() < 1e-6
    assert torch.equal(lse, torch.logaddexp(lse_a, lse_b))


@pytest.mark.parametrize("fill", [0.0, math.nan, math.inf])
def test_gradients_pass_by_empty_states(fill: float) -> None:
    """Row 0 is empty in both states, row 1 in the first, row 2 in the second; what their outputs hold is nobody's."""
    (out_a, lse_a), (out_b, lse_b) = random_state(1), random_state(2)
    for out, lse, rows in ((out_a, lse_a, [0, 1]), (out_b, lse_b, [0, 2])):
        out[rows], lse[rows] = fill, -math.inf
    leaves = [tensor.requires_grad_() for tensor in (out_a, lse_a, out_b, lse_b)]
    out, lse = merge_states(*leaves)
    gradients = torch.autograd.grad((out, lse), leaves, (torch.ones_like(out), torch.ones_like(lse)))
    assert all(gradient.isfinite().all() and not gradient[0].any() for gradient in gradients)
    for gradient, row, other in zip(gradients, (1, 1, 2, 2), (2, 2, 1, 1), strict=True):
        assert not gradient[row].any()
        assert torch.equal(gradient[other], torch.ones_like(gradient[other]))
