"""Latent attention (MLA): the back end TRUNK_MLA, and one layer of it.

vLLM's own classes absorb queries, write the cache and compute prompts. Ours plans and runs the rows that decode or
verify drafts, which read the cached rows again for every token.
"""

import math
from dataclasses import fields
from typing import Any, ClassVar, Final

import torch
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend, MLACommonImpl
from vllm.platforms import current_platform
from vllm.v1.attention.backend import MultipleOf

from trunkattn.integrations.layer_spec import LayerSpec
from trunkattn.integrations.vllm import latent_name, versions
from trunkattn.integrations.vllm.cuda_impl import gpu_refusals
from trunkattn.integrations.vllm.impl import LayerArguments, check_supported, refusals
from trunkattn.integrations.vllm.mla_builder import TrunkMlaBuilder

# Of a layer of latent attention, beside those of any layer: what vLLM's class takes.
_SIZES: Final = (
    "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "v_head_dim", "kv_b_proj",
)  # fmt: skip


def latent_refusals(layer: LayerArguments, extra: dict[str, Any], vllm_config: Any) -> list[str]:
    """Options of a layer or the engine that no device supports; empty if all are. extra: beside those of any layer of
    latent attention."""
    if extra.get("indexer") is not None or extra.get("topk_indices_buffer") is not None:
        return [f"sparse attention, which selects keys for each query: vLLM's {versions.SPARSE_LATENT} does"]
    if layer.kv_cache_dtype in versions.PACKED_LATENT_DTYPES:
        instead = " or ".join(versions.LATENT_KV_DTYPES)
        return [f"kv_cache_dtype={layer.kv_cache_dtype}, which packs scales into a row: choose {instead}"]
    found = refusals(layer, extra, vllm_config, versions.LATENT_KV_DTYPES)
    if layer.sliding_window is not None:
        found.append("sliding windows of latent attention")
    if layer.logits_soft_cap:
        found.append("soft caps of latent attention")
    if layer.kv_sharing_target_layer_name is not None:
        found.append("layers of latent attention that read the cache of another layer")
    return found


class TrunkMlaImpl(MLACommonImpl[Any]):
    """Latent attention of one layer.

    Raises:
        ValueError: with one line, if the model, an option of the engine or the device is not supported.
    """

    can_return_lse_for_decode = True  # natural logarithms
    supports_dcp = True
    supports_pcp = False

    def __init__(self, *args: Any, **options: Any) -> None:
        names = [field.name for field in fields(LayerArguments)]
        given = dict(zip(names, args, strict=False)) | options
        layer = LayerArguments(**{name: value for name, value in given.items() if name in names})
        extra = {name: value for name, value in options.items() if name not in (*names, *_SIZES)}
        vllm_config = get_current_vllm_config()
        check_supported(latent_refusals(layer, extra, vllm_config), latent_name())
        super().__init__(*args, **options)
        self.supports_quant_query_input = False  # otherwise the layer rounds queries to 8 bits
        dtype = torch.get_default_dtype()
        ranks = max(1, vllm_config.parallel_config.decode_context_parallel_size)  # that hold a part of each request
        self.layer_spec = LayerSpec(
            num_qo_heads=self.num_heads * ranks,
            num_kv_heads=1,
            head_dim=self.head_size,
            dtype=dtype,
            kv_dtype=versions.LATENT_KV_DTYPES[layer.kv_cache_dtype],
            sm_scale=self.scale,
            logits_soft_cap=None,
            sinks=False,
            sliding_window=None,
            batch_invariant=bool(envs.VLLM_BATCH_INVARIANT),
            latent_dim=self.kv_lora_rank,
        )
        self.cache_dtype = self.layer_spec.kv_dtype or dtype
        self.scaled = self.cache_dtype.itemsize == 1
        self.draft_tag = versions.draft_tag()
        self._merges = ranks > 1
        check_supported(self._device_refusals(vllm_config), latent_name())

    def _device_refusals(self, vllm_config: Any) -> list[str]:
        """Options of the engine or the layer that this device does not support."""
        return gpu_refusals(self.layer_spec, self.scaled, vllm_config)

    def caches_of(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The rows [num_blocks, block_size, head_size] of the layer's cache, and no values apart, as
        `BatchAttention.run` takes them."""
        return versions.typed_cache(kv_cache, self.cache_dtype), None

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Runs the rows that decode.

        Args:
            q: [tokens, heads, head_size], or a pair of the absorbed columns and the rotated ones. The heads are those
                of all ranks that share a request.
            kv_c_and_k_pe_cache: the layer's cache.
            attn_metadata: the builder's.
            layer: vLLM's layer, with the scale of a cache of 8 bits.

        Returns:
            out [tokens, heads, latent columns], where rows of padding are zeros; and where ranks share each request
            lse [tokens, heads], -inf for those of which this rank holds nothing.
        """
        step = attn_metadata.decode
        step.launched = True
        run, plan = step.plans[self.layer_spec]
        absorbed = q[0] if isinstance(q, tuple) else q
        out = absorbed.new_zeros(*absorbed.shape[:2], self.kv_lora_rank)
        scale = versions.scale_of(layer, "k_scale") if self.scaled else None
        options = {"out": out, "k_scale": scale, "v_scale": scale} if self.scaled else {"out": out}
        cache, _ = self.caches_of(kv_c_and_k_pe_cache)
        if not self._merges:
            run(plan, q, cache, None, **options)
            return out, None
        _, lse = run(plan, q, cache, None, return_lse=True, **options)
        nothing = step.nothing_local[: len(out)]
        return out.masked_fill_(nothing[..., None], 0), lse.masked_fill_(nothing, -math.inf)


class TrunkMlaBackend(MLACommonBackend):
    """Latent attention over vLLM's paged cache on a GPU. Each step reads shared prefixes once."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = list(versions.LATENT_KV_DTYPES)

    @staticmethod
    def get_name() -> str:
        """The name in vLLM's AttentionBackendEnum, which before 0.32 has no room for one of our own."""
        return latent_name()

    @staticmethod
    def get_impl_cls() -> type[TrunkMlaImpl]:
        """The class of a layer's attention."""
        return TrunkMlaImpl

    @staticmethod
    def get_builder_cls() -> type[TrunkMlaBuilder]:
        """The class that plans a step."""
        return TrunkMlaBuilder

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Returns no list: the layer's class says which it does not support."""
        return []

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Tokens per block. vLLM passes the argument from 0.31 on."""
        return [MultipleOf(16)]

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Returns True: with VLLM_BATCH_INVARIANT=1 the bits of a token that decodes do not depend on its batch. Those
        of prompts are vLLM's."""
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Returns True on a GPU, where plans are made from the query lengths on the device."""
        return not current_platform.is_cpu()

    @classmethod
    def validate_configuration(cls, *args: Any, **options: Any) -> list[str]:
        """The reasons why not, for vLLM's error, and what to do."""
        reasons: list[str] = super().validate_configuration(*args, **options)
        return [*reasons, versions.instead_of_latent(options)] if reasons else []
