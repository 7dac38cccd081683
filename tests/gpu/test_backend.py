"""`GpuBackend` as a whole without a GPU: Triton's interpreter runs its kernels on CPU tensors, on a made-up card."""

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.workloads import parse_tree, tree_batch
from trunkattn import Capacity
from trunkattn.gpu.attention import GpuBackend
from trunkattn.planner.work_list import UNLIMITED

from .backend_cases import CONFIG, caches, expected, plan, run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("pretended_gpu")]

TREE = tree_batch(parse_tree("1,2,9_48,32,21"), 16, row_seed=0, page_seed=1)


@pytest.mark.parametrize("policy", ["auto", "pat", "per_query"])
@pytest.mark.parametrize("window", [None, 30])
def test_a_batch_of_decodes_and_chunks_equals_the_oracle(policy: str, window: int | None) -> None:
    batch = replace(TREE, query_lens=np.array([1, 3, 1, 0, 7, 1, 1, 2, 1], np.int32))
    backend = GpuBackend(replace(CONFIG, policy=policy, sinks=True), torch.device("cpu"))
    step = plan(backend, batch, window=UNLIMITED if window is None else window)
    step.check()
    q, kv, sinks = torch.randn(step.num_query_tokens, 4, 32), caches(batch, CONFIG), torch.randn(4)
    out, lse = run(backend, step, q, kv, sinks=sinks)
    want, want_lse = expected(batch, q, kv, sliding_window=window, sinks=sinks)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=1e-5)


@pytest.mark.parametrize("policy", ["auto", "pat"])
def test_launches_on_streams_equal_the_oracle(policy: str) -> None:
    backend = GpuBackend(replace(CONFIG, policy=policy, execution="streams", sinks=True), torch.device("cpu"))
    for tree in ("1,2,9_48,32,21", "1_300"):  # the second is cut into parts, which are merged
        batch = tree_batch(parse_tree(tree), 16, row_seed=0, page_seed=1)
        step, kv, sinks = plan(backend, batch), caches(batch, CONFIG), torch.randn(4)
        step.check()
        q = torch.randn(len(batch.seq_lens), 4, 32)
        for _ in range(2):  # the second run finds the counters as the first found them
            out, lse = run(backend, step, q, kv, sinks=sinks)
            want, want_lse = expected(batch, q, kv, sinks=sinks)
            torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-5)
            torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=1e-5)


def test_scales_multiply_queries_keys_and_values() -> None:
    backend = GpuBackend(CONFIG, torch.device("cpu"))
    step, q, (k, v) = plan(backend, TREE), torch.randn(9, 4, 32), caches(TREE, CONFIG)
    k_scale, v_scale = torch.tensor([0.5, 2.0]), torch.tensor(3.0)
    out, _ = run(backend, step, q, (k, v), q_scale=0.25, k_scale=k_scale, v_scale=v_scale)
    want, _ = expected(TREE, q * 0.25, (k * k_scale[:, None], v * 3))
    torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-5)


def test_q_and_out_may_have_any_strides() -> None:
    """Also of an output that was made in inference mode."""
    backend = GpuBackend(CONFIG, torch.device("cpu"))
    step, q, kv = plan(backend, TREE), torch.randn(9, 4, 32), caches(TREE, CONFIG)
    strided = q.transpose(0, 2).contiguous().transpose(0, 2)
    with torch.inference_mode():
        out = torch.full_like(strided, math.nan)
    assert strided.stride(2) != 1 and out.stride(2) != 1
    run(backend, step, strided, kv, out=out)
    torch.testing.assert_close(out.double(), expected(TREE, q, kv)[0], rtol=0, atol=1e-5)


def test_heads_farther_apart_than_32_bits_count() -> None:
    """Memory that nothing is written to is only promised, and takes no room."""
    config = replace(CONFIG, dtype=torch.float16)
    backend = GpuBackend(config, torch.device("cpu"))
    q, kv = torch.randn(9, 4, 32).half(), tuple(cache.half() for cache in caches(TREE, config))
    far, out = (torch.empty(3 * 2**30 + 512, dtype=torch.float16).as_strided(q.shape, (32, 2**30, 1)) for _ in "qo")
    run(backend, plan(backend, TREE), far.copy_(q), kv, out=out)
    want = expected(TREE, q.float(), tuple(cache.float() for cache in kv))[0]
    torch.testing.assert_close(out.double(), want, rtol=0, atol=2e-3)


@pytest.mark.parametrize("merges_apart", [False, True])
@pytest.mark.parametrize("strides", [(1 << 15, 256, 64, 1), (1024, 64, 1 << 30, 1)], ids=["pages", "heads"])
def test_pages_and_tokens_farther_apart_than_32_bits_count(merges_apart: bool, strides: tuple[int, ...]) -> None:
    """Of decodes, prompt chunks and merges, in pages whose numbers 16 bits do not count, nor those of their tokens."""
    config = replace(CONFIG, num_qo_heads=8, num_kv_heads=4, dtype=torch.float16, policy="cascade")
    batch = replace(TREE, query_lens=np.array([1, 3, 1, 0, 40, 1, 1, 2, 1], np.int32))
    memory = torch.empty((3 << 30) + (1 << 27), dtype=torch.float16)
    kv = tuple(cache.half() for cache in caches(batch, config))
    both = memory.as_strided((70_000 + len(kv[0]), *kv[0].shape[1:3], 64), strides, 1024)
    far = both[..., :32], both[..., 32:]
    for cache, near in zip(far, kv, strict=True):
        cache[70_000:] = near
    q, tokens = torch.randn(50, 8, 32).half(), (60 << 20, 32, 1)
    far_q, out = (memory.as_strided(q.shape, tokens, begin) for begin in (0, 256))
    backend = GpuBackend(config, torch.device("cpu"), Capacity(9, 50, 7, 70_100) if merges_apart else None)
    step = plan(backend, replace(batch, block_table=batch.block_table + 70_000))
    assert step.num_chunks == 1 and (len(step.tiles.tile_list().merge_queries) > 0) == merges_apart
    run(backend, step, far_q.copy_(q), far, out=out)
    want = expected(batch, q.float(), tuple(cache.float() for cache in kv))[0]
    torch.testing.assert_close(out.double(), want, rtol=0, atol=2e-3)


def pieces(step: Any, query: int) -> list[tuple[int, tuple[int, ...]]]:
    """(slot after the query's first, positions of the segments) of each of a query's pieces, in order."""
    tiles, found = step.tiles.tile_list(), []
    for start, full, end, begin, stop in tiles.items:
        assert full == start, "a segment that is marked full takes another loop"
        for entry in range(begin, stop):
            if tiles.queries[entry] == query:
                found.append((int(tiles.partial_slots[entry]), tuple(tiles.segments[start:end, 2].tolist())))
    first = min(slot for slot, _ in found)
    return sorted((slot - first, positions) for slot, positions in found)


def test_a_batch_invariant_request_is_cut_alike_in_any_batch() -> None:
    """The same pieces, blocks and order of merging in one kind of tile; tests/on_gpu compares the bits, on a card."""
    config = replace(CONFIG, batch_invariant=True)
    batch = tree_batch(parse_tree("1,2,6_512,32,21"), 16, row_seed=0)
    backend = GpuBackend(config, torch.device("cpu"))
    together = plan(backend, batch)
    q, kv = torch.randn(6, 4, 32), caches(batch, config)
    torch.testing.assert_close(run(backend, together, q, kv)[0].double(), expected(batch, q, kv)[0], rtol=0, atol=1e-5)
    for rows in ([2], [0, 5], [1, 3, 4]):
        some = plan(backend, batch, rows)
        assert len(some.tiles.tile_list().counts) == len(together.tiles.tile_list().counts) == 3
        for query, row in enumerate(rows):
            assert pieces(some, query) == pieces(together, row)
            assert len(pieces(some, query)) > 1


@pytest.mark.parametrize("window", [1, 100, 600])
def test_batch_invariant_windows_equal_the_oracle(window: int) -> None:
    """Items of several requests begin where the first of them sees something, those of one where it does."""
    config = replace(CONFIG, batch_invariant=True, sinks=True)
    batch = tree_batch(parse_tree("1,2,6_512,96,21"), 16, row_seed=0)
    batch = replace(batch, seq_lens=batch.seq_lens - np.array([0, 7, 0, 20, 64, 0], np.int32))
    backend, kv = GpuBackend(config, torch.device("cpu")), caches(batch, config)
    q, sinks = torch.randn(6, 4, 32), torch.randn(4)
    want, _ = expected(batch, q, kv, sliding_window=window, sinks=sinks)
    for rows in ([0, 1, 2, 3, 4, 5], [2], [0, 5], [1, 3, 4]):
        step = plan(backend, batch, rows, window)
        step.check()
        out, _ = run(backend, step, q[rows], kv, sinks=sinks)
        torch.testing.assert_close(out.double(), want[rows], rtol=0, atol=1e-5)


def test_stats_tell_what_is_read_and_why() -> None:
    backend = GpuBackend(CONFIG, torch.device("cpu"))
    stats = plan(backend, TREE).stats()
    assert stats.kv_tokens_per_query == int(TREE.seq_lens.sum())
    assert 48 + 2 * 32 + 9 * 21 <= stats.kv_tokens_read <= stats.kv_tokens_per_query
    assert sum(stats.tiles.values()) == stats.num_work_items
    assert stats.policy in stats.reason and "NVIDIA H200" in stats.reason


def test_a_growing_batch_gives_the_plan_of_a_fresh_back_end() -> None:
    backend = GpuBackend(CONFIG, torch.device("cpu"))
    for grown in range(4):
        batch = replace(TREE, seq_lens=TREE.seq_lens + np.int32(grown))
        lists = [plan(each, batch).tiles.tile_list() for each in (backend, GpuBackend(CONFIG, torch.device("cpu")))]
        for name in (
            "items",
            "segments",
            "queries",
            "partial_slots",
            "merge_slots",
            "counts",
            "merge_queries",
            "merge_ranges",
        ):
            assert np.array_equal(*(getattr(each, name) for each in lists)), name


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("before", [1, 3, 17])
def test_a_key_that_is_not_finite_reaches_nobody_from_before_a_window(batch_invariant: bool, before: int) -> None:
    """Without batch invariance, nor does a value. With it, blocks begin at fixed tokens, and only logits are masked."""
    batch = tree_batch(parse_tree("1,3_160,75"), 16, row_seed=0, page_seed=1)
    config = replace(CONFIG, batch_invariant=batch_invariant)
    q, (k, v) = torch.randn(3, 4, 32), caches(batch, config)
    want, _ = expected(batch, q, (k, v), sliding_window=30)
    hidden = int(batch.seq_lens[0]) - 30 - before
    slot = int(batch.block_table[0][hidden // 16]), hidden % 16
    for cache in (k,) if batch_invariant else (k, v):
        cache[slot] = math.nan
    backend = GpuBackend(config, torch.device("cpu"))
    out, _ = run(backend, plan(backend, batch, window=30), q, (k, v))
    torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("policy", ["auto", "pat"])
def test_logits_may_lie_near_the_end_of_float32(policy: str) -> None:
    """Decodes, prompt chunks and merges: no first maximum is above a logit."""
    batch = replace(TREE, query_lens=np.array([1, 3, 1, 0, 40, 1, 1, 2, 1], np.int32))
    backend, (k, v) = GpuBackend(replace(CONFIG, policy=policy), torch.device("cpu")), caches(batch, CONFIG)
    step = plan(backend, batch)
    assert step.num_chunks == 1
    q = torch.zeros(step.num_query_tokens, 4, 32)
    q[..., 0] = 1e17
    k.mul_(0)[..., 0] += -1e15 * (1 + torch.arange(k[..., 0, 0].numel()).view(*k.shape[:2], 1))
    out, lse = run(backend, step, q, (k, v))
    want, want_lse = expected(batch, q, (k, v))
    assert bool((want_lse < -1e31).all())
    torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=0)


@pytest.mark.parametrize("policy", ["auto", "pat"])
def test_the_lse_of_a_query_that_is_not_a_number_is_none_either(policy: str) -> None:
    """A finite one would hide the NaN where states are merged."""
    batch = replace(TREE, query_lens=np.array([1, 3, 1, 0, 40, 1, 1, 2, 1], np.int32))
    backend, kv = GpuBackend(replace(CONFIG, policy=policy), torch.device("cpu")), caches(batch, CONFIG)
    step = plan(backend, batch)
    q = torch.randn(step.num_query_tokens, 4, 32)
    clean, clean_lse = run(backend, step, q, kv)
    for token in (0, 5 + 20):  # of a decode and of a chunk
        bad = q.clone()
        bad[token, 1] = math.nan
        out, lse = run(backend, step, bad, kv)
        hit = torch.zeros(lse.shape, dtype=torch.bool)
        hit[token, 1] = True
        assert torch.equal(lse.isnan(), hit) and torch.equal(out.isnan(), hit[..., None].expand_as(out))
        assert torch.equal(out[~hit], clean[~hit]) and torch.equal(lse[~hit], clean_lse[~hit])


def test_scales_may_be_any_real_numbers() -> None:
    """torch multiplies neither by fractions nor by integers of more than 64 bits."""
    backend = GpuBackend(CONFIG, torch.device("cpu"))
    step, q, kv = plan(backend, TREE), torch.randn(9, 4, 32), caches(TREE, CONFIG)
    out, _ = run(backend, step, q, kv, k_scale=Fraction(1, 2), v_scale=2**70)
    same, _ = run(backend, step, q, kv, k_scale=0.5, v_scale=2.0**70)
    assert torch.equal(out, same)


def places_in_blocks(backend: GpuBackend, step: Any, query: int, position: int, window: int) -> list[list[int]]:
    """[partial slot after the query's first, token, place in its block] of each key that a query sees."""
    tiles, rule, found = step.tiles.tile_list(), backend._planner.rule, []
    for start, _, end, begin, stop in tiles.items.tolist():
        for entry in np.flatnonzero(tiles.queries[begin:stop] == query) + begin:
            for nth, (_, packed, first) in enumerate(tiles.segments[start:end].tolist()):
                for token in range(max(first, position - window + 1), min(first + (packed >> 16), position + 1)):
                    place = nth * rule.segment_size + token - first
                    found.append([int(tiles.partial_slots[entry]), token, place % rule.tiles[0].block_tokens])
    lowest = min(slot for slot, _, _ in found)
    return sorted([slot - lowest, token, place] for slot, token, place in found)


@pytest.mark.parametrize("policy", ["auto", "cascade", "per_query"])
@pytest.mark.parametrize("window", [UNLIMITED, 100, 300])
@pytest.mark.parametrize("page_size", [16, 48])
def test_a_batch_invariant_request_is_cut_alike_under_every_window(policy: str, window: int, page_size: int) -> None:
    """Where the window of one request begins, the keys of others keep their places in their blocks."""
    config = replace(CONFIG, policy=policy, batch_invariant=True, page_size=page_size)
    batch = tree_batch(parse_tree("1,2,4_576,96,21"), page_size, row_seed=0, page_seed=1)
    lens, counts = batch.seq_lens - np.array([0, 7, 0, 20], np.int32), np.array([1, 3, 1, 1], np.int32)
    batch = replace(batch, seq_lens=lens, query_lens=counts)
    capacity = Capacity(4, 6, batch.block_table.shape[1], batch.num_pages)
    backend, kv = GpuBackend(config, torch.device("cpu"), capacity), caches(batch, config)
    step, q = plan(backend, batch, window=window), torch.randn(6, 4, 32)
    step.check()
    want, _ = expected(batch, q, kv, sliding_window=window)
    torch.testing.assert_close(run(backend, step, q, kv)[0].double(), want, rtol=0, atol=1e-5)
    for row in range(4):
        alone, first = plan(backend, batch, [row], window), int(batch.query_start_loc[row])
        for query in range(int(counts[row])):
            position = int(lens[row] - counts[row]) + query
            own = places_in_blocks(backend, alone, query, position, window)
            assert own == places_in_blocks(backend, step, first + query, position, window)
