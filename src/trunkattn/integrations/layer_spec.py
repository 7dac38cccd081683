"""The attention of a layer, as the plug-ins of all serving engines describe it. No engine is imported here."""

from dataclasses import asdict, dataclass

import torch

from trunkattn import AttentionConfig


@dataclass(frozen=True)
class LayerSpec:
    """The attention of a layer. Layers with the same spec in one KV-cache group share a plan.

    Attributes:
        num_qo_heads, num_kv_heads, head_dim: geometry.
        dtype: type of the queries.
        kv_dtype: type of the KV cache; None: `dtype`.
        sm_scale: factor of the logits.
        logits_soft_cap: c of c * tanh(logits / c); None: no cap.
        sinks: whether each query head has a sink logit.
        sliding_window: keys that a query sees, its own included; None: all.
        batch_invariant: whether a request's bits do not depend on what it is batched with.
        latent_dim: columns of a cached row that are the values of latent attention (MLA), whose keys are the whole row;
            None: keys and values are cached apart.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    kv_dtype: torch.dtype | None
    sm_scale: float
    logits_soft_cap: float | None
    sinks: bool
    sliding_window: int | None
    batch_invariant: bool = False
    latent_dim: int | None = None

    def config(self, page_size: int) -> AttentionConfig:
        """The attention of these layers with any window."""
        shape = asdict(self)
        del shape["sliding_window"]
        return AttentionConfig(page_size=page_size, **shape)

    @property
    def kv_token_bytes(self) -> int:
        """Bytes of one token's keys and values in one layer; latent attention caches them in one row."""
        numbers = self.head_dim if self.latent_dim is not None else 2 * self.head_dim
        return (self.kv_dtype or self.dtype).itemsize * numbers * self.num_kv_heads

    def __str__(self) -> str:
        """The spec in words, for a log."""
        heads = f"{self.num_qo_heads}/{self.num_kv_heads} heads of {self.head_dim}"
        if self.latent_dim is not None:
            heads = f"{self.num_qo_heads} heads, latent rows of {self.latent_dim} + {self.head_dim - self.latent_dim}"
        found = [f"{heads}, {self.dtype}"]
        found += [f"KV cache {self.kv_dtype}"] if self.kv_dtype else []
        found += [f"window {self.sliding_window}"] if self.sliding_window else []
        found += [f"soft cap {self.logits_soft_cap}"] if self.logits_soft_cap else []
        found += ["sinks"] if self.sinks else []
        found += ["batch invariant"] if self.batch_invariant else []
        return ", ".join(found)
