"""The live page's data: what the last steps read, and the prefix forest now. Made only while somebody looks."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from trunkattn.engine.engine import Engine
from trunkattn.engine.llm import LLM
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


class Live:
    """What the page shows, as server-sent events.

    Args:
        llm: the model; its tokenizer makes the text of each trunk.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._loop: EngineLoop | None = None
        self._readers: dict[asyncio.Queue[str], asyncio.AbstractEventLoop] = {}
        self._last: _Moment | None = None
        caches = llm.kv_cache.layer(0)  # keys and values [pages, page_size, heads, head_dim]
        self._token_bytes = llm.info.geometry.num_layers * sum(cache[0, 0].nbytes for cache in caches)

    def bind(self, loop: EngineLoop) -> None:
        """Names the loop that calls `watch`."""
        self._loop = loop

    async def events(self) -> AsyncGenerator[str, None]:
        """Snapshots, as they are made. A reader that is too slow misses some."""
        assert self._loop is not None
        queue: asyncio.Queue[str] = asyncio.Queue(1)
        self._readers[queue] = asyncio.get_running_loop()
        self._loop.watched = True
        self._loop.call(self.watch)  # the first picture comes at once
        try:
            while True:
                yield await queue.get()
        finally:
            del self._readers[queue]
            self._loop.watched = bool(self._readers)

    def watch(self, engine: Engine) -> None:
        """Makes a snapshot and hands it to every reader. On the engine's thread."""
        event = f"data: {json.dumps(self.snapshot(engine), ensure_ascii=False)}\n\n"
        for queue, loop in list(self._readers.items()):
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(_replace, queue, event)

    def snapshot(self, engine: Engine) -> dict[str, Any]:
        """The counts, rates since the last snapshot, and the forest. Times in seconds, sizes in bytes."""
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
            "forest": self._forest(engine),
        }

    def _forest(self, engine: Engine) -> dict[str, Any]:
        """Nodes in depth-first order: parent (-1: none), requests below, tokens, bytes, and the text at both ends."""
        tables, page_size = engine.block_tables(), engine.scheduler.cache.page_size
        num_rows = len(tables.seq_lens)
        if num_rows == 0 or tables.seq_lens.max(initial=0) == 0:
            return {"requests": 0, "nodes": []}
        ones = np.ones(num_rows, np.int32)
        forest = Forest(*build_forest(tables.block_table, tables.seq_lens, ones, page_size, 1))
        nodes = [self._node(engine, forest, node) for node in range(min(len(forest.parent), _MOST_NODES))]
        return {"requests": len(forest.order), "nodes": nodes}

    def _node(self, engine: Engine, forest: Forest, node: int) -> dict[str, Any]:
        first, last = int(forest.row_start[node]), int(forest.row_end[node])
        start, end = int(forest.token_start[node]), int(forest.token_end[node])
        sequence = engine.scheduler.running[int(forest.order[first])]
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


def _replace(queue: asyncio.Queue[str], event: str) -> None:
    """Puts the newest snapshot in the place of one that has not been read."""
    if queue.full():
        queue.get_nowait()
    queue.put_nowait(event)
