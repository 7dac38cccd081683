"""What is counted of the steps on a GPU, without one, and how a user sees it."""

import math

import pytest
import torch
from prometheus_client import REGISTRY
from vllm.config import VllmConfig
from vllm.v1.attention.backends.utils import create_fast_prefill_custom_backend

from trunkattn.integrations import device_traffic, kv_traffic
from trunkattn.integrations.vllm import cuda, metrics

from .fakes import DIM, KV_HEADS, PAGE, FlashRecorder, make_batch, make_builder, make_layer, run_step


@pytest.mark.parametrize(
    ("query_lens", "decode_query_len", "path"),
    [
        ([1, 1, 0], 1, "decode"),
        ([4, 2, 1], 4, "decode"),
        ([1, 5], 4, "mixed"),
        ([0, 2, 7], 1, "prefill"),
    ],
)
def test_paths_on_a_cpu(query_lens: list[int], decode_query_len: int, path: str) -> None:
    assert kv_traffic.step_path(torch.tensor(query_lens), decode_query_len) == path


def test_counters(gpu_engine: VllmConfig, flash_kernel: FlashRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step counts once the next one is planned; one that no layer ran from the host was a graph's."""
    monkeypatch.setattr(device_traffic, "SEND_INTERVAL", math.inf)
    gpu_engine.parallel_config.rank = 17  # labels of its own, in a registry that all tests share
    builder = make_builder(gpu_engine, make_layer(), make_layer(window=16))
    shared, single = make_batch([1, 1, 1], [110, 112, 114], shared=6), make_batch([1], [40])
    for batch in (shared, single, make_batch([1, 9], [20, 0]), make_batch([9], [0])):
        run_step(builder, batch)
    builder.build(0, shared)
    builder._device_traffic.send()
    assert builder.traffic.read == 0, "nothing has arrived"
    builder.build(0, make_batch([1, 1], [20, 30], shared=0))
    builder.build(0, single)
    builder._device_traffic.send()
    builder.build(0, single)
    stats, traffic = builder.stats, builder.traffic
    assert dict(stats.paths) == {"decode": 2, "mixed": 1, "prefill": 1, "full_graph": 3}
    assert dict(stats.unshared) == {"no_decode": 1, "one_request": 3, "nothing_shared": 1}
    width = 2 * DIM * KV_HEADS * 2
    alone = [(2 * (111 + 113 + 115 + 3 * 16)), 2 * (41 + 16), 21 + 16, 21 + 31 + 2 * 16]
    assert traffic.unshared == sum(alone) * width
    assert traffic.saved == 2 * 2 * 6 * PAGE * width, "two steps saved six blocks for two rows each"
    labels = {"model_name": "None", "engine": "0", "rank": "17", "attention": "window 16+full"}
    assert REGISTRY.get_sample_value("trunkattn_kv_bytes_read_total", labels) == traffic.read
    assert REGISTRY.get_sample_value("trunkattn_kv_bytes_saved_total", labels) == traffic.saved
    assert REGISTRY.get_sample_value("trunkattn_steps_total", labels | {"path": "full_graph"}) == 3
    assert REGISTRY.get_sample_value("trunkattn_steps_unshared_total", labels | {"reason": "one_request"}) == 3


def test_a_step_that_vllm_copies(gpu_engine: VllmConfig, flash_kernel: FlashRecorder) -> None:
    """As it does for layers with fast prefill: what runs is the copy."""
    backend = create_fast_prefill_custom_backend("FastPrefill", cuda.TrunkAttentionCudaBackend)
    builder = make_builder(gpu_engine, make_layer(), of=backend.get_builder_cls())
    run_step(builder, make_batch([1, 9], [20, 0]))
    builder.build(0, make_batch([1], [40]))
    assert dict(builder.stats.paths) == {"mixed": 1}


def test_the_ring_is_fetched_when_it_is_full(
    gpu_engine: VllmConfig, flash_kernel: FlashRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_traffic, "SEND_INTERVAL", math.inf)  # however slow the machine is
    builder, batch = make_builder(gpu_engine, make_layer()), make_batch([1], [40])
    for _ in range(2 * device_traffic.RING_STEPS + 1):
        builder.build(0, batch)
    assert builder.traffic.unshared == 2 * device_traffic.RING_STEPS * 41 * 2 * DIM * KV_HEADS * 2


def test_the_log(gpu_engine: VllmConfig, flash_kernel: FlashRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(metrics.logger, "info", lambda message, *values: lines.append(message % values))
    builder, batch = make_builder(gpu_engine, make_layer()), make_batch([1, 1, 1], [110, 112, 114], shared=6)
    assert "prompts run in FlashAttention 3." in lines.pop()
    for _ in range(3):
        run_step(builder, batch)
    assert lines == []
    monkeypatch.setattr(device_traffic, "SEND_INTERVAL", -1.0)
    run_step(builder, batch)
    monkeypatch.setattr(kv_traffic, "LOG_INTERVAL", -1.0)
    run_step(builder, batch)
    assert len(lines) == 1
    assert "4 steps, 0.2 MB of KV read, 0.2 MB (57%) saved" in lines[0]
    assert "steps: decode 4; nothing shared in: none" in lines[0]
