"""Every script for engines, run in this process on packages that stand for vLLM and SGLang."""

import argparse
import fcntl
import json
import os
import subprocess
import sys
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engines import equality, serving, steady, tpot
from benchmarks.engines.adapters import ENGINES
from benchmarks.engines.interface import Start
from benchmarks.engines.pace import LONG, SHORT
from benchmarks.workloads.arrivals import Arrival
from benchmarks.workloads.decode_batches import Workload

from . import fake_engines
from .fake_packages import PACKAGES, Noted, sent

WORKLOADS = (Workload(2, ((1, 32),)), Workload(1, ((1, 16),)))
VARIABLES = ("PROMETHEUS_MULTIPROC_DIR", "VLLM_BATCH_INVARIANT", "VLLM_USE_FLASHINFER_SAMPLER")


@pytest.fixture(params=list(PACKAGES))
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    for name in (*VARIABLES, "VLLM_ENABLE_V1_MULTIPROCESSING", "SGLANG_TEST_RETRACT"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(tpot, "counters", dict)
    monkeypatch.setattr(serving, "counters", dict)
    monkeypatch.setattr(equality, "counters", lambda: {"trunkattn_steps_total decode": 3.0, "created": 0.0})
    name: str = request.param
    return name


@pytest.fixture
def noted(engine: str, monkeypatch: pytest.MonkeyPatch) -> Noted:
    return PACKAGES[engine](monkeypatch)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 1000}))
    return tmp_path


def ours(engine: str) -> str:
    return ENGINES[engine].BACKENDS[1]


def begin(engine: str, model: Path) -> Start:
    return Start(ours(engine), model, {}, {"VLLM_BATCH_INVARIANT": "1"})


@pytest.mark.parametrize("takes_turns", [True, False])
def test_an_engine_measures_in_its_turn(engine: str, noted: Noted, model: Path, takes_turns: bool) -> None:
    lock, seen = model / "lock", []
    kinds = (fcntl.LOCK_SH, fcntl.LOCK_EX)
    noted.look = lambda what: seen.append((what, *(fake_engines.free_for(lock, kind) for kind in kinds)))
    answers, sender = Pipe(duplex=False)
    tpot.serve(begin(engine, model), tpot.Plan(engine, WORKLOADS, 1, turns=lock if takes_turns else None), sender)
    found = list(sent(answers))
    assert [name for name, _ in found] == ["card", "2 x (32)", "1 x (16)", ""]
    assert found[0][1] == {"card": "cpu"} == {"card": found[-1][1]["card"]}
    assert found[1][1]["tokens"] == [list(range(1, 17))] * 2 and found[1][1]["tpot_ms"] >= 0
    assert ("ready_s" in found[-1][1]) != takes_turns
    assert os.environ["VLLM_BATCH_INVARIANT"] == "1"
    measured = [f"generate {tokens}" for tokens in (SHORT, LONG) * 2]
    if takes_turns:
        assert seen == [("start", True, False), *((what, False, False) for what in measured), ("end", False, False)]
    else:
        assert noted.said == ["start", *measured, "end"]


def test_steps_are_traced_after_all_were_timed(engine: str, noted: Noted, model: Path) -> None:
    answers, sender = Pipe(duplex=False)
    tpot.serve(begin(engine, model), tpot.Plan(engine, WORKLOADS, 1, busy=True), sender)
    found = [figures for name, figures in sent(answers) if name == "2 x (32)"]
    assert found[1].items() >= found[0].items() and "busy_ms" not in found[0]
    assert found[1]["busy_ms"] == 2.0 and found[1]["kernels_ms"]["our_kernel"] == 2.0
    assert noted.said.count("trace") == 2 and noted.said.index("trace") > noted.said.index(f"generate {LONG}")


def test_requests_arrive_and_the_cache_is_emptied(engine: str, noted: Noted, model: Path) -> None:
    answers, sender = Pipe(duplex=False)
    arrivals = [Arrival(0.0, (("a", 3),), 4), Arrival(0.01, (("a", 3),), 5)]
    serving.serve(serving.Task(engine, begin(engine, model), None, {"a": arrivals}), sender)
    (_, facts), (name, figures) = sent(answers)
    assert facts["card"] == "cpu" and "ready_s" in facts
    assert (name, figures["requests"], figures["output_tokens"]) == ("a", 2, 9)
    assert noted.said == ["start", "warm-up-0", "warm-up-1", "empty", "a-0", "a-1", "empty", "end"]


def test_memory_is_watched_from_the_trace_on(
    engine: str, noted: Noted, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steady, "used_mb", lambda device: 7.25)
    adapter, arguments = steady.read_arguments(["--engine", engine, "--model", str(model), "--steps", "60"])
    found = steady.watch(adapter, arguments)
    assert found["tokens"] == 32 * 60 and set(found["memory_mb"]) == {7.2}
    assert found["waits"] == {"cudaEventSynchronize": 1} and found["copies_to_host"] == {"Memcpy DtoH": 1}
    assert found["kernels"] == {"our_kernel": 1}
    assert noted.said == ["start", "generate 60", "trace", "end"]


def given(**options: Any) -> argparse.Namespace:
    return argparse.Namespace(device="cuda", quick=True, port=None, **options)


@pytest.mark.parametrize(
    ("engine", "name"),
    [
        *(("vllm", name) for name in ("bf16", "mixed", "invariant")),
        *(("sglang", name) for name in ("bf16", "mixed", "n-samples", "retraction")),
    ],
    indirect=["engine"],
)
def test_a_case_with_one_back_end(engine: str, noted: Noted, model: Path, name: str) -> None:
    adapter = ENGINES[engine]
    case, answer = adapter.CASES[name], model / "answer.json"
    equality.work(adapter, case, case.backends[1], given(), answer)
    found = json.loads(answer.read_text())
    (cold, cached), control = found["rounds"], found["control"]
    assert len(cold) == len(cached) == len(control) == 8 * case.samples
    assert cold[0]["tokens"] == list(range(1, equality.QUICK_TOKENS + 1))
    assert cached[0]["best"][0] == {"1": -0.5, "2": -2.0}
    assert cold[0]["best"] == ([] if case.mixes else cached[0]["best"])
    assert found["counters"] == {"trunkattn_steps_total decode": 3.0}
    assert found["facts"][0]["cached_tokens"] > 0
    assert len(found.get("alone", [])) == (8 if case.alone else 0)
    assert noted.said == ["start", *["answers 8"] * 3, *["empty", "answers 1"] * (8 * case.alone), "end"]
    assert all(os.environ[key] == value for key, value in case.environment.items())


def test_sglang_must_hold_as_many_tokens_as_asked_for(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    PACKAGES["sglang"](monkeypatch)
    start = Start("trunk", model, {"max_total_tokens": 4096}, {}, cache_tokens=8192)
    with pytest.raises(RuntimeError, match="cache holds 4096 tokens: expected 8192"):
        ENGINES["sglang"].offline(start)
    ENGINES["sglang"].offline(start._replace(cache_tokens=4097))
    ENGINES["sglang"].offline(start._replace(cache_tokens=None))


def test_a_card_of_its_own_and_a_folder_for_counters_are_set_before_an_engine_is_imported(
    engine: str, noted: Noted, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    seen = {}

    def look(what: str) -> None:
        if what == "start":
            seen.update({name: os.environ[name] for name in ("CUDA_VISIBLE_DEVICES", "PROMETHEUS_MULTIPROC_DIR")})

    noted.look = look
    _, sender = Pipe(duplex=False)
    serving.serve(serving.Task(engine, begin(engine, model), 3, {"a": [Arrival(0.0, (("a", 3),), 4)]}), sender)
    assert seen["CUDA_VISIBLE_DEVICES"] == "3" and seen["PROMETHEUS_MULTIPROC_DIR"]


def test_scripts_import_no_engine_before_they_start_one() -> None:
    """An engine's processes import the script again: what it imports is read before their variables are set. None
    needs torch, which would make each process seconds slower to start."""
    scripts = ", ".join(f"benchmarks.engines.{script}" for script in ("tpot", "serving", "equality", "steady"))
    early = "{'vllm', 'sglang', 'prometheus_client', 'transformers', 'torch'}"
    code = f"import sys, {scripts}; sys.exit(', '.join({early} & set(sys.modules)) or 0)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_counters_of_all_processes_are_added(tmp_path: Path) -> None:
    code = """
from benchmarks.engines.counters import counted, counters
with counted():
    from prometheus_client import Counter
    steps = Counter("trunkattn_steps", "", ["path", "layer"])
    for layer in ("a", "b"):
        steps.labels("decode", layer).inc(2)
    Counter("other", "").inc()
    print({name: count for name, count in counters().items() if "created" not in name})
"""
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2], capture_output=True, text=True
    )
    assert done.stdout.strip() == "{'trunkattn_steps_total decode': 4.0}"


@pytest.mark.parametrize("script", [equality, serving, steady, tpot])
def test_a_script_says_that_it_needs_a_gpu(
    script: Any, model: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["--engine", engine] + ([] if script is equality else ["--model", str(model)])
    given += ["--workloads", "conversation"] if script is serving else []
    monkeypatch.setattr(sys, "argv", [f"folder/{script.__name__.rpartition('.')[2]}.py", *given])
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    others = ", or --device cpu" if engine == "sglang" else ""
    with pytest.raises(SystemExit, match=f"^[a-z]+.py: torch finds no CUDA device: expected an NVIDIA GPU{others}$"):
        script.main()
