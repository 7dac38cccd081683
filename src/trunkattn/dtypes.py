"""What a configuration may ask for: dtypes of queries and caches, and what the Hopper kernels take.

Neither Numba nor Triton is imported here, so that a configuration can be made without a compiler.
"""

from types import MappingProxyType
from typing import Final

import torch

# How shared prefixes are packed (`trunkattn.planner.packing`), and how a GPU launches a step (`trunkattn.gpu.launch`).
POLICIES: Final = ("per_query", "relay", "cascade", "pat", "fasttree", "optimal", "auto")
EXECUTIONS: Final = ("auto", "serial", "overlapped", "streams")

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

# What the Hopper kernels take
HOPPER_DTYPES: Final = (torch.bfloat16, torch.float16)
HOPPER_8_BIT_DTYPES: Final = (torch.float8_e4m3fn, torch.float8_e5m2)
HOPPER_PAGE_UNIT: Final = 16  # tokens that TMA loads at a time
HOPPER_BOX_DIMS: Final = 64
HOPPER_HEAD_DIMS: Final = (64, 128, 256)
# Heads that decode as wider ones: of 16 bits, in pages of whole HOPPER_PAGE_UNIT
HOPPER_PADDED_HEAD_DIMS: Final = MappingProxyType({96: 128})
HOPPER_DECODE_ROWS: Final = 64  # of a tile, which holds a query's heads of a group
HOPPER_PREFILL_ROWS: Final = 128  # of an item, which holds whole groups
# Of decodes together with prompts
HOPPER_HEAD_DIM: Final = 128
HOPPER_GROUPS: Final = (1, 2, 4, 8, 16)  # query heads per KV head


def hopper_width(head_dim: int) -> int:
    """Dims of a head in the Hopper decode kernel, which pads some with zeros."""
    return HOPPER_PADDED_HEAD_DIMS.get(head_dim, head_dim)


def fits_hopper_decode(
    dtypes: tuple[torch.dtype, ...], head_dims: tuple[int, int], page_size: int, group_size: int
) -> bool:
    """Whether the Hopper decode kernel computes an attention: 16-bit queries, caches of their dtype or of 8 bits, heads
    of 64, 96, 128 or 256, at most 64 query heads per KV head; heads of 96 and 16-bit heads of 256 only in pages of
    whole 16 tokens, and heads of 96 only of 16 bits. dtypes: of queries and of caches. head_dims: of keys and of
    values."""
    loads_16_bits = dtypes[1].itemsize > 1 and page_size % HOPPER_PAGE_UNIT == 0
    return (
        dtypes[0] in HOPPER_DTYPES
        and all(dtype == dtypes[0] or dtype in HOPPER_8_BIT_DTYPES for dtype in dtypes)
        and len(set(dtypes[1:])) == 1
        and (head_dims[0] in HOPPER_HEAD_DIMS or (head_dims[0] in HOPPER_PADDED_HEAD_DIMS and loads_16_bits))
        and head_dims[0] == head_dims[1]
        and (head_dims[0] < max(HOPPER_HEAD_DIMS) or dtypes[1].itemsize == 1 or loads_16_bits)
        and group_size <= HOPPER_DECODE_ROWS
    )


def fits_hopper_prefill(
    dtypes: tuple[torch.dtype, ...], head_dims: tuple[int, int], page_size: int, group_size: int
) -> bool:
    """Whether the Hopper kernel for prompts computes an attention: of what the one for decoding does, heads that are
    not padded, caches of the queries' dtype and pages of whole 16 tokens."""
    fits = fits_hopper_decode(dtypes, head_dims, page_size, group_size) and head_dims[0] in HOPPER_HEAD_DIMS
    return fits and len(set(dtypes)) == 1 and page_size % HOPPER_PAGE_UNIT == 0


E4M3_NEEDS: Final = "expected compute capability 8.9 or later for this dtype; use torch.float8_e5m2 on this GPU"


def has_e4m3(device: torch.device | str) -> bool:
    """Whether a CUDA device, if there is one, converts float8_e4m3fn."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= (8, 9)
