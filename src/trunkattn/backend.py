"""The protocols that the back ends of `BatchAttention` follow."""

from typing import Final, Literal, NamedTuple, Protocol, TypeVar

import torch

from trunkattn.config import AttentionConfig
from trunkattn.layer_inputs import LayerInputs
from trunkattn.planner.planner import StepTables, too_large
from trunkattn.planner.work_list import PlanStats
from trunkattn.step_inputs import PromptChunks

Part = Literal["decodes", "chunks"]
PARTS: Final[tuple[Part, ...]] = ("decodes", "chunks")
DeviceTables = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]  # block_table, seq_lens, query_start_loc


def no_partials(config: AttentionConfig, num_slots: int) -> str:
    """The message for a batch whose partial results do not fit in memory."""
    states = f"{num_slots} partial results of {config.num_qo_heads} heads × {config.value_dim} numbers"
    return too_large(config.policy, f"{states}, for which there is no memory")


def write_back(computed: torch.Tensor, out: torch.Tensor) -> None:
    """Copies a result into the tensor of a caller, which may be one of inference mode: kernels write to those, too."""
    with torch.inference_mode():
        out.copy_(computed)


class Counters(NamedTuple):
    """Counts of a plan that need no wait for the device.

    kv_tokens: int64 [2] on the device: KV tokens read, and KV tokens without sharing, of requests that are not prompt
    chunks. Only for plans made on the device. chunks: statistics of the prompt chunks; None if there are none.
    """

    kv_tokens: torch.Tensor | None
    chunks: PlanStats | None


class PlannedStep(Protocol):
    """One planned step, made by a `Backend`."""

    @property
    def num_query_tokens(self) -> int:
        """Rows of q and out that `run` expects; a lower bound for a step planned on the device."""

    @property
    def num_chunks(self) -> int:
        """Number of requests that a separate kernel computes as prompt chunks."""

    @property
    def counters(self) -> Counters:
        """Counts that need no wait for the device."""

    def only(self, part: Part) -> "PlannedStep | None":
        """Returns a step with the same arrays but only the launches of one part: itself if the other part has no
        launches, and None if the other part has work."""

    def stats(self) -> PlanStats:
        """Statistics of what the plan reads. Waits for the device if the plan was made there."""

    def check(self) -> None:
        """Raises AssertionError if the work list breaks an invariant."""


Step = TypeVar("Step", bound=PlannedStep)


class Backend(Protocol[Step]):
    """Plans steps and runs layers on one device."""

    @property
    def plans_on_device(self) -> bool:
        """Whether tables that lie on the device are planned there."""

    @property
    def errors(self) -> torch.Tensor | None:
        """[1] int32 on the device, not 0 if `check` would raise; None if nothing is planned there."""

    def plan(self, batch: StepTables, into: Step | None = None) -> Step:
        """Plans a checked batch. into: a step of this back end whose arrays the new step uses again."""

    def plan_on_device(
        self, tables: DeviceTables, window: int, into: Step | None = None, chunks: PromptChunks | None = None
    ) -> Step:
        """Plans tables on the device without waiting for it. chunks: lengths of the last requests, if these are prompt
        chunks."""

    def overlaps(self, chunks: PromptChunks) -> bool:
        """Whether one kernel is to compute these chunks together with the step's decodes."""

    def check(self) -> None:
        """Raises ValueError if a plan made on the device met values that are out of bounds. Waits for the device."""

    def run(self, step: Step, inputs: LayerInputs, out: torch.Tensor) -> torch.Tensor:
        """Writes `out`; returns lse [num_query_tokens, num_qo_heads] float32."""
