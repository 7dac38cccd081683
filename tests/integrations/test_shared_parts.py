"""The parts that plug-ins share, without any engine: layer specs, counters of KV reads, and their way off a device."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trunkattn import AttentionConfig
from trunkattn.integrations import device_traffic, kv_traffic
from trunkattn.integrations.device_traffic import RING_STEPS, DeviceTraffic
from trunkattn.integrations.kv_traffic import PATHS, REASONS, KvCounters, KvReadStats, step_path
from trunkattn.integrations.layer_spec import LayerSpec

CPU = torch.device("cpu")


class FakeCounter:
    """A Prometheus counter with its labels set."""

    def __init__(self) -> None:
        self.value = 0

    def inc(self, amount: int = 1) -> None:
        assert amount >= 0, "counters of Prometheus only grow"
        self.value += amount


def make_counters() -> KvCounters:
    by_path, by_reason = ({name: FakeCounter() for name in names} for names in (PATHS, REASONS))
    return KvCounters(FakeCounter(), FakeCounter(), by_path, by_reason)


def make_spec(**changes: Any) -> LayerSpec:
    plain: dict[str, Any] = {
        "num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 64, "dtype": torch.bfloat16, "kv_dtype": None,
        "sm_scale": 0.125, "logits_soft_cap": None, "sinks": False, "sliding_window": None,
    }  # fmt: skip
    return LayerSpec(**{**plain, **changes})


def test_a_spec_is_a_config_and_a_window() -> None:
    expected = AttentionConfig(8, 2, 64, page_size=16, dtype=torch.bfloat16, sm_scale=0.125)
    assert make_spec().config(16) == make_spec(sliding_window=7).config(16) == expected
    assert make_spec() != make_spec(sliding_window=7)
    assert make_spec().kv_token_bytes == 2 * 2 * 64 * 2
    assert make_spec(kv_dtype=torch.float8_e5m2).kv_token_bytes == 2 * 2 * 64


def test_a_spec_in_words() -> None:
    assert str(make_spec()) == "8/2 heads of 64, torch.bfloat16"
    rich = make_spec(kv_dtype=torch.float8_e5m2, sliding_window=7, logits_soft_cap=30.0, sinks=True)
    assert str(rich).endswith("bfloat16, KV cache torch.float8_e5m2, window 7, soft cap 30.0, sinks")


@pytest.mark.parametrize(
    ("query_lens", "decode_query_len", "path"),
    [([1, 1, 0], 1, "decode"), ([4, 2, 1], 4, "decode"), ([1, 5], 4, "mixed"), ([0, 2, 7], 1, "prefill")],
)
def test_the_path_of_a_step(query_lens: list[int], decode_query_len: int, path: str) -> None:
    assert step_path(torch.tensor(query_lens), decode_query_len) == path


def test_steps_and_bytes_are_counted() -> None:
    counters = make_counters()
    stats = KvReadStats(4, counters, lambda *_: None)
    for path in ("decode", "mixed", "decode"):
        stats.count_step(path)
    stats.count_read(100, 400, num_requests=3)
    stats.count_read(100, 100, num_requests=3)
    stats.count_read(50, 50, num_requests=1)
    stats.count_unshared("no_decode")
    assert (stats.traffic.steps, stats.traffic.read, stats.traffic.unshared, stats.traffic.saved) == (3, 250, 550, 300)
    assert stats.paths == Counter(decode=2, mixed=1)
    assert stats.unshared == Counter(nothing_shared=1, one_request=1, no_decode=1)
    assert (counters.read.value, counters.saved.value) == (250, 300)
    assert {path: counter.value for path, counter in counters.steps.items() if counter.value} == dict(stats.paths)
    assert {name: counter.value for name, counter in counters.unshared_steps.items() if counter.value} == dict(
        stats.unshared
    )


def test_bytes_are_counted_by_the_tokens_of_plans() -> None:
    stats = KvReadStats(4, make_counters(), lambda *_: None)
    stats.count_tokens([(10, 30), (5, 5)], [2, 100], num_requests=2)
    assert (stats.traffic.read, stats.traffic.unshared) == (520, 560)
    with pytest.raises(ValueError):
        stats.count_tokens([(10, 30)], [2, 100], num_requests=2)


def test_the_log_line(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    stats = KvReadStats(4, make_counters(), lambda message, *values: lines.append(message % values))
    stats.count_step("decode")
    stats.count_read(1_000_000, 4_000_000, num_requests=2)
    stats.log()
    assert lines == [], "10 seconds have not passed"
    monkeypatch.setattr(kv_traffic, "LOG_INTERVAL", -1.0)
    stats.log()
    assert lines == [
        "TrunkAttention, 4 layers: 1 steps, 1.0 MB of KV read, 3.0 MB (75%) saved by sharing; steps: decode 1; nothing "
        "shared in: none"
    ]


def test_numbers_from_the_device_arrive_once_and_in_order() -> None:
    words = [torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)]
    traffic = DeviceTraffic(2, CPU, words)
    assert traffic.take() == []
    traffic.note([torch.tensor([1, 2]), torch.tensor([3, 4])], 5)
    traffic.note([torch.tensor([6, 7]), torch.tensor([8, 9])], 10)
    assert traffic.take() == [], "nothing is sent"
    words[0].fill_(1), words[1].fill_(4)
    traffic.send()
    traffic.note([torch.tensor([0, 0]), torch.tensor([0, 0])], 1)
    traffic.send()  # waits for the first to be taken
    assert traffic.take() == [(5, [[1, 2], [3, 4]]), (10, [[6, 7], [8, 9]])]
    assert traffic.errors == 5 and traffic.take() == []
    traffic.send()
    assert traffic.take(wait=True) == [(1, [[0, 0], [0, 0]])]


def test_numbers_are_counted_before_the_first_log_line(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    for module in (device_traffic, kv_traffic):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    lines: list[str] = []
    stats = KvReadStats(1, make_counters(), lambda message, *values: lines.append(message % values))
    traffic = DeviceTraffic(1, CPU, [])
    for step in range(11):
        now = 100.0 + step
        stats.count_step("full_graph")
        traffic.note([torch.tensor([1, 4])], 2)
        device_traffic.count_arrivals(stats, traffic, [1_000_000], print)
    assert len(lines) == 1
    assert "11 steps, 10.0 MB of KV read, 30.0 MB (75%) saved" in lines[0], "all but those of the last second"


def test_a_full_ring_must_be_sent() -> None:
    traffic = DeviceTraffic(1, CPU, [])
    for step in range(RING_STEPS):
        assert not traffic.is_full
        traffic.note([torch.tensor([step, step])], 1)
    assert traffic.is_full
    traffic.send()
    assert not traffic.is_full and [step.kv_tokens[0][0] for step in traffic.take()] == list(range(RING_STEPS))
