"""benchmarks/kernels/prefill.py on a CPU: its batches, what outputs are compared with, the work, and the shapes."""

import numpy as np
import pytest
import torch

from benchmarks.kernels.decode_cases import Shape
from benchmarks.kernels.prefill import (
    MODELS,
    PROMPT_SHAPES,
    flops,
    largest_error,
    make_case,
    ours,
    prompt_shapes,
    speedups,
)

SMALL = {
    "plain": Shape("", 4, 2, 64),
    "window": Shape("", 4, 2, 64, window=20),
    "cap": Shape("", 4, 2, 64, soft_cap=3.0),
    "sinks": Shape("", 4, 2, 64, sinks=True),
    "all": Shape("", 4, 2, 64, window=20, soft_cap=3.0, sinks=True),
}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("size", [(1, 40, 0), (3, 20, 48)])
def test_an_output_is_right_only_with_every_option(name: str, size: tuple[int, int, int]) -> None:
    case = make_case(*size, SMALL[name], "cpu")
    run, plan = ours(case)
    assert plan.num_query_tokens == len(case.q) == size[0] * size[1]
    out = run(0)
    assert largest_error(case, out) < 0.02
    for shape in SMALL.values():
        if shape != SMALL[name]:
            other = make_case(*size, shape, "cpu")
            assert largest_error(other, out) > 0.02
    assert largest_error(case, torch.full_like(out, torch.nan)) == float("inf")


@pytest.mark.parametrize("window", [None, 1, 30, 200])
def test_the_work_is_that_of_the_pairs_that_are_seen(window: int | None) -> None:
    case = make_case(3, 20, 48, SMALL["plain"]._replace(window=window), "cpu")
    query, key = np.arange(48, 68)[:, None], np.arange(68)
    seen = (key <= query) & (key > query - (window or 1000))
    assert flops(case) == 3 * 4 * 4 * 64 * seen.sum()


def test_the_shapes_of_prompts() -> None:
    names = [shape.name for shape in prompt_shapes([])]
    assert names == [
        "gpt-oss full 64/8x64 sinks", "gpt-oss window 64/8x64 sinks", "gemma3-12b 16/8x256",
        "gemma3-12b window 16/8x256",
    ]  # fmt: skip
    assert all(any(text in name for text in MODELS) for name in names)
    assert [shape.name for shape in prompt_shapes(["28/4", "cap"])] == ["qwen2.5-7b 28/4x128", "gemma2-9b cap 16/8x256"]
    assert all(shape.head_dim != 96 and shape.page_size == 16 for shape in PROMPT_SHAPES)
    with pytest.raises(ValueError, match="no shape has 'fp8' in its name: expected a part of one of 'llama3-8b"):
        prompt_shapes(["gpt-oss", "fp8"])


def test_speed_is_over_the_kernel_that_is_named_where_both_were_measured() -> None:
    rows = [
        {"fa3": {"us": 8.0}, "trunkattn": {"us": 4.0}, "trunkattn_hopper": {"us": 2.0}},
        {"fa3": {"us": 8.0}, "trunkattn": {"us": 1.0}},
        {"fa3": {"missing": ""}, "trunkattn": {"us": 1.0}, "trunkattn_hopper": {"us": 2.0}},
    ]
    assert speedups(rows, ["fa3"]) == {"fa3": 4.0}
    assert speedups(rows, ["fa3"], "trunkattn_hopper") == {"fa3": 4.0}
    assert speedups(rows[2:], ["fa3"]) == {}
