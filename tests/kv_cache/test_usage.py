"""Utilisation and the three wastes, paged against contiguous (lecture §2.2 and §3.5)."""

import random

import pytest

from trunkattn.kv_cache import CacheManager, CacheUsage, SlotUsage


def compute(manager: CacheManager, request_id: int, tokens: list[int]) -> None:
    manager.extend(request_id, len(tokens))
    manager.commit(request_id, tokens)


def test_an_empty_cache_uses_nothing() -> None:
    usage = CacheManager(num_pages=4, page_size=16).usage(max_model_len=32)
    assert usage == CacheUsage(0, 0, 0, 0, pages_held=0, unshared_pages=0, contiguous=SlotUsage(0, 0, 0, 0))
    assert usage.utilisation == 0.0


def test_each_waste_is_counted_where_it_belongs() -> None:
    manager = CacheManager(num_pages=10, page_size=4)
    manager.admit(0, [1] * 9)
    compute(manager, 0, [1] * 5)
    manager.extend(0, 10)  # pages: 4 | 1 + 3 granted | 2 granted + 2 of no use
    usage = manager.usage()
    assert usage == CacheUsage(5, 5, 2, 0, pages_held=3, unshared_pages=3, contiguous=None)
    assert usage.held == 12
    assert usage.utilisation == 5 / 12


def test_shared_pages_count_once() -> None:
    manager = CacheManager(num_pages=10, page_size=4)
    manager.admit(0, [1] * 10)
    compute(manager, 0, [1] * 10)
    for child in (1, 2):
        manager.fork(0, child)
    assert manager.usage() == CacheUsage(10, 0, 2, 0, pages_held=3, unshared_pages=9, contiguous=None)
    compute(manager, 1, [1] * 11)
    usage = manager.usage()
    assert usage == CacheUsage(13, 0, 3, 0, pages_held=4, unshared_pages=9, contiguous=None)


def test_cached_pages_that_nobody_holds_are_not_counted() -> None:
    manager = CacheManager(num_pages=10, page_size=4)
    manager.admit(0, [1] * 10)
    compute(manager, 0, [1] * 10)
    manager.free(0)
    assert manager.index.num_evictable == 2
    assert manager.usage().pages_held == 0


def test_a_contiguous_reservation_wastes_what_the_lecture_says() -> None:
    manager = CacheManager(num_pages=10, page_size=4)
    for request, num_tokens in ((0, 6), (1, 9)):
        manager.admit(request, [request] * num_tokens)
        compute(manager, request, [request] * num_tokens)
    manager.fork(1, 2)  # contiguous memory cannot be shared
    contiguous = manager.usage(max_model_len=12).contiguous
    assert contiguous == SlotUsage(tokens=24, reserved=12, internal=0, external=4)
    contiguous = manager.usage(max_model_len=12, final_lens={0: 8, 2: 9}).contiguous
    assert contiguous == SlotUsage(tokens=24, reserved=2 + 3 + 0, internal=4 + 0 + 3, external=4)
    assert contiguous is not None and contiguous.utilisation == 24 / 36


def test_paging_uses_most_of_what_it_holds_and_contiguous_reservation_little() -> None:
    """Lengths as in a chat: the lecture gives 96.3 % and 20 to 38 %."""
    generator = random.Random(0)
    manager = CacheManager(num_pages=4096, page_size=16)
    for request in range(64):
        tokens = [generator.randrange(50_000) for _ in range(generator.randint(100, 1200))]
        manager.admit(request, tokens)
        compute(manager, request, tokens)
    usage = manager.usage(max_model_len=2048)
    assert usage.contiguous is not None
    assert usage.utilisation > 0.96
    assert 0.2 < usage.contiguous.utilisation < 0.4


@pytest.mark.parametrize(
    ("max_model_len", "final_lens", "error", "message"),
    [
        (None, {0: 8}, ValueError, "max_model_len=None: expected a length in tokens together with final_lens"),
        (8, {1: 8}, KeyError, "request_id=1: expected an admitted request"),
        (8, {0: 5}, ValueError, r"final_lens\[0\]=5: expected an integer of at least 6"),
        (
            8,
            {0: 9},
            ValueError,
            "max_model_len=8: expected at least the length of request 0, which holds 6 tokens and ends at 9",
        ),
        (
            5,
            None,
            ValueError,
            "max_model_len=5: expected at least the length of request 0, which holds 6 tokens and ends at 5",
        ),
        (8.0, None, TypeError, r"max_model_len=8\.0: expected an integer of at least 1"),
    ],
)
def test_wrong_lengths_are_refused(
    max_model_len: int | None, final_lens: dict[int, int] | None, error: type[Exception], message: str
) -> None:
    manager = CacheManager(num_pages=4, page_size=4)
    manager.admit(0, [1] * 6)
    compute(manager, 0, [1] * 6)
    with pytest.raises(error, match=message):
        manager.usage(max_model_len, final_lens)
