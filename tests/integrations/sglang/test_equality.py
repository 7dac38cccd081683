"""The comparison of equality.py can fail: attention whose merge is broken is not within rounding."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engines.equality import STEPS
from benchmarks.engines.rounding import compare, within_rounding
from benchmarks.engines.sglang import Offline

from ..broken_merge import break_merge
from ..vllm.prompts import NUM_PROMPTS, prompts
from .engine import start

TOKENS = 12


def rounds(folder: Path, backend: str) -> list[list[dict[str, Any]]]:
    engine = start(folder, backend, page_size=16)
    try:
        found = [Offline(engine, "cpu").answers(prompts(), TOKENS) for _ in range(2)]
    finally:
        engine.shutdown()
    assert [facts["cached_tokens"] > 0 for _, facts in found] == [True, True]
    return [each for each, _ in found]


def test_a_broken_merge_is_not_within_rounding(model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = (rounds(model("llama"), backend) for backend in ("torch_native", "trunk"))
    own = compare(theirs[1], theirs[0])
    for mine, other in zip(ours, theirs, strict=True):
        compared = compare(mine, other)
        assert compared["of"] == NUM_PROMPTS * TOKENS
        assert within_rounding(compared, own, STEPS["cpu"])
    break_merge(monkeypatch)
    broken = rounds(model("llama"), "trunk")
    for mine, other in zip(broken, theirs, strict=True):
        assert not within_rounding(compare(mine, other), own, STEPS["cuda"]), "not even by bfloat16's measure"
