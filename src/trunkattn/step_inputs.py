"""The arguments of `BatchAttention.plan`: what the host can see of them is checked before a plan is made."""

from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from trunkattn.compiled import njit
from trunkattn.config import Capacity
from trunkattn.numerics import MAX_INT32
from trunkattn.validate import check_dense, check_int, check_memory, described, shape_text

Int32Array = NDArray[np.int32]

_AXES: Final = MappingProxyType(
    {
        "block_table": ("num_requests", "max_pages"),
        "seq_lens": ("num_requests",),
        "query_start_loc": ("num_requests + 1",),
        "chunks.query_lens": ("chunks",),
        "chunks.seq_lens": ("chunks",),
    }
)


class StepInputs(NamedTuple):
    """The arguments of `BatchAttention.plan`."""

    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor | None
    sliding_window: int | None
    num_pages: int | None


class PromptChunks(NamedTuple):
    """Prompt chunks of a step whose tables lie on a GPU: the last requests of the step, whose lengths the host knows,
    too.

    first_token: their first query token in the step. query_lens, seq_lens: [chunks] int32 on the CPU, equal to the
    lengths of these requests in the device's tables. other_kv_tokens: KV tokens of all other requests, or an upper
    bound; it decides whether one kernel computes both. None: unknown.
    """

    first_token: int
    query_lens: torch.Tensor
    seq_lens: torch.Tensor
    other_kv_tokens: int | None = None


def _int32(name: str, tensor: Any, shape: tuple[int | None, ...], device: torch.device) -> Int32Array:
    """The tensor as a NumPy array, or an error that names it. None in `shape`: any size."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is {described(tensor)}: expected a torch.Tensor")
    check_dense(name, tensor)
    if tensor.device.type not in ("cpu", device.type):
        raise ValueError(f"{name} is on {tensor.device}: expected {device}, like the BatchAttention")
    if tensor.dtype != torch.int32:
        raise TypeError(f"{name} has dtype {tensor.dtype}: expected torch.int32; use {name}.int()")
    wrong = tensor.dim() != len(shape) or any(
        want is not None and got != want for got, want in zip(tensor.shape, shape, strict=False)
    )
    if wrong:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}: expected {shape_text(_AXES[name], shape)}")
    check_memory(name, tensor)
    return tensor.contiguous().cpu().numpy()


def all_on_gpu(inputs: StepInputs) -> bool:
    """Whether the tables that are given lie on a GPU."""
    table, lens, starts = inputs[:3]
    given = (table, lens) if starts is None else (table, lens, starts)
    return all(isinstance(tensor, torch.Tensor) and tensor.is_cuda for tensor in given)


def check_on_device(inputs: StepInputs) -> None:
    """Checks the arguments of a step that is planned on the device, except for their shapes, which the device planner
    checks, and their values, which it clamps."""
    if inputs.num_pages is not None:
        raise ValueError(
            "num_pages is given: expected None, for these tables are planned on the GPU; use Capacity.num_pages"
        )


def check_chunks(chunks: PromptChunks, inputs: StepInputs, page_size: int, capacity: Capacity) -> None:
    """Checks the lengths of a step's prompt chunks, which the host gets in addition to the tables on the device."""
    if not isinstance(chunks, PromptChunks):
        raise TypeError(f"chunks is {described(chunks)}: expected PromptChunks or None")
    number = len(chunks.query_lens) if isinstance(chunks.query_lens, torch.Tensor) and chunks.query_lens.dim() else 0
    cpu = torch.device("cpu")
    query_lens = _int32("chunks.query_lens", chunks.query_lens, (number,), cpu)
    seq_lens = _int32("chunks.seq_lens", chunks.seq_lens, (number,), cpu)
    if inputs.block_table.dim() != 2:
        expected = shape_text(_AXES["block_table"], (None, None))
        raise ValueError(f"block_table has shape {tuple(inputs.block_table.shape)}: expected {expected}")
    rows, columns = inputs.block_table.shape
    most = min(rows, capacity.max_requests)
    if not 1 <= number <= most:
        raise ValueError(
            f"chunks.query_lens has {number} requests: expected 1 to {most}, which block_table and the capacity's "
            "max_requests allow"
        )
    check_int("chunks.first_token", chunks.first_token, 0, capacity.max_query_tokens)
    longest = min(columns, capacity.max_pages_per_request) * page_size
    for chunk, (queries, length) in enumerate(zip(query_lens.tolist(), seq_lens.tolist(), strict=True)):
        if not 1 <= queries <= length:
            raise ValueError(f"chunks.query_lens[{chunk}]={queries}: expected 1 to its chunks.seq_lens, {length}")
        if length > longest:
            raise ValueError(f"chunks.seq_lens[{chunk}]={length}: expected at most {longest}, the pages of block_table")
    if (total := int(query_lens.sum())) > capacity.max_chunk_tokens:
        raise ValueError(
            f"chunks.query_lens: {total} query tokens are over the capacity, "
            f"max_chunk_tokens={capacity.max_chunk_tokens}; use a larger Capacity or a smaller batch"
        )


class CheckedStep(NamedTuple):
    """The checked tables of a step in host memory. last_page: the highest page id of a request; -1 if there is none."""

    block_table: Int32Array
    seq_lens: Int32Array
    query_start_loc: Int32Array
    last_page: int


def check_step(inputs: StepInputs, page_size: int, capacity: Capacity | None, device: torch.device) -> CheckedStep:
    """Checks shapes and values.

    Raises:
        ValueError, TypeError: naming the argument, the value and what was expected.
    """
    table = _int32("block_table", inputs.block_table, (None, None), device)
    num_requests, max_pages = table.shape
    lens = _int32("seq_lens", inputs.seq_lens, (num_requests,), device)
    if inputs.query_start_loc is None:
        starts = np.arange(num_requests + 1, dtype=np.int32)
    else:
        starts = _int32("query_start_loc", inputs.query_start_loc, (num_requests + 1,), device)
    limit = MAX_INT32 // page_size  # places in the cache are int32 too
    if inputs.num_pages is not None:
        limit = min(limit, check_int("num_pages", inputs.num_pages, at_least=1))
    if capacity is not None:
        limit = min(limit, capacity.num_pages)
        _within(capacity, num_requests, starts, max_pages)
    found = _first_problem(table, lens, starts, page_size, limit)
    if found.problem:
        raise ValueError(_describe(found, (table, lens, starts), page_size, limit))
    return CheckedStep(table, lens, starts, found.last_page)


def _within(capacity: Capacity, num_requests: int, starts: Int32Array, max_pages: int) -> None:
    longest = int(np.diff(starts).max(initial=0))
    for name, value, limit in (
        ("block_table rows", num_requests, "max_requests"),
        ("block_table columns", max_pages, "max_pages_per_request"),
        ("query tokens in query_start_loc", int(starts[-1]), "max_query_tokens"),
        ("query tokens of a request in query_start_loc", longest, "max_query_len"),
    ):
        most = getattr(capacity, limit)
        if most is not None and value > most:
            raise ValueError(
                f"{name}: {value} is over the capacity, {limit}={most}; use a larger Capacity or a smaller batch"
            )


# The results of `_first_problem`; 0 means that there is no problem.
_STARTS_FALL, _TOO_MANY_QUERIES, _TOO_LONG, _PAGE_OUTSIDE = 1, 2, 3, 4


class _Found(NamedTuple):
    """What the tables of a step hold: their first problem and its place, and the highest page id before it."""

    problem: int
    row: int
    column: int
    last_page: int


@njit
def _first_problem(table, lens, starts, page_size, num_pages):
    last_page = -1
    if starts[0] != 0:
        return _Found(_STARTS_FALL, 0, 0, last_page)
    for row in range(len(lens)):
        queries = starts[row + 1] - starts[row]
        if queries < 0:
            return _Found(_STARTS_FALL, row + 1, 0, last_page)
        if queries > lens[row]:
            return _Found(_TOO_MANY_QUERIES, row, 0, last_page)
        if queries == 0:
            continue
        pages = (np.int64(lens[row]) + page_size - 1) // page_size
        if pages > table.shape[1]:
            return _Found(_TOO_LONG, row, 0, last_page)
        low, high = table[row, 0], table[row, 0]
        for column in range(pages):
            low, high = min(low, table[row, column]), max(high, table[row, column])
        if low < 0 or high >= num_pages:
            for column in range(pages):
                if table[row, column] < 0 or table[row, column] >= num_pages:
                    return _Found(_PAGE_OUTSIDE, row, column, last_page)
        last_page = max(last_page, high)
    return _Found(0, 0, 0, last_page)


def _describe(found: _Found, arrays: tuple[Int32Array, Int32Array, Int32Array], page_size: int, num_pages: int) -> str:
    """The message of a problem."""
    problem, row, column = found.problem, found.row, found.column
    table, lens, starts = arrays
    if problem == _STARTS_FALL:
        return f"query_start_loc[{row}]={starts[row]}: expected {'0' if row == 0 else f'at least {starts[row - 1]}'}"
    if problem == _TOO_MANY_QUERIES:
        queries = starts[row + 1] - starts[row]
        return (
            f"seq_lens[{row}]={lens[row]}: expected at least {queries}, for it counts the query tokens of this step too"
        )
    if problem == _TOO_LONG:
        most = table.shape[1] * page_size
        return f"seq_lens[{row}]={lens[row]}: expected at most {most}, block_table's columns × page_size"
    return (
        f"block_table[{row}, {column}]={table[row, column]}: expected a page id from 0 to {num_pages - 1}, for "
        f"seq_lens[{row}]={lens[row]} reaches this page"
    )
