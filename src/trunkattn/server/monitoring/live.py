"""The live page's data: samples of the last minutes, and the current prefix forest. The forest is made only while the
page is open."""

import asyncio
import contextlib
import json
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import numpy as np

from trunkattn.engine.engine import Engine
from trunkattn.engine.llm import LLM
from trunkattn.engine.scheduling.request import Request
from trunkattn.engine.stats import EngineStats
from trunkattn.planner.prefix_forest import Forest, build_forest
from trunkattn.server.engine_loop import EngineLoop, ServerFull
from trunkattn.server.limits import LIMITS
from trunkattn.server.monitoring.metrics import Metrics

_SHOWN_CHARACTERS: Final = 240  # of a node's text, at each end
_MOST_NODES: Final = 400
_MOST_REQUESTS: Final = 50  # in the list
_KEPT_SECONDS: Final = 300
_FRESH_SECONDS: Final = 0.5
_RETRY_S: Final = 5
_KEPT_SAMPLES: Final = 600  # of as many seconds, two in each


@dataclass(frozen=True)
class _Moment:
    """The counts at a time, for differences."""

    time_s: float
    stats: EngineStats


@dataclass(frozen=True)
class _Reader:
    """Who looks. tenant: whose requests are shown; None: all."""

    loop: asyncio.AbstractEventLoop
    tenant: str | None


@dataclass(frozen=True)
class _Shot:
    """What an open live page is sent.

    Attributes:
        samples: all that are kept, the newest last.
        num_samples: samples that were ever taken.
        picture: JSON of an object with what is true now.
    """

    samples: tuple[dict[str, float], ...]
    num_samples: int
    picture: str

    def event(self, num_sent: int) -> str:
        """The server-sent event for a reader that has `num_sent` of the samples."""
        new = self.samples[max(0, len(self.samples) - (self.num_samples - num_sent)) :]
        return f'data: {{"samples": {json.dumps(new)}, {self.picture[1:]}\n\n'


class Live:
    """What the page shows, as server-sent events: samples of the last five minutes, and the engine now.

    Args:
        llm: the model; its tokenizer makes the text of each trunk.
        metrics: times and errors of requests.
        loop: the thread on which `watch` is called.
    """

    def __init__(self, llm: LLM, metrics: Metrics, loop: EngineLoop) -> None:
        self._llm, self._metrics, self._loop = llm, metrics, loop
        self._readers: dict[asyncio.Queue[_Shot | None], _Reader] = {}
        self._began_s = time.monotonic()
        self._last = _Moment(self._began_s, EngineStats())
        self._samples: deque[dict[str, float]] = deque(maxlen=_KEPT_SAMPLES)
        self._num_samples = 0
        self._closed = False
        self._newest: dict[str | None, _Shot] = {}  # what each tenant's readers were shown last
        self._shown_s = 0.0  # when
        self._is_asked = False  # for a picture that has not been made yet
        self._token_bytes = llm.kv_cache.bytes_per_token

    async def events(self, tenant: str | None = None) -> AsyncGenerator[str, None]:
        """Events until `close`. The first has all samples that are kept, each later one those that are new. A reader
        that is too slow misses pictures, but no sample.

        Args:
            tenant: whose requests are shown; None: all.

        Raises:
            ServerFull: the tenant has too many pages open.
        """
        if sum(reader.tenant == tenant for reader in self._readers.values()) >= LIMITS.live_pages:
            raise ServerFull(f"{LIMITS.live_pages} live pages are open", _RETRY_S)
        queue: asyncio.Queue[_Shot | None] = asyncio.Queue(1)
        self._readers[queue] = _Reader(asyncio.get_running_loop(), tenant)
        self._ask(queue, tenant)
        num_sent = 0
        try:
            while not self._closed and (shot := await queue.get()) is not None:
                yield shot.event(num_sent)
                num_sent = shot.num_samples
        finally:
            del self._readers[queue]

    def _ask(self, queue: asyncio.Queue[_Shot | None], tenant: str | None) -> None:
        """Gets a new reader its first picture at once: the newest one, or one that is made for all readers who wait."""
        if tenant in self._newest and time.monotonic() - self._shown_s < _FRESH_SECONDS:
            queue.put_nowait(self._newest[tenant])
        elif not self._is_asked:
            self._is_asked = True
            self._loop.call(self._show)

    def close(self) -> None:
        """Ends every reader's events: nobody waits for a page that is open. On the event loop."""
        self._closed = True
        for queue in self._readers:
            _replace(queue, None)

    def watch(self, engine: Engine) -> None:
        """Takes a sample, and shows it to the readers. On the engine's thread."""
        self._samples.append(self._sample(engine))
        self._num_samples += 1
        self._show(engine)

    def _show(self, engine: Engine) -> None:
        """Hands each reader what its tenant may see."""
        shots: dict[str | None, _Shot] = {}
        self._is_asked = False
        readers = list(self._readers.items())
        for tenant in {reader.tenant for _, reader in readers}:
            picture = json.dumps(self._picture(engine, tenant), ensure_ascii=False)
            shots[tenant] = _Shot(tuple(self._samples), self._num_samples, picture)
        self._newest, self._shown_s = shots, time.monotonic()  # first, or who comes next would ask for another picture
        for queue, reader in readers:
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                reader.loop.call_soon_threadsafe(_replace, queue, shots[reader.tenant])

    def _sample(self, engine: Engine) -> dict[str, float]:
        """What has been counted since the last sample, `seconds` before this one. No wall clock tells when: it may be
        set while the page is open."""
        now, last = _Moment(time.monotonic(), engine.stats), self._last
        self._last = now

        def grown(name: str) -> float:
            return float(getattr(now.stats, name) - getattr(last.stats, name))

        return {
            "uptime": now.time_s - self._began_s,
            "seconds": now.time_s - last.time_s,
            "steps": grown("steps"),
            "busy_seconds": grown("busy_seconds"),
            "tokens": grown("generated_tokens"),
            "bytes_read": grown("kv_tokens_read") * self._token_bytes,
            "bytes_unshared": grown("kv_tokens_per_query") * self._token_bytes,
            "cache_queries": grown("prefix_cache_queries"),
            "cache_hits": grown("prefix_cache_hits"),
        }

    def _picture(self, engine: Engine, tenant: str | None) -> dict[str, Any]:
        """The engine now, with the forest and the list of a tenant's requests; None: of all. Times in seconds."""
        cache = engine.scheduler.cache
        first_tokens = self._metrics.first_tokens_since(time.monotonic() - _KEPT_SECONDS)
        refused, failed = self._metrics.num_errors()
        return {
            "uptime": time.monotonic() - self._began_s,
            "running": len(engine.scheduler.running),
            "waiting": self._loop.num_waiting,
            "pages": cache.pool.num_pages,
            "pages_in_use": cache.num_pages_in_use,
            "pages_cached": cache.index.num_evictable,
            "first_token_p50": float(np.percentile(first_tokens, 50)) if first_tokens else None,
            "first_token_p99": float(np.percentile(first_tokens, 99)) if first_tokens else None,
            "refused": refused,
            "failed": failed,
            "requests": self._requests(engine, tenant),
            "forest": self._forest(engine, tenant),
        }

    def _requests(self, engine: Engine, tenant: str | None) -> list[dict[str, Any]]:
        """A tenant's answers that run, then those that wait for the engine; the first ones of many."""
        now, scheduler = time.monotonic(), engine.scheduler
        states = [(one, "running") for one in scheduler.running] + [(one, "waiting") for one in scheduler.waiting]
        visible = ((one, state) for one, state in states if self._loop.is_visible(one.owner_id, tenant))
        return [
            {
                "id": request.request_id,
                "state": state,
                "prompt_tokens": request.num_prompt_tokens,
                "cached_tokens": request.num_cached_tokens or 0,
                "answer_tokens": request.num_tokens - request.num_prompt_tokens,
                "max_tokens": request.max_tokens,
                "seconds": now - request.arrival_time,
            }
            for request, state in islice(visible, _MOST_REQUESTS)
        ]

    def _forest(self, engine: Engine, tenant: str | None) -> dict[str, Any]:
        """Nodes in depth-first order: parent (-1: none), requests below, tokens, bytes, and the text at both ends."""
        tables, page_size = engine.block_tables(), engine.scheduler.cache.page_size
        rows = [row for row, one in enumerate(tables.request_ids) if self._loop.is_visible(one, tenant)]
        block_table, seq_lens = tables.block_table[rows], tables.seq_lens[rows]
        if not rows or seq_lens.max(initial=0) == 0:
            return {"requests": 0, "nodes": []}
        running = [engine.scheduler.running[row] for row in rows]
        forest = Forest(*build_forest(block_table, seq_lens, np.ones(len(rows), np.int32), page_size, 1))
        nodes = [self._node(running, forest, node) for node in range(min(len(forest.parent), _MOST_NODES))]
        return {"requests": len(forest.order), "nodes": nodes}

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


def _replace(queue: asyncio.Queue[_Shot | None], shot: _Shot | None) -> None:
    """Puts the newest one in the place of one that has not been read."""
    if queue.full():
        queue.get_nowait()
    queue.put_nowait(shot)
