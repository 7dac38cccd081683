"""Code that the Hopper kernels share, in Gluon: programmatic dependent launch, the order of tasks, and partials."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from trunkattn import numerics
from trunkattn.gpu.hopper import spec
from trunkattn.planner.work_list import DIRECT, ITEM_COLUMNS

BOX_DIMS = gl.constexpr(spec.BOX_DIMS)  # dims of a TMA box; a head is padded to a multiple of them
BOX_TOKENS = gl.constexpr(spec.PAGE_UNIT)  # tokens of a TMA box; a page holds a multiple of them
WARPGROUP_ROWS = gl.constexpr(64)  # rows of a warpgroup's matrix product
SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
NEG_INF = gl.constexpr(numerics.NEG_INF)
PRODUCER_REGISTERS = gl.constexpr(24)  # of each thread; consumers take those that producers leave

_HAS_REINTERPRET = gl.constexpr(
    hasattr(gl.shared_memory_descriptor, "reinterpret")
)  # Triton 3.6 has it under another name
_LINE = gl.constexpr(32)  # numbers in a cache line of 128 bytes
_DIRECT = gl.constexpr(DIRECT)
_ITEM_COLUMNS = gl.constexpr(ITEM_COLUMNS)


class Task(NamedTuple):
    """One work item for one KV head. `item` points to the columns of the work item."""

    item: Any
    kv_head: Any


@gluon.jit
def pdl_trigger():
    """Programmatic dependent launch: the next kernel may start once every CTA of this one has called this."""
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, False, 1)


@gluon.jit
def pdl_wait():
    """Programmatic dependent launch: returns when the kernel ahead has ended, and every kernel that it waited for."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], gl.int32, False, 1)


@gluon.jit
def opaque(count: gl.constexpr):
    """Returns `count` as a number that the compiler does not know, so that it does not unroll a loop. The code that all
    warps of an SM run at the same time must fit the instruction cache. The result is right because every launch has one
    CTA in y."""
    return count - 1 + gl.num_programs(1)


@gluon.jit
def scheduled_task(items, turn, cta, num_ctas, num_tasks, NUM_KV_HEADS: gl.constexpr, full_rounds=0):
    """Returns the task of CTA `cta` at `turn`, which grows by `num_ctas` from one task to the next. The heaviest items
    come first. Rounds alternate in direction, so that all CTAs end at about the same time. A last round that is not
    full runs forwards. Backwards runs the second round and every other one after it or, given their number
    `full_rounds`, the last full round and every other one before it."""
    first = turn - cta
    backwards = ((first // num_ctas + full_rounds) % 2 == 1) & (first + num_ctas <= num_tasks)
    task = gl.where(backwards, first + num_ctas - 1 - cta, turn)
    item, kv_head = task // NUM_KV_HEADS, task % NUM_KV_HEADS
    return Task(items + item * _ITEM_COLUMNS, kv_head)


@gluon.jit
def prefetch_to_l2(array, size, cta, LINES: gl.constexpr):
    """Prefetches the first lines of an array of `size` numbers to the L2 cache. The arrays of a plan have been evicted
    from it since the layer before. Without the prefetch a CTA would wait for memory three times before it knows where
    its keys are."""
    lines = gl.minimum(size // _LINE, LINES)
    first = cta * 128
    if first < lines:
        line = gl.minimum(first + gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0])), lines - 1)
        address = [array + line * _LINE]
        gl.inline_asm_elementwise("prefetch.global.L2 [$1]; // $0", "=r,l", address, gl.int32, False, 1)


@gluon.jit
def reinterpret(memory, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """Returns shared memory viewed as another tensor, with this dtype, shape and layout."""
    if _HAS_REINTERPRET:
        return memory.reinterpret(dtype, shape, layout)
    else:
        return memory._reinterpret(dtype, shape, layout)


@gluon.jit
def row_offset(index, stride):
    """Returns index * stride in 64 bits. Both fit in 32 unsigned bits, so the multiplication needs no upper halves."""
    return index.to(gl.uint32).to(gl.int64) * gl.to_tensor(stride).to(gl.uint32).to(gl.int64)


@gluon.jit
def without_padding(mask, d, C: gl.constexpr, T: gl.constexpr):
    """Returns a mask of rows, restricted to the dims `d` that a head has in memory."""
    if C.head_dim < T.head_dim:
        return mask & (d < C.head_dim)
    else:
        return mask


@gluon.jit
def write_partials(rows, lse, partial_slot, used, query_head, layer, C: gl.constexpr, T: gl.constexpr):
    """Writes the rows that have a partial slot, if there are any. `C` holds the constants of the kernel, and `T` those
    of its main loop."""
    if gl.max(partial_slot, 0) != _DIRECT:
        has_slot = used & (partial_slot != _DIRECT)
        at = partial_slot.to(gl.int64) * C.num_qo_heads + query_head
        d = gl.arange(0, T.head_dim, gl.SliceLayout(0, T.acc))[None, :]
        mask = without_padding(has_slot[:, None], d, C, T)
        gl.store(layer.partial + at[:, None] * C.head_dim + d, rows, mask=mask)
        gl.store(layer.partial_lse + at, lse, mask=has_slot)
