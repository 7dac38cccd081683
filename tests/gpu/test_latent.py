"""Latent attention on a GPU's back end, under Triton's interpreter, on a made-up card."""

import math
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trunkattn import AttentionConfig, Capacity
from trunkattn.analysis.batch import PagedBatch
from trunkattn.analysis.trees import TreeLevels, tree_batch
from trunkattn.gpu.attention import GpuBackend
from trunkattn.gpu.cards import H100
from trunkattn.gpu.kernel import Work, choose, kernels_of, refusals
from trunkattn.gpu.mla import spec
from trunkattn.gpu.portable.write_kv import write_on_gpu
from trunkattn.layer_inputs import LayerInputs, of_layer
from trunkattn.planner.planner import StepTables
from trunkattn.planner.work_list import UNLIMITED
from trunkattn.reference import latent_attention, paged_attention

from ..attention.cases import fraction
from .kernel_cases import CPU, make_card
from .latent_cases import LATENT, ROPE, SCALE, config_of, deepseek

pytestmark = pytest.mark.slow

TREE = TreeLevels((1, 2, 6), (32, 16, 9))


@pytest.fixture(autouse=True, scope="module")
def card() -> Any:
    """A card without kernels of its own."""
    properties = SimpleNamespace(name="NVIDIA H200", multi_processor_count=2, major=8, minor=0, L2_cache_size=50 << 20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        patch.setattr(torch.cuda, "device", lambda device: nullcontext())
        yield


def tensors_of(config: AttentionConfig, batch: PagedBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """q and a cache of rows and pages that lie apart, with NaN between them and behind every sequence."""
    q = torch.randn(int(batch.query_start_loc[-1]), config.num_qo_heads, config.head_dim).to(config.dtype)
    wide = torch.full((batch.num_pages, batch.page_size + 1, config.head_dim + 16), torch.nan)
    cache = wide[:, 1:, : config.head_dim]
    for row, length in enumerate(batch.seq_lens.tolist()):
        token = torch.arange(length)
        page = torch.from_numpy(batch.block_table[row]).long()[token // batch.page_size]
        cache[page, token % batch.page_size] = torch.randn(length, config.head_dim)
    return q, wide.to(config.cache_dtype)[:, 1:, : config.head_dim]


def arguments(q: Any, cache: torch.Tensor, k_scale: float | None = None) -> LayerInputs:
    """The arguments of a layer whose values are columns of its keys."""
    tensors: dict[str, Any] = {"q": q, "k_cache": cache, "v_cache": None}
    return LayerInputs(**tensors, k_scale=k_scale, return_lse=True)


def run(
    backend: GpuBackend, step: Any, q: Any, cache: torch.Tensor, k_scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse."""
    inputs = of_layer(backend.config, arguments(q, cache, k_scale))
    rows = max(step.num_query_tokens, len(inputs.q))  # of a step planned on the device it knows none
    out = torch.full((rows, backend.config.num_qo_heads, LATENT), math.nan, dtype=backend.config.dtype)
    return out, backend.run(step, inputs, out)


def assert_equals_oracle(backend: GpuBackend, batch: PagedBatch, window: int | None = None, into: Any = None) -> Any:
    """Plans a batch, compares its output with the oracle's, and returns the step."""
    config = backend.config
    q, cache = tensors_of(config, batch)
    tables = StepTables(
        batch.block_table, batch.seq_lens, batch.query_start_loc, UNLIMITED if window is None else window
    )
    step = backend.plan(tables, into)
    step.check()
    out, lse = run(backend, step, q, cache)
    arrays = (torch.from_numpy(array) for array in (batch.block_table, batch.seq_lens, batch.query_start_loc))
    want, want_lse = latent_attention(q, cache, *arrays, latent_dim=LATENT, sm_scale=SCALE, sliding_window=window)
    tolerance = 1e-5 if config.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.double(), want, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), want_lse, rtol=tolerance, atol=tolerance)
    return step


@settings(max_examples=fraction(8))
@given(
    heads=st.sampled_from([1, 8, 12, 16, 20, 32, 64, 96, 128]),
    page_size=st.sampled_from([1, 16, 64]),
    nodes=st.sampled_from([(1, 4), (5,), (1, 2, 6), (2, 8)]),
    own=st.integers(1, 40),
    invariant=st.booleans(),
    window=st.sampled_from([None, None, 9]),
)
def test_trees_of_requests_equal_the_oracle(
    heads: int, page_size: int, nodes: tuple[int, ...], own: int, invariant: bool, window: int | None
) -> None:
    config = config_of(heads, page_size, batch_invariant=invariant)
    shared = -(-20 // page_size) * page_size
    batch = tree_batch(TreeLevels(nodes, (*(shared for _ in nodes[1:]), own)), page_size, page_seed=1)
    assert_equals_oracle(GpuBackend(config, CPU), batch, window)


@pytest.mark.parametrize(
    ("policy", "heads", "window"), [("auto", 20, None), ("auto", 4, 9), ("per_query", 20, None), ("pat", 4, 9)]
)
def test_several_query_tokens_and_prompt_chunks_are_rows_of_tiles(policy: str, heads: int, window: int | None) -> None:
    """A tile holds one query token of 20 heads, and several of 4, of which a window hides different keys."""
    batch = replace(tree_batch(TREE, 16), query_lens=np.array([1, 3, 0, 40, 1, 7], np.int32))
    step = assert_equals_oracle(GpuBackend(config_of(heads, policy=policy), CPU), batch, window)
    assert step.gpu_plan.chunks is None
    assert {launch.work for launch in step.gpu_plan.launches} <= {Work.LATENT, Work.MERGE}


@pytest.mark.parametrize("options", [{}, {"batch_invariant": True}, {"logits_soft_cap": 2.0, "policy": "pat"}])
def test_a_sink_lowers_outputs_and_changes_no_lse(options: dict[str, Any]) -> None:
    config, batch = config_of(20, sinks=True, **options), tree_batch(TREE, 16)
    (q, cache), sinks = tensors_of(config, batch), torch.linspace(-3, 3, 20)
    backend = GpuBackend(config, CPU)
    step = backend.plan(StepTables(batch.block_table, batch.seq_lens, batch.query_start_loc, UNLIMITED))
    out = torch.full((len(q), 20, LATENT), math.nan)
    lse = backend.run(step, of_layer(config, arguments(q, cache)._replace(sinks=sinks)), out)
    keys, tables = cache.unsqueeze(2), (torch.from_numpy(batch.block_table), torch.from_numpy(batch.seq_lens))
    cap = config.logits_soft_cap
    wanted = paged_attention(q, keys, keys[..., :LATENT], *tables, sm_scale=SCALE, logits_soft_cap=cap, sinks=sinks)
    for found, want in zip((out, lse), wanted, strict=True):
        torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("capacity", [None, Capacity(8, 8, max_pages_per_request=8, num_pages=200)])
def test_a_row_of_fewer_bytes_than_there_are_groups_of_heads(capacity: Capacity | None) -> None:
    """A prime number of heads over a tile's rows makes a group of each head."""
    config = config_of(67, kv_dtype=torch.float8_e5m2)
    assert_equals_oracle(GpuBackend(config, CPU, capacity), tree_batch(TREE, 16))


def test_one_plan_of_fixed_size_serves_batches_of_any_shape() -> None:
    backend = GpuBackend(config_of(12), CPU, Capacity(8, 8, max_pages_per_request=8, num_pages=200))
    step, launches = None, set()
    for tree in (TREE, TreeLevels((5,), (70,)), TreeLevels((1, 8), (64, 3))):
        step = assert_equals_oracle(backend, tree_batch(tree, 16, page_seed=2), into=step)
        launches.add(step.gpu_plan.launches)
    assert len(launches) == 1


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("query_lens", [None, (1, 3, 2, 9, 1, 4)], ids=["decodes", "several tokens"])
def test_tables_on_the_device_are_planned_there(invariant: bool, query_lens: tuple[int, ...] | None) -> None:
    config, batch = config_of(40, batch_invariant=invariant), tree_batch(TREE, 16, page_seed=2)
    if query_lens is not None:
        batch = replace(batch, query_lens=np.array(query_lens, np.int32))
    longest = max(query_lens or (1,))
    backend = GpuBackend(config, CPU, Capacity(8, 24, max_pages_per_request=8, num_pages=200, max_query_len=longest))
    table, lens, starts = (
        torch.from_numpy(array) for array in (batch.block_table, batch.seq_lens, batch.query_start_loc)
    )
    step = backend.plan_on_device((table, lens, starts if query_lens else None), UNLIMITED)
    backend.check()
    step.check()
    q, cache = tensors_of(config, batch)
    out, _ = run(backend, step, q, cache)
    want, _ = latent_attention(q, cache, table, lens, starts, latent_dim=LATENT, sm_scale=SCALE)
    torch.testing.assert_close(out[: len(q)].double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads", [8, 40])
def test_a_batch_invariant_output_does_not_depend_on_the_batch(heads: int) -> None:
    """Requests of different lengths share spans, and see their ends in different blocks."""
    backend, tree = GpuBackend(config_of(heads, batch_invariant=True), CPU), TreeLevels((1, 2, 6), (512, 512, 90))
    batch = tree_batch(tree, 16)
    batch = replace(batch, seq_lens=batch.seq_lens - np.array([0, 7, 33, 80, 16, 1], np.int32))
    q, cache = tensors_of(backend.config, batch)

    def outputs(rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        starts = np.arange(len(rows) + 1, dtype=np.int32)
        step = backend.plan(StepTables(batch.block_table[rows], batch.seq_lens[rows], starts, UNLIMITED))
        return run(backend, step, q[rows], cache)

    together = outputs(list(range(6)))
    for rows in ([2], [0, 3, 5], [4, 5]):
        for found, expected in zip(outputs(rows), together, strict=True):
            assert torch.equal(found, expected[rows])


@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e5m2])
def test_caches_of_16_and_8_bits_equal_the_oracle(kv_dtype: torch.dtype | None) -> None:
    config = config_of(16, dtype=torch.float16, kv_dtype=kv_dtype)  # the interpreter multiplies no bfloat16
    assert_equals_oracle(GpuBackend(config, CPU), tree_batch(TREE, 16))


@pytest.mark.parametrize("heads", [16, 40])
def test_a_scale_is_that_of_keys_and_values(heads: int) -> None:
    backend, batch = GpuBackend(config_of(heads), CPU), tree_batch(TREE, 16)
    q, cache = tensors_of(backend.config, batch)
    step = backend.plan(StepTables(batch.block_table, batch.seq_lens, batch.query_start_loc, UNLIMITED))
    found, expected = run(backend, step, q, cache, k_scale=0.5), run(backend, step, q, cache * 0.5)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_queries_may_lie_in_two_tensors_and_rows_of_the_cache_apart() -> None:
    backend, batch = GpuBackend(config_of(8), CPU), tree_batch(TREE, 16)
    q, cache = tensors_of(backend.config, batch)
    step = backend.plan(StepTables(batch.block_table, batch.seq_lens, batch.query_start_loc, UNLIMITED))
    expected = run(backend, step, q, cache)[0]
    wider = torch.full((*cache.shape[:2], cache.shape[2] + 16), math.nan)
    wider[..., : cache.shape[2]] = cache
    pair = q[..., :LATENT].contiguous(), q[..., LATENT:].contiguous()
    assert torch.equal(run(backend, step, pair, wider[..., : cache.shape[2]])[0], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_are_written_beside_each_other(dtype: torch.dtype) -> None:
    latent, rope, slots = torch.randn(5, LATENT), torch.randn(5, ROPE), torch.tensor([0, 17, -1, 95, 96])
    cache = torch.zeros(6, 16, LATENT + ROPE, dtype=dtype)
    expected = cache.clone()
    expected.flatten(0, 1)[[0, 17, 95]] = torch.cat((latent, rope), 1)[[0, 1, 3]].to(dtype)
    rows = cache.unsqueeze(2)
    write_on_gpu(latent.unsqueeze(1), rope.unsqueeze(1), rows[..., :LATENT], rows[..., LATENT:], slots)
    assert torch.equal(cache, expected), "no token goes into slot -1 or behind the cache"


def test_numbers_of_a_row_may_lie_farther_apart_than_32_bits_count() -> None:
    """Memory that nothing is written to is only promised, and takes no room."""
    far = torch.empty((16 << 27) + 1, dtype=torch.float16).as_strided((1, 1, 17), (1, 1, 1 << 27))
    row, value, cache = far.copy_(torch.randn(17)), torch.randn(1, 1, 1), torch.zeros(1, 16, 1, 18)
    write_on_gpu(row, value, cache[..., :17], cache[..., 17:], torch.tensor([3]))
    assert torch.equal(cache[0, 3, 0, :17], row[0, 0].float()) and cache[0, 3, 0, 17] == value


def test_where_the_fast_kernel_cannot_read_a_layer_the_portable_one_reads_the_same_lists() -> None:
    """The tensors are on a CPU, which the fast kernel refuses; its tile has segments of 64 tokens."""
    config = config_of(16, 64, latent_dim=spec.LATENT_DIM, rope=spec.ROPE_DIM, dtype=torch.float16)
    facts = make_card(model=H100).facts
    backend, batch = (
        GpuBackend(config, CPU, facts=facts._replace(num_sms=132)),
        tree_batch(TreeLevels((1, 5), (64, 9)), 64),
    )
    q, cache = tensors_of(config, batch)
    step = backend.plan(StepTables(batch.block_table, batch.seq_lens, batch.query_start_loc, UNLIMITED))
    assert step.gpu_plan.launches[0].kernel == spec.DECODE
    inputs = of_layer(config, arguments(q, cache))
    out = torch.full((5, 16, spec.LATENT_DIM), math.nan, dtype=torch.float16)
    backend.run(step, inputs, out)
    arrays = (torch.from_numpy(array) for array in (batch.block_table, batch.seq_lens))
    want, _ = latent_attention(q, cache, *arrays, latent_dim=spec.LATENT_DIM, sm_scale=SCALE)
    torch.testing.assert_close(out.double(), want, rtol=3e-2, atol=3e-2)
    assert "tensors on a CPU" in step.stats().reason


@pytest.mark.parametrize(
    ("heads", "groups", "portable_groups", "portable_rows"),
    [(1, 1, 1, 16), (20, 1, 1, 32), (64, 1, 2, 32), (96, 2, 3, 32), (128, 2, 4, 32), (67, 67, 67, 16), (48, 1, 2, 32)],
)
def test_a_query_has_as_few_groups_of_heads_as_tiles_hold(
    heads: int, groups: int, portable_groups: int, portable_rows: int
) -> None:
    config, hopper = deepseek(heads=heads), make_card(model=H100)
    assert spec.head_groups(config, spec.decode_tiles(config, hopper)) == groups
    tiles = spec.portable_tiles(config, hopper)
    assert (spec.head_groups(config, tiles), tiles[-1].block_m) == (portable_groups, portable_rows)
    assert spec.head_groups(AttentionConfig(8, 2, 64, 16, torch.bfloat16), tiles) == 2


@pytest.mark.parametrize(("heads", "requests"), [(8, 8), (12, 5), (16, 4), (20, 3), (32, 2)])
def test_a_tile_of_64_rows_holds_whole_queries_and_reads_their_trunk_once(heads: int, requests: int) -> None:
    backend, trunk, own = GpuBackend(deepseek(heads=heads), CPU, facts=make_card(model=H100).facts), 12800, 64
    batch = tree_batch(TreeLevels((1, 60), (trunk, own)), 64)
    step = backend.plan(StepTables(batch.block_table, batch.seq_lens, batch.query_start_loc, UNLIMITED))
    assert step.stats().kv_tokens_read == -(-60 // requests) * trunk + 60 * own


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, None),
        ({"heads": 128, "page_size": 16, "dtype": torch.float16}, None),
        ({"latent_dim": 256}, "rows of 256 + 64 numbers: expected 512 + 64"),
        ({"dtype": torch.float32}, "float32 queries: expected bfloat16 or float16"),
        ({"kv_dtype": torch.float8_e4m3fn}, None),
        (
            {"kv_dtype": torch.float8_e5m2},
            "float8_e5m2 caches: expected bfloat16, as the queries, or float8_e4m3fn",
        ),
        ({"page_size": 8}, "page_size 8: expected a multiple of 16"),
        ({"batch_invariant": True}, "batch_invariant=True: expected False"),
        ({"sinks": True}, "sinks: expected none"),
        ({"logits_soft_cap": 30.0}, "a soft cap: expected none"),
        ({"execution": "streams"}, "execution='streams': expected 'auto', 'serial' or 'overlapped'"),
    ],
)
def test_which_kernel_computes_it_and_why_not_another(options: dict[str, Any], reason: str | None) -> None:
    choice = choose(Work.LATENT, deepseek(**options), make_card(model=H100))
    assert choice.reasons == (() if reason is None else (reason,))
    assert choice.kernel and choice.kernel.portable == (reason is not None)
    old = choose(Work.LATENT, deepseek(), make_card(capability=80, model=H100))
    assert old.reasons == ("compute capability 8.0: the fast kernels are for 9.0",)


def test_what_no_kernel_computes_says_so() -> None:
    wide = deepseek(latent_dim=768)
    assert refusals(wide, make_card(model=H100)) == ["latent_dim=768: expected at most 512; use the CPU"]
    with pytest.raises(ValueError, match="expected at most 64 rope columns; use the CPU"):
        kernels_of(deepseek(rope=96), make_card(model=H100))


@pytest.mark.parametrize(
    ("heads", "nodes", "tokens", "policy"),
    [
        (8, (1, 64), (8192, 512), "64x64"),
        (8, (4, 64), (12032, 256), "64x64"),
        (8, (1, 128), (896, 320), "64x64"),
        (8, (8, 128), (1216, 512), "64x64"),
        (16, (1, 64), (8192, 512), "64x64"),
        (8, (64,), (4096,), "64x64 per query"),
        (8, (8,), (8192,), "64x64 per query"),
    ],
)
def test_an_h100_takes_the_tiling_that_was_fastest_there(
    heads: int, nodes: tuple[int, ...], tokens: tuple[int, ...], policy: str
) -> None:
    backend = GpuBackend(deepseek(heads=heads), CPU, facts=make_card(model=H100).facts)
    batch = tree_batch(TreeLevels(nodes, tokens), 64)
    step = backend.plan(StepTables(batch.block_table, batch.seq_lens, batch.query_start_loc, UNLIMITED))
    assert step.stats().policy == policy
