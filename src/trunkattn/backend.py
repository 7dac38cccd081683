"""What a device does for `BatchAttention`: the protocols that its backends follow."""

from typing import Any, Protocol

import torch

from trunkattn.inputs import LayerInputs, PromptChunks
from trunkattn.planner.planner import StepTables
from trunkattn.planner.work_list import PlanStats


class PlannedStep(Protocol):
    """One planned step, made by a `Backend`."""

    @property
    def num_query_tokens(self) -> int:
        """Rows of q and out that `run` expects; of a step planned on the device, at least this many."""

    @property
    def traffic(self) -> torch.Tensor | None:
        """int64 [2] on the device: KV tokens read, and of one pack per request. None: planned on the host."""

    @property
    def has_chunks(self) -> bool:
        """Whether some requests are prompt chunks for a kernel of their own."""

    @property
    def launches_chunks(self) -> bool:
        """Whether `run` launches the kernel for prompt chunks, even if it finds nothing to compute."""

    def without_chunks(self) -> "PlannedStep":
        """The same arrays, run without the kernel for prompt chunks."""

    def of_chunks_alone(self) -> "PlannedStep | None":
        """The same arrays, run by the kernel for prompt chunks alone; None: others may have work."""

    def stats(self) -> PlanStats:
        """See PlanStats."""

    def chunk_stats(self) -> PlanStats | None:
        """Of the prompt chunks alone, without a wait; None: there are none."""

    def check(self) -> None:
        """Raises AssertionError if the work list breaks an invariant."""


class Backend(Protocol):
    """Plans steps and runs layers on one device."""

    @property
    def plans_on_device(self) -> bool:
        """Whether tables that lie on the device are planned there."""

    @property
    def errors(self) -> torch.Tensor | None:
        """[1] int32 on the device, not 0 if `check` would raise; None if nothing is planned there."""

    def plan(self, batch: StepTables, into: Any = None) -> PlannedStep:
        """Plans a checked batch. into: a step of this backend, whose arrays the new one takes over."""

    def plan_on_device(
        self, tables: Any, window: int, into: Any = None, chunks: PromptChunks | None = None
    ) -> PlannedStep:
        """Plans block_table, seq_lens and query_start_loc (or None) without waiting for the device. chunks: what the
        host knows of the last requests."""

    def overlaps(self, chunks: PromptChunks) -> bool:
        """Whether one kernel is to compute these chunks and what decodes beside them."""

    def check(self) -> None:
        """Raises ValueError if a plan made on the device met values that are out of bounds. Waits for the device."""

    def run(self, step: Any, inputs: LayerInputs, out: torch.Tensor) -> torch.Tensor:
        """Writes `out`; returns lse [num_query_tokens, num_qo_heads] float32."""
