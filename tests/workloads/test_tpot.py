"""tpot.py without an engine: the pace of made-up token times, the table and what the options choose."""

import argparse
import json
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks.engines import sglang, tpot, vllm
from benchmarks.engines.adapters import ENGINES
from benchmarks.engines.interface import Generated, Offline, Span, Start
from benchmarks.engines.pace import LONG, SHORT, TRACED, measure, pace, table
from benchmarks.engines.tpot import name_of, plan_of, workloads_of
from benchmarks.lib import ports
from benchmarks.workloads.decode_batches import SIX, WORKLOADS, Workload
from benchmarks.workloads.model_shapes import SHAPES, write_config

from .scripts import refusal, refused


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

    found = measure(cast(Offline, SimpleNamespace(generate=generate)), [[1], [2]], 3)
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


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(write_config("qwen2.5-7b", tmp_path))


def read(engine: str, *given: str) -> argparse.Namespace:
    return tpot.read_arguments(["--engine", engine, *given])


def starts(engine: str, *given: str) -> list[Start]:
    arguments = read(engine, *given)
    return ENGINES[engine].tpot_starts(arguments, arguments.model)


def test_with_batch_invariance_ours_runs_once_more_without_it(model: str) -> None:
    def runs(*given: str) -> list[tuple[str, str, str]]:
        return [
            (start.name, start.options["attention_backend"], start.environment["VLLM_BATCH_INVARIANT"])
            for start in starts("vllm", "--model", model, *given)
        ]

    assert runs() == [("FLASH_ATTN", "FLASH_ATTN", "0"), ("CUSTOM", "CUSTOM", "0")]
    first, *more = runs("--invariant")
    assert first == ("FLASH_ATTN", "FLASH_ATTN", "1")
    assert more == [("CUSTOM", "CUSTOM", "1"), ("CUSTOM (not invariant)", "CUSTOM", "0")]
    assert runs("--invariant", "--backends", "FLASH_ATTN") == [first]


def test_a_shape_with_latent_attention_has_back_ends_of_its_own() -> None:
    arguments = tpot.read_arguments(["--engine", "vllm", "--shape", "deepseek-v3-16"])
    starts = vllm.tpot_starts(arguments, Path("folder"))
    assert [start.name for start in starts] == ["FLASH_ATTN_MLA", "FLASHMLA@64", "TRUNK_MLA@64"]
    chosen = [(start.options["attention_backend"], start.options.get("block_size")) for start in starts]
    assert chosen == [("FLASH_ATTN_MLA", None), ("FLASHMLA", 64), ("TRUNK_MLA", 64)]
    named = tpot.read_arguments(["--engine", "vllm", "--shape", "deepseek-v3-16", "--backends", "TRITON_MLA"])
    assert named.backends == ["TRITON_MLA"]
    assert tpot.read_arguments(["--engine", "vllm", "--shape", "gemma-3"]).backends == vllm.BACKENDS


def test_a_sampler_that_is_asked_for_outside_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_USE_FLASHINFER_SAMPLER", raising=False)
    assert vllm.environment()["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "1")
    assert vllm.environment()["VLLM_USE_FLASHINFER_SAMPLER"] == "1"


def test_a_folder_has_all_batches_and_a_shape_six(model: str) -> None:
    folder, shape = read("vllm", "--model", model), read("vllm", "--shape", "gpt-oss")
    assert workloads_of(folder) == WORKLOADS
    assert len(workloads_of(shape)) == 6
    assert set(workloads_of(shape)) < set(WORKLOADS)
    assert workloads_of(read("vllm", "--shape", "gpt-oss", "--workloads", "all")) == WORKLOADS
    assert name_of(folder) == ""
    assert vllm.tpot_options(folder) == {**vllm.COMMON, "tensor_parallel_size": 1, "kv_cache_dtype": "auto"}
    assert "hf_overrides" not in vllm.tpot_options(shape)


@pytest.mark.parametrize("engine", ENGINES)
def test_batches_by_name(engine: str, model: str, tmp_path: Path) -> None:
    names = [str(WORKLOADS[7]), str(WORKLOADS[0])]
    given = ["--model", model, "--workloads", *names, names[0], "--output", str(tmp_path / "some.json")]
    assert list(map(str, workloads_of(read(engine, *given)))) == names


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("busy", [False, True])
def test_busy_is_part_of_the_plan(engine: str, model: str, busy: bool) -> None:
    assert plan_of(read(engine, "--model", model, *["--busy"] * busy)).busy is busy


class Profiled:
    """A vLLM engine of two requests, the second one step behind, that notes when it is traced."""

    def __init__(self) -> None:
        self.steps, self.traced = 0, list[int]()

    def start_profile(self) -> None:
        self.traced.append(self.steps)

    stop_profile = start_profile


def test_steps_in_which_all_decode_are_traced_once() -> None:
    engine = Profiled()
    tracer = vllm.Tracer(engine, Span(SHORT, TRACED, LONG), None)
    for step in range(1, LONG + 2):
        engine.steps = step
        tracer(Generated([[0] * min(step, LONG), [0] * (step - 1)], []))
    assert engine.traced == [SHORT + 1, SHORT + 1 + TRACED]
    assert tracer.traced == TRACED


def test_the_name_of_a_result_tells_what_was_asked_for(model: str) -> None:
    given = ["--shape", "qwen3-next", "--kv-cache-dtype", "fp8", "--invariant", "--tensor-parallel", "2"]
    arguments = read("vllm", *given)
    assert name_of(arguments) == "-qwen3-next-fp8-invariant-tp2"
    options = vllm.tpot_options(arguments)
    assert options["kv_cache_dtype"] == "fp8"
    assert options["tensor_parallel_size"] == 2
    assert options["gdn_prefill_backend"] == "triton"
    cold = read("vllm", "--model", model, "--cold")
    assert name_of(cold) == "-cold" and list(map(str, workloads_of(cold))) == ["32 x (2048)"]
    assert workloads_of(read("vllm", "--model", model, "--cold", "--workloads", "six")) == SIX
    shared = read("vllm", "--model", model, "--dcp", "2")
    assert name_of(shared) == "-dcp2"
    assert [str(workload) for workload in workloads_of(shared)] == ["64 x (65536 + 128)"]
    parallel = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "dcp_comm_backend": "a2a"}
    assert vllm.tpot_options(shared).items() >= parallel.items()
    assert name_of(read("sglang", "--model", model, "--tensor-parallel", "2")) == "-tp2"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "one of the arguments --model --shape is required"),
        (["--shape", "gpt-oss", "--dcp", "2"], "leave out --shape and --workloads"),
        (["--shape", "gpt-oss", "--repeats", "0"], "argument --repeats: expected an integer from 1 to 1000, got '0'"),
        (["--model", "nowhere"], "argument --model: nowhere has no config.json"),
        (
            ["--shape", "gpt-oss", "--workloads", "7"],
            "argument --workloads: '7': expected six or all alone, or some of '64 x",
        ),
        (["--shape", "gpt-oss", "--workloads", "six", "all"], "argument --workloads: 'six': expected"),
        (["--shape", "gpt-oss", "--workloads", "8 x (8192)"], "take the place of a whole result: give --output"),
        (
            ["--shape", "gpt-oss", "--turns", "lock", "--kv-gib", "8", "--cold"],
            "argument --turns: an engine's time until",
        ),
        (["--shape", "gpt-oss", "--turns", "lock"], "argument --turns: several engines on one card need --kv-gib"),
        (["--shape", "gpt-oss", "--backends", "CUSTOM", "--invariant", "--turns", "lock"], "need --kv-gib"),
        (["--shape", "gpt-oss", "--device", "cpu"], "argument --device: vllm has no such option"),
    ],
)
def test_wrong_options_are_refused(given: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refused(tpot.read_arguments, ["--engine", "vllm", *given], capsys)


def test_an_engine_is_required() -> None:
    assert "the following arguments are required: --engine" in refusal("benchmarks.engines.tpot", ["--model", "m"])


@pytest.mark.parametrize("name", list(SHAPES))
def test_transformers_reads_a_shape(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    folder = write_config(name, tmp_path)
    config: Any = AutoConfig.from_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    assert config.model_type == written["model_type"]
    assert config.num_attention_heads % config.num_key_value_heads == 0
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    assert len(kinds) == config.num_hidden_layers
    expected = {
        "gpt-oss": {"sliding_attention": 12, "full_attention": 12},
        "gemma-3": {"sliding_attention": 40, "full_attention": 8},
        "qwen2.5-7b": {"full_attention": 28},
        "qwen3-next": {"linear_attention": 36, "full_attention": 12},
        "deepseek-v3-16": {"full_attention": 27},
    }
    assert {kind: kinds.count(kind) for kind in kinds} == expected[name]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--model", "nowhere"], "argument --model: nowhere has no config.json"),
        (["--quick", "--workloads", "six"], "not allowed with argument"),
        (["--repeats", "0"], "argument --repeats: expected an integer from 1 to 1000, got '0'"),
        (["--device", "cpu", "--busy"], "argument --busy: it tells of a card: leave out --device cpu"),
        (["--workloads", "8 x (8192)"], "take the place of a whole result: give --output"),
        (["--turns", "lock"], "argument --turns: several engines on one card need --kv-gib"),
        (["--dcp", "2"], "argument --dcp: sglang has no such option: leave it out, or take vllm"),
        (["--kv-cache-dtype", "fp8"], "argument --kv-cache-dtype: sglang has no such option"),
    ],
)
def test_wrong_options_are_refused_for_sglang(
    given: list[str], message: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(tpot.read_arguments, ["--engine", "sglang", "--model", model, *given], capsys)


LLAMA = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}


def test_the_size_of_a_cache_is_given_to_either_engine(model: str, tmp_path: Path) -> None:
    given = ["--model", model, "--turns", str(tmp_path / "lock"), "--kv-gib", "1.5"]
    sized = {"kv_cache_memory_bytes": 3 * 2**29, "gpu_memory_utilization": 0.1}
    assert all(start.options.items() >= sized.items() for start in starts("vllm", *given))
    for start in starts("sglang", *given, "--backends", "fa3", "trunk@16"):
        assert start.cache_tokens == 3 * 2**29 // (2 * 28 * 4 * 128 * 2) == start.options["max_total_tokens"]
        assert start.options["mem_fraction_static"] > 0.95 and start.options["sleep_on_idle"]


def test_without_it_engines_choose_as_before(model: str) -> None:
    given = ["--model", model, "--backends", "trunk@16", "--workloads", "six"]
    (start,) = starts("sglang", *given)
    assert workloads_of(read("sglang", *given)) == SIX and start.port is start.cache_tokens is None
    assert start.options["mem_fraction_static"] == sglang.ON_GPU["mem_fraction_static"]
    assert not start.options.keys() & {"max_total_tokens", "sleep_on_idle"}
    quick = read("sglang", "--model", model, "--quick", "--device", "cpu")
    assert len(workloads_of(quick)) == 2


@pytest.mark.parametrize(
    ("config", "cards", "tokens"),
    [
        (LLAMA, 1, 8192),  # 128 KiB a token
        (LLAMA, 2, 16384),
        (LLAMA | {"num_key_value_heads": None}, 1, 2048),
        (LLAMA | {"head_dim": 64}, 1, 16384),
        (LLAMA | {"head_dim": None, "num_key_value_heads": 1}, 4, 65536),
    ],
)
def test_tokens_of_a_cache(config: dict[str, Any], cards: int, tokens: int) -> None:
    assert sglang.cache_tokens(config, 1.0, cards) == tokens


def test_two_commands_get_ports_of_their_own() -> None:
    with ports.own_ports(2) as ours, ports.own_ports(2) as theirs:
        assert len({*ours, *theirs}) == 4
        gaps = [abs(a - b) for a in ours for b in theirs]
        assert min(gaps) >= ports.PORTS
        with socket.socket() as nccl:
            nccl.bind(("", ours[0]))
    with socket.socket() as busy:
        busy.bind(("", ours[0]))
        with ports.own_ports(1) as found:
            assert found != ours[:1]
    with pytest.raises(RuntimeError, match="of 1000 engines find free ports"), ports.own_ports(1000):
        pass
