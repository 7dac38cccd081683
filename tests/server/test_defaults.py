"""What is not given, null, zero and -1 mean the same in `LLM.generate`, `LLM.chat`, completions and chats."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trunkattn import LLM, SamplingParams
from trunkattn.engine.engine import Engine

MESSAGES = [{"role": "user", "content": "hi"}]
PATHS = {"/v1/completions": {"prompt": "hi"}, "/v1/chat/completions": {"messages": MESSAGES}}
CONFIG = {"temperature": 0.3, "top_k": 7, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.1, "max_new_tokens": 9}
NULLS = [
    "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens",
    "min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "bad_words",
    "allowed_token_ids", "truncate_prompt_tokens", "skip_special_tokens", "structured_outputs", "n", "stream",
    "logprobs",
]  # fmt: skip


@pytest.fixture(scope="module")
def configured(
    start_server: Callable[..., Any], save_tiny_model: Callable[..., None], tmp_path_factory: pytest.TempPathFactory
) -> Any:
    """A server of a model with a generation_config.json."""
    path: Path = tmp_path_factory.mktemp("configured")
    save_tiny_model(path)
    (path / "generation_config.json").write_text(json.dumps({**CONFIG, "eos_token_id": 256}))
    return start_server(path=path)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[SamplingParams]:
    """The parameters that reach an engine."""
    found: list[SamplingParams] = []
    check = Engine.check_request

    def watched(engine: Engine, token_ids: Any, params: SamplingParams, *more: Any) -> Any:
        found.append(params)
        return check(engine, token_ids, params, *more)

    monkeypatch.setattr(Engine, "check_request", watched)
    return found


def ask(server: Any, path: str, **body: Any) -> Any:
    return server.post(path, {**PATHS[path], **body})


def test_the_models_own_defaults_hold_everywhere(configured: Any, seen: list[SamplingParams]) -> None:
    expected = SamplingParams(**{**{k: v for k, v in CONFIG.items() if k != "max_new_tokens"}, "max_tokens": 9})
    llm = LLM(configured.llm.info.files.path, num_pages=64)  # the thread of the server's loop has the other one
    llm.generate("hi")
    llm.chat(MESSAGES)
    for path in PATHS:
        assert ask(configured, path).status_code == 200
        assert ask(configured, path, **dict.fromkeys(NULLS)).status_code == 200
    assert len(seen) >= 6 and all(params == expected for params in seen)


@pytest.mark.parametrize("path", PATHS)
def test_what_is_given_is_taken_before_the_models(configured: Any, seen: list[SamplingParams], path: str) -> None:
    given: dict[str, Any] = {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1}
    assert ask(configured, path, **given, max_tokens=3).status_code == 200
    assert seen[-1] == SamplingParams(temperature=0, max_tokens=3)
    for same in ({"top_k": -1}, {"seed": -1}, {"truncate_prompt_tokens": -1}, {"stop": []}, {"logit_bias": {}}):
        assert ask(configured, path, **{**given, "max_tokens": 3, **same}).status_code == 200
        plain = replace(seen[-1], top_k=0, truncate_prompt_tokens=None, logit_bias=None)
        assert plain == SamplingParams(temperature=0, max_tokens=3), same


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_tokens", 0), ("max_tokens", -1), ("n", 0), ("top_k", -2), ("seed", 1 << 63), ("min_tokens", -1)],
)
def test_numbers_that_mean_nothing_are_refused_everywhere(configured: Any, name: str, value: int) -> None:
    with pytest.raises((ValueError, TypeError), match=f"{name}={value}"):
        SamplingParams(**{name: value})
    for path in PATHS:
        error = ask(configured, path, **{name: value}).json()["error"]
        assert error["param"] == name and str(value) in error["message"], path


@pytest.mark.parametrize("value", [0, -1])
def test_the_newer_name_of_a_chats_limit_is_checked_as_the_older(configured: Any, value: int) -> None:
    error = ask(configured, "/v1/chat/completions", max_completion_tokens=value).json()["error"]
    assert error["param"] == "max_completion_tokens" and f"max_completion_tokens={value}" in error["message"]


def test_the_newer_name_of_a_chats_limit_goes_first(configured: Any, seen: list[SamplingParams]) -> None:
    ask(configured, "/v1/chat/completions", max_completion_tokens=2, max_tokens=5)
    ask(configured, "/v1/chat/completions", max_completion_tokens=None, max_tokens=5)
    assert [params.max_tokens for params in seen] == [2, 5]


def test_the_servers_limit_caps_the_models_default(
    start_server: Callable[..., Any], save_tiny_model: Callable[..., None], tmp_path: Path
) -> None:
    save_tiny_model(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"max_new_tokens": 30, "eos_token_id": 256}))
    server = start_server(path=tmp_path, max_answer_tokens=4)
    for path in PATHS:
        answer = ask(server, path, ignore_eos=True)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4, path
