"""Random forests: what the generator promises, and that it reaches every case that it is for."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.workloads import PagedBatch, random_forest

PAGE_SIZES = (1, 2, 7, 16, 128)


def used_pages(batch: PagedBatch) -> list[list[int]]:
    """The block table cut to the pages that each row has."""
    counts = -(-batch.seq_lens // batch.page_size)
    return [row[:count].tolist() for row, count in zip(batch.block_table, counts, strict=True)]


def forests() -> Iterator[PagedBatch]:
    for seed in range(500):
        yield random_forest(np.random.default_rng(seed), page_size=PAGE_SIZES[seed % len(PAGE_SIZES)])


@pytest.mark.property
@given(
    seed=st.integers(0, 2**32 - 1),
    page_size=st.integers(1, 128),
    max_requests=st.integers(1, 24),
    max_own_tokens=st.integers(1, 300),
    max_query_len=st.integers(1, 40),
)
def test_a_forest_keeps_its_promises(
    seed: int, page_size: int, max_requests: int, max_own_tokens: int, max_query_len: int
) -> None:
    batch = random_forest(
        np.random.default_rng(seed),
        page_size=page_size,
        max_requests=max_requests,
        max_own_tokens=max_own_tokens,
        max_query_len=max_query_len,
    )
    assert batch.block_table.dtype == batch.seq_lens.dtype == batch.query_lens.dtype == np.int32
    assert len(batch.block_table) == len(batch.seq_lens) == len(batch.query_lens) <= max_requests
    assert np.all((batch.query_lens >= 0) & (batch.query_lens <= np.minimum(batch.seq_lens, max_query_len)))
    assert batch.query_start_loc.tolist() == [0, *np.cumsum(batch.query_lens).tolist()]

    rows = used_pages(batch)
    prefix_of_page: dict[int, list[int]] = {}
    for row in rows:
        assert all(0 <= page < batch.num_pages for page in row)
        for column, page in enumerate(row):
            assert prefix_of_page.setdefault(page, row[:column]) == row[:column]
    for a, seq_len_a in zip(rows, batch.seq_lens, strict=True):
        if seq_len_a % page_size:
            sharers = [seq_len for b, seq_len in zip(rows, batch.seq_lens, strict=True) if a[-1] in b]
            assert set(sharers) == {seq_len_a}, "a partly filled page is shared by equal rows only"


def test_an_equal_seed_gives_an_equal_batch() -> None:
    a, b = (random_forest(np.random.default_rng(5), page_size=16) for _ in range(2))
    assert np.array_equal(a.block_table, b.block_table)
    assert np.array_equal(a.seq_lens, b.seq_lens)
    assert np.array_equal(a.query_lens, b.query_lens)


def kinds_of(batch: PagedBatch) -> set[str]:
    """The cases that a batch contains."""
    rows, kinds = used_pages(batch), set()
    stale = [page for row, used in zip(batch.block_table, rows, strict=True) for page in row[len(used) :]]
    for i, a in enumerate(rows):
        for b in rows[:i]:
            if a and a == b:
                kinds.add(
                    "equal rows with a shared partial page" if batch.seq_lens[i] % batch.page_size else "equal rows"
                )
            elif a and b and a == b[: len(a)]:
                kinds.add("strict prefix")
            elif a and b and a[0] == b[0]:
                kinds.add("fork")
    conditions = {
        "empty batch": not rows,
        "one-token request": np.any(batch.seq_lens == 1),
        "padding without a sequence": np.any(batch.seq_lens == 0),
        "padding with a sequence": np.any((batch.seq_lens > 0) & (batch.query_lens == 0)),
        "decode": np.any((batch.query_lens == 1) & (batch.seq_lens > 1)),
        "query of the whole sequence": np.any((batch.query_lens == batch.seq_lens) & (batch.seq_lens > 1)),
        "40 query tokens": np.any(batch.query_lens > 35),
        "negative stale id": -1 in stale,
        "huge stale id": any(page >= batch.num_pages for page in stale),
        "plausible stale id": any(0 <= page < batch.num_pages for page in stale),
        "sequence that ends with its page": np.any((batch.seq_lens > 0) & (batch.seq_lens % batch.page_size == 0)),
    }
    return kinds | {name for name, holds in conditions.items() if holds}


def test_every_case_occurs_at_every_page_size() -> None:
    seen: dict[int, set[str]] = {page_size: set() for page_size in PAGE_SIZES}
    for batch in forests():
        seen[batch.page_size] |= kinds_of(batch)
    every_case = set.union(*seen.values())
    assert len(every_case) == 15
    impossible = {1: {"equal rows with a shared partial page"}}
    for page_size, kinds in seen.items():
        assert kinds == every_case - impossible.get(page_size, set())


@pytest.mark.parametrize("name", ["page_size", "max_requests", "max_own_tokens", "max_query_len"])
def test_a_size_below_one_is_refused(name: str) -> None:
    sizes = {"page_size": 16} | {name: 0}
    with pytest.raises(ValueError, match=f"{name}=0: expected an integer of at least 1"):
        random_forest(np.random.default_rng(0), **sizes)
