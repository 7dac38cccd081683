"""The trace reader and the decode batches made from a trace."""

import json
from pathlib import Path

import numpy as np
import pytest

from trunkattn.workloads import TraceRequest, decode_batches, read_trace

GOOD = {"timestamp": 0, "input_length": 600, "output_length": 10, "hash_ids": [0, 1]}


def write(path: Path, *lines: object) -> Path:
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(text) + "\n")
    return path


def test_a_trace_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.jsonl", GOOD, GOOD | {"timestamp": 27, "input_length": 512, "hash_ids": [7]})
    assert read_trace(path) == (TraceRequest(0, 600, 10, (0, 1)), TraceRequest(27, 512, 10, (7,)))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("", "not JSON"),
        ("[1]", "expected a JSON object"),
        ({"timestamp": 0, "input_length": 5}, "output_length, hash_ids missing: expected timestamp"),
        (GOOD | {"timestamp": -1}, "timestamp=-1: expected an integer of at least 0"),
        (GOOD | {"timestamp": 0.5}, "timestamp=0.5: expected an integer of at least 0"),
        (GOOD | {"input_length": 0, "hash_ids": []}, "input_length=0: expected an integer of at least 1"),
        (GOOD | {"output_length": "9"}, "output_length='9': expected an integer of at least 0"),
        (GOOD | {"output_length": True}, "output_length=True: expected an integer of at least 0"),
        (GOOD | {"hash_ids": 3}, "hash_ids=3: expected a list of integers"),
        (GOOD | {"hash_ids": [0, None]}, "hash_ids=None: expected an integer of at least 0"),
        (GOOD | {"hash_ids": [0, -2]}, "hash_ids=-2: expected an integer of at least 0"),
        (GOOD | {"hash_ids": [0]}, "hash_ids has 1 entries: expected 2, one per 512 tokens of input_length=600"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: object, message: str) -> None:
    path = write(tmp_path / "trace.jsonl", GOOD, GOOD, line)
    with pytest.raises(ValueError, match=r"trace\.jsonl, line 3: ") as caught:
        read_trace(path)
    assert message in str(caught.value)


def test_requests_decode_from_their_second_token_to_their_last() -> None:
    requests = [TraceRequest(100, 40, 4, (0,)), TraceRequest(110, 512, 2, (1,))]
    batches = list(decode_batches(requests, start_ms=100, stop_ms=150, step_ms=10, page_size=16, ms_per_token=10))
    assert [batch.seq_lens.tolist() for batch in batches] == [[], [41], [42, 513], [43], []]
    assert batches[0].block_table.shape == (0, 1)
    assert batches[2].query_lens.tolist() == [1, 1]


def test_equal_blocks_share_the_pages_that_are_full_of_prompt() -> None:
    requests = [
        TraceRequest(0, 1000, 9, (5, 6)),
        TraceRequest(0, 1000, 9, (5, 6)),
        TraceRequest(0, 1100, 9, (5, 6, 7)),
        TraceRequest(0, 1024, 9, (8, 6)),
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
