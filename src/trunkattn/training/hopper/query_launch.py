"""What both kernels on Hopper that own queries are launched with: the forward pass, and the gradients of queries."""

from typing import Any, Final, NamedTuple

import torch

from trunkattn.gpu.hopper.common import WARPGROUP_ROWS
from trunkattn.training.arguments import Variant
from trunkattn.training.hopper.common import TensorMap, tensor_map
from trunkattn.training.hopper.query_tiles import Tables
from trunkattn.training.sequences import Sequences
from trunkattn.training.spec import FlashTile

_SECTION_BYTES: Final = 4 << 20  # a section holds at most these bytes of keys and values, but at least one KV head


class QueryLaunch(NamedTuple):
    """Numbers of a launch.

    Attributes:
        num_ctas: CTAs, at most one for each SM.
        num_sequences: packed sequences, or 0 without packing.
        section: heads, over all sequences of a batch, whose tiles are computed at the same time.
        window: the one in `Tables`.
    """

    num_ctas: int
    num_sequences: int
    section: int
    window: int


def query_variant(sequences: Sequences) -> Variant:
    """Returns the code that sequences turn on."""
    in_tree = sequences.tree is not None
    return Variant(
        causal=sequences.causal or in_tree,
        packed=sequences.packed,
        tree=in_tree,
        window=sequences.sliding_window is not None,
        soft_cap=sequences.soft_cap is not None,
        sinks=sequences.sinks is not None,
        even_q=False,
        even_k=False,
    )


def query_launch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences, tile: FlashTile
) -> QueryLaunch:
    """Returns the numbers of a launch for tensors [batch, ...]."""
    batch, seqlen_q, heads, head_dim = q.shape
    sums, section = sequences.cu_seqlens_q, 1
    if sequences.causal or sequences.tree is not None:
        kv_head_bytes = k.shape[1] * (head_dim + v.shape[-1]) * q.itemsize
        section = max(_SECTION_BYTES // kv_head_bytes, 1) * (heads // k.shape[2])
    num_tiles = (sequences.blocks(sums, seqlen_q, tile.block_m) + sequences.packed) * heads * batch
    return QueryLaunch(
        num_ctas=min(torch.cuda.get_device_properties(q.device).multi_processor_count, num_tiles),
        num_sequences=0 if sums is None else len(sums) - 1,
        section=min(section, heads * batch),
        window=sequences.window_within(seqlen_q + k.shape[1]),
    )


def query_maps(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, constants: Any
) -> tuple[TensorMap, TensorMap, TensorMap, TensorMap]:
    """Returns the maps of the tensors. `out` are the outputs, or dout. `constants` are those of the kernel."""
    rows, block_n = WARPGROUP_ROWS.value, constants.tile.block_n
    key_box, value_box = (shape.parts[-1].width for shape in (constants.mainloop, constants.value_shape))
    return (
        tensor_map(q, rows, key_box),
        tensor_map(k, block_n, key_box),
        tensor_map(v, block_n, value_box),
        tensor_map(out, rows, value_box),
    )


def query_tables(sequences: Sequences, window: int, device: torch.device) -> Tables:
    """Returns the tables of a launch. `window` is already limited to the length of the sequences."""
    tree, windowed = sequences.tree, sequences.sliding_window is not None
    return Tables(
        cu_seqlens_q=sequences.cu_seqlens_q,
        cu_seqlens_k=sequences.cu_seqlens_k,
        subtree_end=tree and tree.subtree_end,
        depths=tree.depths if tree and windowed else None,
        segment_of=tree and tree.segment_of,
        segments=tree and tree.segments,
        next_tile=torch.zeros(1, dtype=torch.int32, device=device),
        window=window,
        sinks=sequences.sinks,
    )
