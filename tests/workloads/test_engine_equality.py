"""equality.py without an engine: models, prompts, what differs, what has failed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.engines import sglang, vllm
from benchmarks.engines.adapters import ENGINES
from benchmarks.engines.equality import has_failed, plain_of, read_arguments, summarize
from benchmarks.engines.interface import Adapter
from benchmarks.engines.jobs import Job, run_jobs
from benchmarks.engines.rounding import compare, parted_at, within_rounding
from benchmarks.workloads.small_models import SHARED, fill, folder_name, long_prompts, prompts

from .scripts import refused

CASES, OURS, STEP = sglang.CASES, "trunk@16", 0.0625
SGLANG, VLLM = ENGINES["sglang"], ENGINES["vllm"]
COUNTED = {"trunkattn_steps_total full_graph": 9.0, "trunkattn_steps_total prefill": 3.0}


def answer(tokens: list[int], best: list[dict[int, float]]) -> dict[str, Any]:
    return {"tokens": tokens, "best": [{str(token): number for token, number in step.items()} for step in best]}


def process(tokens: list[int], shift: float = 0.0, counted: dict[str, float] | None = None) -> dict[str, Any]:
    """What a process says whose answer to the only request has these tokens, each with a log-probability."""
    answers = [answer(tokens, [{token: -0.5 + shift, 7: -2.0} for token in tokens])]
    facts = [{"cached_tokens": 0, "retractions": 0}] * 2
    return {"rounds": [answers] * 2, "control": answers, "facts": facts, "counters": counted or {}}


def test_prompts_share_and_the_control_has_another_beginning() -> None:
    asked, others = prompts(changed=False), prompts(changed=True)
    assert len(asked) == 24 and len({tuple(prompt) for prompt in asked}) == 24
    assert len({tuple(prompt[:SHARED]) for prompt in asked[:16]}) == 1
    for prompt, other in zip(asked, others, strict=True):
        half = len(prompt) // 2
        assert len(other) == len(prompt) and other[half:] == prompt[half:]
        assert sum(a == b for a, b in zip(other[:half], prompt[:half], strict=True)) < 5


@pytest.mark.parametrize("engine", ENGINES.values(), ids=list(ENGINES))
def test_a_folder_holds_one_model(engine: Adapter) -> None:
    shapes: dict[str, Any] = {}
    for case in engine.CASES.values():
        assert shapes.setdefault(folder_name(case.shape), case.shape) == case.shape
    for folder, plain in engine.PLAIN.items():
        assert folder_name(engine.CASES[plain].shape) == folder or folder == "cohere2-hybrid"
        assert dict(engine.CASES[plain].options) == {}, "what others are compared with has no options of its own"


class Config:
    tie_word_embeddings = True

    def __init__(self, model_type: str) -> None:
        self.model_type = model_type


def test_norms_scale_by_one_and_gemma_adds_it_itself() -> None:
    norm = torch.empty(64)
    for model, weight in (("llama", 1.0), ("gpt_oss", 1.0), ("gemma2", 0.0), ("gemma3_text", 0.0)):
        fill("model.layers.0.input_layernorm.weight", norm, Config(model))
        assert norm.eq(weight).all()
    fill("model.layers.0.self_attn.q_norm.weight", norm, Config("gemma3_text"))
    assert norm.allclose(torch.tensor(0.6))
    fill("model.layers.0.self_attn.sinks", norm, Config("gpt_oss"))
    assert norm.unique().numel() == 64, "each head has its own sink"


def test_long_prompts_arrive_in_chunks() -> None:
    asked, others = long_prompts(changed=False), long_prompts(changed=True)
    assert min(map(len, asked)) == 3000 and len(asked) == 24
    assert all(len(a) == len(b) and a[-9:] == b[-9:] and a[:9] != b[:9] for a, b in zip(asked, others, strict=True))


def test_where_answers_part() -> None:
    assert parted_at([1, 2, 3], [1, 2, 3]) == 3
    assert parted_at([4, 2, 3], [1, 2, 3]) == 0


def test_differences_before_answers_part_and_the_gap_where_they_do() -> None:
    theirs = [answer([5, 6, 7], [{5: -0.1, 9: -3.0}, {6: -0.2, 8: -0.3}, {7: -0.4, 1: -5.0}])]
    ours = [answer([5, 8, 2], [{5: -0.12, 9: -3.0}, {8: -0.2, 6: -0.21}, {2: -0.1, 7: -0.2}])]
    found = compare(ours, theirs)
    assert (found["equal_tokens"], found["of"], found["parted"]) == (1, 3, 1)
    assert found["gaps"] == [pytest.approx(0.1)]
    assert found["logprob_difference"]["max"] == pytest.approx(0.02)


def test_a_token_that_the_other_did_not_consider_counts_as_its_second() -> None:
    theirs = [answer([5], [{5: -0.1, 9: -3.0}])]
    assert compare([answer([4], [{4: -0.1, 5: -0.2}])], theirs)["gaps"] == [pytest.approx(2.9)]


def test_answers_without_log_probabilities_are_compared_by_their_tokens() -> None:
    found = compare([answer([1, 2], [])], [answer([1, 3], [{1: -0.1}, {3: -0.1}])])
    assert (found["equal_tokens"], found["parted"], found["gaps"]) == (1, 1, [])


@pytest.mark.parametrize(
    ("p99", "gaps", "expected"),
    [(0.06, [], True), (0.09, [], True), (0.091, [], False), (0.05, [0.09], True), (0.05, [0.2], False)],
)
def test_rounding_is_measured_by_the_first_back_end_itself(p99: float, gaps: list[float], expected: bool) -> None:
    spread = {"mean": 0.0, "p99": p99, "max": p99}
    own = {"gaps": [], "logprob_difference": {"mean": 0.0, "p99": 0.03, "max": 0.5}}
    assert within_rounding({"gaps": gaps, "logprob_difference": spread}, own, step=0.0625) is expected


def test_one_wrong_answer_of_many_is_no_rounding() -> None:
    """It parts after a token or two, which are less than 1 % of all that are compared."""
    right = [answer([5, 6], [{5: -0.1, 9: -3.0}, {6: -0.2, 8: -3.0}]) for _ in range(200)]
    near = [answer([5, 6], [{5: -0.11, 9: -3.0}, {6: -0.21, 8: -3.0}]) for _ in range(200)]
    own = compare(near, right)
    assert within_rounding(own, own, step=0.0625)
    wrong = answer([5, 8], [{5: -2.9, 9: -3.0}, {8: -0.2, 6: -3.0}])
    found = compare([*near[1:], wrong], right)
    assert found["logprob_difference"]["p99"] < 0.02 and found["gaps"] == [pytest.approx(2.8)]
    assert not within_rounding(found, own, step=0.0625)


def test_jobs_answer_fail_or_take_too_long(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import json, os, sys, time\n"
        "_, _, case, backend, path, *rest = sys.argv\n"
        "if case == 'bad':\n"
        "    raise ValueError(backend + ' is wrong')\n"
        "if case == 'killed':\n"
        "    print('loads', flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
        "if case == 'slow': time.sleep(600)\n"
        "open(path, 'w').write(json.dumps([case, backend, rest, os.environ['GIVEN']]))\n"
    )
    *jobs, slow = [Job(case, "ours", ["--extra"], {"GIVEN": "yes"}) for case in ("good", "bad", "killed", "slow")]
    found = run_jobs([str(script)], jobs, tmp_path, at_once=4, limit=300.0)
    assert found["good"]["ours"] == ["good", "ours", ["--extra"], "yes"]
    assert found["bad"]["ours"]["failed"][-1] == "ValueError: ours is wrong"
    assert found["killed"]["ours"] == {"failed": ["ended with status -9 after: loads"]}
    found = run_jobs([str(script)], [slow], tmp_path, at_once=1, limit=1.0)
    assert found["slow"]["ours"] == {"failed": ["no answer after 1 s"]}


def test_a_case_is_a_command_of_this_script(tmp_path: Path) -> None:
    """The process fails for want of an engine's package or of a model, and not because there is no such command."""
    given = ["--engine", "vllm", "--device", "cuda"]
    found = run_jobs(["-m", "benchmarks.engines.equality"], [Job("bf16", "CUSTOM", given, {})], tmp_path, at_once=1)
    (reason,) = found["bf16"]["CUSTOM"]["failed"][-1:]
    assert "vllm" in reason or "llama" in reason


def test_back_ends_of_a_case() -> None:
    assert CASES["bf16"].backends_on("cuda") == ("fa3@16", "trunk@16", "fa3+trunk@16")
    assert CASES["page-1"].backends_on("cpu") == ("torch_native@1", "trunk@1", "torch_native+trunk@1")
    assert CASES["fp8"].backends_on("cuda") == ("triton@16", "trunk@16")
    assert vllm.CASES["fp8"].backends_on("cuda") == ("FLASH_ATTN", "CUSTOM")


def test_options_of_an_engine() -> None:
    start = sglang.equality_start(CASES["chunked"], "fa3+trunk@16", Path("model"), "cuda")
    options = start.options
    assert options["load_format"] == "auto" and options["chunked_prefill_size"] == 512
    assert (options["prefill_attention_backend"], options["decode_attention_backend"]) == ("fa3", "trunk")
    assert start.cache_tokens is None, "its pools may hold less than the most that is asked for"
    assert sglang.equality_start(CASES["tensor-parallel"], "fa3", Path("model"), "cuda").options["tp_size"] == 2
    own = vllm.equality_start(vllm.CASES["mixed"], "CUSTOM", Path("model"), "cuda")
    assert own.options.items() >= {"max_num_batched_tokens": 2048, "attention_backend": "CUSTOM"}.items()
    assert own.environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    invariant = vllm.equality_start(vllm.CASES["invariant"], "CUSTOM", Path("model"), "cuda")
    assert (own.environment["VLLM_BATCH_INVARIANT"], invariant.environment["VLLM_BATCH_INVARIANT"]) == ("0", "1")


@pytest.mark.parametrize(
    ("case", "backend", "counted", "expected"),
    [
        ("bf16", "fa3@16", {}, []),
        ("bf16", "trunk@16", COUNTED, []),
        ("bf16", "trunk@16", {"trunkattn_steps_total prefill": 3.0}, ["no step of decodes"]),
        ("bf16", "trunk@16", {"trunkattn_steps_total decode": 3.0}, ["no step of prompts"]),
        ("bf16", "fa3+trunk@16", {"trunkattn_steps_total decode": 3.0}, []),
        ("bf16", "fa3+trunk@16", {}, ["no step of decodes"]),
        ("mixed", "trunk@16", COUNTED, ["0 mixed steps"]),
        ("mixed", "trunk@16", COUNTED | {"trunkattn_steps_total mixed": 20.0}, []),
        ("retraction", "fa3@16", {}, ["retracted no request"]),
    ],
)
def test_what_has_not_happened(case: str, backend: str, counted: dict[str, float], expected: list[str]) -> None:
    found = sglang.missing(CASES[case], backend, process([1, 2], counted=counted))
    assert len(found) == len(expected)
    assert all(words in line for words, line in zip(expected, found, strict=True))


def test_a_row_of_sglang_says_what_is_equal_and_whether_it_counts() -> None:
    found = {"fa3@16": process([1, 2]), OURS: process([1, 2], 0.01, COUNTED)}
    row = summarize(SGLANG, "bf16", found, {}, STEP)
    assert row["first"] == "fa3@16" and row["facts"] == found["fa3@16"]["facts"]
    assert row[OURS]["cold"]["equal_tokens"] == row[OURS]["cold"]["of"] == 2
    assert row[OURS]["within_rounding"] and not has_failed(SGLANG, row)
    assert "plain" not in row[OURS]
    found[OURS] = process([1, 2], 0.2, COUNTED)
    row = summarize(SGLANG, "page-1", found, {"fa3@16": process([1, 2])}, STEP)
    assert not row[OURS]["within_rounding"] and has_failed(SGLANG, row)
    assert row[OURS]["plain"]["logprob_difference"]["max"] == pytest.approx(0.2)
    json.dumps(row)


@pytest.mark.parametrize(
    ("case", "shift", "within", "failed"),
    [("bf16", 0.05, True, False), ("bf16", 0.5, False, True), ("fp8", 0.5, False, False)],
)
def test_a_row_of_vllm_is_about_ours(case: str, shift: float, within: bool, failed: bool) -> None:
    found = {"FLASH_ATTN": process([1, 2]), "CUSTOM": process([1, 2], shift, COUNTED)}
    row = summarize(VLLM, case, found, found if case == "fp8" else {}, STEP)
    assert row["cold"]["equal_tokens"] == 2 and row["counters"] == COUNTED
    assert row["within_rounding"] is within
    assert has_failed(VLLM, row) is failed
    assert ("alone" in row) == (case == "fp8")
    json.dumps(row)


def test_bits_alone_and_batched_are_counted() -> None:
    right, other = process([1, 2]), process([1, 2], 0.01, COUNTED)
    found = {"FLASH_ATTN": right | {"alone": right["control"]}, "CUSTOM": other | {"alone": right["control"]}}
    row = summarize(VLLM, "invariant", found, {}, STEP)
    assert row["same_bits_FLASH_ATTN"] == {"cold": 1, "cached": 1, "of": 1}
    assert row["same_bits_CUSTOM"] == {"cold": 0, "cached": 0, "of": 1}


@pytest.mark.parametrize(("engine", "first", "ours"), [(SGLANG, "fa3@16", OURS), (VLLM, "FLASH_ATTN", "CUSTOM")])
def test_a_case_whose_engine_failed_has_failed(engine: Adapter, first: str, ours: str) -> None:
    row = summarize(engine, "bf16", {first: {"failed": ["Error"]}, ours: process([1])}, {}, STEP)
    assert row == {"case": "bf16", "failed": {first: ["Error"]}} and has_failed(engine, row)
    row = summarize(engine, "bf16", {first: process([1]), ours: process([1])}, {}, STEP)
    assert has_failed(engine, row), "it has counted nothing"


def test_the_plainest_case_of_the_same_model() -> None:
    assert plain_of(SGLANG, "page-1") == "bf16"
    assert plain_of(SGLANG, "hybrid-pools") == "window"
    assert plain_of(SGLANG, "bf16") is plain_of(SGLANG, "n-samples") is plain_of(SGLANG, "soft-cap") is None
    assert plain_of(VLLM, "fp8") == "bf16" and plain_of(VLLM, "context-parallel") == "one-kv-head"
    assert plain_of(VLLM, "mixed") is plain_of(VLLM, "gpt-oss") is None


def test_cases_of_a_device() -> None:
    def cases(*given: str) -> list[str]:
        return list(read_arguments(["--engine", *given])[1].cases)

    assert "hybrid-pools" in cases("sglang") and "tensor-parallel" not in cases("sglang")
    assert "hybrid-pools" not in cases("sglang", "--device", "cpu")
    assert "invariant" in cases("vllm") and "context-parallel" not in cases("vllm")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["sglang", "--device", "cpu", "--cases", "fp8"], "fp8 cannot be judged on a CPU"),
        (["sglang", "--at-once", "0"], "argument --at-once: expected an integer from 1 to 64, got '0'"),
        (["vllm", "--cases", "gpt-os"], "argument --cases: 'gpt-os': expected some of bf16, mixed"),
        (["vllm", "--quick"], "argument --quick: vllm has no such option"),
    ],
)
def test_wrong_options_are_refused(given: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refused(read_arguments, ["--engine", *given], capsys)
