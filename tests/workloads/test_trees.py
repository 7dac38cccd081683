"""Tree strings and the block tables they stand for."""

import numpy as np
import pytest

from benchmarks.workloads import PAT_TREES, TreeLevels, parse_tree, tree_batch


@pytest.mark.parametrize("text", PAT_TREES)
def test_a_tree_is_written_as_it_was_read(text: str) -> None:
    assert str(parse_tree(text)) == text


@pytest.mark.parametrize("text", PAT_TREES)
@pytest.mark.parametrize("page_size", [16, 32])
def test_every_token_is_stored_once(text: str, page_size: int) -> None:
    tree = parse_tree(text)
    batch = tree_batch(tree, page_size)
    assert batch.block_table.dtype == batch.seq_lens.dtype == np.int32
    assert batch.block_table.shape == (tree.num_requests, tree.seq_len // page_size)
    assert np.all(batch.seq_lens == tree.seq_len)
    assert np.all(batch.query_lens == 1)
    assert len(np.unique(batch.block_table)) == batch.num_pages == tree.unique_tokens // page_size


@pytest.mark.parametrize("text", PAT_TREES)
def test_levels_share_as_the_tree_says(text: str) -> None:
    tree = parse_tree(text)
    table = tree_batch(tree, 16).block_table
    column = 0
    for nodes, tokens in zip(tree.nodes, tree.tokens, strict=True):
        pages, sharers = np.unique(table[:, column], return_counts=True)
        assert len(pages) == nodes
        assert sharers.max() - sharers.min() <= 1, "children are spread evenly"
        column += tokens // 16


def test_a_small_tree_by_hand() -> None:
    batch = tree_batch(parse_tree("1,2,5_4,2,3"), page_size=2)
    assert batch.block_table.tolist() == [
        [0, 1, 2, 4, 5],
        [0, 1, 2, 6, 7],
        [0, 1, 2, 8, 9],
        [0, 1, 3, 10, 11],
        [0, 1, 3, 12, 13],
    ]
    assert batch.seq_lens.tolist() == [9] * 5, "the last level may end inside a page"
    assert batch.num_pages == 14
    assert batch.query_start_loc.tolist() == [0, 1, 2, 3, 4, 5]


def test_shuffled_rows_are_the_same_rows_in_another_order() -> None:
    tree = parse_tree("1,4,16_32,32,32")
    plain = tree_batch(tree, 16).block_table.tolist()
    shuffled = tree_batch(tree, 16, row_seed=3).block_table.tolist()
    assert shuffled != plain
    assert sorted(shuffled) == plain
    assert shuffled == tree_batch(tree, 16, row_seed=3).block_table.tolist()


def test_shuffled_pages_are_renamed_one_to_one() -> None:
    tree = parse_tree("1,4,16_32,32,32")
    plain, shuffled = tree_batch(tree, 16), tree_batch(tree, 16, page_seed=3)
    assert not np.array_equal(plain.block_table, shuffled.block_table)
    renaming = set(zip(plain.block_table.flat, shuffled.block_table.flat, strict=True))
    assert len(renaming) == plain.num_pages
    assert {int(new) for _, new in renaming} == set(range(plain.num_pages))


@pytest.mark.parametrize(
    "text", ["", "1,4", "1,4_32", "1_32,32", "1,x_32,32", "4,1_32,32", "0_32", "1,4_0,32", "1_2_3", "-1_32"]
)
def test_text_that_is_no_tree_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"tree.*: expected"):
        parse_tree(text)


def test_a_shared_level_that_cannot_fill_pages_is_refused() -> None:
    tree = TreeLevels(nodes=(1, 4), tokens=(40, 32))
    with pytest.raises(ValueError, match=r"page_size=16: expected a divisor .* 1,4_40,32"):
        tree_batch(tree, 16)
    with pytest.raises(ValueError, match="page_size=0: expected an integer of at least 1"):
        tree_batch(tree, 0)
