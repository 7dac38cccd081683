"""Plans of the steps of latent attention. vLLM's builder prepares prompts; the rows that decode are planned here, on a
GPU as `decode_builder` says, on a CPU by the host.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonDecodeMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)

from trunkattn.integrations.vllm import latent_name, versions
from trunkattn.integrations.vllm.decode_builder import DecodeBuilder, DecodeRows, PlansToRun
from trunkattn.integrations.vllm.impl import check_supported
from trunkattn.integrations.vllm.metadata import check_causal


@dataclass
class LatentDecodes(MLACommonDecodeMetadata):
    """The rows of a step that decode.

    Attributes:
        plans: their plans, each with the function that runs it, called as `BatchAttention.run`.
        planned: what they were planned from.
        requests: rows without padding.
        nothing_local: [rows, 1] bool, of each row whether this rank holds none of its keys; None: each request is on
            one rank.
        launched: whether a layer has run the step from the host. A full CUDA graph does not.
    """

    plans: PlansToRun
    planned: DecodeRows
    requests: int
    nothing_local: torch.Tensor | None = None
    launched: bool = False


class TrunkMlaBuilder(DecodeBuilder, MLACommonMetadataBuilder[Any]):
    """Plans the steps of one attention group of latent attention.

    Raises:
        ValueError: with one line, if the group's KV cache holds anything else than latent rows.
    """

    supported_specs = versions.LATENT_SPECS
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN  # of drafts; 1 without

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.init_group(kv_cache_spec, layer_names, vllm_config)
        if any(getattr(layer, "non_causal_multi_token_decode", False) for layer in self.modules.values()):
            check_supported(["drafts that are not causal"], self.backend_name())
        self.init_decodes(kv_cache_spec.block_size, lambda _: "vLLM's own")

    @classmethod
    def backend_name(cls) -> str:
        """The back end's name in vLLM, for messages."""
        return latent_name()

    @property
    def shares_requests(self) -> bool:
        """Whether several ranks hold a part of each request's keys."""
        return bool(self.dcp_world_size > 1)

    def decodes_of(self, step: Any) -> LatentDecodes | None:
        """The part of vLLM's metadata that `_build_decode` made."""
        decodes: LatentDecodes | None = step.decode
        return decodes

    def path_of(self, step: Any) -> str:
        """The path of a step for the counters, once it has run."""
        if step.decode is None:
            return "prefill"
        if not step.decode.launched:
            return "full_graph"
        return "mixed" if step.prefill is not None else "decode"

    def _step(self, batch: Any) -> Any:
        check_causal(batch, self.backend_name())
        return MLACommonMetadataBuilder.build(self, 0, batch)

    def _build_decode(self, **step: Any) -> LatentDecodes:
        """Plans the rows that decode. vLLM up to 0.26 passes no max_query_len, which is not needed."""
        table, lens = step["block_table_tensor"], step["seq_lens_device"]
        if not self.attentions:
            self._allocate(table.shape[1])
        nothing_local = None
        if self._rows_of_rank is not None:
            lens, nothing_local = self._rows_of_rank.place(lens)
        rows = DecodeRows(table, lens, step["query_start_loc_device"])
        requests = int((step["query_start_loc_cpu"].diff() > 0).sum())
        return LatentDecodes(
            block_table=table,
            seq_lens=step["seq_lens_device"],
            dcp_tot_seq_lens=step["dcp_tot_seq_lens_device"],
            plans=self._plan(rows),
            planned=rows,
            requests=requests,
            nothing_local=nothing_local,
        )

    def _allocate(self, max_pages_per_request: int) -> None:
        """Makes the attentions, for the largest step."""
        self.find_layers()
        capacity = self._capacity(max_pages_per_request)
        self._make_attentions(capacity)
        self._make_ready(capacity)
