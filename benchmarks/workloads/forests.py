"""Random prefix forests, as irregular as an engine can make them, for property tests and benchmarks."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trunkattn.analysis.batch import PagedBatch, pages_for, require_positive

# The kinds of rows, and the probability of each.
ROW_KINDS = ("padding", "one_token", "new", "fork", "prefix", "equal")
ROW_KIND_ODDS = (0.1, 0.1, 0.2, 0.3, 0.1, 0.2)


@dataclass(frozen=True)
class _Row:
    """A sequence: its logical pages in order, and its length in tokens."""

    pages: tuple[int, ...] = ()
    seq_len: int = 0


def random_forest(
    rng: np.random.Generator,
    *,
    page_size: int,
    max_requests: int = 12,
    max_own_tokens: int = 256,
    max_query_len: int = 40,
) -> PagedBatch:
    """A batch whose rows share prefixes at random: a forest of any depth, possibly empty.

    A row forks from an earlier row at a page boundary, is a strict prefix of it, or equals it (and then shares a partly
    filled last page too, as samples of one prompt do); or it is new, or one token long. Padding rows have query length
    0, with or without a sequence. Rows and page ids are in random order, and the columns after a row's pages hold stale
    ids: pages of other rows, -1 and 2**31 - 1.

    Args:
        rng: the only source of randomness: generators with equal seeds give equal batches.
        page_size: tokens per page.
        max_requests: the batch has 0 to `max_requests` rows.
        max_own_tokens: most tokens that a row adds to its shared ones. One row in four rounds them up to whole pages.
        max_query_len: most query tokens of a request; 1 gives a decode batch.

    Raises:
        ValueError: an argument is below 1.
    """
    require_positive(
        page_size=page_size, max_requests=max_requests, max_own_tokens=max_own_tokens, max_query_len=max_query_len
    )
    rows: list[_Row] = []
    pages_in_use = 0
    for _ in range(int(rng.integers(0, max_requests + 1))):
        parent = rows[rng.integers(len(rows))] if rows else _Row()
        shared_pages, own_tokens = _share(rng, parent, page_size, max_own_tokens)
        num_own_pages = pages_for(own_tokens, page_size)
        own_pages = tuple(range(pages_in_use, pages_in_use + num_own_pages))
        shared_tokens = min(shared_pages * page_size, parent.seq_len)
        rows.append(_Row(parent.pages[:shared_pages] + own_pages, shared_tokens + own_tokens))
        pages_in_use += num_own_pages

    rows = [rows[i] for i in rng.permutation(len(rows))]
    num_pages = pages_in_use + int(rng.integers(1, 4))
    seq_lens = np.array([row.seq_len for row in rows], dtype=np.int32)
    return PagedBatch(
        block_table=_block_table(rng, rows, num_pages),
        seq_lens=seq_lens,
        query_lens=_query_lens(rng, seq_lens, max_query_len),
        page_size=page_size,
        num_pages=num_pages,
    )


def _share(rng: np.random.Generator, parent: _Row, page_size: int, max_own_tokens: int) -> tuple[int, int]:
    """The number of `parent`'s pages that a new row shares, and of tokens that it adds."""
    own_tokens = int(rng.integers(1, max_own_tokens + 1))
    if rng.random() < 0.25:
        own_tokens = pages_for(own_tokens, page_size) * page_size
    full_pages = parent.seq_len // page_size
    cut = int(rng.integers(min(1, full_pages), full_pages + 1))
    fork = full_pages if rng.random() < 0.5 else cut
    kinds = {
        "padding": (0, 0),
        "one_token": (0, 1),
        "new": (0, own_tokens),
        "fork": (fork, own_tokens),
        "prefix": (cut, 0),
        "equal": (len(parent.pages), 0),
    }
    return kinds[str(rng.choice(ROW_KINDS, p=ROW_KIND_ODDS))]


def _block_table(rng: np.random.Generator, rows: list[_Row], num_pages: int) -> NDArray[np.int32]:
    """[num_requests, max_pages] int32 with shuffled page ids, and stale ids after each row's own."""
    physical = rng.permutation(num_pages)
    shape = (len(rows), max([1, *(len(row.pages) for row in rows)]) + int(rng.integers(0, 3)))
    table = rng.integers(0, num_pages, size=shape)
    garbage = rng.random(shape)
    table[garbage < 0.2] = -1
    table[garbage < 0.1] = np.iinfo(np.int32).max
    for request, row in enumerate(rows):
        table[request, : len(row.pages)] = physical[list(row.pages)]
    return table.astype(np.int32)


def _query_lens(rng: np.random.Generator, seq_lens: NDArray[np.int32], max_query_len: int) -> NDArray[np.int32]:
    """[num_requests] int32: half of the requests decode one token, one in ten has no query token, the others have a
    few."""
    longest = np.minimum(seq_lens, max_query_len)
    several = 1 + rng.integers(0, np.maximum(longest, 1))
    draw = rng.random(len(seq_lens))
    query_lens = np.where(draw < 0.5, 1, several)
    return np.where(draw > 0.9, 0, np.minimum(query_lens, longest)).astype(np.int32)
