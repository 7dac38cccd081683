"""Recorded traffic in Mooncake's JSONL format (https://arxiv.org/abs/2407.00079), and its decode batches."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import numpy as np

from trunkattn.workloads.batch import PagedBatch, pages_for, require_positive

HASH_BLOCK_TOKENS = 512


@dataclass(frozen=True)
class TraceRequest:
    """One line of a trace.

    Attributes:
        timestamp: arrival, in milliseconds from the beginning of the trace.
        input_length: prompt tokens.
        output_length: generated tokens.
        hash_ids: one number per 512 prompt tokens, the last block possibly incomplete. Equal numbers stand for equal
            blocks with equal blocks before them.
    """

    timestamp: int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        for name, least in (("timestamp", 0), ("input_length", 1), ("output_length", 0)):
            _require_integer(name, getattr(self, name), least)
        if not isinstance(self.hash_ids, tuple):
            raise TypeError(f"hash_ids={self.hash_ids!r}: expected a tuple of integers")
        for hash_id in self.hash_ids:
            _require_integer("hash_ids", hash_id, 0)
        blocks = pages_for(self.input_length, HASH_BLOCK_TOKENS)
        if len(self.hash_ids) != blocks:
            raise ValueError(
                f"hash_ids has {len(self.hash_ids)} entries: expected {blocks}, one per {HASH_BLOCK_TOKENS} tokens of "
                f"input_length={self.input_length}"
            )


def read_trace(path: str | PathLike[str]) -> tuple[TraceRequest, ...]:
    """Reads a trace: one JSON object per line with timestamp, input_length, output_length and hash_ids.

    Raises:
        ValueError: naming the file, the line, and what is wrong with it.
    """
    requests = []
    with Path(path).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                requests.append(_parse_line(line))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
    return tuple(requests)


def decode_batches(
    requests: Sequence[TraceRequest],
    *,
    start_ms: int,
    stop_ms: int,
    step_ms: int,
    page_size: int,
    ms_per_token: float = 50.0,
) -> Iterator[PagedBatch]:
    """The requests in decode at `start_ms`, `start_ms + step_ms`, … before `stop_ms`, in order of the trace.

    A request starts on arrival and needs `ms_per_token` for its prompt and for each token after the first. So at time t
    it has n = (t - timestamp) // ms_per_token tokens, and it decodes while 1 ≤ n < output_length, with a KV length of
    input_length + n. Pages full of prompt tokens are shared where the trace has equal blocks; the page for new tokens
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
    if HASH_BLOCK_TOKENS % page_size:
        raise ValueError(f"page_size={page_size}: expected a divisor of {HASH_BLOCK_TOKENS}")
    if not ms_per_token > 0:
        raise ValueError(f"ms_per_token={ms_per_token}: expected a number above 0")
    if stop_ms < start_ms:
        raise ValueError(f"stop_ms={stop_ms}: expected at least start_ms={start_ms}")
    return (_batch_at(requests, now, page_size, ms_per_token) for now in range(start_ms, stop_ms, step_ms))


def _require_integer(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r}: expected an integer of at least {least}")
    if value < least:
        raise ValueError(f"{name}={value!r}: expected an integer of at least {least}")


def _parse_line(line: str) -> TraceRequest:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON ({error}); expected a JSON object") from error
    if not isinstance(entry, dict):
        raise ValueError(f"{line.strip()!r}: expected a JSON object")
    fields = ("timestamp", "input_length", "output_length", "hash_ids")
    missing = [field for field in fields if field not in entry]
    if missing:
        raise ValueError(f"{', '.join(missing)} missing: expected {', '.join(fields)}")
    if not isinstance(entry["hash_ids"], list):
        raise ValueError(f"hash_ids={entry['hash_ids']!r}: expected a list of integers")
    return TraceRequest(entry["timestamp"], entry["input_length"], entry["output_length"], tuple(entry["hash_ids"]))


def _batch_at(requests: Sequence[TraceRequest], now: int, page_size: int, ms_per_token: float) -> PagedBatch:
    """The decode batch at one moment. Its pages are numbered from 0 in order of their first use."""
    running = []
    for request in requests:
        num_tokens = int((now - request.timestamp) // ms_per_token)
        if 1 <= num_tokens < request.output_length:
            running.append((request, request.input_length + num_tokens))

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
        self._blocks: dict[tuple[int, int], list[int]] = {}  # (page before, hash id) -> pages of the block

    def new(self, count: int) -> list[int]:
        self.num_pages += count
        return list(range(self.num_pages - count, self.num_pages))

    def shared(self, previous_page: int, hash_id: int, count: int) -> list[int]:
        """The first `count` pages of a block after `previous_page` (-1: at the start)."""
        block = self._blocks.setdefault((previous_page, hash_id), [])
        block += self.new(max(0, count - len(block)))
        return block[:count]


def _pages_of(request: TraceRequest, seq_len: int, page_size: int, pages: _PrefixPages) -> list[int]:
    full_prompt_pages = request.input_length // page_size
    pages_per_block = HASH_BLOCK_TOKENS // page_size
    row: list[int] = []
    for hash_id in request.hash_ids:
        count = min(pages_per_block, full_prompt_pages - len(row))
        row += pages.shared(row[-1] if row else -1, hash_id, count)
    return row + pages.new(pages_for(seq_len, page_size) - full_prompt_pages)
