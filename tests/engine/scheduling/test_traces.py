"""Random traces of arrivals, steps, failures and cancellations over a scheduler, a cache manager and a noted KV store.

The store keeps, for every slot, the whole prefix that its KV stands for. So a page that is shared wrongly, copied too
late or handed out twice is seen at once by whoever reads it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkattn.engine.sampling_params import SamplingParams
from trunkattn.engine.scheduling.request import Request
from trunkattn.engine.scheduling.scheduled_batch import Sample, ScheduledBatch
from trunkattn.engine.scheduling.scheduler import Scheduler
from trunkattn.kv_cache.manager import CacheManager

EOS = 5


def next_token(token_ids: Sequence[int], index: int) -> int:
    """The "model": a token that depends on all that came before and on which sample it is."""
    return hash((tuple(token_ids), index)) % 6


def expected_answer(prompt: Sequence[int], index: int, max_tokens: int) -> list[int]:
    token_ids = list(prompt)
    while len(token_ids) - len(prompt) < max_tokens:
        token_ids.append(next_token(token_ids, index))
        if token_ids[-1] == EOS:
            break
    return token_ids[len(prompt) :]


def check_chunked_prefill(batch: ScheduledBatch, kept: list[Request], running: set[Request]) -> None:
    """Every sequence that ran and still has its pages gets a token at least, and nobody stands before it."""
    assert [chunk.request for chunk in batch.chunks[: len(kept)]] == kept
    assert all(chunk.num_tokens >= 1 for chunk in batch.chunks)


def check_prefill_first(batch: ScheduledBatch, kept: list[Request], running: set[Request]) -> None:
    """Whole prompts alone, or a token for every sequence that ran and still has its pages. Only a prompt whose every
    logits are asked for is computed in parts."""
    whole = [chunk for chunk in batch.chunks if not chunk.request.needs_prompt_logits]
    assert all(chunk.is_sampled for chunk in whole)
    if any(chunk.request in running for chunk in batch.chunks):
        assert [chunk.request for chunk in batch.chunks] == kept
        assert all(chunk.num_tokens == 1 for chunk in whole)


CHECKS = {"chunked_prefill": check_chunked_prefill, "prefill_first": check_prefill_first}


@dataclass
class Trace:
    """A scheduler, and what its pages hold: (page, slot) -> the salt of who stored a token there, and the tokens up to
    and including that one.

    prompt_rows: the positions of its prompt whose logits each sequence got. cut: sequences that ended from outside.
    """

    scheduler: Scheduler
    page_size: int
    max_model_len: int
    policy: str = "chunked_prefill"
    store: dict[tuple[int, int], tuple[bytes, tuple[int, ...]]] = field(default_factory=dict)
    requests: list[list[Request]] = field(default_factory=list)
    prompt_rows: dict[Request, list[int]] = field(default_factory=dict)
    cut: set[Request] = field(default_factory=set)
    computed: int = 0

    def add(
        self, prompt: Sequence[int], n: int, max_tokens: int, salt: bytes = b"", prompt_logprobs: bool = False
    ) -> None:
        arrival = len(self.requests)
        room = min(max_tokens, self.max_model_len - len(prompt))
        sequences = [
            Request(
                f"{arrival}.{index}",
                list(prompt),
                len(prompt),
                SamplingParams(n=n, prompt_logprobs=1 if prompt_logprobs else None),
                room,
                frozenset({EOS}),
                arrival=arrival,
                index=index,
                owner_id=str(arrival),
                cache_salt=salt,
            )
            for index in range(n)
        ]
        sequences[0].children.extend(sequences[1:])
        self.requests.append(sequences)
        self.scheduler.add(sequences[0])

    def step(self, fails: bool = False, only: frozenset[str] | None = None, seconds: float = 0.1) -> None:
        """fails: the batch is not computed. only: the only users whose requests may be. seconds: how long it takes."""
        running = set(self.scheduler.running)
        batch = self.scheduler.schedule(only)
        CHECKS[self.policy](batch, [request for request in self.scheduler.running if request in running], running)
        lengths = [chunk.num_tokens for chunk in batch.chunks]
        is_long_prompt = self.policy == "prefill_first" and len(lengths) == 1
        assert sum(lengths) <= self.scheduler.max_num_batched_tokens or is_long_prompt
        assert len(batch.chunks) <= self.scheduler.max_num_seqs
        unfinished = {request.owner_id for request in (*self.scheduler.running, *self.scheduler.waiting)}
        assert bool(batch.chunks) == bool(unfinished if only is None else unfinished & only)
        assert only is None or all(chunk.request.owner_id in only for chunk in batch.chunks)
        if fails:
            self.scheduler.roll_back(batch)
            still = self.scheduler.running  # those that wait while prompts go first, and keep their pages
            assert not {chunk.request for chunk in batch.chunks} & set(still)
            assert still or self.scheduler.cache.num_pages_in_use == 0
        else:
            self.compute(batch)
            for chunk in batch.chunks:
                self.prompt_rows.setdefault(chunk.request, []).extend(chunk.prompt_positions)
                chunk.request.num_prompt_logprobs += len(chunk.prompt_positions)
            self.scheduler.update(batch, [self.sample(sample) for sample in batch.samples])
            if batch.chunks:
                self.scheduler.timed(batch, seconds)
        self.scheduler.cache.check_integrity()
        for queue in (self.scheduler.running, self.scheduler.waiting):
            orders = [request.order() for request in queue]
            assert orders == sorted(orders)

    def compute(self, batch: ScheduledBatch) -> None:
        """Copies first, then all writes, then all reads, as a layer does."""
        for src, dst in batch.copies:
            copied = {(dst, slot): self.store.get((src, slot), (b"", ())) for slot in range(self.page_size)}
            self.store.update(copied)
        for chunk in batch.chunks:
            for position in range(chunk.start, chunk.start + chunk.num_tokens):
                self.store[self.slot(chunk.request, position)] = self.kv(chunk.request, position)
            self.computed += chunk.num_tokens
        for chunk in batch.chunks:
            for position in range(chunk.start + chunk.num_tokens):
                assert self.store[self.slot(chunk.request, position)] == self.kv(chunk.request, position)

    def kv(self, request: Request, position: int) -> tuple[bytes, tuple[int, ...]]:
        return request.cache_salt, tuple(request.token_ids[: position + 1])

    def slot(self, request: Request, position: int) -> tuple[int, int]:
        page, slot = divmod(position, self.page_size)
        return self.scheduler.cache.pages(request.request_id)[page], slot

    def sample(self, sample: Sample) -> int:
        return next_token(sample.request.token_ids, sample.request.index)

    def abort(self, number: int) -> None:
        for sequence in self.requests[number % len(self.requests)]:
            self.cut_off(sequence, "abort")

    def cut_off(self, sequence: Request, reason: str) -> None:
        """Ends a sequence from outside, if it has not ended."""
        if not sequence.is_finished:
            self.cut.add(sequence)
            self.scheduler.finish(sequence, reason)
        self.scheduler.cache.check_integrity()

    def finish(self) -> None:
        longest = 10 + 10 * sum(len(sequences) for sequences in self.requests) * self.max_model_len
        while self.scheduler.has_unfinished:
            self.step()
            longest -= 1
            assert longest, "the requests never end"
        assert self.scheduler.cache.num_pages_in_use == 0
        for sequences in self.requests:
            for sequence in sequences:
                expected = expected_answer(
                    sequence.token_ids[: sequence.num_prompt_tokens], sequence.index, sequence.max_tokens
                )
                answer = list(sequence.output_token_ids)
                assert answer == expected[: len(answer)]
                assert sequence.is_finished and (sequence in self.cut or answer == expected)
                asked = sequence.params.prompt_logprobs is not None and sequence.index == 0
                rows = list(range(sequence.num_prompt_tokens - 1)) if asked else []
                found = self.prompt_rows.get(sequence, [])
                assert found == rows if answer else found == rows[: len(found)]


ADD = st.tuples(
    st.just("add"),
    st.integers(0, 3),  # which trunk
    st.integers(0, 20),  # how much of it
    st.lists(st.integers(0, 5), min_size=1, max_size=6),
    st.sampled_from([1, 1, 1, 2, 4]),
    st.integers(1, 12),
    st.sampled_from([b"", b"", b"", b"a", b"b"]),
    st.sampled_from([False, False, False, True]),  # log-probabilities of the prompt
)
STEP = st.tuples(st.just("step"), st.sampled_from([0.0, 0.1, 0.1, 3.0]))
FAIL = st.tuples(st.just("fail"))
ONLY = st.tuples(st.just("only"), st.sets(st.integers(0, 50), min_size=1, max_size=4), st.booleans())
ABORT = st.tuples(st.just("abort"), st.integers(0, 50))
STOP = st.tuples(st.just("stop"), st.integers(0, 50), st.integers(0, 3))  # one of the answers of a request
TRUNKS = tuple(tuple((7 * trunk + position * position) % 5 for position in range(20)) for trunk in range(4))


@pytest.mark.property
@given(
    page_size=st.integers(1, 5),
    num_pages=st.integers(8, 60),
    max_num_seqs=st.integers(1, 6),
    room=st.integers(0, 25),
    caching=st.booleans(),
    policy=st.sampled_from(sorted(CHECKS)),
    prices=st.sampled_from([(None, None), (4, None), (None, 1.0), (1, 0.5)]),
    operations=st.lists(st.one_of(ADD, STEP, STEP, FAIL, ONLY, ABORT, STOP), max_size=40),
)
def test_every_trace_answers_right_and_leaves_no_page(
    page_size: int,
    num_pages: int,
    max_num_seqs: int,
    room: int,
    caching: bool,
    policy: str,
    prices: tuple[int | None, float | None],
    operations: list[tuple],
) -> None:
    """prices: keys per token, and the most seconds of a step."""
    cache = CacheManager(num_pages, page_size, caching)
    scheduler = Scheduler(cache, max_num_seqs, max_num_seqs + room, policy, *prices)
    trace = Trace(scheduler, page_size, max_model_len=num_pages * page_size, policy=policy)
    for name, *operation in operations:
        if name == "add":
            trunk, length, tail, *options = operation
            prompt = [*TRUNKS[trunk][:length], *tail][: trace.max_model_len - 1]
            trace.add(prompt, *options)
        elif name == "step":
            trace.step(seconds=operation[0])
        elif name == "fail":
            trace.step(fails=True)
        elif trace.requests and name == "only":
            numbers, fails = operation
            trace.step(fails, frozenset(str(number % len(trace.requests)) for number in numbers))
        elif trace.requests and name == "abort":
            trace.abort(operation[0])
        elif trace.requests:
            number, index = operation
            sequences = trace.requests[number % len(trace.requests)]
            begun = [sequence for sequence in sequences if sequence.num_output_tokens]  # others have no text to stop at
            for sequence in begun[index % len(begun) :][:1] if begun else []:
                trace.cut_off(sequence, "stop")
    trace.finish()


@pytest.mark.property
@given(
    trunk=st.integers(0, 60),
    tails=st.lists(st.integers(1, 9), min_size=2, max_size=10),
    budget=st.integers(16, 40),
    page_size=st.integers(1, 8),
    policy=st.sampled_from(sorted(CHECKS)),
)
def test_a_prefix_that_arrives_at_once_is_computed_once(
    trunk: int, tails: list[int], budget: int, page_size: int, policy: str
) -> None:
    cache = CacheManager(1000, page_size)
    trace = Trace(Scheduler(cache, 16, budget, policy), page_size, max_model_len=200, policy=policy)
    for i, tail in enumerate(tails):
        trace.add([*range(100, 100 + trunk), *(1000 * (i + 1) + j for j in range(tail))], n=1, max_tokens=1)
    trace.finish()
    shared = trunk - trunk % page_size
    assert trace.computed == shared + sum(trunk - shared + tail for tail in tails)
    assert trace.scheduler.stats.preemptions == 0
