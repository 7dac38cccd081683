"""The back end on NVIDIA GPUs.

Kernels plan each decode step into fixed buffers. In a decode graph they are recorded with the model: before a replay
one launch brings the block table there, from SGLang's request table, which SGLang changes for the next step while the
graph runs. So no decode step waits for its plan. (The counts of KV reads are fetched without a wait too, unless 256
steps pass before a fetch arrives.)

Prompts, when they run here too, and batches of more requests than the buffers hold are planned on the host, which waits
for the device.
"""

from dataclasses import dataclass
from typing import Any, Final

import torch

from trunkattn import AttentionConfig, BatchAttention, Capacity, Plan
from trunkattn.integrations.common import DeviceTraffic, count_arrivals
from trunkattn.integrations.sglang import versions
from trunkattn.integrations.sglang.backend import TrunkBackend
from trunkattn.integrations.sglang.device_tables import DeviceTables
from trunkattn.integrations.sglang.layers import LayerKind, check_supported
from trunkattn.integrations.sglang.name import NAME, logger
from trunkattn.integrations.warm_up import host_planner, run_zeros, warm_up

_ROWS: Final = 256  # requests of a decode step that are planned on the device, or more if SGLang captures more
_OLDEST: Final = (8, 0)  # compute capability


@dataclass(frozen=True)
class DeviceStep:
    """A decode step that is planned on the device.

    Attributes:
        rows: requests, with padding.
        padding: rows of one token in the page that no request has.
        path: for the counters; None: a step that SGLang captures, which is not counted.
    """

    rows: int
    padding: int
    path: str | None


class TrunkCudaBackend(TrunkBackend):
    """See TrunkBackend."""

    def __init__(self, runner: Any) -> None:
        capability = torch.cuda.get_device_capability()
        if capability < _OLDEST:
            found, oldest = (".".join(map(str, each)) for each in (capability, _OLDEST))
            check_supported([f"this GPU of compute capability {found}, only {oldest} and newer"])
        super().__init__(runner)
        self.device = torch.device("cuda", torch.cuda.current_device())
        prefill, _ = versions.backends(runner)
        self._host_planner = host_planner(batch_invariant=False) if prefill == NAME else None  # which plans prompts
        self._most_rows = min(_ROWS, self.req_to_token_pool.size)
        self._tables: DeviceTables | None = None
        self._attentions: dict[tuple[AttentionConfig, bool], BatchAttention] = {}
        self._plans: dict[LayerKind, tuple[BatchAttention, Plan]] = {}  # every step refills them
        self._traffic: DeviceTraffic | None = None

    def shared_read_ends(self, mode: Any) -> Any:
        """Where a step has read the request table; SGLang asks from 0.5.18 on."""
        return versions.reads_end_before_replay() if mode.is_decode() else super().shared_read_ends(mode)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Makes room for the largest decode graph. What smaller steps were planned in before is made anew."""
        self._most_rows = max(self._most_rows, max_bs)
        if self._tables is not None and self._tables.rows < max_bs:
            self._tables, self._step = None, None
            self._attentions, self._plans = {}, {}

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Begins a step outside of any graph."""
        mode, rows = forward_batch.forward_mode, forward_batch.batch_size
        if mode.is_decode() and 0 < rows <= self._most_rows:
            self._finish_step()
            self._fill(forward_batch)
            self._step = DeviceStep(rows, 0, "decode")
            self.init_forward_metadata_in_graph(forward_batch)
        else:
            super().init_forward_metadata(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Brings a decode step's tables to where its graph reads them, before the graph is captured or replayed.

        Raises:
            ValueError: the graph is one of prompts.
        """
        if not forward_batch.forward_mode.is_decode_or_idle():
            check_supported(["prompts in full CUDA graphs (cuda_graph_backend_prefill=full)"])
        self._finish_step()
        self._fill(forward_batch)
        padding = getattr(forward_batch, "num_padding", None) or 0
        self._step = DeviceStep(forward_batch.batch_size, padding, None if in_capture else "full_graph")

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Plans a decode step. SGLang records it into the decode graph."""
        for kind, (attention, plan) in self._plans.items():
            self._plan(kind, attention, plan)

    def _fill(self, batch: Any) -> None:
        if self._tables is None:
            self._tables = DeviceTables(self._requests, self._most_rows)
        rows = batch.batch_size
        self._tables.fill(batch.req_pool_indices[:rows], batch.seq_lens[:rows], batch.out_cache_loc)
        self._window_slots = self._tables.window_slots

    def _plan(self, kind: LayerKind, attention: BatchAttention, into: Plan | None) -> Plan:
        assert self._tables is not None
        rows = slice(0, self._step.rows)
        table, lens = self._tables.tables[kind.in_window_pool][rows], self._tables.seq_lens[rows]
        return attention.plan(table, lens, sliding_window=kind.spec.sliding_window, into=into)

    def _planned(self, kind: LayerKind) -> tuple[BatchAttention, Plan]:
        if not isinstance(self._step, DeviceStep):
            if self._host_planner is not None:
                self._host_planner.wait()
            return super()._planned(kind)
        if kind not in self._plans:  # the first step, which SGLang runs before it captures one
            attention, caches = self._attention(kind), self._caches(self._layer_of(kind))

            def work() -> None:
                plan = self._plan(kind, attention, self._plans[kind][1] if kind in self._plans else None)
                self._plans[kind] = (attention, plan)
                run_zeros(attention, plan, caches, self._step.rows)

            warm_up(work)
        return self._plans[kind]

    def _layer_of(self, kind: LayerKind) -> int:
        return next(layer_id for layer_id, each in self._kinds.items() if each == kind)

    def _attention(self, kind: LayerKind) -> BatchAttention:
        key = (kind.spec.config(self.page_size), kind.in_window_pool)
        if key not in self._attentions:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError("a layer first runs in a CUDA graph: expected a step before the capture")
            assert self._tables is not None
            keys, _ = self._caches(self._layer_of(kind))
            capacity = Capacity(
                max_requests=self._tables.rows,
                max_query_tokens=self._tables.rows,
                max_pages_per_request=self._requests.max_pages,
                num_pages=len(keys),
                max_query_len=1,
            )
            self._attentions[key] = BatchAttention(key[0], self.device, capacity)
        return self._attentions[key]

    def _finish_step(self) -> None:
        if not isinstance(self._step, DeviceStep):
            super()._finish_step()
            return
        step, self._step = self._step, None
        if step.path is None or not self._plans:
            return
        if self._traffic is None:
            errors = [each.errors for each in self._attentions.values() if each.errors is not None]
            self._traffic = DeviceTraffic(len(self._plans), self.device, errors)
        self.stats.count_step(step.path)
        plans = [plan.traffic for _, plan in self._plans.values()]
        self._traffic.note(plans, step.rows - step.padding, step.padding)
        layers = list(self._kinds.values())
        token_bytes = [kind.spec.kv_token_bytes * layers.count(kind) for kind in self._plans]
        count_arrivals(self.stats, self._traffic, token_bytes, logger.error)
