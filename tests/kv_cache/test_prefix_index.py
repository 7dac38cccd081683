"""The prefix index: matching verified against the tokens, LRU eviction, and nothing left unreachable."""

from array import array
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkattn.kv_cache import PrefixIndex
from trunkattn.kv_cache.prefix_index import CachedBlock


def insert(index: PrefixIndex, tokens: list[int], pages: list[int]) -> CachedBlock:
    return index.insert(index.root, tokens, pages)


def test_match_returns_the_longest_prefix_in_whole_pages() -> None:
    index = PrefixIndex(page_size=2)
    insert(index, [1, 2, 3, 4, 5, 6], [10, 11, 12])
    assert index.match([1, 2, 3, 4, 5, 6, 7]) == [10, 11, 12]
    assert index.match([1, 2, 3, 4, 5]) == [10, 11]
    assert index.match([1, 2, 3, 9, 5, 6]) == [10]
    assert index.match([3, 4]) == []  # in the index, but only behind 1, 2
    assert index.match([1]) == []
    assert index.match([]) == []
    index.check_integrity()


@pytest.mark.parametrize("page_size", [1, 3])
def test_a_salt_belongs_to_the_first_of_many_pages(page_size: int) -> None:
    """Blocks are packed some at a time: those of each later portion begin with no salt."""
    index, pages = PrefixIndex(page_size), list(range(50))
    tokens = list(range(50 * page_size))
    index.insert(index.root, tokens, pages, b"salt")
    index.check_integrity()
    assert index.match(tokens, b"salt") == pages
    assert index.match(tokens) == index.match(tokens, b"other") == []


def test_a_salt_stands_for_no_tokens() -> None:
    index = PrefixIndex(page_size=2)
    insert(index, [1, 2], [10])
    assert index.match([2], array("i", [1]).tobytes()) == []


def test_a_prefix_has_several_continuations() -> None:
    index = PrefixIndex(page_size=2)
    trunk = insert(index, [1, 2], [10])
    index.insert(trunk, [3, 4], [11])
    index.insert(trunk, [5, 6], [12])
    assert index.match([1, 2, 5, 6]) == [10, 12]
    assert index.match([1, 2, 3, 4]) == [10, 11]
    assert list(index) == [10, 11, 12]


def test_the_first_page_of_a_prefix_stays() -> None:
    index = PrefixIndex(page_size=2)
    insert(index, [1, 2, 3, 4], [10, 11])
    last = insert(index, [1, 2, 3, 4, 5, 6], [20, 21, 22])
    assert index.match([1, 2, 3, 4, 5, 6]) == [10, 11, 22]
    assert last is index.block(22)
    assert 20 not in index and 21 not in index
    index.check_integrity()


@pytest.mark.parametrize("hash_block", [lambda parent_key, tokens: 0, lambda parent_key, tokens: len(tokens)])
def test_a_colliding_hash_never_gives_a_wrong_page(hash_block: Callable[[int, bytes], int]) -> None:
    index = PrefixIndex(page_size=2, hash_block=hash_block)
    insert(index, [1, 2, 7, 8], [10, 11])
    insert(index, [3, 4, 7, 8], [12, 13])  # equal tokens below two parents of equal key
    assert index.match([1, 2, 7, 8]) == [10, 11]
    assert index.match([3, 4, 7, 8]) == [12, 13]
    assert index.match([7, 8]) == []
    assert index.match([5, 6]) == []
    index.check_integrity()
    index.mark_unreferenced([11])
    assert index.evict(1) == [11]
    assert index.match([1, 2, 7, 8]) == [10]
    assert index.match([3, 4, 7, 8]) == [12, 13]
    index.check_integrity()


@given(
    page_size=st.integers(1, 3),
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=8), min_size=1, max_size=8),
    modulus=st.sampled_from([1, 2, 1 << 60]),
)
@pytest.mark.property
def test_match_agrees_with_a_dictionary_of_whole_prefixes(
    page_size: int, prompts: list[list[int]], modulus: int
) -> None:
    index = PrefixIndex(page_size, hash_block=lambda parent_key, tokens: hash((parent_key, tokens)) % modulus)
    expected: dict[tuple[int, ...], int] = {}
    for number, prompt in enumerate(prompts):
        num_pages = len(prompt) // page_size
        pages = [100 * number + position for position in range(num_pages)]
        insert(index, prompt[: num_pages * page_size], pages)
        for position, page in enumerate(pages):
            expected.setdefault(tuple(prompt[: (position + 1) * page_size]), page)
    index.check_integrity()
    assert len(index) == len(expected)
    for prompt in prompts:
        ends = range(page_size, len(prompt) + 1, page_size)
        assert index.match(prompt) == [expected[tuple(prompt[:end])] for end in ends]


def test_the_least_recently_used_page_is_evicted_first() -> None:
    index = PrefixIndex(page_size=1)
    for token in (1, 2, 3):
        insert(index, [token], [token])
    index.mark_unreferenced([1, 2, 3])
    index.mark_referenced([1])
    index.mark_unreferenced([1])
    assert index.evictable_pages() == [2, 3, 1]
    assert index.evict(2) == [2, 3]
    assert index.match([2]) == [] and index.match([1]) == [1]
    assert index.num_evictable == 1


def test_a_referenced_page_is_not_evicted() -> None:
    index = PrefixIndex(page_size=1)
    insert(index, [1, 2], [10, 11])
    with pytest.raises(ValueError, match="n=1: expected an integer from 0 to 0"):
        index.evict(1)
    index.mark_unreferenced([11])
    assert index.evict(1) == [11]
    assert index.match([1, 2]) == [10]


def test_descendants_leave_with_an_evicted_page() -> None:
    index = PrefixIndex(page_size=1)
    insert(index, [1, 2, 3], [10, 11, 12])
    leaf = index.insert(index.block(11), [4], [13])
    index.mark_unreferenced([10, 12, 11])  # 13 is in use, though its ancestors are not
    assert sorted(index.evict(1)) == [10, 11, 12]
    assert 13 not in index and not index.is_indexed(leaf)
    assert len(index) == index.num_evictable == 0
    index.check_integrity()


def test_an_eviction_stops_at_the_number_asked_for() -> None:
    index = PrefixIndex(page_size=1)
    insert(index, [1, 2], [10, 11])
    insert(index, [3], [20])
    index.mark_unreferenced([10, 20, 11])  # 10 takes 11 along, which is enough
    assert sorted(index.evict(2)) == [10, 11]
    assert index.match([3]) == [20]
    index.check_integrity()


def test_a_page_that_left_with_its_ancestor_is_not_evicted_again() -> None:
    index = PrefixIndex(page_size=1)
    insert(index, [1, 2], [10, 11])
    insert(index, [3], [20])
    index.mark_unreferenced([10, 11, 20])
    assert sorted(index.evict(3)) == [10, 11, 20]
    index.check_integrity()


def test_a_reused_page_does_not_revive_what_hung_below_it() -> None:
    index = PrefixIndex(page_size=1)
    leaf = insert(index, [1, 2], [10, 11])
    index.mark_unreferenced([11, 10])
    assert index.evict(2) == [11, 10]
    insert(index, [5], [10])
    insert(index, [6], [11])
    assert index.match([5, 2]) == [10]
    assert not index.is_indexed(leaf)
    with pytest.raises(ValueError, match="the block of page 11 left the index"):
        index.insert(leaf, [3], [12])


def test_clear_forgets_everything() -> None:
    index = PrefixIndex(page_size=1)
    insert(index, [1, 2], [10, 11])
    index.mark_unreferenced([11])
    assert index.clear() == [11]
    assert len(index) == 0 and index.match([1, 2]) == []
    index.check_integrity()
    insert(index, [1], [11])
    assert index.match([1, 2]) == [11]


@pytest.mark.parametrize(
    ("tokens", "pages", "message"),
    [
        ([9, 9, 9], [20], "tokens has length 3: expected 2, which fill 1 pages of 2"),
        ([9, 9], [10], r"pages=\[10\]: expected distinct pages that are indexed as no other prefix"),
        ([9, 9, 9, 9], [20, 20], r"pages=\[20, 20\]: expected distinct pages"),
        ([9, 9, 9, 1.5], [20, 21], r"tokens\[3\]=1.5: expected 32-bit integers"),
        ([9, (1 << 31) - 1, 9, 1 << 31], [20, 21], r"tokens\[3\]=2147483648: expected 32-bit integers"),
        ([9, -(1 << 31), -(1 << 31) - 1, 9], [20, 21], r"tokens\[2\]=-2147483649: expected 32-bit integers"),
        ([9, 9, "a", "b"], [20, 21], r"tokens\[2\]='a': expected 32-bit integers"),
    ],
)
def test_a_wrong_insert_changes_nothing(tokens: list[int], pages: list[int], message: str) -> None:
    index = PrefixIndex(page_size=2)
    insert(index, [1, 2], [10])
    with pytest.raises(ValueError, match=message):
        insert(index, tokens, pages)
    assert list(index) == [10]
    index.check_integrity()


def test_only_indexed_pages_can_be_unreferenced_or_looked_up() -> None:
    index = PrefixIndex(page_size=1)
    assert index.mark_unreferenced([7]) == [7] and index.num_evictable == 0
    with pytest.raises(KeyError):
        index.block(7)
    with pytest.raises(ValueError, match="page_size=0: expected an integer of at least 1"):
        PrefixIndex(page_size=0)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda index: index._blocks.pop(11), "not linked"),
        (lambda index: setattr(index.block(11), "parent", None), "not linked"),
        (lambda index: setattr(index.block(11), "parent", index.root), "not linked"),
        (lambda index: index.block(10).children.clear(), "cannot be reached"),
        (lambda index: setattr(index.block(11), "tokens", b""), "partial block"),
        (lambda index: setattr(index.block(11), "tokens", bytes(12)), "partial block"),  # only a first page has a salt
        (lambda index: index._buckets[index.block(11).key].clear(), "bucket of its key"),
        (lambda index: setattr(index.block(11), "tokens", bytes(8)), "bucket of its key"),
        (lambda index: index._buckets.setdefault(1, []), "a hash bucket is empty"),
        (lambda index: index._buckets.setdefault(1, [index.block(10)]), "a block that is not in the index"),
        (lambda index: index._evictable.setdefault(99), "LRU order"),
        (lambda index: index._add(index.root, index.block(10).tokens, 12), "another page is indexed"),
    ],
)
def test_check_integrity_finds_damage(damage: Callable[[PrefixIndex], object], message: str) -> None:
    index = PrefixIndex(page_size=2)
    insert(index, [1, 2, 3, 4], [10, 11])
    damage(index)
    with pytest.raises(RuntimeError, match=message):
        index.check_integrity()
