"""Prompt chunks of a latent attention in the expanded form: keys and values of all heads, made of cached rows.

The absorbed form (`latent`) needs no keys and values, but 2 · latent + rope products for a query, a key and a head,
1,088 with the sizes of DeepSeek-V3. The expanded form needs as many as a head's keys and values have columns, 320, and
makes them of every row of the chunk and of its context in each layer. It pays where many queries see a row: `saves`.
"""

from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from trunkattn.attention import BatchAttention, Plan
from trunkattn.config import AttentionConfig
from trunkattn.engine.model.latent import HeadWidths, LatentHeads

# Keys and values of as many heads are made at once as need no more memory, and at least those of one head, which are
# about as wide as the cached rows of one layer.
_MOST_BYTES: Final = 64 << 20


class LatentSizes(NamedTuple):
    """Columns of a cached row: its latent part and its rope part; and of a head's keys and values."""

    latent: int
    rope: int
    widths: HeadWidths


def saves(query_len: int, context: int, context_share: float, sizes: LatentSizes) -> bool:
    """Whether the expanded form of a prompt chunk computes less than the absorbed one.

    With p = query_len · context + query_len · (query_len + 1) / 2 pairs of a query and a key that it sees, products of
    one head are

        absorbed:  p · (2 · latent + rope) + query_len · latent · (nope + v)
        expanded:  p · (nope + rope + v) + (context_share + query_len) · latent · (nope + v)

    The first has queries and outputs multiplied by the head's weight, the second every row. So the expanded form is the
    cheaper one where p · (2 · latent - nope - v) > context_share · latent · (nope + v): always without a context, and
    with a long one of its own from 171 queries on, with the sizes of DeepSeek-V3.

    Args:
        query_len: query tokens of the chunk.
        context: tokens before it.
        context_share: the same, but a token that n chunks see counts 1 / n, because it is expanded once for all.
        sizes: columns of the attention.
    """
    nope_and_v = sizes.widths.key - sizes.rope + sizes.widths.value
    pairs = query_len * context + query_len * (query_len + 1) / 2
    return pairs * (2 * sizes.latent - nope_and_v) > context_share * sizes.latent * nope_and_v


@dataclass(frozen=True)
class ExpandedChunks:
    """The prompt chunks of one step that are computed in the expanded form, planned once for all layers.

    Attributes:
        rows, other_rows: [R] and [T - R] int64, the chunks' query tokens in the step, and the other ones.
        other_start_loc: [num_requests + 1] query starts of the step without the chunks' tokens.
        attention, plan: the attention over expanded keys and values, some heads at a time, and the chunks' plan.
        pages: [N] int64, the pages of the cache that the chunks see, each once.
        keys, values: [heads at a time, N * page_size, columns], overwritten by each layer.
    """

    rows: torch.Tensor
    other_rows: torch.Tensor
    other_start_loc: NDArray[np.int64]
    attention: BatchAttention
    plan: Plan
    pages: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    def attend(
        self, heads: LatentHeads, q: torch.Tensor, k_cache: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """Outputs [R, Hq, v] of the chunks' queries q [R, Hq, nope + rope] over one layer's cached rows [num_pages,
        page_size, latent + rope], which hold the chunks' own."""
        out = q.new_empty(*q.shape[:2], self.values.shape[2])
        at_once, num_pages = len(self.keys), len(self.pages)
        columns = k_cache[..., : -heads.rope_dim], k_cache[..., -heads.rope_dim :]
        latent, rope = (each[self.pages].flatten(0, 1).to(q.dtype) for each in columns)
        keys, values = (each.unflatten(1, (num_pages, -1)).permute(1, 2, 0, 3) for each in (self.keys, self.values))
        for first in range(0, q.shape[1], at_once):
            some = slice(first, first + at_once)
            heads.expand_rows(latent, rope, some, self.keys, self.values)
            own_sinks = None if sinks is None else sinks[some]
            self.attention.run(self.plan, q[:, some], keys, values, out=out[:, some], sinks=own_sinks)
        return out


class ChunkExpansion:
    """Chooses the prompt chunks of each step that are computed in the expanded form, and plans them.

    Args:
        config: the latent attention of all layers, without a sliding window; not batch_invariant, because which form a
            chunk has depends on its length and on the other chunks.
        widths: the widths of its heads' keys and values.
    """

    def __init__(self, config: AttentionConfig, widths: HeadWidths) -> None:
        assert config.latent_dim is not None and not config.batch_invariant
        self._config = config
        self._sizes = LatentSizes(config.latent_dim, config.head_dim - config.latent_dim, widths)
        self._attentions: dict[int, BatchAttention] = {}  # by the number of heads that are computed at once

    def plan(
        self, block_table: NDArray[np.int32], seq_lens: NDArray[np.int64], query_start_loc: NDArray[np.int64]
    ) -> ExpandedChunks | None:
        """The chunks that cost less in the expanded form; None: no request has one. The tables are those of the step,
        [num_requests, max_pages], [num_requests] and [num_requests + 1]."""
        query_lens = np.diff(query_start_loc)
        chosen = self._choose(block_table, seq_lens - query_lens, query_lens)
        if not len(chosen):
            return None
        tokens = np.zeros(query_start_loc[-1], dtype=bool)
        for request in chosen:
            tokens[query_start_loc[request] : query_start_loc[request + 1]] = True
        other_lens = query_lens.copy()
        other_lens[chosen] = 0
        pages, table = self._own_pages(block_table[chosen], seq_lens[chosen])
        at_once = self._heads_at_once(len(pages))
        attention = self._attention(at_once)
        own_starts = np.concatenate(([0], query_lens[chosen].cumsum()))
        lens, starts = (torch.from_numpy(array.astype(np.int32)) for array in (seq_lens[chosen], own_starts))
        keys, values = (
            torch.empty(at_once, len(pages) * self._config.page_size, width, dtype=self._config.dtype, device="cpu")
            for width in self._sizes.widths
        )
        return ExpandedChunks(
            rows=torch.from_numpy(np.flatnonzero(tokens)),
            other_rows=torch.from_numpy(np.flatnonzero(~tokens)),
            other_start_loc=np.concatenate(([0], other_lens.cumsum())),
            attention=attention,
            plan=attention.plan(torch.from_numpy(table), lens, starts),
            pages=torch.from_numpy(pages.astype(np.int64)),
            keys=keys,
            values=values,
        )

    def _choose(
        self, block_table: NDArray[np.int32], contexts: NDArray[np.int64], query_lens: NDArray[np.int64]
    ) -> NDArray[np.intp]:
        """The requests with more than one query token for which the expanded form saves products."""
        page_size = self._config.page_size
        requests = np.flatnonzero(query_lens > 1)
        pages = {r: block_table[r, : -(-contexts[r] // page_size)] for r in requests}
        sharers = np.bincount(np.concatenate([*pages.values(), np.zeros(0, np.int32)]))
        chosen = []
        for request, own in pages.items():
            held = np.minimum(page_size, contexts[request] - page_size * np.arange(len(own)))
            share = float((held / sharers[own]).sum())
            if saves(int(query_lens[request]), int(contexts[request]), share, self._sizes):
                chosen.append(request)
        return np.array(chosen, dtype=np.intp)

    def _own_pages(
        self, block_table: NDArray[np.int32], seq_lens: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """The pages that requests see, each once, and a block table of places among them."""
        counts = -(-seq_lens // self._config.page_size)
        is_used = np.arange(counts.max()) < counts[:, None]
        pages, places = np.unique(block_table[:, : counts.max()][is_used], return_inverse=True)
        table = np.zeros(is_used.shape, dtype=np.int32)
        table[is_used] = places
        return pages, table

    def _heads_at_once(self, num_pages: int) -> int:
        """The largest divisor of the number of heads such that the keys and values of this many heads fit in memory."""
        heads, widths = self._config.num_qo_heads, self._sizes.widths
        head_bytes = num_pages * self._config.page_size * sum(widths) * self._config.dtype.itemsize
        fitting = [some for some in range(1, heads + 1) if heads % some == 0 and some * head_bytes <= _MOST_BYTES]
        return max(fitting, default=1)

    def _attention(self, heads: int) -> BatchAttention:
        if heads not in self._attentions:
            widths = self._sizes.widths
            self._attentions[heads] = BatchAttention(
                replace(
                    self._config,
                    num_qo_heads=heads,
                    num_kv_heads=heads,
                    head_dim=widths.key,
                    head_dim_v=widths.value,
                    kv_dtype=None,
                    latent_dim=None,
                ),
                "cpu",
            )
        return self._attentions[heads]
