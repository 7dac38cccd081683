"""What `calibrate_shapes.py` measured, family by family: shapes whose tiles are the same.

The prediction is replayed with other times of a family's tiles, on a CPU.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.kernels.calibrate import losses, random_steps
from benchmarks.kernels.decode_cases import Shape
from benchmarks.workloads.shape_table import parse_batch, shapes_named
from trunkattn import AttentionConfig
from trunkattn.analysis.trees import tree_batch
from trunkattn.gpu.cards import Card, GpuFacts, card_of
from trunkattn.gpu.hopper.spec import Source, source_of
from trunkattn.gpu.kernel import kernels_of
from trunkattn.gpu.mla.spec import head_groups
from trunkattn.gpu.step_planners import make_rule
from trunkattn.gpu.tiles import GpuTile, gpu_device
from trunkattn.planner.from_config import make_planner
from trunkattn.planner.prefix_forest import Forest, build_forest
from trunkattn.planner.tiles.candidates import TilingRule
from trunkattn.planner.tiles.cost import StageLoads, stage_loads, tilings_ns
from trunkattn.planner.tiles.layout import make_entries
from trunkattn.planner.work_list import UNLIMITED

LATENT_SCALE: Final = 192**-0.5  # of DeepSeek-V3's heads
Times = NDArray[np.float64]


def config_of(shape: Shape) -> AttentionConfig:
    """What `BatchAttention` is asked for."""
    return AttentionConfig(
        shape.num_qo_heads, shape.num_kv_heads, shape.head_dim, shape.page_size, shape.dtype,
        kv_dtype=shape.kv_dtype, logits_soft_cap=shape.soft_cap, sinks=shape.sinks,
        latent_dim=shape.latent_dim, sm_scale=None if shape.latent_dim is None else LATENT_SCALE,
    )  # fmt: skip


class Batch(NamedTuple):
    """A measured batch. loads: what the prediction needs of it; ns: of each tiling, by its number in the rule."""

    shape: Shape
    name: str
    loads: StageLoads
    numbers: list[int]
    ns: NDArray[np.float64]


@dataclass(frozen=True)
class Family:
    """Shapes whose tiles are the same, but for those that are too low for a group.

    Attributes:
        tiles: of all their groups.
        card: what measured them.
        bytes_per_us: that it read in the same run.
        rows: of the result.
    """

    tiles: tuple[GpuTile, ...]
    card: Card
    bytes_per_us: int
    rows: list[Mapping[str, Any]]

    @property
    def name(self) -> str:
        """Names of its shapes."""
        return ", ".join(dict.fromkeys(row["shape"] for row in self.rows))

    @property
    def start(self) -> Times:
        """Today's times: block_ns and chain_ns, full and masked, of each tile."""
        return np.array([ns for tile in self.tiles for ns in (*tile.block_ns, *tile.chain_ns)], np.float64)

    def timed(self, times: Times) -> tuple[GpuTile, ...]:
        """The tiles with other times, in the order of `start`."""
        rows = times.reshape(-1, 4).round(-1).astype(int).tolist()
        return tuple(
            replace(tile, block_ns=(row[0], row[1]), chain_ns=(row[2], row[3]))
            for tile, row in zip(self.tiles, rows, strict=True)
        )

    def rule_of(self, shape: Shape, tiles: tuple[GpuTile, ...]) -> TilingRule:
        """The rule of `BatchAttention` on that card."""
        config = config_of(shape)
        groups = head_groups(config, tiles)
        tiles = tuple(tile for tile in tiles if tile.block_m * groups >= shape.num_qo_heads)
        model = make_planner(config, gpu_device(self.card.num_sms, tiles[-1].block_m)).spec.model
        model_of_card = self.card.model
        measured = replace(model_of_card, times=model_of_card.times._replace(bytes_per_us=self.bytes_per_us))
        return make_rule(config, tiles, replace(self.card, model=measured), model, may_fuse=True)

    @cached_property
    def batches(self) -> list[Batch]:
        """All that was measured."""
        return [self._batch(row) for row in self.rows]

    def _batch(self, row: Mapping[str, Any]) -> Batch:
        (shape,) = shapes_named(row["shape"])
        rule = self.rule_of(shape, self.tiles)
        batch = tree_batch(parse_batch(row["batch"]), shape.page_size, page_seed=1)
        table, lens = batch.block_table, batch.seq_lens
        forest = Forest(*build_forest(table, lens, batch.query_lens, shape.page_size, 1))
        entries = make_entries(forest, lens, batch.query_start_loc)
        priced, window = rule.priced, UNLIMITED if shape.window is None else shape.window
        loads = stage_loads(forest, entries, priced.stages, priced.costs.l2_tokens, window, rule.segment_size)
        names = [tiling.name(rule) for tiling in priced.tilings]
        numbers = [number for number, name in enumerate(names) if name in row["us"]]
        ns = 1e3 * np.array([row["us"][names[number]] for number in numbers])
        return Batch(shape, row["batch"], loads, numbers, ns)

    def predict(self, tiles: tuple[GpuTile, ...]) -> list[NDArray[np.int64]]:
        """Predicted ns of every measured tiling of every batch."""
        priced = {batch.shape: self.rule_of(batch.shape, tiles).priced for batch in self.batches}
        found = []
        for batch in self.batches:
            rule = priced[batch.shape]
            found.append(tilings_ns(batch.loads, rule.stages, rule.launches, rule.costs)[batch.numbers])
        return found

    def losses(self, tiles: tuple[GpuTile, ...]) -> tuple[float, float]:
        """Error of the prediction and loss of the choice, as in calibrate.py."""
        return losses(self.batches, self.predict(tiles))

    def regrets(self, tiles: tuple[GpuTile, ...]) -> NDArray[np.float64]:
        """[batches] time of the choice over that of the fastest tiling, less 1."""
        pairs = zip(self.batches, self.predict(tiles), strict=True)
        return np.array([batch.ns[np.argmin(times)] / batch.ns.min() - 1 for batch, times in pairs])

    def fit(self, seconds: float) -> tuple[GpuTile, ...]:
        """The tiles with the times that fit best."""
        best = random_steps(self.start, lambda times: self.losses(self.timed(times)), seconds)
        return self.timed(best)


def families_of(result: Mapping[str, Any]) -> list[Family]:
    """The families of a result of calibrate_shapes.py."""
    card = card_of(GpuFacts(**result["card"]))
    rows: dict[tuple[Source, tuple[GpuTile, ...]], list[Mapping[str, Any]]] = {}
    for row in result["rows"]:
        (shape,) = shapes_named(row["shape"])
        one_head = replace(config_of(shape), num_qo_heads=shape.num_kv_heads)  # whose tiles are those of all groups
        tiles = kernels_of(one_head, card).tiles
        rows.setdefault((source_of(shape.kv_dtype.itemsize, shape.page_size), tiles), []).append(row)
    return [Family(tiles, card, result["bytes_per_us"], found) for (_, tiles), found in rows.items()]


def fitted_text(family: Family, seconds: float) -> str:
    """The times that fit a family best, and the batches on which they choose another tiling than the fastest."""
    best, lines = family.fit(seconds), [family.name]
    for label, tiles in (("today", family.tiles), ("fitted", best)):
        (error, loss), regrets = family.losses(tiles), family.regrets(tiles)
        lines.append(
            f"  {label}: error {error:.3f}, loss of the choice {loss:.4f}, regret {regrets.mean():.4f} on average and "
            f"{regrets.max():.3f} at worst"
        )
    lines += [f"  {tile}" for tile in best]
    for batch, times, regret in zip(family.batches, family.predict(best), family.regrets(best), strict=True):
        if regret > 0.02:
            chosen, fastest = int(np.argmin(times)), int(np.argmin(batch.ns))
            rule = family.rule_of(batch.shape, best)
            names = [rule.priced.tilings[batch.numbers[number]].name(rule) for number in (chosen, fastest)]
            lines.append(
                f"  {batch.shape.name}, {batch.name}: {names[0]} takes {1 + regret:.3f} times as long as {names[1]}"
            )
    return "\n".join(lines)
