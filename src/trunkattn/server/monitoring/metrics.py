"""Prometheus metrics: what the engine counts, and the times of requests; under our names and under vLLM's."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from trunkattn.engine.engine import Engine
from trunkattn.engine.outputs import RequestOutput
from trunkattn.engine.sampling_params import SamplingParams

_SECONDS: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOKEN_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
# Counts of the engine: our name, vLLM's if it has one, and what they say.
_COUNTS: Final = (
    ("steps", None, "Steps that computed a batch."),
    ("computed_tokens", None, "Tokens that went through the model: prompts, recomputation and decode."),
    ("generated_tokens", "generation_tokens", "Sampled tokens."),
    ("kv_tokens_read", None, "KV tokens that attention read."),
    ("kv_tokens_per_query", None, "KV tokens that it would have read with one query at a time."),
    ("preemptions", "num_preemptions", "Times that a sequence lost its pages."),
    ("prefix_cache_queries", "prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    ("prefix_cache_hits", "prefix_cache_hits", "Prompt tokens found there."),
)
_TOKENS: Final = tuple(digit * 10**power for power in range(7) for digit in (1, 2, 5))
# Of each request that has finished, under vLLM's names.
_OF_REQUESTS: Final = (
    ("request_queue_time_seconds", "Arrival to the first step.", _SECONDS),
    ("request_prefill_time_seconds", "First step to first token.", _SECONDS),
    ("request_decode_time_seconds", "First token to last token.", _SECONDS),
    ("request_inference_time_seconds", "First step to last token.", _SECONDS),
    ("request_prompt_tokens", "Tokens of a prompt.", _TOKENS),
    ("request_generation_tokens", "Tokens of an answer.", _TOKENS),
    ("request_max_num_generation_tokens", "Tokens of a prompt's longest answer.", _TOKENS),
    ("request_params_n", "Answers to a prompt that are asked for (n).", (1, 2, 5, 10, 20, 50, 100)),
    ("request_params_max_tokens", "Most tokens of an answer (max_tokens), where there is a limit.", _TOKENS),
)
_OTHER_VERSION: Final = 505  # the client's fault, though its number is among the server's
_KEPT_TIMES: Final = 2000  # to a first token
_LABELS: Final = ("model_name",)


class EngineCollector(Collector):
    """Reads the engine's counts when somebody asks. They are single numbers, so no lock is needed."""

    def __init__(self, engine: Engine, num_waiting: Callable[[], int], model: str) -> None:
        self._engine, self._num_waiting, self._model = engine, num_waiting, model

    def collect(self) -> Iterator[Metric]:
        """The metrics now."""
        stats, cache = self._engine.stats, self._engine.scheduler.cache
        for name, vllm_name, text in _COUNTS:
            value = getattr(stats, name)
            yield CounterMetricFamily(f"trunkattn_{name}", text, value=value)
            if vllm_name is not None:
                counter = CounterMetricFamily(f"vllm:{vllm_name}", text, labels=_LABELS)
                counter.add_metric([self._model], value)
                yield counter
        running, waiting = len(self._engine.scheduler.running), self._num_waiting()
        pages, in_use = cache.pool.num_pages, cache.num_pages_in_use
        gauges = (
            ("running_sequences", "Answers that run.", running),
            ("waiting_requests", "Requests without a first token.", waiting),
            ("kv_pages", "KV pages.", pages),
            ("kv_pages_in_use", "KV pages that requests hold.", in_use),
            ("kv_pages_cached", "KV pages that hold a prefix and that nobody uses.", cache.index.num_evictable),
        )
        for name, text, number in gauges:
            yield GaugeMetricFamily(f"trunkattn_{name}", text, value=number)
        shares = (
            ("num_requests_running", "Answers that run.", running),
            ("num_requests_waiting", "Requests without a first token.", waiting),
            ("kv_cache_usage_perc", "Share of the KV pages that requests hold, from 0 to 1.", in_use / max(1, pages)),
        )
        for name, text, share in shares:
            gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=_LABELS)
            gauge.add_metric([self._model], share)
            yield gauge
        settings = {
            "block_size": cache.page_size,
            "num_gpu_blocks": pages,
            "enable_prefix_caching": cache.enable_prefix_caching,
        }
        info = GaugeMetricFamily("vllm:cache_config_info", "The KV cache, in its labels.", labels=list(settings))
        info.add_metric(list(map(str, settings.values())), 1)
        yield info


class Metrics:
    """The registry of one server. model: the served name."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model
        self.requests = Counter(
            "trunkattn_http_requests", "Requests by path and status.", ("path", "status"), registry=self.registry
        )
        self.first_token = self._histograms(
            "time_to_first_token_seconds", "time_to_first_token_seconds", "Arrival to first token.", _SECONDS
        )
        self._first_tokens: deque[tuple[float, float]] = deque(maxlen=_KEPT_TIMES)  # when, and after how many seconds
        self.between_tokens = self._histograms(
            "inter_token_seconds", "inter_token_latency_seconds", "Time between two tokens.", _TOKEN_SECONDS
        )
        self.per_token = self._histograms(
            "time_per_output_token_seconds",
            "request_time_per_output_token_seconds",
            "Mean time between an answer's tokens.",
            _TOKEN_SECONDS,
        )
        self.whole = self._histograms(
            "request_seconds", "e2e_request_latency_seconds", "Arrival to last token.", _SECONDS
        )
        self.prompt_tokens = Counter("trunkattn_prompt_tokens", "Tokens of prompts.", registry=self.registry)
        text = "Tokens of prompts."
        self._vllm_prompt_tokens = Counter("vllm:prompt_tokens", text, _LABELS, registry=self.registry).labels(model)

        self.step_tokens = Histogram(
            "vllm:iteration_tokens_total",
            "Tokens that go through the model in a step.",
            _LABELS,
            buckets=_TOKENS,
            registry=self.registry,
        ).labels(model)
        self._of_requests = {
            name: Histogram(f"vllm:{name}", text, _LABELS, buckets=buckets, registry=self.registry).labels(model)
            for name, text, buckets in _OF_REQUESTS
        }
        self._reasons = Counter(
            "vllm:request_success",
            "Answers that have ended, by reason.",
            (*_LABELS, "finished_reason"),
            registry=self.registry,
        )

    def watch(self, engine: Engine, num_waiting: Callable[[], int]) -> None:
        """Adds the engine's counts."""
        self.registry.register(EngineCollector(engine, num_waiting, self._model))

    def count_prompt(self, num_tokens: int) -> None:
        """Counts the tokens of a prompt."""
        self.prompt_tokens.inc(num_tokens)
        self._vllm_prompt_tokens.inc(num_tokens)

    def took_first_token(self, seconds: float) -> None:
        """Counts the time to a first token, which came now."""
        _observe(self.first_token, seconds)
        self._first_tokens.append((time.monotonic(), seconds))

    def first_tokens_since(self, time_s: float) -> list[float]:
        """Seconds to the first tokens that came after a time on the monotonic clock; the latest ones of many."""
        return [seconds for came, seconds in self._first_tokens.copy() if came >= time_s]

    def finished(self, output: RequestOutput, params: SamplingParams) -> None:
        """Counts a request that has finished. params: what it asks for."""
        times, tokens = output.metrics, [len(answer.token_ids) for answer in output.outputs]
        self._took("request_queue_time_seconds", times.arrival_time, times.scheduled_time)
        self._took("request_prefill_time_seconds", times.scheduled_time, times.first_token_time)
        self._took("request_decode_time_seconds", times.first_token_time, times.finished_time)
        self._took("request_inference_time_seconds", times.scheduled_time, times.finished_time)
        self._of_requests["request_prompt_tokens"].observe(len(output.prompt_token_ids))
        self._of_requests["request_max_num_generation_tokens"].observe(max(tokens))
        self._of_requests["request_params_n"].observe(params.n)
        if params.max_tokens is not None:
            self._of_requests["request_params_max_tokens"].observe(params.max_tokens)
        for num_tokens, answer in zip(tokens, output.outputs, strict=True):
            self._of_requests["request_generation_tokens"].observe(num_tokens)
            self._reasons.labels(self._model, answer.finish_reason).inc()

    def _took(self, name: str, start: float | None, end: float | None) -> None:
        if start is not None and end is not None:
            self._of_requests[name].observe(end - start)

    def num_errors(self) -> tuple[int, int]:
        """Requests that were refused (a status of 400 to 499, or a version that is not HTTP/1), and that failed (500 or
        more)."""
        refused = failed = 0
        for sample in (sample for metric in self.requests.collect() for sample in metric.samples):
            status, count = int(sample.labels["status"]), int(sample.value) * sample.name.endswith("_total")
            if 400 <= status < 500 or status == _OTHER_VERSION:
                refused += count
            elif status >= 500:
                failed += count
        return refused, failed

    def text(self) -> bytes:
        """The exposition."""
        return generate_latest(self.registry)

    def _histograms(self, name: str, vllm_name: str, text: str, buckets: tuple[float, ...]) -> tuple[Histogram, ...]:
        """Makes two histograms for the same observations: one with our name and one with vLLM's."""
        ours = Histogram(f"trunkattn_{name}", text, buckets=buckets, registry=self.registry)
        theirs = Histogram(f"vllm:{vllm_name}", text, _LABELS, buckets=buckets, registry=self.registry)
        return ours, theirs.labels(self._model)


class RequestTimes:
    """The times of one request, which are counted as its output grows. metrics: what counts them. params: what it asks
    for."""

    def __init__(self, metrics: Metrics, params: SamplingParams) -> None:
        self._metrics, self._params = metrics, params
        self._is_new = True
        self._num_tokens = 0  # of the longest answer
        self._last_s = 0.0  # when it got the last one

    def grown(self, output: RequestOutput) -> None:
        """Counts the prompt's tokens once, those that an answer has got since the last call, and the times of their
        arrival."""
        times, now = output.metrics, time.monotonic()
        num_tokens = max(len(answer.token_ids) for answer in output.outputs)
        new = num_tokens - self._num_tokens
        if self._is_new:
            self._metrics.count_prompt(len(output.prompt_token_ids))
            self._is_new = False
        if self._num_tokens == 0 and times.time_to_first_token is not None:
            self._metrics.took_first_token(times.time_to_first_token)
            new -= 1
            self._last_s = times.first_token_time or now
        for _ in range(new):
            _observe(self._metrics.between_tokens, (now - self._last_s) / new)
        if new:
            self._last_s = now
        self._num_tokens = num_tokens
        if output.finished and times.finished_time is not None:
            _observe(self._metrics.whole, times.finished_time - times.arrival_time)
            self._metrics.finished(output, self._params)
            if output.time_per_output_token is not None:
                _observe(self._metrics.per_token, output.time_per_output_token)


def _observe(histograms: tuple[Histogram, ...], seconds: float) -> None:
    for histogram in histograms:
        histogram.observe(seconds)
