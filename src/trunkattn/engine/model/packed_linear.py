"""Linear layers for a CPU in float32, with the weights stored in the order in which a decode step reads them.

With few rows the attention executor's register tile is faster than torch's BLAS and than oneDNN's packed weights,
because it fetches weights from memory while it computes. With many rows it is as fast as oneDNN.

A decode step of one request calls two hundred such layers, and each call costs as much as a small layer's arithmetic.
So layers that read the same input, as the projections of queries, keys and values do, are computed by one call.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import nn

from trunkattn.cpu.linear import PANEL, Panels, join_panels, multiply, pack_weight, unpack_weight
from trunkattn.engine.model.latent import HeadLinear

# Names under which transformers' models keep layers of one input, side by side in one module.
_OF_ONE_INPUT: Final = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_FEW_ROWS: Final = 8  # up to here a call costs more than copying its output


class _Panels:
    """The weights of linear layers of one input, one after another.

    With few rows one product serves all of the layers. Each of them takes its part of it once, so that no caller sees
    what another does to its output.
    """

    def __init__(self, linears: Sequence[nn.Linear], to_int8: bool = False) -> None:
        packed = [pack_weight(linear.weight, to_int8) for linear in linears]
        self.whole = packed[0] if len(packed) == 1 else join_panels(packed)
        ends = np.cumsum([len(panels.values) for panels in packed]).tolist()
        self._parts = [slice(end - len(panels.values), end) for end, panels in zip(ends, packed, strict=True)]
        self._rows = self._product = torch.empty(0, dtype=torch.float32, device="cpu")
        self._waiting: set[int] = set()  # layers that have not taken their part

    def part(self, index: int) -> Panels:
        """The weight of a layer, as a view."""
        return self.whole.part(self._parts[index])

    def multiply(self, rows: torch.Tensor, index: int) -> torch.Tensor:
        """[T, columns of a layer's panels] the product of rows [T, in_features] with a layer's weights."""
        if len(self._parts) == 1:
            return multiply(rows, self.whole)
        if rows.shape[0] > _FEW_ROWS:
            return multiply(rows, self.part(index))
        if index not in self._waiting or not torch.equal(self._rows, rows):
            self._rows, self._product = rows.clone(), multiply(rows, self.whole)
            self._waiting = set(range(len(self._parts)))
        self._waiting.discard(index)
        part = self._parts[index]
        return self._product[:, part.start * PANEL : part.stop * PANEL]


class PackedLinear(nn.Module):
    """y = x Wᵀ + b with a packed W. x [..., in_features] float32 -> [..., out_features].

    It has the attributes of `nn.Linear`, because models read them. `weight` is a copy.

    Args:
        linear: the layer.
        panels: the packed weights of this layer and of others that read the same input; None: of only this layer, in
            float32.
        index: the layer's place among them.
    """

    def __init__(self, linear: nn.Linear, panels: _Panels | None = None, index: int = 0) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = None if linear.bias is None else linear.bias.detach()
        self._panels = _Panels([linear]) if panels is None else panels
        self._index = index

    @property
    def weight(self) -> torch.Tensor:
        """W [out_features, in_features] float32, on the CPU."""
        return unpack_weight(self._panels.part(self._index), self.out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """y [..., out_features] of x [..., in_features]."""
        if x.dtype != torch.float32:
            return nn.functional.linear(x, self.weight, self.bias)  # raises as nn.Linear does
        rows = x.detach().reshape(-1, self.in_features).contiguous()
        out = self._panels.multiply(rows, self._index)
        if out.shape[1] > self.out_features:
            out = out[:, : self.out_features]
        out = out.contiguous()  # copies only if the last panel is not full, or if several rows share a product
        if self.bias is not None:
            out += self.bias
        return out.view(*x.shape[:-1], self.out_features)


class PackedHeadLinear(nn.Module):
    """A `HeadLinear` with packed weights: x [T, heads, in_features] float32 -> [T, heads, out_features]."""

    def __init__(self, linear: HeadLinear) -> None:
        super().__init__()
        self._out_features = linear.weight.shape[1]
        self._panels = [pack_weight(weight) for weight in linear.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """y [T, heads, out_features] of x [T, heads, in_features]."""
        products = [multiply(x[:, head].contiguous(), panels) for head, panels in enumerate(self._panels)]
        return torch.stack(products, 1)[..., : self._out_features]

    def of_rows(self, rows: torch.Tensor, heads: slice, out: torch.Tensor) -> None:
        """Writes out [heads, R, out_features], any strides: rows [R, in_features] times the weight of each head of the
        slice."""
        rows = rows.contiguous()
        for panels, head_out in zip(self._panels[heads], out, strict=True):
            head_out.copy_(multiply(rows, panels)[:, : self._out_features])


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the weights are float32 on a CPU."""
    return dtype == torch.float32 and device.type == "cpu"


def pack_linears(model: nn.Module, to_int8: bool = False) -> None:
    """Replaces every plain float32 `nn.Linear` and every `HeadLinear` on a CPU. Unpacked weights stay only if they are
    tied. to_int8: the weights of the former are rounded.

    Plain means exactly that class, without hooks: what a subclass or a hook adds would be lost. A layer that several
    parents hold stays one layer.
    """
    packed: dict[nn.Linear, PackedLinear] = {}
    for parent in list(model.modules()):
        plain = {
            name: child for name, child in parent._modules.items() if isinstance(child, nn.Linear) and is_packed(child)
        }
        for names in _OF_ONE_INPUT:
            group = [plain[name] for name in names if name in plain]
            if len(group) == len(names) and _may_share(group) and not any(child in packed for child in group):
                panels = _Panels(group, to_int8)
                packed |= {child: PackedLinear(child, panels, index) for index, child in enumerate(group)}
        for name, child in list(parent._modules.items()):
            if name in plain:
                if plain[name] not in packed:
                    packed[plain[name]] = PackedLinear(plain[name], _Panels([plain[name]], to_int8))
                setattr(parent, name, packed[plain[name]])
            elif isinstance(child, HeadLinear):
                setattr(parent, name, PackedHeadLinear(child))


def is_packed(module: nn.Module) -> bool:
    """Whether `pack_linears` makes a packed copy of a module's weight."""
    return isinstance(module, HeadLinear) or (isinstance(module, nn.Linear) and _is_plain(module))


def unpacked_weights(model: nn.Module) -> list[str]:
    """Names of the matrices that are not packed: rows of packed products do not depend on their neighbours."""
    return [
        f"{name}.{parameter}"
        for name, module in model.named_modules()
        for parameter, weight in module.named_parameters(recurse=False)
        if weight.dim() > 1 and not isinstance(module, nn.Embedding)
    ]


def _is_plain(linear: nn.Linear) -> bool:
    has_hooks = linear._forward_hooks or linear._forward_pre_hooks or "forward" in vars(linear)
    return type(linear) is nn.Linear and not has_hooks and can_pack(linear.weight.dtype, linear.weight.device)


def _may_share(linears: Sequence[nn.Linear]) -> bool:
    """Whether the layers are different ones of the same input size."""
    return len(set(linears)) == len(linears) and len({linear.in_features for linear in linears}) == 1
