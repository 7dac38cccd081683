"""The training kernels, in Triton: what they refuse, and their tiles. Triton is not imported here."""

from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import Final, NamedTuple

import torch
from torch.torch_version import TorchVersion

from trunkattn.gpu.cards import Card
from trunkattn.names import install_command
from trunkattn.numerics import padded_head_dim

DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM: Final = 256  # above it accumulators do not fit the registers
LONG: Final = 2048  # queries from which on cuDNN computes fewer forward passes, as measured on an H200


class TrainingConfig(NamedTuple):
    """The properties of a call that decide which training kernel computes it. dtype: of queries, keys and values.
    head_dim_v: of values. options: names of the other arguments of `flash_attention` that are given. is_grouped:
    several query heads share a KV head. is_long: there are `LONG` queries or more in a sequence of a batch. is_shallow:
    the tokens of a tree see at most `FEW_KEYS` keys each on average."""

    head_dim: int
    dtype: torch.dtype
    head_dim_v: int
    options: tuple[str, ...] = ()
    is_grouped: bool = False
    is_long: bool = False
    is_shallow: bool = False

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        options: tuple[str, ...] = (),
        is_shallow: bool = False,
    ) -> "TrainingConfig":
        """The configuration of checked tensors [..., tokens, heads, head_dim]."""
        is_grouped, is_long = q.shape[-2] != k.shape[-2], q.shape[-3] >= LONG
        return cls(q.shape[-1], q.dtype, v.shape[-1], options, is_grouped, is_long, is_shallow)

    @property
    def widest(self) -> int:
        """The larger head_dim, which decides the tiles."""
        return max(self.head_dim, self.head_dim_v)


def refuses(config: TrainingConfig, card: Card) -> list[str]:
    """Why the portable training kernels do not compute an attention on a card; empty if they do."""
    reasons = card.why_too_old
    if config.dtype not in DTYPES:
        reasons.append(f"dtype {config.dtype}: expected one of {', '.join(map(str, DTYPES))}")
    for name, width in (("head_dim", config.head_dim), ("head_dim_v", config.head_dim_v)):
        if not 1 <= width <= MAX_HEAD_DIM:
            reasons.append(f"{name} {width}: expected 1 to {MAX_HEAD_DIM} on a GPU, from 1 on a CPU")
    return reasons


_TORCH_CUDNN: Final = "PyTorch's cuDNN attention"
_CUDNN_PAIRS: Final = ((192, 128), (256, 256))  # head_dims above 128 that its flex_attention takes
_NARROW: Final = 96  # head_dim up to which the Hopper backward pass is taken without groups, too
_NARROWEST_FORWARD: Final = 72  # head_dim from which on the Hopper forward pass is the faster one of long sequences
CUDNN_MODULE: Final = "cudnn.flex_attention"  # of an extra: nothing imports it unless it computes
CUDNN_NEEDS: Final = (1, 32)  # the version of its front end from which on flex_attention takes these calls
# Its mask has 8 bytes for each token and level. With more levels it is larger than the queries of 32 heads of 128.
CUDNN_LEVELS: Final = 1024
DEEP: Final = f"a tree of more than {CUDNN_LEVELS} levels"  # beside arguments of `flash_attention` among options
FEW_KEYS: Final = 1024  # with so few keys a query, heads of 104 to 128 have a Hopper kernel of its own for dq
_CUDNN_CAPABILITIES: Final = (90, 100, 103)
_CUDNN_HOPPER_NARROW: Final = 48  # wider heads up to 64 have tiles that leave no shared memory for values beyond 96


def _refuses_either_cudnn(
    config: TrainingConfig, card: Card, name: str, widest: int, pairs: tuple[tuple[int, int], ...] = ()
) -> list[str]:
    """Why neither cuDNN's flex_attention nor the cuDNN of PyTorch computes an attention on a card. name: the one that
    is asked; widest: head_dim up to which it takes any two; pairs: wider ones that it takes, of keys and of values."""
    reasons = [f"{option} is given: {name} has none" for option in config.options]
    if config.dtype not in (torch.float16, torch.bfloat16):
        reasons.append(f"dtype {config.dtype}: expected torch.float16 or torch.bfloat16")
    dims = config.head_dim, config.head_dim_v
    if not (all(dim % 8 == 0 and 8 <= dim <= widest for dim in dims) or dims in pairs):
        more = "".join(f", or {keys} and {values}" for keys, values in pairs)
        reasons.append(f"head_dim {dims[0]}, of values {dims[1]}: expected multiples of 8 to {widest}{more}")
    if card.capability not in _CUDNN_CAPABILITIES:
        reasons.append("compute capability {}.{}: expected 9.0, 10.0 or 10.3".format(*divmod(card.capability, 10)))
    return reasons


def refuses_torch_cudnn(config: TrainingConfig, card: Card) -> list[str]:
    """Why the cuDNN of PyTorch does not compute both passes of sequences of one length on a card; empty: it does, if
    its PyTorch says so of the tensors, too."""
    reasons = _refuses_either_cudnn(config, card, _TORCH_CUDNN, MAX_HEAD_DIM if card.capability == 90 else 128)
    if not reasons and not refuses_fa4_backward(config, card):
        reasons.append(f"{_heads(config)}: FlashAttention-4's backward pass is faster")
    elif not reasons and not refuses_cudnn_forward(config, card):
        reasons.append(f"{_heads(config)}: the Hopper backward pass is faster after cuDNN's forward pass")
    elif not reasons and _has_hopper_forward(config) and not refuses_hopper_backward(config, card):
        reasons.append(f"{_heads(config)}: the Hopper passes are faster")
    return reasons


def _has_hopper_forward(config: TrainingConfig) -> bool:
    """Whether the Hopper forward pass is preferred to cuDNN's, and its backward pass, too."""
    return config.widest > 128 or (config.is_long and _NARROWEST_FORWARD <= config.widest <= _NARROW)


def refuses_cudnn_forward(config: TrainingConfig, card: Card) -> list[str]:
    """Why the cuDNN of PyTorch does not compute the forward pass for another's backward pass; empty: it does, if its
    PyTorch says so of the tensors, too."""
    reasons = _refuses_either_cudnn(config, card, _TORCH_CUDNN, 128)
    if refuses_fa4_backward(config, card):
        reasons += refuses_hopper_backward(config, card)
        if not reasons and config.widest > _NARROW and not config.is_grouped:
            reasons.append(f"{_heads(config)}: cuDNN's backward pass is as fast as that of Hopper")
        elif not reasons and _has_hopper_forward(config):
            reasons.append(f"{_heads(config)}, {LONG} queries or more: the Hopper forward pass is faster")
    return reasons


_FA4: Final = "FlashAttention-4"
FA4_MODULE: Final = "flash_attn.cute.interface"  # of an extra: nothing imports it unless it computes
FA4_VERSIONS: Final = ("4.0.0b36", "4.1")  # from the first to before the second
_FA4_DIMS: Final = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))  # those it was measured and checked with


def _refuses_fa4(config: TrainingConfig, card: Card) -> list[str]:
    """What both passes of FlashAttention-4 refuse."""
    reasons = _refuses_hopper(config, card, _FA4, ("deterministic",))
    if (config.head_dim, config.head_dim_v) not in _FA4_DIMS:
        expected = ", ".join(f"{keys} and {values}" for keys, values in _FA4_DIMS)
        reasons.append(f"head_dim {config.head_dim}, of values {config.head_dim_v}: expected one of {expected}")
    installed = fa4_version()
    first, after = FA4_VERSIONS
    if not installed or not first <= TorchVersion(installed) < f"{after}.dev0":  # its own betas come after .dev0
        found = f"version {installed}" if installed else "not installed"
        expected = f"expected {first} or later, before {after}"
        reasons.append(f"flash-attn-4 is {found}: {expected}; {install_command('flash-attn-4')}")
    return reasons


def refuses_fa4_forward(config: TrainingConfig, card: Card) -> list[str]:
    """Why FlashAttention-4 does not compute the forward pass on a card; empty: it does."""
    reasons = _refuses_fa4(config, card)
    if not config.is_long:
        reasons.append(f"fewer than {LONG} queries: cuDNN's forward pass is faster")
    return reasons


def refuses_fa4_backward(config: TrainingConfig, card: Card) -> list[str]:
    """Why FlashAttention-4 does not compute the backward pass on a card; empty: it does."""
    reasons = _refuses_fa4(config, card)
    if config.is_grouped and config.head_dim != config.head_dim_v:
        reasons.append(f"{_heads(config)}: FlashAttention-4 expects one head_dim")
    if config.widest > 192:
        reasons.append(f"{_heads(config)}: the Hopper backward pass is faster")
    if config.is_grouped and not config.is_long:
        reasons.append(f"grouped heads and fewer than {LONG} queries: the Hopper backward pass is faster")
    return reasons


def fa4_version() -> str:
    """The version of FlashAttention-4, or nothing where it is not installed."""
    try:
        return version("flash-attn-4")
    except PackageNotFoundError:
        return ""


def _heads(config: TrainingConfig) -> str:
    grouped = "grouped" if config.is_grouped else "not grouped"
    return f"head_dim {config.head_dim}, of values {config.head_dim_v}, of heads that are {grouped}"


def refuses_cudnn(config: TrainingConfig, card: Card) -> list[str]:
    """Why cuDNN's flex_attention does not compute a prefix tree on a card; empty: it does."""
    reasons = _refuses_either_cudnn(config, card, "cuDNN's flex_attention", 128, _CUDNN_PAIRS)
    head_dim, head_dim_v = config.head_dim, config.head_dim_v
    is_timed = _NARROW < head_dim == head_dim_v <= 128
    if config.is_shallow and is_timed and not reasons and not refuses_hopper_backward(config, card):
        few = f"a tree of at most {FEW_KEYS} keys a query"
        reasons.append(f"{few}, {_heads(config)}: the Hopper passes are faster")
    if card.capability == 90 and head_dim != head_dim_v and config.is_grouped:
        reasons.append(
            f"head_dim {head_dim}, of values {head_dim_v}, of grouped heads: expected one head_dim on Hopper"
        )
    elif card.capability == 90 and _CUDNN_HOPPER_NARROW < head_dim <= 64 and head_dim_v > 96:
        narrow = f"up to {_CUDNN_HOPPER_NARROW}"
        reasons.append(
            f"head_dim {head_dim}, of values {head_dim_v}: expected a head_dim {narrow} or from 72 on Hopper"
        )
    installed = cudnn_version()
    if installed < CUDNN_NEEDS:
        found = f"version {'.'.join(map(str, installed))}" if installed else "not installed"
        reasons.append(f"nvidia-cudnn-frontend is {found}: expected 1.32 or later; {install_command('cudnn')}")
    return reasons


def cudnn_version() -> tuple[int, ...]:
    """The version of cuDNN's front end, major and minor, or nothing where it is not installed."""
    try:
        return tuple(int(part) for part in version("nvidia-cudnn-frontend").split(".")[:2])
    except PackageNotFoundError:
        return ()


class FlashTile(NamedTuple):
    """block_m queries × block_n keys, warps of a CTA, and blocks in flight (stages)."""

    block_m: int
    block_n: int
    warps: int
    stages: int


# (pass, bytes of an element, head_dim up to) -> tiles, the preferred one first; a card takes the first that fits its
# shared memory. Passes: `forward`, and `forward_tree` where a tree takes more registers; `keys`, gradients of keys and
# values; `queries`, of queries; `one_pass`, of all. 16-bit tiles spill few registers on an sm_90. Products of float32
# do not use tensor cores.
TILES: Final = MappingProxyType(
    {
        ("forward", 2, 64): (FlashTile(128, 128, 8, 3), FlashTile(128, 64, 4, 3), FlashTile(64, 64, 4, 2)),
        ("forward", 2, 128): (FlashTile(128, 128, 8, 2), FlashTile(128, 64, 8, 3), FlashTile(64, 64, 4, 2)),
        ("forward_tree", 2, 128): (FlashTile(128, 64, 8, 3), FlashTile(64, 64, 4, 2)),
        ("forward", 2, 256): (FlashTile(128, 64, 8, 2), FlashTile(64, 32, 4, 2)),
        ("forward", 4, 64): (FlashTile(64, 32, 8, 2),),
        ("forward", 4, 128): (FlashTile(32, 32, 8, 2), FlashTile(64, 32, 8, 2)),
        ("forward", 4, 256): (FlashTile(32, 32, 8, 2), FlashTile(16, 16, 4, 2)),
        ("keys", 2, 64): (FlashTile(64, 128, 8, 2), FlashTile(64, 64, 4, 2)),
        ("keys", 2, 128): (FlashTile(64, 128, 8, 2), FlashTile(32, 128, 8, 2), FlashTile(32, 64, 4, 2)),
        ("keys", 2, 256): (FlashTile(32, 64, 8, 2), FlashTile(16, 64, 8, 2), FlashTile(16, 32, 4, 2)),
        ("keys", 4, 64): (FlashTile(32, 32, 8, 2),),
        ("keys", 4, 128): (FlashTile(16, 32, 8, 2), FlashTile(32, 32, 8, 2)),
        ("keys", 4, 256): (FlashTile(16, 16, 8, 2),),
        ("queries", 2, 64): (FlashTile(128, 64, 8, 3), FlashTile(64, 64, 4, 2)),
        ("queries", 2, 128): (FlashTile(128, 64, 8, 2), FlashTile(64, 64, 4, 2), FlashTile(64, 32, 4, 2)),
        ("queries", 2, 256): (FlashTile(64, 32, 8, 2), FlashTile(32, 16, 4, 2)),
        ("queries", 4, 64): (FlashTile(32, 32, 8, 2),),
        ("queries", 4, 128): (FlashTile(32, 32, 8, 2), FlashTile(32, 16, 8, 2)),
        ("queries", 4, 256): (FlashTile(16, 16, 8, 2),),
        ("one_pass", 2, 64): (FlashTile(64, 128, 8, 2), FlashTile(64, 64, 4, 2)),
        ("one_pass", 2, 128): (FlashTile(64, 128, 8, 2), FlashTile(32, 128, 8, 2), FlashTile(32, 64, 8, 2)),
        ("one_pass", 2, 256): (FlashTile(32, 64, 8, 2), FlashTile(16, 64, 8, 2), FlashTile(16, 32, 4, 2)),
        ("one_pass", 4, 64): (FlashTile(32, 32, 8, 2),),
        ("one_pass", 4, 128): (FlashTile(16, 32, 8, 2), FlashTile(32, 32, 8, 2)),
        ("one_pass", 4, 256): (FlashTile(16, 16, 8, 2), FlashTile(16, 16, 8, 1)),
    }
)


# From sm_100 on, tensor memory holds the products. This pass, padded head_dim and tile need 576 of its 512 columns, and
# such a kernel compiles to a trap.
_OVER_TENSOR_MEMORY: Final = ("one_pass", 128, FlashTile(64, 128, 8, 2))


def candidates(name: str, head_dim: int, itemsize: int) -> tuple[FlashTile, ...]:
    """The tiles of a pass for heads of up to 256 elements of 2 or 4 bytes, the preferred one first."""
    width = max(64, padded_head_dim(head_dim))
    return TILES.get((name, itemsize, width)) or TILES[name.removesuffix("_tree"), itemsize, width]


def forward_tiles(config: TrainingConfig, card: Card) -> tuple[FlashTile, ...]:
    """The tiles of the forward pass, the preferred one first."""
    return candidates("forward", config.widest, config.dtype.itemsize)


def backward_tiles(config: TrainingConfig, card: Card) -> tuple[FlashTile, ...]:
    """The tiles of the backward pass, those of one kernel for all gradients first, then those of two."""
    passes = ("one_pass", "keys", "queries")
    return tuple(tile for name in passes for tile in candidates(name, config.widest, config.dtype.itemsize))


def no_tiles(config: TrainingConfig, card: Card) -> tuple[FlashTile, ...]:
    """Returns nothing: cuDNN and FlashAttention-4 choose their own."""
    return ()


def shared_bytes(name: str, tile: FlashTile, head_dim: int, itemsize: int) -> int:
    """An estimate of the shared memory of a CTA in bytes: its own rows and those in flight. A backward pass also keeps
    p in a second layout and, if it adds dq to memory, dq in float32 and the keys."""
    m, n, row = tile.block_m, tile.block_n, padded_head_dim(head_dim) * itemsize
    if name.startswith("forward"):
        return (m + 2 * tile.stages * n) * row
    own, streamed = (m, n) if name == "queries" else (n, m)
    needed, p = 2 * (own + tile.stages * streamed) * row + 1024, 4 * m * n
    return needed + (4 * m * padded_head_dim(head_dim) + max(p, own * row) if name == "one_pass" else p)


def fitting_tile(name: str, head_dim: int, itemsize: int, limit: int, tensor_memory: bool) -> FlashTile:
    """The first candidate that fits `limit` bytes of shared memory and, if the card has it, tensor memory; else the
    last, which is the smallest."""
    tiles = [
        tile
        for tile in candidates(name, head_dim, itemsize)
        if not (tensor_memory and (name, padded_head_dim(head_dim), tile) == _OVER_TENSOR_MEMORY)
    ]
    return next((tile for tile in tiles if shared_bytes(name, tile, head_dim, itemsize) <= limit), tiles[-1])


def card_tile(name: str, q: torch.Tensor, v: torch.Tensor) -> FlashTile:
    """The tile of a pass for the card of q and v; the preferred one under the interpreter, which has no limit."""
    widest = max(q.shape[-1], v.shape[-1])
    if not q.is_cuda:
        return candidates(name, widest, q.itemsize)[0]
    card = torch.cuda.get_device_properties(q.device)
    limit = getattr(card, "shared_memory_per_block_optin", card.shared_memory_per_block)  # the former only on NVIDIA
    return fitting_tile(name, widest, q.itemsize, limit, card.major >= 10)


HOPPER_MODULE: Final = "trunkattn.training.hopper"
_HOPPER_DTYPES: Final = (torch.bfloat16, torch.float16)
_HOPPER_DIMS: Final = 8  # head_dims are multiples of what TMA's strides are
UNEVEN: Final = "causal over seqlen_k unlike seqlen_q"  # beside arguments of `flash_attention` among options
_HOPPER_TAKES: Final = ("sliding_window", "logits_soft_cap", "sinks", "cu_seqlens_q", "tree", UNEVEN, "deterministic")
_HOPPER_NARROWEST: Final = 40  # head_dim from which on padding to whole 128 bytes costs less than it gives


class HopperWidths(NamedTuple):
    """Padded heads of keys and of values: shared memory holds them in whole 128 bytes, and as a power of two."""

    keys: int
    head_values: int


def hopper_widths(head_dims: tuple[int, int]) -> HopperWidths:
    """The padded heads of keys and of values."""
    return HopperWidths(*(max(64, padded_head_dim(head_dim)) for head_dim in head_dims))


def hopper_query_widths(head_dims: tuple[int, int]) -> HopperWidths:
    """The padded heads of the kernels that own queries: as `hopper_widths`, but heads of 136 to 192 lie in parts of 128
    and of 64, unless others are wider."""
    widths = hopper_widths(head_dims)
    return HopperWidths(*(min(width, 192) for width in widths)) if max(head_dims) <= 192 else widths


def hopper_shares_keys(head_dims: tuple[int, int]) -> bool:
    """Whether both consumer warpgroups of the Hopper backward pass share 64 keys, since their dk and dv do not fit the
    registers of one."""
    keys, head_values = head_dims
    return head_values > 128 or keys > 192


def hopper_forward_tile(head_dims: tuple[int, int]) -> FlashTile:
    """The tile of the Hopper forward pass: 64 queries for each of two consumer warpgroups, and a producer warp."""
    return FlashTile(128, 128 if head_dims[0] <= 192 and head_dims[1] <= 128 else 64, 9, 2)


def hopper_forward_tiles(config: TrainingConfig, card: Card) -> tuple[FlashTile, ...]:
    """The tile of the Hopper forward pass."""
    return (hopper_forward_tile((config.head_dim, config.head_dim_v)),)


def _refuses_hopper(config: TrainingConfig, card: Card, name: str, takes: tuple[str, ...]) -> list[str]:
    """What a pass by kernels for Hopper refuses. name: of the pass; takes: options that it has."""
    reasons = list(card.why_not_hopper)
    lacks = (option for option in config.options if option not in takes)
    reasons += [f"{option} is given: {name} has none" for option in lacks]
    if config.dtype not in _HOPPER_DTYPES:
        reasons.append(f"dtype {config.dtype}: expected torch.bfloat16 or torch.float16")
    for dim, width in (("head_dim", config.head_dim), ("head_dim_v", config.head_dim_v)):
        if width % _HOPPER_DIMS or not _HOPPER_NARROWEST <= width <= MAX_HEAD_DIM:
            expected = f"a multiple of {_HOPPER_DIMS} from {_HOPPER_NARROWEST} to {MAX_HEAD_DIM}"
            reasons.append(f"{dim} {width}: expected {expected}")
    return reasons


def refuses_hopper_forward(config: TrainingConfig, card: Card) -> list[str]:
    """Why the Hopper forward pass does not compute an attention on a card; empty: it does, unless a tensor
    is empty."""
    return _refuses_hopper(config, card, "the Hopper forward pass", _HOPPER_TAKES)


def refuses_hopper_backward(config: TrainingConfig, card: Card) -> list[str]:
    """Why the Hopper backward pass does not compute an attention on a card; empty: it does, unless a tensor
    is empty."""
    return _refuses_hopper(config, card, "the Hopper backward pass", _HOPPER_TAKES)


def hopper_backward_tiles(config: TrainingConfig, card: Card) -> tuple[FlashTile, ...]:
    """The tile of the Hopper backward pass: two consumer warpgroups, of 64 keys each unless they share them, and a
    producer warp. Narrow heads leave registers for more queries."""
    shares_keys = hopper_shares_keys((config.head_dim, config.head_dim_v))
    return (FlashTile(128 if config.widest <= 64 else 64, 64 if shares_keys else 128, 9, 2),)
