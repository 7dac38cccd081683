"""Bound launches: kernel, grid and arguments are fixed, except for the tensors of a layer.

A plan serves all layers of a step, and most arguments of a launch are the same for all of them. Triton's launcher
inspects every argument at each call to find the compiled variant of the kernel. Here only the first call asks it, and
later calls go straight to that variant. This is correct as long as dtypes, strides and alignments stay the same, which
`layer_key` compares.

Training has no plan. There `kept` remembers the launches that were bound for tensors of the same kinds (`tensor_kind`).
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeVar

import torch

from trunkattn.gpu.compiling import is_compiling, launch
from trunkattn.gpu.layer import Tensors

_ALIGNMENT = 16  # bytes: Triton compiles one variant for pointers that are multiples of this, and one for others
_MOST_KEPT: Final = 512  # each takes a few kB, and a model has only a few shapes at a time

_Kept = TypeVar("_Kept")


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether Triton takes the tensor's address for a multiple of 16 bytes."""
    return tensor.data_ptr() % _ALIGNMENT == 0


class TensorKind(NamedTuple):
    """The properties of a tensor on which a compiled variant and a launch depend. Sizes and strides are arguments of
    the kernel, and Triton compiles different variants if they are 1 or multiples of 16."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    aligned: bool


def tensor_kind(tensor: torch.Tensor) -> TensorKind:
    """The kind of a tensor: a launch that was bound for it serves every other tensor of that kind on its device."""
    return TensorKind(tensor.dtype, tensor.shape, tensor.stride(), is_aligned(tensor))


class _Holder:
    """A place for one value. `kept` fills it, because a function with `lru_cache` gets nothing but its key."""

    value: Any = None


@lru_cache(maxsize=_MOST_KEPT)
def _holder(key: Hashable) -> _Holder:
    return _Holder()


def kept(key: Hashable, make: Callable[[], _Kept]) -> _Kept:
    """The value that `make` returned for this key, from a cache of the most recently used keys. It must hold no
    tensor."""
    holder = _holder(key)
    if holder.value is None:
        holder.value = make()
    found: _Kept = holder.value
    return found


class LayerKey(NamedTuple):
    """The properties of a layer on which compiled variants depend. aligned: whether q, k_cache, v_cache, out, sinks and
    q_rope begin at multiples of 16 bytes."""

    dtypes: tuple[torch.dtype, ...]
    strides: tuple[tuple[int, ...], ...]
    aligned: tuple[bool, ...]
    return_lse: bool


def layer_key(t: Tensors, return_lse: bool) -> LayerKey:
    """The key of a layer: launches that were bound for one layer compute every layer with the same key."""
    given = [t.q, t.k_cache, t.v_cache, t.out, t.sinks]
    if t.q_rope is not None:
        given.append(t.q_rope)
    return LayerKey(
        tuple([tensor.dtype for tensor in given]),
        tuple([tensor.stride() for tensor in given]),
        tuple([tensor.data_ptr() % _ALIGNMENT == 0 for tensor in given]),
        return_lse,
    )


class Grid(NamedTuple):
    """One launch of a kernel. arguments: all of them by name, and compile options."""

    num_ctas: int
    arguments: Mapping[str, Any]


class BoundLaunches:
    """Launches of one kernel, one after the other on the caller's current stream.

    Args:
        kernel: a jitted function of Triton or Gluon.
        grids: the launches.
        layer_names: names of the arguments that differ from layer to layer; their values in `grids` are not kept.
        of_layer: returns the values of these arguments for a layer, in the order of `layer_names`.
    """

    def __init__(
        self,
        kernel: Any,
        grids: Sequence[Grid],
        layer_names: tuple[str, ...],
        of_layer: Callable[[Tensors], tuple[Any, ...]],
    ) -> None:
        self._launches = tuple(BoundLaunch(kernel, grid, layer_names) for grid in grids)
        self._of_layer = of_layer

    def __call__(self, t: Tensors) -> None:
        """Launches the kernel for a layer."""
        layer = self._of_layer(t)
        for each in self._launches:
            each(layer)


class BoundLaunch:
    """A launch. The first call goes through Triton, which compiles or finds the kernel; later calls bypass it.

    kernel, grid, layer_names: see `BoundLaunches`.
    """

    def __init__(self, kernel: Any, grid: Grid, layer_names: tuple[str, ...]) -> None:
        self._kernel, self._grid, self._layer_names = kernel, (grid.num_ctas, 1, 1), layer_names
        self._fixed = {name: value for name, value in grid.arguments.items() if name not in layer_names}
        self._compiled: Callable[..., None] | None = None
        self._positional: list[Any] = []
        self._positions: tuple[int, ...] = ()

    def __call__(self, layer: tuple[Any, ...]) -> None:
        """Launches the kernel on the caller's current stream. layer: values in the order of layer_names."""
        if self._compiled is None:
            self._first(layer)
            return
        arguments = self._positional.copy()
        for position, value in zip(self._positions, layer, strict=True):
            arguments[position] = value
        self._compiled(*arguments)

    def _first(self, layer: tuple[Any, ...]) -> None:
        given = dict(zip(self._layer_names, layer, strict=True))
        compiled = launch(self._kernel, self._grid)(**self._fixed, **given)
        if is_compiling() or compiled is None:  # the interpreter compiles nothing
            return
        names = self._kernel.arg_names
        self._positional = [self._fixed.get(name) for name in names]
        self._positions = tuple(names.index(name) for name in self._layer_names)
        self._compiled = compiled[self._grid]
