"""`BatchAttention` with a GPU's back end under Triton's interpreter, over random forests, against the float64 oracle:
attentions, caches, cards and plans of every kind, several plans alive at once."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from benchmarks.workloads import PagedBatch, random_forest
from trunkattn import AttentionConfig, BatchAttention, Capacity, Plan, PromptChunks
from trunkattn.config import POLICIES
from trunkattn.gpu.attention import GpuBackend
from trunkattn.gpu.cards import GpuFacts, card_of
from trunkattn.gpu.kernel import refusals

from ..attention.cases import FLOAT8, LAYOUTS, SEEDS, Step, fraction, random_step, scales
from .kernel_cases import CPU

pytestmark = pytest.mark.slow

DTYPES = (torch.float32, torch.float16)  # no bfloat16: the interpreter multiplies its bit patterns
SPARE = 2  # what a capacity has more of everything than its batches need
UNWRITTEN = 7.0
# Portable kernels stand in for those of a Hopper card, which no interpreter runs, and read their lists.
CARDS = st.builds(
    GpuFacts,
    name=st.sampled_from(["NVIDIA H200", "NVIDIA A100", "NVIDIA H100 80GB HBM3"]),
    num_sms=st.sampled_from([1, 2, 8, 8, 132]),
    capability=st.sampled_from([80, 80, 90, 100]),
    l2_bytes=st.just(50 << 20),
)


@pytest.fixture(autouse=True, scope="module")
def no_device() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "device", lambda device: nullcontext())
        yield


@st.composite
def configs(draw: st.DrawFn) -> AttentionConfig:
    """Attentions with and without a latent cache."""
    options: dict[str, Any] = {
        "dtype": draw(st.sampled_from(DTYPES)),
        "kv_dtype": draw(st.sampled_from([None, None, torch.float16, *FLOAT8])),
        "page_size": draw(st.sampled_from([1, 2, 5, 16, 24, 64, 128, 528])),
        "sinks": draw(st.booleans()),
        "logits_soft_cap": draw(st.none() | st.floats(0.5, 30)),
        "policy": draw(st.just("auto") | st.sampled_from(POLICIES)),
        "batch_invariant": draw(st.booleans()),
        "execution": draw(st.sampled_from(["auto", "auto", "serial", "streams"])),
    }
    group = draw(st.sampled_from([1, 2, 3, 5, 8, 16, 20]))
    if draw(st.integers(0, 3)) == 0:
        latent, rope = draw(st.sampled_from([16, 20, 32, 130])), draw(st.sampled_from([1, 8, 16, 64]))
        options |= {"latent_dim": latent, "sm_scale": draw(st.floats(0.05, 0.5))}
        return AttentionConfig(group, 1, latent + rope, **options)
    heads, widths = draw(st.integers(1, 3)), st.sampled_from([1, 8, 16, 40, 64, 96, 128, 192])
    options |= {"head_dim_v": draw(st.none() | widths), "sm_scale": draw(st.none() | st.floats(0.01, 2))}
    return AttentionConfig(heads * group, heads, draw(widths), **options)


def on_a_gpu(config: AttentionConfig, facts: GpuFacts, capacity: Capacity | None) -> BatchAttention:
    """On a made-up card, with tensors on the CPU."""
    attention = BatchAttention(replace(config, execution="auto"), "cpu", capacity)
    attention.config, attention._backend = config, GpuBackend(config, CPU, capacity, facts=facts)
    return attention


def capacity_for(batches: list[PagedBatch], has_chunks: bool) -> Capacity:
    """The bounds of some batches, and a few of everything more."""
    tokens = max(int(batch.query_start_loc[-1]) for batch in batches)
    return Capacity(
        max_requests=max(len(batch.seq_lens) for batch in batches) + SPARE,
        max_query_tokens=tokens + SPARE,
        max_pages_per_request=max(batch.block_table.shape[1] for batch in batches) + SPARE,
        num_pages=max(batch.num_pages for batch in batches) + SPARE,
        max_query_len=max(1, *(int(batch.query_lens.max(initial=0)) for batch in batches)),
        max_chunk_tokens=tokens if has_chunks else 0,
    )


def last_chunks(batch: PagedBatch) -> PromptChunks | None:
    """The last request or two as prompt chunks; None if the last one has no query token."""
    number = next((n for n in (2, 1) if len(batch.query_lens) >= n and batch.query_lens[-n:].all()), 0)
    first = len(batch.seq_lens) - number
    lengths = (torch.from_numpy(np.ascontiguousarray(each[first:])) for each in (batch.query_lens, batch.seq_lens))
    return PromptChunks(int(batch.query_start_loc[first]), *lengths) if number else None


def checked_output(attention: BatchAttention, plan: Plan, step: Step) -> torch.Tensor:
    """The output of a plan, of as many rows as the capacity allows: the step's are accurate, no others are written."""
    config, capacity, tokens = step.config, attention.capacity, len(step.q)
    rows = tokens if capacity is None else capacity.max_query_tokens + capacity.max_chunk_tokens
    q = torch.full((rows, *step.q.shape[1:]), torch.nan, dtype=config.dtype)
    q[:tokens] = step.q
    whole = torch.full((rows, config.num_qo_heads + 1, config.value_dim), UNWRITTEN, dtype=config.dtype)
    whole = whole if tokens % 2 else whole.mT.contiguous().mT
    out = whole[:, 1:]
    pair = q if config.latent_dim is None else (q[..., : config.latent_dim], q[..., config.latent_dim :])
    _, lse = attention.run(plan, pair, *step.caches, out, return_lse=True, **step.options)
    assert bool((out[tokens:] == UNWRITTEN).all() and (whole[:, 0] == UNWRITTEN).all())
    # a GPU's tanh is 1 less an exponential
    step.assert_accurate(out[:tokens], lse[:tokens], added=config.logits_soft_cap or 0.0)
    return out[:tokens]


@pytest.mark.property
@settings(max_examples=fraction(3))
@given(
    seed=SEEDS,
    config=configs(),
    facts=CARDS,
    bounds=st.sampled_from(["none", "host", "device", "device with chunks"]),
    lengths=st.tuples(st.sampled_from([10, 60, 200]), st.sampled_from([1, 10, 40])),
    window=st.none() | st.integers(1, 200),
    data=st.data(),
)
def test_plans_are_as_accurate_as_plain_pytorch(
    seed: int,
    config: AttentionConfig,
    facts: GpuFacts,
    bounds: str,
    lengths: tuple[int, int],
    window: int | None,
    data: st.DataObject,
) -> None:
    """Two plans, and one that becomes the plan of a third batch where a capacity allows it. Each computes again what it
    computed before the others were made."""
    if "device" in bounds:  # the planner there begins launches early on later cards, which no interpreter does
        facts = facts._replace(capability=80)
    assume(not refusals(config, card_of(facts)))
    rng, (own, queries) = np.random.default_rng(seed), lengths
    sizes = {"page_size": config.page_size, "max_requests": 5, "max_own_tokens": own, "max_query_len": queries}
    batches = [random_forest(rng, **sizes) for _ in range(3)]
    has_chunks = "chunks" in bounds and not config.batch_invariant and config.latent_dim is None
    capacity = None if bounds == "none" else capacity_for(batches, has_chunks)
    attention = on_a_gpu(config, facts, capacity)
    on_device = "device" in bounds and attention._backend.plans_on_device
    options = scales(config.num_kv_heads, data.draw)
    if config.latent_dim is not None:  # a cached row has one scale
        options.pop("v_scale", None)
        options |= {"v_scale": options["k_scale"]} if "k_scale" in options else {}
    if config.sinks:
        options["sinks"] = torch.from_numpy(rng.normal(0, 3, config.num_qo_heads))
    kept: list[tuple[Plan, Step, torch.Tensor]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trunkattn.attention.all_on_gpu", lambda inputs: on_device)
        for number, batch in enumerate(batches):
            batch = batch if capacity is None else replace(batch, num_pages=capacity.num_pages)
            # blocks of a batch-invariant plan begin at fixed tokens, so they hold values from before a window
            readable, layout = None if config.batch_invariant else window, LAYOUTS[(seed + number) % len(LAYOUTS)]
            step = replace(random_step(seed, config, batch, readable, layout), window=window, options=options)
            chunks = last_chunks(batch) if on_device and has_chunks else None
            into = kept.pop()[0] if capacity is not None and len(kept) == 2 else None
            try:
                plan = attention.plan(*step.tables, window, into=into, chunks=chunks)
            except ValueError as error:  # what a policy may do to a batch
                assert config.policy != "auto" and "that a plan of this capacity holds" in str(error)
                continue
            plan.check()
            attention.check()
            kept.append((plan, step, checked_output(attention, plan, step)))
    for plan, step, out in kept:
        same = plan if plan.num_chunks else plan.only("decodes")
        found = attention.run(same, step.q, *step.caches, **step.options)
        assert torch.equal(found, out), "another output than before"
