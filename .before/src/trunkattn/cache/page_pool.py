"""Reference-counted pages and their free list: PagedAttention's physical blocks (lecture §3.4), no torch."""

from collections.abc import Sequence
from typing import NamedTuple

_IN_FREE_LIST = -1


class OutOfPages(RuntimeError):
    """More pages were asked for than are free or can be evicted. Nothing was changed."""


class PageCopy(NamedTuple):
    """The KV of page `src` is to be copied to page `dst`, in every layer, before anything is written to `dst`."""

    src: int
    dst: int


def check_int(name: str, value: int, minimum: int) -> None:
    """Raise TypeError or ValueError unless `value` is an int of at least `minimum`."""
    if not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")


class PagePool:
    """`num_pages` pages of `page_size` token slots each, numbered from 0 (PagedAttention, lecture §3.4).

    A page is in one of three states:

    - *free*: in the free list;
    - *used*: its reference count is at least 1;
    - *kept*: its count fell to 0, but the caller has not called `free` on it, because its KV is worth keeping.

    `allocate` takes free -> used, `share` takes kept or used -> used, `release` takes used -> used or kept, and `free`
    takes kept -> free. Every method checks all of its arguments before it changes anything.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        check_int("num_pages", num_pages, 1)
        check_int("page_size", page_size, 1)
        self.num_pages = num_pages
        self.page_size = page_size
        self._counts = [_IN_FREE_LIST] * num_pages
        # A stack: the page that was freed last, whose lines may still be in a cache, is handed out first.
        self._free = list(range(num_pages - 1, -1, -1))
        self._num_used = 0

    @property
    def num_free(self) -> int:
        """Pages in the free list; kept pages are not among them."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Distinct pages with a reference count of at least 1."""
        return self._num_used

    def refcount(self, page: int) -> int:
        """How many references `page` has: 0 for a free page and for a kept one."""
        return max(self._counts[self._checked(page)], 0)

    def kept_pages(self) -> list[int]:
        """The kept pages, in order of their number. Linear in `num_pages`."""
        return [page for page, count in enumerate(self._counts) if count == 0]

    def allocate(self, n: int) -> list[int]:
        """Take `n` pages from the free list, each with one reference. Raises OutOfPages if there are fewer."""
        check_int("n", n, 0)
        if n > len(self._free):
            raise OutOfPages(f"{n} pages asked for, {len(self._free)} of {self.num_pages} are free")
        pages = [self._free.pop() for _ in range(n)]
        for page in pages:
            self._counts[page] = 1
        self._num_used += n
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Add one reference to each of `pages`, which are used or kept."""
        self._check_distinct(pages)
        for page in pages:
            if self._counts[page] == _IN_FREE_LIST:
                raise ValueError(f"pages: page {page} is free and cannot be shared; allocate it")
        for page in pages:
            self._num_used += self._counts[page] == 0
            self._counts[page] += 1

    def release(self, pages: Sequence[int]) -> list[int]:
        """Drop one reference to each of `pages`; return, in the same order, those that have none left.

        The returned pages are kept, not free: the caller gives back to `free` those whose KV it has no use for.
        """
        self._check_distinct(pages)
        for page in pages:
            if self._counts[page] < 1:
                raise ValueError(f"pages: page {page} has no reference to release")
        for page in pages:
            self._counts[page] -= 1
        unreferenced = [page for page in pages if self._counts[page] == 0]
        self._num_used -= len(unreferenced)
        return unreferenced

    def free(self, pages: Sequence[int]) -> None:
        """Put kept pages back on the free list."""
        self._check_distinct(pages)
        for page in pages:
            if self._counts[page] != 0:
                state = "already free" if self._counts[page] == _IN_FREE_LIST else "still referenced"
                raise ValueError(f"pages: page {page} is {state}")
        for page in pages:
            self._counts[page] = _IN_FREE_LIST
        self._free.extend(pages)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless the free list, the counts and `num_used` agree. Linear in `num_pages`."""
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
        check_int("page", page, 0)
        if page >= self.num_pages:
            raise ValueError(f"page must be less than num_pages = {self.num_pages}, got {page}")
        return page

    def _check_distinct(self, pages: Sequence[int]) -> None:
        if len({self._checked(page) for page in pages}) != len(pages):
            raise ValueError(f"pages must be distinct, got {list(pages)}")
