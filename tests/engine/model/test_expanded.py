"""Prompt chunks of latent attention in the expanded form: when, of what memory, and equal to the absorbed form."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from trunkattn import AttentionConfig, BatchAttention
from trunkattn.engine import LLM, SamplingParams
from trunkattn.engine.model import expanded
from trunkattn.engine.model.expanded import ChunkExpansion, ExpandedChunks, LatentSizes, saves
from trunkattn.engine.model.hf_attention import LayerAttention, LayerTensors, TrunkStep
from trunkattn.engine.model.latent import HeadWidths, LatentHeads, absorb_heads, latent_heads
from trunkattn.engine.model.packed_linear import pack_linears
from trunkattn.kv_cache.tensors import KVCache
from trunkattn.reference import paged_attention

from ..conftest import TINY_VOCAB, tiny_config

HEADS, LATENT, NOPE, ROPE, V = 4, 48, 24, 16, 20  # of the tiny DeepSeek-V3
WIDTHS = HeadWidths(NOPE + ROPE, V)
DEEPSEEK = LatentSizes(512, 64, HeadWidths(192, 128))
SM_SCALE = 0.3


def config_of(page_size: int, **options: Any) -> AttentionConfig:
    return AttentionConfig(
        num_qo_heads=HEADS,
        num_kv_heads=1,
        head_dim=LATENT + ROPE,
        page_size=page_size,
        dtype=torch.float32,
        sm_scale=SM_SCALE,
        latent_dim=LATENT,
        **options,
    )


@given(
    query_len=st.integers(1, 5000),
    context=st.integers(0, 50000),
    sharers=st.integers(1, 300),
    latent=st.integers(1, 1024),
    rope=st.integers(1, 128),
    nope=st.integers(1, 512),
    v=st.integers(1, 512),
)
def test_the_rule_compares_the_products_of_both_forms(
    query_len: int, context: int, sharers: int, latent: int, rope: int, nope: int, v: int
) -> None:
    share = context / sharers
    pairs = sum(range(context + 1, context + query_len + 1))
    scores_and_outputs = latent + rope, latent
    absorbed = pairs * sum(scores_and_outputs) + query_len * (nope * latent + latent * v)
    own_form = pairs * (nope + rope + v) + (share + query_len) * latent * (nope + v)
    if abs(absorbed - own_form) > 1e-6 * absorbed:
        assert saves(query_len, context, share, LatentSizes(latent, rope, HeadWidths(nope + rope, v))) == (
            own_form < absorbed
        )


def test_a_chunk_needs_171_queries_after_a_long_context_and_two_without_one() -> None:
    assert saves(2, 0, 0, DEEPSEEK)
    assert not saves(170, 10**6, 10**6, DEEPSEEK) and saves(171, 10**6, 10**6, DEEPSEEK)
    assert not saves(21, 10**6, 10**6 / 8, DEEPSEEK) and saves(22, 10**6, 10**6 / 8, DEEPSEEK), "eight chunks share it"
    assert not saves(5000, 0, 0, LatentSizes(64, 64, HeadWidths(192, 128))), "keys and values are wider than rows"


def planned(
    expansion: ChunkExpansion, table: np.ndarray, contexts: list[int], query_lens: list[int]
) -> ExpandedChunks | None:
    starts = np.concatenate(([0], np.cumsum(query_lens)))
    return expansion.plan(table.astype(np.int32), np.array(contexts) + query_lens, starts)


def test_chunks_that_share_a_context_expand_it_once() -> None:
    """With these sizes a long context needs 41 queries."""
    expansion, trunk = ChunkExpansion(config_of(16), WIDTHS), np.arange(40)
    table = np.stack([np.append(trunk, 40 + request) for request in range(8)])
    assert planned(expansion, table[:1], [640], [10]) is None
    found = planned(expansion, table, [640] * 8, [10] * 7 + [1])
    assert found is not None and found.pages.tolist() == list(range(47)), "not the decode's page"
    assert found.other_start_loc.tolist() == [0] * 8 + [1] and found.other_rows.tolist() == [70]
    assert found.plan.stats.kv_tokens_read < found.plan.stats.kv_tokens_per_query / 3


def test_decodes_have_no_expanded_form() -> None:
    assert planned(ChunkExpansion(config_of(16), WIDTHS), np.zeros((50, 1)), [0] * 50, [1] * 50) is None


@pytest.mark.parametrize(("tokens", "at_once"), [(16, 4), (4096, 4), (4112, 2), (8192, 2), (8208, 1), (50000, 1)])
def test_the_memory_of_keys_and_values_is_bounded(monkeypatch: pytest.MonkeyPatch, tokens: int, at_once: int) -> None:
    token_bytes = 4 * sum(WIDTHS)
    monkeypatch.setattr(expanded, "_MOST_BYTES", 4096 * HEADS * token_bytes)
    found = planned(ChunkExpansion(config_of(16), WIDTHS), np.arange(4096)[None], [0], [tokens])
    assert found is not None and len(found.keys) == len(found.values) == at_once
    assert found.keys.nbytes + found.values.nbytes <= max(expanded._MOST_BYTES, tokens * token_bytes)


class Batch:
    """A random tree of prefixes in a cache of random rows, and how many query tokens each request has."""

    def __init__(self, seed: int, page_size: int, kv_dtype: torch.dtype) -> None:
        random = np.random.default_rng(seed)
        pages = iter(random.permutation(400))
        tables: list[list[int]] = [[]]
        for _ in range(random.integers(1, 7)):
            parent = tables[random.integers(len(tables))]
            shared = parent[: random.integers(len(parent) + 1)]
            tables.append([*shared, *(next(pages) for _ in range(random.integers(1, 12)))])
        rows = tables[1:]
        most = np.array([page_size * len(row) for row in rows])
        self.table = np.zeros((len(rows), max(map(len, rows))), dtype=np.int32)
        for request, row in enumerate(rows):
            self.table[request, : len(row)] = row
        self.seq_lens = random.integers(np.maximum(1, most - page_size + 1), most + 1)
        is_chunk = random.random(len(rows)) < 0.7
        self.query_lens = np.where(is_chunk, random.integers(1, self.seq_lens + 1), 1)
        self.starts = np.concatenate(([0], self.query_lens.cumsum()))
        self.q = torch.from_numpy(random.standard_normal((self.starts[-1], HEADS, NOPE + ROPE))).float()
        self.cache = KVCache(1, 400, page_size, 1, LATENT + ROPE, kv_dtype, "cpu", LATENT)
        self.cache.layer(0)[0].copy_(torch.from_numpy(random.standard_normal((400, page_size, LATENT + ROPE))))


@pytest.mark.parametrize("packed", [True, False])
@given(
    seed=st.integers(0, 2**32 - 1),
    page_size=st.sampled_from([1, 4, 16]),
    most_bytes=st.sampled_from([0, 100_000, 1 << 20]),
    kv_dtype=st.sampled_from([torch.float32, torch.float8_e4m3fn]),
    soft_cap=st.sampled_from([None, 5.0]),
    has_sinks=st.booleans(),
)
@settings(max_examples=25)
def test_a_step_of_both_forms_equals_attention_over_expanded_rows(
    packed: bool,
    seed: int,
    page_size: int,
    most_bytes: int,
    kv_dtype: torch.dtype,
    soft_cap: float | None,
    has_sinks: bool,
) -> None:
    torch.manual_seed(seed)
    module = DeepseekV3Attention(tiny_config("deepseek_v3"), 0)
    batch = Batch(seed, page_size, kv_dtype)
    rows = batch.cache.layer(0)[0].double()
    keys, values = module.double().expand_kv(
        rows[None, ..., :LATENT].flatten(1, 2)[None], rows[None, ..., LATENT:].flatten(1, 2)[None]
    )
    keys, values = (each[0].transpose(0, 1).unflatten(0, (400, page_size)) for each in (keys, values))
    sinks = torch.randn(HEADS) if has_sinks else None
    tables = [torch.from_numpy(array.astype(np.int32)) for array in (batch.table, batch.seq_lens, batch.starts)]
    expected, _ = paged_attention(
        batch.q, keys, values, *tables, sm_scale=SM_SCALE, logits_soft_cap=soft_cap, sinks=sinks
    )

    absorb_heads(module.float())
    if packed:
        pack_linears(module)
    heads = latent_heads(module)
    assert heads is not None
    config = config_of(page_size, kv_dtype=kv_dtype, logits_soft_cap=soft_cap, sinks=has_sinks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expanded, "_MOST_BYTES", most_bytes)
        chunks = ChunkExpansion(config, WIDTHS).plan(batch.table, batch.seq_lens, batch.starts)
    if chunks is not None:
        tables[2] = torch.from_numpy(chunks.other_start_loc.astype(np.int32))
    attention = BatchAttention(config, "cpu")
    plan = attention.plan(*tables)
    plan.check()
    step = TrunkStep(attention, (None,), {None: plan}, batch.cache, torch.full((len(batch.q),), -1), chunks)
    layer = LayerAttention(HEADS, 1, LATENT + ROPE, LATENT, SM_SCALE, None, soft_cap, has_sinks, LATENT, WIDTHS)
    new = [torch.zeros(len(batch.q), 1, width) for width in (LATENT, ROPE)]
    found = step.attend(0, layer, LayerTensors(batch.q, *new, sinks, heads))
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def test_heads_expand_rows_as_the_model_does() -> None:
    attention = DeepseekV3Attention(tiny_config("deepseek_v3"), 0)
    latent, rope = torch.randn(7, LATENT), torch.randn(7, ROPE)
    expected = attention.expand_kv(latent[None, None], rope[None, None])
    heads = LatentHeads(attention)
    for some in (slice(0, 4), slice(1, 3)):
        found = torch.empty(some.stop - some.start, 7, NOPE + ROPE), torch.empty(some.stop - some.start, 7, V)
        heads.expand_rows(latent, rope, some, *found)
        for each, whole in zip(found, expected, strict=True):
            torch.testing.assert_close(each, whole[0, some])


class Counted:
    """Counts the steps of an engine that have chunks in the expanded form, and those that have other tokens besides."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps = self.mixed = 0
        plan = ChunkExpansion.plan

        def counting(*given: Any) -> ExpandedChunks | None:
            found = plan(*given)
            self.steps += found is not None
            self.mixed += found is not None and len(found.other_rows) > 0
            return found

        monkeypatch.setattr(ChunkExpansion, "plan", counting)


def prompts_of(seed: int) -> list[list[int]]:
    """Long prompts, of which some share their beginnings, and short ones."""
    random = np.random.default_rng(seed)

    def tokens(count: int) -> list[int]:
        return random.integers(1, TINY_VOCAB, count).tolist()

    trunk = tokens(random.integers(30, 200))
    lengths = random.integers(1, 120, 6)
    return [[*trunk[: random.integers(len(trunk)) if i % 3 else None], *tokens(n)] for i, n in enumerate(lengths)]


def test_answers_do_not_depend_on_how_prompts_are_chunked(
    tiny_model: Callable[[str], Any], assert_greedy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, counted = tiny_model("minicpm3"), Counted(monkeypatch)

    @given(
        seed=st.integers(0, 1),
        budget=st.integers(16, 300),
        page_size=st.sampled_from([1, 4, 16]),
        policy=st.sampled_from(["chunked_prefill", "prefill_first"]),
        max_num_seqs=st.integers(1, 8),
    )
    @settings(max_examples=8)
    def check(seed: int, budget: int, page_size: int, policy: str, max_num_seqs: int) -> None:
        llm = LLM(
            model.path,
            page_size=page_size,
            num_pages=2400 // page_size,
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
            scheduler_policy=policy,
        )
        prompts = prompts_of(seed)
        for _ in range(2):  # the second time, the prefixes are cached
            assert_greedy(model, llm.generate(prompts, SamplingParams(temperature=0, max_tokens=6)), 6)
        assert llm.engine.usage().pages_held == 0

    check()
    assert counted.steps > 20 and counted.mixed > 10


def test_what_the_engine_reads_counts_both_forms(
    tiny_model: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trunkattn.engine.llm.keys_per_token", lambda info: None)  # or the second chunk is shorter
    params, prompt = SamplingParams(temperature=0, max_tokens=1), [list(range(1, 101))]
    llm = LLM(tiny_model("deepseek_v3").path, num_pages=40, max_num_seqs=4, max_num_batched_tokens=50)
    llm.generate(prompt, params)
    assert (llm.stats.kv_tokens_read, llm.stats.kv_tokens_per_query) == (150, 150)


def test_batch_invariance_and_gpus_keep_the_absorbed_form(
    tiny_model: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    monkeypatch.setattr(ChunkExpansion, "__init__", lambda *given: made.append(given))
    LLM(tiny_model("minicpm3").path, num_pages=20, batch_invariant=True)
    assert not made
    with pytest.raises(AttributeError):  # it was not made
        LLM(tiny_model("minicpm3").path, num_pages=20).generate([[1, 2, 3]], SamplingParams(max_tokens=1))
    assert len(made) == 1
