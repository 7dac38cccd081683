"""The forward pass at padded numbers of tokens, each captured in a CUDA graph when a step first needs it.

A graph repeats its launches on the tensors that it was captured with. So each padded number of tokens has its own
tensors, and each step fills them with one copy. Padding tokens write no KV and have no logits. The attention's plans
have room for any step and are refilled before each one (`BatchAttention.plan(..., into=plan)`).
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from trunkattn.engine.model.expanded import ExpandedChunks
from trunkattn.gpu.graphs import capture

LARGEST_GRAPH = 4096  # tokens; a larger forward pass takes longer than its launches, even with a small model


@dataclass(frozen=True)
class StepArrays:
    """A step on the host. All arrays are int64.

    Attributes:
        token_ids, positions, slots: [T]; a slot is page * page_size + place in the page.
        logits_rows: [R], the tokens whose logits the step needs.
        has_chunks: whether one of its plans has prompt chunks.
        expanded: prompt chunks that the plans leave out; only in steps that run eagerly.
    """

    token_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    logits_rows: NDArray[np.int64]
    has_chunks: bool = False
    expanded: ExpandedChunks | None = None


class ForwardInputs:
    """A step on the device, with the fields of `StepArrays` and an attention mask [1, T] of ones.

    Args:
        num_tokens, num_rows: T and R, at least those of each step that fills it.
        device: where the tensors are.
        has_chunks: whether the plans of its steps may have prompt chunks.
    """

    def __init__(self, num_tokens: int, num_rows: int, device: torch.device, has_chunks: bool = False) -> None:
        self.has_chunks = has_chunks
        self.expanded: ExpandedChunks | None = None
        self._sizes = (num_tokens, num_tokens, num_tokens, num_rows)
        self._flat = torch.zeros(sum(self._sizes), dtype=torch.int64, device=device)
        self.token_ids, self.positions, self.slots, self.logits_rows = self._flat.split(self._sizes)
        self.mask = torch.ones(1, num_tokens, dtype=torch.bool, device=device)

    def fill(self, step: StepArrays) -> None:
        """Copies a step into the tensors, on the current stream.

        Padding tokens are token 0 at position 0 with slot -1; padding rows are row 0.
        """
        staging = torch.zeros(len(self._flat), dtype=torch.int64, device="cpu", pin_memory=self._flat.is_cuda)
        token_ids, positions, slots, logits_rows = (part.numpy() for part in staging.split(self._sizes))
        token_ids[: len(step.token_ids)] = step.token_ids
        positions[: len(step.positions)] = step.positions
        slots[: len(step.slots)], slots[len(step.slots) :] = step.slots, -1
        logits_rows[: len(step.logits_rows)] = step.logits_rows
        self._flat.copy_(staging, non_blocking=True)


Forward = Callable[[ForwardInputs], torch.Tensor]
Work = Callable[[], None]


def graph_sizes(max_tokens: int) -> tuple[int, ...]:
    """Padded numbers of tokens up to `max_tokens`: powers of two and, above 16, multiples of 16 between them. So a step
    has fewer than 16 padding tokens, or less than an eighth."""
    sizes = [size for size in (1, 2, 4, 8) if size < max_tokens]
    size = 16
    while size < max_tokens:
        sizes.append(size)
        size += max(16, (1 << (size.bit_length() - 1)) // 8)
    return (*sizes, max_tokens)


class CudaCapture:
    """Captures work on one GPU in graphs that share their memory, because only one of them runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def __call__(self, work: Work) -> Work:
        """A function that repeats `work`'s launches on the current stream. Nothing is computed now.

        Raises:
            ValueError: the work waits for the device.
        """
        torch.cuda.empty_cache()  # a graph's own memory cannot come from what the allocator keeps for later
        try:
            return capture(work, self._stream, self._pool).replay
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"enforce_eager=False: expected True for this model, because its forward pass cannot be captured in a "
                f"CUDA graph ({reason})"
            ) from error


@dataclass(frozen=True)
class Graphs:
    """How a forward pass is captured.

    Attributes:
        sizes: padded numbers of tokens, ascending; see `graph_sizes`.
        max_num_seqs: most rows of logits of a step.
        capture: turns work into a function that repeats it on the same tensors, such as `CudaCapture`.
    """

    sizes: tuple[int, ...]
    max_num_seqs: int
    capture: Callable[[Work], Work]


class EagerForward:
    """Runs a forward pass on exactly a step's tokens.

    Args:
        forward: logits [R, vocab_size] of its inputs.
        device: where it runs.
    """

    sizes: tuple[int, ...] = ()
    decode_sizes: tuple[int, ...] = ()

    def __init__(self, forward: Forward, device: torch.device) -> None:
        self._forward = forward
        self._device = device

    def __call__(self, step: StepArrays) -> torch.Tensor:
        """Logits [R, vocab_size]."""
        inputs = ForwardInputs(len(step.token_ids), len(step.logits_rows), self._device, step.has_chunks)
        inputs.fill(step)
        inputs.expanded = step.expanded
        return self._forward(inputs)


class GraphedForward:
    """Runs a forward pass by the graph of the smallest padded size that holds the step. Larger steps, and those that
    need logits of more tokens than sequences, run eagerly.

    Sizes in `decode_sizes` have two graphs: one for steps with prompt chunks and one for only decodes. Larger steps
    nearly always have chunks, so one graph serves them all.

    Args:
        forward, device: see `EagerForward`.
        graphs: the sizes, and the function that captures.
    """

    def __init__(self, forward: Forward, device: torch.device, graphs: Graphs) -> None:
        self.sizes = graphs.sizes
        self.decode_sizes = graphs.sizes[: bisect_left(graphs.sizes, graphs.max_num_seqs) + 1]
        self._forward = forward
        self._device = device
        self._graphs = graphs
        self._eager = EagerForward(forward, device)
        self._captured: dict[tuple[int, bool], tuple[ForwardInputs, Work]] = {}  # by padded tokens and has_chunks
        self._logits: torch.Tensor | None = None  # all graphs write their logits here, so that none keeps its own

    def __call__(self, step: StepArrays) -> torch.Tensor:
        """Logits [R, vocab_size]. The next call may overwrite them.

        The first step of a padded size runs eagerly, which compiles its kernels, and is then captured.
        """
        place = bisect_left(self.sizes, len(step.token_ids))
        if place == len(self.sizes) or len(step.logits_rows) > self._graphs.max_num_seqs:
            return self._eager(step)
        size, has_chunks = self.sizes[place], step.has_chunks
        if size not in self.decode_sizes and (size, True) in self._captured:
            has_chunks = True
        if (size, has_chunks) not in self._captured or self._logits is None:
            return self._run_and_capture(size, step)
        inputs, replay = self._captured[size, has_chunks]
        inputs.fill(step)
        replay()
        return self._logits[: len(step.logits_rows)]

    def _run_and_capture(self, size: int, step: StepArrays) -> torch.Tensor:
        inputs = ForwardInputs(size, min(size, self._graphs.max_num_seqs), self._device, step.has_chunks)
        inputs.fill(step)
        logits = self._forward(inputs)
        if self._logits is None:
            self._logits = logits.new_empty(self._graphs.max_num_seqs, logits.shape[1])
        replay = self._graphs.capture(partial(self._run, inputs, self._logits))
        self._captured[size, step.has_chunks] = inputs, replay
        return logits[: len(step.logits_rows)]

    def _run(self, inputs: ForwardInputs, target: torch.Tensor) -> None:
        logits = self._forward(inputs)
        with torch.inference_mode():
            target[: len(logits)].copy_(logits)
