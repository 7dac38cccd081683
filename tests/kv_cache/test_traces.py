"""Random traces of cache operations against a model that knows what every slot of memory holds."""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from trunkattn.kv_cache import CacheManager, CacheUsage, OutOfPages, PrefixIndex

PICK = st.integers(0, 11)
# Prompts are cut from these: they share their first 12, 6, 3 and 0 tokens with the first one.
BASES = [[1] * 24, [1] * 12 + [2] * 12, [1] * 6 + [3] * 18, [1] * 3 + [4] * 21, [0] * 24]
SAMPLED = st.lists(st.sampled_from([0, 0, 0, 1]), min_size=1, max_size=8)  # often equal between requests
# One is the beginning of another, and one has the bytes of a token of the prompts.
SALTS = st.sampled_from([b"", b"", b"", b"a", b"ab", bytes([1, 0, 0, 0])])
REUSE = st.sampled_from([True, True, True, False])


@dataclass
class ModelRequest:
    tokens: list[int]
    salt: bytes
    prompt_len: int
    epoch: int  # number of resets before it was admitted
    committed: int
    granted: int

    @property
    def num_written(self) -> int:
        """Tokens whose KV is in memory, committed or not."""
        return min(self.granted, len(self.tokens))

    def kv(self, position: int) -> "KV":
        """What its token at `position` must find in memory."""
        return KV(self.epoch, self.salt, tuple(self.tokens[: position + 1]))


@dataclass(frozen=True)
class KV:
    """What a slot of the simulated memory holds: the KV of a token depends on every token before it. Requests of
    different salts or epochs never read each other's."""

    epoch: int
    salt: bytes
    prefix: tuple[int, ...]


@dataclass
class Model:
    requests: dict[int, ModelRequest] = field(default_factory=dict)
    memory: dict[tuple[int, int], KV] = field(default_factory=dict)  # (page, slot)
    seen: list[tuple[bytes, list[int]]] = field(default_factory=list)  # salts and tokens of requests that ended
    epoch: int = 0
    next_id: int = 0


class CacheTraces(RuleBasedStateMachine):
    """Every request reads back exactly its committed tokens, whatever is shared, copied, evicted or refused."""

    @initialize(
        num_pages=st.integers(1, 48),
        page_size=st.sampled_from([1, 2, 3, 4, 5, 8]),
        caching=st.sampled_from([True, True, True, True, False]),
        colliding=st.booleans(),
    )
    def create(self, num_pages: int, page_size: int, caching: bool, colliding: bool) -> None:
        self.manager = CacheManager(num_pages, page_size, enable_prefix_caching=caching)
        if colliding:
            self.manager.index = PrefixIndex(page_size, hash_block=lambda parent_key, tokens: tokens[0])
        self.page_size = page_size
        self.model = Model()

    # ---- operations

    @rule(
        base=st.sampled_from(BASES),
        length=st.integers(1, 24),
        num_copies=st.sampled_from([1, 1, 2, 3]),
        salt=SALTS,
        reuse=REUSE,
    )
    def admit(self, base: list[int], length: int, num_copies: int, salt: bytes, reuse: bool) -> None:
        for _ in range(num_copies):
            self.start(base[:length], salt, reuse)

    @precondition(lambda self: self.model.seen)
    @rule(pick=PICK, more=SAMPLED, other_salt=st.none() | SALTS, reuse=REUSE)
    def admit_a_next_turn(self, pick: int, more: list[int], other_salt: bytes | None, reuse: bool) -> None:
        salt, tokens = self.model.seen[-1 - pick % len(self.model.seen)]
        self.start(tokens + more, salt if other_salt is None else other_salt, reuse)

    @precondition(lambda self: self.model.requests)
    @rule(sampled=SAMPLED)
    def decode(self, sampled: list[int]) -> None:
        """Some steps of the whole batch: all requests extend before any commits; the last ones give way."""
        for token in sampled:
            for request_id in list(self.model.requests):
                while request_id in self.model.requests and not self.grow(request_id, [token]):
                    self.end(self.pick(-1))
            for request_id in self.model.requests:
                self.settle(request_id, num_rejected=0, whole_list=True)

    @precondition(lambda self: self.model.requests)
    @rule(pick=PICK)
    def prefill(self, pick: int) -> None:
        """All that is left of a prompt in one step; it gives way itself."""
        request_id = self.pick(pick)
        request = self.model.requests[request_id]
        if self.grow(request_id, [0] * max(request.prompt_len - request.committed, 1)):
            self.settle(request_id, num_rejected=0, whole_list=False)
        else:
            self.end(request_id)

    @precondition(lambda self: self.model.requests)
    @rule(pick=PICK, fresh=SAMPLED)
    def extend(self, pick: int, fresh: list[int]) -> None:
        self.grow(self.pick(pick), fresh)

    @precondition(lambda self: self.model.requests)
    @rule(pick=PICK, num_rejected=st.sampled_from([0, 0, 1, 5]), whole_list=st.booleans())
    def commit(self, pick: int, num_rejected: int, whole_list: bool) -> None:
        self.settle(self.pick(pick), num_rejected, whole_list)

    @precondition(lambda self: self.model.requests)
    @rule(pick=PICK, num_children=st.integers(1, 3))
    def fork(self, pick: int, num_children: int) -> None:
        parent_id = self.pick(pick)
        parent = self.model.requests[parent_id]
        for _ in range(num_children):
            self.manager.fork(parent_id, self.model.next_id)
            parent.granted = parent.committed
            self.model.requests[self.model.next_id] = replace(parent, tokens=list(parent.tokens))
            self.model.next_id += 1

    @precondition(lambda self: self.model.requests)
    @rule(pick=PICK)
    def free(self, pick: int) -> None:
        self.end(self.pick(pick))

    @rule(really=st.sampled_from([False] * 7 + [True]))
    def reset(self, really: bool) -> None:
        if really:
            self.manager.reset_prefix_cache()
            assert self.manager.num_free_pages == self.manager.pool.num_free
            self.model.epoch += 1

    # ---- what must hold after every operation

    @invariant()
    def integrity(self) -> None:
        self.manager.check_integrity()

    @invariant()
    def every_request_reads_back_its_tokens(self) -> None:
        for request_id, request in self.model.requests.items():
            assert self.manager.num_tokens(request_id) == request.committed
            for position in range(request.committed):
                assert self.model.memory[self.slot(request_id, position)] == request.kv(position)

    @invariant()
    def every_page_is_accounted_for(self) -> None:
        tables = {request_id: set(self.manager.pages(request_id)) for request_id in self.model.requests}
        held = set().union(*tables.values())
        assert self.manager.num_pages_in_use == len(held)
        some, rest = list(tables)[::2], list(tables)[1::2]
        only = set().union(*map(tables.__getitem__, some)) - set().union(*map(tables.__getitem__, rest))
        assert self.manager.num_pages_only_of(some) == len(only)
        assert self.manager.num_free_pages == self.manager.pool.num_pages - len(held)
        for page, slot in list(self.model.memory):
            if page not in held and page not in self.manager.index:
                del self.model.memory[page, slot]  # a free page's content must never be read again

    @invariant()
    def usage_is_what_counting_gives(self) -> None:
        model, manager = self.model, self.manager
        tables = {request_id: manager.pages(request_id) for request_id in model.requests}
        held = {page for table in tables.values() for page in table}
        ranges = [(key, request.committed, request.granted) for key, request in model.requests.items()]
        committed = {self.slot(key, position) for key, end, _ in ranges for position in range(end)}
        granted = {self.slot(key, position) for key, _, end in ranges for position in range(end)} - committed
        assert manager.usage() == CacheUsage(
            tokens=len(committed),
            reserved=len(granted),
            internal=len(held) * self.page_size - len(committed) - len(granted),
            external=0,
            pages_held=len(held),
            unshared_pages=sum(map(len, tables.values())),
            contiguous=None,
        )

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        for request_id in list(self.model.requests):
            self.manager.free(request_id)
            self.manager.check_integrity()
        assert self.manager.num_pages_in_use == 0
        assert self.manager.num_free_pages == self.manager.pool.num_pages
        self.manager.reset_prefix_cache()
        assert self.manager.pool.num_free == self.manager.pool.num_pages
        self.manager.check_integrity()

    # ---- the model

    def start(self, tokens: list[int], salt: bytes, reuse: bool) -> None:
        expected = self.longest_cached_prefix(tokens, salt) if reuse else 0
        cached = self.manager.admit(self.model.next_id, tokens, salt, reuse)
        assert cached == expected
        request = ModelRequest(list(tokens), salt, len(tokens), self.model.epoch, cached, cached)
        self.model.requests[self.model.next_id] = request
        self.model.next_id += 1

    def end(self, request_id: int) -> None:
        request = self.model.requests.pop(request_id)
        self.model.seen.append((request.salt, request.tokens[: request.committed]))
        self.manager.free(request_id)

    def grow(self, request_id: int, fresh: list[int]) -> bool:
        """Extend by len(fresh) tokens, those left of the prompt and then `fresh` ones, and write their KV at once."""
        request = self.model.requests[request_id]
        num_tokens = request.committed + len(fresh)
        request.tokens[max(request.committed, request.prompt_len) :] = fresh
        fits = self.pages_needed(request_id, num_tokens) <= self.manager.num_free_pages
        assert self.manager.can_extend(request_id, num_tokens) == fits
        if fits:
            self.extend_pages(request_id, num_tokens)
            request.granted = max(request.granted, num_tokens)
        else:
            before = self.visible_state()
            with pytest.raises(OutOfPages):
                self.manager.extend(request_id, num_tokens)
            assert self.visible_state() == before
        for position in range(request.committed, request.num_written):
            self.write(request_id, position)
        return fits

    def settle(self, request_id: int, num_rejected: int, whole_list: bool) -> None:
        """Commit what is written, less some rejected draft tokens at the end."""
        request = self.model.requests[request_id]
        count = max(request.num_written - num_rejected, request.committed)
        if count == 0:
            return
        if whole_list:
            self.manager.commit(request_id, request.tokens, count)
        else:
            self.manager.commit(request_id, request.tokens[:count])
        request.committed = count

    def pick(self, pick: int) -> int:
        return list(self.model.requests)[pick % len(self.model.requests)]

    def slot(self, request_id: int, position: int) -> tuple[int, int]:
        return self.manager.pages(request_id)[position // self.page_size], position % self.page_size

    def longest_cached_prefix(self, tokens: list[int], salt: bytes) -> int:
        """In tokens, found by looking at what the indexed pages hold."""
        last_slots = {self.model.memory[page, self.page_size - 1] for page in self.manager.index}
        cached = 0
        while cached + self.page_size < len(tokens):
            if KV(self.model.epoch, salt, tuple(tokens[: cached + self.page_size])) not in last_slots:
                break
            cached += self.page_size
        return cached

    def pages_needed(self, request_id: int, num_tokens: int) -> int:
        request, table = self.model.requests[request_id], self.manager.pages(request_id)
        if num_tokens <= request.granted:
            return 0
        others = {page for key in self.model.requests if key != request_id for page in self.manager.pages(key)}
        position, filled = divmod(request.granted, self.page_size)
        copied = filled > 0 and table[position] in others
        return max(-(-num_tokens // self.page_size) - len(table), 0) + copied

    def extend_pages(self, request_id: int, num_tokens: int) -> None:
        """Extend, carry out the copies, and check that only what had to change did."""
        before = self.manager.pages(request_id)
        others = {key: self.manager.pages(key) for key in self.model.requests if key != request_id}
        copies = self.manager.extend(request_id, num_tokens)
        after = self.manager.pages(request_id)
        replaced = {old: new for old, new in zip(before, after, strict=False) if old != new}
        assert dict(copies) == replaced
        assert all(self.manager.pages(key) == table for key, table in others.items())
        for new in set(after) - set(before):
            for slot in range(self.page_size):
                self.model.memory.pop((new, slot), None)
        for src, dst in copies:
            for slot in range(self.page_size):
                if (src, slot) in self.model.memory:
                    self.model.memory[dst, slot] = self.model.memory[src, slot]

    def write(self, request_id: int, position: int) -> None:
        slot, request = self.slot(request_id, position), self.model.requests[request_id]
        holders = [key for key in self.model.requests if slot[0] in self.manager.pages(key)]
        assert holders == [request_id] and slot[0] not in self.manager.index
        self.model.memory[slot] = request.kv(position)

    def visible_state(self) -> object:
        manager = self.manager
        tables = [(manager.pages(key), manager.num_tokens(key)) for key in self.model.requests]
        counts = [manager.pool.refcount(page) for page in range(manager.pool.num_pages)]
        return tables, counts, manager.pool.num_free, list(manager.index), manager.index.evictable_pages()


TestCacheTraces = pytest.mark.property(CacheTraces.TestCase)
TestCacheTraces.settings = settings(max_examples=settings().max_examples // 2, stateful_step_count=100)
