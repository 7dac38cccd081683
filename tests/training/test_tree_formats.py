"""Trees as other frameworks describe them, there and back, and what is wrong in words."""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given

from trunkattn import PrefixTree
from trunkattn.training import tree_formats as formats

from .tree_cases import trees

ONE_LEVEL = PrefixTree.from_segments([-1, 0, 0, -1, 3], [3, 2, 1, 4, 2])
DEEP = PrefixTree.from_segments([-1, 0, 1, 0], [2, 1, 1, 2])


def same(found: PrefixTree, expected: PrefixTree) -> None:
    assert torch.equal(found.subtree_end, expected.subtree_end)
    assert torch.equal(found.pack().position_ids, expected.pack().position_ids)


@given(tree=trees(4))
@pytest.mark.property
def test_a_tree_comes_back_from_every_format(tree: PrefixTree) -> None:
    same(formats.from_paths(*formats.to_paths(tree)), tree)
    same(formats.from_subtree_ranges(formats.to_subtree_ranges(tree)), tree)
    same(formats.from_tree_segments(formats.to_tree_segments(tree)), tree)


@given(tree=trees(4))
@pytest.mark.property
def test_group_ids_say_what_arts_mask_reads_in_them(tree: PrefixTree) -> None:
    """A token sees what comes before it in its own group and in its group's parent, and nothing above that."""
    if any(parent >= 0 and tree.parents[parent] >= 0 for parent in tree.parents):
        with pytest.raises(ValueError, match="lies below a suffix: expected one level, as group_ids has"):
            formats.to_group_ids(tree)
        return
    groups, above = formats.to_group_ids(tree)
    same(formats.from_group_ids(groups, above), tree)
    tokens = torch.arange(tree.num_tokens)
    earlier = tokens <= tokens[:, None]
    sees = earlier & ((groups[:, None] == groups) | (above[:, None] == groups))
    assert torch.equal(sees, earlier & (tokens[:, None] < tree.subtree_end))


def test_paths_of_a_small_tree_are_as_by_hand() -> None:
    found = [tensor.tolist() for tensor in formats.to_paths(DEEP)]
    assert found == [[0, 1, 0, 1, 2, 0, 1, 2, 3, 0, 1, 4, 5], [0, 2, 3, 4, 6], [0, 2, 5, 9, 13]]


def test_paths_may_have_as_many_tokens_as_int32_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "MAX_INT32", 13)
    assert len(formats.to_paths(DEEP)[0]) == 13
    monkeypatch.setattr(formats, "MAX_INT32", 12)
    with pytest.raises(ValueError, match="tree has paths of 13 tokens together: expected at most 12"):
        formats.to_paths(DEEP)


@pytest.mark.parametrize(
    ("tensors", "dtypes"),
    [
        (formats.to_paths(DEEP), [torch.int64, torch.int32, torch.int32]),
        ([formats.to_subtree_ranges(DEEP)], [torch.int32]),
        (formats.to_group_ids(ONE_LEVEL), [torch.int64] * 2),
        (formats.to_tree_segments(DEEP), [torch.int32] * 4 + [torch.int64]),
        (ONE_LEVEL.pack()[1:], [torch.int64, torch.int64, torch.float32]),
        (ONE_LEVEL.pack([[1] * len(own) for own in ONE_LEVEL.sequence_indices()])[3:], [torch.float32]),
    ],
    ids=["TRL", "AReaL", "ART", "Megatron", "packed", "packed with weights"],
)
def test_tensors_have_the_dtypes_that_are_said(tensors: Sequence[torch.Tensor], dtypes: list[torch.dtype]) -> None:
    assert [tensor.dtype for tensor in tensors] == dtypes


def test_groups_may_have_padding() -> None:
    assert formats.to_group_info(ONE_LEVEL) == [[3, 2, 1], [4, 2]]
    same(formats.from_group_info([[3, 2, 1], [4, 2]]), ONE_LEVEL)
    same(formats.from_group_info([torch.tensor([3, 2, 1]), torch.tensor([4, 2])]), ONE_LEVEL)  # type: ignore[list-item]
    groups, parents = formats.to_group_ids(ONE_LEVEL)
    assert groups.tolist() == [0, 0, 0, 1, 1, 2, 3, 3, 3, 3, 4, 4] and parents.tolist() == [0] * 6 + [3] * 6
    padding = torch.full((3,), -1)
    same(formats.from_group_ids(torch.cat([groups, padding]), torch.cat([parents, padding])), ONE_LEVEL)
    same(formats.from_group_ids([5, 5, 9], [-1, -1, 5]), PrefixTree.from_segments([-1, 0], [2, 1]))


def test_an_answer_without_tokens_is_a_sequence_of_its_prompt() -> None:
    """verl packs nothing for it, and its row of log-probabilities stays in its place."""
    groups = [[3, 0, 2, 0], [2, 0], [1, 4]]
    tree = formats.from_group_info(groups)
    assert (tree.parents, tree.lengths, tree.num_tokens) == ((-1, 0, -1, -1, 3), (3, 2, 2, 1, 4), 12)
    found = [own.tolist() for own in tree.sequence_indices()]
    assert found == [[0, 1, 2], [0, 1, 2, 3, 4], [0, 1, 2], [5, 6], [7, 8, 9, 10, 11]]
    assert [own.tolist() for own in tree.unpack(torch.arange(12))] == found
    assert tree.pack().weights.tolist() == [0, 3, 3, 1, 1, 0, 1, 0, 1, 1, 1, 1]
    assert formats.to_group_info(tree) == groups
    assert formats.to_group_info(PrefixTree.from_segments([-1], [2])) == [[2, 0]]


def test_group_info_is_in_the_order_of_packed_tokens() -> None:
    """Equal answers are packed once, and answers of another group may come between those of one."""
    tree = PrefixTree.from_sequences([[1, 2], [7, 8, 9], [1, 3, 3], [1, 2], [7, 5]])
    assert formats.to_group_info(tree) == [[1, 1, 2], [1, 2, 1]]
    same(formats.from_group_info([[1, 1, 2], [1, 2, 1]]), tree)


def segments(**changes: Any) -> formats.TreeSegments:
    return formats.to_tree_segments(DEEP)._replace(**changes)


BAD: tuple[tuple[str, Callable[[], Any]], ...] = (
    ("cu_seqlens_k has 2 entries: expected 3", lambda: formats.from_paths([0, 1], [0, 1, 2], [0, 2])),
    (
        "cu_seqlens_k ends with 3: expected 2, the length of kv_index",
        lambda: formats.from_paths([0, 1], [0, 2], [0, 3]),
    ),
    ("cu_seqlens_k ends with 1: expected 2, the", lambda: formats.from_paths([0, 1], [0, 1], [0, 1])),
    ("cu_seqlens_k[2]=3: expected a path that", lambda: formats.from_paths([0, 1, 2], [0, 2, 4], [0, 2, 3])),
    ("cu_seqlens_k[1]=1: expected a path that holds its segment", lambda: formats.from_paths([0], [0, 2], [0, 1])),
    (
        "cu_seqlens_k[1]=2: expected 1, as nothing is above the first segment",
        lambda: formats.from_paths([0, 1], [0, 1], [0, 2]),
    ),
    (  # the paths end to end are right, and begin elsewhere
        "cu_seqlens_k[2]=4: expected 5, the end of the segment's path",
        lambda: formats.from_paths([0, 1, 0, 1, 2, 0, 1, 3], [0, 2, 3, 4], [0, 2, 4, 8]),
    ),
    ("kv_index holds other tokens", lambda: formats.from_paths([0, 1, 1, 2], [0, 2, 3], [0, 2, 4])),
    (  # int32 would count them from the negative end
        "tree has paths of 2281701409 tokens together: expected at most 2147483647, which cu_seqlens_k counts in int32",
        lambda: formats.to_paths(PrefixTree.from_segments([-1, *[0] * 33], [1 << 26, *[1] * 33])),
    ),
    ("group_info[1] has 1 lengths: expected a prefix's", lambda: formats.from_group_info([[1, 1], [2]])),
    ("group_info[0][0]=0: expected an integer of at least 1", lambda: formats.from_group_info([[0, 1]])),
    ("group_info[0][1]=-1: expected an integer of at least 0", lambda: formats.from_group_info([[1, -1]])),
    ("group_info is None: expected a list of groups", lambda: formats.from_group_info(None)),  # type: ignore
    ("group_info[0] is an int: expected a list of integers", lambda: formats.from_group_info([3])),  # type: ignore
    ("group_ids[2]=0 comes again: expected each group in", lambda: formats.from_group_ids([0, 1, 0], [0, 0, 0])),
    ("segments is None: expected TreeSegments", lambda: formats.from_tree_segments(None)),  # type: ignore
    ("segment 2 of tree lies below a suffix", lambda: formats.to_group_info(DEEP)),
    *(
        ("tree is a list: expected a trunkattn.PrefixTree", functools.partial(convert, [[1], [2]]))  # type: ignore
        for convert in (
            *(formats.to_paths, formats.to_group_info, formats.to_subtree_ranges, formats.to_group_ids),
            formats.to_tree_segments,
        )
    ),
    ("ranges is a list: expected a torch.Tensor", lambda: formats.from_subtree_ranges([[0, 1]])),  # type: ignore
    (
        "ranges is nested: expected a dense tensor",
        lambda: formats.from_subtree_ranges(torch.nested.nested_tensor([[0, 2], [1, 2]], layout=torch.jagged)),
    ),
    ("ranges has shape (2,): expected (tokens, 2)", lambda: formats.from_subtree_ranges(torch.zeros(2))),
    ("ranges has shape (2, 3): expected", lambda: formats.from_subtree_ranges(torch.tensor([[0, 2, 2], [1, 2, 2]]))),
    (
        "ranges[1, 0]=2: expected 1, as tokens are in depth-first pre-order; pack them",
        lambda: formats.from_subtree_ranges(torch.tensor([[0, 3], [2, 3], [1, 3]])),
    ),
    ("parent_ids has 1 entries: expected 2", lambda: formats.from_group_ids([0, 0], [0])),
    ("group_ids has padding, -1, before tokens", lambda: formats.from_group_ids([-1, 0], [-1, 0])),
    ("group_ids has padding, -1, before tokens", lambda: formats.from_group_ids([-1, -1], [-1, -1])),
    ("group_ids[3]=1 comes again: expected each group in", lambda: formats.from_group_ids([0, 0, 1, 1], [0, 0, 0, 1])),
    ("group_ids has padding, -1, before tokens", lambda: formats.from_group_ids([0, -1, 1], [0, -1, 0])),
    ("parent_ids[0]=0: expected its own group, 7", lambda: formats.from_group_ids([7], [0])),
    ("parent_ids[0]=-2: expected its own group, 7", lambda: formats.from_group_ids([7], [-2])),
    ("parent_ids[0]=3: expected its own group, 7", lambda: formats.from_group_ids([7], [3])),
    ("parent_ids[1]=5: expected its own group, 1, or 0, the last", lambda: formats.from_group_ids([0, 1], [0, 5])),
    ("parent_ids[2]=1: expected its own group, 2, or 0", lambda: formats.from_group_ids([0, 1, 2], [0, 0, 1])),
    ("parent_ids[3]=0: expected its own group, 3, or 2", lambda: formats.from_group_ids([0, 1, 2, 3], [0, 0, 2, 0])),
    (
        "kv_index holds other tokens than the segments above",
        lambda: formats.from_paths([0, 0, 1, 2, 0, 3], [0, 1, 2, 3, 4], [0, 1, 3, 4, 6]),
    ),
    (
        "ranges[:, 1] is no subtree_end: subtree_end[1]=1: expected 2 to 3",
        lambda: formats.from_subtree_ranges(torch.tensor([[0, 3], [1, 1], [2, 3]])),
    ),
    ("depths[2]=1: expected 2, the number of", lambda: formats.from_tree_segments(segments(depths=[0, 1, 1, 1]))),
    ("cu_seqlens_q begins with 1 and has 2", lambda: formats.from_paths([0, 1], [1, 3], [0, 2])),
    ("cu_seqlens_k begins with 0 and has 1", lambda: formats.from_paths([0, 1], [0, 2], [0])),
    ("cu_seqlens_q[2]=2: expected more than the 2", lambda: formats.from_paths([0, 1, 0, 1], [0, 2, 2], [0, 2, 4])),
    (
        f"cu_seqlens_q[1]={-(2**31)}: expected more than the 0",
        lambda: formats.from_paths([0, 1], [0, -(2**31)], [0, 2]),
    ),
    (
        "kv_index[3]=-1: expected 0 to 1, a token before",
        lambda: formats.from_paths([0, 1, 0, -1, 2], [0, 2, 3], [0, 2, 5]),
    ),
    (
        "kv_index[3]=2: expected 0 to 1, a token before",
        lambda: formats.from_paths([0, 1, 0, 2, 2], [0, 2, 3], [0, 2, 5]),
    ),
    ("group_info is empty: expected at least one group", lambda: formats.from_group_info([])),
    (
        "group_info has shape (): expected a list of groups",
        lambda: formats.from_group_info(torch.tensor(3)),  # type: ignore[arg-type]
    ),
    (
        "ranges[:, 0] is a Tensor without integers",
        lambda: formats.from_subtree_ranges(torch.zeros(2, 2, dtype=torch.int64, device="meta")),
    ),
    ("ranges[:, 0] is empty: expected at least", lambda: formats.from_subtree_ranges(torch.zeros(0, 2).int())),
    ("starts[2]=4: expected 3", lambda: formats.from_tree_segments(segments(starts=[0, 2, 4, 4]))),
    ("position_ids[3]=0: expected 3", lambda: formats.from_tree_segments(segments(position_ids=[0, 1, 2, 0, 2, 3]))),
)


@pytest.mark.parametrize(("message", "call"), BAD, ids=[message for message, _ in BAD])
def test_bad_input_is_refused(message: str, call: Callable[[], Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        call()
