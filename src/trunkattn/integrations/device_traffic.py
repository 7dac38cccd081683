"""The KV bytes of plans that a GPU makes, fetched without a wait and counted. No engine is imported here."""

import time
from collections.abc import Callable
from typing import Final, NamedTuple

import torch

from trunkattn.integrations.kv_traffic import KvReadStats

RING_STEPS: Final = 256
SEND_INTERVAL: Final = 1.0  # seconds between copies of a GPU's numbers to the host, while steps run


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
