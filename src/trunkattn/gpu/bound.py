"""A launch whose kernel, grid and arguments are settled, but for the tensors of a layer.

A plan serves all layers of a step, and most of what a launch needs is the same for each of them. Triton's launcher
looks at every argument again at each call, to find the compiled variant of the kernel that fits. Here the first call
asks it, and later calls go to that variant. This holds as long as dtypes, strides and alignments stay: `layer_key`.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from trunkattn.gpu.plan import Tensors

_ALIGNMENT = 16  # bytes: Triton compiles one variant for pointers that are multiples of it, and one for others


class LayerKey(NamedTuple):
    """What compiled variants depend on. aligned: of q, caches, out and sinks, in whole 16 bytes."""

    dtypes: tuple[torch.dtype, ...]
    strides: tuple[tuple[int, ...], ...]
    aligned: tuple[bool, ...]
    return_lse: bool


def layer_key(t: Tensors, return_lse: bool) -> LayerKey:
    """The key of a layer: launches that were bound for one layer compute every layer with the same key."""
    given = (t.q, t.k_cache, t.v_cache, t.out, t.sinks)
    return LayerKey(
        tuple([tensor.dtype for tensor in given]),
        tuple([tensor.stride() for tensor in given]),
        tuple([tensor.data_ptr() % _ALIGNMENT == 0 for tensor in given]),
        return_lse,
    )


class BoundLaunch:
    """One launch, on the caller's current stream.

    Args:
        kernel: a jitted function of Triton or Gluon.
        num_ctas: of the grid.
        arguments: all arguments by name, of the layer that it is bound with, and compile options.
        layer_names: those that another layer brings.
        of_layer: their values for a layer, in the order of `layer_names`.
    """

    def __init__(
        self,
        kernel: Any,
        num_ctas: int,
        arguments: Mapping[str, Any],
        layer_names: tuple[str, ...],
        of_layer: Callable[[Tensors], tuple[Any, ...]],
    ) -> None:
        self._kernel, self._grid = kernel, (num_ctas, 1, 1)
        self._layer_names, self._of_layer = layer_names, of_layer
        self._fixed = {name: value for name, value in arguments.items() if name not in layer_names}
        self._compiled: Callable[..., None] | None = None
        self._positional: list[Any] = []
        self._positions: tuple[int, ...] = ()

    def __call__(self, t: Tensors) -> None:
        """Launches the kernel for a layer."""
        layer = self._of_layer(t)
        if self._compiled is None:
            self._first(layer)
            return
        arguments = self._positional.copy()
        for position, value in zip(self._positions, layer, strict=True):
            arguments[position] = value
        self._compiled(*arguments)

    def _first(self, layer: tuple[Any, ...]) -> None:
        """Launches through Triton, which compiles the kernel or finds it. The interpreter compiles nothing."""
        compiled = self._kernel[self._grid](**self._fixed, **dict(zip(self._layer_names, layer, strict=True)))
        if compiled is None:
            return
        names = self._kernel.arg_names
        self._positional = [self._fixed.get(name) for name in names]
        self._positions = tuple(names.index(name) for name in self._layer_names)
        self._compiled = compiled[self._grid]
