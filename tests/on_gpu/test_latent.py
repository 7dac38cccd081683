"""Latent attention through `BatchAttention` on a card, of DeepSeek-V3's rows; an H100 takes the Hopper kernel."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from trunkattn import AttentionConfig, BatchAttention, Capacity
from trunkattn.analysis.batch import PagedBatch
from trunkattn.analysis.trees import TreeLevels, tree_batch
from trunkattn.gpu import attention as gpu_attention
from trunkattn.gpu.cards import card_at
from trunkattn.gpu.kernel import Work, choose
from trunkattn.gpu.mla import spec
from trunkattn.reference import latent_attention

pytestmark = pytest.mark.gpu
SCALE = 192**-0.5
SHARED, APART = TreeLevels((1, 2, 9), (384, 128, 77)), TreeLevels((5,), (700,))
MANY = TreeLevels((6,), (150,))
HOPPER_CACHES = (None, torch.float8_e4m3fn)  # what the Hopper kernel reads, None for 16 bits


def config_of(heads: int, page_size: int = 64, **options: Any) -> AttentionConfig:
    options = {"dtype": torch.bfloat16, "sm_scale": SCALE, "latent_dim": spec.LATENT_DIM} | options
    return AttentionConfig(heads, 1, spec.LATENT_DIM + spec.ROPE_DIM, page_size, **options)


def tables_of(batch: PagedBatch, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    arrays = (batch.block_table, batch.seq_lens, batch.query_start_loc)
    return tuple(torch.from_numpy(array).to(device) for array in arrays)


def tensors_of(config: AttentionConfig, batch: PagedBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """q and a cache with NaN behind every sequence."""
    q = torch.randn(int(batch.query_start_loc[-1]), config.num_qo_heads, config.head_dim, device="cuda")
    cache = torch.full((batch.num_pages, batch.page_size, config.head_dim), math.nan, device="cuda")
    for row, length in enumerate(batch.seq_lens.tolist()):
        token = torch.arange(length)
        page = torch.from_numpy(batch.block_table[row]).long()[token // batch.page_size]
        cache[page, token % batch.page_size] = torch.randn(length, config.head_dim, device="cuda")
    return q.to(config.dtype), cache.to(config.cache_dtype)


def assert_close(out: torch.Tensor, lse: torch.Tensor, want: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Both, to what 16-bit products give."""
    size = float(want[0].square().mean().sqrt())
    assert float((out.double() - want[0]).abs().max()) < 0.08 * max(size, float(want[0].abs().max()) / 4)
    torch.testing.assert_close(lse.double(), want[1], rtol=1e-3, atol=1e-3)


def check(
    config: AttentionConfig,
    batch: PagedBatch,
    window: int | None = None,
    k_scale: float = 1.0,
    q_scales: torch.Tensor | None = None,
) -> None:
    """Against the oracle, twice with the same bits. q_scales: of each head's queries."""
    attention, (q, cache) = BatchAttention(config, "cuda"), tensors_of(config, batch)
    if q_scales is not None:
        q *= q_scales[:, None].to(q)
    plan = attention.plan(*tables_of(batch), window)
    plan.check()
    out = torch.full((len(q), config.num_qo_heads, spec.LATENT_DIM), math.nan, dtype=config.dtype, device="cuda")
    _, lse = attention.run(plan, q, cache, None, out, return_lse=True, k_scale=k_scale)
    options = {"latent_dim": spec.LATENT_DIM, "sm_scale": SCALE, "sliding_window": window}
    assert_close(out, lse, latent_attention(q, cache.double() * k_scale, *tables_of(batch), **options))
    assert torch.equal(attention.run(plan, q, cache, k_scale=k_scale), out)


@pytest.mark.parametrize("kv_dtype", HOPPER_CACHES)
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("heads", [8, 12, 16, 20, 64, 96, 128])
@pytest.mark.parametrize("tree", [SHARED, APART], ids=str)
def test_decodes_equal_the_oracle(tree: TreeLevels, heads: int, page_size: int, kv_dtype: torch.dtype | None) -> None:
    check(config_of(heads, page_size, kv_dtype=kv_dtype), tree_batch(tree, page_size, page_seed=1))


@pytest.mark.parametrize("kv_dtype", HOPPER_CACHES)
@pytest.mark.parametrize("window", [None, 100])
def test_several_query_tokens_and_windows_equal_the_oracle(window: int | None, kv_dtype: torch.dtype | None) -> None:
    batch = replace(tree_batch(SHARED, 64, page_seed=1), query_lens=np.array([1, 3, 0, 60, 1, 7, 1, 1, 2], np.int32))
    check(config_of(16, kv_dtype=kv_dtype), batch, window)


def test_a_cache_of_8_bits_has_not_a_number() -> None:
    """A row that is not a number reaches the requests that see it, and no others."""
    config, batch = config_of(16, kv_dtype=torch.float8_e4m3fn), tree_batch(APART, 64)
    q, cache = tensors_of(config, batch)
    cache[int(batch.block_table[2, 3]), 5] = math.nan
    attention = BatchAttention(config, "cuda")
    out = attention.run(attention.plan(*tables_of(batch)), q, cache)
    assert isinstance(out, torch.Tensor)
    assert out.isnan().any(-1).any(-1).tolist() == [row == 2 for row in range(len(q))]


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": torch.float16},
        {"page_size": 8},
        {"kv_dtype": torch.float8_e5m2},
        {"dtype": torch.float16, "kv_dtype": torch.float8_e4m3fn},
        {"batch_invariant": True},
        {"logits_soft_cap": None, "execution": "serial"},
    ],
    ids=str,
)
def test_other_attentions_equal_the_oracle(options: dict[str, Any]) -> None:
    config = config_of(16, options.get("page_size", 64), **{k: v for k, v in options.items() if k != "page_size"})
    check(config, tree_batch(SHARED, config.page_size, page_seed=1))


@pytest.mark.parametrize("heads", [16, 128])
def test_a_batch_invariant_output_does_not_depend_on_the_batch(heads: int) -> None:
    config, batch = config_of(heads, batch_invariant=True), tree_batch(SHARED, 64, page_seed=1)
    attention, (q, cache) = BatchAttention(config, "cuda"), tensors_of(config, batch)
    table, lens = tables_of(batch)[:2]
    lens = lens - torch.arange(len(lens), dtype=torch.int32)
    together = attention.run(attention.plan(table, lens), q, cache)
    for rows in ([3], [0, 5, 8], list(range(0, 9, 2))):
        some = attention.run(attention.plan(table[rows], lens[rows]), q[rows], cache)
        assert torch.equal(some, together[rows])


@pytest.mark.parametrize("kv_dtype", HOPPER_CACHES)
@pytest.mark.parametrize("k_scale", [2.0, -1.0])
def test_the_scale_of_the_rows(k_scale: float, kv_dtype: torch.dtype | None) -> None:
    check(config_of(16, kv_dtype=kv_dtype), tree_batch(SHARED, 64, page_seed=1), k_scale=k_scale)


@pytest.mark.parametrize("kv_dtype", HOPPER_CACHES)
def test_queries_of_any_size(kv_dtype: torch.dtype | None) -> None:
    """float16, in which rows of 8 bits are multiplied, has fewer exponents than bfloat16."""
    scales = 2.0 ** torch.arange(-110, -14, 6, device="cuda")
    check(config_of(16, kv_dtype=kv_dtype), tree_batch(SHARED, 64, page_seed=1), k_scale=2.0**20, q_scales=scales)
    check(config_of(16, kv_dtype=kv_dtype), tree_batch(SHARED, 64), k_scale=2.0**-60, q_scales=2.0**75 * scales)


@pytest.mark.parametrize("kv_dtype", HOPPER_CACHES)
def test_an_h100_takes_the_hopper_kernel(kv_dtype: torch.dtype | None) -> None:
    if not card_at("cuda").model.runs_hopper_kernels:
        pytest.skip("another card")
    batch = tree_batch(SHARED, 64)
    plan = BatchAttention(config_of(16, kv_dtype=kv_dtype), "cuda").plan(*tables_of(batch))
    assert "portable" not in plan.stats.reason


def test_one_graph_serves_batches_that_are_planned_on_the_device() -> None:
    config, capacity = config_of(16), Capacity(16, 16, max_pages_per_request=16, num_pages=100, max_query_len=1)
    attention = BatchAttention(config, "cuda", capacity)
    batches = [tree_batch(tree, 64, page_seed=1) for tree in (SHARED, APART)]
    q, cache = tensors_of(config, replace(batches[0], num_pages=100))
    cache = torch.randn(100, 64, config.head_dim, device="cuda").to(config.dtype)
    plan = attention.plan(*(table.cuda() for table in tables_of(batches[0])[:2]))
    out = attention.run(plan, q, cache)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention.run(plan, q, cache, None, out)
    for batch in batches:
        attention.plan(*tables_of(batch, "cuda")[:2], into=plan)
        graph.replay()
        count = len(batch.seq_lens)
        options = {"latent_dim": spec.LATENT_DIM, "sm_scale": SCALE}
        want, _ = latent_attention(q[:count], cache, *tables_of(batch)[:2], **options)
        torch.testing.assert_close(out[:count].double(), want, rtol=0.1, atol=0.05)
    attention.check()


@pytest.mark.parametrize("query_len", [1, 2])
@pytest.mark.parametrize(
    ("heads", "page_size", "tree", "kv_dtype"),
    [
        (16, 16, TreeLevels((1, 4, 20), (96, 48, 40)), None),
        (12, 64, TreeLevels((1, 9), (320, 77)), None),
        (128, 64, MANY, None),
        (12, 16, TreeLevels((1, 9), (320, 77)), torch.float8_e4m3fn),
        (128, 64, MANY, torch.float8_e4m3fn),
    ],
    ids=["three levels", "groups of 12", "several items a CTA", "8 bits", "several items of 8 bits a CTA"],
)
def test_for_the_sanitizer(
    monkeypatch: pytest.MonkeyPatch,
    heads: int,
    page_size: int,
    tree: TreeLevels,
    kv_dtype: torch.dtype | None,
    query_len: int,
) -> None:
    """Queries of one token, whose blocks are seen whole, and of two, which are masked. MANY is computed by four CTAs:
    a batch that gives each of a card's CTAs several items takes the checker of races more than four minutes."""
    config, card = config_of(heads, page_size, kv_dtype=kv_dtype), card_at("cuda")
    if tree == MANY:
        few = replace(card, facts=card.facts._replace(num_sms=4))
        monkeypatch.setattr(gpu_attention, "card_of", lambda facts: few)
    kernel = choose(Work.LATENT, config, card).kernel
    assert kernel and (kernel.name == spec.DECODE) == card.model.runs_hopper_kernels
    batch = tree_batch(tree, page_size, page_seed=1)
    check(config, replace(batch, query_lens=np.full(len(batch.seq_lens), query_len, np.int32)))
