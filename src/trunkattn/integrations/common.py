"""The parts that plug-ins of several serving engines need. No engine is imported here.

`LayerSpec` is the key of a step's plans. `KvReadStats` counts the KV bytes that attention reads, and `DeviceTraffic`
fetches them from a GPU without a wait; `count_arrivals` brings the two together.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import import_module
from typing import Any, Final, NamedTuple

import torch

from trunkattn import AttentionConfig, Plan

LOG_INTERVAL: Final = 10.0  # seconds between log lines, as in vLLM's own statistics
PATHS: Final = ("decode", "mixed", "prefill", "full_graph")
REASONS: Final = ("one_request", "nothing_shared", "no_decode")
RING_STEPS: Final = 256
SEND_INTERVAL: Final = 1.0  # seconds between copies of a GPU's numbers to the host, while steps run


@dataclass(frozen=True)
class LayerSpec:
    """The attention of a layer. Layers with the same spec in one KV-cache group share a plan.

    Attributes:
        num_qo_heads, num_kv_heads, head_dim: geometry.
        dtype: type of the queries.
        kv_dtype: type of the KV cache; None: `dtype`.
        sm_scale: factor of the logits.
        logits_soft_cap: c of c * tanh(logits / c); None: no cap.
        sinks: whether each query head has a sink logit.
        sliding_window: keys that a query sees, its own included; None: all.
        batch_invariant: whether a request's bits do not depend on what it is batched with.
        latent_dim: columns of a cached row that are the values of latent attention (MLA), whose keys are the whole row;
            None: keys and values are cached apart.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    kv_dtype: torch.dtype | None
    sm_scale: float
    logits_soft_cap: float | None
    sinks: bool
    sliding_window: int | None
    batch_invariant: bool = False
    latent_dim: int | None = None

    def config(self, page_size: int) -> AttentionConfig:
        """The attention of these layers with any window."""
        shape = asdict(self)
        del shape["sliding_window"]
        return AttentionConfig(page_size=page_size, **shape)

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of one token's keys and values in one layer; latent attention caches them in one row."""
        numbers = self.head_dim if self.latent_dim is not None else 2 * self.head_dim
        return (self.kv_dtype or self.dtype).itemsize * numbers * self.num_kv_heads

    def __str__(self) -> str:
        """The spec in words, for a log."""
        heads = f"{self.num_qo_heads}/{self.num_kv_heads} heads of {self.head_dim}"
        if self.latent_dim is not None:
            heads = f"{self.num_qo_heads} heads, latent rows of {self.latent_dim} + {self.head_dim - self.latent_dim}"
        found = [f"{heads}, {self.dtype}"]
        found += [f"KV cache {self.kv_dtype}"] if self.kv_dtype else []
        found += [f"window {self.sliding_window}"] if self.sliding_window else []
        found += [f"soft cap {self.logits_soft_cap}"] if self.logits_soft_cap else []
        found += ["sinks"] if self.sinks else []
        found += ["batch invariant"] if self.batch_invariant else []
        return ", ".join(found)


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


class StepTraffic(NamedTuple):
    """What arrived of one step."""

    num_requests: int
    kv_tokens: list[list[int]]  # per layer spec: [tokens read, tokens if each request read its own]


class DeviceTraffic:
    """Fetches the traffic of plans that a GPU makes, without a wait.

    Each step copies its numbers to a ring on the device. The ring is copied to the host when it is full and every
    `SEND_INTERVAL`, and the numbers are read there after they have arrived.

    Args:
        num_specs: layer specs of the group.
        device: where the plans are made.
        errors: words of `BatchAttention.errors`, which are fetched along.
    """

    def __init__(self, num_specs: int, device: torch.device, errors: list[torch.Tensor]) -> None:
        on_gpu = device.type == "cuda"
        self._errors = errors
        self._host_errors = torch.zeros(max(1, len(errors)), dtype=torch.int32, device="cpu", pin_memory=on_gpu)
        self._ring = torch.zeros(RING_STEPS, num_specs, 2, dtype=torch.int64, device=device)
        self._slots = [list(step.unbind()) for step in self._ring.unbind()]
        self._host = torch.zeros(self._ring.shape, dtype=torch.int64, device="cpu", pin_memory=on_gpu)
        self._arrival = torch.cuda.Event() if on_gpu else None
        self._noted: list[tuple[int, int]] = []  # requests and padding of each step in the ring
        self._sent: list[tuple[int, int]] = []
        self._reported = 0
        self._sent_at = time.monotonic()

    def note(self, traffics: list[torch.Tensor], num_requests: int, padding: int = 0) -> None:
        """Adds a step to the ring.

        Args:
            traffics: per layer spec, int64 [2] on the device: KV tokens read, and KV tokens if each request read its
                own.
            num_requests: requests with query tokens in the step.
            padding: further rows, of one token in one page that no request has. They are not counted, but for reads
                of that page after the first.
        """
        for slot, traffic in zip(self._slots[len(self._noted)], traffics, strict=True):
            slot.copy_(traffic, non_blocking=True)
        self._noted.append((num_requests, padding))

    @property
    def is_full(self) -> bool:
        """Whether the ring must be sent before another step."""
        return len(self._noted) == RING_STEPS

    @property
    def is_due(self) -> bool:
        """Whether the last `send` is `SEND_INTERVAL` ago."""
        return time.monotonic() >= self._sent_at + SEND_INTERVAL

    def send(self) -> None:
        """Starts the copy to the host, unless an earlier one has not been taken.

        Later steps reuse the ring, because the copy comes before them in the stream.
        """
        if self._sent:
            return
        self._host.copy_(self._ring, non_blocking=True)
        for place, errors in zip(self._host_errors.split(1), self._errors, strict=False):
            place.copy_(errors, non_blocking=True)
        if self._arrival is not None:
            self._arrival.record()
        self._sent, self._noted = self._noted, []
        self._sent_at = time.monotonic()

    @property
    def errors(self) -> int:
        """The bits of all error words that arrived last."""
        bits = 0
        for errors in self._host_errors.tolist():
            bits |= errors
        return bits

    def new_errors(self) -> int:
        """`errors`, if they were not returned before; otherwise 0."""
        errors, before = self.errors, self._reported
        self._reported = errors
        return 0 if errors == before else errors

    def take(self, wait: bool = False) -> list[StepTraffic]:
        """The steps of the last `send`, if they have arrived and were not taken yet.

        Args:
            wait: wait until they have arrived.
        """
        if not self._sent:
            return []
        if self._arrival is not None:
            if wait:
                self._arrival.synchronize()
            elif not self._arrival.query():
                return []
        sent, self._sent = self._sent, []
        numbers = self._host[: len(sent)].tolist()
        return [
            StepTraffic(
                num_requests, [[max(0, read - min(padding, 1)), unshared - padding] for read, unshared in kv_tokens]
            )
            for (num_requests, padding), kv_tokens in zip(sent, numbers, strict=True)
        ]


def tokens_of(plan: Plan) -> tuple[int, int]:
    """KV tokens that a plan of the host reads, and those that it would read if each request read its own."""
    stats = plan.stats
    return stats.kv_tokens_read, stats.kv_tokens_per_query


def count_arrivals(
    stats: KvReadStats, traffic: DeviceTraffic, token_bytes: list[int], write_error: Callable[..., object]
) -> None:
    """Counts the steps whose numbers have arrived, logs if it is time to, and starts the next copy if it is due.

    Args:
        stats: the counters.
        traffic: the steps so far are noted there.
        token_bytes: per layer spec, bytes of one KV token in all layers of that spec.
        write_error: a logger's `error`: says if a batch was out of bounds.
    """
    is_full = traffic.is_full
    for arrived in traffic.take(wait=is_full):
        stats.count_tokens(arrived.kv_tokens, token_bytes, arrived.num_requests)
    bits = traffic.new_errors()
    if bits:
        # Imported here because it needs Triton, which tests without a GPU do not have.
        from trunkattn.gpu.device_planner.planner import errors_of

        write_error("TrunkAttention got a batch with values out of bounds: %s", "; ".join(errors_of(bits)))
    stats.log()
    if is_full or traffic.is_due:
        traffic.send()
