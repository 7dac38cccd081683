"""The back end on NVIDIA GPUs.

Kernels plan each decode step into fixed buffers. In a decode graph they are recorded with the model: before a replay
one launch brings the block table there, from SGLang's request table, which SGLang changes for the next step while the
graph runs. So no decode step waits for its plan. (The counts of KV reads are fetched without a wait too, unless 256
steps pass before a fetch arrives.)

Steps of prompts, when they run here too, do not wait either (`prompt_plans`), and those of one token each are decodes.
Steps that mix prompts and several decodes, of several short prompts, and batches of more requests or tokens than the
buffers hold are planned on the host, which waits for the device.
"""

from dataclasses import dataclass
from typing import Any, Final

import torch

from trunkattn import AttentionConfig, BatchAttention, Capacity, Plan, PromptChunks
from trunkattn.integrations.device_traffic import DeviceTraffic, count_arrivals
from trunkattn.integrations.prompt_plans import PromptRoom, one_prompt, room_for
from trunkattn.integrations.sglang import versions
from trunkattn.integrations.sglang.backend import TrunkBackend, is_idle
from trunkattn.integrations.sglang.device_tables import DeviceTables
from trunkattn.integrations.sglang.layers import LayerKind, check_supported
from trunkattn.integrations.sglang.name import NAME, logger
from trunkattn.integrations.warm_up import planner_compilation, run_zeros, warm_up

_ROWS: Final = 256  # requests of a decode step that are planned on the device, or more if SGLang captures more


@dataclass(frozen=True)
class DeviceStep:
    """A step of decodes, or of prompts, that is planned on the device.

    Attributes:
        rows: requests, with padding.
        padding: rows of one token in the page that no request has.
        path: for the counters; None: a step that SGLang captures, which is not counted.
        chunks: what the host knows of prompts; None: all rows decode.
    """

    rows: int
    padding: int
    path: str | None
    chunks: PromptChunks | None = None


Plans = dict[LayerKind, tuple[BatchAttention, Plan]]
Tables = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]  # see `BatchAttention.plan`


class TrunkCudaBackend(TrunkBackend):
    """Attention of one model runner on a GPU, with plans made on the device and CUDA graphs; see `TrunkBackend`."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self.device = torch.device("cuda", torch.cuda.current_device())
        prefill, _ = versions.backends(runner)
        self._planner_compilation = planner_compilation(batch_invariant=False) if prefill == NAME else None
        options = versions.options_in_effect(runner)
        self._most_prompt_tokens = versions.most_prompt_tokens(options) if prefill == NAME else 0
        self._most_rows = min(_ROWS, self.req_to_token_pool.size)
        self._tables: DeviceTables | None = None
        self._attentions: dict[tuple[AttentionConfig, bool, bool], BatchAttention] = {}
        self._plans, self._prompt_plans = Plans(), Plans()  # every step refills them
        self._traffic: DeviceTraffic | None = None

    def shared_read_ends(self, mode: Any) -> Any:
        """Where a step has read the request table; SGLang asks from 0.5.18 on."""
        return versions.reads_end_before_replay() if mode.is_decode() else super().shared_read_ends(mode)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Makes room for the largest decode graph. Plans that were made for smaller steps are replaced."""
        self._most_rows = max(self._most_rows, max_bs)
        if self._tables is not None and self._tables.rows < max_bs:
            self._tables, self._step = None, None
            self._attentions, self._plans, self._prompt_plans = {}, {}, {}

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Begins a step outside of any graph."""
        step = self._device_step(forward_batch)
        if step is None:
            super().init_forward_metadata(forward_batch)
            return
        self._finish_step()
        self._fill(forward_batch)
        if not forward_batch.forward_mode.is_decode():  # prompts have more tokens than the tables have room for
            self._window_slots = self._in_window_pool(forward_batch.out_cache_loc)
        self._step = step
        self.init_forward_metadata_in_graph(forward_batch)

    def _device_step(self, batch: Any) -> DeviceStep | None:
        """Returns the step that the device plans; None if the host plans it."""
        mode, rows = batch.forward_mode, batch.batch_size
        if mode.is_decode():
            return DeviceStep(rows, 0, "decode") if 0 < rows <= self._most_rows else None
        lens, queries = (getattr(batch, name, None) for name in ("seq_lens_cpu", "extend_seq_lens_cpu"))
        is_prompts = versions.is_prompts(mode) and not mode.is_mixed() and not is_idle(batch)
        if not self._most_prompt_tokens or not is_prompts or lens is None or queries is None:
            return None
        query_lens = torch.as_tensor(queries, dtype=torch.int64, device="cpu")
        if rows != len(query_lens) or rows > self._most_rows:
            return None
        decodes = int((query_lens == 1).sum())
        if decodes == rows:
            return DeviceStep(rows, 0, "decode")
        # SGLang 0.5.23 runs mixed steps as steps of prompts; several rows that decode may share much.
        chunks = self._room.chunks(query_lens, lens[:rows]) if decodes < 2 else None
        return None if chunks is None else DeviceStep(rows, 0, "prefill", chunks)

    @property
    def _room(self) -> PromptRoom:
        return room_for(self._most_rows, self._most_prompt_tokens)

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
        """Plans a step. SGLang records it into the decode graph."""
        step = self._step
        for kind in self._plans_of(step.chunks):
            self._plan(kind, self._tables_of(kind, step), step.chunks)

    def _fill(self, batch: Any) -> None:
        if self._tables is None:
            self._tables = DeviceTables(self._requests, self._most_rows)
        rows, decodes = batch.batch_size, batch.forward_mode.is_decode_or_idle()
        slots, query_lens = (batch.out_cache_loc, None) if decodes else (None, batch.extend_seq_lens[:rows])
        self._tables.fill(batch.req_pool_indices[:rows], batch.seq_lens[:rows], slots, query_lens)
        self._window_slots = self._tables.window_slots

    def _plans_of(self, chunks: PromptChunks | None) -> Plans:
        return self._plans if chunks is None else self._prompt_plans

    def _tables_of(self, kind: LayerKind, step: DeviceStep) -> Tables:
        assert self._tables is not None
        table, lens = self._tables.tables[kind.in_window_pool][: step.rows], self._tables.seq_lens[: step.rows]
        return table, lens, None if step.chunks is None else self._tables.query_start_loc[: step.rows + 1]

    def _plan(self, kind: LayerKind, tables: Tables, chunks: PromptChunks | None) -> tuple[BatchAttention, Plan]:
        """Plans a step for a kind of layer, into the plan that it has, if any."""
        plans, attention = self._plans_of(chunks), self._attention(kind, chunks is not None)
        options: dict[str, Any] = {"sliding_window": kind.spec.sliding_window}
        options |= {"into": plans[kind][1] if kind in plans else None} | ({"chunks": chunks} if chunks else {})
        plan = attention.plan(*tables, **options)
        plans[kind] = attention, plan
        return attention, plan

    def _planned(self, kind: LayerKind) -> tuple[BatchAttention, Plan]:
        """The current step's plan for a kind of layer, as it is run."""
        step = self._step
        if not isinstance(step, DeviceStep):
            if self._planner_compilation is not None:
                self._planner_compilation.wait()
            return super()._planned(kind)
        if kind not in self._plans_of(step.chunks):  # the first step, which SGLang runs before it captures one
            self._warm_up(kind, step)
        attention, plan = self._plans_of(step.chunks)[kind]
        return attention, _as_run(plan, step.chunks)

    def _warm_up(self, kind: LayerKind, step: DeviceStep) -> None:
        """Plans the first step of a kind of layer. If that decodes, a prompt's kernels are compiled with its own: no
        prompt is to wait for them."""
        caches, steps = self._caches(self._layer_of(kind)), [(self._tables_of(kind, step), step.chunks)]
        if step.chunks is None and self._most_prompt_tokens:
            steps.insert(0, one_prompt(self.device))

        def work() -> None:
            for tables, chunks in steps:
                attention, plan = self._plan(kind, tables, chunks)
                run_zeros(attention, _as_run(plan, chunks), caches, plan.num_query_tokens)

        warm_up(work)

    def _layer_of(self, kind: LayerKind) -> int:
        return int(next(layer.layer_id for layer, each in self._kinds.items() if each == kind))

    def _attention(self, kind: LayerKind, prompts: bool) -> BatchAttention:
        """Returns the attention of a kind of layer, for decodes or for prompts; makes it when first asked."""
        config = kind.spec.config(self.page_size)
        key = (config, kind.in_window_pool, prompts)
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
            made = self._room.attention if prompts else BatchAttention
            self._attentions[key] = made(config, self.device, capacity)
        return self._attentions[key]

    def _finish_step(self) -> None:
        if not isinstance(self._step, DeviceStep):
            super()._finish_step()
            return
        step, self._step = self._step, None
        if step.path is None or not self._plans_of(step.chunks):
            return
        self.stats.count_step(step.path)
        layers = list(self._kinds.values())
        token_bytes = {kind: kind.spec.kv_token_bytes * layers.count(kind) for kind in self._plans_of(step.chunks)}
        if step.chunks is not None:
            stats = {kind: plan.counters.chunks for kind, (_, plan) in self._prompt_plans.items()}
            read = sum(found.kv_tokens_read * token_bytes[kind] for kind, found in stats.items() if found is not None)
            self.stats.count_read(read, read, step.rows)
            self.stats.log()
            return
        if self._traffic is None:
            errors = [each.errors for each in self._attentions.values() if each.errors is not None]
            self._traffic = DeviceTraffic(len(self._plans), self.device, errors)
        plans = [counted for _, plan in self._plans.values() if (counted := plan.counters.kv_tokens) is not None]
        self._traffic.note(plans, step.rows - step.padding, step.padding)
        count_arrivals(self.stats, self._traffic, list(token_bytes.values()), logger.error)


def _as_run(plan: Plan, chunks: PromptChunks | None) -> Plan:
    return plan if chunks is None else plan.only("chunks")
