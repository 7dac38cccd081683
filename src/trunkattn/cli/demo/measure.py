"""Runs a batch on an engine step by step and measures its speed, its latency, and the KV that it reads and holds."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from trunkattn.engine import LLM, EngineStats, RequestOutput, SamplingParams
from trunkattn.kv_cache.manager import CacheUsage, SlotUsage


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
        """Whether the step computed no prompt: every computed token is the newest of its request."""
        return self.computed_tokens == self.generated_tokens


@dataclass(frozen=True)
class Snapshot:
    """The cache between two steps.

    Attributes:
        positions: position in the batch of each row's request.
        block_table: [rows, most pages of a row] int32.
        seq_lens: [rows] int32, tokens whose KV is in the pages.
        usage: what the token slots are used for.
    """

    positions: list[int]
    block_table: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    usage: CacheUsage


@dataclass(frozen=True)
class BatchRun:
    """A batch from its arrival to its last token. The outputs are in order of the prompts."""

    outputs: list[RequestOutput]
    steps: list[Step]
    seconds: float
    peak: CacheUsage


@dataclass(frozen=True)
class Measurement:
    """The figures of one policy's run.

    Attributes:
        policy: the packing policy.
        decode_tokens_per_second: output tokens per second of the steps that compute no prompt.
        tokens_per_second: output tokens per second of the whole run, prompts included.
        time_to_first_token, time_per_output_token: seconds, averaged over the requests.
        kv_tokens_read: KV tokens that attention reads in a decode step on average, per KV head and layer.
        kv_bytes_read: the same in bytes, over all heads and layers.
        kv_bytes_held: KV memory at its peak, in bytes.
        kv_bytes_unshared: KV memory at the peak if each request had its own copy, in bytes.
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
    """Runs all prompts to their end with an empty prefix cache, and calls `on_step` after each step."""
    engine = llm.engine
    engine.reset_prefix_cache()
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
    """The pages of the batch's running requests. `outputs`, in order of the prompts, tell which request a row is."""
    tables = llm.engine.block_tables()
    positions = {output.request_id: position for position, output in enumerate(outputs) if output is not None}
    rows = [row for row, request_id in enumerate(tables.request_ids) if request_id in positions]
    of_rows = [positions[tables.request_ids[row]] for row in rows]
    return Snapshot(of_rows, tables.block_table[rows], tables.seq_lens[rows], llm.engine.usage())


def measurement(policy: str, run: BatchRun, llm: LLM) -> Measurement:
    """The figures of a run that has at least one decode step."""
    decode = [step for step in run.steps if step.is_decode]
    token_bytes = llm.kv_cache.bytes_per_token
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


def contiguous_usage(taken: Snapshot, outputs: Sequence[RequestOutput], max_model_len: int) -> SlotUsage:
    """What one contiguous reservation of `max_model_len` tokens per request would hold at a snapshot.

    `reserved` counts the slots that the requests fill later, which `outputs` tell because they have ended. The last
    token of an answer is never written.
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


def megabytes(count: float) -> str:
    """A number of bytes in megabytes, with one decimal below 10 MB."""
    return f"{count / 1e6:,.0f} MB" if count >= 1e7 else f"{count / 1e6:.1f} MB"


def _difference(before: EngineStats, after: EngineStats) -> Step:
    return Step(
        seconds=after.busy_seconds - before.busy_seconds,
        computed_tokens=after.computed_tokens - before.computed_tokens,
        generated_tokens=after.generated_tokens - before.generated_tokens,
        kv_tokens_read=after.kv_tokens_read - before.kv_tokens_read,
        kv_tokens_per_query=after.kv_tokens_per_query - before.kv_tokens_per_query,
    )
