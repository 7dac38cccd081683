"""A model runner without a model: real pools and layers of SGLang, and steps of any rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from trunkattn.reference import latent_attention, paged_attention

HEADS, KV_HEADS, DIM, PAGE, SLOTS, CONTEXT = 4, 2, 32, 16, 1600, 160
SCALE = 0.2
ROWS = 8
PLAIN = {"num_heads": HEADS, "head_dim": DIM, "scaling": SCALE, "num_kv_heads": KV_HEADS}
LATENT_DIM, ROPE_DIM = 48, 16
ROW = LATENT_DIM + ROPE_DIM
LATENT = {"num_heads": HEADS, "head_dim": ROW, "v_head_dim": LATENT_DIM, "scaling": SCALE, "num_kv_heads": 1}


def make_pool(layers: Sequence[RadixAttention], page: int, dtype: torch.dtype, hybrid: bool) -> Any:
    """hybrid: the layers with a window have a pool of their own, where slots are moved."""
    common = {"page_size": page, "dtype": dtype, "head_num": KV_HEADS, "head_dim": DIM, "device": "cpu"}
    if not hybrid:
        return MHATokenToKVPool(SLOTS, layer_num=len(layers), enable_memory_saver=False, **common)
    windowed = [layer.layer_id for layer in layers if layer.sliding_window_size >= 0]
    full = [layer.layer_id for layer in layers if layer.sliding_window_size < 0]
    pool = SWAKVPool(SLOTS, SLOTS // 2, swa_attention_layer_ids=windowed, full_attention_layer_ids=full, **common)
    pages = torch.randperm(SLOTS // page)[: SLOTS // page // 2]
    moved = torch.zeros(SLOTS // page + 1, dtype=torch.int64)
    moved[pages + 1] = torch.arange(len(pages)) + 1
    pool.register_mapping((moved[:, None] * page + torch.arange(page) * (moved[:, None] > 0)).flatten())
    return pool


def make_runner(
    *changes: dict[str, Any], page: int = PAGE, kv_dtype: torch.dtype = torch.float32, hybrid: bool = False,
    options: dict[str, Any] | None = None, **attributes: Any,
) -> Any:  # fmt: skip
    """A runner with a layer for each of `changes` to the plain one."""
    layers = [RadixAttention(**{**PLAIN, "layer_id": i, **change}) for i, change in enumerate(changes or ({},))]
    torch.manual_seed(0)
    table = torch.zeros(ROWS + 1, CONTEXT, dtype=torch.int32)
    given = {"get_attention_backends": lambda: ("trunk", "trunk"), "served_model_name": "tiny"}
    server_args = SimpleNamespace(**given | (options or {}))
    runner = {
        "model": torch.nn.ModuleList(layers), "model_config": SimpleNamespace(is_encoder_decoder=False),
        "server_args": server_args, "device": "cpu", "dtype": torch.float32, "kv_cache_dtype": kv_dtype,
        "page_size": page, "req_to_token_pool": SimpleNamespace(req_to_token=table, size=ROWS),
        "token_to_kv_pool": make_pool(layers, page, kv_dtype, hybrid),
        "spec_algorithm": SimpleNamespace(is_none=lambda: True), "use_mla_backend": False, "tp_rank": 0,
    }  # fmt: skip
    return SimpleNamespace(**{**runner, **attributes})


def make_latent_runner(
    layers: int = 1, page: int = PAGE, kv_dtype: torch.dtype = torch.float32, options: dict[str, Any] | None = None,
    **attributes: Any,
) -> Any:  # fmt: skip
    """A runner of a model with latent attention, whose prompts run elsewhere. Each of its layers has another one, of
    its prompts."""
    given = {"get_attention_backends": lambda: ("torch_native", "trunk"), **(options or {})}
    runner = make_runner(page=page, kv_dtype=kv_dtype, options=given, use_mla_backend=True)
    modules = [RadixAttention(**LATENT, layer_id=i) for i in range(layers)]
    modules += [RadixAttention(HEADS, 40, SCALE, HEADS, i, v_head_dim=24) for i in range(layers)]
    runner.model = torch.nn.ModuleList(modules)
    runner.model_config = SimpleNamespace(is_encoder_decoder=False, kv_lora_rank=LATENT_DIM, qk_rope_head_dim=ROPE_DIM)
    runner.token_to_kv_pool = MLATokenToKVPool(
        SLOTS, page, kv_dtype, LATENT_DIM, ROPE_DIM, layers, "cpu", enable_memory_saver=False
    )
    runner.token_to_kv_pool.dcp_replicated = True  # otherwise it asks for what an engine publishes of its ranks
    for name, value in attributes.items():
        setattr(runner, name, value)
    return runner


@dataclass
class Step:
    """Rows of a step. lens: with the queries; shared: whole pages that all rows have in common. prompts: it computes
    prompts though each has one token left; mixed: SGLang put decodes behind prompts."""

    queries: list[int]
    lens: list[int]
    shared: int = 2
    padding: int = 0
    prompts: bool = False
    mixed: bool = False

    def batch(self, runner: Any) -> Any:
        """As SGLang announces it. The rows' slots are written to the request table."""
        table, page = runner.req_to_token_pool.req_to_token, runner.page_size
        mapping = getattr(runner.token_to_kv_pool, "full_to_swa_index_mapping", None)
        usable = torch.arange(1, SLOTS // page)
        if mapping is not None:
            usable = usable[mapping[usable * page] > 0]
        each, slots = -(-max(self.lens, default=0) // page), []
        for row, (queries, length) in enumerate(zip(self.queries, self.lens, strict=True)):
            own = usable[self.shared + row * (each - self.shared) :][: each - self.shared]
            pages = torch.cat([usable[: self.shared], own])
            places = (pages[:, None] * page + torch.arange(page)).flatten()[:length]
            table[row + 1, :length] = places.to(torch.int32)
            slots.append(places[length - queries :])
        out = torch.cat([*slots, torch.zeros(self.padding, dtype=torch.int64)])
        decodes = all(queries == 1 for queries in self.queries) and not self.prompts
        prompts = ForwardMode.MIXED if self.mixed else ForwardMode.EXTEND
        lens = torch.tensor([*self.lens, *[1] * self.padding])
        return SimpleNamespace(
            forward_mode=ForwardMode.DECODE if decodes else prompts, batch_size=len(lens), seq_lens=lens,
            req_pool_indices=torch.tensor([*range(1, len(self.lens) + 1), *[0] * self.padding]), out_cache_loc=out,
            seq_lens_cpu=None if decodes else lens, extend_seq_lens=torch.tensor(self.queries),
            extend_seq_lens_cpu=None if decodes else self.queries,
            num_padding=self.padding,
        )  # fmt: skip


def error(backend: Any, runner: Any, layer: RadixAttention, batch: Any, sinks: torch.Tensor | None = None) -> float:
    """Runs a layer of a step that has begun. Largest error against the float64 reference, over the real rows."""
    pool, page = runner.token_to_kv_pool, runner.page_size
    for buffer in (pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)):
        buffer.copy_(torch.randn(buffer.shape).to(buffer.dtype))
    total = len(batch.out_cache_loc)
    q = torch.randn(total, HEADS * DIM)
    k, v = torch.randn(2, total, KV_HEADS, DIM)
    call = backend.forward_decode if batch.forward_mode.is_decode() else backend.forward_extend
    options = {} if sinks is None else {"sinks": sinks}
    out = call(q, k.clone(), v.clone(), layer, batch, **options).view(total, HEADS, DIM)
    slots, written = runner.req_to_token_pool.req_to_token[batch.req_pool_indices].long(), batch.out_cache_loc
    mapping = getattr(pool, "full_to_swa_index_mapping", None)
    if mapping is not None and layer.sliding_window_size >= 0:
        slots, written = mapping[slots], mapping[written]
    if pool.get_key_buffer(layer.layer_id).dtype == k.dtype:
        new = written > 0
        for buffer, given in zip(pool.get_kv_buffer(layer.layer_id), (k, v), strict=True):
            assert torch.equal(buffer[written[new]], given[new]), "keys and values are where the table says"
    real = len(batch.seq_lens) - batch.num_padding
    queries = torch.ones(real) if batch.forward_mode.is_decode() else batch.extend_seq_lens
    starts = torch.nn.functional.pad(queries.cumsum(0), (1, 0)).to(torch.int32)
    scales = [1.0 if scale is None else float(scale) for scale in (layer.k_scale, layer.v_scale)]
    caches = [
        buffer.double()[: buffer.shape[0] // page * page] * scale
        for buffer, scale in zip(pool.get_kv_buffer(layer.layer_id), scales, strict=True)
    ]
    expected, _ = paged_attention(
        q[: starts[-1]].view(-1, HEADS, DIM), *(cache[:, None] for cache in caches), slots[:real].to(torch.int32),
        batch.seq_lens[:real].to(torch.int32), starts, sm_scale=SCALE,
        sliding_window=None if layer.sliding_window_size < 0 else layer.sliding_window_size + 1,
        logits_soft_cap=layer.logit_cap or None, sinks=sinks,
    )  # fmt: skip
    assert out.isfinite().all(), "padded rows are harmless"
    return float((out[: starts[-1]].double() - expected).abs().max())


def latent_error(backend: Any, runner: Any, layer: RadixAttention, batch: Any) -> float:
    """Runs a layer of latent attention in a step of decodes. Largest error against the float64 reference."""
    pool, page, total = runner.token_to_kv_pool, runner.page_size, len(batch.out_cache_loc)
    buffer = pool.get_key_buffer(layer.layer_id)
    buffer.copy_(torch.randn(buffer.shape).to(buffer.dtype))
    q, k = torch.randn(total, HEADS * ROW), torch.randn(total, 1, ROW)
    out = backend.forward_decode(q, k.clone(), k[..., :LATENT_DIM].clone(), layer, batch)
    assert out.shape == (total, HEADS * LATENT_DIM)
    assert out.isfinite().all(), "padded rows are harmless"
    written = batch.out_cache_loc > 0
    assert torch.equal(buffer[batch.out_cache_loc[written]], k[written].to(buffer.dtype)), "rows are stored as they are"
    real = len(batch.seq_lens) - batch.num_padding
    slots = runner.req_to_token_pool.req_to_token[batch.req_pool_indices[:real]].to(torch.int32)
    rows = buffer.double()[: buffer.shape[0] // page * page]
    expected, _ = latent_attention(
        q[:real].view(real, HEADS, ROW), rows, slots, batch.seq_lens[:real].to(torch.int32),
        torch.arange(real + 1, dtype=torch.int32), latent_dim=LATENT_DIM, sm_scale=SCALE,
    )  # fmt: skip
    return float((out[:real].view(real, HEADS, LATENT_DIM).double() - expected).abs().max())
