"""Reference-counted pages and their free list: the physical blocks of PagedAttention. Needs no torch."""

from collections.abc import Sequence
from typing import NamedTuple

from trunkattn.numerics import MAX_INT32
from trunkattn.validate import check_int

_IN_FREE_LIST = -1


class OutOfPages(RuntimeError):
    """A request needs more pages than are free or evictable. Nothing has changed."""


class PageCopy(NamedTuple):
    """Copy the KV of page `src` to page `dst`, in every layer, before anything is written to `dst`."""

    src: int
    dst: int


class PagePool:
    """`num_pages` pages of `page_size` token slots each, numbered from 0.

    A page is in one of three states:

    - *free*: in the free list;
    - *used*: its reference count is at least 1;
    - *kept*: its count fell to 0, but the caller has not called `free` on it, because its KV is worth keeping.

    `allocate` moves free -> used, `share` kept or used -> used, `release` used -> used or kept, and `free`
    kept -> free. Every method checks all of its arguments before it changes anything.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages = check_int("num_pages", num_pages, 1, MAX_INT32)
        self.page_size = check_int("page_size", page_size, 1)
        self._counts = [_IN_FREE_LIST] * num_pages
        # A stack: the page that was freed last goes out first, because its lines may still be in a cache.
        self._free = list(range(num_pages - 1, -1, -1))
        self._num_used = 0

    @property
    def num_free(self) -> int:
        """Pages in the free list, without the kept pages."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Distinct pages with a reference count of at least 1."""
        return self._num_used

    def refcount(self, page: int) -> int:
        """References to `page`: 0 for a free page and for a kept one."""
        return max(self._counts[self._checked(page)], 0)

    def kept_pages(self) -> list[int]:
        """The kept pages, in ascending order. The time is linear in `num_pages`."""
        return [page for page, count in enumerate(self._counts) if count == 0]

    def allocate(self, n: int) -> list[int]:
        """Takes `n` pages from the free list, each with one reference. Raises OutOfPages if there are fewer."""
        check_int("n", n, 0)
        if n > len(self._free):
            raise OutOfPages(f"{n} pages are needed, and {len(self._free)} of {self.num_pages} are free")
        pages = [self._free.pop() for _ in range(n)]
        for page in pages:
            self._counts[page] = 1
        self._num_used += n
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Adds one reference to each of `pages`, which are used or kept."""
        self._check_distinct(pages)
        for page in pages:
            if self._counts[page] == _IN_FREE_LIST:
                raise ValueError(f"pages: page {page} is free: expected used or kept pages; allocate it first")
        for page in pages:
            self._num_used += self._counts[page] == 0
            self._counts[page] += 1

    def release(self, pages: Sequence[int]) -> list[int]:
        """Drops one reference to each of `pages`; returns, in the same order, those without any left.

        The returned pages are kept, not free. The caller calls `free` for those whose KV it does not need.
        """
        self._check_distinct(pages)
        for page in pages:
            if self._counts[page] < 1:
                raise ValueError(f"pages: page {page} has no reference: expected used pages")
        for page in pages:
            self._counts[page] -= 1
        unreferenced = [page for page in pages if self._counts[page] == 0]
        self._num_used -= len(unreferenced)
        return unreferenced

    def free(self, pages: Sequence[int]) -> None:
        """Puts kept pages back on the free list."""
        self._check_distinct(pages)
        for page in pages:
            if self._counts[page] != 0:
                state = "already free" if self._counts[page] == _IN_FREE_LIST else "still referenced"
                raise ValueError(f"pages: page {page} is {state}: expected pages that `release` returned")
        for page in pages:
            self._counts[page] = _IN_FREE_LIST
        self._free.extend(pages)

    def check_integrity(self) -> None:
        """Raises RuntimeError unless the free list, the counts and `num_used` agree. The time is linear in
        `num_pages`."""
        listed = set(self._free)
        if len(listed) != len(self._free):
            raise RuntimeError("a page is in the free list twice")
        if listed != {page for page, count in enumerate(self._counts) if count == _IN_FREE_LIST}:
            raise RuntimeError("the free list and the reference counts disagree on which pages are free")
        if min(self._counts) < _IN_FREE_LIST:
            raise RuntimeError("a reference count is negative")
        if self._num_used != sum(count > 0 for count in self._counts):
            raise RuntimeError(f"num_used is {self._num_used}, but the reference counts give another number")

    def _checked(self, page: int) -> int:
        return check_int("page", page, 0, self.num_pages - 1)

    def _check_distinct(self, pages: Sequence[int]) -> None:
        distinct = set(pages)
        is_plain = not distinct or (min(distinct) >= 0 and max(distinct) < self.num_pages)
        if not is_plain or not {int}.issuperset(map(type, pages)):  # else the pages need no look one by one
            distinct = {self._checked(page) for page in pages}
        if len(distinct) != len(pages):
            raise ValueError(f"pages={list(pages)}: expected distinct pages")
