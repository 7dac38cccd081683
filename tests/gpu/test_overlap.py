"""Decodes that are co-scheduled with prompt chunks: which, by predicted time, and the lists under Triton's interpreter,
which computes the two halves one after the other. The kernel itself: tests/on_gpu/test_hopper_prefill_decode.py."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.workloads import PagedBatch, parse_tree, tree_batch
from trunkattn import AttentionConfig, BatchAttention
from trunkattn.attention import Plan
from trunkattn.config import Capacity
from trunkattn.gpu.attention import GpuBackend
from trunkattn.gpu.cards import H200, Card, GpuFacts, OverlapTimes, Speeds, card_of
from trunkattn.gpu.kernel import Work, kernels_of
from trunkattn.gpu.overlap import Overlap, overlap_candidates
from trunkattn.gpu.portable import decode, prefill
from trunkattn.gpu.step_planners import make_step_planner
from trunkattn.planner.planner import StepTables
from trunkattn.planner.tiles.candidates import Tiling
from trunkattn.planner.tiles.overlap import ChunkTimes
from trunkattn.planner.work_list import UNLIMITED, TileList

from ..attention.cases import fraction
from ..planner.tile_cases import items_to_overlap
from .backend_cases import caches, expected, plan, run
from .kernel_cases import CPU, make_card

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("pretended_gpu")]

CONFIG = AttentionConfig(4, 2, 128, 16, torch.float16, execution="overlapped")
CAPACITY = Capacity(max_requests=9, max_query_tokens=260, max_pages_per_request=14, num_pages=200)
DECODES = tree_batch(parse_tree("1,2,9_32,16,61"), 16, row_seed=0, page_seed=1)
MIXED = replace(DECODES, query_lens=np.array([1, 70, 1, 0, 3, 1, 40, 2, 1], np.int32))


def times_of(flops_per_ns: int, narrow: Speeds, wide: Speeds | None = None, item_ns: int = 0) -> OverlapTimes:
    """wide: None: as narrow."""
    return OverlapTimes(flops_per_ns, narrow, wide or narrow, 1000, item_ns, fixed_ns=5000, reads_percent=50)


TIMES = times_of(600_000, Speeds(80, 50))


@pytest.fixture
def hopper(pretended_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="NVIDIA H200", multi_processor_count=2, major=9, minor=0, L2_cache_size=50 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr("trunkattn.gpu.attention.card_of", lambda facts: Card(facts, H200))


def make_backend(config: AttentionConfig = CONFIG, capacity: Capacity | None = None) -> GpuBackend:
    """Of a Hopper card. In the interpreter, which does not know its kernels, portable ones stand in."""
    return GpuBackend(config, CPU, capacity)


def launches_both(step: Any) -> bool:
    return step.gpu_plan.launches[0].work is Work.BOTH


def overlapped_items(step: Any) -> tuple[int, int]:
    first, last = step.gpu_plan.arrays["overlapped"].tolist()[:2]
    return first, last


def assert_right(backend: GpuBackend, step: Any, batch: PagedBatch, window: int | None = None) -> None:
    q, kv = torch.randn(step.num_query_tokens, 4, 128).half(), tuple(it.half() for it in caches(batch, CONFIG))
    out, lse = run(backend, step, q, kv)
    want, want_lse = expected(batch, q, kv, sliding_window=window)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=2e-3)
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=1e-3)


@pytest.mark.parametrize("window", [None, 30])
def test_decodes_overlap_chunks(hopper: None, window: int | None) -> None:
    backend = make_backend()
    step = plan(backend, MIXED, window=UNLIMITED if window is None else window)
    step.check()
    first, last = overlapped_items(step)
    assert first == 0 and last > 0 and launches_both(step)
    assert step.gpu_plan.arrays["counts"][0] == last
    assert "overlapped with chunks" in step.stats().policy and "one after the other" in step.stats().reason
    assert_right(backend, step, MIXED, window)


@pytest.mark.parametrize("query_lens", [[1] * 9, [0, 70, 0, 0, 0, 0, 40, 0, 0]])
def test_without_chunks_or_decodes_nothing_is_overlapped(hopper: None, query_lens: list[int]) -> None:
    backend, batch = make_backend(), replace(DECODES, query_lens=np.array(query_lens, np.int32))
    step = plan(backend, batch)
    assert overlapped_items(step) == (0, 0) and not launches_both(step)
    assert_right(backend, step, batch)


def test_one_plan_of_fixed_size_serves_both(hopper: None) -> None:
    backend = make_backend(capacity=CAPACITY)
    step = None
    for batch, some in ((MIXED, True), (DECODES, False), (replace(MIXED, query_lens=MIXED.query_lens[::-1]), True)):
        given = StepTables(batch.block_table, batch.seq_lens, batch.query_start_loc, UNLIMITED)
        step = backend.plan(given, step)
        assert launches_both(step)
        assert (overlapped_items(step)[1] > overlapped_items(step)[0]) == some
        assert_right(backend, step, batch)


@dataclass
class Counted:
    """A kernel that says when it is launched."""

    kernel: Any
    name: str
    launched: list[str]

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.launched.append(self.name)
        return self.kernel[grid]


def test_a_decode_step_need_not_launch_the_kernel_for_chunks(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    for module, name in ((prefill, "prefill_kernel"), (decode, "decode_kernel")):
        monkeypatch.setattr(module, name, Counted(getattr(module, name), name, launched))
    backend = make_backend(capacity=CAPACITY)
    given = StepTables(DECODES.block_table, DECODES.seq_lens, DECODES.query_start_loc, UNLIMITED)
    plan = Plan(backend.plan(given), None, DECODES.num_pages - 1, UNLIMITED)
    assert not plan.num_chunks
    without = plan.only("decodes")
    assert plan.refills and not without.refills
    assert without is not plan and without.only("decodes") is without
    assert_right(backend, without.step, DECODES)
    assert launched and "prefill_kernel" not in launched
    # what is put into the plan later is in the other one's arrays
    fewer = replace(DECODES, query_lens=np.array([1, 0, 1, 1, 0, 1, 1, 1, 1], np.int32))
    given = StepTables(fewer.block_table, fewer.seq_lens, fewer.query_start_loc, UNLIMITED)
    step = backend.plan(given, plan.step)
    assert_right(backend, replace(step, gpu_plan=without.step.gpu_plan), fewer)
    given = StepTables(MIXED.block_table, MIXED.seq_lens, MIXED.query_start_loc, UNLIMITED)
    plan.step = backend.plan(given, step)
    assert plan.num_chunks == 2
    with pytest.raises(ValueError, match="expected a plan without prompt chunks, and this one has 2"):
        plan.only("decodes")
    assert_right(backend, plan.step, MIXED)


def test_auto_where_nothing_is_gained(hopper: None) -> None:
    backend = make_backend(replace(CONFIG, execution="auto"))
    planner = backend._planner
    assert planner.overlap is not None
    planner.overlap = replace(planner.overlap, times=times_of(1000, Speeds(10, 1)))
    step = plan(backend, MIXED)
    assert overlapped_items(step) == (0, 0) and "one after the other" in step.stats().reason
    assert_right(backend, step, MIXED)


def test_a_card_that_was_not_measured_overlaps_when_told_to(hopper: None) -> None:
    for name, execution, overlaps in (
        ("NVIDIA H200", "auto", True), ("NVIDIA GH200", "auto", False), ("NVIDIA GH200", "overlapped", True),
    ):  # fmt: skip
        card = card_of(GpuFacts(name, 132, 90, 50 << 20))
        assert (overlap_on(card, replace(CONFIG, execution=execution)) is not None) == overlaps


def overlap_on(card: Card, config: AttentionConfig) -> Overlap | None:
    return make_step_planner(config, kernels_of(config, card), card, CPU, None).overlap


@pytest.mark.parametrize(
    "change",
    [{"policy": "pat"}, {"logits_soft_cap": 5.0}, {"sinks": True}, {"batch_invariant": True}, {"head_dim": 64},
     {"page_size": 8}, {"kv_dtype": torch.float8_e4m3fn}, {"dtype": torch.float32}, {"num_qo_heads": 6}],
)  # fmt: skip
def test_what_has_no_kernel_is_refused_or_serial(
    hopper: None, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    """Soft caps and sinks overlap on cards on which they were timed."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not any("overlapped" in reason for reason in CONFIG.supports("cuda"))
    assert any("use execution='auto' or 'serial'" in reason for reason in replace(CONFIG, **change).supports("cuda"))
    found = overlap_on(make_card(), replace(CONFIG, **({"execution": "auto"} | change)))
    assert (found is not None) == bool(change.keys() & {"logits_soft_cap", "sinks"})


@pytest.mark.parametrize("change", [{"logits_soft_cap": 5.0}, {"sinks": True}, {"head_dim": 64}, {"num_qo_heads": 6}])
def test_sinks_and_soft_caps_overlap_where_they_were_timed(change: dict[str, Any]) -> None:
    """Other heads and groups have no kernel."""
    config = replace(CONFIG, execution="auto", **change)
    assert overlap_on(make_card(model=replace(H200, runs_hopper_kernels=False)), config) is None
    found = overlap_on(make_card(), config)
    assert (found is not None) == (config.head_dim == 128 and config.num_qo_heads == 4)


def pretend(monkeypatch: pytest.MonkeyPatch, major: int, minor: int) -> None:
    """A card of this compute capability."""
    card = SimpleNamespace(name="a card", multi_processor_count=2, major=major, minor=minor, L2_cache_size=50 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)


def test_another_card_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    pretend(monkeypatch, 10, 0)
    with pytest.raises(ValueError, match=r"execution='overlapped'.*compute capability 10\.0: .* 9\.0; use execution"):
        BatchAttention(CONFIG, "cuda")


def test_a_card_without_e4m3_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    config = AttentionConfig(8, 2, 128, 16, torch.bfloat16, kv_dtype=torch.float8_e4m3fn)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    pretend(monkeypatch, 8, 0)
    with pytest.raises(ValueError, match=r"kv_dtype=torch\.float8_e4m3fn: expected compute capability 8\.9"):
        BatchAttention(config, "cuda")
    assert not config.supports("cpu")
    assert not any("e4m3" in reason for reason in replace(config, kv_dtype=torch.float8_e5m2).supports("cuda"))
    pretend(monkeypatch, 8, 9)
    assert not any("e4m3" in reason for reason in config.supports("cuda"))


def listed(segments: list[int]) -> TileList:
    """Items with these numbers of segments."""
    ends = np.cumsum(segments)
    items = np.zeros((len(segments), 5), np.int32)
    items[:, 0], items[:, 2] = ends - segments, ends
    none = np.zeros(0, np.int32)
    counts = np.array([0, *[len(segments)] * 4], np.int32)
    return TileList(items, none, none, none, none, counts, none, none, 0, False)


def make_overlap_of_eight_heads() -> Overlap:
    """On 16 multiprocessors."""
    overlap = make_backend(AttentionConfig(32, 8, 128, 16, torch.bfloat16))._planner.overlap
    assert overlap is not None
    return replace(overlap, times=TIMES, num_sms=16)


def co_scheduled_ns(blocks: list[int], chunk_us: int) -> float:
    """1000 ns for a block of 64 keys, twice that with chunks, which then take 5/4 of their time."""
    rounds = [-(-8 * (number + 1) // 16) * each for number, each in enumerate(blocks)]
    decode_ns, both_ns = max([sum(blocks) * 8 / 16, *rounds]) * 1000, chunk_us * 1250
    if 2 * decode_ns <= both_ns:
        return 5000 + chunk_us * 1000 + 2 * decode_ns / 5
    return 5000 + both_ns + (2 * decode_ns - both_ns) / 2


@pytest.mark.property
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(segments=st.lists(st.integers(1, 400), min_size=1, max_size=60), chunk_us=st.integers(1, 5000))
def test_all_items_or_whole_rounds_are_overlapped(hopper: None, segments: list[int], chunk_us: int) -> None:
    overlap = make_overlap_of_eight_heads()
    segments.sort(reverse=True)
    blocks = [-(-count // 4) for count in segments]
    found = items_to_overlap(overlap, listed(segments), ChunkTimes(chunk_us * 1000, 0))
    every = co_scheduled_ns(blocks, chunk_us)
    assert found.total_ns <= every + 3
    if found.items == len(segments):
        assert found.total_ns == pytest.approx(every, abs=3)
    else:
        assert found.items > 0 and found.items % 2 == 0  # 8 heads on 16 multiprocessors
        longest = blocks[found.items] * overlap.rule.tiles[0].chain_ns[0] + overlap.rule.launch_ns
        assert found.total_ns >= co_scheduled_ns(blocks[: found.items], chunk_us) + longest - 3


def test_all_overlap_long_chunks_and_some_overlap_short_ones(hopper: None) -> None:
    overlap = make_overlap_of_eight_heads()
    assert items_to_overlap(overlap, listed([64] * 10), ChunkTimes(10**7, 0)).items == 10
    # 80 blocks on each multiprocessor, at half the speed for the 1250 ns of the chunks
    assert items_to_overlap(overlap, listed([64] * 10), ChunkTimes(10**3, 0)) == (10, 5000 + 80 * 1000 + 625)
    # memory reads the chunks' keys in the meantime
    assert items_to_overlap(overlap, listed([64] * 10), ChunkTimes(10**3, 700)) == (10, 5000 + 80 * 1000 + 625 + 700)
    # 8 rounds of two items end with the chunks, and a launch of its own computes the others at once
    tile = replace(overlap.rule.tiles[0], ctas_at_once=8 * 64, block_ns=(100, 100), chain_ns=(100, 100))
    card_times = overlap.rule.card_times._replace(bytes_per_us=10**9, l2_bytes_per_us=10**12)  # keys come at once
    fast = replace(overlap, rule=replace(overlap.rule, tiles=(tile,), card_times=card_times))
    assert items_to_overlap(fast, listed([64] * 40), ChunkTimes(220_000, 0)) == (
        16,
        276_200 + 16 * 100 + overlap.rule.launch_ns,
    )
    assert items_to_overlap(overlap, replace(listed([64] * 10), num_slots=3), ChunkTimes(10**3, 0)).total_ns == (
        items_to_overlap(overlap, listed([64] * 10), ChunkTimes(10**3, 0)).total_ns
        + overlap.rule.launch_ns
        + 3 * overlap.rule.partial_bytes * 1000 // overlap.rule.bytes_per_us
    ), "a merge"


@pytest.mark.parametrize("queries, decode_percent", [(1, 50), (2, 50), (3, 25), (4, 25)])
def test_low_items_are_computed_faster(hopper: None, queries: int, decode_percent: int) -> None:
    """Of 4 rows a query: 8 rows and more. 10 items of 16 blocks on 8 heads, 700 ns each besides, behind no chunk."""
    times = times_of(600_000, Speeds(80, 50), Speeds(80, 25), item_ns=700)
    overlap, tiles = replace(make_overlap_of_eight_heads(), times=times), listed([64] * 10)
    tiles.items[:, 4] = queries
    decode_ns = 80 * 1000 + 10 * 8 * 700 // 16
    assert items_to_overlap(overlap, tiles, ChunkTimes(0, 0)) == (10, 5000 + decode_ns)
    chunk_ns = 1_000_000  # longer than the decodes that overlap it
    overlapped_ns = decode_ns * 100 // decode_percent
    assert items_to_overlap(overlap, tiles, ChunkTimes(chunk_ns, 0)) == (
        10,
        5000 + chunk_ns + overlapped_ns * 20 // 100,
    )


def test_reading_what_chunks_see(hopper: None) -> None:
    """Half of the time of each request's keys and values, once, or of its window's: 8 heads of 512 bytes a token."""
    overlap = make_overlap_of_eight_heads()
    batch = StepTables(np.zeros((2, 600), np.int32), np.array([9000, 500], np.int32), np.array([0, 64, 96]), UNLIMITED)
    for window, tokens in ((UNLIMITED, 9500), (1000, 1064 + 500)):
        work = overlap.work_of(replace(batch, window=window))
        assert overlap.chunk_times(work).reads_ns == tokens * 4096 * 1000 // overlap.rule.bytes_per_us * 50 // 100


def test_lists_that_may_overlap_chunks() -> None:
    """The fastest, the fastest of the finest cut, and both of those with one query an item."""
    whole, fine, uncut = (Tiling(0, waves=waves) for waves in (1, 4, 0))
    alone, alone_fine = Tiling(0, per_query=True), Tiling(0, per_query=True, waves=4)
    others = [Tiling(1), Tiling(0, 1, 2), Tiling(0, 1, 2, waves=4)]
    times = dict(zip([*others, whole, fine, uncut, alone, alone_fine], [1, 2, 3, 20, 30, 10, 40, 50], strict=True))

    def found(times: dict[Tiling, int], group_size: int) -> list[Tiling]:
        tilings = list(times)
        numbers = overlap_candidates(tilings, range(len(tilings)), list(times.values()), group_size)
        return [tilings[number] for number in numbers]

    assert found(times, 8) == [uncut, fine, alone, alone_fine]
    assert found(times | {alone: 5, alone_fine: 6}, 8) == [alone, alone_fine]
    assert found(times, 16) == [uncut, fine], "one query has as many rows as a tile"
    assert found({uncut: 10}, 8) == [uncut]


def test_decodes_fill_the_last_round_of_chunks(hopper: None) -> None:
    """768 tokens of 4 heads in items of 128 rows: 24 items, 192 tasks of 8 KV heads on 132 multiprocessors. One takes
    132 / 192 of the time of them all, and the last round leaves some multiprocessors idle for as long."""
    overlap = replace(make_overlap_of_eight_heads(), num_sms=132)
    chunk = StepTables(
        np.zeros((1, 600), np.int32), np.array([9000], np.int32), np.array([0, 768], np.int32), UNLIMITED
    )
    idle_ns = overlap.chunk_times(overlap.work_of(chunk)).without_decodes_ns * 132 / 192

    def fills(chunks: StepTables, decode_ns: float) -> bool:
        return overlap.fills(overlap.work_of(chunks), int(decode_ns))

    assert fills(chunk, idle_ns * 1.1) and not fills(chunk, idle_ns * 0.9)
    longer = StepTables(
        np.zeros((2, 9000), np.int32), np.array([131072, 9000], np.int32), np.array([0, 32, 800]), UNLIMITED
    )
    assert not fills(longer, idle_ns * 1.1), "one item would outlast decodes and all others"
    short = replace(chunk, query_start_loc=np.array([0, 512], np.int32))
    assert not fills(short, 10**9), "128 tasks are less than a round: cutting fills the card"


@pytest.mark.parametrize("decodes", [64, 0])
def test_chunks_are_not_cut_where_decodes_fill_the_card(
    pretended_gpu: None, monkeypatch: pytest.MonkeyPatch, decodes: int
) -> None:
    h200 = SimpleNamespace(name="NVIDIA H200", multi_processor_count=132, major=9, minor=0, L2_cache_size=50 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: h200)
    backend = make_backend(AttentionConfig(32, 8, 128, 16, torch.bfloat16))
    lens = np.array([16384, *[8192] * decodes], np.int32)
    table = np.arange(len(lens) * 1024, dtype=np.int32).reshape(-1, 1024)
    step = backend.plan(StepTables(table, lens, np.array([0, *range(768, 769 + decodes)], np.int32), UNLIMITED))
    step.check()
    assert step.chunks is not None
    assert (step.chunks.planned.work.num_slots == 0) == (decodes > 0)
    assert ("decodes fill" in step.stats().reason) == (decodes > 0)


def test_a_gain_within_the_error_of_the_prediction_is_not_worth_it(hopper: None) -> None:
    overlap = replace(make_overlap_of_eight_heads(), forced=False)
    assert overlap.is_worth(959, 1000) and not overlap.is_worth(960, 1000)
    assert replace(overlap, forced=True).is_worth(2000, 1000)


def test_the_time_of_chunks_is_close_to_what_was_measured(hopper: None) -> None:
    overlap = replace(make_overlap_of_eight_heads(), times=times_of(580_000, Speeds(83, 50)), num_sms=132)
    table = np.zeros((1, 1024), np.int32)

    def us(tokens: int, context: int, window: int = UNLIMITED) -> float:
        batch = StepTables(table, np.array([context], np.int32), np.array([0, tokens], np.int32), window)
        return overlap.chunk_times(overlap.work_of(batch)).without_decodes_ns / 1000

    # measured on an H200 by benchmarks/kernels/hybrid.py when the times were fitted (32/4 has the same work)
    assert us(2048, 16384) == pytest.approx(945, rel=0.1)
    assert us(1024, 8192) == pytest.approx(239, rel=0.1)
    assert us(512, 16384) == pytest.approx(249, rel=0.1)
    assert us(2048, 16384, window=1024) < us(2048, 16384) / 10
    assert us(16, 8192) == pytest.approx(us(32, 8192) / 2, rel=0.01)  # one item: its rows are what it takes


@pytest.mark.property
@settings(max_examples=fraction(8), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tree=st.sampled_from(["1,3,9_32,16,61", "9_70", "1,9_64,5", "3,9_16,40"]),
    query_lens=st.lists(st.sampled_from([0, 1, 1, 1, 2, 5, 33, 48]), min_size=9, max_size=9),
    window=st.sampled_from([None, 1, 20]),
    flops_per_ns=st.sampled_from([1, 10_000, 580_000]),
    fixed=st.booleans(),
)
def test_any_mix_of_decodes_and_chunks_equals_the_oracle(
    hopper: None, tree: str, query_lens: list[int], window: int | None, flops_per_ns: int, fixed: bool
) -> None:
    batch = tree_batch(parse_tree(tree), 16, row_seed=0, page_seed=1)
    batch = replace(batch, query_lens=np.minimum(query_lens, batch.seq_lens).astype(np.int32))
    backend = make_backend(replace(CONFIG, execution="auto"), CAPACITY if fixed else None)
    planner = backend._planner
    assert planner.overlap is not None
    planner.overlap = replace(planner.overlap, times=times_of(flops_per_ns, Speeds(99, 99)), forced=True)
    step = plan(backend, batch, window=UNLIMITED if window is None else window)
    step.check()
    if step.num_query_tokens:
        assert_right(backend, step, batch, window)
