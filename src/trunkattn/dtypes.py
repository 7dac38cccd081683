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


def hopper_decode_misfits(
    dtypes: tuple[torch.dtype, ...], head_dims: tuple[int, int], page_size: int, group_size: int
) -> list[str]:
    """Why the Hopper decode kernel does not compute an attention; empty: it does. dtypes: of queries and of caches.
    head_dims: of keys and of values."""
    head_dim, caches = head_dims[0], dtypes[1:]
    heads = tuple(sorted((*HOPPER_HEAD_DIMS, *HOPPER_PADDED_HEAD_DIMS)))
    misfits = _misfits(dtypes, head_dims, group_size, heads, HOPPER_8_BIT_DTYPES)
    padded, has_8_bits = head_dim in HOPPER_PADDED_HEAD_DIMS, caches[0].itemsize == 1
    if padded and has_8_bits:
        misfits.append(f"{_name(caches[0])} caches of heads of {head_dim}: expected 16 bits")
    if page_size % HOPPER_PAGE_UNIT and (padded or (head_dim == max(HOPPER_HEAD_DIMS) and not has_8_bits)):
        misfits.append(f"page_size {page_size} with heads of {head_dim}: expected a multiple of {HOPPER_PAGE_UNIT}")
    return misfits


def hopper_prefill_misfits(
    dtypes: tuple[torch.dtype, ...], head_dims: tuple[int, int], page_size: int, group_size: int
) -> list[str]:
    """The same of the Hopper kernel for prompts."""
    misfits = _misfits(dtypes, head_dims, group_size, HOPPER_HEAD_DIMS, ())
    if page_size % HOPPER_PAGE_UNIT:
        misfits.append(f"page_size {page_size}: expected a multiple of {HOPPER_PAGE_UNIT}")
    return misfits


def _misfits(
    dtypes: tuple[torch.dtype, ...],
    head_dims: tuple[int, int],
    group_size: int,
    heads: tuple[int, ...],
    other_caches: tuple[torch.dtype, ...],
) -> list[str]:
    """What both kernels ask for. heads: that a kernel takes; other_caches: than of the queries' dtype."""
    (queries, *caches), (head_dim, value_dim), misfits = dtypes, head_dims, list[str]()
    if queries not in HOPPER_DTYPES:
        misfits.append(f"{_name(queries)} queries: expected bfloat16 or float16")
    elif len(set(caches)) > 1 or caches[0] not in (queries, *other_caches):
        names, others = " and ".join(dict.fromkeys(map(_name, caches))), ", or 8 bits" * bool(other_caches)
        misfits.append(f"{names} caches: expected {_name(queries)}, as the queries{others}")
    if head_dim not in heads:
        *most, last = heads
        misfits.append(f"head_dim {head_dim}: expected {', '.join(map(str, most))} or {last}")
    if value_dim != head_dim:
        misfits.append(f"values of {value_dim} dims: expected {head_dim}, as keys")
    if group_size > HOPPER_DECODE_ROWS:
        misfits.append(f"{group_size} query heads per KV head: expected at most {HOPPER_DECODE_ROWS}")
    return misfits


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


E4M3_NEEDS: Final = "expected compute capability 8.9 or later for this dtype; use torch.float8_e5m2 on this GPU"


def has_e4m3(device: torch.device | str) -> bool:
    """Whether a CUDA device, if there is one, converts float8_e4m3fn."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= (8, 9)
