"""Named barriers, at which some warps of a CTA meet: the warps of several partitions, or a producer and its consumers.

A CTA has 16 of them. Triton itself uses numbers 0 and 1, and one more for each partition of warps.
"""

from typing import Final

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

NUM_BARRIERS: Final = 16


@gluon.jit
def barrier_sync(number, NUM_THREADS: gl.constexpr):
    """Waits until NUM_THREADS threads, including those of this warp, have come to the barrier."""
    operands = [gl.to_tensor(number), gl.to_tensor(NUM_THREADS)]
    gl.inline_asm_elementwise("bar.sync $1, $2; // $0", "=r,r,r", operands, gl.int32, False, 1)


@gluon.jit
def barrier_arrive(number, NUM_THREADS: gl.constexpr):
    """Reports that this warp has come to the barrier, without waiting. `mbarrier.arrive` would wait: Triton makes all
    warps of the partition meet before it, and Triton 3.6 after it too."""
    operands = [gl.to_tensor(number), gl.to_tensor(NUM_THREADS)]
    gl.inline_asm_elementwise("bar.arrive $1, $2; // $0", "=r,r,r", operands, gl.int32, False, 1)
