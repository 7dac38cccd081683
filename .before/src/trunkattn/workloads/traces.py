"""Recorded traffic in Mooncake's JSONL format, and the decode batches that it leads to."""

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
            raise TypeError(f"hash_ids must be a tuple of integers, got {self.hash_ids!r}")
        for hash_id in self.hash_ids:
            _require_integer("hash_ids", hash_id, 0)
        blocks = pages_for(self.input_length, HASH_BLOCK_TOKENS)
        if len(self.hash_ids) != blocks:
            raise ValueError(
                f"hash_ids must have one entry per {HASH_BLOCK_TOKENS} tokens of input_length "
                f"{self.input_length}, which makes {blocks}, got {len(self.hash_ids)}"
            )


def read_trace(path: str | PathLike[str]) -> tuple[TraceRequest, ...]:
    """Reads a trace: one JSON object per line with timestamp, input_length, output_length and hash_ids.

    Raises:
        ValueError: naming the file, the line and what is wrong with it.
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

    Every request starts on arrival and takes `ms_per_token` for its prompt and for each token after the first; so at
    time t it has run for n = (t - timestamp) // ms_per_token tokens, and decodes while 1 ≤ n < output_length, with a
    KV length of input_length + n. Pages that are full of prompt tokens are shared where the trace says that the blocks
    are equal; the page that takes new tokens is the request's own. A moment with nothing in decode gives an empty
    batch.

    Args:
        requests: the trace.
        start_ms, stop_ms, step_ms: the moments, in milliseconds from the beginning of the trace.
        page_size: tokens per page; divides the 512 tokens of a hash block.
        ms_per_token: time per output token, in milliseconds.

    Raises:
        ValueError: if an argument is out of range.
    """
    require_positive(step_ms=step_ms, page_size=page_size)
    if HASH_BLOCK_TOKENS % page_size:
        raise ValueError(f"page_size must divide {HASH_BLOCK_TOKENS}, got {page_size}")
    if not ms_per_token > 0:
        raise ValueError(f"ms_per_token must be above 0, got {ms_per_token}")
    if stop_ms < start_ms:
        raise ValueError(f"stop_ms must not be before start_ms ({start_ms}), got {stop_ms}")
    return (_batch_at(requests, now, page_size, ms_per_token) for now in range(start_ms, stop_ms, step_ms))


def _require_integer(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def _parse_line(line: str) -> TraceRequest:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error})") from error
    if not isinstance(entry, dict):
        raise ValueError(f"must be a JSON object, got {line.strip()!r}")
    fields = ("timestamp", "input_length", "output_length", "hash_ids")
    missing = [field for field in fields if field not in entry]
    if missing:
        raise ValueError(f"must have {', '.join(fields)}; missing: {', '.join(missing)}")
    if not isinstance(entry["hash_ids"], list):
        raise ValueError(f"hash_ids must be a list of integers, got {entry['hash_ids']!r}")
    return TraceRequest(entry["timestamp"], entry["input_length"], entry["output_length"], tuple(entry["hash_ids"]))


def _batch_at(requests: Sequence[TraceRequest], now: int, page_size: int, ms_per_token: float) -> PagedBatch:
    """The decode batch at one moment; its pages are numbered from 0 in order of use."""
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
    """Gives out page numbers: the same ones for the same block after the same prefix."""

    def __init__(self) -> None:
        self.num_pages = 0
        self._runs: dict[tuple[int, int], list[int]] = {}

    def new(self, count: int) -> list[int]:
        self.num_pages += count
        return list(range(self.num_pages - count, self.num_pages))

    def shared(self, previous_page: int, hash_id: int, count: int) -> list[int]:
        """The first `count` pages of a block that follows `previous_page` (-1: at the start)."""
        run = self._runs.setdefault((previous_page, hash_id), [])
        run += self.new(max(0, count - len(run)))
        return run[:count]


def _pages_of(request: TraceRequest, seq_len: int, page_size: int, pages: _PrefixPages) -> list[int]:
    full_prompt_pages = request.input_length // page_size
    pages_per_block = HASH_BLOCK_TOKENS // page_size
    row: list[int] = []
    for hash_id in request.hash_ids:
        count = min(pages_per_block, full_prompt_pages - len(row))
        row += pages.shared(row[-1] if row else -1, hash_id, count)
    return row + pages.new(pages_for(seq_len, page_size) - full_prompt_pages)
