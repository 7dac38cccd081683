"""Requests that arrive at an engine, each at its time: when their tokens came."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.engines.interface import Online
from benchmarks.workloads.arrivals import Arrival


@dataclass(frozen=True)
class Answer:
    """Seconds to the first token, mean seconds between tokens, and seconds to the last token."""

    ttft: float
    tpot: float
    latency: float
    output_tokens: int


async def ask(tokens_so_far: AsyncIterator[int]) -> Answer:
    """Times one request, from now on."""
    start, first, last, tokens = perf_counter(), 0.0, 0.0, 0
    async for so_far in tokens_so_far:
        last, tokens = perf_counter(), so_far
        first = first or last
    return Answer(first - start, (last - first) / max(1, tokens - 1), last - start, tokens)


async def replay(engine: Online, name: str, arrivals: Sequence[Arrival], vocabulary: int) -> dict[str, Any]:
    """Sends every request at its time; figures of all answers. vocabulary: number of tokens."""
    prompts = [arrival.prompt(vocabulary) for arrival in arrivals]
    start = perf_counter()

    async def later(number: int) -> Answer:
        await asyncio.sleep(arrivals[number].at - (perf_counter() - start))
        return await ask(engine.stream(f"{name}-{number}", prompts[number], arrivals[number].output_tokens))

    answers = await asyncio.gather(*(later(number) for number in range(len(arrivals))))
    took = perf_counter() - start
    await engine.empty_cache()
    output_tokens = sum(answer.output_tokens for answer in answers)
    return {
        "requests": len(answers), "seconds": round(took, 1), "input_tokens": sum(map(len, prompts)),
        "output_tokens": output_tokens, "output_tokens_per_s": round(output_tokens / took, 1),
        **{field: spread([asdict(answer)[field] * 1e3 for answer in answers]) for field in ("ttft", "tpot", "latency")},
    }  # fmt: skip


def spread(milliseconds: Sequence[float]) -> dict[str, float]:
    """Mean, median and P99."""
    values = np.array(milliseconds)
    figures = {"mean": values.mean(), "median": np.median(values), "p99": np.percentile(values, 99)}
    return {name: round(float(value), 2) for name, value in figures.items()}
