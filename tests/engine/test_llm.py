"""`LLM`: options, prompts of every form, streams, and bad input that stops a call before it starts."""

import copy
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM

from trunkattn.engine import LLM, EngineConfig, SamplingParams
from trunkattn.engine import llm as llm_module
from trunkattn.engine.memory import size_cache
from trunkattn.engine.model.inspection import inspect_model
from trunkattn.engine.runner import ModelRunner
from trunkattn.engine.scheduling.scheduled_batch import ScheduledBatch
from trunkattn.engine.token_rules import TokenRules
from trunkattn.kv_cache.manager import CacheManager

SHORT = SamplingParams(temperature=0, max_tokens=4)


@pytest.fixture(scope="module")
def llm(tiny_model: Callable[[str], Any]) -> LLM:
    """A model without a tokenizer: prompts are token ids."""
    return LLM(tiny_model("llama").path, page_size=4, num_pages=64)


def test_prompts_may_have_every_form(llm: LLM) -> None:
    (alone,) = llm.generate([1, 2, 3], SHORT)
    prompts: list[Any] = [[1, 2, 3], (1, 2, 3), {"prompt_token_ids": [1, 2, 3]}]
    outputs = llm.generate(prompts, SHORT)
    assert [output.outputs[0].token_ids for output in outputs] == [alone.outputs[0].token_ids] * 3
    assert llm.generate({"prompt_token_ids": [1, 2, 3]}, SHORT)[0].prompt_token_ids == [1, 2, 3]
    assert llm.generate([], SHORT) == []


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=count) for count in (3, 1, 2)]
    outputs = llm.generate([[1], [2], [3]], params, use_tqdm=True)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [3, 1, 2]
    assert len(llm.generate([5])[0].outputs[0].token_ids) == 16


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_it_stays_in_its_process(llm: LLM, copied: Callable[[object], object]) -> None:
    with pytest.raises(TypeError, match="an LLM is copied or pickled: expected one for each process, so pass"):
        copied(llm)


BAD_CALLS: list[tuple[Any, Any, str]] = [
    ([[1], []], SHORT, "prompts[1] has 0 tokens"),
    ([[1], [2] * 300], SHORT, "prompts[1] has 300 tokens: expected 1 to 255"),
    ([[1], [256]], SHORT, "prompts[1]: token id=256: expected an integer from 0 to 255"),
    ([[1], "text"], SHORT, "prompts[1]='text': expected token ids"),
    ([[1], 7.5], SHORT, "prompts[1]=7.5"),
    ([[1], {"text": "a"}], SHORT, "prompts[1] has the keys ['text']"),
    ([[1], {"prompt": "a", "prompt_token_ids": [1]}], SHORT, "expected one of prompt and prompt_token_ids"),
    (
        [[1], {"prompt_token_ids": [1], "cache_salt": "a"}],
        SHORT,
        "expected only prompt or prompt_token_ids, because nothing reads",
    ),
    ([[1], {"prompt_token_ids": "ab"}], SHORT, "prompts[1].prompt_token_ids='ab': expected a list of token ids"),
    ([[1], {5: 6, "prompt": "a"}], SHORT, "prompts[1] has the keys [5, 'prompt']"),
    ([[1], [2]], [SHORT], "sampling_params has 1 items: expected one for each of 2 prompts"),
    ([[1], [2]], [SHORT, {"n": 1}], "sampling_params[1]={'n': 1}: expected SamplingParams"),
    (5, SHORT, "prompts=5"),
    (b"abc", SHORT, "prompts=b'abc': expected one prompt"),
    ([b"abc"], SHORT, "prompts[0]=b'abc': expected a string, a list of token ids"),
    ([[1]], 5, "sampling_params=5"),
    ([[1]], SamplingParams(stop="x"), "stop=('x',): expected no stop strings"),
    ([[1]], SamplingParams(logprobs=257), "logprobs=257"),
]


@pytest.mark.parametrize(("prompts", "params", "message"), BAD_CALLS)
def test_a_bad_call_starts_nothing_and_leaves_the_others_alone(
    llm: LLM, prompts: Any, params: Any, message: str
) -> None:
    expected = llm.generate([9, 8, 7], SHORT)[0].outputs[0].token_ids
    stream = llm.stream([9, 8, 7], SHORT)
    next(stream)
    for call in (llm.generate, llm.stream):
        with pytest.raises((TypeError, ValueError)) as caught:
            call(prompts, params)
        assert message in str(caught.value)
    *_, (_, last) = stream
    assert last.outputs[0].token_ids == expected
    assert llm.engine.usage().pages_held == 0 and not llm.engine.has_unfinished


def test_chat_needs_a_template(llm: LLM) -> None:
    with pytest.raises(ValueError, match="chat template"):
        llm.chat([{"role": "user", "content": "hello"}])


def test_a_stream_yields_every_token(llm: LLM) -> None:
    lengths: dict[int, list[int]] = {0: [], 1: []}
    for position, output in llm.stream([[1, 2], [3]], SHORT):
        lengths[position].append(len(output.outputs[0].token_ids))
    assert lengths == {0: [1, 2, 3, 4], 1: [1, 2, 3, 4]}


def test_calls_in_turn_share_the_engine(llm: LLM) -> None:
    expected = [llm.generate(prompt, SHORT)[0].outputs[0].token_ids for prompt in ([4, 5], [6, 7], [8])]
    first, second = llm.stream([4, 5], SHORT), llm.stream([6, 7], SHORT)
    answers: list[Any] = [next(first), next(second)]
    third = llm.generate([8], SHORT)[0]
    for number, stream in enumerate((first, second)):
        *_, answers[number] = stream
    assert [answers[0][1].outputs[0].token_ids, answers[1][1].outputs[0].token_ids] == expected[:2]
    assert third.outputs[0].token_ids == expected[2]


def test_a_request_id_used_again_gets_its_own_pages(llm: LLM, tiny_model: Callable[[str], Any]) -> None:
    known, other = list(range(30, 50)), list(range(100, 140))
    for prompt in (known, other, [*known, 7]):  # the last one starts on cached pages, in the row of the one before
        llm.engine.add_request(prompt, SHORT, request_id="same")
        outputs = []
        while llm.engine.has_unfinished:
            outputs = llm.engine.step()
        assert outputs[0].outputs[0].token_ids == tiny_model("llama").generate(prompt, 4)
    assert outputs[0].num_cached_tokens == 20


def test_closing_a_stream_aborts_its_requests(llm: LLM) -> None:
    stream = llm.stream([[1, 2, 3, 4, 5], [6]], SamplingParams(max_tokens=100, n=2))
    next(stream)
    assert llm.engine.has_unfinished
    stream.close()
    assert not llm.engine.has_unfinished and llm.engine.usage().pages_held == 0


@pytest.mark.parametrize("guilty", [0, 1])
def test_an_error_in_a_step_ends_the_call_that_causes_it(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, guilty: int
) -> None:
    execute, prompts = llm.engine.runner.execute, ([4, 5], [6, 7])
    expected = [llm.generate(prompt, SHORT)[0].outputs[0].token_ids for prompt in prompts]

    def guarded(batch: ScheduledBatch, cache: CacheManager) -> torch.Tensor:
        if any(chunk.request.token_ids[0] == prompts[guilty][0] for chunk in batch.chunks):
            raise MemoryError("out of luck")
        return execute(batch, cache)

    first, second = (llm.stream([prompt], SHORT) for prompt in prompts)
    next(first), next(second)
    monkeypatch.setattr(llm.engine.runner, "execute", guarded)
    if guilty == 0:
        with pytest.raises(MemoryError, match="out of luck"):
            list(first)
        assert list(second)[-1][1].outputs[0].token_ids == expected[1]
    else:
        assert list(first)[-1][1].outputs[0].token_ids == expected[0]
        answer = list(second)[-1][1].outputs[0]
        assert answer.finish_reason == "error" and "MemoryError: out of luck" in str(answer.error)
    assert not llm.engine.has_unfinished and llm.engine.usage().pages_held == 0


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"), "2.00 GiB"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 96 bytes. Error"), "96 bytes"),
        (MemoryError("Unable to allocate 3.5 TiB for an array"), "3.5 TiB"),
        (MemoryError(), "an unknown number of bytes"),
    ],
)
def test_a_model_that_no_memory_holds_is_refused(
    tiny_model: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, error: Exception, asked: str
) -> None:
    monkeypatch.setattr(ModelRunner, "try_step", Mock(side_effect=error))
    message = r"^max_num_batched_tokens=64 and max_num_seqs=8 and num_pages=9: expected values with which model='.*'"
    with pytest.raises(ValueError, match=rf"{message} fits into the memory of cpu, where the last {asked} that it"):
        LLM(tiny_model("llama").path, max_num_batched_tokens=64, max_num_seqs=8, num_pages=9, device="cpu")


@pytest.mark.parametrize("take", ["abort", "step"])
def test_a_stream_whose_request_somebody_takes_away_says_so(llm: LLM, take: str) -> None:
    stream = llm.stream([1, 2, 3], SamplingParams(max_tokens=3, ignore_eos=True))
    _, output = next(stream)
    if take == "abort":
        llm.engine.abort_request(output.request_id)
    while llm.engine.has_unfinished:
        llm.engine.step()
    with pytest.raises(RuntimeError, match=f"request '{output.request_id}' has left the engine.*close its iterator"):
        next(stream)
    assert len(llm.generate([1, 2, 3], SHORT)[0].outputs[0].token_ids) == 4


def test_parameters_that_prompts_share_are_checked_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    checked, check = [], TokenRules.check

    def note(rules: TokenRules, params: SamplingParams) -> Any:
        checked.append(params)
        return check(rules, params)

    monkeypatch.setattr(TokenRules, "check", note)
    params = SamplingParams(temperature=0, max_tokens=2, allowed_token_ids=[7], n=2)
    other = replace(params, allowed_token_ids=[8])
    outputs = llm.generate([[1], [2], [3], [4]], [params, params, other, params])
    assert [output.outputs[1].token_ids for output in outputs] == [[7, 7], [7, 7], [8, 8], [7, 7]]
    assert checked == [params, other, params]


def test_an_error_in_a_step_aborts_the_call(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(llm.model, "forward", lambda **_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.generate([[1, 2, 3], [4]], SHORT)
    assert not llm.engine.has_unfinished and llm.engine.usage().pages_held == 0
    assert len(llm.generate([1, 2, 3], SHORT)[0].outputs[0].token_ids) == 4


def test_sampled_answers_are_repeatable_and_in_range(llm: LLM) -> None:
    params = SamplingParams(n=4, temperature=1.5, top_p=0.9, top_k=40, seed=3, max_tokens=8, logprobs=2)
    (first,) = llm.generate([1, 2, 3, 4, 5], params)
    again = llm.generate([[7] * 9, [1, 2, 3, 4, 5], [6]], [SamplingParams(n=2), params, SHORT])[1]
    assert [answer.token_ids for answer in again.outputs] == [answer.token_ids for answer in first.outputs]
    assert len({tuple(answer.token_ids) for answer in first.outputs}) == 4


def test_logprobs_are_those_of_transformers(llm: LLM, tiny_model: Callable[[str], Any]) -> None:
    (output,) = llm.generate([1, 2, 3], SamplingParams(temperature=0.7, seed=1, max_tokens=5, logprobs=3))
    answer = output.outputs[0]
    with torch.inference_mode():
        logits = tiny_model("llama").reference(torch.tensor([[1, 2, 3, *answer.token_ids]])).logits[0]
    expected = logits.double().log_softmax(dim=-1)[2:-1]
    assert answer.logprobs is not None and answer.cumulative_logprob is not None
    for row, entry in zip(expected, answer.logprobs, strict=True):
        assert {token: item.logprob for token, item in entry.items()} == pytest.approx(
            {token: row[token].item() for token in entry}, abs=1e-3
        )
        assert set(row.topk(3).indices.tolist()) <= entry.keys()


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"gpu_memory": 1}, "gpu_memory=1: there is no such option; expected one of page_size, num_pages"),
    ({"policy": "fastest"}, "policy='fastest'"),
    ({"device": "abacus"}, "device='abacus'"),
    ({"device": "meta"}, "device='meta': expected auto, cpu, cuda, or one GPU such as cuda:1"),
    ({"execution": "fused"}, "execution='fused': expected one of auto, serial"),
    ({"execution": "streams"}, "device='cpu' cannot run this model's attention: device cpu: execution='streams'"),
    ({"gpu_memory_utilization": 0.5}, "gpu_memory_utilization=0.5: expected None on a CPU"),
    ({"max_model_len": 513}, "max_model_len=513: expected at most the model's limit, 512 tokens"),
    (
        {"max_model_len": 100, "num_pages": 3},
        "holds 48 tokens: expected at least 100 for one sequence; raise num_pages (a",
    ),
    ({"num_pages": 10**12}, "num_pages=1000000000000: expected at most the memory of cpu"),
    ({"kv_cache_bytes": 10}, "holds 0 tokens: expected at least 2 for one sequence; raise kv_cache_bytes (a"),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS)
def test_a_bad_option_is_refused_before_weights_are_loaded(
    tiny_model: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    path = tiny_model("llama").path
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("weights were loaded"))
    with pytest.raises((TypeError, ValueError)) as caught:
        LLM(path, **options)
    assert message in str(caught.value)


def test_a_gpu_that_is_not_there_is_named(tiny_model: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_model("llama").path
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"device=.cuda. cannot run .* torch finds no CUDA device"):
        LLM(path, device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"device=.cuda:2. cannot run .* torch finds 2 CUDA devices"):
        LLM(path, device="cuda:2")


def test_the_cache_of_a_gpu_is_sized_by_its_free_memory(
    tiny_model: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    page_bytes = 2 * 2 * 2 * 16 * 16 * 4  # layers, keys and values, heads, head_dim, tokens, bytes
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100 * page_bytes, 200 * page_bytes))
    info = replace(inspect_model(tiny_model("llama").path), device=torch.device("cuda"))
    assert size_cache(info, EngineConfig()) == (90, 512)
    assert size_cache(info, EngineConfig(gpu_memory_utilization=0.2)) == (20, 320)
    assert size_cache(info, EngineConfig(max_num_seqs=2))[0] == 64, "more pages than sequences can fill are no use"
    assert (
        size_cache(info, EngineConfig(num_pages=100))[0]
        == size_cache(info, EngineConfig(kv_cache_bytes=100 * page_bytes))[0]
        == 100
    )
    for options, message in (({"num_pages": 101}, "num_pages=101"), ({"kv_cache_bytes": 1 << 40}, "kv_cache_bytes=")):
        with pytest.raises(ValueError, match=f"{message}.*: expected at most the free memory of cuda"):
            size_cache(info, EngineConfig(**options))
    with pytest.raises(ValueError, match=r"holds 0 tokens: .* raise gpu_memory_utilization \(a page"):
        size_cache(info, EngineConfig(gpu_memory_utilization=0.001))


def test_a_cache_takes_half_of_a_cpus_memory_at_most(
    tiny_model: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    info = inspect_model(tiny_model("llama").path)
    page_bytes = 2 * 2 * 2 * 16 * 16 * 4  # layers, keys and values, heads, head_dim, tokens, bytes
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 20, "SC_PAGE_SIZE": page_bytes}.__getitem__)
    assert (
        size_cache(info, EngineConfig())[0] == size_cache(info, EngineConfig(kv_cache_bytes=10 * page_bytes))[0] == 10
    )
    expected = f"kv_cache_bytes={10 * page_bytes + 1}: expected at most half of the memory, {10 * page_bytes} bytes"
    with pytest.raises(ValueError, match=expected):
        size_cache(info, EngineConfig(kv_cache_bytes=10 * page_bytes + 1))


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_model_larger_than_the_memory_is_refused_before_it_is_made(
    tiny_model: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, load_format: str
) -> None:
    saved = tiny_model("llama")
    num_weights = sum(parameter.numel() for parameter in saved.reference.parameters())
    sizes = {"SC_PHYS_PAGES": 4 * num_weights - 1, "SC_PAGE_SIZE": 1}
    monkeypatch.setattr(os, "sysconf", sizes.__getitem__)
    monkeypatch.setattr(llm_module, "load_model", lambda *_: pytest.fail("the weights are made"))
    expected = f"its {num_weights:,} weights take {4 * num_weights} bytes as float32, and the memory of cpu is"
    with pytest.raises(ValueError, match=expected):
        LLM(saved.path, num_pages=2, load_format=load_format)
    sizes["SC_PHYS_PAGES"] += 1
    with pytest.raises(pytest.fail.Exception, match="the weights are made"):
        LLM(saved.path, num_pages=2, load_format=load_format)


def test_dummy_weights_need_a_configuration_alone(tmp_path: Path, tiny_model: Callable[[str], Any]) -> None:
    shutil.copy(tiny_model("llama").path / "config.json", tmp_path)
    with pytest.raises(
        ValueError, match=r"there is no such file, and no model\.safetensors\.index\.json that names its parts; exp"
    ):
        LLM(tmp_path)
    state = torch.get_rng_state()
    first, second = (LLM(tmp_path, load_format="dummy", num_pages=20) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state), "the caller's random numbers go on as they were"
    answers = [llm.generate([1, 2, 3], SHORT)[0].outputs[0].token_ids for llm in (first, second)]
    assert answers[0] == answers[1] and len(answers[0]) == 4
    weights = first.model.model.embed_tokens.weight
    assert 0.01 < weights.std() < 0.1 and bool(weights.isfinite().all())
    (tmp_path / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config\.json"):
        LLM(tmp_path, load_format="dummy")


def test_sizes_follow_the_options(tiny_model: Callable[[str], Any]) -> None:
    path = tiny_model("llama").path
    assert LLM(path, num_pages=10).engine.limits.max_model_len == 160
    assert LLM(path, max_model_len=33).engine.limits.max_model_len == 33
    page_bytes = 2 * 2 * 2 * 16 * 16 * 4  # layers, keys and values, heads, head_dim, tokens, bytes
    assert LLM(path, kv_cache_bytes=5 * page_bytes + 1).engine.limits.max_model_len == 5 * 16


@pytest.mark.parametrize("dtype", ["bfloat16", torch.float16])
def test_other_dtypes_are_those_of_the_weights(tiny_model: Callable[[str], Any], dtype: object) -> None:
    llm = LLM(tiny_model("llama").path, dtype=dtype, num_pages=20)
    assert llm.model.dtype == getattr(torch, str(dtype).removeprefix("torch."))
    assert len(llm.generate([1, 2, 3], SHORT)[0].outputs[0].token_ids) == 4


def test_bad_models_are_named(tmp_path: Path, tiny_model: Callable[[str], Any]) -> None:
    with pytest.raises(ValueError, match="no such file or folder"):
        LLM(tmp_path / "nothing")
    damaged = tmp_path / "damaged"
    shutil.copytree(tiny_model("llama").path, damaged)
    config = (damaged / "config.json").read_text()
    (damaged / "config.json").write_text(config.replace('"llama"', '"no_such_type"'))
    with pytest.raises(ValueError, match="transformers cannot read its configuration"):
        LLM(damaged)
    (damaged / "config.json").write_text(config.replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    with pytest.raises(ValueError, match=r"its files lack model\.layers\.2"):
        LLM(damaged)
    (damaged / "config.json").write_text(config.replace('"intermediate_size": 128', '"intermediate_size": 64'))
    with pytest.raises(
        ValueError, match=r"layers\.0\.mlp\.down_proj\.weight of shape \[64, 128\] instead of \[64, 64\]"
    ):
        LLM(damaged)
    (damaged / "config.json").write_text(config.replace('"llama"', '"mamba2"'))
    with pytest.raises(ValueError, match="Inconsistent configuration"):
        LLM(damaged)
    (damaged / "config.json").write_text(config.replace('"llama"', '"rwkv"'))
    with pytest.raises(ValueError, match=r"\(rwkv\) is not supported: its attention does not go through"):
        LLM(damaged)


def test_requests_of_the_engine_leave_nothing_behind(tiny_model: Callable[[str], Any]) -> None:
    """A step of a call computes them too, and a later request may have their id."""
    llm = LLM(tiny_model("llama").path, page_size=4, num_pages=64)
    (expected,) = llm.generate([5, 6, 7], SHORT)
    for request_id in ("7", "8", "9"):  # those that the engine chooses for requests of the last call
        llm.engine.add_request([1, 2, 3], SamplingParams(temperature=0, max_tokens=2), request_id=request_id)
    llm.generate([[4, 5]] * 3, SHORT)
    assert not llm.engine.has_unfinished
    outputs = llm.generate([[5, 6, 7]] * 3, SHORT)
    assert [output.request_id for output in outputs] == ["7", "8", "9"]
    assert [output.outputs[0].token_ids for output in outputs] == [expected.outputs[0].token_ids] * 3
    assert not llm._shared._unfetched
