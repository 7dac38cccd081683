"""Run by test_device_plan in a process of its own, in which Triton compiles. Argument: compute capability.

Records the launches of a planner, which are never run, and compiles them. Prints JSON: kernel and group size ->
registers, spilled bytes, shared bytes.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from trunkattn.config import Capacity
from trunkattn.gpu.cards import H100
from trunkattn.gpu.device_planner import batch_invariant, common, cost, items, layout, prefix_forest, tile_list
from trunkattn.gpu.device_planner.batch_invariant import InvariantPlanner
from trunkattn.gpu.device_planner.candidates import candidates_of
from trunkattn.gpu.device_planner.planner import DevicePlanner
from trunkattn.gpu.layer import Geometry
from trunkattn.gpu.portable.spec import INVARIANT_TILE
from trunkattn.gpu.portable.spec import tiles_of as decode_tiles
from trunkattn.gpu.tiles import tile_config
from trunkattn.planner.tiles.batch_invariant import invariant_limits
from trunkattn.planner.tiles.candidates import TilingRule, tile_limits

from .kernel_cases import make_card, reserved

KERNELS = {
    prefix_forest: ("hash_kernel", "links_kernel", "entries_kernel"),
    layout: ("tiles_kernel",),
    cost: ("candidates_kernel",),
    items: ("items_kernel",),
    tile_list: ("lists_kernel",),
    batch_invariant: ("spans_kernel", "span_items_kernel", "span_segments_kernel"),
}
TYPES = {torch.int32: "*i32", torch.int64: "*i64"}


def record(group_size: int, capability: int, is_invariant: bool = False) -> list[tuple[Any, tuple, dict[str, Any]]]:
    """(kernel, arguments, options) of each launch, for pages of 16 and the tiles of a 16-bit cache."""
    launches: list[tuple[Any, tuple, dict[str, Any]]] = []

    class Recorder:
        def __init__(self, kernel: Any) -> None:
            self.recorded = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *arguments, **options: launches.append((self.recorded, arguments, options))

    for module, names in KERNELS.items():
        for name in names:
            kernel = getattr(module, name)
            setattr(module, name, Recorder(getattr(kernel, "recorded", kernel)))
    tiles = (INVARIANT_TILE,) if is_invariant else decode_tiles(2, 128, group_size)
    configs = tuple(tile_config(replace(it, ctas_per_sm=2), 132) for it in tiles)
    rule = TilingRule(configs, group_size, 8, 16, H100.times, 512, 10_000, 8, 50 << 20, batch_invariant=is_invariant)
    capacity = Capacity(256, 256, 512, 1 << 16)
    limits = invariant_limits(256, 512 * 16, 16) if is_invariant else tile_limits(rule, capacity)
    card = make_card(132, capability)
    kind = InvariantPlanner if is_invariant else DevicePlanner
    planner = kind(candidates_of(rule), capacity, limits, card, torch.device("cpu"))
    geometry = Geometry(8 * group_size, 8, 128, 128, 16, rule.segment_size, 1 << 30, True, None, False)
    plan = reserved(limits, geometry, tiles, make_card())
    table, lens, starts = (torch.zeros(size, dtype=torch.int32) for size in ((256, 512), 256, 257))
    planner.fill(plan, table, lens, starts, 1 << 30)
    return launches


def type_of(value: Any) -> Any:
    """Triton's type of an argument, by its fields if it has several."""
    if isinstance(value, tuple):
        return type(value)(*map(type_of, value))
    return TYPES[value.dtype] if torch.is_tensor(value) else "i32"


def pointers(kind: Any, path: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Where the pointers of an argument stand."""
    if isinstance(kind, tuple):
        for index, field in enumerate(kind):
            yield from pointers(field, (*path, index))
    elif kind.startswith("*"):
        yield path


def compiled(kernel: Any, arguments: tuple, options: dict[str, Any], capability: int) -> dict[str, int]:
    """A launch as a GPU would compile it; its numbers are taken as unknown."""
    values = dict(zip(kernel.arg_names, arguments, strict=False))
    values |= {name: options.pop(name) for name in list(options) if name in kernel.arg_names}
    constants = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
    signature = {name: "constexpr" if name in constants else type_of(values[name]) for name in kernel.arg_names}
    aligned = {
        path: [["tt.divisibility", 16]]
        for index, kind in enumerate(signature.values())
        for path in pointers(kind, (index,))
    }
    changing = {name for name in common.NUMBERS if name in kernel.arg_names}
    assert all(parameter.do_not_specialize for parameter in kernel.params if parameter.name in changing), kernel
    fixed = {(index,): values[name] for index, name in enumerate(kernel.arg_names) if name in constants}
    source = ASTSource(kernel, signature, fixed, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [str(Path(nvidia.__file__).parent / "bin" / "cuobjdump"), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = {name: int(value) for name, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", text)}
    shared = max(used["SHARED"], made.metadata.shared)
    return {"registers": used["REG"], "spilled": used["STACK"] + used["LOCAL"], "shared": shared}


def main() -> None:
    capability = int(sys.argv[1])
    launches = {group_size: record(group_size, capability) for group_size in (1, 4)}
    launches[4] += record(4, capability, is_invariant=True)[3:]  # behind those that order the requests
    report = {
        f"{kernel.__name__} {group_size}": compiled(kernel, arguments, options, capability)
        for group_size, recorded in launches.items()
        for kernel, arguments, options in recorded
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
