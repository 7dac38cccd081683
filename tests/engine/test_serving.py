"""Requests that arrive while others run, under each scheduler policy, and the benchmark that replays such arrivals."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.engines.embedded_serving import (
    SCALES,
    Server,
    Setting,
    arguments,
    prompts,
    run,
    scaled_lengths,
    settings_of,
)
from trunkattn.engine import LLM, RequestOutput, SamplingParams
from trunkattn.engine.config import SCHEDULER_POLICIES

NUM_TOKENS = 12


@pytest.mark.parametrize("budget", [9, 40])
@pytest.mark.parametrize("policy", SCHEDULER_POLICIES)
def test_answers_do_not_depend_on_who_arrives_when(
    tiny_model: Callable[[str], Any],
    assert_greedy: Callable[[Any, Sequence[RequestOutput], int], None],
    policy: str,
    budget: int,
) -> None:
    model = tiny_model("llama")
    llm = LLM(model.path, page_size=4, num_pages=60, max_num_seqs=6, max_num_batched_tokens=budget,
              scheduler_policy=policy)  # fmt: skip
    rng = np.random.default_rng(3)
    waiting = [rng.integers(1, 256, length).tolist() for length in (5, 33, 1, 18, 47, 26, 9, 30)]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    finished, with_prompt_and_decode = [], 0
    while waiting or llm.engine.has_unfinished:
        if waiting and rng.random() < 0.4:
            llm.engine.add_request(waiting.pop(), params)
        before = llm.stats
        outputs = llm.engine.step()
        with_prompt_and_decode += llm.stats.computed_tokens - before.computed_tokens > len(outputs) > 1
        finished += [output for output in outputs if output.finished]
    assert len(finished) == 8 and llm.engine.usage().pages_held == 0
    assert_greedy(model, finished, NUM_TOKENS)
    assert with_prompt_and_decode or policy == "prefill_first"


@pytest.mark.parametrize("setting", [Setting("prefill_first", 64), Setting("chunked_prefill", 40)])
def test_every_token_of_every_request_is_timed(tiny_model: Callable[[str], Any], setting: Setting) -> None:
    llm = LLM(tiny_model("llama").path, page_size=16, max_num_seqs=32)
    server = Server(llm, SCALES["cpu"])
    lengths = np.array([[40, 6], [90, 2], [7, 9], [64, 4]])
    arrivals = np.array([0, 0.001, 0.002, 0.05])
    requests = prompts(llm.engine, lengths, arrivals, seed=1)
    assert [[len(one.prompt_token_ids), one.output_tokens] for one in requests] == lengths.tolist()
    figures, gaps = run(server.use(setting), requests, {"200": 1e-9, "500": 1e9})
    assert len(gaps) == lengths[:, 1].sum() - 4 and min(gaps) > 0
    assert 0 < figures["ttft_s"]["p50"] <= figures["latency_s"]["p99"] <= figures["seconds"] + 0.01
    assert (figures["stalled_200_percent"], figures["stalled_500_percent"]) == (100, 0)
    assert not llm.engine.has_unfinished and llm.engine.usage().pages_held == 0


def test_lengths_come_from_the_trace_if_there_is_one(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 8000, "output_length": 400, "hash_ids": %s}\n' % [*range(16)])
    scale = SCALES["cpu"]
    assert scaled_lengths(trace, 3, 0, scale).tolist() == [[500, 50]] * 3
    assert scaled_lengths(trace, 3, 0, SCALES["cuda"]).tolist() == [[8000, 200]] * 3
    drawn = scaled_lengths(None, 500, 0, scale)
    assert tuple(drawn.min(axis=0)) == scale.shortest and tuple(drawn.max(axis=0)) == scale.longest


def test_each_budget_runs_with_each_execution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(sys, "argv", ["serving.py", "--device", "cuda", "--budgets", "64", "128"])
    names = [f"chunked_prefill {budget} {execution}" for budget in (64, 128) for execution in ("serial", "auto")]
    assert [setting.name for setting in settings_of(arguments())] == ["prefill_first", *names]
    monkeypatch.setattr(sys, "argv", ["serving.py", "--executions", "auto", "--budgets", "64"])
    assert [setting.name for setting in settings_of(arguments())] == ["prefill_first", "chunked_prefill 64"]
    monkeypatch.setattr(sys, "argv", ["serving.py", "--mix-tokens", "1000", "--mix-at-once", "9"])
    scale = arguments().scale
    assert (scale.mix_tokens, scale.mix_at_once, scale.mix_requests) == (1000, 9, SCALES["cpu"].mix_requests)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--requests", "0"], "argument --requests: expected an integer from 1 to 100000, got '0'"),
        (["--budgets", "96", "16"], "argument --budgets: expected at least 32, got 16"),
        (["--budgets", "32", "--device", "cuda"], "argument --budgets: expected at least 64, got 32"),
        (["--executions", "fused"], "argument --executions: invalid choice: 'fused'"),
        (["--mix-tokens", "1089"], "argument --mix-tokens: expected at most 1088, got 1089"),
        (["--mix-at-once", "33"], "argument --mix-at-once: expected at most 32, got 33"),
        (["--ratios", "x"], "argument --ratios: expected an integer from 1 to 100, got 'x'"),
    ],
)
def test_bad_arguments_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(sys, "argv", ["serving.py", *options])
    with pytest.raises(SystemExit) as ended:
        arguments()
    assert ended.value.code == 2 and expected in capsys.readouterr().err
