"""Several streams as one: their items, their errors, their pace and their end."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from trunkattn.server.merged_streams import merged


async def counted(items: int, ended: list[int], number: int = 0) -> AsyncGenerator[int, None]:
    """Counts up. ended: gets what has been counted when the stream ends."""
    sent = 0
    try:
        while sent < items:
            yield sent
            sent += 1
    finally:
        ended.append(sent)


def test_every_item_comes_once_with_the_number_of_its_stream() -> None:
    async def collect() -> list[tuple[int, int]]:
        return [new async for new in merged([counted(items, []) for items in (3, 0, 2)])]

    found = asyncio.run(collect())
    assert sorted(found) == [(0, 0), (0, 1), (0, 2), (2, 0), (2, 1)]
    assert [item for number, item in found if number == 0] == [0, 1, 2]
    assert asyncio.run(anext_of_none()) is None


async def anext_of_none() -> tuple[int, int] | None:
    return await anext(merged([]), None)


def test_an_error_of_a_stream_is_raised_and_closes_the_others() -> None:
    ended: list[int] = []

    async def fails() -> AsyncGenerator[int, None]:
        yield 7
        raise KeyError("broken")

    async def collect() -> None:
        async for _ in merged([counted(1 << 30, ended), fails()]):
            pass

    with pytest.raises(KeyError, match="broken"):
        asyncio.run(collect())
    assert len(ended) == 1


def test_a_slow_reader_holds_the_streams_back() -> None:
    ended: list[int] = []

    async def read_two() -> None:
        async with aclosing(merged([counted(1 << 30, ended)])) as items:
            for _ in range(2):
                await anext(items)
            for _ in range(50):
                await asyncio.sleep(0)  # the stream could run on meanwhile

    asyncio.run(read_two())
    assert ended and ended[0] <= 5, "two are read, one waits, and one is held"
