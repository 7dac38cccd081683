"""Constants that all kernels share. Softmax is computed in base 2, where an exponential is one instruction."""

import math
from typing import Final

LOG2_E: Final = math.log2(math.e)
LN_2: Final = math.log(2.0)
MAX_INT32: Final = 2**31 - 1  # planners and kernels count in int32
GPU_OFFSET_END: Final = 2**31  # GPU kernels count elements from head to head, and within a block of tokens, in int32
# What they count of all tokens in int32, such as the entries of a tree's tables, are at most seven for each.
MAX_GPU_TOKENS: Final = GPU_OFFSET_END // 8
# A GPU's tanh is 1 less an exponential, which rounds logits by 2^-23 of the soft cap: above this by more than 2^-13.
MAX_GPU_SOFT_CAP: Final = 1024.0
# The maximum of no logit: the least number of float32, so no logit is below it. It is finite, so that the difference of
# two of them is not NaN.
NEG_INF: Final = -(2 - 2.0**-23) * 2.0**127


def padded_head_dim(head_dim: int) -> int:
    """The width of a tile that holds a head: a power of two, and at least what a matrix product takes."""
    return max(16, 1 << (head_dim - 1).bit_length())
