"""Planning on the device, third step: the time of every candidate tiling, and its items by tile.

One CTA for each launch of each candidate finds its time from sums and maxima over its tiles, and the number of items
of each tile (`planner.tiles.cost.tilings_ns`, `tilings_fit`). The later launches take the candidate with the least
time, and the first one among equals.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from trunkattn.gpu.device_planner.common import counts_of, load_row, trigger_and_wait
from trunkattn.gpu.device_planner.formulas import (
    item_ns,
    lead_of,
    listed_segments,
    load_ns,
    memory_tokens,
    pitch_of,
    portion_ns,
    splits_of,
    step_of,
    target_of,
)
from trunkattn.gpu.device_planner.layout import TileArrays, Totals, tile_arrays, totals_of
from trunkattn.planner.tiles.cost import StageLoad, TileTimes

NEVER = tl.constexpr(1 << 61)  # time in ns of a candidate that does not fit


class CandidateLaunch(NamedTuple):
    """One of the two launches of a candidate: a stage, and how it is cut. The table of launches has these columns."""

    stage: Any  # -1: the candidate has no such launch
    tile_index: Any  # index of its tile in the rule; -1: the candidate has no such launch
    num_splits: Any  # see `Stage`
    item_segments: Any  # see `Stage`
    height: Any
    block_segments: Any
    subtiles: Any
    private_segments: Any
    subtile_entries: Any


LAUNCH_COLUMNS = tl.constexpr(len(CandidateLaunch._fields))
_TILE_COLUMNS = tl.constexpr(len(TileTimes._fields))


class ChoiceArrays(NamedTuple):
    """The candidates, and the results for each of their launches.

    launches: [candidates, 2, fields of CandidateLaunch].
    allowed: [candidates] whether a candidate may be chosen.
    times: [candidates, 2] int64, predicted ns; NEVER where a launch might have more items, segments or partial results
        than its share of the limits.
    num_items, target: [candidates, 2] number of items, and segments that an item should have (`target_of`).
    item_starts, leads: [candidates, 2, tokens] items before each tile, and segments of its first item (`lead_of`).
    """

    launches: Any
    allowed: Any
    times: Any
    num_items: Any
    target: Any
    item_starts: Any
    leads: Any


@triton.jit
def load_launch(launches, number):
    """Loads a row of the table of launches. Candidate c has the rows 2 * c and 2 * c + 1."""
    return CandidateLaunch(*load_row(launches + number * LAUNCH_COLUMNS, LAUNCH_COLUMNS))


@triton.jit
def tile_times(tiles, tile_index):
    """Returns the times of a tile of the rule."""
    row = tiles + tl.maximum(tile_index, 0) * _TILE_COLUMNS
    return TileTimes(*load_row(row, _TILE_COLUMNS))


class _Sums(NamedTuple):
    """Four sums and two maxima over the items of a launch."""

    work_ns: Any
    chains_ns: Any
    partials: Any  # partials that cut tiles leave, which cost time
    slots: Any  # partial slots that a plan needs at most
    max_item_ns: Any
    max_chain_ns: Any


@triton.jit
def _joined(
    work_a, chains_a, partials_a, slots_a, item_a, chain_a, work_b, chains_b, partials_b, slots_b, item_b, chain_b
):
    """Combines all sums and maxima in one reduction, so that the CTA's warps synchronize only once."""
    return (
        work_a + work_b,
        chains_a + chains_b,
        partials_a + partials_b,
        slots_a + slots_b,
        tl.maximum(item_a, item_b),
        tl.maximum(chain_a, chain_b),
    )


@triton.jit
def _load_tiles(arrays, tile, end):
    """Loads the blocks and segments of the tiles before `end`."""
    used = tile < end
    return TileArrays(
        segments=tl.load(arrays.segments + tile, mask=used, other=0),
        full=tl.load(arrays.full + tile, mask=used, other=0),
        masked=tl.load(arrays.masked + tile, mask=used, other=0),
    )


@triton.jit
def _cut(
    arrays, num_tiles, num_entries, target, launch, times, is_only_launch, item_starts, leads, SIZES: tl.constexpr
):
    """Returns the number of items of a launch whose items should have `target` segments, the pitches of all tiles
    (`pitch_of`), and the sums over the items. It stores at `item_starts` how many items come before each tile, and at
    `leads` the segments of its first item. `is_only_launch` says that the candidate has no other launch."""
    BLOCK: tl.constexpr = SIZES.candidate_block
    num_items, pitches = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    work, chains, partials = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
    slots = tl.zeros([BLOCK], tl.int64)
    max_item, max_chain = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
    tile = tl.arange(0, BLOCK)
    loaded = _load_tiles(arrays, tile, tl.cdiv(SIZES.tokens, launch.height))  # before num_tiles is there
    for _begin in range(0, num_tiles, BLOCK):
        used = tile < num_tiles
        full, masked = tl.where(used, loaded.full, 0).to(tl.int64), tl.where(used, loaded.masked, 0).to(tl.int64)
        segments = tl.where(used, loaded.segments, 0)
        pitch = pitch_of(segments, launch.block_segments, launch.item_segments)
        before = pitches + tl.cumsum(pitch, 0)
        step = step_of(segments, target, launch.block_segments, launch.item_segments)
        lead = lead_of(step, before - pitch, launch.item_segments)
        splits = splits_of(segments, lead, step)
        pitches = tl.max(before, 0)
        tl.store(leads + tile, lead, mask=used)
        ends = num_items + tl.cumsum(splits, 0)
        tl.store(item_starts + tile, ends - splits, mask=used)
        num_items = tl.max(ends, 0)
        rows = tl.minimum(launch.height, tl.maximum(num_entries - tile * launch.height, 0))
        slots += tl.where((splits > 1) | (is_only_launch == 0), splits * rows, 0)
        partials += tl.where(splits > 1, splits * rows, 0)
        cost = item_ns(full, masked, splits, launch.subtiles, times.full_ns, times.masked_ns)
        chain = item_ns(full, masked, splits, launch.subtiles, times.full_chain_ns, times.masked_chain_ns)
        work += cost * splits
        chains += chain * splits
        max_item, max_chain = tl.maximum(max_item, cost), tl.maximum(max_chain, chain)
        tile += BLOCK
        loaded = _load_tiles(arrays, tile, num_tiles)
    work, chains, partials, slots, max_item, max_chain = tl.reduce(
        (work, chains, partials, slots, max_item, max_chain), 0, _joined
    )
    sums = _Sums(
        work_ns=work,
        chains_ns=chains,
        partials=partials,
        slots=slots,
        max_item_ns=max_item,
        max_chain_ns=max_chain,
    )
    return num_items, pitches, sums


@triton.jit
def candidates_kernel(costs, layout, status, choice, limits, SIZES: tl.constexpr, PDL: tl.constexpr):
    """Fills `choice`, with one CTA for each launch of each candidate. `costs` are those of the host, but their table of
    tiles is on the device and int32."""
    number = tl.program_id(0) * 2 + tl.program_id(1)
    launch = load_launch(choice.launches, number)
    times = tile_times(costs.tiles, launch.tile_index)
    second = choice.launches + (tl.program_id(0) * 2 + 1) * LAUNCH_COLUMNS
    is_only_launch = tl.load(second) < 0  # the second launch has no stage
    is_allowed = tl.load(choice.allowed + tl.program_id(0)) != 0
    trigger_and_wait(PDL)  # the tables were there before
    num_entries = tl.load(counts_of(status).num_entries)
    is_used = launch.stage >= 0
    stage = tl.maximum(launch.stage, 0)
    num_tiles = tl.where(is_used, tl.cdiv(num_entries, launch.height), 0)
    at = totals_of(layout.totals, stage)
    total = Totals(
        segments=tl.load(at.segments, mask=is_used, other=0),
        once=tl.load(at.once, mask=is_used, other=0),
        common=tl.load(at.common, mask=is_used, other=0),
        again=tl.load(at.again, mask=is_used, other=0),
    )
    own = launch.item_segments
    target = target_of(total.segments, num_tiles, launch.num_splits, launch.block_segments, own).to(tl.int32)
    num_items, pitches, sums = _cut(
        tile_arrays(layout.tiles, stage, SIZES.tokens),
        num_tiles,
        num_entries,
        target,
        launch,
        times,
        is_only_launch,
        choice.item_starts + number * SIZES.tokens,
        choice.leads + number * SIZES.tokens,
        SIZES,
    )
    tl.store(choice.target + number, target)
    tl.store(choice.num_items + number, num_items)
    is_last = is_only_launch | (tl.program_id(1) == 1)
    load = StageLoad(
        num_items=tl.where(own > 0, (pitches + target - 1) // target, num_items),
        work_ns=sums.work_ns,
        max_item_ns=tl.where(own > 0, portion_ns(sums.work_ns, total.segments, target, own), sums.max_item_ns),
        max_chain_ns=tl.where(own > 0, portion_ns(sums.chains_ns, total.segments, target, own), sums.max_chain_ns),
        num_partials=tl.where(is_last, sums.partials, num_entries),
        tokens=total.segments * costs.segment_size,
        memory_tokens=memory_tokens(total.once, total.common, total.again, costs.l2_tokens),
    )
    time = tl.where(total.segments > 0, load_ns(load, times, costs, launch.subtiles == 1, is_last), 0)
    part = tl.where(is_only_launch, 1, 2)  # of the limits
    fits = (num_items <= limits.items // part) & (sums.slots <= limits.slots // part)
    fits = fits & (listed_segments(total.segments, num_items, launch) <= limits.segments // part)
    tl.store(choice.times + number, tl.where(fits & is_allowed, time, NEVER))


@triton.jit
def chosen(times, SIZES: tl.constexpr):
    """Returns the candidate that takes the least time, and of equals the first one."""
    candidate = tl.arange(0, SIZES.candidate_lanes)
    used = candidate < SIZES.candidates
    time = tl.load(times + 2 * candidate, mask=used, other=NEVER)
    time += tl.load(times + 2 * candidate + 1, mask=used, other=NEVER)
    return tl.argmin(time, 0)  # ties to the left
