"""What the forward kernel of training on Hopper takes, and how it is made from sequences and tiles."""

from functools import lru_cache
from typing import Any, Final, NamedTuple

from trunkattn.gpu.hopper.online_softmax import MainloopTile, mainloop_tile
from trunkattn.training.arguments import Variant
from trunkattn.training.spec import FlashTile, hopper_query_widths

_OWN_OUT_BYTES: Final = 192 << 10  # outputs get shared memory of their own if the CTA needs no more than this then
# The fields of `ForwardArguments` that each call brings. The others are the same for all calls of one kind.
BROUGHT: Final = ("q_desc", "k_desc", "v_desc", "out_desc", "outputs", "tables")


class ForwardConstants(NamedTuple):
    """What the kernel is compiled for.

    Attributes:
        mainloop: constants of the main loop and of the pipeline of keys. Its heads are padded.
        value_shape: constants of the pipeline of values. Its heads are padded.
        value_dim: dims of a value in memory, without padding.
        own_out: outputs have shared memory of their own. Otherwise they use that of the queries.
        soft_cap: the soft cap of logits, or 0 for none. With a soft cap the kernel's scale does not include log2(e).
        backward: the kernel computes dq (`query_gradients`), and memory for outputs holds dout.
    """

    tile: FlashTile
    variant: Variant
    mainloop: MainloopTile
    value_shape: MainloopTile
    value_dim: int
    own_out: bool
    soft_cap: float
    backward: bool

    def __hash__(self) -> int:
        """Hashes only the fields that the others follow from, because Triton asks for the hash at each launch."""
        return hash((self.tile, self.variant, self.value_dim, self.soft_cap, self.backward))


class Outputs(NamedTuple):
    """The results: `out` [batch, seqlen_q, num_qo_heads, head_dim of v] and `lse` [batch, num_qo_heads, seqlen_q]."""

    out: Any
    lse: Any


class ForwardArguments(NamedTuple):
    """The parameters of `hopper_forward_kernel`."""

    q_desc: Any
    k_desc: Any
    v_desc: Any
    out_desc: Any
    outputs: Any
    tables: Any
    num_sequences: Any
    section: Any
    scale: Any
    C: ForwardConstants


@lru_cache
def forward_constants(
    head_dims: tuple[int, int], tile: FlashTile, variant: Variant, soft_cap: float = 0.0
) -> ForwardConstants:
    """Returns what the kernel is compiled for. `head_dims` are the dims of keys and of values."""
    widths = hopper_query_widths(head_dims)
    mainloop, value_shape = (
        mainloop_tile(
            width,
            tile.block_n,
            tile.stages,
            tile.block_m // 16,
            mask_ahead=False,
            value_dim=widths.head_values,
            key_dim=head_dims[0],
        )
        for width in widths
    )
    streamed = tile.stages * tile.block_n * sum(widths)
    return ForwardConstants(
        tile=tile,
        variant=variant,
        mainloop=mainloop,
        value_shape=value_shape,
        value_dim=head_dims[1],
        own_out=2 * (tile.block_m * sum(widths) + streamed) <= _OWN_OUT_BYTES,
        soft_cap=soft_cap,
        backward=False,
    )
