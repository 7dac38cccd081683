"""Models with linear attention: the layers of full attention are ours, in the pool that SGLang makes for them. The
linear layers are SGLang's own; a stand-in takes their place."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention import hybrid_linear_attn_backend as wrapper
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from trunkattn.integrations.sglang import layers
from trunkattn.integrations.sglang.backend import TrunkBackend
from trunkattn.integrations.sglang.route import choose

from .card import make_backend, replay
from .fakes import (
    DIM,
    HEADS,
    KV_HEADS,
    LATENT_DIM,
    PAGE,
    ROPE_DIM,
    SLOTS,
    Step,
    error,
    latent_error,
    make_latent_runner,
    make_runner,
)

FULL = (1, 3)
DECODES = Step([1, 1, 1], [40, 57, 33])
PROMPTS = Step([9, 24, 1], [41, 56, 33])


def make_pool(page: int, dtype: torch.dtype = torch.float32, **options: Any) -> HybridLinearKVPool:
    sizes = {"size": SLOTS, "dtype": dtype, "page_size": page, "head_num": KV_HEADS, "head_dim": DIM}
    return HybridLinearKVPool(
        **sizes, full_attention_layer_ids=list(FULL), device="cpu", mamba_pool=None, **options
    )  # fmt: skip


def make_hybrid(page: int = PAGE, kv_dtype: torch.dtype = torch.float32) -> Any:
    """Layers 1 and 3 attend to all keys; layer 0 is linear, of a model that writes it as SGLang's other attention."""
    linear = {"layer_id": 0, "v_head_dim": 16, "num_kv_heads": HEADS}
    given = (linear, *({"layer_id": number} for number in FULL))
    return make_runner(*given, page=page, kv_dtype=kv_dtype, token_to_kv_pool=make_pool(page, kv_dtype))


def full_layers(runner: Any) -> list[RadixAttention]:
    found = layers.attention_layers(runner)
    assert [layer.layer_id for layer in found] == list(FULL), "a linear layer stores nothing there"
    return found


@pytest.mark.parametrize("page", [1, PAGE])
@pytest.mark.parametrize("step", [DECODES, PROMPTS], ids=["decodes", "prompts"])
def test_equal_to_the_oracle(page: int, step: Step) -> None:
    runner = make_hybrid(page)
    backend, batch = choose(runner), step.batch(runner)
    backend.init_forward_metadata(batch)
    for layer in full_layers(runner):
        assert error(backend, runner, layer, batch) < 1e-5
    first, second = (runner.token_to_kv_pool.get_key_buffer(number) for number in FULL)
    assert not torch.equal(first, second), "each layer has its own keys"


@pytest.mark.parametrize("scaled", [False, True])
def test_caches_of_8_bits(scaled: bool) -> None:
    runner = make_hybrid(kv_dtype=torch.float8_e4m3fn)
    for layer in full_layers(runner):
        if scaled:
            layer.k_scale, layer.v_scale = torch.tensor(0.5), torch.tensor(2.0)
    backend, batch = choose(runner), DECODES.batch(runner)
    backend.init_forward_metadata(batch)
    for layer in full_layers(runner):
        assert error(backend, runner, layer, batch) < 1e-5


def test_graphs(card: None) -> None:
    runner = make_hybrid()
    backend = make_backend(runner)
    batch = Step([1] * 5, [130, 131, 132, 133, 134], shared=8, padding=3).batch(runner)
    for _ in range(2):
        replay(backend, batch)
        for layer in full_layers(runner):
            assert error(backend, runner, layer, batch) < 1e-5
    backend._finish_step()
    backend._traffic.send()
    replay(backend, batch)
    backend._finish_step()
    of_one = 2 * KV_HEADS * DIM * 4 * len(FULL)
    assert backend.traffic.unshared > 0 and backend.traffic.unshared % of_one == 0, "two layers are counted"


def test_latent_rows_beside_linear_layers() -> None:
    """As in Kimi Linear."""
    runner = make_latent_runner(4)
    sizes = {"use_mla": True, "kv_lora_rank": LATENT_DIM, "qk_rope_head_dim": ROPE_DIM}
    runner.token_to_kv_pool = make_pool(PAGE, **sizes)
    runner.token_to_kv_pool.full_kv_pool.dcp_replicated = True
    backend, batch = choose(runner), DECODES.batch(runner)
    backend.init_forward_metadata(batch)
    for layer in full_layers(runner):
        assert latent_error(backend, runner, layer, batch) < 1e-4


def test_inside_of_sglangs_own_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    """It announces a step to both back ends, and sends each layer to its own."""
    monkeypatch.setattr(wrapper, "check_cuda_graph_backend", lambda *phase: False)
    runner, announced = make_hybrid(), list[Any]()
    linear = SimpleNamespace(
        needs_cpu_seq_lens=False, init_forward_metadata=announced.append,
        forward_decode=lambda **given: given["q"] * 2,
    )  # fmt: skip
    ours = choose(runner)
    assert type(ours) is TrunkBackend
    backend = wrapper.HybridLinearAttnBackend(ours, linear, list(FULL))
    batch = DECODES.batch(runner)
    batch.logical_forward_mode = ForwardMode.DECODE
    backend.init_forward_metadata(batch)
    assert announced == [batch]
    q, k, v = torch.randn(3, HEADS * DIM), *torch.randn(2, 3, KV_HEADS, DIM)
    of_linear, of_full = runner.model[0], runner.model[1]
    assert torch.equal(backend.forward(q, k, v, of_linear, batch), 2 * q)
    found = backend.forward(q, k.clone(), v.clone(), of_full, batch)
    assert torch.equal(ours.forward_decode(q, k, v, of_full, batch), found)


def test_other_storage_is_refused() -> None:
    runner = make_hybrid()
    runner.token_to_kv_pool.full_kv_pool.kv_cache_layout = "hnd"
    with pytest.raises(ValueError, match="the KV layout hnd, only nhd"):
        choose(runner)
    runner.token_to_kv_pool.full_kv_pool = type("MHATokenToKVPoolFP4", (), {})()
    with pytest.raises(ValueError, match="a KV pool of type MHATokenToKVPoolFP4"):
        choose(runner)
    other = type("QSATokenToKVPool", (HybridLinearKVPool,), {"__init__": lambda self: None})()
    with pytest.raises(ValueError, match="a KV pool of type QSATokenToKVPool"):
        choose(make_runner(token_to_kv_pool=other))
