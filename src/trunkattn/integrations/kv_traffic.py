"""The KV bytes that attention reads in a serving engine, counted for its log and for Prometheus. No engine is imported
here."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Final, NamedTuple

import torch

from trunkattn import Plan

LOG_INTERVAL: Final = 10.0  # seconds between log lines, as in vLLM's own statistics
PATHS: Final = ("decode", "mixed", "prefill", "full_graph")
REASONS: Final = ("one_request", "nothing_shared", "no_decode")


def step_path(query_lens: torch.Tensor, decode_query_len: int) -> str:
    """The path of a step: "decode", "prefill" or "mixed".

    Args:
        query_lens: [rows] on the CPU; rows of length 0 are padding.
        decode_query_len: most query tokens of a row that decodes (or verifies drafts).
    """
    live = query_lens[query_lens > 0]
    decoding = int((live <= decode_query_len).sum())
    if decoding == len(live):
        return "decode"
    return "mixed" if decoding else "prefill"


def tokens_of(plan: Plan) -> tuple[int, int]:
    """KV tokens that a plan of the host reads, and those that it would read if each request read its own."""
    stats = plan.stats
    return stats.kv_tokens_read, stats.kv_tokens_per_query


@dataclass
class Traffic:
    """KV bytes of the steps so far, over all layers of a group.

    Attributes:
        steps: steps so far.
        read: bytes that attention read.
        unshared: bytes that it would have read if each request read its own.
    """

    steps: int = 0
    read: int = 0
    unshared: int = 0

    @property
    def saved(self) -> int:
        """Bytes that sharing saved."""
        return self.unshared - self.read

    def __str__(self) -> str:
        share = self.saved / self.unshared if self.unshared else 0.0
        return f"{self.steps} steps, {self.read / 1e6:.1f} MB of KV read, {self.saved / 1e6:.1f} MB ({share:.0%}) saved"


class Labels(NamedTuple):
    """Labels of the Prometheus counters of one group of layers."""

    model_name: str
    engine: str  # number of the data-parallel engine
    rank: str  # number of the worker
    attention: str  # "full", or the windows


class KvCounters(NamedTuple):
    """Prometheus counters with their labels set."""

    read: Any
    saved: Any
    steps: Mapping[str, Any]  # by path
    unshared_steps: Mapping[str, Any]  # by reason


def prometheus_counters(labels: Labels) -> KvCounters:
    """The counters of one group of layers in prometheus_client's default registry."""
    read, saved, steps, unshared = _registered_counters()
    return KvCounters(
        read.labels(*labels),
        saved.labels(*labels),
        {path: steps.labels(*labels, path) for path in PATHS},
        {reason: unshared.labels(*labels, reason) for reason in REASONS},
    )


@cache  # a name can be registered only once in a process, which may make many engines
def _registered_counters() -> tuple[Any, Any, Any, Any]:
    counter = import_module("prometheus_client").Counter
    return (
        counter("trunkattn_kv_bytes_read", "KV bytes read.", Labels._fields),
        counter("trunkattn_kv_bytes_saved", "KV bytes that sharing saved.", Labels._fields),
        counter("trunkattn_steps", "Steps by path.", (*Labels._fields, "path")),
        counter("trunkattn_steps_unshared", "Steps in which nothing was shared.", (*Labels._fields, "reason")),
    )


class KvReadStats:
    """Counts the steps of one group of layers and the KV bytes that they read.

    Args:
        num_layers: layers of the group, for the log line.
        counters: Prometheus counters to increase along.
        write_log: a logger's `info`: called with a format and its values.
    """

    def __init__(self, num_layers: int, counters: KvCounters, write_log: Callable[..., object]) -> None:
        self.traffic = Traffic()
        self.paths: Counter[str] = Counter()
        self.unshared: Counter[str] = Counter()  # steps in which nothing was shared, by reason
        self._num_layers = num_layers
        self._counters = counters
        self._write_log = write_log
        self._logged = time.monotonic()

    def count_step(self, path: str) -> None:
        """Counts a step by its path, one of `PATHS`."""
        self.traffic.steps += 1
        self.paths[path] += 1
        self._counters.steps[path].inc()

    def count_read(self, read: int, unshared: int, num_requests: int) -> None:
        """Counts the KV bytes of a step.

        Args:
            read: bytes that attention read.
            unshared: bytes that it would have read if each request read its own.
            num_requests: requests with query tokens in the step.
        """
        self.traffic.read += read
        self.traffic.unshared += unshared
        self._counters.read.inc(read)
        self._counters.saved.inc(max(0, unshared - read))
        if read >= unshared:
            self.count_unshared("nothing_shared" if num_requests > 1 else "one_request")

    def count_tokens(self, kv_tokens: Iterable[Sequence[int]], token_bytes: Iterable[int], num_requests: int) -> None:
        """Counts the KV bytes of a step by the tokens of its plans.

        Args:
            kv_tokens: of each plan, tokens that it reads, and that it would read if each request read its own.
            token_bytes: of each plan, bytes of one KV token in all layers that run it.
            num_requests: see `count_read`.
        """
        read = unshared = 0
        for (tokens, tokens_unshared), size in zip(kv_tokens, token_bytes, strict=True):
            read += tokens * size
            unshared += tokens_unshared * size
        self.count_read(read, unshared, num_requests)

    def count_unshared(self, reason: str) -> None:
        """Counts a step in which nothing was shared, by its reason, one of `REASONS`."""
        self.unshared[reason] += 1
        self._counters.unshared_steps[reason].inc()

    def log(self) -> None:
        """Logs the totals if the last log line is `LOG_INTERVAL` old."""
        now = time.monotonic()
        if now < self._logged + LOG_INTERVAL:
            return
        self._logged = now
        paths = ", ".join(f"{path} {count}" for path, count in self.paths.items())
        reasons = ", ".join(f"{reason} {count}" for reason, count in self.unshared.items())
        self._write_log(
            "TrunkAttention, %d layers: %s by sharing; steps: %s; nothing shared in: %s",
            *(self._num_layers, self.traffic, paths, reasons or "none"),
        )
