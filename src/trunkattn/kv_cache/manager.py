"""The cache as the scheduler sees it: who holds which pages, what is shared, what can be evicted. Needs no torch.

The method is PagedAttention's (Kwon et al., 2023, https://arxiv.org/abs/2309.06180, §4.2 to §4.5).
"""

from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from trunkattn.kv_cache.page_pool import OutOfPages, PageCopy, PagePool
from trunkattn.kv_cache.prefix_index import CachedBlock, PrefixIndex
from trunkattn.validate import check_int


@dataclass(frozen=True)
class SlotUsage:
    """What the token slots are used for, and the three kinds of waste of the PagedAttention paper, §3.1.

    Attributes:
        tokens: slots that hold a token's KV.
        reserved: empty slots that a request holds for tokens it will write later.
        internal: empty slots that a request holds and will not fill (internal fragmentation).
        external: slots that nobody holds and no further request can use (external fragmentation).
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
    """The usage of the paged cache. A page that several requests share counts once.

    Attributes:
        tokens: distinct slots whose KV is committed.
        reserved: slots that `extend` has granted and nobody has committed: the tokens of the step in progress.
        internal: all other empty slots of the held pages, nearly always the ends of last pages.
        external: 0, because a free page serves any request.
        pages_held: distinct pages that requests hold; `utilisation` is tokens / (pages_held * page_size).
        unshared_pages: pages that the same requests would hold if each had its own copy of every page.
        contiguous: slots that the same requests would hold if each had one contiguous reservation of the maximum
            length; None unless asked for.
    """

    pages_held: int
    unshared_pages: int
    contiguous: SlotUsage | None


@dataclass(slots=True)
class _Request:
    pages: list[int]
    num_tokens: int  # committed: their KV is in the pages
    room: int  # granted: only this request may write slots num_tokens..room-1
    num_indexed: int  # leading full pages whose prefix is in the index, as the chain that ends in `tail`
    tail: CachedBlock | None  # None: the index accepts no page of this request
    salt: bytes = b""


class CacheManager:
    """Pages for requests: allocation on demand, prefix sharing, copy-on-write, LRU eviction.

    A request's life: `admit`; then in each step `extend` (slots for the step's tokens), the forward pass and `commit`
    (the KV is written); at the end `free`. A preempted request is freed and admitted again. Request ids are any
    hashable values.

    Only full pages are indexed. Only the one request that references a page writes to it, into slots that no other
    request has ever counted as committed. So a shared or cached page never changes.

    Args:
        num_pages: pages of the cache.
        page_size: tokens per page.
        enable_prefix_caching: keep full pages after their requests end, and share them between requests.

    Raises:
        KeyError: a method gets the id of a request that is not admitted.
        ValueError, TypeError: a method gets another bad argument.
        OutOfPages: there is no room. After any of these errors nothing has changed.

    Example:
        >>> cache = CacheManager(num_pages=8, page_size=2)
        >>> cache.admit("a", [1, 2, 3, 4, 5])
        0
        >>> cache.extend("a", 5)
        []
        >>> cache.commit("a", [1, 2, 3, 4, 5])
        >>> cache.admit("b", [1, 2, 3, 4, 9])  # two full pages are shared
        4
    """

    def __init__(self, num_pages: int, page_size: int, enable_prefix_caching: bool = True) -> None:
        self.pool = PagePool(num_pages, page_size)
        self.index = PrefixIndex(page_size)
        self.enable_prefix_caching = enable_prefix_caching
        self.page_size = self.pool.page_size
        self._requests: dict[Hashable, _Request] = {}

    @property
    def num_free_pages(self) -> int:
        """Pages that `extend` can hand out: those in the free list, and cached ones that no request references."""
        return self.pool.num_free + self.index.num_evictable

    @property
    def num_pages_in_use(self) -> int:
        """Distinct pages that requests reference."""
        return self.pool.num_used

    def num_pages_only_of(self, request_ids: Collection[Hashable]) -> int:
        """Distinct pages that these requests reference and no other one does. The time is linear in their pages."""
        references = Counter(chain.from_iterable(self._request(each).pages for each in set(request_ids)))
        return sum(self.pool.refcount(page) == count for page, count in references.items())

    def pages(self, request_id: Hashable) -> tuple[int, ...]:
        """The request's pages in token order: token i is in page i // page_size, slot i % page_size."""
        return tuple(self._request(request_id).pages)

    def num_tokens(self, request_id: Hashable) -> int:
        """Leading tokens of the request whose KV is in its pages."""
        return self._request(request_id).num_tokens

    def admit(self, request_id: Hashable, tokens: Sequence[int], salt: bytes = b"", reuse: bool = True) -> int:
        """Starts a request with the cached pages of its longest known prefix; returns how many tokens they hold.

        Only requests of equal salt share cached pages.

        The number is a multiple of page_size and less than len(tokens): at least one token is left to compute, for
        its logits. Nothing is allocated, but `num_free_pages` falls by the cached pages that nobody referenced before.
        With `reuse=False` it starts with none, and what it computes can still be reused by others.
        """
        if request_id in self._requests:
            raise ValueError(f"request_id={request_id!r}: expected one that is not admitted; free it first")
        if len(tokens) == 0:
            raise ValueError("tokens has length 0: expected at least one token")
        if not self.enable_prefix_caching:
            self._requests[request_id] = _Request([], num_tokens=0, room=0, num_indexed=0, tail=None)
            return 0
        pages = self.index.match(tokens, salt)[: (len(tokens) - 1) // self.page_size] if reuse else []
        self.pool.share(pages)
        self.index.mark_referenced(pages)
        tail = self.index.block(pages[-1]) if pages else self.index.root
        num_cached = len(pages) * self.page_size
        self._requests[request_id] = _Request(
            pages=pages, num_tokens=num_cached, room=num_cached, num_indexed=len(pages), tail=tail, salt=salt
        )
        return num_cached

    def can_extend(self, request_id: Hashable, num_tokens: int) -> bool:
        """Whether `extend` with the same arguments would succeed now."""
        request = self._request(request_id)
        num_tokens = check_int("num_tokens", num_tokens, request.num_tokens)
        return sum(self._growth(request, num_tokens)) <= self.num_free_pages

    def extend(self, request_id: Hashable, num_tokens: int) -> list[PageCopy]:
        """Grows the request to room for `num_tokens` tokens in all. Evicts cached pages if it must.

        Args:
            request_id: an admitted request.
            num_tokens: at least the committed tokens. Room that was granted earlier and not used, for example by
                rejected draft tokens, is kept.

        Returns:
            The page copies (none or one) to carry out before the new slots are written. If the first new slot lies in
            a page that other requests hold too, the request gets its own copy of that page.

        Raises:
            OutOfPages: too few pages are free or evictable.
        """
        request = self._request(request_id)
        num_tokens = check_int("num_tokens", num_tokens, request.num_tokens)  # those of NumPy overflow in arithmetic
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
        """Records that the KV of the request's first `num_tokens` tokens is in its pages.

        Pages that became full are indexed, unless another page is already indexed for the same prefix.

        Args:
            request_id: an admitted request.
            tokens: the request's tokens from its first one. They may continue beyond `num_tokens`, which saves the
                caller a slice in every step.
            num_tokens: from the committed tokens to the room that `extend` granted; None: all of `tokens`.
        """
        request = self._request(request_id)
        count = check_int("num_tokens", len(tokens) if num_tokens is None else num_tokens, max(request.num_tokens, 1))
        if count > request.room or count > len(tokens):
            raise ValueError(
                f"num_tokens={count}: expected at most the {request.room} tokens that extend granted and the "
                f"{len(tokens)} in tokens; call extend first"
            )
        num_full = count // self.page_size
        if num_full > request.num_indexed and request.tail is not None:
            tail, start = request.tail, request.num_indexed
            if not self.index.is_indexed(tail):  # it was another request's page, now evicted: index our own
                tail, start = self.index.root, 0
            full_tokens = tokens[start * self.page_size : num_full * self.page_size]
            request.tail = self.index.insert(tail, full_tokens, request.pages[start:num_full], request.salt)
            request.num_indexed = num_full
        request.num_tokens = count

    def fork(self, parent_id: Hashable, child_id: Hashable) -> None:
        """Starts `child_id` as a copy of `parent_id`, for parallel sampling (n > 1): they share all committed tokens.

        They share a partly filled last page too; the first to write into it gets a copy. So the parent loses the slots
        that it was granted and has not committed: it has to `extend` again before it writes.
        """
        parent = self._request(parent_id)
        if child_id in self._requests:
            raise ValueError(f"child_id={child_id!r}: expected one that is not admitted; free it first")
        pages = parent.pages[: self._pages_for(parent.num_tokens)]
        self.pool.share(pages)
        parent.room = parent.num_tokens
        self._requests[child_id] = replace(parent, pages=pages)

    def free(self, request_id: Hashable) -> None:
        """Ends the request. Indexed pages that no other request holds stay cached; the others become free."""
        pages = self._request(request_id).pages
        del self._requests[request_id]
        # Last page first: fewer requests share the longer prefix, so it is evicted earlier.
        self.pool.free(self.index.mark_unreferenced(self.pool.release(pages[::-1])))

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix, so that no KV computed so far is reused, for example after new weights.

        Running requests keep their pages, but these are not indexed any more, because they hold the old KV.
        """
        self.pool.free(self.index.clear())
        for request in self._requests.values():
            request.tail = None

    def usage(self, max_model_len: int | None = None, final_lens: Mapping[Hashable, int] | None = None) -> CacheUsage:
        """How the slots are used now. The time is linear in the number of requests.

        With `max_model_len` the result also has `contiguous`, for a reservation of that length per request. There
        `tokens` counts every request's committed tokens, because nothing is shared; `reserved` counts the empty slots
        up to the request's final length and `internal` those beyond it; `external` is the remainder of the pool that
        is too small for another reservation, num_slots mod max_model_len.

        Args:
            max_model_len: tokens of a contiguous reservation; None: only the paged cache's usage.
            final_lens: final length of a request in tokens, where the caller knows it; `max_model_len` for the others.
        """
        if max_model_len is None and final_lens is not None:
            raise ValueError("max_model_len=None: expected a length in tokens together with final_lens")
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
        """Raises RuntimeError unless pool, index and requests agree: no page is lost or held without a reference.

        The time is linear in the number of pages. It is meant for tests and for an idle engine.
        """
        self.pool.check_integrity()
        self.index.check_integrity()
        references = Counter(page for request in self._requests.values() for page in request.pages)
        for page in range(self.pool.num_pages):
            if self.pool.refcount(page) != references[page]:
                held = f"{references[page]} requests hold page {page}"
                raise RuntimeError(f"{held}, its reference count is {self.pool.refcount(page)}")
        if set(self.pool.kept_pages()) != set(self.index.evictable_pages()):
            raise RuntimeError("the kept pages and the evictable pages differ")
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
            raise RuntimeError(f"request {request_id!r}: expected indexed <= committed <= granted <= held slots")
        if len(set(request.pages)) != len(request.pages):
            raise RuntimeError(f"request {request_id!r} holds a page twice")
        for position in range(request.num_tokens // self.page_size, len(request.pages)):
            page = request.pages[position]
            if page in self.index:
                raise RuntimeError(f"page {page} is indexed and not full")
            writable = self._slots_at(position, request.room) > self._slots_at(position, request.num_tokens)
            if writable and self.pool.refcount(page) > 1:
                raise RuntimeError(f"request {request_id!r} may write to page {page}, which other requests hold too")
        if request.tail is not None:
            depth, block = 0, request.tail
            while block.parent is not None:
                depth, block = depth + 1, block.parent
            if depth != request.num_indexed:
                raise RuntimeError(f"request {request_id!r}: {depth} pages are indexed, not {request.num_indexed}")

    def _request(self, request_id: Hashable) -> _Request:
        try:
            return self._requests[request_id]
        except KeyError:
            raise KeyError(f"request_id={request_id!r}: expected an admitted request; call admit first") from None

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def _slots_at(self, position: int, num_tokens: int) -> int:
        """Slots that a request's first `num_tokens` tokens fill in its page number `position`."""
        return min(max(num_tokens - position * self.page_size, 0), self.page_size)

    def _growth(self, request: _Request, num_tokens: int) -> tuple[int, int]:
        """Pages that growth to `num_tokens` needs: new ones at the end, and copies of shared ones (0 or 1)."""
        if num_tokens <= request.room:
            return 0, 0
        num_new = max(self._pages_for(num_tokens) - len(request.pages), 0)
        position, filled = divmod(request.room, self.page_size)
        shared = filled > 0 and self.pool.refcount(request.pages[position]) > 1
        return num_new, int(shared)

    def _allocate(self, n: int) -> list[int]:
        shortfall = n - self.pool.num_free
        if shortfall > self.index.num_evictable:
            raise OutOfPages(
                f"{n} pages are needed, and {self.num_free_pages} of {self.pool.num_pages} are free or evictable"
            )
        if shortfall > 0:
            self.pool.free(self.index.evict(shortfall))
        return self.pool.allocate(n)

    def _contiguous_usage(self, max_model_len: int, final_lens: Mapping[Hashable, int]) -> SlotUsage:
        max_model_len = check_int("max_model_len", max_model_len, 1)
        ends = {
            request_id: check_int(f"final_lens[{request_id!r}]", final_len, self._request(request_id).num_tokens)
            for request_id, final_len in final_lens.items()
        }
        tokens = reserved = internal = 0
        for request_id, request in self._requests.items():
            final_len = ends.get(request_id, max_model_len)
            if max(request.num_tokens, final_len) > max_model_len:
                raise ValueError(
                    f"max_model_len={max_model_len}: expected at least the length of request {request_id!r}, which "
                    f"holds {request.num_tokens} tokens and ends at {final_len}"
                )
            tokens += request.num_tokens
            reserved += final_len - request.num_tokens
            internal += max_model_len - final_len
        external = self.pool.num_pages * self.page_size % max_model_len
        return SlotUsage(tokens, reserved, internal, external)
