"""The back end for GPUs without one: what is planned where, what the kernels are given, what is refused."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention.chunked_local_attention import create_chunked_local_attention_backend
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends import fa_utils

from trunkattn import AttentionConfig
from trunkattn.integrations import warm_up
from trunkattn.integrations.captured_run import CapturedRun
from trunkattn.integrations.vllm import cuda, decode_builder, versions
from trunkattn.integrations.vllm.context_parallel import ContextRanks
from trunkattn.integrations.vllm.flash import with_regular_strides
from trunkattn.reference import paged_attention

from .device_attention import DeviceAttention
from .fakes import (
    DIM,
    HEADS,
    ONE,
    PAGE,
    PAGES,
    SCALE,
    SEQUENCES,
    WIDTH,
    FlashRecorder,
    make_batch,
    make_builder,
    make_layer,
    run_step,
)

pytestmark = pytest.mark.usefixtures("gpu_engine")


def test_decoding_runs_on_our_kernels_alone(gpu_engine: VllmConfig, flash_kernel: FlashRecorder) -> None:
    builder = make_builder(gpu_engine, make_layer())
    step, errors = run_step(builder, make_batch([1, 1, 1], [20, 40, 60]))
    assert max(errors) < 0.02
    assert (step.decodes, step.decode_tokens, step.prefill) == (3, 3, None)
    assert flash_kernel.calls == []


def test_decoding_and_prompts_in_one_step(gpu_engine: VllmConfig, flash_kernel: FlashRecorder) -> None:
    layer = make_layer()
    builder = make_builder(gpu_engine, layer)
    batch = make_batch([1, 1, 5, 30], [20, 40, 60, 0])
    step, errors = run_step(builder, batch)
    assert max(errors) < 0.02
    assert (step.decodes, step.decode_tokens, step.prefill.tokens) == (2, 2, slice(2, 37))
    (call,) = flash_kernel.calls
    assert call["cu_seqlens_q"].tolist() == [0, 5, 35]
    assert call["seqused_k"].tolist() == [65, 30]
    assert torch.equal(call["block_table"], batch.block_table_tensor[2:])
    assert (call["max_seqlen_q"], call["max_seqlen_k"]) == (30, WIDTH * PAGE)
    assert (call["softmax_scale"], call["causal"], call["window_size"]) == (SCALE, True, [-1, -1])
    assert (call["softcap"], call["s_aux"], call["fa_version"]) == (0.0, None, 3)
    ((table, lens, starts, _),) = builder.attentions[layer.layer_spec].planned
    assert torch.equal(table, batch.block_table_tensor[:2])
    assert (lens.tolist(), starts.tolist()) == ([21, 41], [0, 1, 2])


@pytest.mark.parametrize("eager", [False, True])
def test_layers_run_in_graphs_of_their_own_unless_eager(
    gpu_engine: VllmConfig, flash_kernel: FlashRecorder, monkeypatch: pytest.MonkeyPatch, eager: bool
) -> None:
    """One for all windows of an attention: they share its tensors."""
    monkeypatch.setattr(gpu_engine, "model_config", SimpleNamespace(served_model_name="tiny", enforce_eager=eager))
    windowed, full = make_layer(window=16), make_layer()
    builder = make_builder(gpu_engine, windowed, full)
    step, errors = run_step(builder, make_batch([1, 1, 20], [20, 40, 60]))
    assert max(errors) < 0.02
    (run, plan), (other, other_plan) = step.plans[windowed.layer_spec], step.plans[full.layer_spec]
    assert plan is not other_plan
    assert run == other == builder.attentions[full.layer_spec].run if eager else run is other
    assert isinstance(run, CapturedRun) is not eager


@pytest.fixture
def overlapping(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card on which one kernel computes prompts and decodes sooner."""
    monkeypatch.setattr(DeviceAttention, "may_overlap", True)


@pytest.mark.usefixtures("overlapping")
def test_prompts_and_decodes_in_one_kernel(gpu_engine: VllmConfig, flash_kernel: FlashRecorder) -> None:
    layer, windowed = make_layer(), make_layer(window=16)
    builder = make_builder(gpu_engine, layer, windowed)
    batch = make_batch([1, 1, 5, 30], [20, 40, 60, 0])
    batch.seq_lens_cpu_upper_bound = batch.seq_lens.clone()
    step, errors = run_step(builder, batch)
    assert max(errors) < 0.02
    assert flash_kernel.calls == []
    assert (step.decodes, step.requests, step.decode_tokens, step.prefill, step.path) == (2, 2, 37, None, "mixed")
    chunks = builder.attentions[layer.layer_spec].chunks
    assert (chunks.first_token, chunks.query_lens.tolist(), chunks.seq_lens.tolist()) == (2, [5, 30], [65, 30])
    assert chunks.other_kv_tokens == 21 + 41
    assert chunks.seq_lens.dtype == chunks.query_lens.dtype == torch.int32
    step, errors = run_step(builder, make_batch([1, 1, 1], [20, 40, 60]))  # the next step only decodes
    assert max(errors) < 0.02
    assert (step.decode_tokens, step.path, builder.attentions[layer.layer_spec].chunks) == (3, "decode", None)
    assert isinstance(step.plans[layer.layer_spec][0], CapturedRun)


@pytest.mark.usefixtures("overlapping")
@pytest.mark.parametrize("why", ["no lengths", "not worth it", "no decode", "padding"])
def test_prompts_go_to_flash_attention_otherwise(
    gpu_engine: VllmConfig, flash_kernel: FlashRecorder, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    builder = make_builder(gpu_engine, make_layer())
    run_step(builder, make_batch([1, 1], [20, 40]))
    batch = make_batch([7, 5, 30] if why == "no decode" else [1, 5, 30], [20, 40, 0], padding=int(why == "padding"))
    if why != "no lengths":
        batch.seq_lens_cpu_upper_bound = batch.seq_lens.clone()
    if why == "not worth it":
        monkeypatch.setattr(DeviceAttention, "may_overlap", False)
    if why == "padding":  # of a full graph, which holds no prompts
        assert builder.build(0, batch).chunks is False
        return
    step, errors = run_step(builder, batch)
    assert max(errors) < 0.02
    assert (len(flash_kernel.calls), step.chunks) == (1, False)


@pytest.mark.parametrize("may_overlap", [False, True])
def test_there_is_room_for_prompt_chunks_only_where_they_may_overlap(
    gpu_engine: VllmConfig, flash_kernel: FlashRecorder, monkeypatch: pytest.MonkeyPatch, may_overlap: bool
) -> None:
    """Elsewhere it would take memory, and each plan would have to empty it."""
    rooms: list[int] = []

    def captured(attention: DeviceAttention, chunk_tokens: int) -> Any:
        rooms.append(chunk_tokens)
        return CapturedRun(attention, chunk_tokens)

    monkeypatch.setattr(DeviceAttention, "may_overlap", may_overlap)
    monkeypatch.setattr(decode_builder, "CapturedRun", captured)
    layer = make_layer()
    builder = make_builder(gpu_engine, layer)
    step, errors = run_step(builder, make_batch([1, 1, 5], [20, 40, 60]))
    assert max(errors) < 0.02
    most = min(gpu_engine.scheduler_config.max_num_batched_tokens, cuda._CAPTURED_CHUNK_TOKENS) if may_overlap else 0
    assert rooms == [most]
    attention = builder.attentions[layer.layer_spec]
    assert bool(attention.limits.max_chunk_tokens) is may_overlap
    assert step.plans[layer.layer_spec][1].owner is attention


@pytest.mark.usefixtures("overlapping")
def test_kernels_are_compiled_together_before_the_first_step(
    gpu_engine: VllmConfig, flash_kernel: FlashRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First nothing but compiled, then run once: decodes alone, and with a prompt behind them."""
    runs: list[tuple[bool, int, int]] = []
    compiling: list[bool] = []

    @contextmanager
    def together() -> Iterator[None]:
        compiling.append(True)
        yield
        compiling.clear()

    def run(self: DeviceAttention, plan: Any, q: torch.Tensor, *caches: torch.Tensor, **options: Any) -> None:
        runs.append((bool(compiling), plan.num_query_tokens, len(q)))

    builder = make_builder(gpu_engine, make_layer(), make_layer(window=16))
    builder.build(0, make_batch([1, 1], [20, 40]))
    with monkeypatch.context() as patched:
        patched.setattr(warm_up, "compiled_together", together)
        patched.setattr(DeviceAttention, "run", run)
        builder._warm_up(WIDTH)
    assert runs == [(now, tokens, tokens) for now in (True, False) for tokens in (1, 1, 2, 2)]
    step, errors = run_step(builder, make_batch([1, 1], [20, 40]))
    assert step.decode_tokens == 2
    assert max(errors) < 0.02


def test_prompts_alone(gpu_engine: VllmConfig, flash_kernel: FlashRecorder) -> None:
    layer = make_layer()
    builder = make_builder(gpu_engine, layer)
    step, errors = run_step(builder, make_batch([7, 30], [16, 0]))
    assert max(errors) < 0.02
    assert (step.decodes, step.plans, step.prefill.tokens) == (0, {}, slice(0, 37))
    assert flash_kernel.calls[0]["cu_seqlens_q"].tolist() == [0, 7, 37]
    assert builder.attentions[layer.layer_spec].planned == []


def test_windows_soft_caps_and_sinks_reach_both_kernels(gpu_engine: VllmConfig, flash_kernel: FlashRecorder) -> None:
    sinks = torch.nn.Parameter(torch.randn(HEADS, dtype=torch.bfloat16), requires_grad=False)
    layer = make_layer(window=16, soft_cap=4.0, extra={"sinks": sinks})
    layer.process_weights_after_loading(torch.bfloat16)
    full = make_layer()
    builder = make_builder(gpu_engine, layer, full)
    _, errors = run_step(builder, make_batch([1, 1, 20], [20, 40, 60]))
    assert max(errors) < 0.02
    windowed, plain = flash_kernel.calls
    assert (windowed["window_size"], windowed["softcap"]) == ([15, 0], 4.0)
    assert windowed["s_aux"] is sinks, "as the model has them"
    assert (plain["window_size"], plain["softcap"], plain["s_aux"]) == ([-1, -1], 0.0, None)
    assert layer.sinks.dtype == torch.float32
    place = layer.sinks.data_ptr()
    sinks.fill_(2.0)
    layer.process_weights_after_loading(torch.bfloat16)
    assert layer.sinks.tolist() == [2.0] * HEADS
    assert layer.sinks.data_ptr() == place, "graphs read them there"


def test_drafts_are_verified_by_our_kernels(gpu_engine: VllmConfig, flash_kernel: FlashRecorder) -> None:
    gpu_engine.speculative_config = SimpleNamespace(num_speculative_tokens=3, parallel_drafting=False)  # type: ignore[assignment]
    layer = make_layer()
    builder = make_builder(gpu_engine, layer)
    assert builder.reorder_batch_threshold == 4
    step, errors = run_step(builder, make_batch([4, 4, 2, 9], [20, 40, 60, 3]))
    assert max(errors) < 0.02
    assert (step.decodes, step.decode_tokens, step.prefill.tokens) == (3, 10, slice(10, 19))
    limits = builder.attentions[layer.layer_spec].limits
    assert (limits.max_requests, limits.max_query_tokens, limits.max_query_len) == (SEQUENCES, 4 * SEQUENCES, 4)
    assert (limits.max_pages_per_request, limits.num_pages) == (WIDTH, PAGES)


def test_drafts_of_every_request_in_two_chunks(gpu_engine: VllmConfig, flash_kernel: FlashRecorder) -> None:
    """vLLM makes a row of each chunk, so there are more rows than requests."""
    gpu_engine.speculative_config = SimpleNamespace(num_speculative_tokens=3, parallel_drafting=False)  # type: ignore[assignment]
    within = create_chunked_local_attention_backend(cuda.TrunkAttentionCudaBackend, 2 * PAGE).get_builder_cls()
    layer, plain = make_layer(), make_builder(gpu_engine, make_layer())
    (name,), (module,) = plain.layer_names, plain.modules.values()
    module.impl, module.attention_chunk_size = layer, 2 * PAGE
    builder = within(plain.kv_cache_spec, [name], gpu_engine, torch.device("cpu"))
    assert not builder.supports_draft_decode_metadata_update, "the rows of a chunk are not those that vLLM lengthens"
    context = 2 * 2 * PAGE - 2
    batch = make_batch([4] * SEQUENCES, [context] * SEQUENCES)
    step = builder.build(0, batch)
    assert (step.decodes, step.decode_tokens, step.prefill) == (2 * SEQUENCES, 4 * SEQUENCES, None)
    query, out = torch.randn(2, 4 * SEQUENCES, HEADS, DIM).to(torch.bfloat16)
    layer.forward(ONE, query, query, query, module.kv_cache, step, out)
    caches = [cache.float() for cache in versions.split_cache(module.kv_cache, DIM, torch.bfloat16)]
    for request in range(SEQUENCES):
        for token, (first, length) in enumerate([(2, 2 * PAGE - 1), (2, 2 * PAGE), (4, 1), (4, 2)]):
            table = batch.block_table_tensor[request : request + 1, first : first + 2].where(
                torch.arange(2) * PAGE < length, 0
            )
            row, starts = 4 * request + token, torch.tensor([0, 1])
            expected, _ = paged_attention(
                query[row : row + 1], *caches, table, torch.tensor([length]), starts, sm_scale=SCALE
            )
            assert (out[row].double() - expected[0]).abs().max() < 0.02


def test_ranks_and_chunks_are_refused_together(gpu_engine: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "context_ranks", lambda layers, config: ContextRanks(2, 0, 1))
    monkeypatch.setattr(cuda.TrunkAttentionCudaBuilder, "attends_in_chunks", True)
    with pytest.raises(ValueError, match="decode context parallelism with attention within chunks"):
        make_builder(gpu_engine, make_layer())


def test_layers_that_are_added_to_the_list_later(gpu_engine: VllmConfig, flash_kernel: FlashRecorder) -> None:
    """As vLLM does with those of a draft model."""
    all_layers = make_builder(gpu_engine, make_layer(), make_layer(window=16))
    first, second = all_layers.layer_names
    builder = type(all_layers)(all_layers.kv_cache_spec, names := [first], gpu_engine, all_layers.device)
    names.append(second)
    _, errors = run_step(builder, make_batch([1, 1, 9], [110, 20, 30]))
    assert len(errors) == 2
    assert max(errors) < 0.02
    assert sum(builder.kv_token_bytes()) == 2 * all_layers.kv_token_bytes()[0]


def test_drafting_goes_on_from_the_same_tensors(gpu_engine: VllmConfig, flash_kernel: FlashRecorder) -> None:
    """Between the tokens of a draft vLLM lengthens each request in place, and the plan follows, in its own place."""
    layer = make_layer()
    builder = make_builder(gpu_engine, layer)
    assert builder.supports_draft_decode_metadata_update
    batch = make_batch([1, 1], [20, 40])
    step, _ = run_step(builder, batch)
    (_, plan), attention = step.plans[layer.layer_spec], builder.attentions[layer.layer_spec]
    batch.seq_lens += 3
    builder.update_draft_decode_metadata(step)
    _, lens, _, into = attention.planned[-1]
    assert (lens.tolist(), into) == ([24, 44], plan)
    assert len(attention.planned) == 2
    assert plan.stats.kv_tokens_per_query == 68


def test_a_batch_invariant_plan_is_updated_in_a_graph_too(
    gpu_engine: VllmConfig, flash_kernel: FlashRecorder, set_batch_invariance: Callable[[bool], None]
) -> None:
    set_batch_invariance(True)
    assert make_builder(gpu_engine, make_layer()).supports_draft_decode_metadata_update


@pytest.mark.parametrize(("drafts", "most"), [(None, 1), (3, 4)])
def test_graphs_hold_rows_of_several_lengths(drafts: int | None, most: int, gpu_engine: VllmConfig) -> None:
    if drafts:
        gpu_engine.speculative_config = SimpleNamespace(num_speculative_tokens=drafts, parallel_drafting=False)  # type: ignore[assignment]
    builder = make_builder(gpu_engine, make_layer())
    spec = builder.kv_cache_spec
    assert builder.get_cudagraph_support(gpu_engine, spec) is AttentionCGSupport.UNIFORM_BATCH
    assert builder.get_varlen_cudagraph_max_query_len(gpu_engine, spec) == most
    lens = [most, 1, most]
    batch = make_batch(lens, [20, 40, 60], padding=1)
    batch.query_start_loc_cpu = torch.tensor([0, *torch.tensor([1, most, most]).cumsum(0).tolist(), sum(lens)])
    step, errors = run_step(builder, batch)
    assert max(errors) < 0.02, "the device's lengths count, of which the host knows the sum"
    assert (step.decode_tokens, step.prefill) == (sum(lens) + 1, None)


def test_plans_stay_where_they_are(gpu_engine: VllmConfig, flash_kernel: FlashRecorder) -> None:
    """A graph that was captured with a step reads the plan of any later one."""
    layer = make_layer()
    builder = make_builder(gpu_engine, layer)
    dummy = make_batch([1] * SEQUENCES, [0] * SEQUENCES)
    dummy.block_table_tensor.zero_()
    captured = builder.build_for_cudagraph_capture(dummy)
    attention, (_, plan) = builder.attentions[layer.layer_spec], captured.plans[layer.layer_spec]
    batch = make_batch([1, 1, 1], [20, 40, 60], padding=1)
    step = builder.build(0, batch)
    assert step.plans[layer.layer_spec] == captured.plans[layer.layer_spec]
    assert (step.decodes, step.decode_tokens, step.prefill) == (4, 4, None), "padding belongs to the graph"
    assert attention.planned[0][-1] is None
    assert attention.planned[1][-1] is plan
    assert plan.num_query_tokens == 3
    _, errors = run_step(builder, batch, spare=0)
    assert max(errors) < 0.02
    assert builder._cudagraph_support is AttentionCGSupport.UNIFORM_BATCH


def test_prompts_in_a_captured_graph_are_refused(
    gpu_engine: VllmConfig, flash_kernel: FlashRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = make_builder(gpu_engine, make_layer())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    run_step(builder, make_batch([1, 1], [20, 40]))
    with pytest.raises(ValueError, match="FULL_AND_PIECEWISE"):
        run_step(builder, make_batch([1, 9], [20, 40]))


@pytest.mark.parametrize(
    ("version", "extra", "found"),
    [
        (2, {}, "FlashAttention 2"),
        (2, {"sinks": torch.zeros(HEADS)}, "does not support sinks"),
        (4, {"sinks": torch.zeros(HEADS)}, "FlashAttention 4"),
        (None, {}, "no FlashAttention for this GPU"),
    ],
)
def test_versions_of_flash_attention(
    version: int | None, extra: dict[str, Any], found: str, flash_kernel: FlashRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fa_utils, "get_flash_attn_version", lambda head_size, has_sinks: version)
    layer = make_layer(extra=extra)
    assert found in layer.flash_note
    assert (layer.flash is not None) == found.startswith("FlashAttention") == (found[-1] in "24")


def test_without_flash_attention(gpu_engine: VllmConfig) -> None:
    """vLLM for CPUs has none to import."""
    layer = make_layer()
    assert "cannot be imported" in layer.flash_note
    _, errors = run_step(make_builder(gpu_engine, layer), make_batch([1, 30], [20, 0]))
    assert max(errors) < 0.02


@pytest.mark.parametrize(
    ("cache", "words"),
    [("float16", ["float16 KV cache", "bfloat16 model"]), ("fp8", ["calculate_kv_scales=True"])],
)
def test_refusals(cache: str, words: list[str], gpu_engine: VllmConfig) -> None:
    gpu_engine.cache_config.__dict__["calculate_kv_scales"] = True
    with pytest.raises(ValueError) as error:
        make_layer(cache=cache)
    for word in ["does not support", "leave attention_backend out", *words]:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


def test_what_the_library_cannot_do_on_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AttentionConfig, "supports", lambda self, device: [f"heads of {self.head_dim} on {device}"])
    with pytest.raises(ValueError, match="does not support heads of 32 on cuda; turn it off"):
        make_layer()


@pytest.mark.parametrize("shape", [(5, 16, 1, 32), (1, 16, 1, 32), (5, 16, 2, 32)])
def test_strides_of_axes_of_one(shape: tuple[int, ...]) -> None:
    stored = torch.randn(5, 16, 2, 32)[: shape[0], :, : shape[2]]
    odd = stored.as_strided(
        shape, [3 if size == 1 else stride for size, stride in zip(shape, stored.stride(), strict=True)]
    )
    regular = with_regular_strides(odd)
    assert torch.equal(regular, odd)
    assert regular.data_ptr() == odd.data_ptr()
    assert all(stride % 8 == 0 for stride in regular.stride()[:-1])
    assert with_regular_strides(regular) is regular


def test_a_refusal_of_vllm_says_what_to_do() -> None:
    options = {
        "head_size": DIM, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16, "use_mla": False,
        "has_sink": False, "use_sparse": False, "use_mm_prefix": False, "use_per_head_quant_scales": False,
        "device_capability": None, "attn_type": "decoder",
    }  # fmt: skip
    validate = cuda.TrunkAttentionCudaBackend.validate_configuration
    assert validate(**options) == []
    assert validate(**options, use_batch_invariant=True) == []
    options["use_per_head_quant_scales"] = True
    assert validate(**options) == validate(**options | {"kv_cache_dtype": "bfloat16"}) == []
    assert validate(**options | {"kv_cache_dtype": "fp8"}) == [
        "per-head quant scales not supported",
        "choose kv_cache_dtype=bfloat16, which has no scales, or leave attention_backend out",
    ]
    assert validate(**options, use_non_causal=True)[-1] == "turn this off or leave attention_backend out"
    options["use_per_head_quant_scales"] = False
    assert validate(**options | {"use_mla": True}) == [
        "MLA not supported",
        "these layers are latent attention (MLA): choose TRUNK_MLA for them, with backend_per_kind="
        '{"mla_attention": "TRUNK_MLA", "full_attention": "CUSTOM"}',
    ]
    window = validate(**options | {"use_mla": True, "has_sliding_window": True})[-1]
    assert window.startswith("leave attention_backend out") and "full_attention" not in window
    options["use_mm_prefix"] = True
    assert validate(**options) == [
        "partial multimodal token full attention not supported",
        "serve text alone, with language_model_only=True, or leave attention_backend out",
    ]


def test_what_the_back_end_says_of_itself() -> None:
    backend = cuda.TrunkAttentionCudaBackend
    assert backend.get_name() == "CUSTOM"
    assert backend.get_impl_cls() is cuda.TrunkAttentionCudaImpl
    assert backend.get_builder_cls() is cuda.TrunkAttentionCudaBuilder
    assert backend.supports_device_cpu_query_lens_mismatch()
    assert not backend.forward_includes_kv_cache_update
