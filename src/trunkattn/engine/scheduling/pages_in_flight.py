"""Which pages a step is about to fill, so that requests with the same prefix wait for them. No torch here."""

from collections.abc import Hashable

from trunkattn.engine.scheduling.request import Request
from trunkattn.engine.scheduling.scheduled_batch import ScheduledChunk
from trunkattn.kv_cache.manager import CacheManager


class PagesInFlight:
    """The first page that each scheduled sequence fills in this step. A request that shares the page waits one step,
    unless the cache has it already: a sequence computes its last page again, and all of its prompt if it wants logits
    there.

    Otherwise requests that arrive together with one long prefix would each compute it. A request only waits for a
    sequence that this step advances, so the wait ends.
    """

    def __init__(self, cache: CacheManager) -> None:
        self._index, self._page_size = cache.index, cache.page_size
        # First token of page -> salt and tokens -> requests: texts that begin otherwise may have equal pages.
        self._requests: dict[int, dict[Hashable, list[Request]]] = {}

    def add(self, chunk: ScheduledChunk) -> None:
        """Adds the first page that the chunk computes."""
        first = chunk.start - chunk.start % self._page_size
        if first + self._page_size <= chunk.request.num_tokens:
            requests = self._requests.setdefault(first, {})
            requests.setdefault(self._page(chunk.request, first), []).append(chunk.request)

    def holds_next_page_of(self, request: Request) -> bool:
        """Whether a scheduled sequence with the same tokens so far fills a page that `request` could reuse."""
        for first, requests in self._requests.items():
            end = first + self._page_size
            if end >= request.num_tokens:  # each request computes its own last token
                continue
            others = requests.get(self._page(request, first), ())
            if any(other.token_ids[:first] == request.token_ids[:first] for other in others):
                cached = self._index.match(request.token_ids[:end], request.cache_salt)
                if len(cached) * self._page_size < end:
                    return True
        return False

    def _page(self, request: Request, first: int) -> Hashable:
        return request.cache_salt, *request.token_ids[first : first + self._page_size]
