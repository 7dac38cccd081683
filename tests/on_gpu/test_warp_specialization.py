"""Partitions of warps that share nothing but barriers: what the race checker says of them is not of our making."""

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

pytestmark = pytest.mark.gpu
NUM_PROGRAMS = 264


@gluon.jit
def _ask(turns, asked, answered):
    for turn in range(turns):
        mbarrier.arrive(asked, count=1)
        mbarrier.wait(answered, turn & 1)


@gluon.jit
def _answer(turns, asked, answered, out):
    for turn in range(turns):
        mbarrier.wait(asked, turn & 1)
        mbarrier.arrive(answered, count=1)
    gl.store(out + gl.program_id(0), turns)


@gluon.jit
def warp_specialized_kernel(out):
    barriers = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(barriers.index(i), count=1)
    turns = gl.program_id(0) % 7
    asked, answered = barriers.index(0), barriers.index(1)
    gl.warp_specialize([(_answer, (turns, asked, answered, out)), (_ask, (turns, asked, answered))], [1], [24])


def test_partitions_alone_for_the_sanitizer() -> None:
    if torch.cuda.get_device_capability()[0] < 9:
        return  # such barriers came with Hopper
    out = torch.full((NUM_PROGRAMS,), -1, dtype=torch.int32, device="cuda")
    warp_specialized_kernel[(NUM_PROGRAMS,)](out, num_warps=4)
    assert out.tolist() == [program % 7 for program in range(NUM_PROGRAMS)]
