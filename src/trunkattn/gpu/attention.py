"""The GPU side of `BatchAttention`: chooses kernels once, then plans steps and runs layers.

Requests with more than a few query tokens are prompt chunks, which a prefill kernel computes. All other requests are
rows of tiles. In a batch-invariant plan every request is rows of tiles, because the bits of a token must not depend on
how many tokens come with it. The same holds for a latent cache, which no prefill kernel reads.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from trunkattn.backend import DeviceTables, write_back
from trunkattn.config import AttentionConfig, Capacity
from trunkattn.gpu.arrays import Arrays, GpuPlan, Lists
from trunkattn.gpu.cards import GpuFacts, card_of, facts_of
from trunkattn.gpu.chunk_planner import ChunkPlanner, no_room
from trunkattn.gpu.device_planner.prompt_chunks import ListedChunks, chunk_tables
from trunkattn.gpu.kernel import kernels_of
from trunkattn.gpu.launch import execute
from trunkattn.gpu.layer import Geometry, Tensors
from trunkattn.gpu.mla.spec import head_groups
from trunkattn.gpu.step import GpuStep
from trunkattn.gpu.step_planners import make_step_planner
from trunkattn.gpu.workspace import Scales, Workspace
from trunkattn.layer_inputs import LayerInputs
from trunkattn.numerics import GPU_OFFSET_END
from trunkattn.planner.planner import StepTables, too_large
from trunkattn.planner.prompt_chunks import Division, join
from trunkattn.planner.work_list import UNLIMITED
from trunkattn.step_inputs import PromptChunks


def make(config: AttentionConfig, device: torch.device, capacity: Capacity | None) -> "GpuBackend":
    """The back end of a GPU."""
    return GpuBackend(config, device, capacity)


@contextmanager
def _memory_for(capacity: Capacity | None, device: torch.device) -> Iterator[None]:
    """Says in one sentence that there is no memory for what is made of a capacity, or that kernels cannot count it."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError, OverflowError) as error:
        if capacity is None:
            raise
        why = "that have over 2^31 numbers"
        if not isinstance(error, OverflowError):
            why = f"for which there is no memory on {device}"
        raise ValueError(
            f"capacity={capacity} makes plans {why}: expected smaller bounds, most of all a smaller max_query_tokens "
            "or max_pages_per_request"
        ) from error


def _is_readable(rows: torch.Tensor) -> bool:
    """Whether kernels read [tokens, heads, head_dim] where they lie. Tokens may have any stride."""
    return rows.stride(2) == 1 and rows.shape[1] * rows.stride(1) <= GPU_OFFSET_END


class GpuBackend:
    """Plans, on the host or on the device, and runs on a GPU."""

    @torch.inference_mode(False)  # its tensors are also written outside of inference mode
    def __init__(
        self,
        config: AttentionConfig,
        device: torch.device,
        capacity: Capacity | None = None,
        *,
        facts: GpuFacts | None = None,
    ) -> None:
        """Makes a back end. facts: of another card than `device`, to plan for that card."""
        card = card_of(facts or facts_of(device))
        kernels = kernels_of(config, card)
        self.config, self.device, self._capacity, self._kernels = config, device, capacity, kernels
        with _memory_for(capacity, device):
            self._planner = make_step_planner(config, kernels, card, device, capacity)
            limits = self._planner.limits
            self._workspace = Workspace(config, limits.slots if limits else 1, device)
        self._chunks = None
        if kernels.prefill_tile:
            self._chunks = ChunkPlanner(config, kernels.prefill_tile, card.num_sms, capacity)
        self._arrays = Arrays(kernels, card, device, streams=config.execution == "streams")
        self._scales = Scales(config, head_groups(config, kernels.tiles), device)

    @property
    def plans_on_device(self) -> bool:
        """Whether tables that lie on the device are planned there."""
        return self._planner.on_device is not None

    @property
    def errors(self) -> torch.Tensor | None:
        """The error word of plans made on the device; see `BatchAttention.errors`."""
        return self._planner.on_device.errors if self._planner.on_device else None

    def check(self) -> None:
        """Raises ValueError if a plan made on the device met values that are wrong; waits for the device."""
        if self._planner.on_device:
            self._planner.on_device.check()

    def plan(self, batch: StepTables, into: GpuStep | None = None) -> GpuStep:
        """Plans a checked batch and starts its copy to the device. into: a step with the same window, whose arrays are
        used again."""
        try:
            return self._plan(batch, into.gpu_plan if into else None)
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise ValueError(too_large(self.config.policy, "lists for which there is no memory")) from error
        except OverflowError as error:
            raise ValueError(too_large(self.config.policy, "lists that have over 2^31 numbers")) from error

    def _plan(self, batch: StepTables, into: GpuPlan | None) -> GpuStep:
        """Takes the prompt chunks out if the plan has room for any, plans the rest, then the chunks within the partial
        slots that the rest leaves, and sends both lists to the device."""
        if into is None and self._capacity:
            into = self._reserve(batch.window)
        division = self._divide(batch, into)
        rest = division.rest if division else batch
        tiles = self._planner.plan(rest, division.chunks if division else None)
        limits, choice = self._planner.limits, tiles.choice
        if limits and (broken := limits.broken_by(tiles.tiles)):
            raise ValueError(no_room(self.config.policy, broken))
        chunks, whole, listed = None, tiles.tiles, None
        if division and self._chunks:
            free_slots = limits.slots - whole.num_slots if limits else None
            chunks = self._chunks.plan(division, free_slots, choice.keeps_chunks_whole)
            whole, listed = join(whole, chunks.planned.work, division)
        positions = batch.query_positions
        if limits is None:
            self._workspace.grow(whole.num_slots)
        several_queries = into is None and bool((np.diff(rest.query_start_loc) > 1).any())
        geometry = into.geometry if into else self._geometry(batch.window, several_queries)
        placed = self._arrays.place(Lists(whole, positions, listed, choice.num_overlapped), geometry, into)
        tables = tiles.tables  # its lengths and starts may be arrays of the caller, so they are copied
        own = replace(tables, seq_lens=tables.seq_lens.copy(), query_start_loc=tables.query_start_loc.copy())
        return GpuStep(
            tiles=tiles._replace(tables=own),
            chunks=chunks,
            rule=self._planner.rule,
            kernels=self._kernels,
            gpu_plan=placed,
            num_query_tokens=len(positions),
            num_decodes=len(rest.seq_lens),
        )

    def _divide(self, batch: StepTables, into: GpuPlan | None) -> Division | None:
        """The batch, divided into prompt chunks and the rest. None if it has no chunks or the plan has no room for
        any."""
        has_room = into is None or into.chunks is not None
        return self._chunks.divide(batch) if self._chunks and has_room else None

    def plan_on_device(
        self,
        tables: DeviceTables,
        window: int,
        into: GpuStep | None = None,
        chunks: PromptChunks | None = None,
    ) -> GpuStep:
        """Plans tables without waiting for the device. All requests become rows of tiles, except those that `chunks`
        says are prompt chunks."""
        on_device = self._planner.on_device
        assert on_device and self._capacity
        gpu_plan = into.gpu_plan if into else self._reserve(window, with_chunks=self._capacity.max_chunk_tokens > 0)
        listed = self._list_chunks(chunks, window) if chunks else None
        tiles = on_device.plan(tables, window, gpu_plan, listed)
        if listed is None:
            gpu_plan.forget_chunks()  # the arrays may still hold chunks of an earlier batch
        return GpuStep(
            tiles=tiles,
            chunks=listed,
            rule=self._planner.rule,
            kernels=self._kernels,
            gpu_plan=gpu_plan,
            num_query_tokens=tiles.num_query_tokens,
            num_decodes=len(tiles.tables.block_table),
        )

    def overlaps(self, chunks: PromptChunks) -> bool:
        """Whether one kernel is to compute these chunks together with the step's decodes."""
        overlap = self._planner.overlap
        if overlap is None or self._capacity is None or not self._capacity.max_chunk_tokens:
            return False
        tables = chunk_tables(chunks, self.config.page_size, UNLIMITED)
        return overlap.is_worth_for(tables, chunks.other_kv_tokens)

    def _list_chunks(self, chunks: PromptChunks, window: int) -> ListedChunks:
        assert self._chunks
        tables = chunk_tables(chunks, self.config.page_size, window)
        return ListedChunks(self._chunks.list_whole(tables), int(chunks.first_token), self.overlaps(chunks))

    def _reserve(self, window: int, with_chunks: bool = True) -> GpuPlan:
        """An empty plan for any batch within the capacity. with_chunks: with room for prompt chunks."""
        assert self._planner.limits and self._capacity
        several_queries = (self._capacity.max_query_len or self._capacity.max_query_tokens) > 1
        chunk_limits = self._chunks.limits if self._chunks and with_chunks else None
        with _memory_for(self._capacity, self.device):
            return self._arrays.reserve(self._planner.limits, self._geometry(window, several_queries), chunk_limits)

    def _geometry(self, window: int, several_queries: bool) -> Geometry:
        """The geometry of a plan. several_queries: a request among the rows of tiles may have several query tokens."""
        config = self.config
        return Geometry(
            num_qo_heads=config.num_qo_heads,
            num_kv_heads=head_groups(config, self._kernels.tiles),
            head_dim=config.head_dim,
            head_dim_v=config.value_dim,
            page_size=config.page_size,
            segment_size=self._planner.rule.segment_size,
            window=window,
            masked=several_queries or window != UNLIMITED,
            soft_cap=config.logits_soft_cap,
            sinks=config.sinks,
        )

    def run(self, step: GpuStep, inputs: LayerInputs, out: torch.Tensor) -> torch.Tensor:
        """Writes out; returns lse [num_query_tokens, num_qo_heads]."""
        workspace, (logit_scale, v_scale) = self._workspace, self._scales.of(inputs)
        lse = workspace.partial_lse
        if inputs.return_lse:
            lse = torch.empty(out.shape[:2], dtype=torch.float32, device=self.device)
        q, q_rope = inputs.q, inputs.q_rope
        if q_rope is None and self.config.latent_dim is not None:
            q, q_rope = q[..., : self.config.latent_dim], q[..., self.config.latent_dim :]
        q = q if _is_readable(q) else q.contiguous()
        q_rope = q_rope if q_rope is None or _is_readable(q_rope) else q_rope.contiguous()
        computed = out if _is_readable(out) else out.contiguous()
        tensors = Tensors(
            q=q,
            k_cache=inputs.k_cache,
            v_cache=inputs.v_cache,
            out=computed,
            lse=lse,
            partial=workspace.partial,
            partial_lse=workspace.partial_lse,
            logit_scale=logit_scale,
            v_scale=v_scale,
            sinks=self._scales.ones if inputs.sinks is None else inputs.sinks.contiguous(),
            q_rope=q_rope,
        )
        with torch.cuda.device(inputs.q.device):  # launches go to the current device
            execute(step.gpu_plan, tensors, inputs.return_lse)
        if computed is not out:
            write_back(computed, out)
        return lse
