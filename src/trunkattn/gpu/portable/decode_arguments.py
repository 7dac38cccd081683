"""What the portable decode kernels take besides a layer, by name, and how it is made from a plan."""

from typing import Any, NamedTuple

from trunkattn.gpu.arrays import GpuPlan
from trunkattn.gpu.launch_order import Launch, LaunchOptions
from trunkattn.gpu.layer import Tensors
from trunkattn.gpu.portable import arguments
from trunkattn.gpu.portable.spread import spread_stride
from trunkattn.gpu.tiles import GpuTile


class DecodeWork(NamedTuple):
    """The arrays of a `TileList` on the device, and the position of each query token in its sequence. `merge_slots`
    holds for each of an item's queries the partial slots [first, last) that it merges."""

    items: Any
    counts: Any
    segments: Any
    queries: Any
    partial_slots: Any
    merge_slots: Any
    positions: Any


class DecodeTile(NamedTuple):
    """Constants of a tile of `block_m` rows and `block_n` keys. A subtile's block has `private_n` keys, a full segment
    has `segment_size` tokens, and `stages` blocks are in flight."""

    block_m: int
    block_n: int
    segment_size: int
    subtiles: int
    private_n: int
    stages: int


class Buckets(NamedTuple):
    """Constants of a launch, which computes the items of bucket `first`, and of bucket `second` unless that is
    negative. `merge` says that the items merge partials. CTA i begins with task i * `stride`, as `spread_stride`
    explains."""

    first: int
    second: int
    merge: bool
    stride: int = 1


def decode_arguments(plan: GpuPlan, t: Tensors, launch: Launch, options: LaunchOptions) -> dict[str, Any]:
    """Returns the arguments of `decode_kernel`, and how it is compiled and launched."""
    arrays, geometry, heights = plan.arrays, plan.geometry, len(plan.tiles)
    tile = plan.tiles[launch.buckets[0] % heights]
    return {
        "operands": arguments.operands(t),
        "work": DecodeWork(
            items=arrays["items"],
            counts=arrays[launch.counts],
            segments=arrays["segments"],
            queries=arrays["queries"],
            partial_slots=arrays["partial_slots"],
            merge_slots=arrays["merge_slots"],
            positions=arrays["positions"],
        ),
        "modifiers": arguments.modifiers(t, geometry),
        "strides": arguments.strides(t),
        "SHAPE": arguments.shape(geometry),
        "TILE": decode_tile(tile, geometry.segment_size),
        "FEATURES": arguments.features(geometry, t.q.dtype, options.return_lse),
        "BUCKETS": Buckets(
            first=launch.buckets[0],
            second=launch.buckets[1] if len(launch.buckets) > 1 else -1,
            merge=launch.buckets[-1] >= heights,
            stride=spread_stride(launch.num_ctas) if launch.spread else 1,
        ),
        "num_warps": tile.warps,
        **arguments.pdl(options),
    }


def decode_tile(tile: GpuTile, segment_size: int) -> DecodeTile:
    """Returns the constants of a tile of the table."""
    return DecodeTile(
        block_m=tile.block_m,
        block_n=tile.block_n,
        segment_size=segment_size,
        subtiles=tile.subtiles,
        private_n=tile.private_n,
        stages=tile.stages,
    )
