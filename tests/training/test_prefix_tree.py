"""`PrefixTree`, and `flash_attention` over one on a CPU against every sequence by itself."""

import math
import re
from collections import Counter
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import forward_ad

from trunkattn import PrefixTree, flash_attention
from trunkattn.training import cpu_blocks
from trunkattn.training import tree_formats as formats
from trunkattn.training.cpu_blocks import CpuSequence
from trunkattn.training.prefix_tree import PackedTree
from trunkattn.training.sequences import Sequences, table_length

from ..attention.cases import fraction
from .training_cases import BF16, F16, F32
from .tree_cases import inputs, parents_by_steps, textbook, trees, with_gradients

F64 = torch.float64
ATTENTION: Callable[..., Any] = flash_attention  # its result is one tensor, or two
# Three levels, an only child, a second root, and tiles of which no row sees a key.
PARENTS, LENGTHS = (-1, 0, 1, 1, 0, -1, 5), (300, 40, 270, 33, 290, 3, 2)
SUMS = torch.tensor([0, 4], dtype=torch.int32)
DEEP = PrefixTree.from_segments(PARENTS, LENGTHS)


def assert_exact(tree: PrefixTree, heads: tuple[int, int], dtype: torch.dtype) -> None:
    """The error is at most twice that of the formula in the same dtype, plus rounding of the largest value."""
    given = inputs(tree, heads, dtype)
    found = with_gradients(lambda *leaves: ATTENTION(*leaves, tree=tree, return_lse=True), given)
    exact, plain = textbook(tree, F64, given), textbook(tree, dtype, given)
    if dtype.itemsize == 2:
        plain[1] = textbook(tree, F32, given)[1]
    for name, ours, right, theirs in zip(("out", "lse", "dq", "dk", "dv"), found, exact, plain, strict=True):
        expected = dtype if name != "lse" else torch.promote_types(dtype, F32)
        assert ours.dtype == expected, name
        # The formula in float64 has no error against itself, so its rounding stands here, too.
        rounding = (64 if dtype == F64 else 8) * torch.finfo(expected).eps
        allowed = 2 * (theirs - right).abs().max() + rounding * max(1.0, float(right.abs().max()))
        assert (ours - right).abs().max() <= allowed, name


@pytest.mark.parametrize("dtype", [F64, F32, F16, BF16])
def test_outputs_and_gradients_are_exact_over_several_blocks(dtype: torch.dtype) -> None:
    assert_exact(DEEP, (4, 2), dtype)


@settings(max_examples=fraction(4))
@given(tree=trees(9), heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]), dtype=st.sampled_from([F64, F32, BF16]))
@pytest.mark.property
def test_any_tree_is_exact(tree: PrefixTree, heads: tuple[int, int], dtype: torch.dtype) -> None:
    block, cpu_blocks._CPU_BLOCK = cpu_blocks._CPU_BLOCK, 4
    try:
        assert_exact(tree, heads, dtype)
    finally:
        cpu_blocks._CPU_BLOCK = block


@settings(max_examples=fraction(4))
@given(tree=trees(5))
@pytest.mark.property
def test_a_tree_equals_repeated_sequences(tree: PrefixTree) -> None:
    """Outputs, and gradients of a loss in which a shared token counts once for each sequence."""

    def repeated(*leaves: torch.Tensor) -> list[torch.Tensor]:
        parts = zip(*(tree.unpack(tensor) for tensor in leaves), strict=True)
        return [ATTENTION(*(part[None] for part in own), True)[0] for own in parts]

    def packed(*leaves: torch.Tensor) -> list[torch.Tensor]:
        return tree.unpack(ATTENTION(*leaves, tree=tree))

    results = []
    for attend in (repeated, packed):
        leaves = [tensor.detach().requires_grad_() for tensor in inputs(tree, (2, 1), F64)[:3]]
        outs = attend(*leaves)
        results.append([*outs, *torch.autograd.grad(sum(out.square().sum() for out in outs), leaves)])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_blocks_that_no_row_sees_are_left_out() -> None:
    """A trunk of one block and seven branches of one block: each branch computes the trunk's block and its own."""
    size = cpu_blocks._CPU_BLOCK
    tree = PrefixTree.from_segments([-1, *[0] * 7], [size] * 8)
    q = torch.zeros(1, 8 * size, 2)
    given = Sequences(True, 1.0, tree=tree.tables(q.device))
    tiles = list(CpuSequence(q, q, q, 1, given).tiles())
    assert [(rows.start // size, keys.start // size) for rows, keys, _ in tiles] == [
        (0, 0),
        *((branch, block) for branch in range(1, 8) for block in (0, branch)),
    ]


@settings(max_examples=fraction(2))
@given(st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=8))
@pytest.mark.property
def test_sequences_come_back(sequences: list[list[int]]) -> None:
    ended = [[*sequence, 9] for sequence in sequences]  # none is a prefix of another; some are equal
    tree = PrefixTree.from_sequences(ended)
    packed = tree.pack()
    assert packed.tokens is not None
    assert [part.tolist() for part in tree.unpack(packed.tokens)] == ended
    assert [part.tolist() for part in tree.unpack(packed.position_ids)] == [list(range(len(own))) for own in ended]
    assert tree.num_tokens == len({tuple(own[: end + 1]) for own in ended for end in range(len(own))})
    again = PrefixTree.from_subtree_end(tree.subtree_end, tokens=tree.tokens, position_ids=packed.position_ids)
    assert torch.equal(again.subtree_end, tree.subtree_end)
    same = PrefixTree.from_segments(tree.parents, tree.lengths, starts=tree.starts, position_ids=packed.position_ids)
    assert torch.equal(same.subtree_end, tree.subtree_end)


@pytest.mark.parametrize("own_weights", [False, True])
def test_the_packed_loss_is_the_loss_of_all_sequences(own_weights: bool) -> None:
    """With answers that begin alike, and two that are equal."""
    prompt, answers = [1, 2, 3], [[4, 5], [4, 6], [7], [4, 5]]
    tree = PrefixTree.from_prompt(torch.tensor(prompt), answers)
    torch.manual_seed(0)
    lengths = [len(prompt) + len(answer) for answer in answers]
    weights = [torch.rand(length) if own_weights else torch.ones(length) for length in lengths]
    packed = tree.pack(weights if own_weights else None)
    logits = torch.randn(tree.num_tokens, 10, dtype=F64, requires_grad=True)
    assert packed.tokens is not None
    predicted = packed.predictors >= 0
    entropy = torch.nn.functional.cross_entropy
    losses = entropy(logits[packed.predictors[predicted]], packed.tokens[predicted], reduction="none")
    found = (losses * packed.weights[predicted]).sum()
    expected = torch.zeros((), dtype=F64)
    for own, answer, weight in zip(tree.unpack(logits), answers, weights, strict=True):
        tokens = torch.tensor([*prompt, *answer])
        expected = expected + (entropy(own[:-1], tokens[1:], reduction="none") * weight[1:]).sum()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    gradients = [torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("make", [list, tuple, np.array, torch.tensor], ids=["list", "tuple", "NumPy", "torch"])
def test_segments_may_be_arrays(make: Callable[[list[int]], Any]) -> None:
    tree = PrefixTree.from_segments(make([-1, 0, 0]), make([2, 1, 3]), starts=make([0, 2, 3]))
    assert (tree.parents, tree.lengths, tree.starts) == ((-1, 0, 0), (2, 1, 3), (0, 2, 3))
    assert {*map(type, tree.parents + tree.lengths + tree.starts)} == {int}


def test_a_deep_tree_takes_no_longer_than_its_tokens() -> None:
    """Each of 2,000 sequences goes a token further along one path: a look at each node of each path takes minutes."""
    tree = PrefixTree.from_sequences([np.array([1] * depth + [2]) for depth in range(2000)])
    assert (tree.num_levels, tree.num_tokens, tree.num_sequences) == (1999, 3999, 2000)
    assert tree.pack().weights.sum() == sum(range(2000))
    back = formats.from_paths(*formats.to_paths(tree))
    assert back.parents == tree.parents and back.lengths == tree.lengths


def test_a_tree_may_have_as_many_tokens_as_its_tables_count() -> None:
    assert PrefixTree.from_segments([-1, 0], [2**31 - 261, 1]).num_tokens == 2**31 - 260


def test_the_largest_root_is_counted_with_all_below_it() -> None:
    assert PrefixTree.from_segments(PARENTS, LENGTHS).work.largest == 300 + 40 + 270 + 33 + 290


def segments(*parents: int, **options: Any) -> PrefixTree:
    return PrefixTree.from_segments(parents, [2] * len(parents), **options)


def pack_of_a_tangent() -> None:
    with forward_ad.dual_level():
        segments(-1).pack([forward_ad.make_dual(torch.ones(2), torch.ones(2))])


def pack_with(weight: float) -> PackedTree:
    return segments(-1, 0, 0).pack([[1, 1, 1, 1], torch.tensor([1, 1, weight, math.inf], dtype=F64)])


BAD: tuple[tuple[str, Callable[[], Any]], ...] = (
    ("sequences is empty: expected at least one", lambda: PrefixTree.from_sequences([])),
    ("sequences[1] is empty: expected at least one token", lambda: PrefixTree.from_sequences([[1], []])),
    ("sequences has shape (): expected a list of seq", lambda: PrefixTree.from_sequences(np.array(5))),
    ("weights has shape (): expected a list of lists or", lambda: segments(-1).pack(torch.tensor(1.0))),  # type: ignore
    ("weights[0] has layout torch.sparse_coo", lambda: segments(-1).pack([torch.ones(2).to_sparse()])),
    (
        "weights[0] is a Tensor without memory of its own: expected a plain tensor, outside transformations of",
        lambda: torch.vmap(lambda weight: segments(-1).pack([weight]).weights)(torch.ones(3, 2)),
    ),
    ("weights[0] is on meta: expected a tensor that", lambda: segments(-1).pack([torch.ones(2, device="meta")])),
    ("values has layout torch.sparse_coo: expected a", lambda: segments(-1).unpack(torch.ones(2).to_sparse())),
    ("sequences[0] has dtype timedelta64[s]", lambda: PrefixTree.from_sequences([np.array([1], "timedelta64[s]")])),
    (
        "lengths sum to 2147483389: expected at most 2147483388 tokens",
        lambda: PrefixTree.from_segments([-1, 0], [2**31 - 260, 1]),
    ),
    ("sequences[0] has dtype float64: expected integers", lambda: PrefixTree.from_sequences([[1.5]])),
    ("sequences[0] has dtype bool: expected integers", lambda: PrefixTree.from_sequences([[True, False]])),
    ("sequences is a bytes: expected a list of", lambda: PrefixTree.from_sequences(b"ab")),  # type: ignore[arg-type]
    ("sequences is an int: expected a list of sequences", lambda: PrefixTree.from_sequences(5)),  # type: ignore[arg-type]
    ("sequences is a str: expected a list of sequences", lambda: PrefixTree.from_sequences("ab")),  # type: ignore
    ("sequences[0]=1: expected token ids, a list or", lambda: PrefixTree.from_sequences([1, 2])),  # type: ignore
    ("prompt='hi': expected token ids, a list or", lambda: PrefixTree.from_prompt("hi", [[1]])),  # type: ignore
    ("answers[0]=3: expected token ids, a list or", lambda: PrefixTree.from_prompt([1], [3, 4])),  # type: ignore
    ("sequences[0] is a list without integers of one", lambda: PrefixTree.from_sequences([[1, [2]]])),  # type: ignore
    (
        "sequences[0] hides entries behind a mask: expected all of them; use sequences[0].compressed()",
        lambda: PrefixTree.from_sequences([np.ma.array([1, 0], mask=[False, True])]),
    ),
    ("sequences[0] is a Tensor without", lambda: PrefixTree.from_sequences([torch.zeros(2, device="meta").long()])),
    (
        f"sequences[0] holds {1 << 63}: expected integers of at most {(1 << 63) - 1}",
        lambda: PrefixTree.from_sequences([np.array([1, 1 << 63], np.uint64)]),
    ),
    ("sequences[1] has shape (2, 1): expected one", lambda: PrefixTree.from_sequences([[1], [[2], [3]]])),  # type: ignore
    ("answers is None: expected a list of", lambda: PrefixTree.from_prompt([1], None)),  # type: ignore[arg-type]
    ("parents is an int: expected a list of integers", lambda: PrefixTree.from_segments(3, [1])),  # type: ignore
    ("parents has a cycle, 0 -> 1 -> 2 -> 3 -> 4 -> 5 -> … -> 0: expected", lambda: segments(*range(1, 9000), 0)),
    ("parents[0]=1: expected -1 or a segment on the path", lambda: segments(*range(1, 9000), -1)),
    ("weights[0] is a list: expected a list or a torch.Tensor of real", lambda: segments(-1).pack([["a", "b"]])),  # type: ignore
    ("weights[0] is a list: expected a list or a", lambda: segments(-1).pack([[1, [1]]])),  # type: ignore
    ("weights[0] is None: expected a list or a", lambda: segments(-1).pack([None])),  # type: ignore
    ("weights[0] has shape (): expected (2,), the", lambda: segments(-1).pack([1.0])),  # type: ignore
    (
        "weights[0] hides entries behind a mask: expected all of them; use weights[0].filled(0)",
        lambda: segments(-1).pack([np.ma.array([1.0, 0.5], mask=[False, True])]),
    ),
    (
        "weights[0] has dtype torch.complex64: expected a",
        lambda: segments(-1).pack([torch.ones(2).to(torch.complex64)]),
    ),
    (
        "weights[0] requires grad: expected no gradient, for packing records none",
        lambda: segments(-1).pack([torch.ones(2, requires_grad=True)]),
    ),
    ("weights[0] is a dual tensor of forward-mode differentiation: expected no tangent, for", pack_of_a_tangent),
    ("weights[1][2]=nan: expected a finite number, at most 3.403e+38 in size; 0", lambda: pack_with(math.nan)),
    ("weights[1][2]=inf: expected a finite number, at", lambda: pack_with(math.inf)),
    ("weights[1][2]=-1e+300: expected a finite number, at", lambda: pack_with(-1e300)),
    ("weights of token 1 sum to -6e+38: expected a finite", lambda: segments(-1, 0, 0).pack([[0, -3e38, 0, 0]] * 2)),
    ("weights is a float: expected a list of lists or", lambda: segments(-1).pack(1.0)),  # type: ignore[arg-type]
    ("sequences[0] is a prefix of sequences[1]", lambda: PrefixTree.from_sequences([[1, 2], [1, 2, 3]])),
    ("sequences[1] is a prefix of sequences[0]", lambda: PrefixTree.from_sequences([[1, 2, 3], [1, 2]])),
    ("prompt is empty: expected at least one token", lambda: PrefixTree.from_prompt([], [[1]])),
    ("answers[1] is empty: expected at least one token", lambda: PrefixTree.from_prompt([1], [[1], []])),
    ("answers[2] is a prefix of answers[0]", lambda: PrefixTree.from_prompt([1], [[4, 5, 6], [4, 7], [4, 5]])),
    ("parents is empty: expected at least one segment", lambda: PrefixTree.from_segments([], [])),
    ("parents is None: expected a list of integers", lambda: PrefixTree.from_segments(None, [1])),  # type: ignore[arg-type]
    ("lengths has 1 entries: expected 2, one for each", lambda: PrefixTree.from_segments([-1, 0], [1])),
    ("lengths[1]=0: expected an integer of at least 1", lambda: PrefixTree.from_segments([-1, 0], [1, 0])),
    ("lengths[1]=1.5: expected an integer of at least 1", lambda: PrefixTree.from_segments([-1, 0], [1, 1.5])),  # type: ignore
    ("lengths[0]=True: expected an integer of at least 1", lambda: PrefixTree.from_segments([-1], [True])),
    ("parents[1]=2: expected an integer from -1 to 1", lambda: segments(-1, 2)),
    ("parents[1]=-2: expected an integer from -1 to 1", lambda: segments(-1, -2)),
    ("parents has a cycle, 1 -> 2 -> 1: expected that every path ends at a root", lambda: segments(-1, 2, 1)),
    ("parents has a cycle, 0 -> 0: expected", lambda: segments(0)),
    ("parents[0]=1: expected -1 or a segment on the path to the one before", lambda: segments(1, -1)),
    ("parents[3]=1: expected -1 or a segment on the path to the one before", lambda: segments(-1, 0, 0, 1)),
    ("starts has 3 entries: expected 2", lambda: segments(-1, 0, starts=[0, 2, 4])),
    ("starts[1]=3: expected 2, the sum of the lengths before", lambda: segments(-1, 0, starts=[0, 3])),
    ("tokens has 3 entries: expected 4, the sum of lengths", lambda: segments(-1, 0, tokens=[1, 2, 3])),
    ("position_ids[4]=4: expected 2, the number of the", lambda: segments(-1, 0, 0, position_ids=[0, 1, 2, 3, 4, 5])),
    ("subtree_end[1]=1: expected 2 to 3, the end of", lambda: PrefixTree.from_subtree_end([3, 1, 3])),
    ("subtree_end[1]=1: expected 2 to 2, the end of", lambda: PrefixTree.from_subtree_end([1, 1])),
    ("subtree_end[1]=3: expected 2 to 2, the end of", lambda: PrefixTree.from_subtree_end([2, 3, 3])),
    ("weights has 1 entries: expected 2, one for each", lambda: segments(-1, 0, 0).pack([torch.ones(4)])),
    (
        "weights[0] has shape (3,): expected (4,), the length of sequence 0",
        lambda: segments(-1, 0).pack([torch.ones(3)]),
    ),
    ("parents has a cycle, 0 -> 1 -> 2 -> 3 -> 4 -> 5 -> 6 -> 0: expected", lambda: segments(*range(1, 7), 0)),
    ("parents has a cycle, 0 -> 1 -> 2 -> 3 -> 4 -> 5 -> … -> 0: expected", lambda: segments(*range(1, 8), 0)),
    ("tokens has 2 entries: expected 3", lambda: PrefixTree.from_subtree_end([3, 2, 3], tokens=[5, 6])),
    ("position_ids[2]=2: expected 1", lambda: PrefixTree.from_subtree_end([3, 2, 3], position_ids=[0, 1, 2])),
    ("values is a list: expected a torch.Tensor", lambda: segments(-1).unpack([1, 2])),  # type: ignore[arg-type]
    ("values has shape (): expected (2, ...)", lambda: segments(-1).unpack(torch.tensor(1))),
    ("values has shape (3,): expected (4, ...)", lambda: segments(-1, 0).unpack(torch.zeros(3))),
    ("tree is a list: expected a trunkattn.PrefixTree", lambda: attend(tree=[1])),
    ("segments is a list: make a tree by a class method, such", lambda: PrefixTree([[1], [2]])),  # type: ignore
    ("starts has dtype <U1: expected integers", lambda: segments(-1, starts=["0"])),
    ("q has 5 tokens: expected the tree's 4", lambda: attend(tokens=5)),
    ("tree and cu_seqlens_q are both given: expected one", lambda: attend(cu_seqlens_q=SUMS, cu_seqlens_k=SUMS)),
    ("q has shape (1, 4, 2, 8): expected (tokens, heads, head_dim), as tree is given", lambda: attend(lead=(1,))),
)


def attend(tokens: int = 4, lead: tuple[int, ...] = (), **options: Any) -> Any:
    q = torch.zeros(*lead, tokens, 2, 8)
    return ATTENTION(q, q, q, **{"tree": segments(-1, 0)} | options)


@pytest.mark.parametrize(("message", "call"), BAD, ids=[message for message, _ in BAD])
def test_bad_input_is_refused(message: str, call: Callable[[], Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        call()


def test_the_most_tokens_that_an_error_names_are_taken() -> None:
    tree = PrefixTree.from_segments([-1, 0], [2**31 - 261, 1])
    assert tree.num_tokens == 2147483388 and table_length(tree.num_tokens) == 2147483644 < 2**31


def test_numpy_integers_are_lengths() -> None:
    """200 + 100 is 44 in their own eight bits."""
    for lengths in (np.array([200, 100], np.uint8), [np.uint8(200), np.uint8(100)]):
        tree = PrefixTree.from_segments(np.array([-1, 0]), lengths)
        assert (tree.num_tokens, tree.lengths) == (300, (200, 100)) and type(tree.lengths[0]) is int
    q = torch.randn(300, 2, 8)
    assert torch.equal(flash_attention(q, q, q, tree=tree), flash_attention(q[None], q[None], q[None], True)[0])


def test_what_a_tree_returns_may_be_written_to() -> None:
    """Labels are often made in place of the tokens."""
    tree = PrefixTree.from_prompt([5, 6], [[7], [8]])
    for tensor in (*tree.pack(), tree.subtree_end, *formats.to_tree_segments(tree), *tree.sequence_indices()):
        tensor.fill_(-100)
    assert tree.subtree_end.tolist() == [4, 4, 3, 4] and tree.num_levels == 2
    assert [tensor.tolist() for tensor in tree.pack()] == [[5, 6, 7, 8], [0, 1, 2, 2], [-1, 0, 1, 1], [0, 2, 1, 1]]


def test_a_tree_that_an_evaluation_has_used_trains() -> None:
    """What inference mode makes no backward pass takes, and the tree keeps its tables."""
    with torch.inference_mode():
        made = PrefixTree.from_segments([-1, 0, 0], [4, 2, 3])
    used = PrefixTree.from_segments([-1, 0, 0], [4, 2, 3])
    with torch.inference_mode():
        flash_attention(*(torch.randn(9, 2, 8) for _ in range(3)), tree=used)
    for tree in (made, used):
        q, k, v = (torch.randn(9, 2, 8, requires_grad=True) for _ in range(3))
        flash_attention(q, k, v, tree=tree).sum().backward()
        assert all(tensor.grad is not None for tensor in (q, k, v))


def parent_tokens(parents: tuple[int, ...], lengths: list[int]) -> list[int]:
    """The token before each token on its path, -1 for the first of a root."""
    bounds = [0, *accumulate(lengths)]
    first = [bounds[parent + 1] - 1 if parent >= 0 else -1 for parent in parents]
    return [
        first[segment] if place == 0 else bounds[segment] + place - 1
        for segment, length in enumerate(lengths)
        for place in range(length)
    ]


def path_to(token: int, above: list[int]) -> list[int]:
    """The ancestors of a token from the root, and itself."""
    return [*path_to(above[token], above), token] if token >= 0 else []


@settings(max_examples=fraction(2))
@given(
    parents=st.one_of(
        st.lists(st.integers(0, 3), min_size=1, max_size=9).map(parents_by_steps),
        st.lists(st.integers(0, 9), min_size=1, max_size=7).map(
            lambda drawn: tuple(number % (segment + 1) - 1 for segment, number in enumerate(drawn))
        ),
    ),
    data=st.data(),
)
@pytest.mark.property
def test_tables_keep_their_definition(parents: tuple[int, ...], data: st.DataObject) -> None:
    """What a tree knows of its segments, from the path of each token; segments in another order are refused."""
    count = len(parents)
    lengths = data.draw(st.lists(st.integers(1, 4), min_size=count, max_size=count))
    above = parent_tokens(parents, lengths)
    paths = [path_to(token, above) for token in range(len(above))]
    of_segment = [path_to(segment, list(parents)) for segment in range(count)]
    if any(parent >= 0 and parent not in of_segment[s - 1] for s, parent in enumerate(parents)):
        with pytest.raises(ValueError, match=r"expected -1 or a segment on the path"):
            PrefixTree.from_segments(parents, lengths)
        return
    tree = PrefixTree.from_segments(parents, lengths)
    leaves = [segment for segment in range(count) if segment not in parents]
    bounds = [0, *accumulate(lengths)]
    sequences = [paths[bounds[leaf + 1] - 1] for leaf in leaves]
    assert [own.tolist() for own in tree.sequence_indices()] == sequences
    assert (tree.starts, tree.leaves) == (tuple(bounds[:-1]), tuple(leaves))
    assert tree.num_levels == max(map(len, of_segment))
    of_roots = Counter(path[0] for path in paths)
    assert tree.work == (sum(map(len, paths)), max(of_roots.values()))
    ends = [1 + max(t for t, path in enumerate(paths) if token in path) for token in range(len(paths))]
    tables = tree.tables(torch.device("cpu"))
    assert tree.subtree_end.tolist() == ends
    assert tables.depths[: len(paths)].tolist() == [len(path) - 1 for path in paths]
    assert tables.segment_of.tolist() == [s for s, length in enumerate(lengths) for _ in range(length)]
    rows = zip(bounds, bounds[1:], parents, (len(path) - 1 for path in of_segment), strict=False)
    assert tables.segments.tolist() == [list(row) for row in rows]
    packed = tree.pack()
    assert packed.position_ids.tolist() == [len(path) - 1 for path in paths]
    assert packed.predictors.tolist() == above
    copies = [sum(token in own for own in sequences) for token in range(len(paths))]
    assert packed.weights.tolist() == [0 if above[token] < 0 else copies[token] for token in range(len(paths))]
    assert all(map(torch.equal, tree.pack([torch.ones(len(own)) for own in sequences])[1:], packed[1:]))


@settings(max_examples=fraction(2))
@given(ends=st.lists(st.integers(0, 8), min_size=1, max_size=7))
@pytest.mark.property
def test_ends_of_subtrees_make_a_tree_or_are_refused(ends: list[int]) -> None:
    """Ranges that are nested are a tree, and the first token whose range is not nested in those before is named."""
    limits = [min([end for end in ends[:token] if end > token], default=len(ends)) for token in range(len(ends))]
    wrong = [token for token, (end, limit) in enumerate(zip(ends, limits, strict=True)) if not token < end <= limit]
    if wrong:
        message = f"subtree_end[{wrong[0]}]={ends[wrong[0]]}: expected {wrong[0] + 1} to {limits[wrong[0]]}, the end of"
        with pytest.raises(ValueError, match=re.escape(message)):
            PrefixTree.from_subtree_end(ends)
        return
    tree = PrefixTree.from_subtree_end(ends)
    assert tree.subtree_end.tolist() == ends
    children = [sum(tree.parents[other] == segment for other in range(len(tree.starts))) for segment in (-1, *range(7))]
    assert 1 not in children[1:]  # an only child would continue its parent's segment
