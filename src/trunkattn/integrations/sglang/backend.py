"""The back end: it plans a step when SGLang announces it, and runs the plan in every layer.

This is the one for CPUs. Its plans are made on the host, from tables wherever they lie, so it also serves the prompts
of a GPU (`cuda`).
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from trunkattn import AttentionConfig, BatchAttention, Plan
from trunkattn.integrations.kv_traffic import Traffic, step_path, tokens_of
from trunkattn.integrations.sglang import versions
from trunkattn.integrations.sglang.layers import (
    LayerKind,
    attention_layers,
    check_supported,
    in_window_pool,
    layer_spec,
    refusals,
)
from trunkattn.integrations.sglang.metrics import kv_read_stats
from trunkattn.integrations.sglang.name import NAME, logger
from trunkattn.integrations.sglang.tables import pages, requests_of


@dataclass
class HostStep:
    """A step that is planned on the host.

    Attributes:
        rows: rows of the request table.
        seq_lens: [requests] int32.
        query_start_loc: [requests + 1] int32; None: one query token each.
        path: for the counters.
        longest: tokens of the longest request.
        plans: by kind of layer, made when the first layer of the kind runs.
    """

    rows: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor | None
    path: str
    longest: int
    plans: dict[LayerKind, tuple[BatchAttention, Plan]] = field(default_factory=dict)


class TrunkBackend(AttentionBackend):
    """Attention of one model runner over SGLang's token pool.

    Raises:
        ValueError: with one line, if the model, an option of the engine or the device is not supported.
    """

    needs_cpu_seq_lens = False

    def __init__(self, runner: Any) -> None:
        super().__init__()
        # SGLang reads these two.
        self.req_to_token_pool, self.token_to_kv_pool = runner.req_to_token_pool, runner.token_to_kv_pool
        layers = attention_layers(runner)
        prefill, _ = versions.backends(runner)
        check_supported(refusals(runner, layers, prefill == NAME))
        self.device = torch.device(runner.device)
        self.page_size = runner.page_size
        self._dtype, self._kv_dtype = runner.dtype, runner.kv_cache_dtype
        self._latent = bool(runner.use_mla_backend)
        self._scaled = self._kv_dtype.itemsize == 1 and not self._latent  # latent rows are stored as they are
        self._requests = requests_of(runner)
        self._kinds: dict[Any, LayerKind] = {}  # by layer, which tells its sinks when it is called
        self._host_attentions: dict[tuple[AttentionConfig, bool], BatchAttention] = {}
        self._step: Any = None
        self._window_slots: torch.Tensor | None = None
        specs = Counter(layer_spec(layer, False, self._dtype, self._kv_dtype) for layer in layers)
        self.stats = kv_read_stats(runner, {spec.sliding_window for spec in specs}, len(layers))
        work = "prompts and decoding" if prefill == NAME else f"decoding ({prefill} runs prompts)"
        for spec, count in specs.items():
            logger.info(
                "TrunkAttention runs %s in %d layers (%s; pages of %d tokens).", work, count, spec, self.page_size
            )

    @property
    def traffic(self) -> Traffic:
        """KV bytes so far, without the current step."""
        return self.stats.traffic

    def support_triton(self) -> bool:
        """Whether SGLang may prepare a step with Triton."""
        return self.device.type != "cpu"

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The length of padded rows."""
        return 1

    # On a CPU SGLang asks for it by this name, where data-parallel ranks pad their steps.
    get_cpu_graph_seq_len_fill_value = get_cuda_graph_seq_len_fill_value

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Begins a step of prompt chunks, decodes, or a mixture of them, outside of any graph."""
        self._finish_step()
        self._window_slots = self._in_window_pool(forward_batch.out_cache_loc)
        self._step = self._host_step(forward_batch)

    def _in_window_pool(self, slots: torch.Tensor | None) -> torch.Tensor | None:
        """Where the step's keys and values go in the window pool; None: there is none."""
        if self._requests.to_window is None or slots is None:
            return None
        return self._requests.to_window[slots]

    def _host_step(self, batch: Any) -> HostStep | None:
        """Returns the step that the host plans; None if there is nothing to compute."""
        if is_idle(batch) or not len(batch.seq_lens):
            return None
        on_host = getattr(batch, "seq_lens_cpu", None)
        longest = int((batch.seq_lens if on_host is None else on_host).max())
        rows, lens = batch.req_pool_indices, batch.seq_lens.to(torch.int32)
        if batch.forward_mode.is_decode():
            return HostStep(rows, lens, None, "decode", longest)
        if not versions.is_prompts(batch.forward_mode):
            raise ValueError(
                f"a step of mode {batch.forward_mode.name}: TrunkAttention expects prompts or decoding; choose another "
                "attention back end"
            )
        on_host = getattr(batch, "extend_seq_lens_cpu", None)
        lens_of_queries = batch.extend_seq_lens if on_host is None else on_host
        queries = torch.as_tensor(lens_of_queries, dtype=torch.int32, device="cpu")
        starts = torch.nn.functional.pad(queries.cumsum(0, dtype=torch.int32), (1, 0))
        return HostStep(rows, lens, starts, step_path(queries, decode_query_len=1), longest)

    def _finish_step(self) -> None:
        """Counts the last step, which has run by now."""
        step, self._step = self._step, None
        if step is None:
            return
        layers = Counter(self._kinds.values())
        token_bytes = [kind.spec.kv_token_bytes * layers[kind] for kind in step.plans]
        self.stats.count_step(step.path)
        self.stats.count_tokens([tokens_of(plan) for _, plan in step.plans.values()], token_bytes, len(step.seq_lens))
        self.stats.log()

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **options: Any,
    ) -> torch.Tensor:
        """Stores the layer's new keys and values, and attends.

        Args:
            q: [tokens, heads * head_dim].
            k, v: [tokens, kv_heads, head_dim]; None: the layer reads what another layer has stored. Of latent attention
                k is whole rows, the first columns of which are v.
            layer: SGLang's layer.
            forward_batch: SGLang's step, the one that `init_forward_metadata` began.
            save_kv_cache: whether to store k and v.
            options: sinks [heads], for a model that has them.

        Returns:
            [tokens, heads * head_dim], of latent attention heads * latent columns; rows after the step's tokens are
            zeros.
        """
        out: torch.Tensor = self._attend(q, (k, v), layer, forward_batch, save_kv_cache, options)
        return out

    forward_decode = forward_extend  # the plan knows which rows decode

    @torch.compiler.disable
    def _attend(
        self,
        q: torch.Tensor,
        new: tuple[torch.Tensor | None, torch.Tensor | None],
        layer: Any,
        batch: Any,
        save: bool,
        options: dict[str, Any],
    ) -> torch.Tensor:
        sinks = options.pop("sinks", None)
        check_supported([f"the layer option {name}" for name, value in options.items() if value is not None])
        if is_idle(batch):
            return q.new_zeros(len(q), layer.tp_q_head_num * layer.v_head_dim)
        kind = self._kind(layer, sinks is not None)
        if save and new[0] is not None:
            self._store(layer, batch, new)
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim).to(self._dtype)
        given = getattr(batch, "_attn_output", None)
        shape = (*q.shape[:2], layer.v_head_dim)
        out = q.new_empty(shape) if given is None else given.view(shape)
        attention, plan = self._planned(kind)
        rows = plan.num_query_tokens
        if sinks is not None:
            options["sinks"] = sinks.to(torch.float32)
        if self._scaled:
            options |= {"k_scale": _scale(layer, "k_scale"), "v_scale": _scale(layer, "v_scale")}
        attention.run(plan, q[:rows], *self._caches(layer.layer_id), out=out[:rows], **options)
        if rows < len(out):
            out[rows:].zero_()
        return out.flatten(1)

    def _kind(self, layer: Any, sinks: bool) -> LayerKind:
        kind = self._kinds.get(layer)
        if kind is None or kind.spec.sinks != sinks:
            spec = layer_spec(layer, sinks, self._dtype, self._kv_dtype)
            kind = LayerKind(spec, in_window_pool(self.token_to_kv_pool, layer.layer_id))
            self._kinds[layer] = kind
        return kind

    def _store(self, layer: Any, batch: Any, new: tuple[torch.Tensor | None, torch.Tensor | None]) -> None:
        place = KVWriteLoc(batch.out_cache_loc, self._window_slots)
        scales = (layer.k_scale, layer.v_scale) if self._scaled else ()
        self.token_to_kv_pool.set_kv_buffer(layer, place, *new, *scales)

    def _caches(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The caches of a layer, as `BatchAttention.run` takes them: latent rows have no values apart."""
        if self._latent:
            return pages(self.token_to_kv_pool.get_key_buffer(layer_id), self.page_size)[:, :, 0], None
        keys, values = self.token_to_kv_pool.get_kv_buffer(layer_id)
        return pages(keys, self.page_size), pages(values, self.page_size)

    def _planned(self, kind: LayerKind) -> tuple[BatchAttention, Plan]:
        """The current step's plan for a kind of layer."""
        step: HostStep = self._step
        if kind not in step.plans:
            key = (kind.spec.config(self.page_size), kind.in_window_pool)
            # One attention serves all windows of a configuration, so that they share the forest.
            attention = self._host_attentions.get(key) or BatchAttention(key[0], self.device)
            self._host_attentions[key] = attention
            table = self._requests.block_table(step.rows, step.longest, kind.in_window_pool)
            window = kind.spec.sliding_window
            plan = attention.plan(table, step.seq_lens, step.query_start_loc, sliding_window=window)
            step.plans[kind] = (attention, plan)
        return step.plans[kind]


def is_idle(batch: Any) -> bool:
    """Whether a step has no request. With data-parallel attention SGLang may then make up a prompt, perhaps longer than
    any request may be, so that all ranks run the same graph."""
    before = getattr(batch, "_original_forward_mode", None)
    return batch.forward_mode.is_idle() or (before is not None and before.is_idle())


def _scale(layer: Any, name: str) -> Any:
    """What stored keys or values are multiplied by: the tensor of one element that SGLang divides them by, because
    weights that are loaded again change it in its place, where CUDA graphs read it; otherwise a number, or None."""
    scale = getattr(layer, name, None)
    return getattr(layer, f"{name}_float", None) if scale is None else scale
