"""FlashAttention's training kernels under Triton's interpreter against float64, with tiles that cut small sequences."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trunkattn import PrefixTree
from trunkattn.planner.work_list import UNLIMITED
from trunkattn.training.backward import backward
from trunkattn.training.forward import forward
from trunkattn.training.sequences import Sequences
from trunkattn.training.spec import FlashTile, fitting_tile, shared_bytes

from ..attention.cases import fraction
from ..gpu.guarded_loads import guarded_loads
from .any_case import any_case
from .training_cases import FEATURES, TABLE, TREES, Results, TrainingCase, tree_case

pytestmark = pytest.mark.slow

WIDE, TALL, SQUARE = FlashTile(16, 32, 4, 2), FlashTile(32, 16, 4, 2), FlashTile(16, 16, 4, 2)
# No bfloat16: the interpreter multiplies bit patterns of bfloat16 tiles as if they were integers.


def run(case: TrainingCase, tile: FlashTile, deterministic: bool, inputs: Results | None = None) -> Results:
    """inputs: those of the case, unless others are given."""
    q, k, v, dout, dlse = inputs or case.inputs
    sequences = case.sequences
    tiles = dict.fromkeys(("keys", "queries", "one_pass"), tile)
    dlse = dlse.transpose(-1, -2)
    with guarded_loads():
        out, lse = forward(q, k, v, sequences, tile)
        gradients = backward((dout, dlse), (q, k, v, out, lse), sequences, deterministic, tiles)
    return out, lse.transpose(-1, -2), *gradients


@pytest.mark.parametrize("number", range(len(TABLE)))
@pytest.mark.parametrize("deterministic", [True, False])
def test_outputs_and_gradients_are_as_accurate_as_plain_pytorch(number: int, deterministic: bool) -> None:
    case, tile = TABLE[number], (WIDE, TALL, SQUARE)[(number + deterministic) % 3]
    results = run(case, tile, deterministic)
    case.assert_accurate(results)
    if case.packed:
        case.assert_padding_is_zero(results)


@pytest.mark.parametrize("number", range(len(FEATURES)))
def test_windows_caps_sinks_and_narrow_values_are_as_accurate_as_plain_pytorch(number: int) -> None:
    case = FEATURES[number]
    results = run(case, (WIDE, TALL, SQUARE)[number % 3], bool(number % 2))
    case.assert_accurate(results)
    if case.packed:
        case.assert_padding_is_zero(results)


@pytest.mark.parametrize("causal", [True, False])
def test_edges_of_a_window_may_just_reach_a_block(causal: bool) -> None:
    """With each number of keys another bound of the blocks that are read, or that need no mask, is at its edge."""
    lengths = ((32, 81), (32, 86), (32, 89), (32, 94), (64, 71), (64, 74))
    case = TrainingCase(lengths, True, causal, (1, 1), 16, sliding_window=40)
    case.assert_accurate(run(case, SQUARE, deterministic=True))


@pytest.mark.parametrize(("lengths", "window"), [((31, 24, 40), 18), ((17, 24, 40), 32), ((16, 47, 20), None)])
def test_edges_of_a_tree_may_just_reach_a_block(lengths: tuple[int, ...], window: int | None) -> None:
    """Of a trunk and two branches: the window's, or the last query of a block is the first of the second branch."""
    case = tree_case(PrefixTree.from_segments((-1, 0, 0), lengths), heads=(1, 1), sliding_window=window)
    case.assert_accurate(run(case, SQUARE, deterministic=True))


def test_a_window_is_no_wider_than_what_it_could_hide() -> None:
    """Else places plus or minus the window would not fit 32 bits on a card. 112 is the next multiple of 16."""
    for window, within in ((None, UNLIMITED), (7, 7), (103, 103), (112, 112), (113, 112), (UNLIMITED, 112)):
        assert Sequences(False, 1.0, sliding_window=window).window_within(103) == within


@pytest.mark.parametrize("number", range(len(TREES)))
def test_trees_are_as_accurate_as_plain_pytorch(number: int) -> None:
    TREES[number].assert_accurate(run(TREES[number], (WIDE, TALL, SQUARE)[number % 3], bool(number % 2)))


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("window", [None, 9])
def test_a_sequence_of_nan_stays_by_itself(window: int | None, deterministic: bool) -> None:
    case = TrainingCase(((21, 33), (17, 17), (5, 40)), True, True, (2, 1), 16, sliding_window=window)
    own = slice(21, 38), slice(33, 50)  # queries and keys of the sequence between the others
    sides = (0, 1, 1, 0, 0)
    dirty = tuple(tensor.clone() for tensor in case.inputs)
    for tensor, side in zip(dirty, sides, strict=True):
        tensor[own[side]] = math.nan
    expected, found = run(case, SQUARE, deterministic), run(case, SQUARE, deterministic, dirty)
    for clean, other, side in zip(expected[:5], found, (0, 0, 0, 1, 1), strict=False):
        clean[own[side]] = other[own[side]] = 0
        assert torch.equal(clean, other)


@pytest.mark.parametrize(("lengths", "window"), [((20, 32), None), ((20, 32), 9), ((32, 20), None)])
@pytest.mark.parametrize("deterministic", [True, False])
def test_the_next_sequence_of_a_batch_is_not_read(
    lengths: tuple[int, int], window: int | None, deterministic: bool
) -> None:
    """Blocks that all have their tokens are read without a bound, and the next sequence lies behind the last one."""
    case = TrainingCase((lengths, lengths), False, True, (1, 1), 16, sliding_window=window)
    dirty = tuple(tensor.clone() for tensor in case.inputs)
    for tensor in dirty:
        tensor[1] = math.nan
    expected, found = run(case, SQUARE, deterministic), run(case, SQUARE, deterministic, dirty)
    assert all(torch.equal(clean[0], other[0]) for clean, other in zip(expected[:5], found, strict=False))


@pytest.mark.parametrize(
    ("lengths", "packed", "heads", "dim", "apart"),
    [
        (((129, 129),), False, (1, 1), 1, 1 << 24),
        (((560, 0), (0, 560), (20, 40)), True, (1, 1), 0, 1 << 22),
        (((17, 17),) * 3, False, (1, 1), 0, 1 << 30),
        (((17, 17),), False, (3, 3), 2, 1 << 30),
        (((17, 17),), False, (3, 1), 2, 1 << 30),
    ],
    ids=["tokens", "packed tokens", "sequences", "heads", "heads of a group"],
)
@pytest.mark.parametrize("deterministic", [True, False])
def test_places_farther_apart_than_32_bits_count(
    lengths: tuple[tuple[int, int], ...],
    packed: bool,
    heads: tuple[int, int],
    dim: int,
    apart: int,
    deterministic: bool,
) -> None:
    """Memory that nothing is written to is only promised, and takes no room."""
    case, tile = TrainingCase(lengths, packed, True, heads, 16, dtype=torch.float16), FlashTile(256, 256, 4, 2)
    q, k, v, dout, dlse = case.inputs
    expected = run(case, tile, deterministic)
    for changed in range(3):
        tensors = [q, k, v]
        near = tensors[changed].contiguous()
        strides = *near.stride()[:dim], apart, *near.stride()[dim + 1 :]
        size = (near.shape[dim] - 1) * apart + near.numel()
        tensors[changed] = torch.empty(size, dtype=torch.float16).as_strided(near.shape, strides).copy_(near)
        found = run(case, tile, deterministic, (*tensors, dout, dlse))
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@settings(max_examples=fraction(4))
@given(
    case=any_case(40, (torch.float32, torch.float16)),
    tile=st.sampled_from([WIDE, TALL, SQUARE]),
    deterministic=st.booleans(),
)
@pytest.mark.property
def test_any_case_is_as_accurate_as_plain_pytorch(case: TrainingCase, tile: FlashTile, deterministic: bool) -> None:
    results = run(case, tile, deterministic)
    case.assert_accurate(results)
    if case.packed:
        case.assert_padding_is_zero(results)


@pytest.mark.parametrize("case", [TREES[0], FEATURES[-1]])
def test_deterministic_gradients_have_the_same_bits(case: TrainingCase) -> None:
    first, second = (run(case, SQUARE, True) for _ in range(2))
    assert all(torch.equal(a.nan_to_num(0), b.nan_to_num(0)) for a, b in zip(first, second, strict=True))


def test_keys_that_no_query_sees_are_not_read() -> None:
    """Three answers of one tile behind a prompt of one: what another answer reads of a NaN in the first stays out of
    its outputs, and its query gradients, only if the tile is left out."""
    case = TREES[-1]
    q, k, v, dout, dlse = case.inputs
    k, v = k.clone(), v.clone()
    k[32:64], v[32:64] = math.nan, math.nan
    tile = FlashTile(32, 32, 4, 2)
    out, lse = forward(q, k, v, case.sequences, tile)
    tiles = dict.fromkeys(("keys", "queries", "one_pass"), tile)
    rest = torch.cat([torch.arange(32), torch.arange(64, 128)])
    assert out[rest].isfinite().all() and out[32:64].isnan().all()
    lse, out = lse.nan_to_num(0.0), out.nan_to_num(0.0)
    for deterministic in (True, False):
        dq, *_ = backward((dout, dlse.T), (q, k, v, out, lse), case.sequences, deterministic, tiles)
        assert dq[rest].isfinite().all()


@pytest.mark.parametrize("tile", [WIDE, TALL])
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_queries_that_see_nothing_have_output_and_gradient_0(
    tile: FlashTile, deterministic: bool, packed: bool
) -> None:
    """Of 40 causal queries over 7 keys the first 33; among them a whole tile."""
    case = TrainingCase(((40, 7),), packed, True, (2, 1), 16)
    results = run(case, tile, deterministic)[:5]
    out, lse, dq, dk, dv = (tensor.reshape(-1, *tensor.shape[-1:]) for tensor in results)
    assert torch.equal(out[:66], torch.zeros(66, 16)) and torch.equal(dq[:66], torch.zeros(66, 16))
    assert (lse[:33] == -math.inf).all() and lse[33:].isfinite().all()
    assert dk.isfinite().all() and dv.isfinite().all() and (out[66:] != 0).all()


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_gradient_that_is_nan_where_nothing_is_seen_stays_there(deterministic: bool) -> None:
    q, k, v, dout, dlse = TrainingCase(((5, 2),), False, True, (2, 1), 16).inputs
    sequences = Sequences(True, 0.3)
    out, lse = forward(q, k, v, sequences, SQUARE)
    dlse = dlse.transpose(-1, -2).masked_fill(lse == -math.inf, math.nan)
    tiles = dict.fromkeys(("keys", "queries", "one_pass"), SQUARE)
    gradients = backward((dout, dlse), (q, k, v, out, lse), sequences, deterministic, tiles)
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_gradient_that_is_nan_where_nothing_is_seen_reaches_no_sink(dtype: torch.dtype) -> None:
    inputs = TrainingCase(((5, 2),), False, True, (2, 1), 16).inputs
    q, k, v, dout = (tensor.to(dtype) for tensor in inputs[:4])
    sequences = Sequences(True, 0.3, sinks=torch.tensor([0.5, -1.0]))
    out, lse = forward(q, k, v, sequences, SQUARE)
    tiles = dict.fromkeys(("keys", "queries", "one_pass"), SQUARE)
    expected, found = (
        backward((dout.masked_fill(out == 0, value), None), (q, k, v, out, lse), sequences, False, tiles)[3]
        for value in (0.0, math.nan)
    )
    assert torch.equal(expected, found) and expected.all() and (out[0, :3] == 0).all()


@pytest.mark.parametrize("far", ["q", "k"])
def test_heads_may_lie_more_than_2_to_the_31_elements_apart(far: str) -> None:
    """Most of the memory between them is never touched, so that it costs nothing."""
    heads, stride = 3, 2**30
    near = {name: torch.randn(1, 8, heads, 16).half() for name in ("q", "k", "v", "dout")}
    apart = torch.empty(heads * stride, dtype=torch.float16).as_strided((1, 8, heads, 16), (0, 16, stride, 1))
    apart.copy_(near[far])
    sequences = Sequences(True, 0.25)
    results = []
    for tensors in (near, near | {far: apart}):
        q, k, v = (tensors[name] for name in "qkv")
        out, lse = forward(q, k, v, sequences, SQUARE)
        for deterministic in (True, False):
            tiles = dict.fromkeys(("keys", "queries", "one_pass"), SQUARE)
            gradients = ((near["dout"], torch.zeros_like(lse)), (q, k, v, out, lse))
            results.append((out, lse, *backward(*gradients, sequences, deterministic, tiles)))
    for mine, other in zip(results[:2], results[2:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")  # of weights that are masked then
def test_logits_far_apart_do_not_overflow() -> None:
    case = TrainingCase(((20, 40),), False, True, (2, 1), 16)
    case.inputs[0].mul_(100)
    for deterministic in (True, False):
        results = run(case, SQUARE, deterministic)
        assert all(tensor.isfinite().all() for tensor in results)
        case.assert_accurate(results)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")
@pytest.mark.parametrize("deterministic", [True, False])
def test_keys_beyond_the_last_add_nothing_where_all_logits_are_low(deterministic: bool) -> None:
    """A key of zeros would have a weight of e^400."""
    case = TrainingCase(((20, 21),), False, False, (2, 1), 16)
    case.inputs[0].fill_(10)
    case.inputs[1].copy_(-10 + 0.1 * torch.randn(case.inputs[1].shape))
    results = run(case, WIDE, deterministic)
    assert (results[1] < -350).all()
    case.assert_accurate(results)


@pytest.mark.parametrize("wrong", [[-9, 30, 70], [0, 90, 60], [60, 20, 0], [5, 5, 5], [2**31 - 1, -(2**31), 40]])
def test_sums_that_make_no_sense_are_never_followed_outside(wrong: list[int]) -> None:
    """NaN lies around 60 tokens: what reads there gives NaN, and nothing may be written there."""
    q, k, v, dout = (torch.full((180, 1, 16), math.nan) for _ in range(4))
    for tensor in (q, k, v, dout):
        tensor[60:120] = torch.randn(60, 1, 16)
    sums = torch.tensor(wrong, dtype=torch.int32)
    sequences = Sequences(True, 0.25, sums, sums.clone())
    own = tuple(tensor[60:120] for tensor in (q, k, v))
    out, lse = forward(*own, sequences, SQUARE)
    tiles = dict.fromkeys(("keys", "queries", "one_pass"), SQUARE)
    for deterministic in (True, False):
        saved = (*own, out, lse)
        found = backward((dout[60:120], torch.zeros_like(lse)), saved, sequences, deterministic, tiles)
        assert not any(tensor.isnan().any() for tensor in (out, *found[:3]))


def test_a_batch_may_have_no_sequences() -> None:
    case = TrainingCase((), True, True, (2, 1), 16, padding=40)
    sums = torch.zeros(1, dtype=torch.int32)
    q, k, v, dout, dlse = case.inputs
    out, lse = forward(q, k, v, Sequences(True, 0.25, sums, sums), SQUARE)
    for deterministic in (True, False):
        found = backward((dout, dlse.T), (q, k, v, out, lse), Sequences(True, 0.25, sums, sums), deterministic)
        case.assert_padding_is_zero((out, lse.T, *found[:3]))


def test_the_preferred_tiles_of_the_table_compute() -> None:
    """They are far larger than the sequence: one program does all."""
    case = TrainingCase(((20, 24),), False, True, (2, 1), 32)
    q, k, v, dout, dlse = case.inputs
    sequences = Sequences(True, case.scale)
    out, lse = forward(q, k, v, sequences)
    for deterministic in (True, False):
        found = backward((dout, dlse.transpose(1, 2)), (q, k, v, out, lse), sequences, deterministic)
        case.assert_accurate((out, lse.transpose(1, 2), *found[:3]))


@pytest.mark.parametrize("tensor_memory", [False, True])
@pytest.mark.parametrize("limit", [227 << 10, 163 << 10, 99 << 10])  # an sm_90 or sm_100, an sm_80, an sm_86 or sm_120
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("head_dim", [1, 32, 64, 80, 96, 128, 192, 256])
def test_every_card_has_a_tile_for_every_head_dim(
    head_dim: int, itemsize: int, limit: int, tensor_memory: bool
) -> None:
    for name in ("forward", "forward_tree", "keys", "queries", "one_pass"):
        tile = fitting_tile(name, head_dim, itemsize, limit, tensor_memory)
        assert shared_bytes(name, tile, head_dim, itemsize) <= limit, name
        assert all(size >= 16 and size & (size - 1) == 0 for size in tile[:2])


def test_a_contiguous_copy_gives_the_same_bits() -> None:
    case = TrainingCase(((20, 40),), False, True, (4, 2), 20)
    strided = run(case, SQUARE, True)
    copy = replace(case)
    copy.__dict__["inputs"] = tuple(tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in case.inputs)
    assert all(torch.equal(a, b) for a, b in zip(strided, run(copy, SQUARE, True), strict=True))
