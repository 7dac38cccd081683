"""The batch that every generator returns: the pages of each request's sequence."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class PagedBatch:
    """One step's requests over a paged KV cache.

    A physical page belongs to exactly one prefix: two rows have the same page only in the same column, and only if all
    their earlier columns are equal.

    Attributes:
        block_table: [num_requests, max_pages] int32, physical page of each page of the sequence. Columns after a row's
            `ceil(seq_len / page_size)` pages hold arbitrary numbers.
        seq_lens: [num_requests] int32, KV length in tokens, this step's query tokens included.
        query_lens: [num_requests] int32, query tokens of this step: the last tokens of the sequence. 0 is padding.
        page_size: tokens per page.
        num_pages: pages that a cache needs for the batch; every used page is below it.
    """

    block_table: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    query_lens: NDArray[np.int32]
    page_size: int
    num_pages: int

    @property
    def query_start_loc(self) -> NDArray[np.int32]:
        """[num_requests + 1] int32: where each request's query tokens begin, and the total."""
        return np.concatenate([[0], np.cumsum(self.query_lens)]).astype(np.int32)


def require_positive(**values: int) -> None:
    """Raises ValueError for the first argument below 1, by its name."""
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name}={value!r}: expected an integer of at least 1")


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold `num_tokens` tokens."""
    return -(-num_tokens // page_size)
