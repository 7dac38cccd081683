"""Code that the Hopper kernels share, in Gluon: arguments, programmatic dependent launch, the order of tasks, and TMA.

All three kernels take `(layer, k_desc, v_desc, work, ..., C)`. These are the tensors of one layer, the TMA descriptors
of its caches, the arrays of a plan, and constants. Only the first three change from layer to layer.

Two limits of Triton 3.6 to 3.9 shape these arguments. A TMA descriptor inside a tuple is not expanded, so `k_desc` and
`v_desc` are parameters of their own. `do_not_specialize` does not reach into a tuple, so what differs between launches
of one kernel is passed as separate numbers.
"""

from typing import Any, Final, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from trunkattn import numerics
from trunkattn.gpu.hopper import spec
from trunkattn.gpu.layer import Tensors
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


class Layer(NamedTuple):
    """Tensors of one layer, and their strides.

    q and out are [T, Hq, D]. The other tensors are float32: lse [T, Hq], partial [slots, Hq, D], partial_lse
    [slots, Hq], logit_scale and v_scale [Hkv], and sinks [Hq]. logit_scale includes log2(e), unless logits are
    capped."""

    q: Any
    out: Any
    lse: Any
    partial: Any
    partial_lse: Any
    logit_scale: Any
    v_scale: Any
    sinks: Any
    q_token_stride: Any
    q_head_stride: Any
    out_token_stride: Any
    out_head_stride: Any
    k_page_stride: Any
    k_token_stride: Any
    k_head_stride: Any
    v_page_stride: Any
    v_token_stride: Any
    v_head_stride: Any


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
def scheduled_task(items, turn, cta, num_ctas, num_tasks, NUM_KV_HEADS: gl.constexpr):
    """Returns the task of CTA `cta` at `turn`, which grows by `num_ctas` from one task to the next. The heaviest items
    come first. Every second round runs backwards, so that all CTAs end at about the same time."""
    first = turn - cta
    backwards = (first // num_ctas % 2 == 1) & (first + num_ctas <= num_tasks)
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


_TMA_BOX: Final = (1, BOX_TOKENS.value, 1, BOX_DIMS.value)
_TMA_LAYOUT: Final = gl.NVMMASharedLayout(128, 16, 4)


def layer_of(t: Tensors) -> Layer:
    """Returns the argument `layer` of the kernels."""
    return Layer(
        q=t.q,
        out=t.out,
        lse=t.lse,
        partial=t.partial,
        partial_lse=t.partial_lse,
        logit_scale=t.logit_scale,
        v_scale=t.v_scale,
        sinks=t.sinks,
        q_token_stride=t.q.stride(0),
        q_head_stride=t.q.stride(1),
        out_token_stride=t.out.stride(0),
        out_head_stride=t.out.stride(1),
        k_page_stride=t.k_cache.stride(0),
        k_token_stride=t.k_cache.stride(1),
        k_head_stride=t.k_cache.stride(2),
        v_page_stride=t.v_cache.stride(0),
        v_token_stride=t.v_cache.stride(1),
        v_head_stride=t.v_cache.stride(2),
    )


def tma_descriptors(t: Tensors) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Returns the arguments `k_desc` and `v_desc` of the kernels. A TMA box holds 16 tokens of a page and 64 dims of a
    head. Beyond the last dim of a head TMA fills the box with zeros."""
    return _tma_descriptor(t.k_cache), _tma_descriptor(t.v_cache)


def _tma_descriptor(cache: torch.Tensor) -> TensorDescriptor:
    return TensorDescriptor(cache, list(cache.shape), list(cache.stride()), [*_TMA_BOX], _TMA_LAYOUT)


LAYER: Final = ("layer", "k_desc", "v_desc")  # the arguments of the kernels that differ from layer to layer


def of_layer(t: Tensors) -> tuple[Layer, TensorDescriptor, TensorDescriptor]:
    """Returns the arguments that `LAYER` names."""
    return layer_of(t), *tma_descriptors(t)
