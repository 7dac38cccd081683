"""What the kernels for Hopper have in common, in Gluon: boxes of the copy engine, barriers, tasks, the softmax."""

from typing import TYPE_CHECKING

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from trunkattn.plan_format import DIRECT

if TYPE_CHECKING:
    from trunkattn.kernels.gpu import Geometry, Tensors

_DIRECT = gl.constexpr(DIRECT)
DIM = gl.constexpr(128)
BOX = gl.constexpr(16)  # tokens that the copy engine brings at once: what a page holds a multiple of
ROWS = gl.constexpr(64)  # of a warp group
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
WIDE = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))  # 16 bytes a thread, to and from memory
NOTHING = gl.constexpr(-1e30)  # maximum of no logit: finite, so that differences are never NaN
# Named barriers: the first of those by which a ring's slots are given back. Triton takes 0, 1 and one for each further
# role; there are 16
KEYS_BACK, VALUES_BACK, RING_BACK = gl.constexpr(8), gl.constexpr(10), gl.constexpr(12)
_LN_2 = gl.constexpr(0.6931471805599453)
# names of Triton 3.9, and of 3.6
load_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
meet = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
_REINTERPRETS = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def launch_dependents():
    """What is launched to overlap this program may start when all others are as far (programmatic dependent launch)."""
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, False, 1)


@gluon.jit
def wait_for_the_launch_ahead():
    """Returns when it is over, and so all before it if it waited too (programmatic dependent launch)."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], gl.int32, False, 1)


@gluon.jit
def rolled(count: gl.constexpr):
    """The same number, as one that compilers do not know (launches have one program in y), so that a loop of so many
    turns stays a loop: what a multiprocessor runs at once, in all roles, is to fit in its instruction cache."""
    return count - 1 + gl.num_programs(1)


@gluon.jit
def task_of(turn, program, programs, num_tasks, NUM_KV_HEADS: gl.constexpr):
    """Item and KV head of a turn of one of so many programs. Items are heaviest first; every other round goes
    backwards, so that all programs end at about the same time."""
    first = turn - program
    backwards = (first // programs % 2 == 1) & (first + programs <= num_tasks)
    task = gl.where(backwards, first + programs - 1 - program, turn)
    return task // NUM_KV_HEADS, task % NUM_KV_HEADS


@gluon.jit
def rows_at(index, stride):
    """index * stride, in 64 bits; neither is negative or has more than 32. Unsigned, the stride has no upper half to be
    kept."""
    return index.to(gl.uint32).to(gl.int64) * gl.to_tensor(stride).to(gl.uint32).to(gl.int64)


@gluon.jit
def tiles_of(ring, BLOCK_N: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr):
    """The ring's boxes as blocks of BLOCK_N rows: they lie as a swizzled tile has its rows."""
    if _REINTERPRETS:
        return ring.reinterpret(ring.dtype, [STAGES, BLOCK_N, DIM], TILE)
    else:
        return ring._reinterpret(ring.dtype, [STAGES, BLOCK_N, DIM], TILE)


@gluon.jit
def make_barriers(NUMBER: gl.constexpr):
    """For the copy engine, one for each slot of a ring."""
    bars = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(bars.index(i), count=1)
    return bars


@gluon.jit
def give_back(slot, FIRST: gl.constexpr, THREADS: gl.constexpr):
    """This warp has read a slot of a ring. It does not wait, where `mbarrier.arrive` would: before each of those, and
    with Triton 3.6 behind it too, all warps of a role meet. THREADS: those that give it back and those that take it.

    None has read a slot twice before it is taken back: it is filled again only then. What was given back at the end of
    a kernel is not taken."""
    given = [gl.to_tensor(FIRST) + slot, gl.to_tensor(THREADS)]
    gl.inline_asm_elementwise("bar.arrive $1, $2; // $0", "=r,r,r", given, gl.int32, False, 1)


@gluon.jit
def take_back(count, FIRST: gl.constexpr, THREADS: gl.constexpr, STAGES: gl.constexpr):
    """Before a ring is filled with block `count`: waits until all warps have given back what was in its slot."""
    if count >= STAGES:
        given = [gl.to_tensor(FIRST) + count % STAGES, gl.to_tensor(THREADS)]
        gl.inline_asm_elementwise("bar.sync $1, $2; // $0", "=r,r,r", given, gl.int32, False, 1)


@gluon.jit
def softmax_block(state, scores, scale, seen, MASK: gl.constexpr):
    """Weights of a block, what the sums so far are to be scaled by, and the new maximum and sum. seen: which row sees
    which key."""
    top, total = state
    if MASK:
        scores = gl.where(seen, scores, -float("inf"))
    higher = gl.maximum(top, gl.max(scores, 1) * scale)
    weights = gl.exp2(gl.fma(scores, scale, -higher[:, None]))
    rescale = gl.exp2(top - higher)
    return weights, rescale, (higher, total * rescale + gl.sum(weights, 1))


@gluon.jit
def last_values(acc, weights, count, v_tiles, v_ready, THREADS: gl.constexpr, STAGES: gl.constexpr):
    """Adds the values of the block before `count`, the last of an item."""
    last = (count - 1) % STAGES
    mbarrier.wait(v_ready.index(last), (count - 1) // STAGES % 2)
    acc = warpgroup_mma(weights, v_tiles.index(last), acc, is_async=True)
    acc, weights = warpgroup_mma_wait(0, deps=(acc, weights))
    give_back(last, VALUES_BACK, THREADS)
    return acc


@gluon.jit
def normalized(acc, state):
    """What the softmax ends with: outputs, and the logarithm of the sums."""
    top, total = state
    some = gl.where(total > 0, total, 1.0)  # a row may see nothing of its item
    natural = gl.where(total > 0, top * _LN_2 + gl.log(some), NOTHING)
    return acc * (1.0 / some)[:, None], natural


@gluon.jit
def write_partials(result, natural, slot, used, query_head, partial, partial_lse, ACC: gl.constexpr,
                   NUM_QO_HEADS: gl.constexpr):  # fmt: skip
    """The rows that have a slot, if any. ACC: layout of result."""
    if gl.max(slot, 0) != _DIRECT:
        kept = used & (slot != _DIRECT)
        slot_at = slot.to(gl.int64) * NUM_QO_HEADS + query_head
        d = gl.arange(0, DIM, gl.SliceLayout(0, ACC))[None, :]
        gl.store(partial + slot_at[:, None] * DIM + d, result, mask=kept[:, None])
        gl.store(partial_lse + slot_at, natural, mask=kept)


def reads(t: "Tensors", geometry: "Geometry") -> bool:
    """Whether the kernels with roles take this attention: 16-bit queries and cache, heads of 128, pages of whole 16
    tokens, neither soft cap nor sinks, caches that the copy engine can read (16-byte aligned rows)."""
    caches = (t.k_cache, t.v_cache)
    return (
        t.q.dtype in (torch.bfloat16, torch.float16)
        and all(cache.dtype == t.q.dtype for cache in caches)
        and geometry.head_dim == geometry.head_dim_v == DIM.value
        and geometry.page_size % BOX.value == 0
        and geometry.soft_cap is None
        and not geometry.sinks
        and all(cache.data_ptr() % 16 == 0 and cache.stride(-1) == 1 for cache in caches)
        and all(stride % 8 == 0 for cache in caches for stride in cache.stride()[:-1])
    )


def descriptor(cache: torch.Tensor) -> TensorDescriptor:
    """For the copy engine: boxes of 16 tokens of a page and 64 dims of a head."""
    box = [1, BOX.value, 1, DIM.value // 2]
    return TensorDescriptor(cache, list(cache.shape), list(cache.stride()), box, gl.NVMMASharedLayout(128, 16, 4))
