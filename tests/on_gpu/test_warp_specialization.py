"""Partitions of warps that share nothing but barriers, and partitions that exchange values by them in the plainest way:
what the race checker says of them is not of our making."""

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from trunkattn.gpu.hopper.barriers import barrier_arrive, barrier_sync
from trunkattn.gpu.hopper.pipeline import warps_sync

pytestmark = pytest.mark.gpu
NUM_PROGRAMS = 264
TURNS = gl.constexpr(5)
BAR_BOTH, BAR_LEFT, BAR_RIGHT, BAR_TOLD = (gl.constexpr(8 + i) for i in range(4))
BOTH, ALL = gl.constexpr(256), gl.constexpr(288)  # threads of the two warpgroups, and with the teller's warp
NUMBERS = gl.constexpr(64)
IN_WARPGROUP = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
IN_WARP = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))


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


@gluon.jit
def _left(shared, told, out):
    """Sums what the right warpgroup and the teller wrote at each turn."""
    at = gl.arange(0, NUMBERS, IN_WARPGROUP)
    total = gl.zeros([NUMBERS], gl.int32, IN_WARPGROUP)
    for turn in range(TURNS):
        shared.index(0).store(at + turn)
        barrier_sync(BAR_BOTH, BOTH)
        total += shared.index(1).load(IN_WARPGROUP)
        barrier_arrive(BAR_LEFT, BOTH)
        barrier_sync(BAR_RIGHT, BOTH)
        mbarrier.wait(told, turn & 1)
        total += shared.index(2).load(IN_WARPGROUP)
        barrier_arrive(BAR_TOLD, ALL)
    gl.store(out + at, total)


@gluon.jit
def _right(shared, told, out):
    """Sums what the left warpgroup and the teller wrote at each turn."""
    at = gl.arange(0, NUMBERS, IN_WARPGROUP)
    total = gl.zeros([NUMBERS], gl.int32, IN_WARPGROUP)
    for turn in range(TURNS):
        shared.index(1).store(2 * at + turn)
        barrier_sync(BAR_BOTH, BOTH)
        total += shared.index(0).load(IN_WARPGROUP)
        barrier_sync(BAR_LEFT, BOTH)
        barrier_arrive(BAR_RIGHT, BOTH)
        mbarrier.wait(told, turn & 1)
        total += shared.index(2).load(IN_WARPGROUP)
        barrier_arrive(BAR_TOLD, ALL)
    gl.store(out + NUMBERS + at, total)


@gluon.jit
def _tell(shared, told):
    at = gl.arange(0, NUMBERS, IN_WARP)
    for turn in range(TURNS):
        shared.index(2).store(3 * at + turn)
        warps_sync()
        mbarrier.arrive(told, count=1)
        barrier_sync(BAR_TOLD, ALL)


@gluon.jit
def exchanging_kernel(out):
    told = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout()).index(0)
    mbarrier.init(told, count=1)
    shared = gl.allocate_shared_memory(gl.int32, [3, NUMBERS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    out += gl.program_id(0) * 2 * NUMBERS
    gl.warp_specialize(
        [(_left, (shared, told, out)), (_right, (shared, told, out)), (_tell, (shared, told))], [4, 1], [24, 24]
    )


def test_partitions_alone_for_the_sanitizer() -> None:
    if torch.cuda.get_device_capability()[0] < 9:
        return  # such barriers came with Hopper
    out = torch.full((NUM_PROGRAMS,), -1, dtype=torch.int32, device="cuda")
    warp_specialized_kernel[(NUM_PROGRAMS,)](out, num_warps=4)
    assert out.tolist() == [program % 7 for program in range(NUM_PROGRAMS)]
    both = torch.empty(NUM_PROGRAMS, 2, NUMBERS.value, dtype=torch.int32, device="cuda")
    exchanging_kernel[(NUM_PROGRAMS,)](both, num_warps=4)
    at, turns = torch.arange(NUMBERS.value, device="cuda"), TURNS.value
    expected = [factor * turns * at + turns * (turns - 1) for factor in (5, 4)]
    assert torch.equal(both, torch.stack(expected).int().expand_as(both))
