"""The tasks of a launch that decodes on Hopper: how it begins and ends, and which items a CTA computes in which order.

The decode kernel and the kernel of latent attention have this in common.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from trunkattn.gpu.hopper.common import pdl_trigger, pdl_wait, prefetch_to_l2, scheduled_task
from trunkattn.planner.work_list import ITEM_COLUMNS

_ITEM_COLUMNS = gl.constexpr(ITEM_COLUMNS)


class Tasks(NamedTuple):
    """Tasks of a CTA. `items` points to the first item. `full_rounds` counts the rounds in which every CTA has a
    task."""

    items: Any
    num_tasks: Any
    cta: Any
    num_ctas: Any
    full_rounds: Any


@gluon.jit
def begin_launch(pdl):
    """Waits for the launch ahead unless this one may overlap it, and lets the next one start early if it may."""
    if not pdl.wait:
        pdl_wait()
    if pdl.trigger:
        pdl_trigger()


@gluon.jit
def end_launch(pdl):
    """Waits for the launch ahead if it was overlapped: what waits for this launch then also waits for those ahead."""
    if pdl.wait & (gl.program_id(0) == 0):
        pdl_wait()


@gluon.jit
def prefetch_plan(tiles, items_size, queries_size, segments_size, cta):
    """Prefetches the arrays of a tile list to the L2 cache. Each `*_size` is the number of elements of an array."""
    prefetch_to_l2(tiles.items, items_size, cta, 64)
    prefetch_to_l2(tiles.segments, segments_size, cta, 512)
    prefetch_to_l2(tiles.queries, queries_size, cta, 64)
    prefetch_to_l2(tiles.partial_slots, queries_size, cta, 64)


@gluon.jit
def tasks_of(work, first_bucket, last_bucket, cta, num_ctas, NUM_GROUPS: gl.constexpr):
    """Returns the tasks of CTA `cta` of `num_ctas` CTAs, which share the items of buckets first_bucket to last_bucket.
    An item is a task for each of NUM_GROUPS groups of heads."""
    first_item = gl.load(work.counts + first_bucket)
    num_tasks = (gl.load(work.counts + last_bucket + 1) - first_item) * NUM_GROUPS
    return Tasks(work.tiles.items + first_item * _ITEM_COLUMNS, num_tasks, cta, num_ctas, num_tasks // num_ctas)


@gluon.jit
def task_of(tasks, turn, NUM_GROUPS: gl.constexpr):
    """Returns the task at a turn, see `scheduled_task`: an item, and one of NUM_GROUPS groups of heads. The last full
    round runs backwards. So the CTAs that have the lightest tasks of it have one more if a round follows."""
    return scheduled_task(tasks.items, turn, tasks.cta, tasks.num_ctas, tasks.num_tasks, NUM_GROUPS, tasks.full_rounds)
