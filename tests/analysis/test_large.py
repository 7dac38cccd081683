"""Large logs: what the benchmark writes is what it says, and block numbers stay apart without a table of all."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.host.analyze_large import PROMPT_TOKENS, rows, write_log
from benchmarks.page.common import load
from trunkattn.analysis.reading.log import read_log
from trunkattn.analysis.records import LoggedRequest
from trunkattn.analysis.simulation.sequences import TokenSource


@pytest.mark.parametrize(("kind", "slack"), [("hashes", 0), ("text", 32)])  # a rendering has words of its own
def test_both_logs_hold_the_same_requests(tmp_path: Path, kind: str, slack: int) -> None:
    path = tmp_path / "log.jsonl"
    write_log(path, kind, 40)
    log, expected = read_log(path), list(rows(40))
    assert [request.num_output_tokens for request in log.requests] == [row.answer_tokens for row in expected]
    for request, row in zip(log.requests, expected, strict=True):
        assert 0 <= request.num_prompt_tokens - row.prompt_tokens <= slack
        assert PROMPT_TOKENS[0] <= request.num_prompt_tokens < PROMPT_TOKENS[1] + slack
    first = log.requests[0]
    for request, row in zip(log.requests[1:], expected[1:], strict=True):
        length = min(len(request.blocks), len(first.blocks))
        differs = np.flatnonzero(request.blocks[:length] != first.blocks[:length])
        blocks = 4 if row.application == expected[0].application else 2
        assert abs(int(differs[0]) * request.block_size - blocks * 512) <= slack


def test_100_000_requests_take_two_cores_less_than_ten_minutes() -> None:
    result = load("analyze-large")
    assert [row["kind"] for row in result["rows"]] == ["hashes", "text"] and result["cores"] == 2
    for row in result["rows"]:
        assert row["requests"] == 100_000 and row["seconds"] < 600
        assert row["peak_gb"] < 0.5 + 1.1 * max(1.0, row["log_gb"])


def test_blocks_whose_numbers_differ_in_one_half_have_other_tokens() -> None:
    numbers = [1, 1 | 1 << 32, 2]
    requests = [LoggedRequest(line, 0.0, 8, 4, np.array([number]), 8) for line, number in enumerate(numbers, 1)]
    source = TokenSource(requests)
    prompts = [source.tokens(request, 0, 4)[:8].tolist() for request in requests]
    assert prompts == [[1, 0] * 4, [1, 1] * 4, [2, 0] * 4]
