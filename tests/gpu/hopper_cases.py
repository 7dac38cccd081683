"""Layers and launches of the Hopper kernels without a GPU: tensors that say that they are on one, and a kernel that
notes its calls."""

from dataclasses import dataclass, field
from typing import Any

import torch

from trunkattn.gpu.hopper import spec
from trunkattn.gpu.layer import Geometry, Tensors
from trunkattn.gpu.portable import spec as portable_spec
from trunkattn.gpu.tiles import PrefillTile
from trunkattn.planner.work_list import UNLIMITED

from .kernel_cases import make_card

CARD = make_card()
GEOMETRY = Geometry(8, 2, 128, 128, 16, 16, UNLIMITED, False, None, False)


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
