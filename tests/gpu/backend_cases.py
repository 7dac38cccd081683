"""A `GpuBackend` on a pretended GPU, with its caches, and the oracle beside it."""

import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.workloads import PagedBatch
from trunkattn import AttentionConfig
from trunkattn.gpu.attention import GpuBackend
from trunkattn.layer_inputs import LayerInputs
from trunkattn.planner.planner import StepTables
from trunkattn.planner.work_list import UNLIMITED
from trunkattn.reference import paged_attention

from .guarded_loads import guarded_loads

CONFIG = AttentionConfig(num_qo_heads=4, num_kv_heads=2, head_dim=32, page_size=16, dtype=torch.float32)


def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes torch find a GPU of two SMs, whose kernels Triton's interpreter runs on CPU tensors."""
    properties = SimpleNamespace(name="NVIDIA H200", multi_processor_count=2, major=8, minor=0, L2_cache_size=50 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())


def caches(batch: PagedBatch, config: AttentionConfig) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (batch.num_pages + 2, config.page_size, config.num_kv_heads)
    k, v = (torch.randn(*shape, dim, generator=generator) for dim in (config.head_dim, config.value_dim))
    k[batch.num_pages :], v[batch.num_pages :] = math.nan, math.nan
    return k, v


def plan(backend: GpuBackend, batch: PagedBatch, rows: list[int] | None = None, window: int = UNLIMITED) -> Any:
    rows = list(range(len(batch.seq_lens))) if rows is None else rows
    starts = np.append(0, np.cumsum(batch.query_lens[rows])).astype(np.int32)
    return backend.plan(StepTables(batch.block_table[rows], batch.seq_lens[rows], starts, window))


def run(
    backend: GpuBackend, step: Any, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (len(q), backend.config.num_qo_heads, backend.config.value_dim)
    out = options.pop("out", torch.full(shape, math.nan))
    layer = LayerInputs(q=q, k_cache=kv[0], v_cache=kv[1], out=out, return_lse=True, **options)
    with guarded_loads():
        return out, backend.run(step, layer, out)


def expected(batch: PagedBatch, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], **options: Any) -> Any:
    arrays = (torch.from_numpy(array) for array in (batch.block_table, batch.seq_lens, batch.query_start_loc))
    return paged_attention(q, *kv, *arrays, **options)
