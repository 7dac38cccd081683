"""One attention layer on an NVIDIA GPU: decodes run on our kernels, prompts on vLLM's FlashAttention."""

import math
from typing import Any

import torch
from vllm import _custom_ops
from vllm.config import get_current_vllm_config

from trunkattn.integrations.layer_spec import LayerSpec
from trunkattn.integrations.vllm import versions
from trunkattn.integrations.vllm.context_parallel import ContextGroup, context_refusals, find_group
from trunkattn.integrations.vllm.flash import PrefillRows, find_flash
from trunkattn.integrations.vllm.impl import LayerArguments, StepTensors, TrunkAttentionImpl, check_supported
from trunkattn.integrations.warm_up import planner_compilation


def gpu_refusals(spec: LayerSpec, scaled: bool, vllm_config: Any) -> list[str]:
    """Options of a layer or the engine that this GPU does not support; empty if it supports all."""
    found = []
    if scaled:
        found += versions.refused_options(vllm_config, versions.REFUSED_GPU_OPTIONS)
    elif spec.kv_dtype not in (None, spec.dtype):
        found.append(f"a {spec.kv_dtype} KV cache with a {spec.dtype} model")
    return found + spec.config(page_size=1).supports("cuda")


class TrunkAttentionCudaImpl(TrunkAttentionImpl):
    """Attention of one layer on a GPU.

    Raises:
        ValueError: with one line, if the model, an option of the engine or this GPU is not supported.
    """

    supports_dcp = True
    can_return_lse_for_decode = True  # what vLLM asks of decode context parallelism; natural logarithms

    def __init__(self, *args: Any, **extra: Any) -> None:
        super().__init__(*args, **extra)
        vllm_config = get_current_vllm_config()
        check_supported(gpu_refusals(self.layer_spec, self.scaled, vllm_config))
        self.flash, self.flash_note = find_flash(self.layer_spec)
        if self.flash is None:  # then the host plans the prompts
            planner_compilation(self.layer_spec.batch_invariant)
        self.group: ContextGroup | None = None
        if self.dcp_world_size > 1:
            reads_another = self.kv_sharing_target_layer_name is not None
            check_supported(context_refusals(self.layer_spec, self.flash, self.flash_note, reads_another))
            self.group = find_group(vllm_config)

    def _device_refusals(self, layer: LayerArguments) -> list[str]:
        return []

    def _scales(self, layer: Any) -> dict[str, Any]:
        names = ("k_scale", "v_scale") if self.scaled else ()
        return {name: versions.scale_of(layer, name) for name in names}

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Stores new keys and values with vLLM's kernel, as many rows as `slot_mapping` has. The kernel accepts 8-bit
        caches as bytes and scales as tensors, and CUDA graphs capture it."""
        caches = kv_cache.transpose(1, 2).split(self.head_size, -1)
        _custom_ops.reshape_and_cache_flash(
            *(key, value, *caches, slot_mapping, self.kv_cache_dtype, layer._k_scale, layer._v_scale)
        )

    def _attend(self, layer: Any, tensors: StepTensors, caches: tuple[torch.Tensor, torch.Tensor], step: Any) -> None:
        """Runs a layer of the builder's `CudaStep`. A CUDA graph can capture a step that only decodes.

        Raises:
            ValueError: a step with prompts is captured.
        """
        if step.chunks or step.prefill is not None:
            check_not_captured()
        step.launched.set()
        if step.decode_tokens:
            run, plan = step.plans[self.layer_spec]
            rows, scales = slice(0, step.decode_tokens), self._scales(layer)
            query, out = tensors.query[rows], tensors.output[rows]
            if self.group is None:
                run(plan, query, *caches, out=out, sinks=self.sinks, **scales)
            else:
                part, lse = run(plan, self.group.gather_heads(query), *caches, return_lse=True, **scales)
                lse.masked_fill_(step.nothing_local[rows], -math.inf)
                out.copy_(self.group.merge(part, lse)[0])
        if step.prefill is not None:
            self._prefill(layer, tensors, caches, step.prefill)

    def _prefill(
        self, layer: Any, tensors: StepTensors, caches: tuple[torch.Tensor, torch.Tensor], rows: PrefillRows
    ) -> None:
        key, value = (None if each is None else each[rows.tokens] for each in (tensors.key, tensors.value))
        prompts = StepTensors(tensors.query[rows.tokens], key, value, tensors.output[rows.tokens])
        if self.flash is None:
            attention, plan = rows.plans[self.layer_spec]
            attention.run(plan, prompts.query, *caches, out=prompts.output, sinks=self.sinks, **self._scales(layer))
        elif self.group is None:
            self.flash.run(rows, prompts.query, caches, prompts.output, self._model_sinks)
        else:
            self.flash.run_on_ranks(rows, prompts, caches, self.group)


def check_not_captured() -> None:
    """Raises ValueError while a CUDA graph is captured."""
    if torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "attention_backend=CUSTOM: a full CUDA graph captures a step with prompts, which TrunkAttention runs "
            "outside of graphs; choose cudagraph_mode=FULL_AND_PIECEWISE"
        )
