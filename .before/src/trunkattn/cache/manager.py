"""The cache as the scheduler sees it: who holds which pages, what is shared, what can be evicted; no torch."""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from trunkattn.cache.page_pool import OutOfPages, PageCopy, PagePool, check_int
from trunkattn.cache.prefix_index import CachedBlock, PrefixIndex


@dataclass(frozen=True)
class SlotUsage:
    """What the token slots that requests hold are used for, and the three wastes of lecture §2.2, all in slots.

    `tokens`: slots that hold a token's KV. `reserved`: held, empty, for tokens still to come. `internal`: held, empty,
    for no token that is known of. `external`: held by nobody, and yet no use to any further request.
    """

    tokens: int
    reserved: int
    internal: int
    external: int

    @property
    def held(self) -> int:
        """Slots held by requests."""
        return self.tokens + self.reserved + self.internal

    @property
    def utilisation(self) -> float:
        """`tokens / held`; 0.0 while nothing is held."""
        return self.tokens / self.held if self.held else 0.0


@dataclass(frozen=True)
class CacheUsage(SlotUsage):
    """The paged cache's usage (PagedAttention, lecture §3.5); a page that several requests share counts once.

    `tokens`: distinct slots whose KV is committed. `reserved`: slots granted by `extend` whose KV is not committed yet,
    that is, the tokens of the step in progress. `internal`: all other empty slots of the held pages, nearly always
    the ends of last pages. `external`: 0, since a free page serves any request. So `utilisation` is
    tokens / (pages_held * page_size).

    `unshared_pages`: what the same requests would hold if each had its own copy of every page. `contiguous`: what one
    contiguous reservation of the maximum length for each of them would hold (lecture §2.2), None if not asked for.
    """

    pages_held: int
    unshared_pages: int
    contiguous: SlotUsage | None


@dataclass(slots=True)
class _Request:
    pages: list[int]
    num_tokens: int  # committed: their KV is in the pages
    room: int  # granted: slots num_tokens..room-1 may be written, and belong to this request alone
    num_indexed: int  # leading full pages whose prefix is in the index, as the chain that ends in `tail`
    tail: CachedBlock | None  # None: nothing of this request may be indexed


class CacheManager:
    """Pages for requests: allocation on demand, prefix sharing, copy-on-write, LRU eviction (lecture §3.3 to §3.5).

    A request's life: `admit`; then, step after step, `extend` (slots for the step's tokens), the forward pass,
    `commit` (their KV is there); at last `free`. A preempted request is freed and admitted again. Request ids are any
    hashable values. Every method either does all it says or raises and changes nothing: KeyError for an unknown id,
    ValueError or TypeError for another bad argument, OutOfPages when there is no room.

    Only full pages are indexed, and a page is written only by the one request that references it, into slots that no
    other request has ever counted as committed. So a shared or cached page never changes.

    `prefix_cache_queries` and `prefix_cache_hits` count, over all admissions, the tokens looked up in the prefix
    index and those found there; both stay 0 without prefix caching.
    """

    def __init__(self, num_pages: int, page_size: int, enable_prefix_caching: bool = True) -> None:
        self.pool = PagePool(num_pages, page_size)
        self.index = PrefixIndex(page_size)
        self.enable_prefix_caching = enable_prefix_caching
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self.page_size = page_size
        self._requests: dict[Hashable, _Request] = {}

    @property
    def num_free_pages(self) -> int:
        """Pages that `extend` can hand out: those in the free list and those cached for nobody in particular."""
        return self.pool.num_free + self.index.num_evictable

    @property
    def num_pages_in_use(self) -> int:
        """Distinct pages that requests reference."""
        return self.pool.num_used

    def pages(self, request_id: Hashable) -> tuple[int, ...]:
        """The request's pages in token order: token i is in page i // page_size, slot i % page_size."""
        return tuple(self._request(request_id).pages)

    def num_tokens(self, request_id: Hashable) -> int:
        """How many of the request's tokens, from the first, have their KV in its pages."""
        return self._request(request_id).num_tokens

    def admit(self, request_id: Hashable, tokens: Sequence[int]) -> int:
        """Start a request with the cached pages of its longest known prefix; return how many tokens they hold.

        The number is a multiple of page_size and less than len(tokens): at least one token is left to compute, for
        its logits. Allocates nothing; cached pages that nobody used are no longer free, though.
        """
        if request_id in self._requests:
            raise ValueError(f"request_id {request_id!r} is already admitted")
        if len(tokens) == 0:
            raise ValueError("tokens must not be empty")
        if not self.enable_prefix_caching:
            self._requests[request_id] = _Request([], num_tokens=0, room=0, num_indexed=0, tail=None)
            return 0
        pages = self.index.match(tokens)[: (len(tokens) - 1) // self.page_size]
        self.pool.share(pages)
        self.index.mark_referenced(pages)
        tail = self.index.block(pages[-1]) if pages else self.index.root
        num_cached = len(pages) * self.page_size
        self._requests[request_id] = _Request(pages, num_cached, room=num_cached, num_indexed=len(pages), tail=tail)
        self.prefix_cache_queries += len(tokens)
        self.prefix_cache_hits += num_cached
        return num_cached

    def can_extend(self, request_id: Hashable, num_tokens: int) -> bool:
        """Whether `extend` with the same arguments would succeed now."""
        request = self._request(request_id)
        return sum(self._growth(request, num_tokens)) <= self.num_free_pages

    def extend(self, request_id: Hashable, num_tokens: int) -> list[PageCopy]:
        """Grow the request to room for `num_tokens` tokens in all, evicting cached pages if need be.

        Returns the page copies (none or one) to carry out before the new slots are written: where the first of them
        lies in a page that other requests hold too, the request gets its own copy of that page. `num_tokens` is not
        less than the committed tokens; room granted earlier and not used (rejected draft tokens) is kept.
        Raises OutOfPages.
        """
        request = self._request(request_id)
        num_new, num_copied = self._growth(request, num_tokens)
        copies: list[PageCopy] = []
        if num_new or num_copied:
            new_pages = self._allocate(num_new + num_copied)
            if num_copied:
                position = request.room // self.page_size
                copies.append(PageCopy(src=request.pages[position], dst=new_pages.pop()))
                self.pool.release([copies[0].src])  # the other holders keep it
                request.pages[position] = copies[0].dst
            request.pages.extend(new_pages)
        request.room = max(request.room, num_tokens)
        return copies

    def commit(self, request_id: Hashable, tokens: Sequence[int], num_tokens: int | None = None) -> None:
        """Record that the KV of the request's first `num_tokens` tokens (default: all of `tokens`) is in its pages.

        `tokens` are the request's tokens from its first one; with `num_tokens` it may go on beyond what is computed,
        which spares the caller a slice in every step. Pages that became full are indexed, except where another page
        is indexed for the same prefix already. Never shrinks, and never exceeds the room that `extend` granted.
        """
        request = self._request(request_id)
        count = len(tokens) if num_tokens is None else num_tokens
        check_int("num_tokens", count, max(request.num_tokens, 1))
        if count > request.room or count > len(tokens):
            limits = f"the room of {request.room} tokens that extend granted and len(tokens) = {len(tokens)}"
            raise ValueError(f"num_tokens must be at most {limits}, got {count}")
        num_full = count // self.page_size
        if num_full > request.num_indexed and request.tail is not None:
            tail, start = request.tail, request.num_indexed
            if not self.index.is_indexed(tail):  # another request's page, evicted meanwhile: index our own
                tail, start = self.index.root, 0
            full_tokens = tokens[start * self.page_size : num_full * self.page_size]
            request.tail = self.index.insert(tail, full_tokens, request.pages[start:num_full])
            request.num_indexed = num_full
        request.num_tokens = count

    def fork(self, parent_id: Hashable, child_id: Hashable) -> None:
        """Start `child_id` as a copy of `parent_id`, for parallel sampling (n > 1): they share all committed tokens.

        A partly filled last page is shared too; whoever writes into it first gets a copy. So slots that the parent
        was granted and has not committed are void: it has to `extend` again before it writes.
        """
        parent = self._request(parent_id)
        if child_id in self._requests:
            raise ValueError(f"child_id {child_id!r} is already admitted")
        pages = parent.pages[: self._pages_for(parent.num_tokens)]
        self.pool.share(pages)
        parent.room = parent.num_tokens
        self._requests[child_id] = _Request(pages, parent.num_tokens, parent.room, parent.num_indexed, parent.tail)

    def free(self, request_id: Hashable) -> None:
        """End the request. Indexed pages that nobody else holds stay cached, the others go to the free list."""
        pages = self._request(request_id).pages
        del self._requests[request_id]
        # Last page first: the longer prefix is of less use to others, so it is evicted earlier.
        unreferenced = self.pool.release(pages[::-1])
        self.index.mark_unreferenced(page for page in unreferenced if page in self.index)
        self.pool.free([page for page in unreferenced if page not in self.index])

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix, because KV computed so far is not to be reused (new weights, say).

        Running requests keep their pages, but nothing of theirs is indexed any more, since it rests on that KV.
        """
        self.pool.free(self.index.clear())
        for request in self._requests.values():
            request.tail = None

    def usage(self, max_model_len: int | None = None, final_lens: Mapping[Hashable, int] | None = None) -> CacheUsage:
        """How the slots are used now; see CacheUsage for how each number is computed. Linear in the requests.

        With `max_model_len`, in tokens, also what a contiguous reservation of that length for each request would hold:
        `tokens` are the committed tokens of every request, nothing being shared; `reserved` are the empty slots up to
        the request's final length; `internal` those beyond it; `external` is the rest of the pool that is too small
        for one more reservation, num_slots mod max_model_len. The final length is known to the caller at best: it is
        taken from `final_lens`, and is `max_model_len` for a request that is not in there.
        """
        if max_model_len is None and final_lens is not None:
            raise ValueError("final_lens needs max_model_len, got max_model_len=None")
        partial: dict[int, tuple[int, int]] = {}  # page -> its committed and its granted slots
        for request in self._requests.values():
            for position in range(request.num_tokens // self.page_size, len(request.pages)):
                committed = self._slots_at(position, request.num_tokens)
                partial[request.pages[position]] = committed, self._slots_at(position, request.room)
        reserved = sum(granted - committed for committed, granted in partial.values())
        internal = sum(self.page_size - granted for _, granted in partial.values())
        return CacheUsage(
            tokens=self.pool.num_used * self.page_size - reserved - internal,
            reserved=reserved,
            internal=internal,
            external=0,
            pages_held=self.pool.num_used,
            unshared_pages=sum(len(request.pages) for request in self._requests.values()),
            contiguous=None if max_model_len is None else self._contiguous_usage(max_model_len, final_lens or {}),
        )

    def check_integrity(self) -> None:
        """Raise RuntimeError unless pool, index and requests agree: no page is lost, none is held without a count.

        Linear in the pages; meant for tests and for an idle engine.
        """
        self.pool.check_integrity()
        self.index.check_integrity()
        references = Counter(page for request in self._requests.values() for page in request.pages)
        for page in range(self.pool.num_pages):
            if self.pool.refcount(page) != references[page]:
                held = f"{references[page]} requests hold page {page}"
                raise RuntimeError(f"{held}, its reference count is {self.pool.refcount(page)}")
        if set(self.pool.kept_pages()) != set(self.index.evictable_pages()):
            raise RuntimeError("a page that is neither free nor referenced is not evictable, or the other way round")
        if not references.keys() | self.index.evictable_pages() >= set(self.index):
            raise RuntimeError("a free page is indexed")
        filled: dict[int, tuple[int, int]] = {}  # page -> its position and its committed slots
        for request_id, request in self._requests.items():
            self._check_request(request_id, request)
            for position, page in enumerate(request.pages):
                here = position, self._slots_at(position, request.num_tokens)
                if filled.setdefault(page, here) != here:
                    raise RuntimeError(f"the requests that share page {page} disagree on what it holds")

    def _check_request(self, request_id: Hashable, request: _Request) -> None:
        capacity = len(request.pages) * self.page_size
        if not 0 <= request.num_indexed * self.page_size <= request.num_tokens <= request.room <= capacity:
            raise RuntimeError(f"request {request_id!r}: indexed, committed, granted and held slots are out of order")
        if len(set(request.pages)) != len(request.pages):
            raise RuntimeError(f"request {request_id!r} holds a page twice")
        for position in range(request.num_tokens // self.page_size, len(request.pages)):
            page = request.pages[position]
            if page in self.index:
                raise RuntimeError(f"page {page} is indexed and not full")
            writable = self._slots_at(position, request.room) > self._slots_at(position, request.num_tokens)
            if writable and self.pool.refcount(page) > 1:
                raise RuntimeError(f"request {request_id!r} may write to page {page}, which others hold too")
        if request.tail is not None and self.index.is_indexed(request.tail):
            depth, block = 0, request.tail
            while block.parent is not None:
                depth, block = depth + 1, block.parent
            if depth != request.num_indexed:
                raise RuntimeError(f"request {request_id!r}: {depth} pages are indexed, not {request.num_indexed}")

    def _request(self, request_id: Hashable) -> _Request:
        try:
            return self._requests[request_id]
        except KeyError:
            raise KeyError(f"request_id {request_id!r} is not admitted") from None

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def _slots_at(self, position: int, num_tokens: int) -> int:
        """How many of the slots of a request's page number `position` its first `num_tokens` tokens take."""
        return min(max(num_tokens - position * self.page_size, 0), self.page_size)

    def _growth(self, request: _Request, num_tokens: int) -> tuple[int, int]:
        """Pages that growing to `num_tokens` takes: new ones at the end, and copies of shared ones (0 or 1)."""
        check_int("num_tokens", num_tokens, request.num_tokens)
        if num_tokens <= request.room:
            return 0, 0
        num_new = max(self._pages_for(num_tokens) - len(request.pages), 0)
        position, filled = divmod(request.room, self.page_size)
        shared = filled > 0 and self.pool.refcount(request.pages[position]) > 1
        return num_new, int(shared)

    def _allocate(self, n: int) -> list[int]:
        shortfall = n - self.pool.num_free
        if shortfall > self.index.num_evictable:
            raise OutOfPages(f"{n} pages needed, {self.num_free_pages} of {self.pool.num_pages} are free or evictable")
        if shortfall > 0:
            self.pool.free(self.index.evict(shortfall))
        return self.pool.allocate(n)

    def _contiguous_usage(self, max_model_len: int, final_lens: Mapping[Hashable, int]) -> SlotUsage:
        check_int("max_model_len", max_model_len, 1)
        for request_id, final_len in final_lens.items():
            check_int(f"final_lens[{request_id!r}]", final_len, self._request(request_id).num_tokens)
        tokens = reserved = internal = 0
        for request_id, request in self._requests.items():
            final_len = final_lens.get(request_id, max_model_len)
            if max(request.num_tokens, final_len) > max_model_len:
                lengths = f"holds {request.num_tokens} tokens of {final_len}"
                raise ValueError(f"max_model_len is {max_model_len}, but request {request_id!r} {lengths}")
            tokens += request.num_tokens
            reserved += final_len - request.num_tokens
            internal += max_model_len - final_len
        external = self.pool.num_pages * self.page_size % max_model_len
        return SlotUsage(tokens, reserved, internal, external)
