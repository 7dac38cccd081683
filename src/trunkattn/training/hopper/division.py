"""How the backward pass on Hopper is divided among kernels and CTAs."""

from functools import lru_cache
from typing import Final, NamedTuple

import torch

from trunkattn.training.hopper.key_tile import NARROW, WIDEST_NARROW, backward_tile
from trunkattn.training.sequences import Sequences, num_blocks
from trunkattn.training.spec import FEW_KEYS

_CTAS_OF_AN_SM: Final = 4
_IMBALANCE: Final = 1.6  # of the longest CTA's work over an SM's share: less is not worth a second part of dk and dv


class Division(NamedTuple):
    """How a backward pass is divided.

    Attributes:
        parts: CTAs that share the query heads of a group. Each computes a part of dk and dv, and the parts are summed
            in float32.
        adds_dq: the kernel for dk and dv also adds to dq. Otherwise `query_gradients` computes dq.
    """

    parts: int
    adds_dq: bool


def division(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences, deterministic: bool) -> Division:
    """Returns the division of a backward pass. It is made once for equal sizes."""
    sums = sequences.cu_seqlens_k
    num_sequences = None if sums is None else len(sums) - 1
    work = sequences.pairs, sequences.largest
    return _divide(q.shape, k.shape, v.shape[-1], num_sequences, sequences.causal, work, deterministic, q.device)


@lru_cache(maxsize=1024)
def _divide(
    q_shape: torch.Size,
    k_shape: torch.Size,
    head_dim_v: int,
    num_sequences: int | None,
    causal: bool,
    tree_work: tuple[int, int],
    deterministic: bool,
    device: torch.device,
) -> Division:
    tile = backward_tile(q_shape[-1], head_dim_v)
    tokens, num_kv_heads = k_shape[-3:-1]
    group_size, num_sms = q_shape[-2] // num_kv_heads, torch.cuda.get_device_properties(device).multi_processor_count
    batch = k_shape[0] if len(k_shape) == 4 else 1
    ctas = num_blocks(tokens, tile.block_n, num_sequences) * batch * num_kv_heads
    parts = _enough_parts(group_size, ctas, _CTAS_OF_AN_SM * num_sms)
    pairs, largest = tree_work
    if largest:  # CTAs of the first keys of the largest root, which most tokens see, end last
        long_keys = pairs // largest  # so many keys, each seen by all tokens of the root, would be all the work
        parts = max(parts, _enough_parts(group_size, long_keys * num_kv_heads, tile.block_n * num_sms / _IMBALANCE))
        mean_keys = pairs / tokens
    else:
        mean_keys = tokens / max(num_sequences or 1, 1) / (2 if causal else 1)
    # With heads of 104 to 128, a query with few keys costs more by its dq in memory than by scores that are computed
    # twice. Windows are not counted.
    few = mean_keys <= FEW_KEYS and tile.keys is not None and tile.keys.dims == WIDEST_NARROW
    return Division(parts, tile.consumers == NARROW and not deterministic and not few)


def _enough_parts(group_size: int, number: int, wanted: float) -> int:
    """Returns the least divisor of the size of a group by which `number` becomes `wanted` or more, or the size."""
    divisors = [parts for parts in range(1, group_size + 1) if group_size % parts == 0]
    return next((parts for parts in divisors if number * parts >= wanted), group_size)
