"""Prefix trees written as text, such as `1,4,256_32,256,32`, as decode batches (PAT §8.3)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trunkattn.workloads.batch import PagedBatch, pages_for, require_positive

# The trees of PAT's kernel study: 18 with shared prefixes, then two with none.
PAT_TREES = (
    "1,10_4096,416",
    "1,256_256,32",
    "1,1024_2048,32",
    "1,2,64_1024,256,256",
    "1,4,256_32,256,32",
    "1,8,512_32,512,256",
    "1,8,512_32,2048,256",
    "1,8,512_512,512,256",
    "1,4,8,256_32,256,256,32",
    "1,4,16,512_1024,256,128,32",
    "1,4,16,64,256,1024_256,32,256,64,32,256",
    "1,16,32,64,128,1024_256,128,64,32,32,32",
    "1,16,32,64,256,1024_256,128,64,32,32,32",
    "1,8,16,32,64,128,1024_256,128,64,32,32,32,32",
    "1,8,16,32,64,256,1024_256,128,64,32,32,32,32",
    "2,8,16,256_256,256,32,32",
    "4,16,256,512_512,32,128,32",
    "8,16,32,256_512,512,256,32",
    "256_1024",
    "256_4096",
)


@dataclass(frozen=True)
class PrefixTree:
    """A forest given level by level, trunks first; every node of the last level is one request.

    Attributes:
        nodes: number of nodes of each level, never fewer than on the level above.
        tokens: tokens that each node of the level adds.
    """

    nodes: tuple[int, ...]
    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.nodes or len(self.nodes) != len(self.tokens):
            raise ValueError(
                f"tree must give one token count per level, got {len(self.nodes)} levels of nodes "
                f"and {len(self.tokens)} of tokens"
            )
        if min(self.nodes + self.tokens) < 1:
            raise ValueError(f"tree must have node and token counts of at least 1, got {self}")
        if list(self.nodes) != sorted(self.nodes):
            raise ValueError(f"tree must not have fewer nodes on a level than on the one above, got {self}")

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
        """Tokens stored once each: what an attention step must read at least."""
        return sum(nodes * tokens for nodes, tokens in zip(self.nodes, self.tokens, strict=True))


def parse_tree(text: str) -> PrefixTree:
    """Reads `nodes per level _ tokens per level`, as in `1,4,256_32,256,32`.

    Raises:
        ValueError: if `text` does not have this form or the counts do not describe a tree.
    """
    halves = text.split("_")
    try:
        nodes, tokens = (tuple(int(number) for number in half.split(",")) for half in halves)
    except ValueError:
        raise ValueError(f"tree must look like '1,4,256_32,256,32', got {text!r}") from None
    return PrefixTree(nodes, tokens)


def tree_batch(
    tree: PrefixTree, page_size: int, *, row_seed: int | None = None, page_seed: int | None = None
) -> PagedBatch:
    """A decode batch with one query token per request of the tree.

    Children go to parents in order and as evenly as possible: where the numbers do not divide, some parents have one
    child more. Lengths are never rounded: a shared level must fill whole pages, since only full pages can be shared;
    the last level may end inside a page.

    Args:
        tree: the levels.
        page_size: tokens per page.
        row_seed: None leaves the requests in tree order, a number shuffles the rows.
        page_seed: None numbers the pages level by level from 0, a number shuffles them.

    Raises:
        ValueError: if a shared level does not fill whole pages of `page_size` tokens.
    """
    require_positive(page_size=page_size)
    if any(tokens % page_size for tokens in tree.tokens[:-1]):
        raise ValueError(f"page_size must divide the tokens of every shared level of {tree}, got {page_size}")

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
