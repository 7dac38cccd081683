"""The launches of a plan and their order: which buckets of the tile list share one, and the sizes of their grids."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trunkattn.gpu.cards import Card
from trunkattn.gpu.kernel import Kernels, Work, kernel_named
from trunkattn.gpu.layer import Pdl
from trunkattn.gpu.tiles import PORTABLE_DECODE


class Launch(NamedTuple):
    """One launch of a plan.

    kernel: the name of its kernel. num_ctas: size of its grid.
    buckets: the buckets of the tile list whose items it computes, ascending: one tile's, or those of all tiles of a
    kernel. Empty for a launch that computes no items, such as a merge.
    spread: if items are few, spread them so that no SM gets two CTAs with work while another has none, even if an
    earlier launch still occupies some SMs. counts: the array that says where the buckets begin.
    """

    kernel: str
    work: Work
    num_ctas: int
    buckets: tuple[int, ...] = ()
    spread: bool = False
    counts: str = "counts"


class LaunchOptions(NamedTuple):
    """Options of a launch. pdl: programmatic dependent launch. return_lse: whether it also writes log-sum-exps."""

    pdl: Pdl
    return_lse: bool


class LaunchOrder:
    """Chooses the launches of plans for the kernels of an attention on a card. streams: see `Arrays`."""

    def __init__(self, kernels: Kernels, card: Card, streams: bool) -> None:
        self._kernels, self._card, self._streams = kernels, card, streams

    def reserved_decodes(self) -> list[Launch]:
        """The launches of rows of tiles in a plan of fixed size. The numbers of items are unknown, so each launch fills
        the device."""
        return [self._reserved_decode(buckets) for buckets in self._reserved_groups()]

    def decodes(self, counts: NDArray[np.int32], num_kv_heads: int, merge_early: bool) -> list[Launch]:
        """The launches of rows of tiles whose numbers are known. counts: items of each bucket; an empty bucket gets no
        launch."""
        items = counts.tolist()
        sums = {buckets: sum(items[bucket] for bucket in buckets) for buckets in self._groups(items, merge_early)}
        return [self._decode(buckets, num * num_kv_heads) for buckets, num in sums.items() if num]

    def _decode(self, buckets: tuple[int, ...], num_ctas: int, spread: bool = False) -> Launch:
        """The launch of some buckets. num_ctas: size of its grid."""
        tiles = self._kernels.tiles
        kernel = PORTABLE_DECODE if buckets[-1] >= len(tiles) else tiles[buckets[0]].kernel
        return Launch(kernel, kernel_named(kernel).work, num_ctas, buckets, spread)

    def _reserved_decode(self, buckets: tuple[int, ...]) -> Launch:
        """The launch of some buckets that fills the device."""
        tiles, num_sms = self._kernels.tiles, self._card.num_sms
        if buckets == (0,) and self._queues:
            return self._decode(buckets, num_sms * tiles[0].queued_per_sm)
        return self._decode(buckets, num_sms * tiles[buckets[0]].ctas_per_sm, spread=True)

    @property
    def _queues(self) -> bool:
        """Whether a plan of fixed size launches more CTAs of the lowest tile than run at once."""
        lowest, *taller = self._kernels.tiles
        return lowest.queued_per_sm > 0 and all(tile.one_launch for tile in taller)

    def _reserved_groups(self) -> list[tuple[int, ...]]:
        """The buckets of each launch of a plan of fixed size: first of all tiles that share a launch, then of each
        other tile, tall ones first. In the lowest tile, items that merge are launched with those that do not."""
        tiles = self._kernels.tiles
        together = tuple(bucket for bucket, tile in enumerate(tiles) if tile.one_launch)
        groups: list[tuple[int, ...]] = [(bucket,) for bucket in range(len(tiles)) if bucket not in together]
        if groups and tiles[0].merges and not self._streams and not self._queues:
            groups[0] = (0, len(tiles))
        return [*([together] if together else []), *reversed(groups)]

    def _groups(self, counts: list[int], merge_early: bool) -> list[tuple[int, ...]]:
        """The buckets of each launch of a plan whose items are known: one launch per bucket, tall tiles first, then the
        buckets that merge. A launch of a few long items would idle the card, so the two buckets of the lowest tile
        share one where possible."""
        heights = len(self._kernels.tiles)
        lowest_together = merge_early and counts[0] and counts[heights]
        tall = [(bucket,) for bucket in range(heights - 1, 0, -1)]
        tall_that_merge = [(bucket,) for bucket in range(2 * heights - 1, heights, -1)]
        if lowest_together:
            return [*tall, (0, heights), *tall_that_merge]
        return [*tall, (0,), *tall_that_merge, (heights,)]

    def merge(self, num_tasks: int | None = None) -> Launch:
        """The launch of the merges that no item does. num_tasks: number of merge tasks; None: unknown."""
        most = self._card.num_sms * self._kernels.merge_tile.ctas_per_sm
        return Launch(self._kernels.merge.name, Work.MERGE, most if num_tasks is None else min(num_tasks, most))

    def chunks(self, num_ctas: int) -> Launch:
        """The launch of prompt chunks. num_ctas: size of its grid."""
        assert self._kernels.prefill and self._kernels.prefill.kernel
        return Launch(self._kernels.prefill.kernel.name, Work.PREFILL, num_ctas)

    def chunks_and_decodes(self) -> Launch:
        """The launch of prompt chunks and of the decodes that overlap them."""
        assert self._kernels.both
        return Launch(self._kernels.both.name, Work.BOTH, self._card.num_sms)
