"""One attention layer on an NVIDIA GPU: rows that decode run on our kernels, prompts on vLLM's FlashAttention."""

from typing import Any

import torch
from vllm import _custom_ops
from vllm.config import get_current_vllm_config
from vllm.platforms import current_platform

from trunkattn.plugins.vllm import versions
from trunkattn.plugins.vllm.flash import PrefillRows, find_flash
from trunkattn.plugins.vllm.impl import LayerKind, TrunkAttentionImpl, check_supported


def gpu_refusals(kind: LayerKind, scaled: bool, vllm_config: Any) -> list[str]:
    """What of a layer or the engine is not supported on this GPU; empty: all of it is."""
    found = []
    capability = current_platform.get_device_capability()
    if capability is not None and tuple(capability) < versions.OLDEST_GPU:
        oldest = ".".join(map(str, versions.OLDEST_GPU))
        found.append(f"this GPU, of compute capability {'.'.join(map(str, capability))}, only {oldest} and newer")
    if scaled:
        found += versions.refused_options(vllm_config, versions.REFUSED_GPU_OPTIONS)
    elif kind.kv_dtype not in (None, kind.dtype):
        found.append(f"a {kind.kv_dtype} KV cache with a {kind.dtype} model")
    return found + kind.config(page_size=1).supports("cuda")


class TrunkAttentionCudaImpl(TrunkAttentionImpl):
    """Attention of one layer on a GPU.

    Raises:
        ValueError: with one line, if the model, an option of the engine or this GPU needs what is not supported.
    """

    def __init__(self, *args: Any, **extra: Any) -> None:
        super().__init__(*args, **extra)
        check_supported(gpu_refusals(self.kind, self.scaled, get_current_vllm_config()))
        self.flash, self.flash_note = find_flash(self.kind)

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """As on a CPU, with vLLM's kernel, which takes caches of 8 bits as bytes and scales as tensors. It is captured
        in CUDA graphs, and ends where slot_mapping does."""
        caches = kv_cache.transpose(1, 2).split(self.head_size, -1)
        _custom_ops.reshape_and_cache_flash(
            *(key, value, *caches, slot_mapping, self.kv_cache_dtype, layer._k_scale, layer._v_scale)
        )

    def _attend(
        self,
        layer: Any,
        query: torch.Tensor,
        caches: tuple[torch.Tensor, torch.Tensor],
        step: Any,
        output: torch.Tensor,
    ) -> None:
        """As on a CPU; step: the builder's `CudaStep`. A CUDA graph may capture it if it only decodes.

        Raises:
            ValueError: if a step with prompts is captured.
        """
        step.launched = True
        if step.decode_tokens:
            run, plan = step.plans[self.kind]
            rows, scales = slice(0, step.decode_tokens), self._scales(layer)
            run(plan, query[rows], *caches, out=output[rows], sinks=self.sinks, **scales)
        if step.prefill is not None:
            self._prefill(layer, query, caches, step.prefill, output)

    def _prefill(
        self,
        layer: Any,
        query: torch.Tensor,
        caches: tuple[torch.Tensor, torch.Tensor],
        rows: PrefillRows,
        output: torch.Tensor,
    ) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise ValueError(
                "attention_backend=CUSTOM: a full CUDA graph would capture prompts, which TrunkAttention runs outside "
                "of graphs; choose cudagraph_mode=FULL_AND_PIECEWISE"
            )
        q, out = query[rows.tokens], output[rows.tokens]
        if self.flash is not None:
            self.flash.run(rows, q, caches, out, self._model_sinks)
        else:
            attention, plan = rows.plans[self.kind]
            attention.run(plan, q, *caches, out=out, sinks=self.sinks, **self._scales(layer))
