"""A GPU's plans and kernels for machines without one: plans and attention are the CPU's, behind the interface that GPUs
have; FlashAttention is the float64 reference."""

from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import CommonAttentionMetadata

from trunkattn.integrations.vllm import cuda, versions
from trunkattn.reference import paged_attention

HEADS, KV_HEADS, DIM, PAGE, PAGES = 4, 2, 32, 16, 40
SCALE, SEQUENCES, WIDTH = 0.2, 6, 8
ONE = SimpleNamespace(_k_scale_float=1.0, _v_scale_float=1.0, _k_scale=torch.ones(()), _v_scale=torch.ones(()))


class FlashRecorder:
    """Stands in for flash_attn_varlen_func: keeps its arguments, and computes what it would."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, **arguments: Any) -> None:
        starts = arguments["cu_seqlens_q"].clone()  # it may be a part of a buffer that each step fills
        self.calls.append(arguments | {"cu_seqlens_q": starts})
        window = arguments["window_size"][0]
        out, _ = paged_attention(
            *(arguments["q"], arguments["k"], arguments["v"]),
            *(arguments["block_table"], arguments["seqused_k"], arguments["cu_seqlens_q"]),
            sm_scale=arguments["softmax_scale"],
            sliding_window=None if window < 0 else window + 1,
            logits_soft_cap=arguments["softcap"] or None,
            sinks=arguments["s_aux"],
        )
        arguments["out"].copy_(out)


def make_layer(dtype: torch.dtype = torch.bfloat16, window: int | None = None, **changes: Any) -> Any:
    options = {"cache": "auto", "soft_cap": None, "kv_heads": KV_HEADS, "shared": None, "extra": {}} | changes
    torch.set_default_dtype(dtype)
    try:
        return cuda.TrunkAttentionCudaImpl(
            *(HEADS, DIM, SCALE, options["kv_heads"], None, window, options["cache"]),
            *(options["soft_cap"], "decoder", options["shared"]),
            **options["extra"],
        )
    finally:
        torch.set_default_dtype(torch.float32)


def make_builder(engine: VllmConfig, *layers: Any, of: type[Any] = cuda.TrunkAttentionCudaBuilder) -> Any:
    names = [f"model.layers.{i}.attn" for i in range(len(layers))]
    for name, impl in zip(names, layers, strict=True):
        module = torch.nn.Module()
        module.impl, module.head_size_v = impl, impl.head_size
        stored = torch.randn(PAGES, impl.num_kv_heads, PAGE, 2 * DIM).to(impl.cache_dtype)
        module.kv_cache = stored.view(torch.uint8) if impl.scaled else stored
        engine.compilation_config.static_forward_context[name] = module
    spec = type("FullAttentionSpec", (), {"block_size": PAGE})()
    return of(spec, names, engine, torch.device("cpu"))


def make_batch(
    query_lens: list[int], contexts: list[int], padding: int = 0, shared: int = 1
) -> CommonAttentionMetadata:
    """Rows with so many blocks in common; `padding` rows at the end, with a token each that no request has."""
    lens = torch.tensor([q + c for q, c in zip(query_lens, contexts, strict=True)] + [0] * padding, dtype=torch.int32)
    tokens = torch.tensor([0, *query_lens] + [0] * padding).cumsum(0).to(torch.int32)
    rows = len(query_lens) + padding
    table = torch.full((rows, WIDTH), 10**6, dtype=torch.int32)  # stale entries
    table[len(query_lens) :] = 0
    for row, length in enumerate(lens[: len(query_lens)].tolist()):
        used = -(-length // PAGE)
        table[row, :used] = torch.arange(used) + 1 + row * (WIDTH - 2)
        table[row, : min(shared, used)] = torch.arange(min(shared, used)) + 1
    total = int(tokens[-1]) + padding
    return CommonAttentionMetadata(
        query_start_loc=tokens, query_start_loc_cpu=tokens.clone(), seq_lens=lens, num_reqs=rows,
        num_actual_tokens=total, max_query_len=max(query_lens), max_seq_len=WIDTH * PAGE,
        block_table_tensor=table, slot_mapping=torch.full((total,), -1),
    )  # fmt: skip


def run_step(builder: Any, batch: CommonAttentionMetadata, spare: int = 3) -> tuple[Any, list[torch.Tensor]]:
    """(step, error of each layer); tensors are longer than the step, as for piecewise graphs."""
    torch.manual_seed(0)
    step, errors = builder.build(0, batch), []
    total, live = batch.num_actual_tokens, int(batch.query_start_loc[-1])
    for module in builder.modules.values():
        impl = module.impl
        query = torch.randn(total + spare, HEADS, DIM).to(impl.layer_spec.dtype)
        out = torch.full_like(query, 7.0)
        impl.forward(ONE, query, query, query, module.kv_cache, step, out, output_scale=None, output_block_scale=None)
        caches = [cache.float() for cache in versions.split_cache(module.kv_cache, DIM, impl.cache_dtype)]
        expected, _ = paged_attention(
            query[:live], *caches, batch.block_table_tensor.where(batch.block_table_tensor < PAGES, 0),
            batch.seq_lens, batch.query_start_loc, sm_scale=SCALE, sliding_window=impl.layer_spec.sliding_window,
            logits_soft_cap=impl.layer_spec.logits_soft_cap, sinks=impl.sinks,
        )  # fmt: skip
        assert (out[live:] == 7.0).all(), "rows of no token are left alone"
        errors.append((out[:live].double() - expected).abs().max())
    return step, errors
