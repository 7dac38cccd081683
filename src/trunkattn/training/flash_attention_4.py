"""Sequences of one length by FlashAttention-4, where its package is installed: a forward and a backward pass on Hopper.

Of its functions those below autograd are called, because the ops of this package have an autograd of their own. The
first call of a kind compiles a kernel, which takes seconds. Source:
https://github.com/Dao-AILab/flash-attention/tree/main/flash_attn/cute
"""

from importlib import import_module

import torch

from trunkattn.training import spec
from trunkattn.training.cpu_blocks import Pair
from trunkattn.training.sequences import Sequences


def reads(*tensors: torch.Tensor) -> bool:
    """Whether it computes the tensors [batch, seqlen, heads, head_dim]. It does not if one is empty, nor after
    `torch.backends.cuda.enable_flash_sdp(False)`. It copies tensors whose strides its kernels do not read."""
    return torch.backends.cuda.flash_sdp_enabled() and all(tensor.numel() for tensor in tensors)


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences) -> Pair:
    """out [batch, seqlen_q, num_qo_heads, head_dim of v] and lse [batch, num_qo_heads, seqlen_q], float32."""
    source = import_module(spec.FA4_MODULE)
    options = {"softmax_scale": sequences.sm_scale, "causal": sequences.causal, "return_lse": True}
    out, lse, *_ = source._flash_attn_fwd(q, k, v, **options)
    return out, lse


def backward(
    given: tuple[torch.Tensor, torch.Tensor | None],
    saved: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    sequences: Sequences,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv and no dsinks, from (dout, dlse) and (q, k, v, out, lse). dlse: None for 0."""
    (dout, dlse), (q, k, v, out, lse) = given, saved
    source = import_module(spec.FA4_MODULE)
    into = {
        name: torch.empty_like(tensor, memory_format=torch.contiguous_format)
        for name, tensor in (("dq", q), ("dk", k), ("dv", v))
    }
    options = {"softmax_scale": sequences.sm_scale, "causal": sequences.causal, "deterministic": deterministic}
    dq, dk, dv = source._flash_attn_bwd(q, k, v, out, dout, lse, dlse=dlse, **options, **into)
    return dq, dk, dv, lse.new_empty(0)
