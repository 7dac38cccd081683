"""The price of a tile list: loads by loops over items and segments."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention.cases import fraction
from tests.planner.tile_cases import cases, tile
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


@settings(max_examples=fraction(2))
@pytest.mark.property
@given(case=cases(), data=st.data())
def test_a_tile_list_is_priced_by_what_its_items_hold(case: tuple[TilingRule, StepTables], data: st.DataObject) -> None:
    rule, batch = case
    tiles = tile(rule, data.draw(st.sampled_from(candidates(rule))), batch)
    launches = [
        launch_by_definition(rule, tiles, bucket % len(rule.tiles), tiles.items[start:end].tolist())
        for bucket, (start, end) in enumerate(pairwise(tiles.counts.tolist()))
        if start < end
    ]
    assert list_ns(rule, tiles) == sum(launches) + rule.launch_ns * (len(tiles.merge_queries) > 0)
