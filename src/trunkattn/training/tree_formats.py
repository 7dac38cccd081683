"""Prefix trees as other frameworks describe them, to and from `PrefixTree`."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch

from trunkattn.numerics import MAX_INT32
from trunkattn.training.prefix_tree import PrefixTree, check_is_tree
from trunkattn.training.token_trie import Segments, Tokens, check_equal, check_list, integer_list, token_array
from trunkattn.training.tree_segments import path_lengths
from trunkattn.validate import check_dense, check_int, described


def from_paths(kv_index: Tokens, cu_seqlens_q: Tokens, cu_seqlens_k: Tokens) -> PrefixTree:
    """The tree of TRL's `tree_kv_index`, `tree_cu_seqlens_q` and `tree_cu_seqlens_k`.

    kv_index: the tokens of the path from a root to each segment, the segment included, end to end. cu_seqlens_q: where
    each segment begins among the tokens, and the end. cu_seqlens_k: where its path begins in kv_index, and the end.

    Raises:
        ValueError, TypeError: naming the argument, its value and what was expected.
    """
    index = token_array("kv_index", kv_index)
    starts, ends = _rising("cu_seqlens_q", cu_seqlens_q), _rising("cu_seqlens_k", cu_seqlens_k)
    if len(starts) != len(ends):
        raise ValueError(f"cu_seqlens_k has {len(ends)} entries: expected {len(starts)}, as cu_seqlens_q has")
    if ends[-1] != len(index):
        raise ValueError(f"cu_seqlens_k ends with {ends[-1]}: expected {len(index)}, the length of kv_index")
    lengths, above = np.diff(starts), np.diff(ends) - np.diff(starts)
    parents = []
    for segment, (rest, first) in enumerate(zip(above.tolist(), ends.tolist(), strict=False)):
        if rest < 0 or (rest and not segment):
            of_first = f"{lengths[0]}, as nothing is above the first segment"
            expected = of_first if segment == 0 < rest else "a path that holds its segment"
            raise ValueError(f"cu_seqlens_k[{segment + 1}]={ends[segment + 1]}: expected {expected}")
        last = int(index[first + rest - 1]) if rest else -1
        if rest and not 0 <= last < starts[segment]:
            raise ValueError(
                f"kv_index[{first + rest - 1}]={last}: expected 0 to {starts[segment] - 1}, a token before its segment"
            )
        parents.append(int(np.searchsorted(starts, last, "right")) - 1)
    other = "kv_index holds other tokens than the segments above each one: expected their paths in order"
    try:
        tree = PrefixTree.from_segments(parents, lengths.tolist())
    except ValueError as error:  # segments that are not in depth-first pre-order
        raise ValueError(other) from error
    paths, _, bounds = to_paths(tree)
    if not np.array_equal(paths, index):
        raise ValueError(other)
    check_equal("cu_seqlens_k", ends, bounds.numpy(), "the end of the segment's path")
    return tree


def _rising(name: str, sums: Tokens) -> np.ndarray:
    """Where each segment or path begins, and the end: from 0 on, and always rising."""
    array = token_array(name, sums)
    if array[0] != 0 or len(array) < 2:
        raise ValueError(f"{name} begins with {array[0]} and has {len(array)} entries: expected 0, then each end")
    falls = np.flatnonzero(array[1:] <= array[:-1])
    if len(falls):
        at = int(falls[0])
        raise ValueError(f"{name}[{at + 1}]={array[at + 1]}: expected more than the {array[at]} before it")
    return array


def to_paths(tree: PrefixTree) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """TRL's `tree_kv_index` (int64), `tree_cu_seqlens_q` and `tree_cu_seqlens_k` (int32) of a tree.

    Raises:
        ValueError: the paths have more tokens together than int32 counts.
    """
    check_is_tree(tree)
    ends = [0, *accumulate(path_lengths(tree.parents, tree.lengths))]
    if ends[-1] > MAX_INT32:
        raise ValueError(
            f"tree has paths of {ends[-1]} tokens together: expected at most {MAX_INT32}, which cu_seqlens_k counts in "
            "int32; make several trees"
        )
    paths = [path for _, path in tree.paths(range(len(tree.starts)))]
    starts = np.array([*tree.starts, tree.num_tokens], np.int32)
    return torch.from_numpy(np.concatenate(paths)), torch.from_numpy(starts), torch.from_numpy(np.array(ends, np.int32))


def from_group_info(group_info: Sequence[Sequence[int]]) -> PrefixTree:
    """The forest of verl's `group_info`: for each group the length of its prefix, then those of its suffixes.

    A suffix may be empty, as an answer is of which verl's mask leaves no token. Its sequence is the prefix alone, and
    has its place among the others.

    Raises:
        ValueError, TypeError: a group has no suffix, or a length is no integer, at least 1 for a prefix and 0 for a
            suffix.
    """
    parents: list[int] = []
    lengths: list[int] = []
    leaves: list[int] = []
    groups = check_list("group_info", group_info, "groups")
    if len(groups) == 0:
        raise ValueError("group_info is empty: expected at least one group")
    for number, given in enumerate(groups):
        group = integer_list(f"group_info[{number}]", given)
        if len(group) < 2:
            raise ValueError(f"group_info[{number}] has {len(group)} lengths: expected a prefix's and its suffixes'")
        root = len(parents)
        parents.append(-1)
        lengths.append(check_int(f"group_info[{number}][0]", group[0], 1))
        for place, given_length in enumerate(group[1:], 1):
            length = check_int(f"group_info[{number}][{place}]", given_length, 0)
            if length == 0:
                leaves.append(root)
                continue
            leaves.append(len(parents))
            parents.append(root)
            lengths.append(length)
    return PrefixTree(Segments(parents, lengths, [0, *accumulate(lengths)], leaves, None))


def to_group_info(tree: PrefixTree) -> list[list[int]]:
    """verl's `group_info` of a tree of one level: prefixes, each with its suffixes as they are packed. The suffix of a
    sequence that is a prefix alone is empty.

    Raises:
        ValueError: a segment lies deeper.
    """
    _check_one_level(tree, "group_info")
    roots = [segment for segment, parent in enumerate(tree.parents) if parent < 0]
    groups = {root: [tree.lengths[root]] for root in roots}
    told: set[int] = set()  # equal sequences end at one segment, and suffixes are packed in the order of their first
    for leaf in tree.leaves:
        parent = tree.parents[leaf]
        if parent < 0:
            groups[leaf].append(0)
        elif leaf not in told:
            told.add(leaf)
            groups[parent].append(tree.lengths[leaf])
    return list(groups.values())


def from_subtree_ranges(ranges: torch.Tensor) -> PrefixTree:
    """The tree of AReaL's [tokens, 2]: the number of each token in pre-order, and the end of its subtree.

    Raises:
        ValueError, TypeError: naming the argument, its value and what was expected.
    """
    if not isinstance(ranges, torch.Tensor):
        raise TypeError(f"ranges is {described(ranges)}: expected a torch.Tensor")
    check_dense("ranges", ranges)
    if ranges.dim() != 2 or ranges.shape[1] != 2:
        raise ValueError(f"ranges has shape {tuple(ranges.shape)}: expected (tokens, 2)")
    for token, number in enumerate(token_array("ranges[:, 0]", ranges[:, 0]).tolist()):
        if number != token:
            raise ValueError(
                f"ranges[{token}, 0]={number}: expected {token}, as tokens are in depth-first pre-order; pack them "
                "in the order of ranges[:, 0]"
            )
    try:
        return PrefixTree.from_subtree_end(ranges[:, 1])
    except (TypeError, ValueError) as error:
        raise type(error)(f"ranges[:, 1] is no subtree_end: {error}") from error


def to_subtree_ranges(tree: PrefixTree) -> torch.Tensor:
    """AReaL's [tokens, 2] int32 of a tree."""
    check_is_tree(tree)
    order = torch.arange(tree.num_tokens, dtype=torch.int32, device="cpu")
    return torch.stack([order, tree.subtree_end], 1)


def from_group_ids(group_ids: Tokens, parent_ids: Tokens) -> PrefixTree:
    """The tree of one row of ART's `group_ids` and `parent_ids`: neighbours of one group are a segment. The parent of a
    prompt is itself or -1, and its answers, whose parent it is, come before the next prompt. ART's mask shows a token
    its own group and the parent, so there is no further level. Padding, -1, may be at the end and is no part.

    Raises:
        ValueError, TypeError: naming the argument, its value and what was expected.
    """
    groups, above = token_array("group_ids", group_ids), token_array("parent_ids", parent_ids)
    if len(groups) != len(above):
        raise ValueError(f"parent_ids has {len(above)} entries: expected {len(groups)}, as group_ids has")
    size = int((groups != -1).sum())
    if size == 0 or (groups[:size] == -1).any():
        raise ValueError("group_ids has padding, -1, before tokens: expected tokens, then padding")
    starts = [0, *(np.flatnonzero((np.diff(groups[:size]) != 0) | (np.diff(above[:size]) != 0)) + 1).tolist()]
    parents: list[int] = []
    seen: set[int] = set()
    prompt = root = -1
    for segment, start in enumerate(starts):
        group, parent = int(groups[start]), int(above[start])
        if group in seen:
            raise ValueError(f"group_ids[{start}]={group} comes again: expected each group in one piece, of one parent")
        seen.add(group)
        if parent in (group, -1):
            prompt, root = group, segment
        elif parent != prompt:
            last = "" if root < 0 else f", or {prompt}, the last prompt before it, as each is followed by its answers"
            raise ValueError(f"parent_ids[{start}]={parent}: expected its own group, {group}{last}")
        parents.append(-1 if root == segment else root)
    return PrefixTree.from_segments(parents, np.diff([*starts, size]).tolist())


def to_group_ids(tree: PrefixTree) -> tuple[torch.Tensor, torch.Tensor]:
    """ART's `group_ids` and `parent_ids` of a tree of one level, [tokens] int64 each: groups are numbered as segments
    are.

    Raises:
        ValueError: a segment lies deeper.
    """
    _check_one_level(tree, "group_ids")
    segments = np.arange(len(tree.starts), dtype=np.int64)
    parents = np.where(np.array(tree.parents) < 0, segments, np.array(tree.parents, np.int64))
    return torch.from_numpy(np.repeat(segments, tree.lengths)), torch.from_numpy(np.repeat(parents, tree.lengths))


def _check_one_level(tree: PrefixTree, name: str) -> None:
    """Raises if it is no tree, or a segment lies deeper than below a root. name: what describes no such tree."""
    check_is_tree(tree)
    for segment, parent in enumerate(tree.parents):
        if parent >= 0 and tree.parents[parent] >= 0:
            raise ValueError(f"segment {segment} of tree lies below a suffix: expected one level, as {name} has")


class TreeSegments(NamedTuple):
    """A tree as Megatron takes it: of each segment, in depth-first pre-order, its first token, its length, its parent
    (-1: a root) and its level, int32; position_ids of the tokens, int64."""

    starts: torch.Tensor
    lengths: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    position_ids: torch.Tensor


def from_tree_segments(segments: TreeSegments) -> PrefixTree:
    """The tree of Megatron's segments.

    Raises:
        ValueError, TypeError: naming the argument, its value and what was expected.
    """
    if not isinstance(segments, TreeSegments):
        raise TypeError(f"segments is {described(segments)}: expected TreeSegments")
    columns: dict[str, Any] = {name: token_array(name, getattr(segments, name)).tolist() for name in segments._fields}
    depths = columns.pop("depths")
    tree = PrefixTree.from_segments(columns.pop("parents"), columns.pop("lengths"), **columns)
    check_equal("depths", depths, to_tree_segments(tree).depths.tolist(), "the number of segments above it")
    return tree


def to_tree_segments(tree: PrefixTree) -> TreeSegments:
    """Megatron's segments of a tree."""
    check_is_tree(tree)
    tables = tree.tables(torch.device("cpu"))
    start, end, parent, level = tables.segments.unbind(1)
    depths = tables.depths[: tree.num_tokens].long()
    return TreeSegments(start.clone(), end - start, parent.clone(), level.clone(), depths)
