"""engine_equality.py and sglang_equality.py without an engine: prompts, what differs, what has failed."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engines import sglang_equality as sglang
from benchmarks.engines.engine_equality import SHARED, Job, compare, parted_at, prompts, run_jobs, within_rounding

from .scripts import refusal

CASES = sglang.all_cases()
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
        "if case == 'slow': time.sleep(60)\n"
        "open(path, 'w').write(json.dumps([case, backend, rest, os.environ['GIVEN']]))\n"
    )
    jobs = [Job(case, "ours", ["--extra"], {"GIVEN": "yes"}) for case in ("good", "bad", "killed", "slow")]
    found = run_jobs(str(script), jobs, tmp_path, at_once=4, limit=5.0)
    assert found["good"]["ours"] == ["good", "ours", ["--extra"], "yes"]
    assert found["bad"]["ours"]["failed"][-1] == "ValueError: ours is wrong"
    assert found["killed"]["ours"] == {"failed": ["ended with status -9 after: loads"]}
    assert found["slow"]["ours"] == {"failed": ["no answer after 5 s"]}


def test_back_ends_of_a_case() -> None:
    assert CASES["bf16"].backends("cuda") == ["fa3@16", "trunk@16", "fa3+trunk@16"]
    assert CASES["page-1"].backends("cpu") == ["torch_native@1", "trunk@1", "torch_native+trunk@1"]
    assert CASES["fp8"].backends("cuda") == ["triton@16", "trunk@16"]


def test_options_of_an_engine() -> None:
    options = sglang.engine_options(Path("model"), CASES["chunked"], "fa3+trunk@16", "cuda")
    assert options["load_format"] == "auto" and options["chunked_prefill_size"] == 512
    assert (options["prefill_attention_backend"], options["decode_attention_backend"]) == ("fa3", "trunk")
    assert sglang.engine_options(Path("model"), CASES["tensor-parallel"], "fa3", "cuda")["tp_size"] == 2


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
    found = sglang.lacks(CASES[case], backend, process([1, 2], counted=counted))
    assert len(found) == len(expected)
    assert all(words in line for words, line in zip(expected, found, strict=True))


def test_a_row_says_what_is_equal_and_whether_it_counts() -> None:
    found = {"fa3@16": process([1, 2]), "trunk@16": process([1, 2], 0.01, COUNTED)}
    row = sglang.summarize("bf16", CASES["bf16"], found, {}, step=0.0625)
    assert row["trunk@16"]["cold"]["equal_tokens"] == row["trunk@16"]["cold"]["of"] == 2
    assert row["trunk@16"]["within_rounding"] and not sglang.has_failed(row)
    assert "plain" not in row["trunk@16"]
    found["trunk@16"] = process([1, 2], 0.2, COUNTED)
    row = sglang.summarize("page-1", CASES["page-1"], found, {"fa3@16": process([1, 2])}, step=0.0625)
    assert not row["trunk@16"]["within_rounding"] and sglang.has_failed(row)
    assert row["trunk@16"]["plain"]["logprob_difference"]["max"] == pytest.approx(0.2)


def test_a_case_whose_engine_failed_has_failed() -> None:
    row = sglang.summarize(
        "bf16", CASES["bf16"], {"fa3@16": {"failed": ["Error"]}, "trunk@16": process([1])}, {}, step=0.0625
    )
    assert row == {"case": "bf16", "failed": {"fa3@16": ["Error"]}} and sglang.has_failed(row)
    assert sglang.has_failed(
        sglang.summarize("bf16", CASES["bf16"], {"fa3@16": process([1]), "trunk@16": process([1])}, {}, step=0.0625)
    ), "it has counted nothing"


def test_the_plainest_case_of_the_same_model() -> None:
    assert sglang.plain_of("page-1", CASES) == "bf16"
    assert sglang.plain_of("hybrid-pools", CASES) == "window"
    assert sglang.plain_of("bf16", CASES) is None
    assert sglang.plain_of("n-samples", CASES) is None
    assert sglang.plain_of("soft-cap", CASES) is None


def test_cases_of_a_device() -> None:
    assert "tensor-parallel" not in sglang.parse(CASES, []).cases
    assert "hybrid-pools" in sglang.parse(CASES, []).cases
    assert "hybrid-pools" not in sglang.parse(CASES, ["--device", "cpu"]).cases
    assert "cannot be judged on a CPU" in refusal(
        "benchmarks.engines.sglang_equality", ["--device", "cpu", "--cases", "fp8"]
    )
    assert "argument --at-once" in refusal("benchmarks.engines.sglang_equality", ["--at-once", "0"])


def test_rows_are_json() -> None:
    json.dumps(sglang.summarize("bf16", CASES["bf16"], {"fa3@16": process([1, 2])}, {}, step=0.0625))
