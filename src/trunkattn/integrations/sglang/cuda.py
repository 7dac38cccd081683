"""The back end on NVIDIA GPUs.

Kernels plan each decode step into fixed buffers. In a decode graph they are recorded with the model: before a replay
one launch brings the block table there, from SGLang's request table, which SGLang changes for the next step while the
graph runs. So no decode step waits for its plan. (The counts of KV reads are fetched without a wait too, unless 256
steps pass before a fetch arrives.)

Prompts, when they run here too, do not wait either: the host lists them by their lengths, which it knows, and their
pages stay on the device. It cannot know what they share, so each reads its own keys, which costs little where
arithmetic bounds them. Steps that mix prompts and decodes, and batches of more requests or tokens than the buffers
hold, are planned on the host, which waits for the device.
"""

from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from trunkattn import AttentionConfig, BatchAttention, Capacity, Plan, PromptChunks
from trunkattn.integrations.common import DeviceTraffic, count_arrivals, step_path
from trunkattn.integrations.sglang import versions
from trunkattn.integrations.sglang.backend import TrunkBackend
from trunkattn.integrations.sglang.device_tables import DeviceTables
from trunkattn.integrations.sglang.layers import LayerKind, check_supported
from trunkattn.integrations.sglang.name import NAME, logger
from trunkattn.integrations.warm_up import host_planner, run_zeros, warm_up

_ROWS: Final = 256  # requests of a decode step that are planned on the device, or more if SGLang captures more
_PROMPTS: Final = 64  # the same of a step of prompts
_OLDEST: Final = (8, 0)  # compute capability


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
        self._host_planner = host_planner(batch_invariant=False) if prefill == NAME else None
        self._most_prompt_tokens = versions.most_prompt_tokens(runner.server_args) if prefill == NAME else 0
        self._most_rows = min(_ROWS, self.req_to_token_pool.size)
        self._tables: DeviceTables | None = None
        self._forget_plans()
        self._traffic: DeviceTraffic | None = None

    def _forget_plans(self) -> None:
        self._attentions: dict[tuple[AttentionConfig, bool, bool], BatchAttention] = {}
        self._plans, self._prompt_plans = Plans(), Plans()  # every step refills them

    def shared_read_ends(self, mode: Any) -> Any:
        """Where a step has read the request table; SGLang asks from 0.5.18 on."""
        return versions.reads_end_before_replay() if mode.is_decode() else super().shared_read_ends(mode)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Makes room for the largest decode graph. What smaller steps were planned in before is made anew."""
        self._most_rows = max(self._most_rows, max_bs)
        if self._tables is not None and self._tables.rows < max_bs:
            self._tables, self._step = None, None
            self._forget_plans()

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Begins a step outside of any graph."""
        mode, rows, step = forward_batch.forward_mode, forward_batch.batch_size, None
        if mode.is_decode() and 0 < rows <= self._most_rows:
            step = DeviceStep(rows, 0, "decode")
        elif (chunks := self._chunks(forward_batch)) is not None:
            step = DeviceStep(len(chunks.seq_lens), 0, step_path(chunks.query_lens, decode_query_len=1), chunks)
        if step is None:
            super().init_forward_metadata(forward_batch)
            return
        self._finish_step()
        self._fill(forward_batch)
        if step.chunks is not None:  # more tokens than the tables have room for
            self._window_slots = self._in_window_pool(forward_batch.out_cache_loc)
        self._step = step
        self.init_forward_metadata_in_graph(forward_batch)

    def _chunks(self, batch: Any) -> PromptChunks | None:
        """What the host knows of a step of prompts; None: it is to plan the step."""
        mode = batch.forward_mode
        lens, queries = (getattr(batch, name, None) for name in ("seq_lens_cpu", "extend_seq_lens_cpu"))
        if not self._most_prompt_tokens or not mode.is_extend() or mode.is_mixed() or lens is None or queries is None:
            return None
        query_lens = torch.as_tensor(queries, dtype=torch.int32)
        fits = 0 < len(query_lens) <= self._most_prompts and int(query_lens.sum()) <= self._most_prompt_tokens
        if not fits or int(query_lens.min()) < 1:
            return None
        return PromptChunks(0, query_lens, lens[: len(query_lens)].to(torch.int32), 0)

    @property
    def _most_prompts(self) -> int:
        return min(_PROMPTS, self._most_rows)

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
        for kind in self._plans_of(self._step):
            self._plan(kind, self._step)

    def _fill(self, batch: Any) -> None:
        if self._tables is None:
            self._tables = DeviceTables(self._requests, self._most_rows)
        rows = batch.batch_size
        starts = None if batch.forward_mode.is_decode_or_idle() else batch.extend_seq_lens[:rows]
        slots = batch.out_cache_loc if starts is None else None
        self._tables.fill(batch.req_pool_indices[:rows], batch.seq_lens[:rows], slots, starts)
        self._window_slots = self._tables.window_slots

    def _plans_of(self, step: DeviceStep) -> Plans:
        return self._plans if step.chunks is None else self._prompt_plans

    def _plan(self, kind: LayerKind, step: DeviceStep) -> Plan:
        """Plans a step for a kind of layer, into the plan that it has, if any."""
        assert self._tables is not None
        plans, attention, rows = self._plans_of(step), self._attention(kind, step.chunks is not None), slice(step.rows)
        table, lens = self._tables.tables[kind.in_window_pool][rows], self._tables.seq_lens[rows]
        options: dict[str, Any] = {"sliding_window": kind.spec.sliding_window}
        options["into"] = plans[kind][1] if kind in plans else None
        starts = None
        if step.chunks is not None:
            starts, options["chunks"] = self._tables.query_start_loc[: step.rows + 1], step.chunks
        plans[kind] = attention, attention.plan(table, lens, starts, **options)
        return plans[kind][1]

    def _planned(self, kind: LayerKind) -> tuple[BatchAttention, Plan]:
        step = self._step
        if not isinstance(step, DeviceStep):
            if self._host_planner is not None:
                self._host_planner.wait()
            return super()._planned(kind)
        if kind not in self._plans_of(step):  # the first step, which SGLang runs before it captures one
            self._warm_up(kind, step)
        return self._plans_of(step)[kind]

    def _warm_up(self, kind: LayerKind, step: DeviceStep) -> None:
        """Plans the first step of a kind of layer. If that decodes, a prompt's kernels are compiled with its own: no
        prompt is to wait for them."""
        caches, steps = self._caches(self._layer_of(kind)), [step]
        if step.chunks is None and self._most_prompt_tokens:
            one = torch.ones(1, dtype=torch.int32)
            steps.insert(0, DeviceStep(1, 0, None, PromptChunks(0, one, one, 0)))

        def work() -> None:
            for each in steps:
                attention, plan = self._attention(kind, each.chunks is not None), self._plan(kind, each)
                run_zeros(attention, plan, caches, each.rows if each.chunks is None else plan.num_query_tokens)

        warm_up(work)

    def _layer_of(self, kind: LayerKind) -> int:
        return next(layer_id for layer_id, each in self._kinds.items() if each == kind)

    def _attention(self, kind: LayerKind, prompts: bool) -> BatchAttention:
        """Of decodes, or of prompts, which have plans of their own: room for prompts would cost each decode step."""
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
            if prompts:
                config = replace(config, execution="serial")  # nothing decodes beside them
                few = {"max_requests": self._most_prompts, "max_query_tokens": 1}
                capacity = replace(capacity, **few, max_chunk_tokens=self._most_prompt_tokens)
            self._attentions[key] = BatchAttention(config, self.device, capacity)
        return self._attentions[key]

    def _finish_step(self) -> None:
        if not isinstance(self._step, DeviceStep):
            super()._finish_step()
            return
        step, self._step = self._step, None
        if step.path is None or not self._plans_of(step):
            return
        if step.chunks is not None:
            self.stats.count_step(step.path)
            self.stats.count_unshared("no_decode")
            self.stats.log()
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
