"""Layers and steps of latent attention without an engine: vLLM's own builder prepares them, plans and kernels are the
CPU's, and the float64 reference says what is right."""

from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import CommonAttentionMetadata

from trunkattn.integrations.vllm import mla, mla_builder
from trunkattn.reference import latent_attention

from .fakes import PAGE, PAGES, SEQUENCES, WIDTH, make_batch

HEADS, LATENT, ROPE, NOPE, VALUES = 4, 48, 16, 24, 20
ROW, SCALE = LATENT + ROPE, (NOPE + ROPE) ** -0.5
SIZES = {
    "q_lora_rank": 32, "kv_lora_rank": LATENT, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE,
    "qk_head_dim": NOPE + ROPE, "v_head_dim": VALUES, "kv_b_proj": None,
}  # fmt: skip


def set_model(engine: VllmConfig, **changes: Any) -> None:
    """What vLLM's builder asks of a model with latent attention."""
    model = {
        "dtype": torch.bfloat16, "max_model_len": WIDTH * PAGE, "served_model_name": "tiny", "enforce_eager": False,
        "get_num_attention_heads": lambda parallel: HEADS, "get_head_size": lambda: 576, "use_mla": True,
        "hf_text_config": SimpleNamespace(**SIZES),
    }  # fmt: skip
    engine.__dict__["model_config"] = SimpleNamespace(**model | changes)
    engine.scheduler_config.max_num_seqs = SEQUENCES


def make_layer(dtype: torch.dtype = torch.bfloat16, cache: str = "auto", **changes: Any) -> Any:
    """In vLLM's words: it names all options."""
    options = {
        "num_heads": HEADS, "head_size": ROW, "scale": SCALE, "num_kv_heads": 1, "alibi_slopes": None,
        "sliding_window": None, "kv_cache_dtype": cache, "logits_soft_cap": None, "attn_type": "decoder",
        "kv_sharing_target_layer_name": None, **SIZES, "indexer": None,
    }  # fmt: skip
    torch.set_default_dtype(dtype)
    try:
        return mla.TrunkMlaImpl(**options | changes)
    finally:
        torch.set_default_dtype(torch.float32)


class Prefill:
    """vLLM's back end of prompts, which its builder prepares."""

    def __init__(self) -> None:
        self.prepared: list[Any] = []

    def clone(self) -> "Prefill":
        return self

    def get_name(self) -> str:
        return "FLASH_ATTN"

    def prepare_metadata(self, metadata: Any) -> None:
        self.prepared.append(metadata)


def make_builder(engine: VllmConfig, *layers: Any, **changes: Any) -> Any:
    """changes: further attributes of each layer."""
    names = [f"model.layers.{i}.self_attn.attn" for i in range(len(layers))]
    for name, impl in zip(names, layers, strict=True):
        module = torch.nn.Module()
        attributes = {**SIZES, "impl": impl, "num_heads": HEADS, "head_size": ROW, "prefill_backend": Prefill()}
        for attribute, value in {**attributes, **changes}.items():
            object.__setattr__(module, attribute, value)
        stored = torch.randn(PAGES, PAGE, ROW).to(impl.cache_dtype)
        module.kv_cache = stored.view(torch.uint8) if impl.scaled else stored
        engine.compilation_config.static_forward_context[name] = module
    spec = type("MLAAttentionSpec", (), {"block_size": PAGE})()
    return mla_builder.TrunkMlaBuilder(spec, names, engine, torch.device("cpu"))


def make_step(*given: Any, **options: Any) -> CommonAttentionMetadata:
    """`make_batch`, with the lengths that the host knows."""
    batch = make_batch(*given, **options)
    batch.seq_lens_cpu_upper_bound = batch.seq_lens.clone()
    return batch


def scale_of(module: Any) -> Any:
    number = 0.5 if module.impl.scaled else 1.0
    return SimpleNamespace(_k_scale_float=number, _k_scale=torch.tensor(number))


def run_decodes(metadata: Any, module: Any, pair: bool = True, heads: int = HEADS) -> tuple[torch.Tensor, ...]:
    """(query, out, lse or None) of a layer, for the rows of a step that decode."""
    torch.manual_seed(0)
    impl = module.impl
    q = torch.randn(metadata.num_decode_tokens, heads, ROW).to(impl.layer_spec.dtype)
    cache = module.kv_cache.view(torch.float8_e4m3fn) if impl.scaled else module.kv_cache  # as vLLM's layer passes it
    given = (q[..., :LATENT].transpose(0, 1).contiguous().transpose(0, 1), q[..., LATENT:]) if pair else q
    return q, *impl.forward_mqa(given, cache, metadata, scale_of(module))


def expected(q: torch.Tensor, module: Any, batch: CommonAttentionMetadata, rows: int) -> tuple[torch.Tensor, ...]:
    """(out, lse) of the first rows of a batch, and of their tokens alone."""
    starts = batch.query_start_loc[: rows + 1]
    cache = module.impl.caches_of(module.kv_cache)[0].float()
    return latent_attention(
        q[: starts[-1]].float(), cache * scale_of(module)._k_scale_float,
        batch.block_table_tensor[:rows].where(batch.block_table_tensor[:rows] < PAGES, 0), batch.seq_lens[:rows],
        starts, latent_dim=LATENT, sm_scale=SCALE,
    )  # fmt: skip
