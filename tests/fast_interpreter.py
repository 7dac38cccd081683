"""Takes repeated work out of Triton's interpreter, in which most of the kernels' tests spend their time.

The interpreter looks up all members of `triton.language` whenever a kernel calls a function, writes a table of dtypes
whenever it asks for one, combines the elements of a reduction or scan one by one, checks and wraps the shape of every
tensor, and calculates whether integers overflow, of which nothing follows. Here members are looked up once a launch,
dtypes and shapes once, half of a reduction is combined with the other half at once, and overflows are not calculated.
Values are the same (`test_fast_interpreter.py`).
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

Tensors = Sequence[Any]


class Shape(NamedTuple):
    """What types and tensors of one shape have: a type's shape, its text and the number of its elements, and a
    tensor's."""

    of_type: Any
    text: str
    numel: int
    of_tensor: Any
    numel_of_tensor: Any


def install() -> None:
    """Replaces functions of the interpreter and of its language, for this process."""
    plain_dtype, plain_patch = cache(interpreter._get_np_dtype), interpreter._patch_lang

    def numpy_dtype(dtype: Any) -> np.dtype:
        scalar = dtype.element_ty if dtype.is_block() else dtype
        return np.dtype(np.uint64) if scalar.is_ptr() else plain_dtype(scalar)

    def patch_once(function: Callable) -> Any:
        """Leaves modules alone whose functions the launch around this call has replaced already."""
        modules = (it for it in function.__globals__.values() if it is tl or it is tl.core)
        if any(tl.core.is_builtin(module.load) for module in modules):
            return plain_patch(function)
        return interpreter._LangPatchScope()

    interpreter._get_np_dtype = numpy_dtype
    interpreter._patch_lang = patch_once
    interpreter.ReduceOps.generic_reduce = reduced
    interpreter.ScanOps.generic_scan = scanned
    keep_shapes()
    look_for_no_overflows()


def keep_shapes() -> None:
    """Lets types and tensors of one shape share what is made of it, and types be equal to themselves at once."""
    plain_type, plain_tensor, plain_equal = tl.block_type.__init__, tl.tensor.__init__, tl.dtype.__eq__
    of_scalars = Shape(None, "", 1, tl.tuple([]), tl.constexpr(1))
    shapes: dict[tuple, Shape] = {}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple(it.value if isinstance(it, tl.constexpr) else it for it in shape)
        if key not in shapes:
            plain_type(self, element_ty, shape)
            tensor = tl.tensor.__new__(tl.tensor)
            plain_tensor(tensor, None, self)
            shapes[key] = Shape(self.shape, str(self.shape), self.numel, tensor.shape, tensor.numel)
        found = self.known = shapes[key]
        self.element_ty, self.shape, self.numel = element_ty, found.of_type, found.numel
        self.name = f"<{found.text}, {element_ty}>"

    def tensor(self: Any, handle: Any, type: Any) -> None:
        known = type.known if type.is_block() else of_scalars
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known.of_tensor, known.numel_of_tensor

    tl.block_type.__init__ = block_type
    tl.tensor.__init__ = tensor
    tl.dtype.__eq__ = lambda self, other: self is other or plain_equal(self, other)


def look_for_no_overflows() -> None:
    """Leaves out the look for sums, differences and products that do not fit their integers, from which nothing follows
    unless a kernel is launched with `debug`."""
    plain = TritonSemantic.binary_op_sanitize_overflow_impl

    def sanitize(self: Any, *operation: Any) -> None:
        if self.builder.options.debug:
            plain(self, *operation)

    TritonSemantic.binary_op_sanitize_overflow_impl = sanitize


def reduced(self: Any, inputs: Tensors) -> list:
    """Tensors reduced along an axis (None: of all elements), neighbours first, as a card does it."""
    axis, flat = self.axis or 0, self.axis is None
    arrays = [it.handle.data.reshape(-1) if flat else np.moveaxis(it.handle.data, axis, 0) for it in inputs]
    while len(arrays[0]) > 1:
        arrays = combined(self, inputs, [it[0::2] for it in arrays], [it[1::2] for it in arrays])
    last = [it[0] for it in arrays]
    if self.keep_dims:
        last = [np.expand_dims(it, tuple(range(inputs[0].handle.data.ndim)) if flat else axis) for it in last]
    return [self.to_tensor(it, given.dtype) for it, given in zip(last, inputs, strict=True)]


def scanned(self: Any, inputs: Tensors) -> list:
    """Tensors of the running results along an axis: each step doubles the elements that a result is of."""
    arrays = [np.moveaxis(it.handle.data, self.axis, 0) for it in inputs]
    distance = 1
    while distance < len(arrays[0]):
        ends = combined(self, inputs, [np.roll(it, distance, 0) for it in arrays], arrays)
        arrays = [np.concatenate([it[:distance], end[distance:]]) for it, end in zip(arrays, ends, strict=True)]
        distance *= 2
    arrays = [np.moveaxis(it, 0, self.axis) for it in arrays]
    return [self.to_tensor(it, given.dtype) for it, given in zip(arrays, inputs, strict=True)]


def combined(self: Any, inputs: Tensors, left: Sequence[np.ndarray], right: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Arrays of what the kernel's own function makes of two elements each."""
    operands = [
        self.to_tensor(it, given.dtype) for side in (left, right) for it, given in zip(side, inputs, strict=True)
    ]
    result = self.combine_fn.fn(*operands)
    result = result if isinstance(result, tuple) else (result,)
    values = (getattr(getattr(it, "handle", None), "data", it) for it in result)
    return [np.broadcast_to(it, old.shape).astype(old.dtype) for it, old in zip(values, left, strict=True)]
