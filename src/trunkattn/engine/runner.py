"""Runs a scheduled batch through the model: arrays, plans, page copies, forward pass, logits."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trunkattn.attention import AttentionConfig, BatchAttention, Plan
from trunkattn.cache.kv_cache import KVCache
from trunkattn.cache.manager import CacheManager
from trunkattn.engine.hf_attention import TrunkStep
from trunkattn.engine.request import Request
from trunkattn.engine.scheduler import Batch, ScheduledChunk


@dataclass(frozen=True)
class StepReads:
    """KV tokens that a step's attention read, mean over the layers; `per_query`: what each request alone would read."""

    kv_tokens_read: float = 0.0
    kv_tokens_per_query: float = 0.0


class ModelRunner:
    """Executes batches with one model and one KV cache.

    Args:
        model: from `load_model`.
        attention_config: attention of every layer.
        windows: sliding window of each layer, None for full attention.
        kv_cache: pages of every layer.
        device: where the model is.
        max_num_seqs, max_model_len: capacity of the persistent arrays.
    """

    def __init__(
        self,
        model: Any,
        attention_config: AttentionConfig,
        windows: Sequence[int | None],
        kv_cache: KVCache,
        device: torch.device,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.last_reads = StepReads()
        self._attention = BatchAttention(attention_config, device=device)
        self._layers_of_window = Counter(windows)
        self._device = device
        self._page_size = attention_config.page_size
        self._block_table = np.zeros((max_num_seqs, -(-max_model_len // self._page_size)), dtype=np.int32)
        self._rows: list[tuple[Request, int] | None] = [None] * max_num_seqs  # whose pages each row of the table holds

    def execute(self, batch: Batch, cache: CacheManager) -> torch.Tensor:
        """Compute the batch's tokens and write their KV.

        Returns:
            logits [number of chunks that are sampled, vocab_size], in the order of the chunks.
        """
        self.kv_cache.copy_pages(batch.copies)
        starts = np.array([chunk.start for chunk in batch.chunks])
        lengths = np.array([chunk.num_tokens for chunk in batch.chunks])
        query_start_loc = np.concatenate(([0], lengths.cumsum()))
        rows = np.repeat(np.arange(len(lengths)), lengths)
        positions = np.arange(query_start_loc[-1]) + (starts - query_start_loc[:-1])[rows]
        block_table = self._update_block_table(batch.chunks, cache)
        slots = block_table[rows, positions // self._page_size].astype(np.int64) * self._page_size
        slots += positions % self._page_size
        plans = self._plan(block_table, starts + lengths, query_start_loc)
        sampled = [i for i, chunk in enumerate(batch.chunks) if chunk.is_sampled]
        with torch.inference_mode():
            output = self.model(
                input_ids=self._tensor(_token_ids(batch.chunks))[None],
                position_ids=self._tensor(positions)[None],
                use_cache=False,
                logits_to_keep=self._tensor(query_start_loc[1:][sampled] - 1),
                trunk_step=TrunkStep(self._attention, plans, self.kv_cache, self._tensor(slots)),
            )
        self.last_reads = self._reads(plans)
        return output.logits[0]

    def _update_block_table(self, chunks: Sequence[ScheduledChunk], cache: CacheManager) -> np.ndarray:
        """[len(chunks), pages of the longest possible sequence]: a fixed width lets the planner patch its last plan.

        Rewrites only the pages that this step writes to, or the row of a new owner.
        """
        for row, chunk in enumerate(chunks):
            request = chunk.request
            pages = cache.pages(request.request_id)
            owner = request, request.num_preemptions
            first = chunk.start // self._page_size if self._rows[row] == owner else 0
            self._rows[row] = owner
            self._block_table[row, first : len(pages)] = pages[first:]
        return self._block_table[: len(chunks)]

    def _plan(
        self, block_table: np.ndarray, seq_lens: np.ndarray, query_start_loc: np.ndarray
    ) -> dict[int | None, Plan]:
        table, lens, starts = (
            self._tensor(array.astype(np.int32, copy=False)) for array in (block_table, seq_lens, query_start_loc)
        )
        return {
            window: self._attention.plan(table, lens, starts, sliding_window=window)
            for window in self._layers_of_window
        }

    def _reads(self, plans: dict[int | None, Plan]) -> StepReads:
        num_layers = self._layers_of_window.total()
        stats = [(plans[window].stats, count / num_layers) for window, count in self._layers_of_window.items()]
        return StepReads(
            kv_tokens_read=sum(stat.kv_tokens_read * share for stat, share in stats),
            kv_tokens_per_query=sum(stat.kv_tokens_per_query * share for stat, share in stats),
        )

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


def _token_ids(chunks: Sequence[ScheduledChunk]) -> np.ndarray:
    token_ids: list[int] = []
    for chunk in chunks:
        token_ids += chunk.request.token_ids[chunk.start : chunk.start + chunk.num_tokens]
    return np.array(token_ids, dtype=np.int64)
