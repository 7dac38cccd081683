"""Linear layers for a CPU in float32, with the weights stored in the order in which a decode step reads them.

A library's product would be the first choice. But with 32 rows all of SmolLM2's layers take 30 ms on two Zen 5 cores
with oneDNN's packed weights (torch's own BLAS: more than twice that), and 22 ms with the attention executor's register
tile, which fetches weights from memory while it computes; at 512 rows the two are even (docs/performance.md).
"""

import torch
from torch import nn

from trunkattn.kernels.cpu_linear import PANEL, multiply, pack_weight


class PackedLinear(nn.Module):
    """y = x Wᵀ + b with a packed W. x [..., in_features] float32 -> [..., out_features]."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = None if linear.bias is None else linear.bias.detach()
        self._panels = pack_weight(linear.weight.detach().numpy())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        rows = x.detach().reshape(-1, self.in_features).contiguous()
        out = torch.empty(len(rows), len(self._panels) * PANEL)
        multiply(rows.numpy(), self._panels, out.numpy(), torch.get_num_threads())
        out = out[:, : self.out_features].contiguous()  # a copy only where the last panel is not full
        if self.bias is not None:
            out += self.bias
        return out.view(*x.shape[:-1], self.out_features)


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the weights are float32 on a CPU."""
    return dtype == torch.float32 and device.type == "cpu"


def pack_linears(model: nn.Module) -> None:
    """Replaces every `nn.Linear` (exactly that class) of `model`; the unpacked weights are dropped where not tied."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, PackedLinear(child))
