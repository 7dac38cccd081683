"""The default dtype and device of the program around the engine change no answer and no log-probability."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from trunkattn.engine import LLM, SamplingParams

PROMPTS = [[7, 8, 9] * 14, [7, 8, 9] * 13 + [1, 2]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=5, n=2, logprobs=2, prompt_logprobs=1, repetition_penalty=1.2),
    SamplingParams(seed=3, temperature=0.7, top_k=20, top_p=0.9, min_p=0.01, max_tokens=5, logit_bias={3: 1.5}),
]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def answers(llm: LLM) -> list[Any]:
    llm.reset_prefix_cache()
    outputs = llm.generate(PROMPTS, PARAMS)
    return [
        (output.prompt_logprobs, [(each.token_ids, each.logprobs) for each in output.outputs]) for output in outputs
    ]


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma2", "gpt_oss", "deepseek_v3"])
def test_an_engine_answers_the_same(tiny_model: Callable[[str], Any], name: str) -> None:
    path = tiny_model(name).path
    llm = LLM(path, num_pages=64)
    expected = answers(llm)
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        with default_dtype(dtype):
            assert answers(llm) == expected, dtype
            assert answers(LLM(path, num_pages=64)) == expected, dtype
            assert torch.get_default_dtype() == dtype
    with torch.device("meta"):
        assert answers(llm) == expected
        assert answers(LLM(path, num_pages=64)) == expected


def test_random_weights_are_the_same(tiny_model: Callable[[str], Any]) -> None:
    path = tiny_model("llama").path
    expected = answers(LLM(path, num_pages=64, load_format="dummy"))
    with torch.device("meta"), default_dtype(torch.float64):
        assert answers(LLM(path, num_pages=64, load_format="dummy")) == expected


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "inference mode": torch.inference_mode,
    "gradients": torch.enable_grad,
    "no gradients": torch.no_grad,
    "anomaly detection": lambda: torch.autograd.set_detect_anomaly(True),
    "deterministic algorithms": deterministic,
    "NumPy's errors": lambda: np.errstate(all="raise"),
}


@pytest.mark.parametrize("name", MODES)
def test_a_mode_of_the_program_changes_no_answer(tiny_model: Callable[[str], Any], name: str) -> None:
    """Neither while an engine answers nor while it is made; what is made in a mode serves outside of it."""
    path = tiny_model("llama").path
    llm = LLM(path, num_pages=64)
    expected = answers(llm)
    with MODES[name]():
        assert answers(llm) == expected
        made = LLM(path, num_pages=64)
        assert answers(made) == expected
    assert answers(made) == expected
