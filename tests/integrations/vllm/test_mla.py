"""Latent attention in vLLM's classes, with hand-made block tables: what is planned, computed and refused."""

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.compilation.backends import set_model_tag
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from trunkattn.integrations.captured_run import CapturedRun
from trunkattn.integrations.vllm import LATENT_NAME, mla, mla_builder, route, versions

from .fakes import PAGE, PAGES, SEQUENCES, WIDTH
from .latent_fakes import HEADS, LATENT, ROW, expected, make_builder, make_layer, make_step, run_decodes, set_model

HAS_NAME = hasattr(AttentionBackendEnum, "register")


@pytest.fixture(autouse=True)
def engine(gpu_engine: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> VllmConfig:
    """The configuration of an engine of a latent model, on what passes for a GPU."""
    set_model(gpu_engine)
    return gpu_engine


@pytest.mark.parametrize("pair", [True, False])
@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_decodes_equal_the_oracle(engine: VllmConfig, cache: str, pair: bool) -> None:
    builder = make_builder(engine, make_layer(cache=cache), make_layer(cache=cache))
    batch = make_step([1, 1, 1], [20, 40, 60], shared=1)
    metadata = builder.build(0, batch)
    assert (metadata.num_decodes, metadata.num_decode_tokens, metadata.prefill) == (3, 3, None)
    for module in builder.modules.values():
        q, out, lse = run_decodes(metadata, module, pair)
        assert lse is None
        assert out.shape == (3, HEADS, LATENT)
        torch.testing.assert_close(out.double(), expected(q, module, batch, 3)[0], rtol=0.02, atol=0.02)
    (attention,) = builder.attentions.values()
    assert attention.config.latent_dim == LATENT and attention.config.head_dim == ROW
    assert len(attention.planned) == 1, "once for all layers"


def test_rows_of_padding_are_zeros(engine: VllmConfig) -> None:
    """They have no keys. Whatever is left in a row of padding would reach other ranks."""
    builder = make_builder(engine, make_layer())
    batch = make_step([1, 1], [20, 40], padding=2)
    metadata = builder.build_for_cudagraph_capture(batch)
    assert metadata.num_decode_tokens == 4
    (module,) = builder.modules.values()
    q, out, _ = run_decodes(metadata, module)
    torch.testing.assert_close(out[:2].double(), expected(q, module, batch, 2)[0], rtol=0.02, atol=0.02)
    assert (out[2:] == 0).all()


def test_plans_stay_where_they_are(engine: VllmConfig) -> None:
    """A graph that was captured with a step reads the plan of any later one."""
    builder = make_builder(engine, make_layer())
    captured = builder.build_for_cudagraph_capture(make_step([1] * SEQUENCES, [0] * SEQUENCES))
    later = builder.build(0, make_step([1, 1, 1], [20, 40, 60], padding=1))
    assert later.decode.plans == captured.decode.plans
    (attention,) = builder.attentions.values()
    limits = attention.limits
    assert (limits.max_requests, limits.max_query_tokens, limits.max_query_len) == (SEQUENCES, SEQUENCES, 1)
    assert (limits.max_pages_per_request, limits.num_pages) == (WIDTH, PAGES)
    assert (attention.planned[0][-1], attention.planned[1][-1]) == (
        None,
        later.decode.plans[next(iter(builder.layers))][1],
    )


@pytest.mark.parametrize("eager", [False, True])
def test_layers_run_in_graphs_of_their_own_unless_eager(engine: VllmConfig, eager: bool) -> None:
    set_model(engine, enforce_eager=eager)
    builder = make_builder(engine, make_layer())
    ((run, _),) = builder.build(0, make_step([1], [20])).decode.plans.values()
    assert isinstance(run, CapturedRun) is not eager


def test_prompts_are_vllms(engine: VllmConfig) -> None:
    builder = make_builder(engine, make_layer())
    batch = make_step([1, 1, 5, 30], [20, 40, 0, 0])
    metadata = builder.build(0, batch)
    assert (metadata.num_decodes, metadata.num_prefills, metadata.num_decode_tokens) == (2, 2, 2)
    (module,) = builder.modules.values()
    (prepared,) = module.prefill_backend.prepared
    assert prepared.query_start_loc.tolist() == [0, 5, 35]
    q, out, _ = run_decodes(metadata, module)
    torch.testing.assert_close(out.double(), expected(q, module, batch, 2)[0], rtol=0.02, atol=0.02)
    assert builder.build(0, make_step([5, 30], [0, 0])).decode is None
    assert builder.build(0, make_step([1], [7])).decode is not None
    assert dict(builder.stats.paths) == {"mixed": 1, "prefill": 1}, "the last step has not run"


def test_drafts_are_verified(engine: VllmConfig) -> None:
    engine.speculative_config = SimpleNamespace(num_speculative_tokens=3, parallel_drafting=False)  # type: ignore[assignment]
    builder = make_builder(engine, make_layer())
    assert builder.reorder_batch_threshold == 4
    batch = make_step([4, 2, 1], [20, 40, 60])
    metadata = builder.build(0, batch)
    assert (metadata.num_decodes, metadata.num_decode_tokens) == (3, 7)
    (module,) = builder.modules.values()
    q, out, _ = run_decodes(metadata, module)
    torch.testing.assert_close(out.double(), expected(q, module, batch, 3)[0], rtol=0.02, atol=0.02)
    assert builder.get_varlen_cudagraph_max_query_len(engine, None) == 4


def test_drafting_goes_on_from_the_same_tensors(engine: VllmConfig) -> None:
    builder = make_builder(engine, make_layer())
    assert builder.supports_draft_decode_metadata_update
    batch = make_step([1, 1], [20, 40])
    metadata = builder.build(0, batch)
    batch.seq_lens += 3
    builder.update_draft_decode_metadata(metadata)
    (attention,) = builder.attentions.values()
    assert attention.planned[-1][1].tolist() == [24, 44]
    assert attention.planned[-1][-1] is next(iter(metadata.decode.plans.values()))[1]


def test_a_group_that_only_drafts(engine: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Model runner V1 also asks it for the model's steps, which none of its layers runs."""
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", False)
    with set_model_tag("eagle_head"):
        builder, batch = make_builder(engine, make_layer()), make_step([1, 1], [40, 57])
    assert not builder.build(0, batch).plans and not builder.build_for_cudagraph_capture(batch).plans
    assert builder.build_for_drafting(batch, 0).decode.plans


def test_what_sharing_saved_is_counted(engine: VllmConfig) -> None:
    builder = make_builder(engine, make_layer(), make_layer())
    for module in builder.modules.values():
        metadata = builder.build(0, make_step([1] * 6, [100] * 6, shared=6))
        run_decodes(metadata, module)
    builder._device_traffic.send()
    builder.build(0, make_step([1], [20]))
    row = 2 * ROW * 2  # two layers of 16 bits
    assert builder.traffic.unshared == 2 * 6 * 101 * row
    assert builder.traffic.saved >= 2 * 5 * 96 * row
    assert dict(builder.stats.paths) == {"decode": 2}
    builder.build(0, make_step([1], [20]))
    assert builder.stats.paths["full_graph"] == 1, "a step that no layer ran from the host"


def test_ranks_that_share_each_request(engine: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lengths are this rank's, the heads those of all. A rank without keys adds nothing: -inf."""
    engine.parallel_config.decode_context_parallel_size = 2
    layer = make_layer()
    assert layer.layer_spec.num_qo_heads == 2 * HEADS
    engine.parallel_config.decode_context_parallel_size = 1  # vLLM's builder would ask its group
    builder = make_builder(engine, layer)
    builder.dcp_world_size = 2
    assert (
        mla_builder.TrunkMlaBuilder.get_cudagraph_support(
            SimpleNamespace(parallel_config=SimpleNamespace(decode_context_parallel_size=2)), None
        )
        is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    )
    batch = make_step([1, 1, 1], [20, 40, 60], padding=1)
    batch.seq_lens = batch.seq_lens * 2
    batch.dcp_local_seq_lens = torch.tensor([21, 0, 61, 0], dtype=torch.int32)
    metadata = builder.build(0, batch)
    (module,) = builder.modules.values()
    q, out, lse = run_decodes(metadata, module, pair=False, heads=2 * HEADS)
    batch.seq_lens = batch.dcp_local_seq_lens.clamp(min=1)
    right, right_lse = expected(q, module, batch, 3)
    for row in (0, 2):
        torch.testing.assert_close(out[row].double(), right[row], rtol=0.02, atol=0.02)
        torch.testing.assert_close(lse[row].double(), right_lse[row], rtol=1e-3, atol=1e-3)
    for row in (1, 3):
        assert (out[row] == 0).all() and (lse[row] == -torch.inf).all()


def test_batch_invariance(set_batch_invariance: Callable[[bool], None]) -> None:
    set_batch_invariance(True)
    assert make_layer().layer_spec.batch_invariant
    assert mla.TrunkMlaBackend.supports_batch_invariance()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"indexer": object()}, "sparse attention, which selects keys for each query: vLLM's FLASHMLA_SPARSE"),
        ({"topk_indices_buffer": torch.zeros(1)}, "FLASHMLA_SPARSE"),
        ({"cache": "fp8_ds_mla"}, "kv_cache_dtype=fp8_ds_mla, which packs scales into a row: choose auto or float16"),
        ({"cache": "nvfp4_ds_mla"}, "kv_cache_dtype=nvfp4_ds_mla"),
        ({"cache": "fp8_e5m2"}, "kv_cache_dtype=fp8_e5m2, only auto, float16, bfloat16, fp8, fp8_e4m3"),
        ({"sliding_window": 64}, "sliding windows of latent attention"),
        ({"logits_soft_cap": 5.0}, "soft caps of latent attention"),
        ({"kv_sharing_target_layer_name": "model.layers.0.attn"}, "latent attention that read the cache of another"),
        ({"attn_type": "encoder_only"}, "encoder_only attention"),
        ({"something_new": 0.5}, "something_new=0.5"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_not_supported_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as error:
        make_layer(**changes)
    message = str(error.value)
    assert "\n" not in message
    name = mla.TrunkMlaBackend.get_name()
    assert message.startswith(f"attention_backend={name}: TrunkAttention does not support")
    assert words in message
    assert "leave attention_backend out" in message


def test_what_the_library_cannot_do_on_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trunkattn.AttentionConfig.supports", lambda self, device: [f"{self.latent_dim} on {device}"])
    with pytest.raises(ValueError, match="does not support 48 on cuda"):
        make_layer()


def test_drafts_that_are_not_causal_are_refused(engine: VllmConfig) -> None:
    with pytest.raises(ValueError, match="drafts that are not causal"):
        make_builder(engine, make_layer(), non_causal_multi_token_decode=True)
    builder = make_builder(engine, make_layer())
    batch = make_step([1], [20])
    batch.causal = False
    with pytest.raises(ValueError, match=f"attention_backend={builder.backend_name()}: TrunkAttention is causal"):
        builder.build(0, batch)


def test_a_group_of_another_cache_is_refused() -> None:
    with pytest.raises(ValueError, match="a KV cache of kind FullAttentionSpec, only MLAAttentionSpec"):
        mla_builder.TrunkMlaBuilder._check_group(type("FullAttentionSpec", (), {})(), {})


OPTIONS = {
    "head_size": 576, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 64, "use_mla": True,
    "has_sink": False, "use_sparse": False, "use_mm_prefix": False, "use_per_head_quant_scales": False,
    "device_capability": None, "attn_type": "decoder",
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "instead"),
    [
        ({"use_sparse": True}, "FLASHMLA_SPARSE"),
        ({"use_mla": False}, "choose CUSTOM for them"),
        ({"kv_cache_dtype": "fp8_ds_mla"}, "choose kv_cache_dtype=auto"),
        ({"use_non_causal": True}, "leave attention_backend out"),
        ({"has_sliding_window": True}, 'choose backend_per_kind={"mla_attention": "TRUNK_MLA"} for the other layers'),
        ({"block_size": 8}, "leave attention_backend out"),
    ],
    ids=str,
)
def test_vllms_refusal_says_what_to_use_instead(change: dict[str, Any], instead: str) -> None:
    validate = mla.TrunkMlaBackend.validate_configuration
    assert validate(**OPTIONS) == []
    reasons = validate(**OPTIONS | change)
    assert len(reasons) >= 2
    assert instead in reasons[-1]


def test_what_the_back_end_says_of_itself() -> None:
    backend = mla.TrunkMlaBackend
    assert backend.get_name() == (LATENT_NAME if HAS_NAME else "CUSTOM")
    assert backend.is_mla()
    assert not backend.is_sparse()
    assert [backend.supports_block_size(size) for size in (8, 16, 64)] == [False, True, True]
    assert not backend.supports_mm_prefix()
    assert make_layer().supports_quant_query_input is False
    assert mla.TrunkMlaImpl.lse_base_on_e
    assert not mla.TrunkMlaImpl.supports_pcp


def test_custom_is_latent_attention_for_a_model_that_has_it(
    engine: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(route, "current_platform", SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: True))
    engine.attention_config.backend = AttentionBackendEnum.CUSTOM
    assert route.CUSTOM is mla.TrunkMlaBackend
    assert route.TRUNK_MLA is mla.TrunkMlaBackend
    set_model(engine, use_mla=False)
    assert route.CUSTOM.__name__ == "TrunkAttentionCudaBackend"
    set_model(engine)
    engine.attention_config.backend_per_kind = {"mla_attention": AttentionBackendEnum.TRITON_MLA}
    assert route.CUSTOM.__name__ == "TrunkAttentionCudaBackend", "the other layers of a model of both kinds"


def test_on_a_cpu_it_is_refused(engine: VllmConfig) -> None:
    engine.attention_config.backend = AttentionBackendEnum.CUSTOM
    with pytest.raises(ValueError, match=r"latent attention \(MLA\).*leave attention_backend out"):
        _ = route.CPU_MLA
    with pytest.raises(ValueError, match="only on NVIDIA GPUs"):
        _ = route.TRUNK_MLA


def test_a_version_whose_classes_differ_is_named(engine: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route, "current_platform", SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: True))
    monkeypatch.delattr(mla, "TrunkMlaBackend")
    with pytest.raises(ValueError, match=f"of vLLM {versions.installed()} .* lacks something"):
        _ = route.TRUNK_MLA


@pytest.mark.skipif(not HAS_NAME, reason="vLLM before 0.32 has no room for further names")
def test_a_process_that_has_not_loaded_the_plugin_reads_the_name() -> None:
    """vLLM sends its configuration to the processes that it starts; they load plug-ins later."""
    member = AttentionBackendEnum[LATENT_NAME]
    assert pickle.loads(pickle.dumps(member)) is member
    assert copy.deepcopy(member) is member
    code = (
        "import pickle, sys; member = pickle.loads(bytes.fromhex(sys.argv[1])); "
        "print(member.name, member.get_path(), member.is_overridden())"
    )
    command = [sys.executable, "-c", code, pickle.dumps(member).hex()]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == f"TRUNK_MLA {route.__name__}.TRUNK_MLA True"


def test_block_tables_of_another_page_size(engine: VllmConfig) -> None:
    assert PAGE % 16 == 0
    spec = type("MLAAttentionSpec", (), {"block_size": 64})()
    layer = make_layer()
    assert layer.layer_spec.config(spec.block_size).page_size == 64
