"""Large logs: what the benchmark writes is what it says, block numbers stay apart without a table of all, and each
request takes little memory."""

import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.host.analyze_large import PROMPT_TOKENS, rows, write_log
from benchmarks.page.common import load
from trunkattn.analysis.reading.log import read_log
from trunkattn.analysis.records import LoggedRequest
from trunkattn.analysis.requests import Requests
from trunkattn.analysis.simulation.engine import EngineSize
from trunkattn.analysis.simulation.load import Feed, Load, Workload
from trunkattn.analysis.simulation.sequences import TokenSource

NO_BLOCKS = np.zeros(0, np.int64)


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


def test_a_request_takes_a_hundred_bytes_and_those_of_its_blocks(tmp_path: Path) -> None:
    """Also where requests wait for their times."""
    count = 1000
    path = tmp_path / "log.jsonl"
    write_log(path, "hashes", count)
    first = read_log(path)
    Feed(Workload.of(first.requests, EngineSize(10_000), 1), Load().times(first.requests))  # imports what they need
    read = waiting = float("inf")
    for _ in range(3):  # the least counts: other threads of the process allocate, too
        tracemalloc.start()
        try:
            log = read_log(path)
            after_read = tracemalloc.get_traced_memory()[0]
            workload = Workload.of(log.requests, EngineSize(10_000), 1)
            feed = Feed(workload, Load().times(log.requests))
            read, waiting = min(read, after_read), min(waiting, tracemalloc.get_traced_memory()[0] - after_read)
        finally:
            tracemalloc.stop()
    assert feed and len(workload.requests) == count
    num_blocks = sum(len(request.blocks) for request in log.requests)
    assert read / count < 120 + 1.2 * 8 * num_blocks / count
    assert waiting / count < 40


def test_requests_come_back_as_they_were_put_in() -> None:
    given = [
        LoggedRequest(7, None, 20, None, np.array([3, -4]), 16),
        LoggedRequest(7, 1.5, 1, 0, np.array([5]), 512, num_answers=3, session="a", turn=2, model="b", part=1),
        LoggedRequest(9, 0.0, 1 << 40, 1 << 40, np.zeros(0, np.int64), 1, session="b"),
    ]
    found = Requests.of(given)
    for places in ([0, 1, 2], [2, 0]):
        chosen = found[np.array(places)]
        assert [request.key for request in chosen[1:]] == [given[place].key for place in places[1:]]
        for place, request in zip(places, chosen, strict=True):
            assert replace(request, blocks=NO_BLOCKS) == replace(given[place], blocks=NO_BLOCKS)
            assert request.blocks.tolist() == given[place].blocks.tolist()
