"""Linear layers for a CPU in float32: weights stored once in oneDNN's blocked order.

torch's own float32 `linear` goes through a BLAS that leaves half of this work's speed on the table: with 32 rows and
SmolLM2's shapes it does 100 to 180 GFLOP/s on two Zen 5 cores, a packed oneDNN weight 360 to 430 (docs/performance.md).
"""

import torch
from torch import nn

_ROWS_HINT = 32  # rows for which the blocking is chosen; any number of rows can be multiplied


class PackedLinear(nn.Module):
    """y = x Wᵀ + b with a packed W. x [..., in_features] float32 -> [..., out_features]."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = None if linear.bias is None else linear.bias.detach()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _ROWS_HINT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this torch has oneDNN and the weights are float32 on a CPU."""
    available = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    return available and dtype == torch.float32 and device.type == "cpu"


def pack_linears(model: nn.Module) -> None:
    """Replaces every `nn.Linear` (exactly that class) of `model`; the unpacked weights are dropped where not tied."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, PackedLinear(child))
