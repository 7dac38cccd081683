"""Prometheus metrics: what the engine counts, and the times of requests."""

from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from trunkattn.engine.engine import Engine
from trunkattn.engine.outputs import RequestOutput

_SECONDS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOKEN_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
_COUNTS: Final = (
    ("steps", "Steps that computed a batch."),
    ("computed_tokens", "Tokens that went through the model: prompts, recomputation and decode."),
    ("generated_tokens", "Sampled tokens."),
    ("kv_tokens_read", "KV tokens that attention read."),
    ("kv_tokens_per_query", "KV tokens that it would have read with one query at a time."),
    ("preemptions", "Times that a sequence lost its pages."),
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    ("prefix_cache_hits", "Prompt tokens found there."),
)


class EngineCollector(Collector):
    """Reads the engine's counts when somebody asks. They are single numbers, so no lock is needed."""

    def __init__(self, engine: Engine, num_waiting: Callable[[], int]) -> None:
        self._engine, self._num_waiting = engine, num_waiting

    def collect(self) -> Iterator[Metric]:
        """The metrics now."""
        stats, cache = self._engine.stats, self._engine.scheduler.cache
        for name, text in _COUNTS:
            yield CounterMetricFamily(f"trunkattn_{name}", text, value=getattr(stats, name))
        gauges = (
            ("running_sequences", "Answers that run.", len(self._engine.scheduler.running)),
            ("waiting_requests", "Requests without a first token.", self._num_waiting()),
            ("kv_pages", "KV pages.", cache.pool.num_pages),
            ("kv_pages_in_use", "KV pages that requests hold.", cache.num_pages_in_use),
            ("kv_pages_cached", "KV pages that hold a prefix and that nobody uses.", cache.index.num_evictable),
        )
        for name, text, value in gauges:
            yield GaugeMetricFamily(f"trunkattn_{name}", text, value=value)


class Metrics:
    """The registry of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "trunkattn_http_requests", "Requests by path and status.", ("path", "status"), registry=self.registry
        )
        self._first_token = Histogram(
            "trunkattn_time_to_first_token_seconds", "Arrival to first token.", buckets=_SECONDS, registry=self.registry
        )
        self._per_token = Histogram(
            "trunkattn_time_per_output_token_seconds",
            "Mean time between an answer's tokens.",
            buckets=_TOKEN_SECONDS,
            registry=self.registry,
        )
        self._whole = Histogram(
            "trunkattn_request_seconds", "Arrival to last token.", buckets=_SECONDS, registry=self.registry
        )

    def watch(self, engine: Engine, num_waiting: Callable[[], int]) -> None:
        """Adds the engine's counts."""
        self.registry.register(EngineCollector(engine, num_waiting))

    def grown(self, output: RequestOutput) -> None:
        """Counts the times of a request that has finished."""
        if not output.finished:
            return
        times = output.metrics
        if times.time_to_first_token is not None:
            self._first_token.observe(times.time_to_first_token)
        if times.finished_time is not None:
            self._whole.observe(times.finished_time - times.arrival_time)
        if output.time_per_output_token is not None:
            self._per_token.observe(output.time_per_output_token)

    def text(self) -> bytes:
        """The exposition."""
        return generate_latest(self.registry)
