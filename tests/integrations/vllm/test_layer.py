"""One layer without an engine: fp8 caches, padding, and what is refused when the layer is made."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from trunkattn import BatchAttention
from trunkattn.integrations.vllm import metadata, versions
from trunkattn.integrations.vllm.backend import TrunkAttentionBackend
from trunkattn.integrations.vllm.impl import TrunkAttentionImpl
from trunkattn.reference import paged_attention

HEADS, KV_HEADS, DIM, PAGE, PAGES = 4, 2, 32, 16, 12
SCALE = 0.2
NOTHING = SimpleNamespace(_k_scale_float=1.0, _v_scale_float=1.0)


@pytest.fixture(autouse=True)
def engine() -> Iterator[VllmConfig]:
    config = VllmConfig()
    with set_current_vllm_config(config):
        yield config


def make_layer(kv_cache_dtype: str = "auto", window: int | None = None, **changes: Any) -> TrunkAttentionImpl:
    """In vLLM's order: heads, width, scale, KV heads, ALiBi, window, cache, soft cap, kind, layer to share with."""
    options = {"alibi": None, "soft_cap": None, "kind": "decoder", "shared": None, "extra": {}} | changes
    return TrunkAttentionImpl(
        *(HEADS, DIM, SCALE, KV_HEADS, options["alibi"], window, kv_cache_dtype),
        *(options["soft_cap"], options["kind"], options["shared"]),
        **options["extra"],
    )


def make_step(layer: TrunkAttentionImpl) -> tuple[metadata.StepPlans, tuple[torch.Tensor, ...], torch.Tensor]:
    """Two requests, of 21 and 40 tokens, whose prompts are computed in this step; (plans, batch, slots)."""
    table = torch.tensor([[3, 4, 99], [7, 2, 5]], dtype=torch.int32)
    lens, starts = torch.tensor([21, 40], dtype=torch.int32), torch.tensor([0, 21, 61], dtype=torch.int32)
    attention = BatchAttention(layer.layer_spec.config(PAGE), "cpu")
    plan = attention.plan(table, lens, starts, sliding_window=layer.layer_spec.sliding_window)
    slots = [int(table[row, i // PAGE]) * PAGE + i % PAGE for row, n in enumerate((21, 40)) for i in range(n)]
    batch = (table.where(table < PAGES, 0), lens, starts)
    return metadata.StepPlans({layer.layer_spec: (attention, plan)}), batch, torch.tensor(slots)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("fp8", torch.float8_e4m3fn), ("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)],
)
def test_fp8_caches_hold_scaled_values(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer, scales = make_layer(name), SimpleNamespace(_k_scale_float=0.02, _v_scale_float=0.5)
    plans, batch, slots = make_step(layer)
    key, value = torch.randn(2, 61, KV_HEADS, DIM)
    value[5, 1, 3], value[6, 0, 0] = 1e6, -1e6  # beyond what the cache can hold
    kv_cache = torch.zeros(PAGES, KV_HEADS, PAGE, 2 * DIM, dtype=torch.uint8)
    layer.do_kv_cache_update(scales, key, value, kv_cache, slots)
    query, out = torch.randn(61, HEADS, DIM), torch.empty(61, HEADS, DIM)
    layer.forward(scales, query, key, value, kv_cache, plans, out)

    most = torch.finfo(dtype).max
    caches = torch.zeros(2, PAGES * PAGE, KV_HEADS, DIM)
    for cache, new, scale in zip(caches, (key, value), (0.02, 0.5), strict=True):
        cache[slots] = (new / scale).clamp(-most, most).to(dtype).to(torch.float32) * scale
    k_cache, v_cache = caches.view(2, PAGES, PAGE, KV_HEADS, DIM)
    expected, _ = paged_attention(query, k_cache, v_cache, *batch, sm_scale=SCALE)
    assert expected.isfinite().all()
    torch.testing.assert_close(out, expected.to(torch.float32), rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_outputs_have_the_precision_of_the_model(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)  # as vLLM does while it makes the layers of a model
    try:
        sinks = torch.nn.Parameter(torch.randn(HEADS, dtype=dtype), requires_grad=False)
        layer = make_layer(window=16, soft_cap=4.0, extra={"sinks": sinks})
    finally:
        torch.set_default_dtype(torch.float32)
    layer.process_weights_after_loading(dtype)
    plans, batch, slots = make_step(layer)
    kv_cache = torch.zeros(PAGES, KV_HEADS, PAGE, 2 * DIM, dtype=dtype)
    key, value = torch.randn(2, 61, KV_HEADS, DIM).to(dtype)
    layer.do_kv_cache_update(NOTHING, key, value, kv_cache, slots)
    query, out = torch.randn(61, HEADS, DIM).to(dtype), torch.empty(61, HEADS, DIM, dtype=dtype)
    layer.forward(NOTHING, query, key, value, kv_cache, plans, out)
    caches = versions.split_cache(kv_cache, DIM, dtype)
    options = {"sm_scale": SCALE, "sliding_window": 16, "logits_soft_cap": 4.0, "sinks": sinks}
    expected, _ = paged_attention(query, *caches, *batch, **options)
    rounding = torch.finfo(dtype).eps * float(expected.abs().max())
    assert float((out.double() - expected).abs().max()) < max(rounding, 1e-5)


def test_padding_is_left_alone() -> None:
    """Keys, queries and outputs may be longer than the step; slot -1 is none."""
    layer = make_layer()
    plans, batch, slots = make_step(layer)
    kv_cache = torch.zeros(PAGES, KV_HEADS, PAGE, 2 * DIM)
    key, value, query = torch.randn(70, KV_HEADS, DIM), torch.randn(70, KV_HEADS, DIM), torch.randn(70, HEADS, DIM)
    layer.do_kv_cache_update(NOTHING, key, value, kv_cache, torch.cat([slots, torch.tensor([-1, -1])]))
    written = torch.zeros(PAGES * PAGE, dtype=torch.bool)
    written[slots] = True
    assert torch.equal(kv_cache.transpose(1, 2).abs().sum((2, 3)).view(-1) > 0, written)
    out = torch.full((70, HEADS, DIM), 7.0)
    layer.forward(NOTHING, query, key, value, kv_cache, plans, out, output_scale=None, output_block_scale=None)
    expected, _ = paged_attention(
        query[:61], *versions.split_cache(kv_cache, DIM, torch.float32), *batch, sm_scale=SCALE
    )
    torch.testing.assert_close(out[:61], expected.to(torch.float32), rtol=1e-5, atol=1e-5)
    assert (out[61:] == 7.0).all()


@pytest.mark.parametrize("name", ["output_scale", "output_block_scale"])
def test_an_output_to_quantize_is_refused(name: str) -> None:
    layer = make_layer()
    plans, _, _ = make_step(layer)
    tokens = torch.full((61, HEADS, DIM), 7.0)
    kv_cache = torch.zeros(PAGES, KV_HEADS, PAGE, 2 * DIM)
    assert not layer.fused_output_quant_supported(None), "so vLLM never fuses it"
    with pytest.raises(ValueError, match=f"{name} given: expected None"):
        layer.forward(NOTHING, tokens, tokens, tokens, kv_cache, plans, tokens, **{name: torch.ones(1)})
    assert (tokens == 7.0).all(), "nothing is computed then"


def test_memory_profiling_gives_zeros() -> None:
    query, out = torch.randn(5, HEADS, DIM), torch.full((5, HEADS, DIM), float("nan"))
    nothing = torch.empty(0)
    assert not make_layer().forward(NOTHING, query, nothing, nothing, nothing, None, out).any()


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"alibi": [0.5] * HEADS}, "ALiBi"),
        ({"kind": "encoder_only"}, "encoder_only"),
        ({"kind": "encoder"}, "encoder"),
        ({"kind": AttentionType.ENCODER_DECODER}, "support encoder_decoder attention"),
        ({"kv_cache_dtype": "int8_per_token_head"}, "kv_cache_dtype=int8_per_token_head"),
        ({"extra": {"chunk_lookback": 1}}, "chunk_lookback=1"),
        ({"extra": {"use_alibi_sqrt": True}}, "use_alibi_sqrt=True"),
        ({"extra": {"something_new": 0.5}}, "something_new=0.5"),
    ],
)
def test_what_is_not_supported_is_refused(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError) as error:
        make_layer(**changes)
    message = str(error.value)
    assert "\n" not in message
    assert "TrunkAttention does not support" in message
    assert word in message
    assert "leave attention_backend out" in message


def test_options_of_the_engine_are_refused(engine: VllmConfig) -> None:
    engine.parallel_config.decode_context_parallel_size = 2
    with pytest.raises(ValueError, match="decode context parallelism"):
        make_layer()


def test_a_window_of_a_model_of_which_only_full_attention_is_chosen_is_refused(engine: VllmConfig) -> None:
    """vLLM asks for both kinds with one name on a CPU, and the model's configuration may not tell of windows."""
    engine.attention_config.backend_per_kind = {"full_attention": AttentionBackendEnum.CUSTOM}
    make_layer()
    with pytest.raises(ValueError, match="CUSTOM for full_attention alone, as this model has layers with a sliding"):
        make_layer(window=16)
    engine.attention_config.backend = AttentionBackendEnum.CUSTOM
    make_layer(window=16)


def test_a_mode_whose_operators_are_missing_is_refused(
    set_batch_invariance: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_batch_invariance(True)
    assert make_layer().layer_spec.batch_invariant
    monkeypatch.setattr(versions, "has_triton", lambda: False)
    with pytest.raises(ValueError, match="VLLM_BATCH_INVARIANT=1 without Triton"):
        make_layer()


def test_options_that_are_off_pass() -> None:
    make_layer(extra={"chunk_lookback": -1, "use_alibi_sqrt": False, "something_new": None, "sinks": None})


@pytest.mark.parametrize("kind", ["MLAAttentionSpec", "SinkFullAttentionSpec", "CrossAttentionSpec"])
def test_groups_of_other_caches_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=kind):
        metadata.LayerGroup._check_group(type(kind, (), {})(), {})


def test_layers_that_see_a_prompt_in_both_directions_are_refused() -> None:
    """vLLM would say so of the first step, long after the start."""
    spec = type("FullAttentionSpec", (), {"non_causal": True})()
    with pytest.raises(ValueError, match="attention in both directions over prompts"):
        metadata.LayerGroup._check_group(spec, {})


def test_values_of_another_width_are_refused() -> None:
    spec = type("FullAttentionSpec", (), {})()
    layers = {"attn": SimpleNamespace(head_size_v=64, impl=SimpleNamespace(head_size=DIM))}
    with pytest.raises(ValueError, match="64 and 32 in attn"):
        metadata.LayerGroup._check_group(spec, layers)


def test_what_the_back_end_says_of_itself() -> None:
    assert TrunkAttentionBackend.get_name() == "CUSTOM"
    assert TrunkAttentionBackend.supports_sink()
    assert TrunkAttentionBackend.supports_sliding_window()
    assert TrunkAttentionBackend.supports_batch_invariance()
    assert not TrunkAttentionBackend.is_mla()
    assert not TrunkAttentionImpl.supports_dcp
    assert [TrunkAttentionBackend.supports_block_size(size) for size in (8, 16, 24, 32, 128)] == [
        *(False, True, False, True, True)
    ]
