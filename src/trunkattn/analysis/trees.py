"""Decode batches of prefix trees, which are written as text such as `1,4,256_32,256,32`.

Source: PAT's kernel study, https://arxiv.org/abs/2511.22333, §8.3.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trunkattn.analysis.batch import PagedBatch, pages_for, require_positive

# Bounds of what a block table of a decode step names: larger ones are of no engine, and take minutes to plan.
MOST_REQUESTS: Final = 1 << 17
MOST_TOKENS: Final = 1 << 30


@dataclass(frozen=True)
class TreeLevels:
    """A forest by levels, trunks first. Every node of the last level is one request.

    Attributes:
        nodes: number of nodes of each level, at least that of the level above.
        tokens: tokens that each node of the level adds.
    """

    nodes: tuple[int, ...]
    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.nodes or len(self.nodes) != len(self.tokens):
            raise ValueError(
                f"the tree has {len(self.nodes)} levels of nodes and {len(self.tokens)} of tokens: expected one token "
                f"count per level"
            )
        if min(self.nodes + self.tokens) < 1:
            raise ValueError(f"tree {self}: expected node and token counts of at least 1")
        if list(self.nodes) != sorted(self.nodes):
            raise ValueError(f"tree {self}: expected at least as many nodes on a level as on the level above")
        read = self.num_requests * self.seq_len
        if self.num_requests > MOST_REQUESTS or read > MOST_TOKENS:
            raise ValueError(
                f"tree {self}: {self.num_requests} requests read {read} tokens; expected at most {MOST_REQUESTS} that "
                f"read {MOST_TOKENS}"
            )

    def __str__(self) -> str:
        return f"{','.join(map(str, self.nodes))}_{','.join(map(str, self.tokens))}"

    @property
    def num_requests(self) -> int:
        return self.nodes[-1]

    @property
    def seq_len(self) -> int:
        """KV length of every request, in tokens."""
        return sum(self.tokens)

    @property
    def unique_tokens(self) -> int:
        """Tokens of all nodes: the least that an attention step must read."""
        return sum(nodes * tokens for nodes, tokens in zip(self.nodes, self.tokens, strict=True))


def parse_tree(text: str) -> TreeLevels:
    """Reads `nodes per level _ tokens per level`, as in `1,4,256_32,256,32`.

    Raises:
        ValueError: `text` does not have this form, or the counts do not describe a tree.
    """
    halves = text.split("_")
    try:
        nodes, tokens = (tuple(int(number) for number in half.split(",")) for half in halves)
    except ValueError:
        raise ValueError(f"tree {text!r}: expected a tree such as '1,4,256_32,256,32'") from None
    return TreeLevels(nodes, tokens)


def tree_batch(
    tree: TreeLevels, page_size: int, *, row_seed: int | None = None, page_seed: int | None = None
) -> PagedBatch:
    """A decode batch with one query token per request of the tree.

    The children are spread over the parents in order and as evenly as possible, so that some parents can have one child
    more than others. Lengths are never rounded: a shared level must fill whole pages, because only full pages can be
    shared, and the last level may end within a page.

    Args:
        tree: the levels.
        page_size: tokens per page.
        row_seed: None: the requests are in tree order; a number shuffles the rows.
        page_seed: None: the pages are numbered level by level from 0; a number shuffles them.

    Raises:
        ValueError: a shared level does not fill whole pages of `page_size` tokens.
    """
    require_positive(page_size=page_size)
    if any(tokens % page_size for tokens in tree.tokens[:-1]):
        raise ValueError(f"page_size={page_size}: expected a divisor of the tokens of every shared level of {tree}")

    block_table: NDArray[np.int64] = np.empty((1, 0), dtype=np.int64)  # one row above the first level, without pages
    num_pages = 0
    for nodes, tokens in zip(tree.nodes, tree.tokens, strict=True):
        parents = np.arange(nodes) * len(block_table) // nodes
        own_pages = num_pages + np.arange(nodes * pages_for(tokens, page_size)).reshape(nodes, -1)
        block_table = np.hstack([block_table[parents], own_pages])
        num_pages += own_pages.size
    if page_seed is not None:
        block_table = np.random.default_rng(page_seed).permutation(num_pages)[block_table]
    if row_seed is not None:
        block_table = np.random.default_rng(row_seed).permutation(block_table, axis=0)
    return PagedBatch(
        block_table=np.ascontiguousarray(block_table, dtype=np.int32),
        seq_lens=np.full(tree.num_requests, tree.seq_len, dtype=np.int32),
        query_lens=np.ones(tree.num_requests, dtype=np.int32),
        page_size=page_size,
        num_pages=num_pages,
    )
