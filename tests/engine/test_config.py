"""Options and sampling parameters: every bad one is named with its value and what was expected."""

import math
import re
from typing import Any

import numpy as np
import pytest
import torch

from trunkattn.engine import EngineConfig, SamplingParams, StructuredOutputsParams
from trunkattn.validate import shown

BAD_PARAMS: list[tuple[dict[str, Any], type[Exception]]] = [
    ({"n": 0}, ValueError),
    ({"n": 1.5}, TypeError),
    ({"n": True}, TypeError),
    ({"n": 2**70}, ValueError),
    ({"temperature": math.nan}, ValueError),
    ({"temperature": math.inf}, ValueError),
    ({"temperature": -0.1}, ValueError),
    ({"temperature": "hot"}, TypeError),
    ({"top_p": 1.0001}, ValueError),
    ({"top_p": 0.0}, ValueError),
    ({"top_p": math.nan}, ValueError),
    ({"top_p": None}, TypeError),
    ({"top_k": -2}, ValueError),
    ({"top_k": 1.0}, TypeError),
    ({"seed": -(2**63) - 1}, ValueError),
    ({"seed": "x"}, TypeError),
    ({"stop": ""}, ValueError),
    ({"stop": ["a", ""]}, ValueError),
    ({"stop": ["a", 3]}, TypeError),
    ({"stop": 3}, TypeError),
    ({"stop_token_ids": [-1]}, ValueError),
    ({"stop_token_ids": "12"}, TypeError),
    ({"stop_token_ids": 12}, TypeError),
    ({"max_tokens": 0}, ValueError),
    ({"max_tokens": 2.5}, TypeError),
    ({"ignore_eos": 1}, TypeError),
    ({"logprobs": -1}, ValueError),
    ({"logprobs": True}, TypeError),
    ({"repetition_penalty": 0}, ValueError),
    ({"repetition_penalty": "x"}, TypeError),
    ({"repetition_penalty": math.inf}, ValueError),
    ({"presence_penalty": 2.1}, ValueError),
    ({"frequency_penalty": -2.1}, ValueError),
    ({"frequency_penalty": None}, TypeError),
    ({"min_p": 1.1}, ValueError),
    ({"min_p": -0.1}, ValueError),
    ({"min_tokens": -1}, ValueError),
    ({"min_tokens": 17}, ValueError),
    ({"logit_bias": [1]}, TypeError),
    ({"logit_bias": {"1": 2.0}}, TypeError),
    ({"logit_bias": {-1: 2.0}}, ValueError),
    ({"logit_bias": {1: math.nan}}, ValueError),
    ({"bad_words": "word"}, TypeError),
    ({"bad_words": [" "]}, ValueError),
    ({"bad_words": [1]}, TypeError),
    ({"allowed_token_ids": []}, ValueError),
    ({"allowed_token_ids": [1.5]}, TypeError),
    ({"logits_processors": [1]}, TypeError),
    ({"logits_processors": [lambda: 1]}, TypeError),
    ({"logits_processors": len}, TypeError),
    ({"logits_processors": [int]}, TypeError),
    ({"prompt_logprobs": -1}, ValueError),
    ({"truncate_prompt_tokens": 0}, ValueError),
    ({"truncate_prompt_tokens": -2}, ValueError),
    ({"truncate_prompt_tokens": 1.5}, TypeError),
    ({"skip_special_tokens": 1}, TypeError),
    ({"spaces_between_special_tokens": None}, TypeError),
    ({"include_stop_str_in_output": "no"}, TypeError),
    ({"detokenize": 0}, TypeError),
    ({"structured_outputs": {"regex": "a"}}, TypeError),
]
BAD_OPTIONS: list[tuple[dict[str, Any], type[Exception]]] = [
    ({"page_size": 0}, ValueError),
    ({"page_size": "16"}, TypeError),
    ({"num_pages": 0}, ValueError),
    ({"kv_cache_bytes": -5}, ValueError),
    ({"num_pages": 4, "kv_cache_bytes": 4}, ValueError),
    ({"max_num_seqs": 0}, ValueError),
    ({"max_num_seqs": 64.0}, TypeError),
    ({"max_num_batched_tokens": 0}, ValueError),
    ({"max_num_batched_tokens": 255}, ValueError),
    ({"max_num_batched_tokens": 7, "max_num_seqs": 8}, ValueError),
    ({"scheduler_policy": "decode_first"}, ValueError),
    ({"scheduler_policy": None}, ValueError),
    ({"max_step_seconds": 0}, ValueError),
    ({"max_step_seconds": float("nan")}, ValueError),
    ({"max_step_seconds": True}, TypeError),
    ({"max_step_seconds": 0.5, "scheduler_policy": "prefill_first"}, ValueError),
    ({"max_model_len": 1}, ValueError),
    ({"enable_prefix_caching": 1}, TypeError),
    ({"policy": 7}, TypeError),
    ({"num_pages": 4, "gpu_memory_utilization": 0.5}, ValueError),
    ({"gpu_memory_utilization": 0}, ValueError),
    ({"gpu_memory_utilization": 1.1}, ValueError),
    ({"gpu_memory_utilization": "all"}, TypeError),
    ({"enforce_eager": "yes"}, TypeError),
    ({"load_format": "gguf"}, ValueError),
    ({"execution": 3}, TypeError),
    ({"seed": -1}, ValueError),
    ({"seed": 1.5}, TypeError),
    ({"dtype": "int8"}, ValueError),
    ({"dtype": torch.int64}, ValueError),
]


@pytest.mark.parametrize(("bad", "error"), BAD_PARAMS, ids=lambda value: re.sub(r" at 0x\w+", "", str(value)))
def test_a_bad_sampling_parameter_is_named_with_its_value(bad: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        SamplingParams(**bad)
    (name,) = bad
    assert str(caught.value).startswith(name) and "expected" in str(caught.value)


@pytest.mark.parametrize(("bad", "error"), BAD_OPTIONS, ids=str)
def test_a_bad_option_is_named_with_its_value(bad: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        EngineConfig(**bad)
    assert all(f"{name}={value!r}" in str(caught.value) for name, value in bad.items())
    assert "expected" in str(caught.value)


def test_the_older_name_of_a_scheduler_policy_is_the_same_policy() -> None:
    assert EngineConfig(scheduler_policy="hybrid") == EngineConfig(scheduler_policy="chunked_prefill") == EngineConfig()
    assert EngineConfig(scheduler_policy="hybrid").scheduler_policy == "chunked_prefill"


def test_stop_strings_need_text() -> None:
    with pytest.raises(ValueError, match=r"stop=\('a',\): expected no stop strings with detokenize=False"):
        SamplingParams(stop="a", detokenize=False)


def test_parameters_that_change_logits_say_so_and_no_others() -> None:
    assert not SamplingParams(min_p=0.5, top_p=0.5, stop="a", prompt_logprobs=1).changes_logits
    changing: list[dict[str, Any]] = [
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"min_tokens": 1},
        {"logit_bias": {1: 1.0}},
        {"bad_words": ["a"]},
        {"allowed_token_ids": [0]},
        {"logits_processors": [lambda ids, logits: logits]},
        {"structured_outputs": StructuredOutputsParams(regex="a")},
    ]
    assert all(SamplingParams(**one).changes_logits for one in changing)


def test_stops_are_normalised() -> None:
    assert SamplingParams(stop="a").stop_strings == ("a",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams(stop_token_ids=iter([3, 4])).stop_ids == (3, 4)
    assert SamplingParams().stop_strings == SamplingParams().stop_ids == ()


def test_numpy_numbers_are_numbers() -> None:
    options: dict[str, Any] = {"n": np.int64(2), "temperature": np.float32(0.5), "top_k": np.int32(3)}
    params = SamplingParams(**options)
    assert (params.n, params.top_k) == (2, 3)


@pytest.mark.parametrize("name", ["seed", "min_tokens", "temperature", "top_k", "top_p"])
def test_a_number_of_thousands_of_digits_is_named_by_its_size(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}=\(an integer of 16610 bits\): expected"):
        SamplingParams(**{name: 10**5000})


@pytest.mark.parametrize("kind", [np.uint8, np.int8, np.int64, np.uint64])
def test_numpy_integers_become_pythons_own(kind: Any) -> None:
    """Those of NumPy overflow where Python's do not: -np.uint8(5) is 251."""
    names = ("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "truncate_prompt_tokens")
    params = SamplingParams(**{name: kind(5) for name in names})
    assert {name: (type(getattr(params, name)), getattr(params, name)) for name in names} == dict.fromkeys(
        names, (int, 5)
    )
    names = ("page_size", "num_pages", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "seed")
    config = EngineConfig(**{name: kind(100) for name in names})
    assert {type(getattr(config, name)) for name in names} == {int}


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (1e-6, True), (1e-4, False), (1, False)])
def test_a_vanishing_temperature_is_greedy(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).is_greedy is greedy


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
def test_dtype_by_name_or_by_torch(dtype: object) -> None:
    assert EngineConfig(dtype=dtype).dtype_name == "bfloat16"


@pytest.mark.parametrize(
    "value", [[1, "a", (2,), ()], {"a": [1.5, None], "b": {}}, "a'b", 7, [[[]]], (1, 2), True, b"x"]
)
def test_a_message_quotes_a_value_as_python_writes_it(value: object) -> None:
    assert shown(value) == repr(value)


@pytest.mark.parametrize("inner", [1, "x" * 1000, {"k" * 1000: 1}])
def test_a_message_quotes_the_beginning_of_a_large_value(inner: object) -> None:
    for value in ([inner] * 1000, {str(i): inner for i in range(1000)}, {"a": [[inner] * 1000]}):
        assert shown(value) == f"{repr(value)[:120]}…"


def test_a_message_writes_no_more_of_a_value_than_it_quotes() -> None:
    class Counted:
        written = 0

        def __repr__(self) -> str:
            Counted.written += 1
            return "counted"

    shown([[Counted()] * 100_000] * 10)
    assert Counted.written < 30
