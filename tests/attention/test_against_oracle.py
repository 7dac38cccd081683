"""Attention over random forests against the float64 oracle: every policy, shape, dtype, layout and option."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.workloads import random_forest
from trunkattn import AttentionConfig, BatchAttention
from trunkattn.config import POLICIES

from .cases import FLOAT8, LAYOUTS, SEEDS, fraction, random_step, scales

HEAD_DIMS = (8, 16, 40, 64, 80, 96, 128)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Variant:
    """Everything that a run depends on besides the batch and the numbers."""

    page_size: int
    num_kv_heads: int
    group_size: int
    head_dim: int
    head_dim_v: int | None
    dtype: torch.dtype
    policy: str
    sm_scale: float | None
    logits_soft_cap: float | None
    sinks: bool
    batch_invariant: bool

    def config(self, kv_dtype: torch.dtype | None = None) -> AttentionConfig:
        return AttentionConfig(
            num_qo_heads=self.num_kv_heads * self.group_size,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            page_size=self.page_size,
            dtype=self.dtype,
            head_dim_v=self.head_dim_v,
            kv_dtype=kv_dtype,
            sm_scale=self.sm_scale,
            logits_soft_cap=self.logits_soft_cap,
            sinks=self.sinks,
            policy=self.policy,
            batch_invariant=self.batch_invariant,
        )


VARIANTS = st.builds(
    Variant,
    page_size=st.one_of(st.integers(1, 128), st.sampled_from([528, 544, 784])),
    num_kv_heads=st.integers(1, 3),
    group_size=st.integers(1, 16),
    head_dim=st.one_of(st.sampled_from(HEAD_DIMS), st.integers(1, 128)),
    head_dim_v=st.one_of(st.none(), st.integers(1, 128)),
    dtype=st.sampled_from(DTYPES),
    policy=st.sampled_from(POLICIES),
    sm_scale=st.one_of(st.none(), st.floats(0.01, 2)),
    logits_soft_cap=st.one_of(st.none(), st.floats(0.5, 100)),
    sinks=st.booleans(),
    batch_invariant=st.booleans(),
)


def check(
    seed: int, config: AttentionConfig, max_own_tokens: int, window: int | None, layout: str, options: dict[str, Any]
) -> None:
    rng = np.random.default_rng(seed)
    batch = random_forest(
        rng, page_size=config.page_size, max_requests=6, max_own_tokens=max_own_tokens, max_query_len=12
    )
    if config.sinks:
        options = options | {"sinks": torch.from_numpy(rng.normal(0, 3, config.num_qo_heads))}
    step = random_step(seed, config, batch, window, layout, **options)
    attention = BatchAttention(config, "cpu")
    plan = step.plan(attention)
    plan.check()
    step.assert_accurate(*step.run(attention, plan))


@pytest.mark.property
@settings(max_examples=fraction(2))
@given(
    seed=SEEDS,
    variant=VARIANTS,
    max_own_tokens=st.sampled_from([10, 100, 400]),
    window=st.one_of(st.none(), st.integers(1, 300)),
    layout=st.sampled_from(LAYOUTS),
)
def test_attention_is_as_accurate_as_plain_pytorch(
    seed: int, variant: Variant, max_own_tokens: int, window: int | None, layout: str
) -> None:
    check(seed, variant.config(), max_own_tokens, window, layout, {})


@st.composite
def quantised(draw: st.DrawFn) -> tuple[AttentionConfig, dict[str, Any]]:
    """An attention whose cache has another dtype than q, and its scales."""
    variant = draw(VARIANTS)
    kv_dtype = draw(st.sampled_from((*FLOAT8, *FLOAT8, *DTYPES)))
    return variant.config(kv_dtype), scales(variant.num_kv_heads, draw)


@pytest.mark.property
@settings(max_examples=fraction(4))
@given(seed=SEEDS, case=quantised(), window=st.one_of(st.none(), st.integers(1, 300)), layout=st.sampled_from(LAYOUTS))
def test_a_cache_of_another_dtype_is_read_with_its_scales(
    seed: int, case: tuple[AttentionConfig, dict[str, Any]], window: int | None, layout: str
) -> None:
    config, options = case
    check(seed, config, 100, window, layout, options)
