"""Runs a scheduled batch through the model: page copies, arrays, plans, forward pass, logits."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from trunkattn.attention import BatchAttention, Plan
from trunkattn.engine.graphs import EagerForward, ForwardInputs, GraphedForward, Graphs, StepArrays
from trunkattn.engine.model.expanded import ChunkExpansion, ExpandedChunks
from trunkattn.engine.model.hf_attention import TrunkStep
from trunkattn.engine.scheduling.request import Request
from trunkattn.engine.scheduling.scheduled_batch import ScheduledBatch, ScheduledChunk
from trunkattn.kv_cache.manager import CacheManager
from trunkattn.kv_cache.tensors import KVCache

# Size of the plans that compile the planner. Four rows are enough for two chunks and two decodes that share pages.
_SAMPLE_ROWS, _SAMPLE_TOKENS = 4, 256

TRIAL_TOKENS = 2  # of a step that shows whether the model's steps work


@dataclass(frozen=True)
class StepReads:
    """KV tokens of one step, averaged over the layers.

    Attributes:
        kv_tokens_read: tokens that attention read.
        kv_tokens_per_query: tokens that it would have read with one query at a time.
    """

    kv_tokens_read: float = 0.0
    kv_tokens_per_query: float = 0.0


class ModelRunner:
    """Executes batches with one model and one KV cache.

    Args:
        model: from `load_model`.
        attention: the attention of every layer, on the model's device. With a capacity its plans, one per window, are
            made once and refilled for each step, which graphs need.
        windows: sliding window of each layer, None for full attention.
        kv_cache: pages of every layer.
        max_num_seqs, max_model_len: most sequences of a step, and most tokens of a sequence.
        graphs: how the forward pass is captured; None: every step runs eagerly.
        expansion: chooses prompt chunks of a latent attention that are computed in the expanded form; None: every
            request is computed in the absorbed form. Only without graphs.
    """

    def __init__(
        self,
        model: Any,
        attention: BatchAttention,
        windows: Sequence[int | None],
        kv_cache: KVCache,
        max_num_seqs: int,
        max_model_len: int,
        graphs: Graphs | None = None,
        expansion: ChunkExpansion | None = None,
    ) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.last_reads = StepReads()
        self._attention = attention
        self._layers_of_window = Counter(windows)
        self._page_size = attention.config.page_size
        self._block_table = np.zeros((max_num_seqs, -(-max_model_len // self._page_size)), dtype=np.int32)
        self._rows: list[tuple[Request, int]] = []  # the request of each row in the last step, and its preemptions
        self._plans: dict[int | None, Plan] = {}  # sliding window -> plan of the step
        self._expansion = expansion
        make_step = partial(TrunkStep, attention, tuple(windows), checked=set())
        forward = partial(_forward, model, make_step, self._plans, kv_cache)
        self._forward: EagerForward | GraphedForward = EagerForward(forward, attention.device)
        if graphs is not None:
            self._forward = GraphedForward(forward, attention.device, graphs)

    def execute(self, batch: ScheduledBatch, cache: CacheManager) -> torch.Tensor:
        """Computes the batch's tokens and writes their KV.

        Returns:
            Logits [rows, vocab_size]: a row for each sampled chunk, in the order of the chunks, then one for each of
            the chunks' `prompt_positions`. The next call may overwrite them.
        """
        self.kv_cache.copy_pages(batch.copies)
        step = self._prepare(batch, cache)
        logits = self._forward(step)
        self.last_reads = self._reads(step.expanded)  # the host counts while a GPU computes
        return logits

    def _prepare(self, batch: ScheduledBatch, cache: CacheManager) -> StepArrays:
        """Plans the attention of a batch, and lists its tokens for the forward pass."""
        starts = np.array([chunk.start for chunk in batch.chunks])
        lengths = np.array([chunk.num_tokens for chunk in batch.chunks])
        seq_lens, query_start_loc = starts + lengths, np.concatenate(([0], lengths.cumsum()))
        block_table = self._update_block_table(batch.chunks, cache)
        expanded = None
        if self._expansion is not None:
            expanded = self._expansion.plan(block_table, seq_lens, query_start_loc)
        self._plan(block_table, seq_lens, query_start_loc if expanded is None else expanded.other_start_loc)
        rows = np.repeat(np.arange(len(lengths)), lengths)
        positions = np.arange(query_start_loc[-1]) + (starts - query_start_loc[:-1])[rows]
        pages, places = block_table[rows, positions // self._page_size], positions % self._page_size
        sampled = [i for i, chunk in enumerate(batch.chunks) if chunk.is_sampled]
        return StepArrays(
            token_ids=_token_ids(batch.chunks),
            positions=positions,
            slots=pages.astype(np.int64) * self._page_size + places,
            logits_rows=np.concatenate(
                [query_start_loc[1:][sampled] - 1, *_prompt_rows(batch.chunks, query_start_loc)]
            ),
            has_chunks=self._has_chunks,
            expanded=expanded,
        )

    def try_step(self) -> None:
        """Runs the model on two tokens that write no KV, and drops the result: what fails here fails in every step."""
        capacity = self._attention.capacity
        num_tokens = min(TRIAL_TOKENS, capacity.max_query_tokens if capacity else TRIAL_TOKENS)
        self._plan(np.zeros_like(self._block_table[:1]), np.array([num_tokens]), np.array([0, num_tokens]))
        positions = np.arange(num_tokens)
        nowhere = np.full(num_tokens, -1)
        self._forward(StepArrays(np.zeros_like(positions), positions, nowhere, positions[-1:], self._has_chunks))

    def warm_up(self, sizes: Sequence[int] | None = None) -> None:
        """Runs the forward pass on padding tokens, which captures its graphs.

        Args:
            sizes: numbers of tokens; None: every graph size, after plans that compile the planner. Each size is
                captured with prompt chunks, and each of `GraphedForward.decode_sizes` also without.
        """
        if sizes is None:
            self._plan_samples()
        empty = np.zeros(0, dtype=np.int64)
        self._plan(self._block_table[:0], empty, np.zeros(1, dtype=np.int64))
        max_rows = len(self._block_table)
        may_have_chunks = any(plan.num_chunks or plan.only("decodes") is not plan for plan in self._plans.values())
        # Largest first: the smaller graphs then fit into its memory.
        for size in reversed(self._forward.sizes if sizes is None else sizes):
            padding = np.zeros(size, dtype=np.int64)
            both = may_have_chunks and size in self._forward.decode_sizes
            for has_chunks in (True, False) if both else (may_have_chunks,):
                self._forward(StepArrays(padding, padding, padding - 1, padding[:max_rows], has_chunks))

    def _plan_samples(self) -> None:
        """Plans batches with and without shared pages: only chunks, only decodes, and both together."""
        capacity, (rows, columns) = self._attention.capacity, self._block_table.shape
        most = columns * self._page_size
        budget = capacity.max_query_tokens if capacity else rows * most
        rows = min(rows, _SAMPLE_ROWS, budget)
        tokens = min(most, _SAMPLE_TOKENS, budget // rows)
        lens = np.full(rows, min(most, 2 * self._page_size + tokens))
        shared = np.zeros((rows, columns), np.int32)
        own = np.arange(shared.size, dtype=np.int32).reshape(shared.shape) % self.kv_cache.num_pages
        for table in (shared, own):
            for chunks in range(rows + 1):
                query_lens = np.where(np.arange(rows) < chunks, tokens, 1)
                self._plan(table, lens, np.concatenate(([0], query_lens.cumsum())))

    def _update_block_table(self, chunks: Sequence[ScheduledChunk], cache: CacheManager) -> np.ndarray:
        """[len(chunks), pages of the longest possible sequence]. The fixed width lets the planner patch its last plan.

        A row whose request is the same as in the last step only gets the pages that this step writes to. Any other row
        is rewritten whole, also for a request that was in this row before the last step.
        """
        owners = [(chunk.request, chunk.request.num_preemptions) for chunk in chunks]
        for row, chunk in enumerate(chunks):
            pages = cache.pages(chunk.request.request_id)
            kept = row < len(self._rows) and self._rows[row] == owners[row]
            first = chunk.start // self._page_size if kept else 0
            self._block_table[row, first : len(pages)] = pages[first:]
        self._rows = owners
        return self._block_table[: len(chunks)]

    def _plan(self, block_table: np.ndarray, seq_lens: np.ndarray, query_start_loc: np.ndarray) -> None:
        """Plans the step for each window, on the host, where the tables are and prompt chunks get their own kernel."""
        table, lens, starts = (
            torch.from_numpy(array.astype(np.int32, copy=False)) for array in (block_table, seq_lens, query_start_loc)
        )
        for window in self._layers_of_window:
            into = None if self._attention.capacity is None else self._plans.get(window)
            self._plans[window] = self._attention.plan(table, lens, starts, sliding_window=window, into=into)

    @property
    def _has_chunks(self) -> bool:
        """Whether a plan of the step has prompt chunks."""
        return any(plan.num_chunks for plan in self._plans.values())

    def _reads(self, expanded: ExpandedChunks | None) -> StepReads:
        num_layers = self._layers_of_window.total()
        stats = [(self._plans[window].stats, count / num_layers) for window, count in self._layers_of_window.items()]
        if expanded is not None:
            stats.append((expanded.plan.stats, 1.0))
        return StepReads(
            kv_tokens_read=sum(stat.kv_tokens_read * share for stat, share in stats),
            kv_tokens_per_query=sum(stat.kv_tokens_per_query * share for stat, share in stats),
        )


def _forward(
    model: Any,
    make_step: Callable[..., TrunkStep],
    plans: Mapping[int | None, Plan],
    kv_cache: KVCache,
    inputs: ForwardInputs,
) -> torch.Tensor:
    """Logits [R, vocab_size]; writes the tokens' KV."""
    if not inputs.has_chunks:
        plans = {window: plan.only("decodes") for window, plan in plans.items()}
    with torch.inference_mode():
        output = model(
            input_ids=inputs.token_ids[None],
            position_ids=inputs.positions[None],
            attention_mask=inputs.mask,  # without it transformers reads the values of position_ids
            use_cache=False,
            logits_to_keep=inputs.logits_rows,
            trunk_step=make_step(plans, kv_cache, inputs.slots, inputs.expanded),
        )
    logits: torch.Tensor = output.logits[0]
    return logits


def _prompt_rows(chunks: Sequence[ScheduledChunk], query_start_loc: np.ndarray) -> list[np.ndarray]:
    """Rows of the step's tokens at the chunks' `prompt_positions`."""
    return [
        np.arange(positions.start, positions.stop) + (first - chunk.start)
        for chunk, first in zip(chunks, query_start_loc, strict=False)
        if (positions := chunk.prompt_positions)
    ]


def _token_ids(chunks: Sequence[ScheduledChunk]) -> np.ndarray:
    token_ids: list[int] = []
    for chunk in chunks:
        token_ids += chunk.request.token_ids[chunk.start : chunk.start + chunk.num_tokens]
    return np.array(token_ids, dtype=np.int64)
