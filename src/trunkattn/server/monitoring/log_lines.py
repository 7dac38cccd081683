"""Lines of the log that tell how the server does, as vLLM prints them."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from trunkattn.engine.engine import Engine
from trunkattn.engine.outputs import RequestOutput
from trunkattn.engine.stats import EngineStats
from trunkattn.server.engine_loop import Submission

_LOG: Final = logging.getLogger(__name__)
_INTERVAL_S: Final = 10.0


async def report(engine: Engine, num_waiting: Callable[[], int], interval_s: float = _INTERVAL_S) -> None:
    """Logs a line every `interval_s` seconds while anything happens, and one more when nothing does. It never ends."""
    last, then, was_busy = engine.stats, time.monotonic(), False
    while True:
        await asyncio.sleep(interval_s)
        stats, now = engine.stats, time.monotonic()
        is_busy = stats.steps > last.steps or num_waiting() > 0
        if is_busy or was_busy:
            _LOG.info(status_line(engine, stats, last, now - then, num_waiting()))
        last, then, was_busy = stats, now, is_busy


def status_line(engine: Engine, stats: EngineStats, last: EngineStats, seconds: float, num_waiting: int) -> str:
    """How the engine does now, and did since `last`, `seconds` ago."""
    cache = engine.scheduler.cache
    generated = (stats.generated_tokens - last.generated_tokens) / seconds
    computed = (stats.computed_tokens - last.computed_tokens) / seconds
    queries = stats.prefix_cache_queries - last.prefix_cache_queries
    hits = stats.prefix_cache_hits - last.prefix_cache_hits
    hit_rate = f"{100 * hits / queries:.1f}%" if queries else "-"
    usage = cache.num_pages_in_use / max(1, cache.pool.num_pages)
    return (
        f"Avg prompt throughput: {max(0.0, computed - generated):.1f} tokens/s, Avg generation throughput: "
        f"{generated:.1f} tokens/s, Running: {len(engine.scheduler.running)} reqs, Waiting: {num_waiting} reqs, KV "
        f"cache usage: {100 * usage:.1f}%, Prefix cache hit rate: {hit_rate}"
    )


def request_line(name: str, submissions: Sequence[Submission], outputs: Sequence[RequestOutput], is_whole: bool) -> str:
    """What became of a request: its tokens and times.

    Args:
        name: its id.
        submissions: its prompts.
        outputs: the newest of each of its prompts that has one.
        is_whole: whether it has finished; otherwise its client went away, or it failed.
    """
    prompt = sum(len(submission.checked.token_ids) for submission in submissions)
    cached = sum(output.num_cached_tokens for output in outputs)
    answers = [answer for output in outputs for answer in output.outputs]
    tokens = sum(len(answer.token_ids) for answer in answers)
    reasons = ",".join(sorted({answer.finish_reason or "cut off" for answer in answers})) if is_whole else "cut off"
    first = [output.metrics.time_to_first_token for output in outputs]
    first_s = min((seconds for seconds in first if seconds is not None), default=None)
    now = time.monotonic()
    began = min((one.arrival_time for one in submissions if one.arrival_time is not None), default=now)
    first_text = "none" if first_s is None else f"{first_s:.3f} s"
    return (
        f"{name}: {reasons}, prompt {prompt} tokens ({cached} cached), answers {tokens} tokens, first token after "
        f"{first_text}, {now - began:.3f} s in all"
    )
