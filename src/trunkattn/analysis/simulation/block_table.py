"""The block table of the sequences that decode, kept from step to step: a sequence adds only its new pages."""

import numpy as np
from numpy.typing import NDArray

from trunkattn.engine.scheduling.request import Request
from trunkattn.kv_cache.manager import CacheManager


class BlockTable:
    """Rows of page numbers, of the sequences that were asked for last. Its memory is that of their pages."""

    def __init__(self, cache: CacheManager) -> None:
        self._cache = cache
        self._rows: dict[tuple[str, int], NDArray[np.int32]] = {}  # by sequence, and how often it lost its pages

    def of(self, sequences: list[Request], seq_lens: NDArray[np.int32]) -> NDArray[np.int32]:
        """[sequences, most pages] int32, with arbitrary numbers after a row's pages."""
        page_size, known = self._cache.page_size, self._rows
        self._rows = {}
        table = np.zeros((len(sequences), int(-(-seq_lens.max(initial=1) // page_size))), np.int32)
        for row, request, length in zip(table, sequences, seq_lens.tolist(), strict=True):
            key, pages = (request.request_id, request.num_preemptions), self._cache.pages(request.request_id)
            full = known.get(key, np.empty(0, np.int32))  # a full page never becomes another one
            full = np.append(full, np.array(pages[len(full) : length // page_size], np.int32))
            self._rows[key] = full
            row[: len(full)] = full
            row[len(full) : len(pages)] = pages[len(full) : len(row)]
        return table
