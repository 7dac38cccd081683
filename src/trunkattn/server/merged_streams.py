"""Several streams as one."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import NamedTuple, TypeVar

Item = TypeVar("Item")


class _End(NamedTuple):
    """The end of a stream. error: what it has raised; None: nothing."""

    error: Exception | None = None


async def merged(streams: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[tuple[int, Item], None]:
    """The items of some streams as they come, each with the number of its stream. The first error of a stream ends it.

    The reader sets the pace of all streams. To close the generator closes them.
    """
    arrived: asyncio.Queue[tuple[int, Item] | _End] = asyncio.Queue(1)

    async def forward(number: int, stream: AsyncGenerator[Item, None]) -> None:
        try:
            async for item in stream:
                await arrived.put((number, item))
            await arrived.put(_End())
        except Exception as error:
            await arrived.put(_End(error))
        finally:
            await stream.aclose()

    tasks = [asyncio.ensure_future(forward(number, stream)) for number, stream in enumerate(streams)]
    num_open = len(tasks)
    try:
        while num_open:
            new = await arrived.get()
            if not isinstance(new, _End):
                yield new
            elif new.error is not None:
                raise new.error
            else:
                num_open -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
