"""benchmarks/vllm_tpot.py without an engine: the pace of made-up token times, the table, what the options choose."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from engine_models import SHAPES, write_config
from vllm_tpot import (
    LONG,
    OPTIONS,
    SHORT,
    WORKLOADS,
    Generated,
    Run,
    Workload,
    measure,
    name_of,
    options_of,
    pace,
    read_arguments,
    table,
    wanted_runs,
    workloads_of,
)

from .scripts import refusal


def steady(start: float, step: float, tokens: int = LONG, at_once: int = 1) -> list[tuple[float, int]]:
    """A request whose first token comes at `start`, and the others `step` seconds apart, `at_once` together."""
    counts = [*range(1, tokens, at_once), tokens]
    return [(start + (count - 1) * step, count) for count in counts]


@pytest.mark.parametrize("at_once", [1, 8])
def test_the_pace_is_that_of_steps_however_many_tokens_come_together(at_once: int) -> None:
    requests = [steady(100.0, 0.0125, at_once=at_once), steady(100.3, 0.0125, at_once=at_once)]
    assert pace(requests) == pytest.approx(12.5)


def test_prompts_at_the_beginning_and_empty_places_at_the_end_are_not_in_the_pace() -> None:
    """One request starts late: until then steps are slow, and fast from when the others have ended."""
    early = [(0.5 * count, count) for count in range(1, 21)]  # half a second a step while prompts are computed
    early += [(10 + 0.01 * (count - 20), count) for count in range(21, LONG + 1)]
    late = [(10 + 0.01 * (count - 1), count) for count in range(1, LONG - 18)]
    late += [(late[-1][0] + 0.001 * more, len(late) + more) for more in range(1, 20)]
    assert pace([early, late]) == pytest.approx(10.0)
    assert pace([late, early]) == pytest.approx(10.0)


def test_the_slow_first_steps_of_the_last_request_are_not_in_the_pace() -> None:
    slow = [(0.1 * count, count) for count in range(1, SHORT + 1)]
    slow += [(slow[-1][0] + 0.02 * more, SHORT + more) for more in range(1, LONG - SHORT + 1)]
    assert pace([slow]) == pytest.approx(20.0)


def test_requests_that_do_not_decode_together_have_no_pace() -> None:
    with pytest.raises(ValueError, match="decoded at once for 0 tokens: expected 32 or more"):
        pace([steady(0.0, 0.01), steady(10.0, 0.01)])
    with pytest.raises(ValueError, match="decoded at once for 2"):
        pace([steady(0.0, 0.01), steady(1.0, 0.01)])


def test_each_batch_is_generated_once_for_the_cache_and_timed_in_each_repeat() -> None:
    asked = []

    def generate(prompts: list[list[int]], tokens: int) -> Generated:
        asked.append(tokens)
        step = 0.01 * len(asked)
        return Generated([list(range(tokens))] * len(prompts), [steady(0.0, step, tokens)] * len(prompts))

    found = measure(generate, [[1], [2]], 3)
    assert asked == [SHORT, LONG, LONG, LONG]
    assert found == {"tpot_ms": 30.0, "tpot_ms_each": [20.0, 30.0, 40.0], "tokens": [list(range(16))] * 2}


def test_a_table_is_made_of_the_back_ends_that_there_are() -> None:
    workload = Workload(2, ((1, 32),))
    figures = {"tpot_ms": 12.0, "tpot_ms_each": [12.0], "tokens": [[1] * 16, [2] * 16]}
    first = {"FLASH_ATTN": {str(workload): figures}}
    assert table(first, [workload]) == [
        {"workload": "2 x (32)", "FLASH_ATTN": {"tpot_ms": 12.0, "tpot_ms_each": [12.0]}}
    ]
    parted = {**figures, "tpot_ms": 8.0, "tokens": [[1] * 16, [2] * 12 + [3] * 4]}
    (row,) = table({**first, "CUSTOM": {str(workload): parted}}, [workload])
    assert row["CUSTOM"]["speedup"] == 1.5
    assert row["CUSTOM"]["equal_tokens"] == round(28 / 32, 4)
    assert row["CUSTOM"]["parted_in_steps"] == [12]


def test_with_batch_invariance_ours_runs_once_more_without_it() -> None:
    assert wanted_runs(["FLASH_ATTN", "CUSTOM"], invariant=False) == [
        Run("FLASH_ATTN", "FLASH_ATTN"),
        Run("CUSTOM", "CUSTOM"),
    ]
    assert wanted_runs(["FLASH_ATTN", "CUSTOM"], invariant=True) == [
        Run("FLASH_ATTN", "FLASH_ATTN", invariant=True),
        Run("CUSTOM", "CUSTOM", invariant=True),
        Run("CUSTOM (not invariant)", "CUSTOM"),
    ]
    assert wanted_runs(["FLASH_ATTN"], invariant=True) == [Run("FLASH_ATTN", "FLASH_ATTN", invariant=True)]


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(write_config("qwen2.5-7b", tmp_path))


def test_a_folder_has_all_batches_and_a_shape_six(model: str) -> None:
    folder, shape = (read_arguments(given) for given in (["--model", model], ["--shape", "gpt-oss"]))
    assert workloads_of(folder) == WORKLOADS
    assert len(workloads_of(shape)) == 6
    assert set(workloads_of(shape)) < set(WORKLOADS)
    assert workloads_of(read_arguments(["--shape", "gpt-oss", "--workloads", "all"])) == WORKLOADS
    assert name_of(folder) == ""
    assert options_of(folder) == {**OPTIONS, "tensor_parallel_size": 1, "kv_cache_dtype": "auto"}
    assert "hf_overrides" not in options_of(shape)


def test_the_name_of_a_result_tells_what_was_asked_for(model: str) -> None:
    given = ["--shape", "qwen3-next", "--kv-cache-dtype", "fp8", "--invariant", "--tensor-parallel", "2"]
    arguments = read_arguments(given)
    assert name_of(arguments) == "-qwen3-next-fp8-invariant-tp2"
    options = options_of(arguments)
    assert options["kv_cache_dtype"] == "fp8"
    assert options["tensor_parallel_size"] == 2
    assert options["gdn_prefill_backend"] == "triton"
    shared = read_arguments(["--model", model, "--dcp", "2"])
    assert name_of(shared) == "-dcp2"
    assert [str(workload) for workload in workloads_of(shared)] == ["64 x (65536 + 128)"]
    parallel = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "dcp_comm_backend": "a2a"}
    assert options_of(shared).items() >= parallel.items()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "one of the arguments --model --shape is required"),
        (["--shape", "gpt-oss", "--dcp", "2"], "leave out --shape and --workloads"),
        (["--shape", "gpt-oss", "--repeats", "0"], "argument --repeats: expected at least 1, got 0"),
        (["--model", "nowhere"], "argument --model: nowhere has no config.json"),
    ],
)
def test_wrong_options_are_refused(given: list[str], message: str) -> None:
    assert message in refusal("vllm_tpot.py", given)


@pytest.mark.parametrize("name", list(SHAPES))
def test_transformers_reads_a_shape(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    folder = write_config(name, tmp_path)
    config: Any = AutoConfig.from_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    assert config.model_type == written["model_type"]
    assert config.num_attention_heads % config.num_key_value_heads == 0
    kinds = config.layer_types
    assert len(kinds) == config.num_hidden_layers
    expected = {
        "gpt-oss": {"sliding_attention": 12, "full_attention": 12},
        "gemma-3": {"sliding_attention": 40, "full_attention": 8},
        "qwen2.5-7b": {"full_attention": 28},
        "qwen3-next": {"linear_attention": 36, "full_attention": 12},
    }
    assert {kind: kinds.count(kind) for kind in kinds} == expected[name]
