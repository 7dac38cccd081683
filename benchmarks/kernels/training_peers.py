"""Attentions of batches in training, ours and those of peers, over q, k and v [batch, length, heads, head_dim]."""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.kernels.training_cells import Attend
from benchmarks.lib.internals import own_flash_attention, own_training_kernels, without_flash_attention_4
from trunkattn import flash_attention
from trunkattn.training.spec import fa4_version


class Shape(NamedTuple):
    """A batch of sequences of one length. head_dim_v: of values; None for that of keys."""

    causal: bool
    batch: int
    length: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int | None = None

    @property
    def name(self) -> str:
        """What `parse_shape` reads."""
        mask, heads = "causal" if self.causal else "full", f"{self.num_qo_heads}/{self.num_kv_heads}"
        values = f"/{self.head_dim_v}" if self.head_dim_v else ""
        return f"{mask} {self.batch}x{self.length} {heads} D {self.head_dim}{values}"

    @property
    def gigaflops(self) -> float:
        """The work of the forward pass, half of it where causal."""
        pairs = self.batch * self.length**2 / (2 if self.causal else 1)
        return 2 * pairs * self.num_qo_heads * (self.head_dim + (self.head_dim_v or self.head_dim)) / 1e9


def parse_shape(text: str) -> Shape:
    """A shape by its name.

    Raises:
        ValueError: it is no name of a shape.
    """
    found = re.fullmatch(
        r"(causal|full) ([1-9]\d*)x([1-9]\d*) ([1-9]\d*)/([1-9]\d*) D ([1-9]\d*)(?:/([1-9]\d*))?", text
    )
    if not found or int(found[4]) % int(found[5]):
        raise ValueError(f"shape {text!r}: expected a batch such as 'causal 8x2048 32/8 D 128'")
    sizes = [int(size) for size in found.groups()[1:] if size]
    return Shape(found[1] == "causal", *sizes)


class Attention(NamedTuple):
    """An attention. make: that of a shape on a device; it raises where it cannot run. trains: else it has no
    gradients. surroundings: it is called inside them."""

    make: Callable[[Shape, str], Attend]
    trains: bool = True
    surroundings: Callable[[], AbstractContextManager[None]] = nullcontext


def default(shape: Shape, device: str) -> Attend:
    """`flash_attention`, what a user gets."""
    return lambda q, k, v: flash_attention(q, k, v, shape.causal)


def with_flash_attention_4(shape: Shape, device: str) -> Attend:
    """`flash_attention` where FlashAttention-4 is installed."""
    if not fa4_version():
        raise ModuleNotFoundError("flash-attn-4 is not installed")
    return default(shape, device)


def ours(deterministic: bool) -> Callable[[Shape, str], Attend]:
    """Kernels of our own."""
    return lambda shape, device: lambda q, k, v: own_flash_attention(q, k, v, shape.causal, deterministic=deterministic)


def torchs(backend: SDPBackend) -> Callable[[Shape, str], Attend]:
    """PyTorch's scaled_dot_product_attention, held to a back end."""

    def make(shape: Shape, device: str) -> Attend:
        groups = shape.num_qo_heads != shape.num_kv_heads

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
            with sdpa_kernel(backend):
                out = scaled_dot_product_attention(q, k, v, is_causal=shape.causal, enable_gqa=groups)
            return out.transpose(1, 2)

        return attend

    return make


def flex(mask: Any, groups: bool, device: str) -> Attend:
    """PyTorch's FlexAttention, compiled for this mask on a card."""
    from torch.nn.attention.flex_attention import flex_attention as peer

    torch._dynamo.reset()  # every mask counts as a recompilation, and after a few nothing is compiled any more
    compute: Any = torch.compile(peer, dynamic=False) if device == "cuda" else peer

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        heads_first = (tensor.transpose(1, 2) for tensor in (q, k, v))
        out: torch.Tensor = compute(*heads_first, block_mask=mask, enable_gqa=groups)
        return out.transpose(1, 2)

    return attend


def flex_batch(shape: Shape, device: str) -> Attend:
    """FlexAttention, with a block mask if causal."""
    from torch.nn.attention.flex_attention import create_block_mask

    mask = None
    if shape.causal:
        length = shape.length
        mask = create_block_mask(lambda b, h, query, key: query >= key, None, None, length, length, device=device)
    return flex(mask, shape.num_qo_heads != shape.num_kv_heads, device)


def flash_attention_4(shape: Shape, device: str) -> Attend:
    """FlashAttention-4, which returns out and lse."""
    from flash_attn.cute import flash_attn_func as peer

    return lambda q, k, v: peer(q, k, v, causal=shape.causal)[0]


def flash_attention_3(shape: Shape, device: str) -> Attend:
    """FlashAttention-3 of vLLM's wheels, which has packed sequences and no gradients."""
    import fa3 as peer

    ends = torch.arange(shape.batch + 1, dtype=torch.int32, device=device) * shape.length

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        packed = (tensor.detach().flatten(0, 1) for tensor in (q, k, v))
        out: torch.Tensor = peer.flash_attn_varlen_func(
            *packed, shape.length, ends, shape.length, cu_seqlens_k=ends, causal=shape.causal
        )
        return out.unflatten(0, q.shape[:2])

    return attend


ATTENTIONS = {
    "default": Attention(default, surroundings=without_flash_attention_4),
    "with_flash_attention_4": Attention(with_flash_attention_4),
    "own": Attention(ours(False), surroundings=own_training_kernels),
    "deterministic": Attention(ours(True), surroundings=own_training_kernels),
    "torch_flash": Attention(torchs(SDPBackend.FLASH_ATTENTION)),
    "torch_cudnn": Attention(torchs(SDPBackend.CUDNN_ATTENTION)),
    "flex_attention": Attention(flex_batch),
    "flash_attention_4": Attention(flash_attention_4),
    "flash_attention_3": Attention(flash_attention_3, trains=False),
}
