"""Attention over sequences of one length by the cuDNN that PyTorch brings, which computes both passes on Hopper and
Blackwell: what `torch.nn.functional.scaled_dot_product_attention` calls once it has chosen that back end.

It is called directly, because `torch.nn.attention.sdpa_kernel` changes the back ends of the whole process and restores
them at each call, which takes longer than a small attention.
"""

import torch
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention


def reads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> bool:
    """Whether this PyTorch's cuDNN takes the tensors [batch, seqlen, heads, head_dim]. It does not if there is no
    cuDNN, if cuDNN does not read the strides, and after `torch.backends.cuda.enable_cudnn_sdp(False)`."""
    if not q.is_cuda or not min(q.numel(), k.numel()):
        return False
    has_groups = q.shape[2] != k.shape[2]
    params = SDPAParams(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None, 0.0, causal, has_groups)
    return can_use_cudnn_attention(params)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, sm_scale: float) -> torch.Tensor:
    """out [batch, seqlen_q, num_qo_heads, head_dim of v] of checked tensors, with gradients. causal requires seqlen_q =
    seqlen_k: otherwise PyTorch aligns the first query with the first key, while here the last query sees the last
    key."""
    keeps_lse = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    heads_first = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    out, _ = compute(*heads_first, keeps_lse, causal, sm_scale)
    return out.transpose(1, 2).contiguous()


def compute(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keeps_lse: bool, causal: bool, sm_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of tensors [batch, heads, seqlen, head_dim]. keeps_lse: for a backward pass; else lse is empty."""
    found = torch.ops.aten._scaled_dot_product_cudnn_attention.default(
        q, k, v, None, keeps_lse, 0.0, causal, scale=sm_scale
    )
    return found[0], found[1]
