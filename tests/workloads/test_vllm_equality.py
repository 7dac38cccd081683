"""vllm_equality.py and engine_equality.py without an engine: models, how answers are compared, options."""

from typing import Any

import pytest
import torch

from benchmarks.engines.engine_equality import compare, fill
from benchmarks.engines.vllm_equality import BACKENDS, CASES, PLAIN, folder_name, summarize

from .scripts import refusal


def test_a_folder_holds_one_model() -> None:
    shapes: dict[str, dict[str, Any]] = {}
    for case, (shape, _) in CASES.items():
        assert shapes.setdefault(folder_name(case), shape) == shape
    for folder, plain in PLAIN.items():
        assert folder_name(plain) == folder
        assert CASES[plain][1] == {}, "what others are compared with has no options of its own"


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


def answer(tokens: list[int], second: float = -3.0) -> dict[str, Any]:
    return {"tokens": tokens, "best": [{str(token): -1.0, str(token + 1): second} for token in tokens]}


def test_answers_are_compared_up_to_where_they_part_and_the_gap_there_is_kept() -> None:
    theirs, ours = answer([10, 20, 30, 40]), answer([10, 20, 31, 50])
    found = compare([ours, theirs], [theirs, theirs])
    assert found["equal_tokens"] == 2 + 4
    assert found["of"] == 8
    assert found["parted"] == 1
    assert found["gaps"] == [2.0]
    assert found["logprob_difference"]["max"] == 0.0


@pytest.mark.parametrize(("shift", "within"), [(0.05, True), (0.5, False)])
def test_a_row_says_whether_answers_differ_by_more_than_rounding(shift: float, within: bool) -> None:
    right, other = answer([10, 20]), answer([10, 20])
    other["best"][1]["20"] -= shift
    runs = ({"rounds": [[each]] * 2, "control": [right], "counters": {}} for each in (right, other))
    row = summarize("bf16", dict(zip(BACKENDS, runs, strict=True)), None)
    assert row["cold"]["equal_tokens"] == 2
    assert row["within_rounding"] is within


def test_a_case_that_failed_says_why() -> None:
    found = {BACKENDS[0]: {"failed": ["ValueError: no"]}, BACKENDS[1]: {"counters": {}}}
    assert summarize("gpt-oss", found, None) == {"case": "gpt-oss", "failed": {BACKENDS[0]: ["ValueError: no"]}}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--at-once", "0"], "argument --at-once: expected an integer from 1 to 64, got '0'"),
        (["--cases", "gpt-os"], "argument --cases: invalid choice: 'gpt-os'"),
    ],
)
def test_wrong_options_are_refused(given: list[str], message: str) -> None:
    assert message in refusal("benchmarks.engines.vllm_equality", given)
