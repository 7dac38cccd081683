"""Recorded traffic in Mooncake's format (https://arxiv.org/abs/2407.00079), and its decode batches."""

from collections.abc import Iterator, Sequence
from os import PathLike

import numpy as np

from benchmarks.workloads import PagedBatch
from trunkattn.analysis.batch import pages_for, require_positive
from trunkattn.analysis.formats.mooncake import BLOCK_SIZE
from trunkattn.analysis.reading.log import read_log
from trunkattn.analysis.records import LoggedRequest


def read_trace(path: str | PathLike[str]) -> list[LoggedRequest]:
    """Requests of a trace, in order of arrival.

    Raises:
        ValueError: naming the file, the line, and what is wrong with it.
    """
    return list(read_log(str(path), format="mooncake", strict=True).requests)


def arrival_ms(request: LoggedRequest) -> int:
    """When a request of a trace arrives, in ms from its beginning."""
    assert request.arrival is not None
    return round(1e3 * request.arrival)


def decode_batches(
    requests: Sequence[LoggedRequest],
    *,
    start_ms: int,
    stop_ms: int,
    step_ms: int,
    page_size: int,
    ms_per_token: float = 50.0,
) -> Iterator[PagedBatch]:
    """The requests in decode at `start_ms`, `start_ms + step_ms`, … before `stop_ms`, in order of the trace.

    A request starts on arrival and needs `ms_per_token` for its prompt and for each token after the first. So at time t
    it has n = (t - arrival) // ms_per_token tokens, and it decodes while 1 ≤ n < its output tokens, with a KV length of
    its prompt and n. Pages full of prompt tokens are shared where the trace has equal blocks; the page for new tokens
    belongs to the request. A moment without decoding requests gives an empty batch.

    Args:
        requests: the trace.
        start_ms, stop_ms, step_ms: the moments, in milliseconds from the beginning of the trace.
        page_size: tokens per page, a divisor of a hash block's 512 tokens.
        ms_per_token: time per output token, in milliseconds.

    Raises:
        ValueError: an argument is out of range.
    """
    require_positive(step_ms=step_ms, page_size=page_size)
    if BLOCK_SIZE % page_size:
        raise ValueError(f"page_size={page_size}: expected a divisor of {BLOCK_SIZE}")
    if not ms_per_token > 0:
        raise ValueError(f"ms_per_token={ms_per_token}: expected a number above 0")
    if stop_ms < start_ms:
        raise ValueError(f"stop_ms={stop_ms}: expected at least start_ms={start_ms}")
    return (_batch_at(requests, now, page_size, ms_per_token) for now in range(start_ms, stop_ms, step_ms))


def _batch_at(requests: Sequence[LoggedRequest], now: int, page_size: int, ms_per_token: float) -> PagedBatch:
    """The decode batch at one moment. Its pages are numbered from 0 in order of their first use."""
    running = []
    for request in requests:
        num_tokens = int((now - arrival_ms(request)) // ms_per_token)
        if 1 <= num_tokens < (request.num_output_tokens or 0):
            running.append((request, request.num_prompt_tokens + num_tokens))

    pages = _PrefixPages()
    rows = [_pages_of(request, seq_len, page_size, pages) for request, seq_len in running]
    block_table = np.zeros((len(rows), max((len(row) for row in rows), default=1)), dtype=np.int32)
    for row, columns in zip(rows, block_table, strict=True):
        columns[: len(row)] = row
    return PagedBatch(
        block_table=block_table,
        seq_lens=np.array([seq_len for _, seq_len in running], dtype=np.int32),
        query_lens=np.ones(len(running), dtype=np.int32),
        page_size=page_size,
        num_pages=pages.num_pages,
    )


class _PrefixPages:
    """Assigns page numbers: equal ones to equal blocks after equal prefixes."""

    def __init__(self) -> None:
        self.num_pages = 0
        self._blocks: dict[int, list[int]] = {}  # by number, which stands for a block and all before it

    def new(self, count: int) -> list[int]:
        self.num_pages += count
        return list(range(self.num_pages - count, self.num_pages))

    def shared(self, number: int, count: int) -> list[int]:
        """The first `count` pages of a block."""
        block = self._blocks.setdefault(number, [])
        block += self.new(max(0, count - len(block)))
        return block[:count]


def _pages_of(request: LoggedRequest, seq_len: int, page_size: int, pages: _PrefixPages) -> list[int]:
    full_prompt_pages = request.num_prompt_tokens // page_size
    pages_per_block = BLOCK_SIZE // page_size
    row: list[int] = []
    for number in request.blocks.tolist():
        count = min(pages_per_block, full_prompt_pages - len(row))
        row += pages.shared(number, count)
    return row + pages.new(pages_for(seq_len, page_size) - full_prompt_pages)
