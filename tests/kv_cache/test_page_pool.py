"""The page pool: free list, reference counts, and refusal of every wrong call before anything changes."""

from collections.abc import Callable

import pytest

from trunkattn.kv_cache import OutOfPages, PagePool


def test_a_new_pool_is_all_free() -> None:
    pool = PagePool(num_pages=4, page_size=16)
    assert (pool.num_free, pool.num_used, pool.kept_pages()) == (4, 0, [])
    assert [pool.refcount(page) for page in range(4)] == [0, 0, 0, 0]
    pool.check_integrity()


def test_allocated_pages_are_distinct_and_referenced_once() -> None:
    pool = PagePool(num_pages=4, page_size=16)
    pages = pool.allocate(3)
    assert len(set(pages)) == 3
    assert [pool.refcount(page) for page in pages] == [1, 1, 1]
    assert (pool.num_free, pool.num_used) == (1, 3)


def test_allocation_is_all_or_nothing() -> None:
    pool = PagePool(num_pages=4, page_size=16)
    pool.allocate(2)
    with pytest.raises(OutOfPages, match="3 pages are needed, and 2 of 4 are free"):
        pool.allocate(3)
    assert (pool.num_free, pool.num_used) == (2, 2)
    assert pool.allocate(0) == []
    assert len(pool.allocate(2)) == 2


def test_a_page_without_references_is_kept_until_it_is_freed() -> None:
    pool = PagePool(num_pages=2, page_size=16)
    first, second = pool.allocate(2)
    pool.share([first])
    assert pool.release([second, first]) == [second]
    assert pool.release([first]) == [first]
    assert (pool.num_free, pool.num_used, pool.kept_pages()) == (0, 0, sorted([first, second]))
    pool.share([second])
    assert (pool.refcount(second), pool.num_used, pool.kept_pages()) == (1, 1, [first])
    pool.free([first])
    assert (pool.num_free, pool.kept_pages()) == (1, [])
    pool.check_integrity()


def test_release_keeps_the_order_of_its_argument() -> None:
    pool = PagePool(num_pages=5, page_size=1)
    pages = pool.allocate(5)
    order = [pages[i] for i in (3, 0, 4, 1, 2)]
    assert pool.release(order) == order


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda pool, used, kept, free: pool.share([used, free]), "is free: expected used or kept pages"),
        (lambda pool, used, kept, free: pool.release([used, kept]), "has no reference: expected used pages"),
        (lambda pool, used, kept, free: pool.release([used, free]), "has no reference: expected used pages"),
        (lambda pool, used, kept, free: pool.release([used, used]), "expected distinct pages"),
        (lambda pool, used, kept, free: pool.free([kept, used]), "is still referenced"),
        (lambda pool, used, kept, free: pool.free([kept, free]), "is already free"),
        (lambda pool, used, kept, free: pool.free([kept, kept]), "expected distinct pages"),
        (lambda pool, used, kept, free: pool.share([used, 3]), "page=3: expected an integer from 0 to 2"),
        (lambda pool, used, kept, free: pool.share([used, -1]), "page=-1: expected an integer from 0 to 2"),
        (lambda pool, used, kept, free: pool.allocate(-1), "n=-1: expected an integer of at least 0"),
        (lambda pool, used, kept, free: pool.refcount(3), "page=3: expected an integer from 0 to 2"),
    ],
)
def test_a_wrong_call_raises_and_changes_nothing(call: Callable[..., object], message: str) -> None:
    pool = PagePool(num_pages=3, page_size=16)
    used, kept = pool.allocate(2)
    pool.release([kept])
    (free,) = set(range(3)) - {used, kept}
    with pytest.raises(ValueError, match=message):
        call(pool, used, kept, free)
    assert [pool.refcount(page) for page in (used, kept, free)] == [1, 0, 0]
    assert (pool.num_free, pool.num_used, pool.kept_pages()) == (1, 1, [kept])
    pool.check_integrity()


@pytest.mark.parametrize("num_pages", [0, -1, 2**31, 2**70])
def test_as_many_pages_as_int32_counts(num_pages: int) -> None:
    with pytest.raises(ValueError, match=f"num_pages={num_pages}: expected an integer from 1 to 2147483647"):
        PagePool(num_pages, 16)


@pytest.mark.parametrize("page_size", [0, -16])
def test_pages_have_tokens(page_size: int) -> None:
    with pytest.raises(ValueError, match=f"page_size={page_size}: expected an integer of at least 1"):
        PagePool(4, page_size)


def test_sizes_must_be_ints() -> None:
    with pytest.raises(TypeError, match=r"num_pages=4\.0: expected an integer from 1 to 2147483647"):
        PagePool(4.0, 16)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda pool, page: pool._free.append(pool._free[0]), "twice"),
        (lambda pool, page: pool._free.append(page), "disagree"),
        (lambda pool, page: pool._free.pop(), "disagree"),
        (lambda pool, page: pool._counts.__setitem__(page, -2), "negative"),
        (lambda pool, page: setattr(pool, "_num_used", 2), "num_used is 2"),
    ],
)
def test_check_integrity_finds_damage(damage: Callable[[PagePool, int], object], message: str) -> None:
    pool = PagePool(num_pages=3, page_size=16)
    (page,) = pool.allocate(1)
    damage(pool, page)
    with pytest.raises(RuntimeError, match=message):
        pool.check_integrity()
