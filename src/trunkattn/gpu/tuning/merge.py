"""How the merge kernel computes heads of a width. Timed on an H100 and an H200."""

from dataclasses import dataclass
from math import gcd
from typing import Final

from trunkattn.numerics import padded_head_dim

_NARROW: Final = 128  # a warp computes a head of up to this width
_SEVERAL: Final = 512  # width of the heads of one task, together
_SLICES: Final = 4  # of a head of up to that width; more than 2 of a wider one would take more registers
_NARROWEST: Final = 16  # dims of a slice: a whole sector of memory is 8
_SLICED: Final = 256  # heads that are cut into slices, at most: of more, one task each occupies the card


@dataclass(frozen=True)
class MergeTile:
    """Tasks of the merge kernel, and its CTAs.

    Attributes:
        heads: of a task that has several; they divide all heads. Tasks have several where more than half of the CTAs
            get one.
        slices: of a head, each a task, where there are few heads. A task adds blocks of partials one after the other,
            and of fewer dims a block has more.
        sliced_up_to: heads of all query tokens, together; 0: they always stay whole.
        warps: of a CTA.
        ctas_per_sm: so many are launched.
    """

    heads: int
    slices: int
    sliced_up_to: int
    warps: int
    ctas_per_sm: int

    def most_tasks(self, num_heads: int) -> int:
        """How many tasks so many heads of query tokens make at most."""
        return num_heads * self.slices if num_heads <= self.sliced_up_to else num_heads


def merge_tile(num_qo_heads: int, head_dim_v: int, batch_invariant: bool = False) -> MergeTile:
    """The tile of an attention. batch_invariant: a task is always one head, and the kernel has no other way to compute
    one: the ways add in different orders, and which is taken depends on the batch."""
    width = padded_head_dim(head_dim_v)
    heads = 1 if batch_invariant else gcd(num_qo_heads, max(1, _SEVERAL // width))
    most, warps, ctas_per_sm = (_SLICES, 1, 16) if width <= _NARROW else (2, 4, 8)
    slices = 1 if batch_invariant else max(1, min(most, width // _NARROWEST))
    return MergeTile(heads, slices, _SLICED if slices > 1 else 0, warps, ctas_per_sm)
