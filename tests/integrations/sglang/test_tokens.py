"""Greedy tokens with TrunkAttention equal those of SGLang's own back end, in engines with the same options."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sglang.srt.managers.scheduler as scheduler

from ..broken_merge import break_merge
from ..vllm.prompts import NUM_PROMPTS, equal
from .engine import GREEDY, MAX_TOKENS, Run, equal_rounds, generate

MODELS = ("llama", "qwen3", "gemma3")
PAGES = (1, 16)


def ours(folder: Path, page_size: int, **options: Any) -> Run:
    run = generate(folder, "trunk", page_size=page_size, **options)
    assert run.steps["decode"] > 0 and run.steps["prefill"] > 0, "our back end computed the step"
    return run


def assert_equal(run: Run, expected: Run) -> None:
    assert equal_rounds(run, expected) == [len(each) for each in expected.tokens]


def assert_has_power(run: Run) -> None:
    """The tokens depend on the context: few are repeated."""
    distinct = [len(set(sequence)) for sequence in run.tokens[0]]
    assert sum(distinct) > NUM_PROMPTS * MAX_TOKENS // 2, distinct


@pytest.mark.parametrize("page_size", PAGES)
@pytest.mark.parametrize("name", MODELS)
def test_radix_hits(name: str, page_size: int, model: Callable[[str], Path], stock: Callable[..., Run]) -> None:
    expected, run = stock(name), ours(model(name), page_size)
    assert len(expected.tokens[0]) == NUM_PROMPTS
    assert_has_power(expected)
    assert_equal(run, expected)
    assert run.cached_tokens > 4000
    assert run.kv_bytes_saved > 0


@pytest.mark.parametrize(("name", "page_size"), [("llama", 1), ("qwen3", 16), ("gemma3", 16)])
def test_chunked_prompts(name: str, page_size: int, model: Callable[[str], Path], stock: Callable[..., Run]) -> None:
    run = ours(model(name), page_size, chunked_prefill_size=64)
    assert_equal(run, stock(name))
    assert run.steps["prefill"] > 20  # so many chunks


def test_beams(model: Callable[[str], Path]) -> None:
    """Beams share the slots of their prompt, and of all tokens before they fork. SGLang wants pages of one token."""
    beams = {**GREEDY, "beam_width": 4, "n": 4}
    theirs, run = (generate(model("llama"), name, beams, page_size=1) for name in ("torch_native", "trunk"))
    assert [len(found) for found in run.beams[0]] == [4] * NUM_PROMPTS
    assert run.beams == theirs.beams
    assert len({tuple(tokens) for tokens in run.beams[0][0]}) == 4
    assert run.kv_bytes_saved > 0


@pytest.mark.parametrize("page_size", PAGES)
def test_prompts_and_decodes_in_one_step(
    page_size: int, model: Callable[[str], Path], stock: Callable[..., Run]
) -> None:
    run = ours(model("llama"), page_size, chunked_prefill_size=64, enable_mixed_chunk=True)
    assert_equal(run, stock("llama"))
    assert run.steps["mixed"] > 10


@pytest.mark.parametrize(("name", "page_size"), [("llama", 1), ("llama", 16), ("gemma3", 16)])
def test_retraction(
    name: str, page_size: int, model: Callable[[str], Path], stock: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "TEST_RETRACT", True)
    monkeypatch.setattr(scheduler, "TEST_RETRACT_INTERVAL", 8)
    run = ours(model(name), page_size, rounds=1)
    assert equal(run.tokens[0], stock(name).tokens[0]) == NUM_PROMPTS
    assert run.retractions > 0


@pytest.mark.parametrize("page_size", PAGES)
def test_a_kv_pool_of_their_own_for_windows(
    page_size: int, model: Callable[[str], Path], stock: Callable[..., Run]
) -> None:
    """SGLang's own back end for CPUs misreads these pools, so it has the model with one pool."""
    expected = stock("cohere2")
    assert_has_power(expected)
    run = ours(model("cohere2_pools"), page_size, chunked_prefill_size=256)
    assert_equal(run, expected)
    assert run.cached_tokens > 4000


def test_without_overlap_and_radix_cache(model: Callable[[str], Path], stock: Callable[..., Run]) -> None:
    run = ours(model("llama"), 16, disable_overlap_schedule=True, disable_radix_cache=True)
    assert_equal(run, stock("llama"))
    assert run.cached_tokens == 0


@pytest.mark.parametrize("page_size", PAGES)
def test_decoding_alone(page_size: int, model: Callable[[str], Path], stock: Callable[..., Run]) -> None:
    split = {"prefill_attention_backend": "torch_native", "decode_attention_backend": "trunk"}
    run = generate(model("llama"), "torch_native", page_size=page_size, **split)
    assert_equal(run, stock("llama"))
    assert set(run.steps) == {"decode"}
    assert run.kv_bytes_saved > 0


def test_several_samples_of_a_prompt(model: Callable[[str], Path]) -> None:
    """One round: what is drawn later depends on the number of steps so far, and that on how fast requests arrive."""
    sampling = {"n": 3, "temperature": 1.0, "max_new_tokens": 16, "ignore_eos": True}
    expected = generate(model("llama"), "torch_native", sampling, rounds=1)
    assert len(expected.tokens[0]) == 3 * NUM_PROMPTS
    assert len({tuple(sequence) for sequence in expected.tokens[0]}) > NUM_PROMPTS
    assert_equal(ours(model("llama"), 16, sampling=sampling, rounds=1), expected)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_broken_merge_changes_tokens(
    name: str, model: Callable[[str], Path], stock: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_merge(monkeypatch)
    run = ours(model(name), 16)
    assert equal_rounds(run, stock(name))[0] < NUM_PROMPTS // 2
