"""The records that the parts of an analysis hand to each other: a log, a replay, what spoils sharing, the whole."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trunkattn.analysis.texts import Texts


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """One request of a log, whatever the log's format.

    Attributes:
        line: line of the log, or number of the file in a folder, counted from 1.
        arrival: seconds since the first request of the log; None: the log has no times.
        num_prompt_tokens: tokens of the prompt.
        num_output_tokens: tokens of one answer; None: the log does not say.
        blocks: int64, one number per block of `block_size` prompt tokens, the last block possibly incomplete. Equal
            numbers stand for equal blocks after equal blocks, so two prompts share as many blocks as their arrays have
            equal leading entries.
        block_size: prompt tokens of a block.
        num_answers: answers sampled from the prompt (`n`).
        session: name of the conversation; None: the log does not say.
        turn: number of the request in its session, from 0.
        model: the model that the log names; None: it names none.
        part: which request of its line, from 0; a line may hold a conversation of several.
    """

    line: int
    arrival: float | None
    num_prompt_tokens: int
    num_output_tokens: int | None
    blocks: NDArray[np.int64]
    block_size: int
    num_answers: int = 1
    session: str | None = None
    turn: int = 0
    model: str | None = None
    part: int = 0

    @property
    def key(self) -> tuple[int, int]:
        """Line and part: no other request of the log has both."""
        return self.line, self.part


class Encoded(NamedTuple):
    """A prompt as the replay sees it. blocks: int64, chained. text: what was tokenized; None: it is not known."""

    num_tokens: int
    blocks: NDArray[np.int64]
    block_size: int
    text: str | None = None


@dataclass(frozen=True)
class SkippedLine:
    """A line that was not taken, and why, in one sentence."""

    line: int
    reason: str


@dataclass(frozen=True)
class Log:
    """A log that was read.

    Attributes:
        source: name of the file or folder.
        format: name of its format, for people.
        requests: in order of arrival; in the log's order where it has no times.
        num_lines: lines seen, empty ones left out.
        unit: what `line` counts, for people: "line", "entry" (of a JSON array), "row" or "file". Lines of several files
            in a folder are counted on from file to file, in order of their names.
        num_out_of_order: requests that arrived before one that stands further up.
        skipped: the first lines that were not taken; `num_skipped` counts all.
        tokens_from: where token counts and blocks come from, for people: "block hashes", "token ids", "the
            tokenizer of X", "an estimate of 4 bytes per token", or "the log's own counts" where they are all it has.
        assumptions: what the reader assumed, one sentence each.
        texts: the prompt of each request as text, in the order of `requests`, empty where it is not known; None: the
            log has none. They are kept for `spoilers` and never written to a report unless the user asks for it.
        encode: turns rewritten texts into tokens and blocks as the reader did; None where `texts` is.
        contents: blocks as only their contents number them, in the order of `requests`, where the log's hashes do not
            depend on what precedes a block; else None.
    """

    source: str
    format: str
    requests: Sequence[LoggedRequest]
    num_lines: int
    unit: str = "line"
    num_out_of_order: int = 0
    num_skipped: int = 0
    skipped: list[SkippedLine] = field(default_factory=list)
    tokens_from: str = "block hashes"
    assumptions: list[str] = field(default_factory=list)
    texts: Texts | None = field(default=None, repr=False)
    encode: Callable[[Sequence[str]], list[Encoded]] | None = field(default=None, repr=False)
    contents: Sequence[NDArray[np.int64]] | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Moment:
    """The steps of one interval of a replay. Times are means per step in µs, bytes are means per step.

    Attributes:
        start: seconds since the replay's first request.
        seconds: length of the interval.
        num_steps: steps in it.
        decoding, waiting: mean numbers of sequences that decode, and of requests that wait.
        kv_bytes: KV bytes that a decode step reads if each request reads its own.
        unique_kv_bytes: KV bytes that it reads if each shared page is read once.
        attention_us, shared_attention_us: predicted attention, one by one and shared, of all layers.
        step_us, shared_step_us: predicted whole step, weights and prompt tokens included.
        prompt_tokens, cached_tokens: prompt tokens looked up, and found in the cache, by requests that started here.
    """

    start: float
    seconds: float
    num_steps: int
    decoding: float
    waiting: float
    kv_bytes: float
    unique_kv_bytes: float
    attention_us: float
    shared_attention_us: float
    step_us: float
    shared_step_us: float
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class TrieNode:
    """A node of the prefix tree of the requests that decode at one moment.

    Attributes:
        parent: index of the parent in the snapshot, which comes earlier; -1: none.
        start: tokens before the node.
        tokens: tokens of the node.
        sequences: sequences that read it.
        line, part: of the log, of a request that reads it, by which its text is found.
    """

    parent: int
    start: int
    tokens: int
    sequences: int
    line: int
    part: int = 0


@dataclass(frozen=True)
class Snapshot:
    """The prefix tree at one moment of a replay, nodes in depth-first order. time: seconds."""

    time: float
    nodes: list[TrieNode]


@dataclass(frozen=True)
class Replay:
    """A log replayed at one setting.

    Attributes:
        name: what differs from other replays, for people: "as logged", "32 at a time", "2 requests/s".
        concurrency: most sequences at once.
        rate: requests per second that arrive; None: as logged, or a closed loop that keeps `concurrency` busy.
        seconds: time that the replay covers, with sharing.
        num_requests, num_output_tokens: requests that ended, and tokens that they generated.
        hit_rate: share of the looked-up prompt tokens that were in the cache.
        tpot_ms, shared_tpot_ms: mean time per output token, one by one and shared.
        ttft_ms, shared_ttft_ms: mean time to the first token.
        tokens_per_s, shared_tokens_per_s: generated tokens per second of time in which there was work.
        num_decode_steps: steps in which something decodes.
        kv_bytes, unique_kv_bytes: sums over them.
        preemptions: sequences that lost their pages.
        moments: the replay over time, at most 200.
        snapshots: prefix trees at some moments, at most 12.
    """

    name: str
    concurrency: int
    rate: float | None
    seconds: float
    num_requests: int
    num_output_tokens: int
    hit_rate: float
    tpot_ms: float
    shared_tpot_ms: float
    ttft_ms: float
    shared_ttft_ms: float
    tokens_per_s: float
    shared_tokens_per_s: float
    num_decode_steps: int
    kv_bytes: float
    unique_kv_bytes: float
    preemptions: int
    moments: list[Moment]
    snapshots: list[Snapshot]


@dataclass(frozen=True)
class Spoiler:
    """Prompts that would share more if one part of them stood elsewhere.

    Attributes:
        kind: what varies: "timestamp", "date", "user name", "request id", "order of keys", "order of tools",
            "order of parts", "version", "text", or "block" where only hashes are known.
        where: the place, for people, such as "system message, token 37 of 2,210"; no text of the log.
        num_requests: requests that part there.
        token: where they part, in tokens from the beginning.
        shared_after: tokens after the varying part that are equal in all of them again, as a mean.
        varying_tokens: mean length of the varying part in tokens.
        examples: the varying part in up to three requests. Shown only if the user asks for text.
        lines: up to three lines of the log, as examples.
        advice: one sentence, without text of the log.
        gain_tpot, gain_prompt_tokens: what moving it after the shared part saves, replayed: share of the time per
            token (0.12: 12 %), and prompt tokens that would come from the cache.
    """

    kind: str
    where: str
    num_requests: int
    token: int
    shared_after: int
    varying_tokens: float
    examples: list[str]
    lines: list[int]
    advice: str
    gain_tpot: float | None = None
    gain_prompt_tokens: int | None = None


@dataclass(frozen=True)
class FleetReplay:
    """A log replayed on several engines, each with a cache of its own, under one way to route.

    Attributes:
        route: how requests are spread: "random", "round-robin", "prefix" (to the engine that has most of the prompt
            cached), "sharers" (to the engine where most running requests have the prompt's beginning).
        replicas: number of engines.
        hit_rate: share of the looked-up prompt tokens that were in the engine's cache.
        tpot_ms, shared_tpot_ms: mean time per output token, one by one and shared.
        ttft_ms, shared_ttft_ms: mean time to the first token.
        tokens_per_s, shared_tokens_per_s: generated tokens per second of all engines.
        balance: busiest engine's generated tokens over the mean; 1: all the same.
        kv_bytes, unique_kv_bytes: as in `Replay`, of all engines.
    """

    route: str
    replicas: int
    hit_rate: float
    tpot_ms: float
    shared_tpot_ms: float
    ttft_ms: float
    shared_ttft_ms: float
    tokens_per_s: float
    shared_tokens_per_s: float
    balance: float
    kv_bytes: float
    unique_kv_bytes: float


class Ceiling(NamedTuple):
    """Share of the prompt tokens that a cache without an end finds in earlier prompts.

    Attributes:
        hit_rate: of all requests, while the cache fills.
        later_hit_rate: of the later half of the requests, which find what the earlier half has left.
    """

    hit_rate: float
    later_hit_rate: float


@dataclass(frozen=True)
class Analysis:
    """What `trunkattn analyze` found.

    Attributes:
        log: the log.
        card, model: names, for people.
        token_bytes: KV bytes of a token, of all layers and cards.
        replays: one per setting; the first is the one that the report is about.
        spoilers: the most expensive first.
        assumptions: all that is assumed, one sentence each.
        verdict: one honest sentence, such as "At 3 requests at a time sharing gains 1 %."
        ceiling: what no cache exceeds.
        fleet: one per way to route; empty: no fleet was asked for.
    """

    log: Log
    card: str
    model: str
    token_bytes: int
    replays: list[Replay]
    spoilers: list[Spoiler]
    assumptions: list[str]
    verdict: str
    ceiling: Ceiling
    fleet: list[FleetReplay] = field(default_factory=list)
