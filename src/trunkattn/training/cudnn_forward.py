"""The forward pass of sequences of one length by PyTorch's cuDNN; the backward pass of another kernel reads its lse."""

import torch

from trunkattn.training import torch_cudnn
from trunkattn.training.sequences import Sequences


def reads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether this PyTorch's cuDNN takes the tensors [batch, seqlen, heads, head_dim]; see `torch_cudnn.reads`."""
    return torch_cudnn.reads(q, k, v, q.shape[1] == k.shape[1])


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [batch, seqlen_q, num_qo_heads, head_dim of v] and lse [batch, num_qo_heads, seqlen_q], float32."""
    heads_first = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    out, lse = torch_cudnn.compute(*heads_first, True, sequences.causal, sequences.sm_scale)
    return out.transpose(1, 2).contiguous(), lse.reshape(out.shape[:3])
