"""What row tiles cost: tokens against a count of every tile's reads, and times against what they stand for."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from trunkattn.gpu.tiles import GpuTile
from trunkattn.planner.planner import StepTables
from trunkattn.planner.tiles import cost as tile_costs
from trunkattn.planner.tiles import layout
from trunkattn.planner.tiles.candidates import Tiling, TilingRule, price, stages_of
from trunkattn.planner.work_list import UNLIMITED

from .specs import forest_of
from .tile_cases import CARD_TIMES, TREE_BATCH, cases, make_rule


def count_tokens(rule: TilingRule, batch: StepTables, stage: layout.Stage) -> tuple[int, int, int]:
    """Tokens of a stage that some tile reads, that two tiles do, and reads beyond the first, one by one."""
    forest = forest_of(batch, rule.page_size)
    entries = layout.make_entries(forest, batch.seq_lens, batch.query_start_loc)
    readers: dict[tuple[int, int], set[int]] = {}
    for node in range(len(forest.parent)):
        start, end = int(entries.node_start[node]), int(entries.node_end[node])
        if not stage.least <= end - start < stage.below:
            continue
        for entry in range(start, end):
            for token in range(forest.token_start[node], min(forest.token_end[node], entries.position[entry] + 1)):
                readers.setdefault((node, token), set()).add(entry // stage.height)
    counts = [len(tiles_of) for tiles_of in readers.values()]
    return len(counts), sum(count > 1 for count in counts), sum(count - 1 for count in counts)


@pytest.mark.property
@given(case=cases())
def test_tokens_are_those_that_the_tiles_of_a_stage_read(case: tuple[TilingRule, StepTables]) -> None:
    """Of one query token each; several of one request may count a token twice that another request shares."""
    rule, starts = case[0], np.minimum(np.diff(case[1].query_start_loc), 1).cumsum(dtype=np.int32)
    batch = replace(case[1], window=UNLIMITED, query_start_loc=np.append(np.int32(0), starts))
    forest = forest_of(batch, rule.page_size)
    entries = layout.make_entries(forest, batch.seq_lens, batch.query_start_loc)
    tilings = price(rule).tilings
    for _, stage in {pair for tiling in tilings for pair in stages_of(rule, tiling)}:
        threshold = stage.least if stage.least > 1 else stage.below
        shared, tall = tile_costs.shared_tokens(forest, entries, threshold)
        found = tile_costs.stage_tokens(entries.position, shared, tall, stage, batch.window)
        assert tuple(map(int, found)) == count_tokens(rule, batch, stage)


def test_a_window_leaves_out_what_no_query_sees() -> None:
    """12 requests of 64 + 32 + 20 tokens; a window of 20 sees the private ones, one of 30 ten tokens of each branch."""
    rule = make_rule(4, 16, 1)
    forest = forest_of(TREE_BATCH, rule.page_size)
    entries = layout.make_entries(forest, TREE_BATCH.seq_lens, TREE_BATCH.query_start_loc)
    ((_, stage),) = stages_of(rule, Tiling(0))
    shared, tall = tile_costs.shared_tokens(forest, entries, tile_costs.EVERY)
    once = [int(tile_costs.stage_tokens(entries.position, shared, tall, stage, w)[0]) for w in (20, 30, UNLIMITED)]
    assert once == [12 * 20, 12 * 20 + 2 * 10, 12 * 20 + 2 * 32 + 64]


def stage_ns(
    rule: TilingRule, blocks: list[list[int]], memory: int, waves: int = 0, num_entries: int | None = None,
    l2_percent: int = 0,
) -> int:  # fmt: skip
    """num_entries: of each tile; None: as many as it holds. l2_percent: 0: the L2 cache takes no time."""
    ((tile_index, stage),) = stages_of(rule, Tiling(0, waves=waves))
    entries = stage.height if num_entries is None else num_entries
    counted = np.array([[*each, sum(each) * stage.block_segments, entries] for each in blocks], np.int64)
    costs = price(rule).costs._replace(l2_percent=l2_percent)
    return int(tile_costs.stage_ns(counted, memory, 0, stage, tile_index, True, costs))


LOW = GpuTile(16, 64, 2, 2, ctas_per_sm=2, block_ns=(2000, 3000), chain_ns=(1000, 1500))


def test_the_time_of_a_stage_is_what_it_waits_for_longest() -> None:
    rule = make_rule(4, 16, 1, shapes=(LOW,))  # two slots
    launch, (full, masked), (chain, _) = rule.launch_ns, rule.tiles[0].block_ns, rule.tiles[0].chain_ns
    assert stage_ns(rule, [[8, 0], [8, 0]], 0) == launch + 8 * full, "both slots busy"
    assert stage_ns(rule, [[8, 0]], 0) == launch + 8 * full // 2 == launch + 8 * chain, "one item, faster alone"
    assert stage_ns(rule, [[8, 4], [8, 4]], 0) == launch + 8 * full + 4 * masked
    seen = 8 * chain // CARD_TIMES.unhidden_part  # the wait of what is left over is memory's
    assert stage_ns(rule, [[8, 0]] * 3, 0) == launch + 2 * 8 * full + seen, "two rounds"
    tokens = 200_000
    bytes_ns = tokens * rule.token_bytes * 1000 // rule.bytes_per_us
    assert stage_ns(rule, [[8, 0]] * 2, tokens) == launch + bytes_ns, "memory is slower than either"


def test_items_that_meet_on_a_multiprocessor_wait_for_each_other() -> None:
    """On an H200 144 items of 32 rows on 264 slots, 24 of them two by two, took 872 µs; the chain of one alone takes
    438, memory alone 641."""
    rule = make_rule(4, 16, 1, shapes=(replace(LOW, block_ns=(200, 300), chain_ns=(10, 10)),))
    rule = replace(rule, tiles=(replace(rule.tiles[0], ctas_at_once=8, ctas_per_sm=2),))  # four multiprocessors
    launch, full = rule.launch_ns, 8 * 200
    assert stage_ns(rule, [[8, 0]] * 4, 0) == launch + full * 4 // 8, "one each"
    assert stage_ns(rule, [[8, 0]] * 5, 0) == launch + full * CARD_TIMES.arithmetic_percent // 100, "two on one of them"
    assert stage_ns(rule, [[8, 0]] * 8, 0) == launch + full, "two on each"


def test_items_after_whole_rounds_take_as_long_as_one_does() -> None:
    """On an H200 640 items on 528 slots, of unshared requests, took 580 µs where memory alone takes 431."""
    rule = make_rule(4, 16, 1, shapes=(replace(LOW, block_ns=(200, 300), chain_ns=(3000, 3000)),))  # two slots
    longest, token_bytes = 8 * 3000, rule.token_bytes
    bytes_ns = 300_000 * token_bytes * 1000 // rule.bytes_per_us
    launch = rule.launch_ns + longest // CARD_TIMES.unhidden_part
    assert stage_ns(rule, [[8, 0]] * 4, 300_000) == launch + bytes_ns, "two rounds"
    assert stage_ns(rule, [[8, 0]] * 5, 300_000) == launch + bytes_ns * 4 // 5 + longest
    bytes_ns = 3_000_000 * token_bytes * 1000 // rule.bytes_per_us
    together = bytes_ns * 4 // 5 + bytes_ns // 5
    assert stage_ns(rule, [[8, 0]] * 5, 3_000_000) == launch + together, "memory is slower"


def test_of_several_rounds_memory_does_not_hide_all_arithmetic() -> None:
    """On an H100 `1,16,32,64,256,1024_256,128,64,32,32,32` takes 81 µs in tiles of 32 rows and 77 of 64, which compute
    less; memory alone takes the same, longer time."""
    rule = make_rule(4, 16, 1, shapes=(replace(LOW, chain_ns=(1, 1)),))  # two slots
    tokens, arithmetic = 3_000_000, 2 * 8 * rule.tiles[0].block_ns[0]
    one_round = stage_ns(rule, [[8, 0]] * 2, tokens)
    assert stage_ns(rule, [[8, 0]] * 4, tokens) == one_round + arithmetic // CARD_TIMES.unhidden_part


def test_memory_is_slower_where_slots_are_idle() -> None:
    rule = make_rule(4, 16, 1, shapes=(replace(LOW, chain_ns=(1, 1)),))
    rule = replace(rule, tiles=(replace(rule.tiles[0], ctas_at_once=4),))
    tokens = 3_000_000
    one, four = (stage_ns(rule, [[8, 0]] * items, tokens) - rule.launch_ns for items in (1, 4))
    assert one == four * (100 + CARD_TIMES.idle_percent * 3 // 4) // 100


def test_the_l2_cache_takes_time_for_what_tiles_read_again() -> None:
    rule = make_rule(4, 16, 1, shapes=(replace(LOW, block_ns=(1, 1), chain_ns=(1, 1)),))  # two slots
    tokens = 2 * 800 * LOW.block_n
    once = stage_ns(rule, [[800, 0]] * 2, tokens, l2_percent=50)
    assert once == stage_ns(rule, [[800, 0]] * 2, tokens), "memory is slower"
    again = stage_ns(rule, [[800, 0]] * 2, tokens // 4, l2_percent=50)
    assert again == stage_ns(rule, [[800, 0]] * 2, tokens // 2) > stage_ns(rule, [[800, 0]] * 2, tokens // 4)
    assert price(rule).costs.l2_percent == 100 * rule.bytes_per_us // CARD_TIMES.l2_bytes_per_us


def test_a_round_that_is_not_full_waits_for_memory() -> None:
    """On an H200 268 items on 528 slots, of unshared requests of 7,219 tokens two by two, took 643 µs: the chain of 226
    blocks takes 486 where few items are in flight, memory alone 425."""
    rule = make_rule(4, 16, 1, shapes=(replace(LOW, block_ns=(200, 300), chain_ns=(2000, 2000)),))  # two slots
    launch, longest, tokens = rule.launch_ns, 226 * 2000, 226 * LOW.block_n
    assert stage_ns(rule, [[226, 0]], 0) == launch + longest, "all of it is in the cache"
    slower = longest + (longest - CARD_TIMES.filled_ns) // 3
    assert stage_ns(rule, [[226, 0]], tokens) == stage_ns(rule, [[226, 0]], 2 * tokens) == launch + slower
    assert stage_ns(rule, [[8, 0]], 8 * LOW.block_n) == launch + 8 * 2000, "too short for memory to fill"


def test_the_items_of_a_cut_are_counted_as_they_are_emitted() -> None:
    """Ten tiles of 304 blocks for 66 items: 6.6 each are 7 each, 4 more than there are slots, and a second round."""
    rule = make_rule(4, 16, 1, shapes=(replace(LOW, chain_ns=(1, 1)),))
    rule = replace(rule, tiles=(replace(rule.tiles[0], ctas_at_once=66),))
    full, states = rule.tiles[0].block_ns[0], 70 * rule.tiles[0].entries(rule.group_size)
    merged = 2 * rule.launch_ns + states * rule.partial_bytes * 1000 // rule.bytes_per_us
    seen = 304 // 7 // CARD_TIMES.unhidden_part
    assert stage_ns(rule, [[304, 0]] * 10, 0, waves=1) == merged + 2 * (304 * full // 7) + seen


def test_a_cut_costs_partial_states_and_a_merge() -> None:
    rule = make_rule(4, 16, 1, shapes=(LOW,))
    entries = rule.tiles[0].entries(rule.group_size)
    states = 2 * entries * rule.partial_bytes * 1000 // rule.bytes_per_us
    full = rule.tiles[0].block_ns[0]
    assert stage_ns(rule, [[16, 0]], 0, waves=1) == 2 * rule.launch_ns + 8 * full + states
    fewer = stage_ns(rule, [[16, 0]], 0, waves=1, num_entries=1)
    assert fewer == 2 * rule.launch_ns + 8 * full + states // entries, "a tile has a state for each of its queries"
