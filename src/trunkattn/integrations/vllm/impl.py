"""One attention layer: it refuses unsupported options when it is made, writes new keys and values, and runs the step's
plan."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionImpl

from trunkattn import write_kv
from trunkattn.integrations.layer_spec import LayerSpec
from trunkattn.integrations.vllm import NAME, versions


@dataclass(frozen=True)
class LayerArguments:
    """The arguments that vLLM passes to a layer, in its order."""

    num_heads: int
    head_size: int
    scale: float
    num_kv_heads: int | None = None
    alibi_slopes: list[float] | None = None
    sliding_window: int | None = None
    kv_cache_dtype: str = "auto"
    logits_soft_cap: float | None = None
    attn_type: str = "decoder"
    kv_sharing_target_layer_name: str | None = None


def check_supported(unsupported: list[str], name: str = NAME) -> None:
    """Raises ValueError, with one line, if there is anything. name: of the back end."""
    if unsupported:
        raise ValueError(
            f"attention_backend={name}: TrunkAttention does not support {'; nor '.join(unsupported)}; "
            "turn it off or leave attention_backend out"
        )


def check_unquantized(output_quantization: dict[str, Any]) -> None:
    """Raises ValueError if a scale is given to quantize the output with."""
    wanted = [name for name, scale in output_quantization.items() if scale is not None]
    if wanted:
        raise ValueError(
            f"{' and '.join(wanted)} given: expected None, because TrunkAttention does not quantize its output (vLLM "
            "asks `fused_output_quant_supported` before it fuses the quantization into an attention)"
        )


class StepTensors(NamedTuple):
    """A layer's tensors of a step: [tokens, heads, head_size]. Rows after the step's tokens are padding. key and value
    are None in a layer that reads the cache of another one."""

    query: torch.Tensor
    key: torch.Tensor | None
    value: torch.Tensor | None
    output: torch.Tensor


def refusals(
    layer: LayerArguments,
    extra: dict[str, Any],
    vllm_config: Any,
    kv_dtypes: Mapping[str, torch.dtype | None] = versions.KV_DTYPES,
) -> list[str]:
    """Options of a layer or the engine that no device supports; empty if all are supported. kv_dtypes: of caches that
    are."""
    found = versions.refused_options(vllm_config)
    kind = str(getattr(layer.attn_type, "value", layer.attn_type))
    if kind != "decoder":
        found.append(f"{kind} attention, only decoder self-attention")
    if layer.alibi_slopes is not None:
        found.append("ALiBi")
    if layer.kv_cache_dtype not in kv_dtypes:
        found.append(f"kv_cache_dtype={layer.kv_cache_dtype}, only {', '.join(kv_dtypes)}")
    if envs.VLLM_BATCH_INVARIANT and not versions.has_triton():
        found.append("VLLM_BATCH_INVARIANT=1 without Triton, in which vLLM's own operators of that mode are written")
    found += [f"the layer option {name}={value}" for name, value in extra.items() if not versions.is_off(name, value)]
    return found


class TrunkAttentionImpl(AttentionImpl):
    """Attention of one layer.

    Raises:
        ValueError: with one line, if the model or an option of the engine is not supported.
    """

    supports_dcp = False  # the default was True before 0.30; not on a CPU, where vLLM has no merge of the ranks
    supports_pcp = False  # a rank would see only its own chunk of a prompt, and our prompts are not merged

    def __init__(self, *args: Any, **extra: Any) -> None:
        named = {name: extra.pop(name) for name in LayerArguments.__dataclass_fields__ if name in extra}
        layer = LayerArguments(*args, **named)
        sinks = extra.pop("sinks", None)
        check_supported(refusals(layer, extra, get_current_vllm_config()) + self._device_refusals(layer))
        # vLLM reads these attributes.
        self.num_heads, self.head_size, self.scale = layer.num_heads, layer.head_size, float(layer.scale)
        self.num_kv_heads = layer.num_kv_heads or layer.num_heads
        self.sliding_window, self.alibi_slopes = layer.sliding_window, None
        self.kv_cache_dtype, self.logits_soft_cap = layer.kv_cache_dtype, layer.logits_soft_cap
        self.attn_type = layer.attn_type
        # A layer with a target reads the target's cache, which vLLM binds to it, and vLLM stores nothing for it.
        self.kv_sharing_target_layer_name = layer.kv_sharing_target_layer_name

        self._model_sinks: torch.Tensor | None = sinks
        self.sinks = self._model_sinks
        dtype, kv_dtype = torch.get_default_dtype(), versions.KV_DTYPES[layer.kv_cache_dtype]  # the model's, as set
        heads = self.num_heads * self.dcp_world_size  # of all ranks that hold a part of each request
        self.layer_spec = LayerSpec(
            num_qo_heads=heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_size,
            dtype=dtype,
            kv_dtype=kv_dtype,
            sm_scale=self.scale,
            logits_soft_cap=layer.logits_soft_cap or None,
            sinks=sinks is not None,
            sliding_window=layer.sliding_window,
            batch_invariant=bool(envs.VLLM_BATCH_INVARIANT),
        )
        self.cache_dtype = kv_dtype or dtype
        self.scaled = self.cache_dtype.itemsize == 1
        self.draft_tag = versions.draft_tag()
        self.layer_spec.config(page_size=1)  # raises for every error that does not depend on the page size

    def _device_refusals(self, layer: LayerArguments) -> list[str]:
        """Options of the engine or the layer that this device does not support."""
        vllm_config = get_current_vllm_config()
        found = versions.refused_options(vllm_config, versions.REFUSED_CPU_OPTIONS)
        if layer.sliding_window is not None and versions.chosen_kinds(vllm_config) == (True, False):
            found.append(versions.ONE_KIND_OF_TWO)
        return found

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Converts the loaded sinks. If they are loaded again, they keep the place where CUDA graphs read them."""
        if self._model_sinks is None or self.sinks is None:
            return
        loaded = self._model_sinks.detach().to(torch.float32)
        self.sinks = loaded if self.sinks is self._model_sinks else self.sinks.copy_(loaded)

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Stores the step's keys and values before the layer's attention reads them.

        Args:
            layer: vLLM's layer, with the scales.
            key, value: [num_tokens, num_kv_heads, head_size]; they may be longer than `slot_mapping`. In an fp8 cache
                they are divided by their scale first.
            kv_cache: the layer's cache.
            slot_mapping: slot of each token; -1 is padding.
        """
        rows = len(slot_mapping)
        key, value = key[:rows], value[:rows]
        if self.scaled:
            key, value = self._quantized(key, layer._k_scale_float), self._quantized(value, layer._v_scale_float)
        write_kv(key, value, *self.caches_of(kv_cache), slot_mapping)

    def _quantized(self, values: torch.Tensor, scale: float) -> torch.Tensor:
        largest = torch.finfo(self.cache_dtype).max  # a larger value would become NaN
        return (values.to(torch.float32) / scale).clamp(-largest, largest)

    def caches_of(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [num_blocks, block_size, num_kv_heads, head_size] of the layer's cache."""
        return versions.split_cache(kv_cache, self.head_size, self.cache_dtype)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        **output_quantization: Any,
    ) -> torch.Tensor:
        """Writes and returns output [num_tokens, num_heads, head_size]; rows after the step's tokens are padding.

        `attn_metadata` is the builder's result. It is None while vLLM measures memory, and then the output is zeros.

        Raises:
            ValueError: a scale to quantize the output is given.
        """
        if attn_metadata is None:
            return output.fill_(0)
        check_unquantized(output_quantization)
        self._attend(layer, StepTensors(query, key, value, output), self.caches_of(kv_cache), attn_metadata)
        return output

    def _attend(self, layer: Any, tensors: StepTensors, caches: tuple[torch.Tensor, torch.Tensor], step: Any) -> None:
        """`forward` with the builder's `step`."""
        query, output = tensors.query, tensors.output
        attention, plan = step.plans[self.layer_spec]
        rows = plan.num_query_tokens
        attention.run(plan, query[:rows], *caches, out=output[:rows], sinks=self.sinks, **self._scales(layer))

    def _scales(self, layer: Any) -> dict[str, Any]:
        """The factors of stored keys and values; none unless the cache has 8 bits."""
        return {"k_scale": layer._k_scale_float, "v_scale": layer._v_scale_float} if self.scaled else {}
