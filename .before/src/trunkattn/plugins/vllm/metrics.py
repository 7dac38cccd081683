"""What sharing saved: a line in vLLM's log, and counters for Prometheus.

Both are kept where the attention runs: in a worker, which is a process of its own, but for
VLLM_ENABLE_V1_MULTIPROCESSING=0 on one card. Each worker logs its totals every 10 seconds in which it runs steps.

The counters are in prometheus_client's default registry of that process. vLLM's own reach /metrics through messages of
a fixed form from the engine to the API server, which a plug-in cannot extend, and so these do not, unless
prometheus_client shares them between processes: set PROMETHEUS_MULTIPROC_DIR to an empty folder before `vllm serve`,
and vLLM's /metrics has them (vLLM does so itself where it starts several API servers).

    trunkattn_kv_bytes_read_total     KV bytes that the attention of the counted rows read
    trunkattn_kv_bytes_saved_total    bytes on top, had every request read its own
    trunkattn_steps_total             path: decode, mixed, prefill, or full_graph (decoding replayed by a CUDA graph)
    trunkattn_steps_unshared_total    reason: one_request, nothing_shared (no common prefix, or none worth a tile of its
                                      own), no_decode (on a GPU prompts run in FlashAttention, which shares nothing)

Labels of all: model_name, engine (the data-parallel one), rank (the worker), attention (full, or the window). Sum the
bytes over ranks and attentions; steps are counted by each. On a GPU only decode rows are counted.
"""

import time
from collections import Counter
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Final

import torch
from vllm.logger import init_logger

logger = init_logger("vllm.trunkattn")
LOG_INTERVAL: Final = 10.0  # seconds, that of vLLM's own statistics
LABELS: Final = ("model_name", "engine", "rank", "attention")
PATHS: Final = ("decode", "mixed", "prefill", "full_graph")
REASONS: Final = ("one_request", "nothing_shared", "no_decode")
RING_STEPS: Final = 256


@dataclass
class Traffic:
    """KV bytes of the steps so far, over all layers of a group; `alone`: as if every request read its own."""

    steps: int = 0
    read: int = 0
    alone: int = 0

    def __str__(self) -> str:
        saved = self.alone - self.read
        share = saved / self.alone if self.alone else 0.0
        return f"{self.steps} steps, {self.read / 1e6:.1f} MB of KV read, {saved / 1e6:.1f} MB ({share:.0%}) saved"


@cache  # a name can be registered once in a process, which may make many engines
def _counters() -> tuple[Any, Any, Any, Any]:
    counter = import_module("prometheus_client").Counter  # a dependency of vLLM
    return (
        counter("trunkattn_kv_bytes_read", "KV bytes read.", LABELS),
        counter("trunkattn_kv_bytes_saved", "KV bytes that sharing saved.", LABELS),
        counter("trunkattn_steps", "Steps by path.", (*LABELS, "path")),
        counter("trunkattn_steps_unshared", "Steps in which nothing was shared.", (*LABELS, "reason")),
    )


def step_path(query_lens: torch.Tensor, decode_query_len: int) -> str:
    """Of query lengths on the CPU: whether the rows that have any are decoding (or verifying drafts), or prompts."""
    live = query_lens[query_lens > 0]
    decoding = int((live <= decode_query_len).sum())
    if decoding == len(live):
        return "decode"
    return "mixed" if decoding else "prefill"


class Ledger:
    """Counts the steps of one attention group."""

    def __init__(self, vllm_config: Any, windows: set[int | None], num_layers: int) -> None:
        self.traffic, self._num_layers = Traffic(), num_layers
        self._paths: Counter[str] = Counter()
        self._unshared: Counter[str] = Counter()
        self._logged = time.monotonic()
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        name = str(model.served_model_name if model else None)
        engine, rank = getattr(parallel, "data_parallel_index", 0), getattr(parallel, "rank", 0)
        attention = "+".join("full" if window is None else f"window {window}" for window in sorted(windows, key=str))
        labels = (name, str(engine), str(rank), attention)
        read, saved, steps, unshared = _counters()
        self._read, self._saved = read.labels(*labels), saved.labels(*labels)
        self._steps_by_path = {path: steps.labels(*labels, path) for path in PATHS}
        self._steps_by_reason = {reason: unshared.labels(*labels, reason) for reason in REASONS}

    def step(self, path: str) -> None:
        """One more step."""
        self.traffic.steps += 1
        self._paths[path] += 1
        self._steps_by_path[path].inc()

    def read(self, read: int, alone: int, requests: int) -> None:
        """The bytes of a step that so many requests have tokens in."""
        self.traffic.read += read
        self.traffic.alone += alone
        self._read.inc(read)
        self._saved.inc(max(0, alone - read))
        if read >= alone:
            self.unshared("nothing_shared" if requests > 1 else "one_request")

    def unshared(self, reason: str) -> None:
        """A step in which nothing was shared."""
        self._unshared[reason] += 1
        self._steps_by_reason[reason].inc()

    def log(self) -> bool:
        """Logs the totals if it is time to; whether it was."""
        now = time.monotonic()
        if now < self._logged + LOG_INTERVAL:
            return False
        self._logged = now
        paths = ", ".join(f"{path} {count}" for path, count in self._paths.items())
        reasons = ", ".join(f"{reason} {count}" for reason, count in self._unshared.items())
        logger.info(
            "TrunkAttention, %d layers: %s by sharing; steps: %s; nothing shared in: %s",
            *(self._num_layers, self.traffic, paths, reasons or "none"),
        )
        return True


class DeviceTraffic:
    """Traffic of plans that a GPU makes, fetched without waiting for it: a step's numbers are copied to a ring on the
    device, and that to the host now and then, where it is read once it has arrived."""

    def __init__(self, num_kinds: int, device: torch.device, errors: list[torch.Tensor]) -> None:
        """errors: words of `BatchAttention.errors`, which come along."""
        on_gpu = device.type == "cuda"
        self._errors = errors
        self._host_errors = torch.zeros(max(1, len(errors)), dtype=torch.int32, pin_memory=on_gpu)
        self._ring = torch.zeros(RING_STEPS, num_kinds, 2, dtype=torch.int64, device=device)
        self._slots = [list(step.unbind()) for step in self._ring.unbind()]
        self._host = torch.zeros(self._ring.shape, dtype=torch.int64, pin_memory=on_gpu)
        self._arrival = torch.cuda.Event() if on_gpu else None
        self._noted: list[int] = []  # requests of each step in the ring
        self._sent: list[int] = []

    def note(self, traffics: list[torch.Tensor], requests: int) -> None:
        """traffics: int64 [2] on the device for each kind of layer: KV tokens read, and had each request read its
        own."""
        for slot, traffic in zip(self._slots[len(self._noted)], traffics, strict=True):
            slot.copy_(traffic, non_blocking=True)
        self._noted.append(requests)

    @property
    def full(self) -> bool:
        """Whether it must be sent before another step."""
        return len(self._noted) == RING_STEPS

    def send(self) -> None:
        """Starts the copy to the host, unless an earlier one has not been taken. Later steps reuse the ring: the copy
        comes before theirs in the stream."""
        if self._sent:
            return
        self._host.copy_(self._ring, non_blocking=True)
        for place, errors in zip(self._host_errors.split(1), self._errors, strict=False):
            place.copy_(errors, non_blocking=True)
        if self._arrival is not None:
            self._arrival.record()
        self._sent, self._noted = self._noted, []

    @property
    def errors(self) -> int:
        """What the words held that arrived last, together."""
        bits = 0
        for errors in self._host_errors.tolist():
            bits |= errors
        return bits

    def take(self, wait: bool = False) -> list[tuple[int, list[list[int]]]]:
        """What was sent, once it has arrived, else nothing: (requests, [tokens read, tokens alone] of each kind)."""
        if not self._sent:
            return []
        if self._arrival is not None:
            if wait:
                self._arrival.synchronize()
            elif not self._arrival.query():
                return []
        sent, self._sent = self._sent, []
        return list(zip(sent, self._host[: len(sent)].tolist(), strict=True))
