"""Runs a batch on an engine step by step, and what the steps say: speed, latency, KV read, KV held."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from trunkattn.cache.kv_cache import KVCache
from trunkattn.cache.manager import CacheUsage, SlotUsage
from trunkattn.engine import LLM, EngineStats, RequestOutput, SamplingParams
from trunkattn.engine.scheduler import Scheduler


@dataclass(frozen=True)
class Step:
    """One step of the engine. KV tokens are per KV head and layer."""

    seconds: float
    computed_tokens: int
    generated_tokens: int
    kv_tokens_read: float
    kv_tokens_per_query: float

    @property
    def is_decode(self) -> bool:
        """Whether every token that was computed is the newest of its request: no prompt was computed."""
        return self.computed_tokens == self.generated_tokens


@dataclass(frozen=True)
class Snapshot:
    """The cache between two steps.

    Attributes:
        positions: which request of the batch each row is.
        block_table: [rows, most pages] int32.
        seq_lens: [rows] int32, tokens whose KV is in the pages.
        usage: what the slots are used for.
    """

    positions: list[int]
    block_table: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    usage: CacheUsage


@dataclass(frozen=True)
class BatchRun:
    """A batch from arrival to its last token; outputs in order of the prompts."""

    outputs: list[RequestOutput]
    steps: list[Step]
    seconds: float
    peak: CacheUsage


@dataclass(frozen=True)
class Measurement:
    """One policy's run in figures. Times in seconds, speeds in tokens per second, means over requests or decode steps.

    Attributes:
        decode_tokens_per_second: output tokens over the time of the steps that compute no prompt.
        tokens_per_second: output tokens over the whole run, prompts included.
        time_to_first_token, time_per_output_token: means over the requests.
        kv_tokens_read: KV tokens that attention read in a decode step, per KV head and layer, mean.
        kv_bytes_read: the same in bytes, over all heads and layers.
        kv_bytes_held, kv_bytes_unshared: KV memory when most was held, and what it would be with a copy per request.
        decode_steps, output_tokens, seconds: size of the run.
    """

    policy: str
    decode_tokens_per_second: float
    tokens_per_second: float
    time_to_first_token: float
    time_per_output_token: float
    kv_tokens_read: float
    kv_bytes_read: float
    kv_bytes_held: int
    kv_bytes_unshared: int
    decode_steps: int
    output_tokens: int
    seconds: float


OnStep = Callable[[Step, Sequence[RequestOutput | None]], None]


def run_batch(llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams, on_step: OnStep) -> BatchRun:
    """Runs all prompts to their end on an empty prefix cache; `on_step` sees each step and the outputs so far."""
    _scheduler(llm).cache.reset_prefix_cache()
    engine = llm.engine
    started = time.monotonic()
    positions = {engine.add_request(prompt, params): position for position, prompt in enumerate(prompts)}
    outputs: list[RequestOutput | None] = [None] * len(prompts)
    steps: list[Step] = []
    before, peak = engine.stats, engine.usage()
    while engine.has_unfinished:
        for output in engine.step():
            outputs[positions[output.request_id]] = output
        after, usage = engine.stats, engine.usage()
        if usage.pages_held >= peak.pages_held:
            peak = usage
        steps.append(_difference(before, after))
        before = after
        on_step(steps[-1], outputs)
    return BatchRun([output for output in outputs if output is not None], steps, time.monotonic() - started, peak)


def snapshot(llm: LLM, outputs: Sequence[RequestOutput | None]) -> Snapshot:
    """Whose pages the cache holds now; `outputs` are those of the batch, which tell which request a row is."""
    scheduler = _scheduler(llm)
    positions = {output.request_id: position for position, output in enumerate(outputs) if output is not None}
    running = [request for request in scheduler.running if request.owner_id in positions]
    pages = [scheduler.cache.pages(request.request_id) for request in running]
    table = np.zeros((len(running), max(map(len, pages), default=0)), dtype=np.int32)
    for row, own in enumerate(pages):
        table[row, : len(own)] = own
    lens = np.array([scheduler.cache.num_tokens(request.request_id) for request in running], dtype=np.int32)
    return Snapshot([positions[request.owner_id] for request in running], table, lens, llm.engine.usage())


def measurement(policy: str, run: BatchRun, llm: LLM) -> Measurement:
    """The figures of a run that has at least one decode step."""
    decode = [step for step in run.steps if step.is_decode]
    token_bytes = kv_bytes_per_token(llm)
    page_bytes = token_bytes * llm.config.page_size
    output_tokens = sum(len(output.outputs[0].token_ids) for output in run.outputs)
    read = fmean(step.kv_tokens_read for step in decode)
    return Measurement(
        policy=policy,
        decode_tokens_per_second=sum(step.generated_tokens for step in decode) / sum(step.seconds for step in decode),
        tokens_per_second=output_tokens / run.seconds,
        time_to_first_token=fmean(output.metrics.time_to_first_token or 0.0 for output in run.outputs),
        time_per_output_token=fmean(
            output.time_per_output_token for output in run.outputs if output.time_per_output_token is not None
        ),
        kv_tokens_read=read,
        kv_bytes_read=read * token_bytes,
        kv_bytes_held=run.peak.pages_held * page_bytes,
        kv_bytes_unshared=run.peak.unshared_pages * page_bytes,
        decode_steps=len(decode),
        output_tokens=output_tokens,
        seconds=run.seconds,
    )


def kv_bytes_per_token(llm: LLM) -> int:
    """Bytes of one token's keys and values over all layers."""
    config = llm.model.config
    return KVCache.bytes_per_page(
        config.num_hidden_layers, 1, config.num_key_value_heads, config.head_dim, llm.model.dtype
    )


def contiguous_usage(taken: Snapshot, outputs: Sequence[RequestOutput], max_model_len: int) -> SlotUsage:
    """What one contiguous reservation of `max_model_len` tokens per request would hold at a snapshot.

    `reserved` are the slots that the request fills later, known now that it has ended (lecture §2.2); the last token
    of an answer is never written.
    """
    assert taken.usage.contiguous is not None
    final = [
        len(outputs[position].prompt_token_ids) + len(outputs[position].outputs[0].token_ids) - 1
        for position in taken.positions
    ]
    tokens = int(taken.seq_lens.sum())
    return SlotUsage(
        tokens=tokens,
        reserved=sum(final) - tokens,
        internal=max_model_len * len(final) - sum(final),
        external=taken.usage.contiguous.external,
    )


def _difference(before: EngineStats, after: EngineStats) -> Step:
    return Step(
        seconds=after.busy_seconds - before.busy_seconds,
        computed_tokens=after.computed_tokens - before.computed_tokens,
        generated_tokens=after.generated_tokens - before.generated_tokens,
        kv_tokens_read=after.kv_tokens_read - before.kv_tokens_read,
        kv_tokens_per_query=after.kv_tokens_per_query - before.kv_tokens_per_query,
    )


def _scheduler(llm: LLM) -> Scheduler:
    """The engine has no public way to its block tables, nor to empty its prefix cache."""
    return llm.engine.scheduler
