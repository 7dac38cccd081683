"""What the compiler made of the CPU kernels."""

import re

from numba import njit, types

from trunkattn.cpu.attention import merge_kernel


def test_the_merge_of_partials_is_vectorised() -> None:
    # An index that Numba cannot prove to be 0 or more is enough to undo it, and then a merge takes twice as long.
    compiled = njit(types.void(types.int64, types.int64))(merge_kernel.py_func)  # from a cache it has no assembly
    (assembly,) = compiled.inspect_asm().values()
    assert re.search(r"mulps|fmul\s+v\d+\.4s|fmla\s+v\d+\.4s", assembly)
