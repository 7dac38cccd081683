"""Prompt chunks on a GPU under Triton's interpreter against the float64 oracle: pairs of features, mixed batches."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.workloads import PagedBatch, parse_tree, random_forest, tree_batch
from trunkattn import AttentionConfig
from trunkattn.gpu.portable.spec import prefill_tile
from trunkattn.gpu.tiles import PrefillTile

from ..attention.cases import Step, fraction, random_step
from .feature_cases import TABLE
from .gpu_cases import Interpreted

# All requests are prompt chunks. Small tiles have many blocks, with and without a mask, in few tokens.
SMALL, MEDIUM, LARGE = (
    PrefillTile(m, n, 4, 2, ctas_per_sm=2, above_rows=0) for m, n in ((32, 32), (64, 32), (128, 64))
)
TILES = (SMALL, MEDIUM, LARGE)
POLICIES = ("auto", "cascade", "per_query")
CONFIG = AttentionConfig(4, 2, 16, 16, torch.float32)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning"),
]  # exp2(+large) in a cap


def ragged_batch(page_size: int, several: bool) -> PagedBatch:
    """Five requests under two branches, with chunks of several tokens or many."""
    trunk, branch = (-(-tokens // page_size) * page_size for tokens in (16, 8))
    batch = tree_batch(parse_tree(f"1,2,5_{trunk},{branch},23"), page_size, row_seed=3, page_seed=4)
    query_lens = np.array([3, 1, 0, 5, 2] if several else [13, 2, 0, 9, 1], np.int32)
    return replace(batch, seq_lens=batch.seq_lens - np.array([0, 3, 0, 18, 1], np.int32), query_lens=query_lens)


def chunks_of(tree: str, query_lens: list[int], page_size: int = 16) -> PagedBatch:
    batch = tree_batch(parse_tree(tree), page_size, row_seed=0, page_seed=1)
    return replace(batch, query_lens=np.array(query_lens, np.int32))


@pytest.mark.parametrize("number", range(len(TABLE)))
def test_each_pair_of_features_is_as_accurate_as_plain_pytorch(number: int) -> None:
    """The table of the decode kernel; tiles, policies and executions take turns."""
    row, turns = TABLE[number], list(itertools.product(POLICIES, TILES))
    policy, tile = turns[number % len(turns)]
    step = row.step(ragged_batch(row.page_size, row.several))
    execution = ("serial", "streams")[number // 2 % 2]
    case = Interpreted(step, 1 + number % 3 * 4, 0, execution=execution, prefill=tile, chunk_policy=policy)
    out, lse = case.run(row.return_lse)
    if not row.return_lse:
        assert lse.isnan().all()
        lse = step.oracle()[1].float()
    step.assert_accurate(out, lse)


@pytest.mark.parametrize("group", [1, 5, 7, 12, 16])
@pytest.mark.parametrize("cache", [(2, 128), (4, 128), (2, 256, True)])
def test_any_group_fits_the_tiles_of_the_table(group: int, cache: tuple[int, int]) -> None:
    """Rows beyond the last whole group are unused."""
    config = AttentionConfig(2 * group, 2, 16, 16, torch.float32)
    step = random_step(0, config, chunks_of("1,2,3_64,32,19", [19, 1, 10]))
    step.assert_accurate(*Interpreted(step, 1, 0, prefill=replace(prefill_tile(*cache), above_rows=0)).run())


@pytest.mark.parametrize("page_size", [1, 3, 16, 48, 128, 528])
@pytest.mark.parametrize("window", [None, 5, 40])
def test_pages_and_windows_may_have_any_size(page_size: int, window: int | None) -> None:
    """A page of several blocks, a block of several pages, and pages of no power of two; ranges begin inside pages."""
    batch = chunks_of(f"1,2_{page_size * (40 // page_size + 1)},40", [40, 13], page_size)
    step = replace(random_step(1, replace(CONFIG, page_size=page_size), batch), window=window)
    policy = "per_query" if window else "cascade"
    step.assert_accurate(*Interpreted(step, 4, 0, prefill=SMALL, chunk_policy=policy).run())


def test_blocks_that_need_no_mask_begin_and_end_anywhere() -> None:
    """Chunks of a whole tile, one request after another a token shorter: the diagonal and the edge of a window are at
    every place of a block."""
    number, config = SMALL.block_n, AttentionConfig(1, 1, 16, SMALL.block_n, torch.float32)
    batch = chunks_of(f"{number}_170", [SMALL.block_m] * number, config.page_size)
    batch = replace(batch, seq_lens=batch.seq_lens - np.arange(number, dtype=np.int32))
    step = random_step(8, config, batch, window=71)
    step.assert_accurate(*Interpreted(step, 132, 0, prefill=SMALL, chunk_policy="per_query").run())


def test_a_tile_whose_rows_see_different_ranges() -> None:
    """Under a window of 5, rows of one item see nothing of each other's keys: blocks before, between and after."""
    step = replace(random_step(2, CONFIG, chunks_of("1,3_48,90", [80, 90, 1])), window=5)
    for tile in TILES:
        step.assert_accurate(*Interpreted(step, 1, 0, prefill=tile).run())


def test_a_short_chunk_behind_a_long_context_is_cut() -> None:
    case = Interpreted(random_step(3, CONFIG, chunks_of("1_2500", [20])), 16, 0, prefill=LARGE)
    assert len(case.chunks.work.items) > 4 and len(case.chunks.work.merge_queries) == 20
    case.step.assert_accurate(*case.run())


def test_chunks_behind_one_prefix_read_it_once() -> None:
    """Eight chunks of 4 tokens fill two tiles together and would take eight alone."""
    step = random_step(4, CONFIG, chunks_of("1,8_512,9", [4] * 8))
    case = Interpreted(step, 1, 0, prefill=SMALL)
    assert case.chunks.policy != "per_query"
    assert case.chunks.stats().kv_tokens_read < 3 * 512
    step.assert_accurate(*case.run())


@pytest.mark.parametrize("q_scale", [-1.0, 0.0, -1e-30])
def test_logits_may_have_any_sign(q_scale: float) -> None:
    for cap in (None, 3.0):
        config = replace(CONFIG, logits_soft_cap=cap)
        step = random_step(5, config, chunks_of("1,2_48,40", [40, 30]), q_scale=q_scale)
        step.assert_accurate(*Interpreted(step, 1, 0, prefill=SMALL).run())


def test_logits_far_apart_do_not_overflow() -> None:
    step = random_step(6, CONFIG, chunks_of("1,2_48,40", [40, 30]))
    step = replace(step, q=step.q * 100)
    out, lse = Interpreted(step, 1, 0, prefill=SMALL).run()
    assert lse.isfinite().all()
    step.assert_accurate(out, lse)


@settings(max_examples=fraction(4))
@given(seed=st.integers(0, 2**32 - 1), window=st.sampled_from([None, 1, 17, 60]))
def test_mixed_batches_are_as_accurate_as_plain_pytorch(seed: int, window: int | None) -> None:
    """Chunks, decodes, padding rows and shared prefixes, with any policy and execution."""
    rng = np.random.default_rng(seed)
    page_size = int(rng.choice([1, 4, 16, 24]))
    batch = random_forest(rng, page_size=page_size, max_requests=6, max_own_tokens=60, max_query_len=30)
    config = AttentionConfig(4, 2, 16, page_size, torch.float32, sinks=True)
    step = random_step(seed % 1000, config, batch, window, sinks=torch.tensor([0.5, -1.0, 3.0, 0.0]))
    case = Interpreted(
        step,
        int(rng.choice([1, 4, 132])),
        str(rng.choice(["16x64", "64x64+16x64", "pat"])),
        execution=str(rng.choice(["serial", "streams"])),
        prefill=replace(TILES[int(rng.integers(3))], above_rows=int(rng.choice([0, 2, 10]))),
        chunk_policy=str(rng.choice(["auto", "cascade", "pat", "relay", "per_query"])),
    )
    step.assert_accurate(*case.run())


def test_a_step_is_a_step_whatever_is_prefill() -> None:
    """The same tensors with no chunk, some and all."""
    step: Step = random_step(7, CONFIG, chunks_of("1,4_32,30", [30, 1, 12, 3]))
    items = []
    for above in (0, 40, 1000):
        case = Interpreted(step, 2, 0, prefill=replace(SMALL, above_rows=above))
        step.assert_accurate(*case.run())
        items.append(len(case.chunks.work.items) if case.division else 0)
    assert items[0] > items[1] > items[2] == 0
