"""The live page's data: what the last steps read, and the prefix forest now. Made only while somebody looks."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from trunkattn.engine.engine import Engine
from trunkattn.engine.llm import LLM
from trunkattn.engine.request import Request
from trunkattn.engine.stats import EngineStats
from trunkattn.planner.prefix_forest import Forest, build_forest
from trunkattn.server.engine_loop import EngineLoop

_SHOWN_CHARACTERS: Final = 240  # of a node's text, at each end
_MOST_NODES: Final = 400


@dataclass(frozen=True)
class _Moment:
    """The counts at a time, for rates."""

    time_s: float
    stats: EngineStats


@dataclass(frozen=True)
class _Reader:
    """Who looks. tenant: whose requests are shown; None: all."""

    loop: asyncio.AbstractEventLoop
    tenant: str | None


class Live:
    """What the page shows, as server-sent events.

    Args:
        llm: the model; its tokenizer makes the text of each trunk.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._loop: EngineLoop | None = None
        self._readers: dict[asyncio.Queue[str | None], _Reader] = {}
        self._last: _Moment | None = None
        self._closed = False
        caches = llm.kv_cache.layer(0)  # keys and values [pages, page_size, heads, head_dim]
        self._token_bytes = llm.info.geometry.num_layers * sum(cache[0, 0].nbytes for cache in caches)

    def bind(self, loop: EngineLoop) -> None:
        """Names the loop that calls `watch`."""
        self._loop = loop

    async def events(self, tenant: str | None = None) -> AsyncGenerator[str, None]:
        """Snapshots, as they are made, until `close`. A reader that is too slow misses some.

        Args:
            tenant: whose requests are shown; None: all.
        """
        assert self._loop is not None
        queue: asyncio.Queue[str | None] = asyncio.Queue(1)
        self._readers[queue] = _Reader(asyncio.get_running_loop(), tenant)
        self._loop.watched = True
        self._loop.call(self.watch)  # the first picture comes at once
        try:
            while not self._closed and (event := await queue.get()) is not None:
                yield event
        finally:
            del self._readers[queue]
            self._loop.watched = bool(self._readers)

    def close(self) -> None:
        """Ends every reader's events: nobody waits for a page that is open. On the event loop."""
        self._closed = True
        for queue in self._readers:
            _replace(queue, None)

    def watch(self, engine: Engine) -> None:
        """Makes a snapshot for each tenant and hands it to the readers. On the engine's thread."""
        readers = list(self._readers.items())
        figures = self._figures(engine)
        events: dict[str | None, str] = {}
        for queue, reader in readers:
            if reader.tenant not in events:
                shot = figures | {"forest": self._forest(engine, reader.tenant)}
                events[reader.tenant] = f"data: {json.dumps(shot, ensure_ascii=False)}\n\n"
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                reader.loop.call_soon_threadsafe(_replace, queue, events[reader.tenant])

    def snapshot(self, engine: Engine, tenant: str | None = None) -> dict[str, Any]:
        """What `_figures` says, and the forest of a tenant's requests; None: of all."""
        return self._figures(engine) | {"forest": self._forest(engine, tenant)}

    def _figures(self, engine: Engine) -> dict[str, Any]:
        """The counts, and rates since they were last asked for. Times in seconds, sizes in bytes."""
        now = _Moment(time.monotonic(), engine.stats)
        last, self._last = self._last or now, now
        seconds = max(now.time_s - last.time_s, 1e-9)
        tokens = now.stats.generated_tokens - last.stats.generated_tokens
        steps = now.stats.steps - last.stats.steps
        busy = now.stats.busy_seconds - last.stats.busy_seconds
        cache = engine.scheduler.cache
        waiting = 0 if self._loop is None else self._loop.num_waiting
        return {
            "time": time.time(),
            "steps": now.stats.steps,
            "running": len(engine.scheduler.running),
            "waiting": waiting,
            "tokens_per_second": tokens / seconds,
            "seconds_per_token": busy / steps if steps else None,
            "bytes_read": (now.stats.kv_tokens_read - last.stats.kv_tokens_read) * self._token_bytes,
            "bytes_unshared": (now.stats.kv_tokens_per_query - last.stats.kv_tokens_per_query) * self._token_bytes,
            "total_bytes_read": now.stats.kv_tokens_read * self._token_bytes,
            "total_bytes_unshared": now.stats.kv_tokens_per_query * self._token_bytes,
            "generated_tokens": now.stats.generated_tokens,
            "pages": cache.pool.num_pages,
            "pages_in_use": cache.num_pages_in_use,
            "pages_cached": cache.index.num_evictable,
        }

    def _forest(self, engine: Engine, tenant: str | None) -> dict[str, Any]:
        """Nodes in depth-first order: parent (-1: none), requests below, tokens, bytes, and the text at both ends."""
        tables, page_size = engine.block_tables(), engine.scheduler.cache.page_size
        rows = [row for row, one in enumerate(tables.request_ids) if self._is_visible(one, tenant)]
        block_table, seq_lens = tables.block_table[rows], tables.seq_lens[rows]
        if not rows or seq_lens.max(initial=0) == 0:
            return {"requests": 0, "nodes": []}
        running = [engine.scheduler.running[row] for row in rows]
        forest = Forest(*build_forest(block_table, seq_lens, np.ones(len(rows), np.int32), page_size, 1))
        nodes = [self._node(running, forest, node) for node in range(min(len(forest.parent), _MOST_NODES))]
        return {"requests": len(forest.order), "nodes": nodes}

    def _is_visible(self, request_id: str, tenant: str | None) -> bool:
        return self._loop is None or self._loop.is_visible(request_id, tenant)

    def _node(self, running: Sequence[Request], forest: Forest, node: int) -> dict[str, Any]:
        first, last = int(forest.row_start[node]), int(forest.row_end[node])
        start, end = int(forest.token_start[node]), int(forest.token_end[node])
        sequence = running[int(forest.order[first])]
        tokens = end - start
        return {
            "parent": int(forest.parent[node]),
            "first": first,
            "requests": last - first,
            "start": start,
            "tokens": tokens,
            "bytes": tokens * self._token_bytes,
            "text": self._ends(sequence.token_ids[start:end]),
        }

    def _ends(self, token_ids: list[int]) -> str:
        """The text of some tokens; of many, the beginning and the end. A character is seldom longer than 4 tokens."""
        if self._llm.tokenizer is None:
            return ""
        decode, most = self._llm.tokenizer.decode, _SHOWN_CHARACTERS
        if len(token_ids) <= 2 * most:
            text = str(decode(token_ids))
            return text if len(text) <= 2 * most else f"{text[:most]} … {text[-most:]}"
        return f"{str(decode(token_ids[:most]))[:most]} … {str(decode(token_ids[-most:]))[-most:]}"


def _replace(queue: asyncio.Queue[str | None], event: str | None) -> None:
    """Puts the newest snapshot in the place of one that has not been read."""
    if queue.full():
        queue.get_nowait()
    queue.put_nowait(event)
