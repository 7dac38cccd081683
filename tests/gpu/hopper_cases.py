"""Layers, lists and launches of the Hopper kernels without a GPU: tensors that say that they are on one, a list of
decodes, and a kernel that notes its calls."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from trunkattn.gpu.hopper import spec
from trunkattn.gpu.layer import Geometry, Tensors
from trunkattn.gpu.portable import spec as portable_spec
from trunkattn.gpu.tiles import PrefillTile
from trunkattn.planner.work_list import UNLIMITED, TileLimits, TileList

from .kernel_cases import make_card

CARD = make_card()
GEOMETRY = Geometry(8, 2, 128, 128, 16, 16, UNLIMITED, False, None, False)
LIMITS = TileLimits(items=8, segments=8, queries=8, merged=8, slots=8, query_tokens=8)


class OnCard(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


@dataclass
class Recorder:
    """Stands in for a kernel. names: of its arguments. calls: (CTAs, arguments in that order, others)."""

    names: tuple[str, ...] = ()
    calls: list[tuple[int, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def call(**given: Any) -> None:
            self.calls.append((grid[0], tuple(given.pop(name) for name in self.names), given))

        return call


def prefill_tile(head_dim: int, hopper: bool = True) -> PrefillTile:
    return spec.prefill_tile(head_dim) if hopper else portable_spec.prefill_tile(2, head_dim)


def make_tensors(dtype: torch.dtype = torch.bfloat16, kv_dtype: torch.dtype | None = None) -> Tensors:
    k_cache, v_cache = (torch.zeros(8, 16, 2, 128, dtype=kv_dtype or dtype) for _ in range(2))
    q = torch.zeros(64, 8, 128, dtype=dtype)
    floats = {name: torch.zeros(2) for name in ("lse", "partial", "partial_lse", "logit_scale", "v_scale", "sinks")}
    return Tensors(q.as_subclass(OnCard), k_cache, v_cache, torch.empty_like(q), **floats)


def make_list() -> TileList:
    """Decodes of one segment each: a low item, one of 32 rows, and two of 64, whose query is in two pieces."""
    ints = np.arange(4, dtype=np.int32)
    segment = np.array([16, 1 << 8 | 16 << 16, 0], np.int32)
    return TileList(
        items=np.stack([ints, ints, ints + 1, ints, ints + 1], 1), segments=np.tile(segment, (4, 1)),
        queries=np.array([0, 1, 2, 2], np.int32), partial_slots=np.array([-1, -1, 0, 1], np.int32),
        merge_slots=np.zeros((4, 2), np.int32), counts=np.array([0, 1, 2, 4, 4, 4, 4], np.int32),
        merge_queries=ints[2:3], merge_ranges=np.array([[0, 2]], np.int32), num_slots=2, merges_taller=True,
    )  # fmt: skip
