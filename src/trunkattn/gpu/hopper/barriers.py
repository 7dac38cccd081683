"""Named barriers, at which some warps of a CTA meet: those of several partitions, or a producer and its consumers.

An SM has 16 of them for a CTA. Triton takes numbers 0 and 1 and one for each partition of warps.
"""

from typing import Final

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

NUM_BARRIERS: Final = 16


@gluon.jit
def barrier_sync(number, NUM_THREADS: gl.constexpr):
    """Waits until NUM_THREADS threads, those of this warp included, have come to the barrier."""
    operands = [gl.to_tensor(number), gl.to_tensor(NUM_THREADS)]
    gl.inline_asm_elementwise("bar.sync $1, $2; // $0", "=r,r,r", operands, gl.int32, False, 1)


@gluon.jit
def barrier_arrive(number, NUM_THREADS: gl.constexpr):
    """This warp comes to the barrier, and does not wait, unlike with `mbarrier.arrive`: Triton has all warps of the
    partition meet before that, and Triton 3.6 behind it too."""
    operands = [gl.to_tensor(number), gl.to_tensor(NUM_THREADS)]
    gl.inline_asm_elementwise("bar.arrive $1, $2; // $0", "=r,r,r", operands, gl.int32, False, 1)
