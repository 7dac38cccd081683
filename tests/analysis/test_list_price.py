"""The price of a tile list: loads by loops over items and segments."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention.cases import fraction
from tests.planner.tile_cases import cases, make_rule, tile
from trunkattn.analysis.pricing.list_price import list_ns
from trunkattn.planner.planner import StepTables
from trunkattn.planner.tiles.candidates import TilingRule, candidates
from trunkattn.planner.tiles.cost import StageLoad, load_ns, tile_times
from trunkattn.planner.work_list import (
    DIRECT,
    QUERY_END,
    QUERY_START,
    SEGMENT_END,
    SEGMENT_PLACE,
    SEGMENT_SHARED_END,
    SEGMENT_START,
    TileList,
)


def launch_by_definition(rule: TilingRule, tiles: TileList, index: int, items: list[list[int]]) -> int:
    shape, costs = rule.tiles[index], rule.priced.costs
    times = tile_times(costs, index)
    block = shape.block_tokens // rule.segment_size
    step = block if shape.subtiles == 1 else shape.private_tokens // rule.segment_size
    work, chains, num_partials, reads = [], [], 0, dict[int, list[int]]()
    for item in items:
        whole = item[SEGMENT_SHARED_END] - item[SEGMENT_START]
        private = (item[SEGMENT_END] - item[SEGMENT_SHARED_END]) // shape.subtiles
        full, masked = whole // block, -(-(whole % block + private) // step)
        work.append(full * times.full_ns + masked * times.masked_ns)
        chains.append(full * times.full_chain_ns + masked * times.masked_chain_ns)
        num_partials += sum(tiles.partial_slots[item[QUERY_START] : item[QUERY_END]] != DIRECT)
        for segment in range(item[SEGMENT_START], item[SEGMENT_END]):
            if tiles.segment_tokens[segment]:  # else padding
                reads.setdefault(tiles.segments[segment, SEGMENT_PLACE], []).append(tiles.segment_tokens[segment])
    read, once = sum(map(sum, reads.values())), sum(map(max, reads.values()))
    common = sum(max(each) for each in reads.values() if len(each) > 1)
    lost = max(0, common - costs.l2_tokens) / max(1, common)  # of what is read again, the L2 cache does not hold this
    load = StageLoad(
        num_items=len(items),
        work_ns=sum(work),
        max_item_ns=max(work),
        max_chain_ns=max(chains),
        num_partials=num_partials,
        tokens=read,
        memory_tokens=once + int((read - once) * lost + 1e-9),
    )
    return int(load_ns(load, times, costs, shape.subtiles == 1, False))


def list_by_definition(rule: TilingRule, tiles: TileList) -> int:
    launches = [
        launch_by_definition(rule, tiles, bucket % len(rule.tiles), tiles.items[start:end].tolist())
        for bucket, (start, end) in enumerate(pairwise(tiles.counts.tolist()))
        if start < end
    ]
    return sum(launches) + rule.launch_ns * (len(tiles.merge_queries) > 0)


@settings(max_examples=fraction(2))
@pytest.mark.property
@given(case=cases(), data=st.data())
def test_a_tile_list_is_priced_by_what_its_items_hold(case: tuple[TilingRule, StepTables], data: st.DataObject) -> None:
    rule, batch = case
    tiles = tile(rule, data.draw(st.sampled_from(candidates(rule))), batch)
    assert list_ns(rule, tiles) == list_by_definition(rule, tiles)


@pytest.mark.parametrize("l2_bytes", [50 << 20, 1 << 20], ids=["held by the cache", "not held"])
def test_a_page_that_requests_read_to_different_ends_comes_from_memory_once(l2_bytes: int) -> None:
    """Only full pages are shared. Those who read another page may have different lengths; half of them have their own
    one."""
    table = np.tile(np.arange(4, dtype=np.int32), (16, 1))
    table[8:, 3] += np.arange(8, dtype=np.int32)
    lens = 3 * 1024 + np.arange(16, dtype=np.int32) * 64 + 1
    rule = make_rule(4, 1024, 132, l2_bytes=l2_bytes)
    for candidate in candidates(rule):
        tiles = tile(rule, candidate, StepTables(table, lens, np.arange(17, dtype=np.int32)))
        assert list_ns(rule, tiles) == list_by_definition(rule, tiles)
