"""Decode batches that are made from a trace."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.workloads.traces import decode_batches, read_trace
from trunkattn.analysis.reading.tokens import chained
from trunkattn.analysis.records import LoggedRequest


def request(
    arrival_ms: int, num_prompt_tokens: int, num_output_tokens: int, hash_ids: tuple[int, ...]
) -> LoggedRequest:
    blocks = chained(np.array(hash_ids, dtype=np.int64))
    return LoggedRequest(1, arrival_ms / 1e3, num_prompt_tokens, num_output_tokens, blocks, 512)


def test_a_bad_line_ends_the_reading(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 600, "output_length": 10, "hash_ids": [0, 1]}\n{}\n')
    with pytest.raises(ValueError, match=r"trace\.jsonl, line 2: .* missing: expected timestamp"):
        read_trace(path)


def test_requests_decode_from_their_second_token_to_their_last() -> None:
    requests = [request(100, 40, 4, (0,)), request(110, 512, 2, (1,))]
    batches = list(decode_batches(requests, start_ms=100, stop_ms=150, step_ms=10, page_size=16, ms_per_token=10))
    assert [batch.seq_lens.tolist() for batch in batches] == [[], [41], [42, 513], [43], []]
    assert batches[0].block_table.shape == (0, 1)
    assert batches[2].query_lens.tolist() == [1, 1]


def test_equal_blocks_share_the_pages_that_are_full_of_prompt() -> None:
    requests = [
        request(0, 1000, 9, (5, 6)),
        request(0, 1000, 9, (5, 6)),
        request(0, 1100, 9, (5, 6, 7)),
        request(0, 1024, 9, (8, 6)),
    ]
    (batch,) = decode_batches(requests, start_ms=50, stop_ms=51, step_ms=1, page_size=128)
    # 1000 tokens fill 7 pages of 128; the 8th belongs to the request that writes to it. Block 6 after block 8 is
    # another prefix than block 6 after block 5.
    assert batch.block_table.tolist() == [
        [0, 1, 2, 3, 4, 5, 6, 7, 0],
        [0, 1, 2, 3, 4, 5, 6, 8, 0],
        [0, 1, 2, 3, 4, 5, 6, 9, 10],
        [11, 12, 13, 14, 15, 16, 17, 18, 19],
    ]
    assert batch.seq_lens.tolist() == [1001, 1001, 1101, 1025]
    assert batch.num_pages == 20
    assert batch.block_table.dtype == np.int32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_size": 0}, "page_size=0: expected an integer of at least 1"),
        ({"page_size": 48}, "page_size=48: expected a divisor of 512"),
        ({"step_ms": 0}, "step_ms=0: expected an integer of at least 1"),
        ({"stop_ms": -1}, "stop_ms=-1: expected at least start_ms=0"),
        ({"ms_per_token": 0.0}, "ms_per_token=0.0: expected a number above 0"),
    ],
)
def test_a_bad_window_is_refused_at_once(change: dict[str, int], message: str) -> None:
    window = {"start_ms": 0, "stop_ms": 100, "step_ms": 50, "page_size": 16} | change
    with pytest.raises(ValueError, match=message):
        decode_batches([], **window)
