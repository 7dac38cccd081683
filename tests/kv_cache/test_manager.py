"""The cache manager, one behaviour at a time."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from trunkattn.kv_cache import CacheManager, OutOfPages, PageCopy, PrefixIndex

ABC = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def compute(manager: CacheManager, request_id: str, tokens: list[int]) -> list[PageCopy]:
    """One step: room for `tokens`, and their KV is there."""
    copies = manager.extend(request_id, len(tokens))
    manager.commit(request_id, tokens)
    manager.check_integrity()
    return copies


def start(manager: CacheManager, request_id: str, tokens: list[int]) -> int:
    cached = manager.admit(request_id, tokens)
    compute(manager, request_id, tokens)
    return cached


def state(manager: CacheManager) -> object:
    """Everything a caller can see."""
    requests = {name: (manager.pages(name), manager.num_tokens(name), manager.can_extend(name, 1000)) for name in "ab"}
    counts = [manager.pool.refcount(page) for page in range(manager.pool.num_pages)]
    cached = list(manager.index), manager.index.evictable_pages()
    return requests, counts, cached, manager.num_free_pages, manager.usage()


# ---- allocation on demand


def test_pages_are_allocated_as_tokens_arrive() -> None:
    manager = CacheManager(num_pages=8, page_size=4)
    assert manager.admit("a", ABC) == 0
    assert manager.pages("a") == () and manager.num_pages_in_use == 0
    held = []
    for num_tokens in range(1, 10):
        assert manager.extend("a", num_tokens) == []
        held.append(len(manager.pages("a")))
    assert held == [1, 1, 1, 1, 2, 2, 2, 2, 3]
    assert manager.num_tokens("a") == 0
    manager.commit("a", ABC[:9])
    assert manager.num_tokens("a") == 9
    assert manager.num_free_pages == 5
    manager.check_integrity()


def test_room_once_granted_is_kept() -> None:
    manager = CacheManager(num_pages=8, page_size=4)
    manager.admit("a", ABC)
    manager.extend("a", 9)
    manager.commit("a", ABC[:2])  # the other seven were draft tokens, rejected
    pages = manager.pages("a")
    assert manager.extend("a", 3) == []
    assert manager.pages("a") == pages
    manager.commit("a", ABC[:9])
    manager.check_integrity()


def test_extend_without_room_changes_nothing() -> None:
    manager = CacheManager(num_pages=4, page_size=4)
    start(manager, "a", ABC[:6])
    manager.fork("a", "b")
    before = state(manager)
    assert manager.can_extend("a", 12)  # the copy of the last page, and one new page
    assert not manager.can_extend("a", 13)
    with pytest.raises(OutOfPages, match="3 pages are needed, and 2 of 4 are free or evictable"):
        manager.extend("a", 13)
    assert state(manager) == before
    manager.check_integrity()


def test_freed_pages_serve_other_requests() -> None:
    manager = CacheManager(num_pages=2, page_size=4, enable_prefix_caching=False)
    for name in ("first", "second", "third"):
        start(manager, name, ABC[:8])
        assert manager.num_free_pages == 0
        manager.free(name)
    assert manager.num_free_pages == 2


# ---- prefix sharing


def test_a_second_request_shares_the_full_pages_of_the_prefix() -> None:
    manager = CacheManager(num_pages=8, page_size=4)
    start(manager, "a", ABC)
    assert manager.admit("b", [*ABC[:8], 77]) == 8
    assert manager.num_tokens("b") == 8
    assert manager.pages("b") == manager.pages("a")[:2]
    assert manager.num_pages_in_use == 3
    assert [manager.num_pages_only_of(each) for each in ("a", "b", "ab", "aba")] == [1, 0, 3, 3]
    compute(manager, "b", [*ABC[:8], 77])
    assert manager.pages("b")[2] != manager.pages("a")[2]


def test_at_least_one_token_is_left_to_compute() -> None:
    manager = CacheManager(num_pages=8, page_size=4)
    start(manager, "a", ABC[:8])
    assert manager.admit("b", ABC[:8]) == 4
    assert manager.admit("c", ABC[:9]) == 8
    assert manager.admit("d", ABC[:4]) == 0


def test_only_committed_pages_are_shared() -> None:
    manager = CacheManager(num_pages=8, page_size=4)
    manager.admit("a", ABC)
    manager.extend("a", 10)
    assert manager.admit("b", ABC) == 0
    manager.commit("a", ABC, num_tokens=7)  # the list goes on, the KV does not
    assert manager.num_tokens("a") == 7
    assert manager.admit("c", ABC) == 4


def test_freed_pages_stay_cached_until_they_are_needed() -> None:
    manager = CacheManager(num_pages=4, page_size=4)
    start(manager, "a", ABC)
    manager.free("a")
    assert (manager.num_pages_in_use, manager.num_free_pages, manager.pool.num_free) == (0, 4, 2)
    assert manager.admit("b", ABC) == 8
    assert manager.num_free_pages == 2
    manager.free("b")
    start(manager, "other", [0] * 13)
    assert manager.num_free_pages == 0
    assert manager.admit("c", ABC) == 0
    manager.check_integrity()


def test_the_least_recently_freed_prefix_goes_first_and_from_its_end() -> None:
    manager = CacheManager(num_pages=6, page_size=2)
    old, new = [1, 1, 2, 2, 3, 3], [4, 4, 5, 5, 6, 6]
    for tokens in (old, new):
        start(manager, "a", tokens)
        manager.free("a")
    start(manager, "b", [9])
    assert manager.index.match(old) == manager.index.match(old[:4]) != []
    assert len(manager.index.match(new)) == 3
    start(manager, "c", [8])
    start(manager, "d", [7])
    assert manager.index.match(old) == []
    assert len(manager.index.match(new)) == 3


def test_a_prefix_in_use_is_not_evicted() -> None:
    manager = CacheManager(num_pages=4, page_size=4)
    start(manager, "a", ABC[:8])
    manager.free("a")
    manager.admit("b", ABC[:9])
    manager.admit("c", [0] * 9)
    assert not manager.can_extend("c", 9)
    with pytest.raises(OutOfPages):
        manager.extend("c", 9)
    assert manager.extend("c", 8) == []
    assert not set(manager.pages("b")) & set(manager.pages("c"))


def test_two_requests_that_compute_one_prefix_at_once_keep_their_own_pages() -> None:
    manager = CacheManager(num_pages=8, page_size=2)
    for name in "ab":
        manager.admit(name, ABC)
        manager.extend(name, 4)
    for name in "ab":
        manager.commit(name, ABC[:4])
    assert not set(manager.pages("a")) & set(manager.pages("b"))
    assert manager.index.match(ABC) == list(manager.pages("a"))
    compute(manager, "b", ABC[:6])  # continues the chain of the first
    assert manager.index.match(ABC) == [*manager.pages("a"), manager.pages("b")[2]]
    manager.free("a")
    manager.free("b")
    manager.check_integrity()
    assert manager.admit("c", ABC) == 6


def test_a_chain_that_was_evicted_above_a_running_request_is_indexed_anew() -> None:
    manager = CacheManager(num_pages=6, page_size=2)
    for name in "ab":
        manager.admit(name, ABC)
        manager.extend(name, 4)
    for name in "ab":
        manager.commit(name, ABC[:4])
    manager.free("a")  # the pages that b's chain leads through
    start(manager, "c", [0] * 8)
    assert manager.index.match(ABC) == []
    manager.free("c")
    compute(manager, "b", ABC[:6])
    assert manager.index.match(ABC) == list(manager.pages("b"))


def test_without_prefix_caching_nothing_is_shared_or_kept() -> None:
    manager = CacheManager(num_pages=8, page_size=4, enable_prefix_caching=False)
    assert start(manager, "a", ABC) == 0
    assert start(manager, "b", ABC) == 0
    assert not set(manager.pages("a")) & set(manager.pages("b"))
    manager.free("a")
    assert manager.pool.num_free == 5 and len(manager.index) == 0


def test_a_colliding_hash_never_shares_a_wrong_page() -> None:
    manager = CacheManager(num_pages=8, page_size=2)
    manager.index = PrefixIndex(page_size=2, hash_block=lambda parent_key, tokens: 0)
    start(manager, "a", [1, 2, 7, 7])
    assert start(manager, "b", [3, 4, 7, 7]) == 0
    manager.admit("c", [3, 4, 7, 7, 0])
    assert manager.pages("c") == manager.pages("b")
    manager.admit("d", [7, 7, 7, 7])
    assert manager.pages("d") == ()


# ---- fork and copy-on-write


def test_a_fork_shares_the_partial_last_page_until_it_is_written() -> None:
    manager = CacheManager(num_pages=8, page_size=4)
    start(manager, "a", ABC[:6])
    first, last = manager.pages("a")
    for name in "bc":
        manager.fork("a", name)
        assert manager.extend(name, 6) == []  # nothing new to write
        assert manager.pages(name) == (first, last) and manager.num_tokens(name) == 6
    assert manager.num_pages_in_use == 2
    (copy,) = compute(manager, "b", [*ABC[:6], 20])
    assert copy.src == last
    assert manager.pages("b") == (first, copy.dst)
    (copy,) = compute(manager, "a", [*ABC[:6], 21])
    assert copy.src == last
    assert compute(manager, "c", [*ABC[:6], 22]) == []  # the last holder writes in place
    assert manager.pages("c") == (first, last)
    assert compute(manager, "b", [*ABC[:6], 20, 30]) == []
    assert manager.pool.refcount(first) == 3


def test_a_full_last_page_is_not_copied() -> None:
    manager = CacheManager(num_pages=8, page_size=4)
    start(manager, "a", ABC[:8])
    manager.fork("a", "b")
    assert compute(manager, "a", ABC[:9]) == []
    assert compute(manager, "b", ABC[:9]) == []
    assert manager.pages("a")[:2] == manager.pages("b")[:2]
    assert manager.pages("a")[2] != manager.pages("b")[2]


def test_copy_and_new_pages_come_together_or_not_at_all() -> None:
    manager = CacheManager(num_pages=4, page_size=4)
    start(manager, "a", ABC[:6])
    manager.fork("a", "b")
    before = manager.pages("b")
    with pytest.raises(OutOfPages):
        manager.extend("b", 13)
    assert manager.pages("b") == before
    (copy,) = manager.extend("b", 12)
    assert manager.pages("b")[:2] == (before[0], copy.dst)
    assert len(set(manager.pages("b")) | set(before)) == 4


def test_a_fork_voids_slots_that_the_parent_has_not_committed() -> None:
    manager = CacheManager(num_pages=8, page_size=4)
    start(manager, "a", ABC[:6])
    manager.extend("a", 9)
    manager.fork("a", "b")
    assert len(manager.pages("b")) == 2
    with pytest.raises(ValueError, match="num_tokens=7: expected at most the 6 tokens that extend granted"):
        manager.commit("a", ABC[:7])
    pages = manager.pages("a")
    (copy,) = manager.extend("a", 9)  # the copy is new; the third page is still there
    assert (copy.src, manager.pages("a")) == (pages[1], (pages[0], copy.dst, pages[2]))
    manager.check_integrity()


def test_a_fork_inherits_the_chain_and_outlives_its_parent() -> None:
    manager = CacheManager(num_pages=8, page_size=2)
    start(manager, "a", ABC[:3])
    manager.fork("a", "b")
    manager.free("a")
    assert compute(manager, "b", ABC[:6]) == []
    assert manager.index.match(ABC) == list(manager.pages("b"))


# ---- reset


def test_reset_forgets_what_was_cached_and_what_is_running() -> None:
    manager = CacheManager(num_pages=8, page_size=2)
    start(manager, "done", [7, 7, 7])
    manager.free("done")
    start(manager, "a", ABC[:4])
    pages = manager.pages("a")
    manager.reset_prefix_cache()
    assert manager.pool.num_free == 6 and len(manager.index) == 0
    assert manager.admit("b", ABC) == 0 and manager.admit("c", [7, 7, 7]) == 0
    compute(manager, "a", ABC[:6])  # rests on KV from before the reset
    assert manager.pages("a")[:2] == pages
    assert manager.index.match(ABC) == []
    compute(manager, "b", ABC[:6])
    assert manager.index.match(ABC) == list(manager.pages("b"))


# ---- wrong calls


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: m.admit("a", ABC), ValueError, "request_id='a': expected one that is not admitted"),
        (lambda m: m.admit("new", []), ValueError, "tokens has length 0: expected at least one token"),
        (lambda m: m.admit("new", ["x"] * 9), ValueError, r"tokens\[\d\]=.*: expected 32-bit integers"),
        (lambda m: m.extend("a", 4), ValueError, "num_tokens=4: expected an integer of at least 5"),
        (lambda m: m.extend("a", -1), ValueError, "num_tokens=-1: expected an integer of at least 5"),
        (lambda m: m.extend("a", 6.0), TypeError, r"num_tokens=6\.0: expected an integer of at least 5"),
        (lambda m: m.can_extend("a", 4), ValueError, "num_tokens=4: expected an integer of at least 5"),
        (lambda m: m.commit("a", ABC[:4]), ValueError, "num_tokens=4: expected an integer of at least 5"),
        (lambda m: m.commit("a", []), ValueError, "num_tokens=0: expected an integer of at least 5"),
        (lambda m: m.commit("fresh", []), ValueError, "num_tokens=0: expected an integer of at least 1"),
        (
            lambda m: m.commit("a", ABC[:7]),
            ValueError,
            r"num_tokens=7: expected at most the 6 tokens .* and the 7 in tokens",
        ),
        (
            lambda m: m.commit("a", ABC[:5], num_tokens=6),
            ValueError,
            r"num_tokens=6: expected at most .* and the 5 in tokens; call extend first",
        ),
        (lambda m: m.commit("a", [*ABC[:4], "x", "y"]), ValueError, r"tokens\[\d\]=.*: expected 32-bit integers"),
        (lambda m: m.fork("a", "b"), ValueError, "child_id='b': expected one that is not admitted"),
        (lambda m: m.fork("a", "a"), ValueError, "child_id='a': expected one that is not admitted"),
        (lambda m: m.fork("who", "new"), KeyError, "request_id='who': expected an admitted request"),
        (lambda m: m.extend("who", 1), KeyError, "request_id='who': expected an admitted request"),
        (lambda m: m.can_extend("who", 1), KeyError, "request_id='who': expected an admitted request"),
        (lambda m: m.commit("who", [1]), KeyError, "request_id='who': expected an admitted request"),
        (lambda m: m.free("who"), KeyError, "request_id='who': expected an admitted request"),
        (lambda m: m.pages("who"), KeyError, "request_id='who': expected an admitted request"),
        (lambda m: m.num_tokens("who"), KeyError, "request_id='who': expected an admitted request"),
        (lambda m: m.usage(0), ValueError, "max_model_len=0: expected an integer of at least 1"),
    ],
)
def test_a_wrong_call_raises_and_changes_nothing(
    call: Callable[[CacheManager], object], error: type[Exception], message: str
) -> None:
    manager = CacheManager(num_pages=8, page_size=2)
    start(manager, "a", ABC[:5])
    manager.extend("a", 6)
    start(manager, "b", ABC[:7])
    manager.admit("fresh", [50, 51])
    before = state(manager)
    with pytest.raises(error, match=message):
        call(manager)
    assert state(manager) == before
    manager.check_integrity()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda m: m.pool.share(m.pages("a")[:1]), "1 requests hold page"),
        (lambda m: m.pool.allocate(1), "0 requests hold page"),
        (lambda m: m.pool.release(m.pool.allocate(1)), "the kept pages and the evictable pages differ"),
        (lambda m: m.index.mark_unreferenced(m.pages("a")[:1]), "the kept pages and the evictable pages differ"),
        (lambda m: m.index.insert(m.index.root, [9, 9], [7]), "a free page is indexed"),
        (lambda m: setattr(m._requests["a"], "room", 99), "expected indexed <= committed"),
        (lambda m: m.index.insert(m.index.root, [9, 9], m.pages("a")[2:]), "indexed and not full"),
        (lambda m: m.pool._free.append(m.pool._free[0]), "in the free list twice"),
        (lambda m: m.index._buckets.setdefault(1, []), "a hash bucket is empty"),
        (lambda m: setattr(m._requests["b"], "num_indexed", 3), "expected indexed <= committed"),
        (lambda m: (m.pool.share(m.pages("b")[:1]), m._requests["b"].pages.append(m.pages("b")[0])), "a page twice"),
        (lambda m: setattr(m._requests["b"], "num_tokens", 4), "disagree|may write"),
        (lambda m: m._requests.update(b=replace(m._requests["b"], num_tokens=4, room=4)), "disagree on what it holds"),
        (lambda m: setattr(m._requests["b"], "room", 6), "may write to page"),
        (lambda m: setattr(m._requests["b"], "num_indexed", 1), "2 pages are indexed, not 1"),
    ],
)
def test_check_integrity_finds_damage(damage: Callable[[CacheManager], object], message: str) -> None:
    manager = CacheManager(num_pages=8, page_size=2)
    start(manager, "a", ABC[:5])
    manager.fork("a", "b")
    if message == "1 requests hold page":
        manager.free("b")
    damage(manager)
    with pytest.raises(RuntimeError, match=message):
        manager.check_integrity()


def test_only_requests_of_equal_salt_share_cached_pages() -> None:
    cache = CacheManager(num_pages=16, page_size=2)
    tokens = [1, 2, 3, 4, 5]

    def cached(request_id: str, salt: bytes) -> int:
        count = cache.admit(request_id, tokens, salt)
        cache.extend(request_id, len(tokens))
        cache.commit(request_id, tokens)
        cache.check_integrity()
        return count

    assert [cached("a", b""), cached("b", b"x"), cached("c", b"xx\0\0"), cached("d", b"y")] == [0, 0, 0, 0]
    assert [cached("e", b"x"), cached("f", b"")] == [4, 4]
    for request_id in "abcdef":
        cache.free(request_id)
    cache.check_integrity()
    assert [cached("g", b"y"), cached("h", b"z")] == [4, 0]


def test_a_fork_keeps_its_parents_salt() -> None:
    cache = CacheManager(num_pages=16, page_size=2)
    cache.admit("a", [1], b"x")
    cache.extend("a", 1)
    cache.commit("a", [1])
    cache.fork("a", "b")
    cache.extend("b", 3)
    cache.commit("b", [1, 2, 3])
    assert cache.admit("c", [1, 2, 3], b"x") == 2
    assert cache.admit("d", [1, 2, 3]) == 0


@pytest.mark.parametrize("kind", [np.uint8, np.int8, np.uint64])
def test_integers_of_numpy_are_taken_as_numbers(kind: type[np.integer]) -> None:
    """Their own arithmetic would overflow: the negative of a uint8 is a positive number."""
    cache = CacheManager(num_pages=100, page_size=kind(2))  # type: ignore[arg-type]
    cache.admit("a", list(range(100)))
    assert cache.can_extend("a", kind(100))  # type: ignore[arg-type]
    cache.extend("a", kind(100))  # type: ignore[arg-type]
    assert len(cache.pages("a")) == 50
    cache.commit("a", list(range(100)), kind(100))  # type: ignore[arg-type]
    assert type(cache.num_tokens("a")) is int
    usage = cache.usage(kind(120), {"a": kind(110)})  # type: ignore[arg-type, dict-item]
    assert usage.contiguous is not None
    assert (usage.contiguous.reserved, usage.contiguous.internal, usage.contiguous.external) == (10, 10, 80)
