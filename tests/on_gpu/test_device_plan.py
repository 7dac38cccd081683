"""Planning on a real card: the bits of the host at real sizes, in a captured graph, without waiting for the device."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.workloads import parse_tree, random_forest, tree_batch
from trunkattn import AttentionConfig, BatchAttention
from trunkattn.config import Capacity
from trunkattn.gpu.portable.spec import INVARIANT_TILE
from trunkattn.planner.planner import StepTables
from trunkattn.planner.tiles.batch_invariant import invariant_limits, invariant_list
from trunkattn.planner.tiles.candidates import TilingRule, candidates
from trunkattn.planner.work_list import UNLIMITED

from ..gpu.device_cases import ROOMY, Planned, capacity_for, prepare
from ..gpu.kernel_cases import make_card
from ..planner.specs import as_batch, forest_of
from ..planner.tile_cases import arrays, make_rule
from .layers import ragged
from .watching import no_waits

pytestmark = pytest.mark.gpu
LIMITS = replace(ROOMY, segments=1 << 21)
TREES = ("1,8,256_4096,2048,2048", "256_8192", "1,256_256,32", "1,64_8000,150", "1_8000", "1,4,16,250_1024,256,128,32")
WINDOWS = (UNLIMITED, 777)


def prepared(rule: TilingRule, candidate: int | None = None, tokens: int = 256) -> Planned:
    """For 256 requests of 512 pages."""
    properties = torch.cuda.get_device_properties("cuda")
    card = make_card(properties.multi_processor_count, 10 * properties.major)
    return prepare(rule, Capacity(256, tokens, 512, 1 << 20), candidate, LIMITS, "cuda", card)


def batch_of(tree: str, window: int = UNLIMITED) -> StepTables:
    return as_batch(tree_batch(parse_tree(tree), 16, row_seed=0, page_seed=0), window)


@pytest.mark.parametrize("group_size", [1, 4, 5, 8])
@pytest.mark.parametrize("window", WINDOWS)
def test_the_bits_of_the_host(group_size: int, window: int) -> None:
    planned = prepared(make_rule(group_size, 16, 132, num_kv_heads=8))
    for tree in TREES:
        batch = batch_of(tree, window)
        planned.fill(batch)
        assert planned.errors == []
        planned.assert_equals_host(batch)


@pytest.mark.parametrize("window", WINDOWS)
def test_batch_invariant_lists(window: int) -> None:
    rule = replace(make_rule(4, 16, 132, shapes=(INVARIANT_TILE,), num_kv_heads=8), batch_invariant=True)
    limits = invariant_limits(256, 512 * 16, rule.segment_size)
    planned = prepare(rule, Capacity(256, 256, 512, 1 << 20), None, limits, "cuda", make_card())
    for tree in TREES:
        batch = batch_of(tree, window)
        planned.fill(batch)
        assert planned.errors == []
        planned.assert_holds(invariant_list(rule, forest_of(batch, 16), batch), batch)


@pytest.mark.parametrize("group_size", [1, 4])
def test_every_tiling_has_the_list_of_the_host(group_size: int) -> None:
    rule = make_rule(group_size, 16, 132, num_kv_heads=8)
    batch = as_batch(ragged("1,8,64_512,256,100", 16))
    for candidate in range(len(candidates(rule))):
        planned = prepared(rule, candidate, tokens=2048)
        planned.fill(batch)
        assert planned.errors == []
        planned.assert_equals_host(batch)


@pytest.mark.parametrize("seed", range(20))
def test_random_forests_have_the_list_of_the_host(seed: int) -> None:
    rng = np.random.default_rng(seed)
    page_size = int(rng.choice([1, 8, 16, 32]))
    rule = make_rule(int(rng.choice([1, 4, 5, 8])), page_size, int(rng.choice([1, 16, 132])))
    planned = prepared(rule, tokens=4096)
    for _ in range(4):
        paged = random_forest(rng, page_size=page_size, max_requests=200, max_own_tokens=60, max_query_len=12)
        batch = as_batch(paged, int(rng.choice([UNLIMITED, 40])))
        planned.fill(batch)
        assert planned.errors == []
        planned.assert_equals_host(batch)


def test_one_graph_plans_every_batch_and_never_waits() -> None:
    """Rows beyond a batch's have no query token; a table that is larger than the batch holds stale pages."""
    planned = prepared(make_rule(4, 16, 132, num_kv_heads=8))
    table = torch.full((256, 512), -1, dtype=torch.int32, device="cuda")
    lens, starts = (torch.zeros(size, dtype=torch.int32, device="cuda") for size in (256, 257))
    planned.planner.fill(planned.plan, table, lens, starts, UNLIMITED)
    torch.cuda.synchronize()
    with no_waits():
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        planned.planner.fill(planned.plan, table, lens, starts, UNLIMITED)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        planned.planner.fill(planned.plan, table, lens, starts, UNLIMITED)
    for tree in (*TREES, TREES[0]):
        batch = batch_of(tree)
        pages, its_lens, its_starts = (torch.from_numpy(array).cuda() for array in arrays(batch))
        rows, columns = pages.shape
        table[:rows, :columns] = pages
        lens.zero_()
        lens[:rows] = its_lens
        starts.fill_(int(its_starts[-1]))
        starts[: rows + 1] = its_starts
        graph.replay()
        assert planned.errors == []
        planned.assert_equals_host(batch)


def test_a_batch_attention_plans_and_replays_on_the_device() -> None:
    """Plans of tensors seen before are replayed as graphs: for another plan, other values, after a refusal."""
    config = AttentionConfig(8, 2, 128, 16, torch.bfloat16)
    batches = [batch_of("1,4,16_64,32,20"), batch_of("1,16_96,20")]
    table, lens = (torch.ones(shape, dtype=torch.int32, device="cuda") for shape in ((16, 8), 16))
    attention = BatchAttention(config, "cuda", Capacity(16, 16, 8, 512, 1))
    k_cache, v_cache = (torch.randn(512, 16, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    q = torch.randn(16, 8, 128, device="cuda", dtype=torch.bfloat16)
    for _ in range(2):
        with pytest.raises(TypeError, match="int32"):
            attention.plan(table, lens.long())
    for _ in range(2):  # the second plan may lie where the first one was
        plan = attention.plan(table, lens)
        for batch in batches * 3:
            table.zero_()
            table[:, : batch.block_table.shape[1]] = torch.from_numpy(batch.block_table).cuda()
            lens.copy_(torch.from_numpy(batch.seq_lens))
            assert attention.plan(table, lens, into=plan) is plan
            out = attention.run(plan, q, k_cache, v_cache)
            on_host = attention.plan(table.cpu(), lens.cpu())
            assert torch.equal(out, attention.run(on_host, q, k_cache, v_cache))
            assert plan.stats == replace(on_host.stats, reason=plan.stats.reason)
            assert plan.counters.kv_tokens.tolist()[1] == int(batch.seq_lens.sum())
        del plan
    attention.check()


@pytest.mark.parametrize("window", [UNLIMITED, 50])
def test_for_the_sanitizer(window: int) -> None:
    card = make_card(132, 10 * torch.cuda.get_device_capability()[0])
    for batch in (batch_of("1,3,12_64,32,30", window), batch_of("1,40_128,20", window)):
        planned = prepare(make_rule(4, 16, 16, num_kv_heads=2), capacity_for(batch), device="cuda", card=card)
        planned.fill(batch)
        assert planned.errors == []
        planned.assert_equals_host(batch)
