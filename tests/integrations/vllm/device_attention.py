"""A GPU's plans and kernels for machines without one: plans and attention are the CPU's, behind the interface that GPUs
have."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from trunkattn import AttentionConfig, BatchAttention, Plan, PromptChunks
from trunkattn.backend import Counters, Part


class DevicePlan(Plan):
    """A plan whose counters are what a test says, and which has one launch for all."""

    kv_tokens = torch.zeros(2, dtype=torch.int64)

    def only(self, part: Part) -> Plan:
        return self

    @property
    def counters(self) -> Counters:
        return Counters(self.kv_tokens, self.stats)


class DeviceAttention(BatchAttention):
    """A BatchAttention that plans into the same plan, as on a GPU, and runs more rows than the plan has."""

    def __init__(self, config: AttentionConfig, device: Any, capacity: Any = None) -> None:
        super().__init__(replace(config, execution="auto"), "cpu")  # a CPU has no other
        self.execution = config.execution
        self.limits, self.planned, self.host_planned = capacity, [], 0
        self.chunks: PromptChunks | None = None  # of the last plan

    may_overlap = False  # set by a test

    def overlaps(self, chunks: PromptChunks) -> bool:
        return self.may_overlap

    def plan(
        self, *batch: Any, sliding_window: int | None = None, into: Any = None, chunks: PromptChunks | None = None
    ) -> Any:
        self.chunks = chunks
        if self.limits is None:  # only attentions with a capacity plan on the device
            self.host_planned += 1
            return super().plan(*batch, sliding_window=sliding_window, into=into)
        assert len(batch[1]) <= self.limits.max_requests, "a GPU has no room for more"
        self.planned.append((*batch, into))
        if chunks is not None:
            _, lens, starts = batch
            first = len(lens) - len(chunks.seq_lens)
            assert chunks.first_token == int(starts[first]), "what the host is told is what the tables say"
            assert torch.equal(chunks.query_lens, starts[first:].diff()) and torch.equal(chunks.seq_lens, lens[first:])
        fresh = super().plan(*batch, sliding_window=sliding_window)
        plan = into or fresh
        plan.__dict__.update(fresh.__dict__)
        stats, plan.__class__ = plan.stats, DevicePlan
        plan.kv_tokens = torch.tensor([stats.kv_tokens_read, stats.kv_tokens_per_query])
        return plan

    def run(self, plan: Any, q: Any, *caches: torch.Tensor, out: Any = None, **options: Any) -> Any:
        """Rows after the plan's are left as they are in `out`, and are NaN otherwise."""
        rows, pair = plan.num_query_tokens, isinstance(q, tuple)
        parts = q if pair else (q,)
        total = len(parts[0])
        if self.limits is not None:
            assert total <= self.limits.max_query_tokens + (self.limits.max_chunk_tokens if self.chunks else 0)
        live = tuple(part[:rows] for part in parts)
        shape = (total, self.config.num_qo_heads, self.config.value_dim)
        result = torch.full(shape, torch.nan, dtype=self.config.dtype) if out is None else out
        found = super().run(plan, live if pair else live[0], *caches, out=result[:rows], **options)
        if not options.get("return_lse"):
            return result
        lse = torch.full(shape[:2], torch.nan)
        lse[:rows] = found[1]
        return result, lse


class PlannerCompilations:
    """In the place of `warm_up.planner_compilation`: notes for which attentions a planner was begun, and waited for."""

    def __init__(self) -> None:
        self.begun, self.waited = list[bool](), list[bool]()

    def __call__(self, batch_invariant: bool) -> Any:
        self.begun.append(batch_invariant)
        return SimpleNamespace(wait=lambda: self.waited.append(batch_invariant))
