"""What passes for a GPU: its back end with plans and kernels of the CPU, stepped as by SGLang's decode graphs."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from trunkattn.integrations import prompt_plans, warm_up
from trunkattn.integrations.sglang import backend, cuda

from ..vllm.device_attention import DeviceAttention
from .fakes import ROWS


class HostTables(cuda.DeviceTables):
    """Fills the same buffers from the host."""

    def fill(
        self,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        out_slots: torch.Tensor | None,
        query_lens: torch.Tensor | None = None,
    ) -> None:
        self.seq_lens[: len(rows)] = seq_lens
        if query_lens is not None:
            self.query_start_loc[1 : len(rows) + 1] = query_lens.cumsum(0)
        for pool, table in self.tables.items():
            found = self._requests.block_table(rows, int(seq_lens.max()), pool)
            table[: len(rows), : found.shape[1]] = found
        if self.window_slots is not None and self._requests.to_window is not None and out_slots is not None:
            self.window_slots.zero_()
            self.window_slots[: len(out_slots)] = self._requests.to_window[out_slots]


def set_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans, kernels and tables are the CPU's."""
    for module in (cuda, prompt_plans, backend):
        monkeypatch.setattr(module, "BatchAttention", DeviceAttention)
    monkeypatch.setattr(cuda, "DeviceTables", HostTables)
    monkeypatch.setattr(warm_up, "compiled_together", nullcontext)  # a CPU compiles nothing
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def make_backend(runner: Any, graphs_of: int = ROWS) -> Any:
    made = cuda.TrunkCudaBackend(runner)
    made.device = torch.device("cpu")
    made.init_cuda_graph_state(graphs_of, graphs_of)
    return made


def replay(made: Any, batch: Any) -> None:
    """What a decode graph does, and what SGLang calls before."""
    made.init_forward_metadata_out_graph(batch)
    made.init_forward_metadata_in_graph(batch)
