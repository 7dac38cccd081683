"""How the merge kernel computes heads of a width. Timed on an H100 and an H200."""

from dataclasses import dataclass
from math import gcd
from typing import Final

from trunkattn.numerics import padded_head_dim

_NARROW: Final = 128  # a warp computes a head of up to this width
_SEVERAL: Final = 512  # width of the heads of one task, together


@dataclass(frozen=True)
class MergeTile:
    """Tasks of the merge kernel, and its CTAs.

    Attributes:
        heads: of a task that has several; they divide all heads. Tasks have several where more than half of the CTAs
            get one.
        warps: of a CTA.
        ctas_per_sm: so many are launched.
    """

    heads: int
    warps: int
    ctas_per_sm: int


def merge_tile(num_qo_heads: int, head_dim_v: int, batch_invariant: bool = False) -> MergeTile:
    """The tile of an attention. batch_invariant: a task is always one head, and the kernel has no other way to compute
    one: the two add in different orders, and which is taken depends on the batch."""
    width = padded_head_dim(head_dim_v)
    heads = 1 if batch_invariant else gcd(num_qo_heads, max(1, _SEVERAL // width))
    return MergeTile(heads, 1, 16) if width <= _NARROW else MergeTile(heads, 4, 8)
