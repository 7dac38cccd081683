"""The whole method in plain NumPy: block table -> prefix forest -> packs -> work items -> partials -> merge.

    python examples/nano.py

It computes what `trunkattn.BatchAttention` computes under the policies `cascade` and `pat`, and reads the same number
of KV tokens (tests/docs/test_nano.py). It is slow. docs/nano.md walks through it.
"""

import argparse
from dataclasses import dataclass, field

import numpy as np

BLOCK = 64  # keys of a step of the online softmax


# 1. Block table -> prefix forest (PAT §5.1) -------------------------------------------------------------------------


@dataclass
class Node:
    """Tokens [start, end) that exactly `rows` share. A row's private rest is a node of only that row."""

    start: int
    end: int
    rows: list[int]
    parent: "Node | None" = None
    begins_after: "Node | None" = None  # see `pack`; None: at the sequence's first token
    children: list["Node"] = field(default_factory=list)


def prefix_forest(block_table: np.ndarray, seq_lens: np.ndarray, rows: list[int], page_size: int) -> list[Node]:
    """All nodes, parents first. Two rows share a page if their tables agree in every column up to it.

    Only full pages are shared: the last page of a sequence will still grow.
    """
    full = seq_lens // page_size  # full pages of each row
    nodes: list[Node] = []

    def grow(rows: list[int], column: int, parent: Node | None) -> None:
        """Nodes of rows that agree in all columns before `column`."""
        groups: dict[int, list[int]] = {}
        for row in rows:
            if full[row] > column:
                groups.setdefault(int(block_table[row, column]), []).append(row)
            else:
                add(column, int(seq_lens[row]), [row], parent)
        for group in groups.values():
            if len(group) == 1:
                add(column, int(seq_lens[group[0]]), group, parent)
                continue
            end = column + 1
            while all(full[row] > end for row in group) and len({int(block_table[row, end]) for row in group}) == 1:
                end += 1
            grow(group, end, add(column, end * page_size, group, parent))

    def add(column: int, end: int, rows: list[int], parent: Node | None) -> Node:
        node = Node(column * page_size, end, rows, parent)
        nodes.append(node)
        if parent:
            parent.children.append(node)
        return node

    grow(rows, 0, None)
    return nodes


# 2. Forest -> packs (PAT §5.1, Algorithm 1) -------------------------------------------------------------------------


@dataclass
class Pack:
    """KV tokens [start, end), read once for the query tokens of `rows`."""

    start: int
    end: int
    rows: list[int]


def pack(nodes: list[Node], query_lens: np.ndarray, policy: str) -> list[Pack]:
    """Which stretches of a path are read together.

    `cascade` reads every node by itself. `pat` lets a child read its parent's tokens again where that costs less than
    the partial results of a cut: with s queries below the child and L tokens carried so far, if 4·s >= L.
    """
    for node in nodes:  # parents first
        above = node.parent
        if above is None:
            continue
        carried = above.end - (above.begins_after.end if above.begins_after else 0)
        queries = sum(int(query_lens[row]) for row in node.rows)
        merged = policy == "pat" and 4 * queries >= carried
        node.begins_after = above.begins_after if merged else above
    leaf_of = {node.rows[0]: node for node in nodes if len(node.rows) == 1 and not node.children}
    packs: dict[int, Pack] = {}
    for row, leaf in leaf_of.items():
        node: Node | None = leaf
        while node is not None:
            above = node.begins_after
            start = above.end if above else 0
            if node.end > start:
                packs.setdefault(id(node), Pack(start, node.end, [])).rows.append(row)
            node = above
    return list(packs.values())


# 3. Packs -> work items (PAT §5.2) ----------------------------------------------------------------------------------


@dataclass
class Item:
    """KV tokens [start, end) of `row`'s pages, read once for a tile of query tokens at these positions."""

    row: int
    start: int
    end: int
    queries: np.ndarray
    positions: np.ndarray


def work_items(
    packs: list[Pack], query_start_loc: np.ndarray, seq_lens: np.ndarray, queries_per_tile: int
) -> list[Item]:
    """Cuts a pack's query tokens into tiles; each tile reads the pack's KV, as far as one of its queries sees it."""
    items = []
    for each in packs:
        spans = [(row, int(query_start_loc[row]), int(query_start_loc[row + 1])) for row in each.rows]
        queries = np.concatenate([np.arange(first, last) for _, first, last in spans])
        positions = np.concatenate([seq_lens[row] - last + np.arange(first, last) for row, first, last in spans])
        for at in range(0, len(queries), queries_per_tile):
            tile = slice(at, at + queries_per_tile)
            end = min(each.end, int(positions[tile].max()) + 1)
            if end > each.start:
                items.append(Item(each.rows[0], each.start, end, queries[tile], positions[tile]))
    return items


# 4. Work item -> partial results: an online softmax over blocks of keys (FlashAttention) ------------------------------


def attend(q: np.ndarray, keys: np.ndarray, values: np.ndarray, visible: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """q [queries, Hkv, G, D], keys and values [tokens, Hkv, D], visible [queries, tokens] -> (out, lse)."""
    row_max = np.full(q.shape[:3], -np.inf)
    row_sum = np.zeros(q.shape[:3])
    acc = np.zeros((*q.shape[:3], values.shape[-1]))
    for at in range(0, len(keys), BLOCK):
        k, v, seen = keys[at : at + BLOCK], values[at : at + BLOCK], visible[:, at : at + BLOCK]
        scores = np.einsum("qhgd,thd->qhgt", q, k) / np.sqrt(q.shape[-1])
        scores = np.where(seen[:, None, None, :], scores, -np.inf)
        new_max = np.maximum(row_max, scores.max(axis=-1))
        shift = np.where(np.isfinite(new_max), new_max, 0.0)  # a row that has seen nothing yet
        p = np.exp(scores - shift[..., None])
        scale = np.exp(row_max - shift)
        row_sum = row_sum * scale + p.sum(axis=-1)
        acc = acc * scale[..., None] + np.einsum("qhgt,thd->qhgd", p, v)
        row_max = new_max
    with np.errstate(divide="ignore"):
        lse = row_max + np.log(row_sum)
    return acc / np.maximum(row_sum, np.finfo(float).tiny)[..., None], lse


# 5. Partials -> output (PAT §7; FlashDecoding) ----------------------------------------------------------------------


def merge(out: np.ndarray, lse: np.ndarray, more: np.ndarray, more_lse: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Attention over two disjoint sets of keys, from the attention over each. lse is the log of the softmax's sum."""
    both, row_max = np.logaddexp(lse, more_lse), np.maximum(lse, more_lse)
    shift = np.where(np.isfinite(row_max), row_max, 0.0)  # the weights sum to 1 whatever the size of lse
    weights = np.exp(lse - shift)[..., None], np.exp(more_lse - shift)[..., None]
    row_sum = np.maximum(weights[0] + weights[1], np.finfo(float).tiny)
    return (weights[0] * out + weights[1] * more) / row_sum, both


def nano_attention(
    q: np.ndarray,
    k_cache: np.ndarray,
    v_cache: np.ndarray,
    block_table: np.ndarray,
    seq_lens: np.ndarray,
    query_lens: np.ndarray,
    policy: str = "pat",
    tile_rows: int = 512,
) -> tuple[np.ndarray, np.ndarray, int]:
    """out [tokens, Hq, D], lse [tokens, Hq], and the KV tokens read.

    q [tokens, Hq, D]: the last `query_lens[i]` tokens of each sequence. Caches [pages, page_size, Hkv, D].
    """
    page_size, kv_heads = k_cache.shape[1:3]
    tokens, heads, head_dim = q.shape
    group = heads // kv_heads
    query_start_loc = np.concatenate([[0], np.cumsum(query_lens)])
    active = [row for row in range(len(seq_lens)) if query_lens[row] > 0]

    nodes = prefix_forest(block_table, seq_lens, active, page_size)
    packs = pack(nodes, query_lens, policy)
    items = work_items(packs, query_start_loc, seq_lens, max(1, tile_rows // group))

    out = np.zeros((tokens, kv_heads, group, v_cache.shape[-1]))
    lse = np.full((tokens, kv_heads, group), -np.inf)
    grouped = q.astype(float).reshape(tokens, kv_heads, group, head_dim)
    for item in items:
        token = np.arange(item.start, item.end)
        page, offset = block_table[item.row, token // page_size], token % page_size
        visible = token[None, :] <= item.positions[:, None]
        part, part_lse = attend(grouped[item.queries], k_cache[page, offset], v_cache[page, offset], visible)
        at = item.queries
        out[at], lse[at] = merge(out[at], lse[at], part, part_lse)
    read = sum(item.end - item.start for item in items)
    return out.reshape(tokens, heads, v_cache.shape[-1]), lse.reshape(tokens, heads), read


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rng = np.random.default_rng(0)
    requests, page_size = 6, 4
    trunk = np.tile(np.arange(5), (requests, 1))  # 20 tokens for all
    branch = 5 + np.repeat([[0, 1, 2], [3, 4, 5]], 3, axis=0)  # 12 tokens for three requests each
    leaf = 11 + np.arange(requests)[:, None]
    table = np.concatenate([trunk, branch, leaf], axis=1)
    lens = np.array([33, 34, 35, 33, 34, 35])
    for node in prefix_forest(table, lens, list(range(requests)), page_size):
        depth, above = 0, node.parent
        while above:
            depth, above = depth + 1, above.parent
        print(f"{'  ' * depth}tokens {node.start} to {node.end - 1}: requests {node.rows}")
    q = rng.standard_normal((requests, 4, 8))
    caches = rng.standard_normal((2, 20, page_size, 2, 8))
    _, _, read = nano_attention(q, *caches, table, lens, np.ones(requests, int), "cascade")
    print(f"{read} KV tokens read instead of {lens.sum()}")


if __name__ == "__main__":
    main()
