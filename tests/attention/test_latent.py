"""Latent attention (MLA) through the public API, against the oracle: one cache for the keys and values of all heads."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trunkattn import AttentionConfig, BatchAttention
from trunkattn.analysis.batch import PagedBatch
from trunkattn.analysis.trees import TreeLevels, tree_batch
from trunkattn.ops.merge_states import merge_states
from trunkattn.reference import latent_attention, paged_attention

from .cases import fraction

LATENT, ROPE, SCALE = 32, 16, 24**-0.5
SHARED = tree_batch(TreeLevels((1, 3), (48, 7)), 16)
POLICIES = ("auto", "per_query", "relay", "cascade", "pat", "optimal")
DTYPES: tuple[dict[str, torch.dtype], ...] = (
    {}, {"dtype": torch.bfloat16}, {"dtype": torch.float16},
    {"dtype": torch.bfloat16, "kv_dtype": torch.float8_e4m3fn}, {"dtype": torch.float16, "kv_dtype": torch.float8_e5m2},
)  # fmt: skip


def config_of(heads: int, page_size: int = 16, **options: Any) -> AttentionConfig:
    options = {"dtype": torch.float32, "sm_scale": SCALE, "latent_dim": LATENT} | options
    return AttentionConfig(heads, 1, LATENT + ROPE, page_size, **options)


def tables_of(batch: PagedBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tables = batch.block_table, batch.seq_lens, batch.query_start_loc
    return tuple(torch.from_numpy(table) for table in tables)  # type: ignore[return-value]


def tensors_of(config: AttentionConfig, batch: PagedBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """q and a cache with NaN behind every sequence."""
    q = torch.randn(int(batch.query_start_loc[-1]), config.num_qo_heads, config.head_dim).to(config.dtype)
    cache = torch.full((batch.num_pages, batch.page_size, config.head_dim), torch.nan)
    for row, length in enumerate(batch.seq_lens.tolist()):
        token = torch.arange(length)
        page = torch.from_numpy(batch.block_table[row]).long()[token // batch.page_size]
        cache[page, token % batch.page_size] = torch.randn(length, config.head_dim)
    return q, cache.to(config.cache_dtype)


def assert_equals_oracle(
    config: AttentionConfig, batch: PagedBatch, window: int | None = None, k_scale: float | torch.Tensor = 1.0
) -> None:
    (q, cache), tables = tensors_of(config, batch), tables_of(batch)
    attention = BatchAttention(config, "cpu")
    plan = attention.plan(*tables, window)
    plan.check()
    out, lse = attention.run(plan, q, cache, return_lse=True, k_scale=k_scale)
    expected, expected_lse = latent_attention(
        q, cache.double() * k_scale, *tables, latent_dim=LATENT, sm_scale=SCALE, sliding_window=window
    )
    tolerance = 1e-5 if config.dtype == torch.float32 else 2e-2
    assert out.shape == (len(q), config.num_qo_heads, LATENT)
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), expected_lse, atol=tolerance, rtol=tolerance)


@settings(max_examples=fraction(8))
@given(
    heads=st.sampled_from([1, 8, 12, 16, 20, 32, 64, 96, 128]),
    page_size=st.sampled_from([1, 16, 48, 64]),
    nodes=st.sampled_from([(1, 4), (5,), (1, 2, 6), (2, 8)]),
    pages=st.integers(1, 3),
    own=st.integers(1, 70),
    options=st.fixed_dictionaries({"batch_invariant": st.booleans(), "policy": st.sampled_from(POLICIES)}),
    dtypes=st.sampled_from(DTYPES),
    window=st.sampled_from([None, None, 9]),
)
def test_trees_of_requests_equal_the_oracle(
    heads: int,
    page_size: int,
    nodes: tuple[int, ...],
    pages: int,
    own: int,
    options: dict[str, Any],
    dtypes: dict[str, torch.dtype],
    window: int | None,
) -> None:
    config = config_of(heads, page_size, **dtypes, **options)
    tree = TreeLevels(nodes, (*(pages * page_size for _ in nodes[1:]), own))
    assert_equals_oracle(config, tree_batch(tree, page_size), window)


@pytest.mark.parametrize("query_lens", [(1, 5, 0), (30, 1, 2)])
def test_several_query_tokens_equal_the_oracle(query_lens: tuple[int, ...]) -> None:
    batch = PagedBatch(
        SHARED.block_table, SHARED.seq_lens, np.array(query_lens, np.int32), SHARED.page_size, SHARED.num_pages
    )
    assert_equals_oracle(config_of(20), batch)


@pytest.mark.parametrize("k_scale", [0.5, torch.tensor(2.0), torch.tensor([-1.0])], ids=str)
def test_an_fp8_cache_has_one_scale_of_keys_and_values(k_scale: float | torch.Tensor) -> None:
    config = config_of(16, dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn)
    assert_equals_oracle(config, SHARED, k_scale=k_scale)
    (q, cache), attention = tensors_of(config, SHARED), BatchAttention(config, "cpu")
    plan = attention.plan(*tables_of(SHARED))
    expected = attention.run(plan, q, cache, k_scale=k_scale)
    assert torch.equal(attention.run(plan, q, cache, k_scale=k_scale, v_scale=k_scale), expected)
    for v_scale in (3.0, torch.tensor(2.0)):
        with pytest.raises(ValueError, match=r"v_scale=.*: expected None or k_scale=.*, for a row of a latent cache"):
            attention.run(plan, q, cache, k_scale=k_scale, v_scale=v_scale)


def test_the_oracle_multiplies_the_heads_as_expanded_keys_and_values_do() -> None:
    """Absorbing moves up-projections from the cached rows to the query and the output, which changes nothing."""
    (heads, nope, width), tables = (4, 8, 12), tables_of(SHARED)
    _, cache = tensors_of(config_of(heads), SHARED)
    cache = cache.double()
    up_keys = torch.randn(heads, nope, LATENT, dtype=torch.float64)
    up_values = torch.randn(heads, width, LATENT, dtype=torch.float64)
    q_nope = torch.randn(3, heads, nope, dtype=torch.float64)
    q_rope = torch.randn(3, heads, ROPE, dtype=torch.float64)
    q = torch.cat((torch.einsum("thn,hnl->thl", q_nope, up_keys), q_rope), -1)
    latent, lse = latent_attention(q, cache, *tables, latent_dim=LATENT, sm_scale=SCALE)
    rows = cache[..., :LATENT]
    of_heads = cache[..., LATENT:].unsqueeze(2).expand(-1, -1, heads, -1)
    keys = torch.cat((torch.einsum("pbl,hnl->pbhn", rows, up_keys), of_heads), -1)
    values = torch.einsum("pbl,hwl->pbhw", rows, up_values)
    expanded = paged_attention(torch.cat((q_nope, q_rope), -1), keys, values, *tables, sm_scale=SCALE)
    torch.testing.assert_close(torch.einsum("thl,hwl->thw", latent, up_values), expanded[0])
    torch.testing.assert_close(lse, expanded[1])


def test_queries_in_two_tensors_and_values_that_are_a_view_change_nothing() -> None:
    config = config_of(8)
    (q, cache), attention = tensors_of(config, SHARED), BatchAttention(config, "cpu")
    plan = attention.plan(*tables_of(SHARED))
    expected = attention.run(plan, q, cache)
    assert torch.equal(attention.run(plan, (q[..., :LATENT], q[..., LATENT:]), cache), expected)
    assert torch.equal(attention.run(plan, q, cache, cache[..., :LATENT]), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_autocast_changes_nothing(dtype: torch.dtype) -> None:
    config = config_of(4, dtype=dtype)
    q, cache = tensors_of(config, SHARED)
    attention = BatchAttention(config, "cpu")
    plan, pair = attention.plan(*tables_of(SHARED)), (q[..., :LATENT], q[..., LATENT:])
    expected = attention.run(plan, q, cache, return_lse=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = attention.run(plan, pair, cache, return_lse=True)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


def test_states_of_two_halves_of_a_cache_merge() -> None:
    config = config_of(8)
    (q, cache), (table, lens, _) = tensors_of(config, SHARED), tables_of(SHARED)
    attention = BatchAttention(config, "cpu")
    whole = attention.run(attention.plan(table, lens), q, cache)
    first = attention.run(attention.plan(table[:, :1], torch.full_like(lens, 16)), q, cache, return_lse=True)
    rest = attention.run(attention.plan(table[:, 1:].contiguous(), lens - 16), q, cache, return_lse=True)
    out, lse = merge_states(*first, *rest)
    torch.testing.assert_close(out, whole)
    sinks = torch.linspace(-3, 3, 8)
    attention = BatchAttention(config_of(8, sinks=True), "cpu")
    lowered, lse_beside_sinks = attention.run(attention.plan(table, lens), q, cache, return_lse=True, sinks=sinks)
    torch.testing.assert_close(out * torch.sigmoid(lse - sinks)[..., None], lowered)
    torch.testing.assert_close(lse, lse_beside_sinks)


@pytest.mark.parametrize(("heads", "dtype"), [(12, torch.float32), (128, torch.bfloat16)])
def test_a_batch_invariant_output_does_not_depend_on_the_batch(heads: int, dtype: torch.dtype) -> None:
    config, batch = config_of(heads, batch_invariant=True, dtype=dtype), tree_batch(TreeLevels((1, 6), (512, 90)), 16)
    (q, cache), (table, lens, _) = tensors_of(config, batch), tables_of(batch)
    lens = lens - torch.tensor([0, 7, 33, 80, 16, 1], dtype=torch.int32)
    attention = BatchAttention(config, "cpu")
    together = attention.run(attention.plan(table, lens), q, cache, return_lse=True)
    for rows in ([2], [0, 3, 5], [4, 5]):
        some = attention.run(attention.plan(table[rows], lens[rows]), q[rows], cache, return_lse=True)
        assert all(torch.equal(found, expected[rows]) for found, expected in zip(some, together, strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"latent_dim": 0}, "latent_dim=0: expected an integer of at least 1"),
        ({"latent_dim": 48}, "latent_dim=48: expected less than head_dim=48"),
        ({"head_dim_v": 16}, "head_dim_v=16: expected None or latent_dim=32"),
        ({"sm_scale": None}, "sm_scale=None: expected a number with latent_dim"),
    ],
)
def test_a_bad_configuration_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(8, **options)
    with pytest.raises(ValueError, match="num_kv_heads=2: expected 1 with latent_dim"):
        AttentionConfig(8, 2, 48, 16, torch.float32, sm_scale=SCALE, latent_dim=LATENT)


def test_bad_tensors_are_refused() -> None:
    config, plain = config_of(8), AttentionConfig(8, 1, LATENT + ROPE, 16, torch.float32)
    (q, cache), tables = tensors_of(config, SHARED), tables_of(SHARED)
    latent, separate = BatchAttention(config, "cpu"), BatchAttention(plain, "cpu")
    plan, plain_plan = latent.plan(*tables), separate.plan(*tables)
    with pytest.raises(
        ValueError,
        match=r"k_cache has shape .*: expected \(num_pages, page_size=16, head_dim=48\), rows of a latent cache",
    ):
        latent.run(plan, q, cache[..., :40])
    with pytest.raises(TypeError, match=r"k_cache is None: expected a torch\.Tensor"):
        latent.run(plan, q, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"k_cache has layout torch\.sparse_coo: expected a dense tensor"):
        latent.run(plan, q, cache.to_sparse())
    with pytest.raises(ValueError, match=r"expected \(num_pages, page_size=16, head_dim=48\), rows of a latent cache"):
        latent.run(plan, q, cache.unsqueeze(2))
    with pytest.raises(ValueError, match="v_cache is another tensor than the first 32 columns of k_cache"):
        latent.run(plan, q, cache, cache[..., :LATENT].clone())
    with pytest.raises(ValueError, match="v_cache is another tensor"):
        latent.run(plan, q, cache, cache[..., ROPE:])
    with pytest.raises(
        ValueError,
        match=r"q\[1\] has shape \(3, 8, 15\): expected \(num_query_tokens=3, num_qo_heads=8, head_dim - lat",
    ):
        latent.run(plan, (q[..., :LATENT], q[..., 33:]), cache)
    with pytest.raises(
        ValueError,
        match=r"q\[0\] has shape \(3, 8, 48\): expected \(num_query_tokens=3, num_qo_heads=8, latent_dim=32\)",
    ):
        latent.run(plan, (q, q[..., LATENT:]), cache)
    for queries, name in (([q, q], "a list of 2"), ((q, q, q), "a tuple of 3"), ((q,), "a tuple of 1")):
        with pytest.raises(TypeError, match=f"q is {name}: expected a tensor or a tuple of latent and rope columns"):
            latent.run(plan, queries, cache)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="v_cache is missing: expected a tensor, or a configuration with latent_dim"):
        separate.run(plain_plan, q, cache.unsqueeze(2))
    with pytest.raises(TypeError, match="q is a pair: expected one tensor, for the configuration has no latent_dim"):
        separate.run(plain_plan, (q[..., :LATENT], q[..., LATENT:]), cache.unsqueeze(2), cache.unsqueeze(2))
