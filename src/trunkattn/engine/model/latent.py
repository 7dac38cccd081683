"""Multi-head latent attention (MLA) of transformers' models over a latent cache (DeepSeek-V2 §2.1,
https://arxiv.org/abs/2405.04434).

Such a model caches a latent row and a rope row for each token, and a method `expand_kv` of its attention makes keys and
values of all heads of them with the weight of `kv_b_proj`. In the absorbed form the rows stay as they are: each head
multiplies its queries by its part of the weight before the attention, and its outputs by the other part after it. The
result is the same. `expanded` computes some prompt chunks in the model's own form, over the same cache.
"""

from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from trunkattn.engine.model.hf_masks import UnsupportedAttention

_NAME: Final = "latent_heads"  # of the submodule that an absorbed attention has


class _Sizes(NamedTuple):
    """Columns, named as the attributes of an attention in transformers: of a latent row, of a head's keys and of the
    rope row that all heads add to them, of a head's values."""

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


class HeadWidths(NamedTuple):
    """Columns of the keys and of the values of one head in the expanded form."""

    key: int
    value: int


class HeadLinear(nn.Module):
    """y[:, h] = x[:, h] W[h]ᵀ: x [T, heads, in_features] -> [T, heads, out_features].

    Args:
        weight: [heads, out_features, in_features], kept as a view.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """y [T, heads, out_features] of x [T, heads, in_features]."""
        return torch.bmm(x.transpose(0, 1), self.weight.transpose(1, 2)).transpose(0, 1)

    def of_rows(self, rows: torch.Tensor, heads: slice, out: torch.Tensor) -> None:
        """Writes out [heads, R, out_features], any strides: rows [R, in_features] times the weight of each head of the
        slice."""
        out.copy_(rows @ self.weight[heads].transpose(1, 2))


class LatentHeads(nn.Module):
    """What each head multiplies by: in the absorbed form queries before a latent attention and outputs after it, in the
    expanded form cached rows.

    Args:
        attention: an attention of transformers with `expand_kv`, whose weight this takes over.

    Raises:
        UnsupportedAttention: its keys and values are not the product of its rows and one weight.
    """

    def __init__(self, attention: Any) -> None:
        super().__init__()
        up: Any = getattr(attention, "kv_b_proj", None)
        sizes = _Sizes(*(getattr(attention, name, 0) for name in _Sizes._fields))
        is_plain = type(up) is nn.Linear and up.bias is None
        if not is_plain or not _expands_by_head(type(attention), up.out_features, sizes):
            raise UnsupportedAttention("its latent attention expands its cache in a way of its own")
        nope = sizes.qk_nope_head_dim
        weight = up.weight.detach().view(-1, nope + sizes.v_head_dim, sizes.kv_lora_rank)
        self._nope, self.rope_dim = nope, sizes.qk_rope_head_dim
        self.widths = HeadWidths(nope + sizes.qk_rope_head_dim, sizes.v_head_dim)
        self.absorb = HeadLinear(weight[:, :nope].transpose(1, 2))
        self.expand = HeadLinear(weight[:, nope:])
        self.expand_keys = HeadLinear(weight[:, :nope])

    def queries(self, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The pair that a latent attention takes: q [T, heads, nope + rope] as [T, heads, latent] and [T, heads,
        rope]."""
        return self.absorb(q[..., : self._nope]), q[..., self._nope :]

    def expand_rows(
        self, latent: torch.Tensor, rope: torch.Tensor, heads: slice, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Writes keys [heads, R, nope + rope] and values [heads, R, v] of some heads: the expanded form of cached rows
        latent [R, latent] and rope [R, rope]."""
        self.expand_keys.of_rows(latent, heads, keys[..., : self._nope])
        keys[..., self._nope :] = rope
        self.expand.of_rows(latent, heads, values)


def absorb_heads(model: nn.Module) -> None:
    """Turns every latent attention of a model into its absorbed form. `latent_heads` then finds what it multiplies by.

    Raises:
        UnsupportedAttention: an attention is latent in a way of its own.
    """
    for module in list(model.modules()):
        if hasattr(module, "expand_kv"):
            setattr(module, _NAME, LatentHeads(module))
            module.expand_kv = _keep_rows  # type: ignore[assignment]
            del module.kv_b_proj  # the heads have its weight


def latent_heads(module: nn.Module) -> LatentHeads | None:
    """The heads of an absorbed attention; None: its keys and values are ordinary ones."""
    return getattr(module, _NAME, None)


def _expands_by_head(attention: Any, up_features: int, sizes: _Sizes) -> bool:
    """Whether the class's `expand_kv` gives each head in turn its keys, with the rope columns of all after them, and
    its values. It is tried on numbered columns instead of a product."""
    widths = sizes.qk_nope_head_dim, sizes.v_head_dim
    columns = torch.arange(up_features, dtype=torch.float32, device="cpu").view(1, 1, 1, -1)
    rope = -1 - columns[..., : sizes.qk_rope_head_dim]
    numbered = SimpleNamespace(kv_b_proj=lambda rows: columns, **sizes._asdict())
    try:
        found = attention.expand_kv(numbered, columns.new_zeros(1, 1, 1, sizes.kv_lora_rank), rope)
        keys, values = columns.view(1, -1, 1, sum(widths)).split(widths, dim=-1)
        expected = torch.cat((keys, rope.expand(-1, keys.shape[1], -1, -1)), dim=-1), values
        return all(map(torch.equal, found, expected))
    except Exception:  # a foreign one can raise anything
        return False


def _keep_rows(latent: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The cached rows [1, 1, T, latent] and [1, 1, T, rope], where a model expands them to keys and values."""
    return latent, rope
