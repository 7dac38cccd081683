"""The candidates of a rule as the kernels take them, and the sizes that the kernels are compiled for."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trunkattn.config import Capacity
from trunkattn.gpu.device_planner.common import BIG, Sizes
from trunkattn.gpu.device_planner.cost import CandidateLaunch
from trunkattn.gpu.device_planner.layout import TOTAL_FIELDS
from trunkattn.planner.tiles.candidates import TilingRule
from trunkattn.planner.tiles.cost import Costs
from trunkattn.planner.tiles.layout import Stage

_RADIX: Final = 9  # parts into which a round of the search divides the columns
_HASHED: Final = 256  # columns of a row that are hashed at once
_PAIRS: Final = 1024  # other rows that a CTA compares its row with at once
_BLOCK: Final = 512  # rows, columns, items or tokens that a CTA handles at once
_CANDIDATE_BLOCK: Final = 256  # tiles of a candidate that a CTA handles at once
_NODES_TIMES_SEGMENTS: Final = 2048  # pairs of a node and a segment that a CTA compares at once


@dataclass(frozen=True)
class Candidates:
    """The candidates for a step, in the order of `planner.tiles.candidates.price`.

    Attributes:
        stages: [stages, fields of Stage] int64.
        launches: [candidates, 2, fields of CandidateLaunch] int64; a candidate's tall tiles come first.
        lowest: [candidates] int32, 1 for candidates with only the lowest tile, whose items can overlap prompt chunks.
        costs: the costs of the rule.
        page_size: tokens.
        segment_size: tokens.
        fuse_up_to: partial results that an item may merge.
    """

    stages: NDArray[np.int64]
    launches: NDArray[np.int64]
    lowest: NDArray[np.int32]
    costs: Costs
    page_size: int
    segment_size: int
    fuse_up_to: int

    @property
    def num_heights(self) -> int:
        """Returns the number of tiles of the rule."""
        return len(self.costs.tiles)


def candidates_of(rule: TilingRule) -> Candidates:
    """Returns the candidates of a rule."""
    priced = rule.priced
    launches = np.array([[_launch_of(rule, *one) for one in both] for both in priced.launches.tolist()], np.int64)
    lowest = np.array([tiling.tall is None and tiling.low == 0 for tiling in priced.tilings], np.int32)
    return Candidates(
        stages=priced.stages,
        launches=launches,
        lowest=lowest,
        costs=priced.costs,
        page_size=rule.page_size,
        segment_size=rule.segment_size,
        fuse_up_to=rule.fuse_up_to,
    )


def _launch_of(rule: TilingRule, stage: int, tile_index: int, num_splits: int, item_segments: int) -> CandidateLaunch:
    """Returns a launch of a candidate. If its stage is -1 there is no launch, and the numbers of another stage fill the
    row."""
    shape = Stage(*rule.priced.stages[max(stage, 0)].tolist())
    tile = rule.tiles[max(tile_index, 0)]
    return CandidateLaunch(
        stage=stage,
        tile_index=tile_index,
        num_splits=num_splits,
        item_segments=item_segments,
        height=shape.height,
        block_segments=shape.block_segments,
        subtiles=shape.subtiles,
        private_segments=shape.private_segments,
        subtile_entries=tile.entries(rule.group_size) // tile.subtiles,
    )


def sizes_of(candidates: Candidates, capacity: Capacity) -> Sizes:
    """Returns the constants of the kernels for batches within a capacity."""
    stages = [Stage(*stage) for stage in candidates.stages.tolist()]
    bounds = [bound for stage in stages for bound in (stage.least, stage.below) if 1 < bound < BIG.value]
    highest, least = max(stage.height for stage in stages), max([2, *bounds])
    nodes = 2 * power_of_two(highest)
    rows, columns = capacity.max_requests, capacity.max_pages_per_request
    return Sizes(
        rows=rows,
        tokens=capacity.max_query_tokens,
        page_size=candidates.page_size,
        segment_size=candidates.segment_size,
        totals=len(stages) * TOTAL_FIELDS.value,
        stages=len(stages),
        stage_lanes=power_of_two(len(stages)),
        candidates=len(candidates.launches),
        candidate_lanes=power_of_two(len(candidates.launches)),
        heights=candidates.num_heights,
        bucket_lanes=power_of_two(2 * candidates.num_heights + 1),
        fuse_up_to=candidates.fuse_up_to,
        nodes=nodes,
        most_least=power_of_two(least),
        windows=power_of_two(highest + least),
        subtiles=max(stage.subtiles for stage in stages),
        rounds=next(n for n in range(1, 33) if _RADIX**n > columns),
        radix=_RADIX,
        hashed=_HASHED,
        pairs=min(power_of_two(rows), _PAIRS),
        row_block=min(power_of_two(rows), _BLOCK),
        column_block=min(power_of_two(columns), _BLOCK),
        candidate_block=_CANDIDATE_BLOCK,
        block=_BLOCK,
        segment_block=max(32, _NODES_TIMES_SEGMENTS // max(32, nodes)),
    )


def power_of_two(size: int) -> int:
    """Returns the least power of two that is no smaller than `size`."""
    return 1 << (size - 1).bit_length()
