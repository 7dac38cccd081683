"""Tiles of the training kernels: which one each card takes, and what a kernel of a head_dim is given."""

from types import SimpleNamespace

import pytest
import torch

from trunkattn.gpu.cards import ASSUMED
from trunkattn.gpu.portable.arguments import features
from trunkattn.training.arguments import attention_shape, readable
from trunkattn.training.hopper.key_loads import DQ_BOX
from trunkattn.training.hopper.key_tile import backward_tile
from trunkattn.training.spec import (
    FlashTile,
    TrainingConfig,
    candidates,
    card_tile,
    fitting_tile,
    hopper_backward_tiles,
    hopper_forward_tile,
    shared_bytes,
)

from ..gpu.hopper_cases import GEOMETRY, OnCard

BF16 = torch.bfloat16
LARGE, MIDDLE, SMALL = 227 << 10, 163 << 10, 99 << 10  # of an sm_90 or sm_100, an sm_80, an sm_86 or sm_120


@pytest.mark.parametrize(
    ("name", "head_dim", "sizes"),
    [
        ("forward", 64, ((128, 128), (128, 128), (128, 64))),
        ("forward", 128, ((128, 128), (128, 128), (64, 64))),
        ("forward_tree", 128, ((128, 64), (128, 64), (64, 64))),
        ("forward", 256, ((128, 64), (64, 32), (64, 32))),
        ("keys", 128, ((64, 128), (64, 128), (32, 64))),
        ("queries", 64, ((128, 64), (128, 64), (64, 64))),
        ("queries", 128, ((128, 64), (128, 64), (64, 32))),
        ("one_pass", 64, ((64, 128), (64, 128), (64, 64))),
        ("one_pass", 128, ((64, 128), (32, 128), (32, 64))),
        ("one_pass", 256, ((32, 64), (16, 64), (16, 32))),
    ],
)
def test_a_card_takes_the_first_tile_that_fits_its_shared_memory(
    name: str, head_dim: int, sizes: tuple[tuple[int, int], ...]
) -> None:
    found = [fitting_tile(name, head_dim, 2, limit, False) for limit in (LARGE, MIDDLE, SMALL)]
    assert [tuple(tile[:2]) for tile in found] == list(sizes)


def test_what_a_cta_keeps_in_shared_memory() -> None:
    """In rows of 256 bytes. A forward pass has queries, and keys and values in flight. Others have two tensors of each
    side and, as they multiply it twice, p in float32; one pass also dq, beside p or the keys, which take more."""
    row, tile = 2 * 128, FlashTile(64, 128, 8, 2)
    assert shared_bytes("forward", tile, 128, 2) == (64 + 2 * 2 * 128) * row
    of_keys = 2 * (128 + 2 * 64) * row + 1024
    assert shared_bytes("keys", tile, 128, 2) == of_keys + 4 * 64 * 128
    assert shared_bytes("queries", tile, 128, 2) == 2 * (64 + 2 * 128) * row + 1024 + 4 * 64 * 128
    assert shared_bytes("one_pass", tile, 128, 2) == of_keys + 4 * 64 * 128 + max(4 * 64 * 128, 128 * row)
    low = FlashTile(32, 128, 8, 2)
    assert shared_bytes("one_pass", low, 128, 2) == 2 * (128 + 2 * 32) * row + 1024 + 4 * 32 * 128 + 128 * row


def test_a_tile_may_fill_shared_memory() -> None:
    tile = candidates("forward", 128, 2)[0]
    needed = shared_bytes("forward", tile, 128, 2)
    assert fitting_tile("forward", 128, 2, needed, False) == tile != fitting_tile("forward", 128, 2, needed - 1, False)


def test_narrow_heads_have_the_tiles_of_64() -> None:
    for name in ("forward", "forward_tree", "keys", "queries", "one_pass"):
        for itemsize in (2, 4):
            assert candidates(name, 8, itemsize) == candidates(name, 64, itemsize) != candidates(name, 65, itemsize)
            assert candidates(name, 65, itemsize) == candidates(name, 128, itemsize)


@pytest.mark.parametrize(("major", "block_m"), [(9, 64), (10, 32), (12, 32)])
def test_one_pass_fits_tensor_memory(major: int, block_m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that needs more compiles to a trap."""
    card = SimpleNamespace(major=major, shared_memory_per_block_optin=LARGE, shared_memory_per_block=48 << 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    q = torch.empty(1, 1, 1, 96, dtype=BF16, device="meta").as_subclass(OnCard)
    assert card_tile("one_pass", q, q) == FlashTile(block_m, 128, 8, 2)
    assert card_tile("one_pass", q[..., :64], q[..., :64]) == FlashTile(64, 128, 8, 2)


def test_the_wider_of_keys_and_values_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(major=9, shared_memory_per_block_optin=LARGE, shared_memory_per_block=48 << 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    wide = torch.empty(1, 1, 1, 256, dtype=BF16, device="meta")
    for q in (wide, wide.as_subclass(OnCard)):
        narrow = q[..., :64]
        assert card_tile("forward", narrow, q) == card_tile("forward", q, narrow) == card_tile("forward", q, q)
        assert card_tile("forward", narrow, narrow) != card_tile("forward", q, q)


@pytest.mark.parametrize(
    ("head_dims", "block_n"), [((192, 128), 128), ((128, 128), 128), ((200, 128), 64), ((192, 136), 64)]
)
def test_the_hopper_forward_pass_has_fewer_keys_for_wide_heads(head_dims: tuple[int, int], block_n: int) -> None:
    assert hopper_forward_tile(head_dims) == FlashTile(128, block_n, 9, 2)


@pytest.mark.parametrize(
    ("head_dims", "sizes"),
    [
        ((64, 64), (128, 128)), ((72, 64), (64, 128)), ((64, 72), (64, 128)), ((128, 128), (64, 128)),
        ((136, 64), (64, 128)), ((192, 128), (64, 128)), ((64, 136), (64, 64)), ((200, 64), (64, 64)),
        ((256, 256), (64, 64)),
    ],
)  # fmt: skip
def test_the_hopper_backward_pass_has_fewer_queries_then_keys_for_wide_heads(
    head_dims: tuple[int, int], sizes: tuple[int, int]
) -> None:
    config = TrainingConfig(head_dims[0], BF16, head_dims[1])
    assert hopper_backward_tiles(config, ASSUMED) == (FlashTile(*sizes, 9, 2),)
    tile = backward_tile(*head_dims)
    assert (tile.block_m, tile.block_n) == sizes


@pytest.mark.parametrize("head_dim", range(40, 129, 8))
def test_parts_of_narrow_heads_hold_every_dim_once(head_dim: int) -> None:
    """Of heads in memory, of their sums, and of dq, whichever width the values have."""
    for head_dim_v in range(40, 129, 8):
        tile = backward_tile(head_dim, head_dim_v)
        assert tile.keys is not None and tile.head_values is not None
        for head, dims, width in ((tile.keys, head_dim, tile.dim), (tile.head_values, head_dim_v, tile.dim_v)):
            held = [dim for part in head.parts for dim in range(part.begin, part.begin + part.width)]
            assert held == list(range(head.dims)) and dims <= head.dims <= width
        # With blocks of 128 queries, each warpgroup computes dq of 64 of them; otherwise each computes some dims.
        computed = tile.dq_widths[:1] if tile.block_m == 128 else tile.dq_widths
        assert sum(computed) == tile.keys.dims and tile.dq_widths[0] == 64
        assert all(width % DQ_BOX[1] == 0 for width in tile.dq_widths)


def test_float32_is_multiplied_as_float32() -> None:
    """A card would round its factors to tf32, of which the interpreter knows nothing."""
    for dtype, precision in ((torch.float32, "ieee"), (BF16, "tf32")):
        assert attention_shape(1, (64, 64), dtype).precision == precision
        assert features(GEOMETRY, dtype, False).precision == precision


def test_tokens_of_a_block_lie_within_what_a_kernel_counts() -> None:
    """A block of 256 tokens; other tensors are copied."""
    for apart, copied in ((2**23 - 8, False), (2**23, True)):
        far = torch.empty_strided((3, 2, 8), (apart, 8, 1), device="meta")
        assert (readable(far)[0] is not far) is copied
