"""Attention over sequences of one length by the cuDNN that PyTorch brings, which computes both passes on Hopper and
Blackwell: `torch.nn.functional.scaled_dot_product_attention`, held to that back end."""

import torch
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention


def reads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> bool:
    """Whether this PyTorch takes the tensors [batch, seqlen, heads, head_dim] there. It does not without cuDNN, for
    strides that cuDNN does not read, and after `torch.backends.cuda.enable_cudnn_sdp(False)`."""
    heads_first = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    params = SDPAParams(*heads_first, None, 0.0, causal, _has_groups(q, k))
    return min(q.numel(), k.numel()) > 0 and can_use_cudnn_attention(params)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, sm_scale: float) -> torch.Tensor:
    """out [batch, seqlen_q, num_qo_heads, head_dim of v] of checked tensors, with gradients. causal: seqlen_q is
    seqlen_k, because elsewhere the first query of PyTorch sees the first key, and here the last sees the last."""
    heads_first = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = scaled_dot_product_attention(*heads_first, is_causal=causal, scale=sm_scale, enable_gqa=_has_groups(q, k))
    return out.transpose(1, 2).contiguous()


def _has_groups(q: torch.Tensor, k: torch.Tensor) -> bool:
    return q.shape[2] != k.shape[2]
