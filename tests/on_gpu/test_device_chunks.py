"""Decodes planned on the card beside prompt chunks that the host lists: right, without a wait, from one memory."""

import math
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from trunkattn import AttentionConfig, BatchAttention, Capacity, PromptChunks
from trunkattn.analysis.batch import PagedBatch
from trunkattn.integrations.captured_run import CapturedRun

from .layers import GOOD, Layer, assert_right, is_hopper, mixed, poisoned
from .watching import no_waits

pytestmark = pytest.mark.gpu


def chunks_last(batch: PagedBatch) -> tuple[PagedBatch, int]:
    """The batch with its chunks behind all other requests, and how many they are."""
    is_chunk = batch.query_lens > 3
    order = np.argsort(is_chunk, kind="stable")
    moved = replace(
        batch, block_table=batch.block_table[order], seq_lens=batch.seq_lens[order], query_lens=batch.query_lens[order]
    )
    return moved, int(is_chunk.sum())


def prompt_chunks(batch: PagedBatch, number: int) -> PromptChunks:
    first = len(batch.seq_lens) - number
    lens = (torch.from_numpy(np.ascontiguousarray(each[first:])) for each in (batch.query_lens, batch.seq_lens))
    return PromptChunks(int(batch.query_start_loc[first]), *lens)


def made(config: AttentionConfig, layer: Layer, longest: int = 3) -> BatchAttention:
    capacity = Capacity(300, 700, 128, len(layer.k_cache), longest, max_chunk_tokens=2048)
    return BatchAttention(config, "cuda", capacity)


def planned(attention: BatchAttention, layer: Layer, number: int, into: Any = None, window: int | None = None) -> Any:
    chunks = prompt_chunks(layer.batch, number) if number else None
    return attention.plan(*(table.cuda() for table in layer.step), sliding_window=window, into=into, chunks=chunks)


def run(attention: BatchAttention, plan: Any, layer: Layer) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.full_like(layer.q, math.nan)
    _, lse = attention.run(plan, layer.q, layer.k_cache, layer.v_cache, out=out, return_lse=True)
    attention.check()
    return out, lse


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("heads", [(32, 8), (32, 4), (16, 16), (16, 1)])
@pytest.mark.parametrize("window", [None, 100])
def test_decodes_and_chunks_planned_on_the_device_match_the_oracle(
    heads: tuple[int, int], several: bool, window: int | None
) -> None:
    batch, number = chunks_last(mixed(several=several))
    execution = "overlapped" if is_hopper() else "auto"
    config = replace(GOOD, num_qo_heads=heads[0], num_kv_heads=heads[1], execution=execution)
    layer = poisoned(config, batch)
    attention = made(config, layer)
    assert attention.overlaps(prompt_chunks(batch, number)) == is_hopper()
    plan = planned(attention, layer, number, window=window)
    plan.check()
    assert (int(plan.step.gpu_plan.arrays["overlapped"][1]) > 0) == is_hopper()
    assert_right(layer, *run(attention, plan, layer), sliding_window=window)


@pytest.mark.parametrize(
    "config",
    [replace(GOOD, head_dim=64), replace(GOOD, dtype=torch.float16), replace(GOOD, sinks=False, logits_soft_cap=30.0)],
)
def test_portable_kernels_agree_with_a_plan_made_on_the_host(config: AttentionConfig) -> None:
    batch, number = chunks_last(mixed())
    layer = poisoned(config, batch)
    attention = made(config, layer)
    plan = planned(attention, layer, number)
    plan.check()
    out, _ = run(attention, plan, layer)
    host = BatchAttention(config)
    whole = host.plan(*layer.step)
    wanted = host.run(whole, layer.q, layer.k_cache, layer.v_cache)
    torch.testing.assert_close(out.float(), wanted.float(), rtol=0.02, atol=0.02)


def test_one_plan_serves_every_step_and_never_waits() -> None:
    batch, number = chunks_last(mixed())
    decodes = replace(batch, query_lens=np.minimum(batch.query_lens, 1))
    layers = [poisoned(GOOD, each) for each in (decodes, batch)]
    attention = made(GOOD, layers[1])
    tables = [[table.cuda() for table in layer.step] for layer in layers]
    chunks = prompt_chunks(batch, number)
    plan = attention.plan(*tables[0])
    alone = plan.only("decodes")
    for turn in range(3):  # graphs of the planner are captured at the second
        torch.cuda.synchronize()
        with no_waits() if turn == 2 else nullcontext():
            attention.plan(*tables[1], into=plan, chunks=chunks)
            both = torch.full_like(layers[1].q, math.nan)
            attention.run(plan, layers[1].q, layers[1].k_cache, layers[1].v_cache, out=both)
            attention.plan(*tables[0], into=plan)
            one = torch.full_like(layers[0].q, math.nan)
            attention.run(alone, layers[0].q, layers[0].k_cache, layers[0].v_cache, out=one)
        assert_right(layers[1], both)
        assert_right(layers[0], one)
    attention.check()


def test_a_captured_layer_runs_steps_with_and_without_chunks() -> None:
    """A graph for each kind of step, and none for steps with more tokens than it has room for."""
    batch, number = chunks_last(mixed())
    steps = [(batch, number), (replace(batch, query_lens=np.minimum(batch.query_lens, 1)), 0)]
    layers = [poisoned(GOOD, each) for each, _ in steps]
    chunk_tokens = int(prompt_chunks(batch, number).query_lens.sum())
    attention = made(GOOD, layers[0])
    plan = planned(attention, layers[1], 0)
    plans = [plan, plan.only("decodes")]
    caches = layers[0].k_cache, layers[0].v_cache
    assert len(layers[0].q) > 700, "more than the capacity's max_query_tokens"
    for room, graphs in ((chunk_tokens, 2), (0, 1)):
        captured = CapturedRun(attention, room)
        for _ in range(3):
            for layer, (_, chunks), each in zip(layers, steps, plans, strict=True):
                planned(attention, layer, chunks, into=plan)
                out = torch.full_like(layer.q, math.nan)
                captured(each, layer.q, *caches, out)
                assert_right(replace(layer, k_cache=caches[0], v_cache=caches[1]), out)
        assert sum(graph is not None for graph in captured._graphs._graphs.values()) == graphs
