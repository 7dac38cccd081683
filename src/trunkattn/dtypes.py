"""Dtypes of queries and of KV caches, and their names.

Neither Numba nor Triton is imported here, so that a configuration can be made without a compiler.
"""

from types import MappingProxyType
from typing import Final

import torch

COMPUTE_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)

# The KV dtypes, and the integer type through which Numba reads their bits.
FLOAT32, BFLOAT16, FLOAT16, FLOAT8_E4M3, FLOAT8_E5M2 = range(5)
KV_KINDS: Final = MappingProxyType(
    {
        torch.float32: (FLOAT32, torch.float32),
        torch.bfloat16: (BFLOAT16, torch.uint16),
        torch.float16: (FLOAT16, torch.uint16),
        torch.float8_e4m3fn: (FLOAT8_E4M3, torch.uint8),
        torch.float8_e5m2: (FLOAT8_E5M2, torch.uint8),
    }
)


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without its module.

    Example:
        >>> dtype_name(torch.bfloat16)
        'bfloat16'
    """
    return str(dtype).removeprefix("torch.")
