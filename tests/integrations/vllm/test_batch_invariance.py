"""VLLM_BATCH_INVARIANT=1: a request's tokens and log-probabilities have the same bits whatever it is batched with.

vLLM's own operators of this mode are Triton kernels for GPUs, so here linear layers compute each row by itself.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from vllm import LLM, SamplingParams
from vllm.model_executor.layers import utils

from .engine import make_llm, prompts, shut_down, traffics

SAMPLING = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False, logprobs=3)
CHOSEN = (0, 4, 10, 12, 15, 19)  # of `prompts`: with a trunk, with a prompt that is almost the same, and by themselves
OPTIONS = {"block_size": 16, "attention_backend": "CUSTOM"}


class Answer(NamedTuple):
    tokens: tuple[int, ...]
    logprobs: tuple[tuple[tuple[int, float], ...], ...]  # per token, of the most probable


@pytest.fixture(autouse=True)
def linear_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_rows(layer: torch.nn.Module, remove_weight: bool) -> None:
        def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            rows = [weight @ row for row in x.reshape(-1, x.shape[-1])]
            out = torch.stack(rows) if bias is None else torch.stack(rows) + bias
            return out.view(*x.shape[:-1], len(weight))

        layer.cpu_linear = linear

    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", by_rows)


def answers(llm: LLM, chosen: list[list[int]]) -> list[Answer]:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in chosen], SAMPLING, use_tqdm=False)
    found = []
    for output in outputs:
        (sample,) = output.outputs
        logprobs = tuple(
            tuple(sorted((token, entry.logprob) for token, entry in step.items())) for step in sample.logprobs or []
        )
        found.append(Answer(tuple(sample.token_ids), logprobs))
    return found


def run(model: Path, **options: Any) -> tuple[dict[str, list[Answer]], int]:
    """The chosen prompts' answers: alone, among all prompts, and among them once they are cached; KV bytes saved."""
    llm = make_llm(model, **OPTIONS, **options)
    try:
        alone = []
        for i in CHOSEN:
            llm.reset_prefix_cache()
            alone += answers(llm, [prompts()[i]])
        llm.reset_prefix_cache()
        together, again = answers(llm, prompts()), answers(llm, prompts())
        found = {"alone": alone, "together": [together[i] for i in CHOSEN], "cached": [again[i] for i in CHOSEN]}
        return found, sum(traffic.saved for traffic in traffics(llm) if traffic)
    finally:
        shut_down()


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_bits_do_not_depend_on_the_batch(
    name: str, model: Callable[[str], Path], set_batch_invariance: Callable[[bool], None]
) -> None:
    set_batch_invariance(True)
    found, saved = run(model(name))
    assert saved > 0, "requests share their trunk all the same"
    expected = found["alone"]
    assert all(len(answer.tokens) == len(answer.logprobs) == 8 for answer in expected)
    assert found["together"] == expected
    assert found["cached"] == expected
    chunked, _ = run(model(name), max_num_batched_tokens=64, enable_chunked_prefill=True)
    assert chunked == found


def test_without_the_mode_they_do(model: Callable[[str], Path], set_batch_invariance: Callable[[bool], None]) -> None:
    """So the test above can fail, and tells of the attention."""
    set_batch_invariance(False)
    found, _ = run(model("llama"))
    assert found["together"] != found["alone"]
