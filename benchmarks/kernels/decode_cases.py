"""Decode batches of one attention layer on a device: how they are made, what they come to, how fast they can be."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

import trunkattn
from benchmarks.peers.gpu_kernels import Case, Features, Run
from trunkattn.analysis.batch import PagedBatch
from trunkattn.analysis.trees import TreeLevels, tree_batch
from trunkattn.planner.prefix_forest import Forest, build_forest

FLUSH_BYTES = 400_000_000  # what one replay reads of all copies of the cache, several times an L2 cache
MOST_COPIES, MOST_BYTES = 400, 32_000_000_000  # of a window, which reads little of a large cache
CAPPED_QUERIES = 2.0  # a soft cap is for logits of this size: it does nothing to those around 1


class Shape(NamedTuple):
    """A layer's attention. dtype: of queries and outputs; kv_dtype: of the cache; window: tokens that a query sees,
    itself included; latent_dim: columns of a latent cache that are values too, None for a cache of keys and values."""

    name: str
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16
    window: int | None = None
    sinks: bool = False
    soft_cap: float | None = None
    page_size: int = 16
    latent_dim: int | None = None

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's key and value."""
        return 2 * self.num_kv_heads * self.head_dim * self.kv_dtype.itemsize


class Seen(NamedTuple):
    """What the queries of a batch see. tokens: each counted once; pairs: of a query and a token."""

    tokens: int
    pairs: int


def seen_by(tree: TreeLevels, window: int | None) -> Seen:
    """A window hides all but the last tokens of each sequence. All sequences of a tree are equally long."""
    first = 0 if window is None else max(0, tree.seq_len - window)
    begin, tokens = 0, 0
    for nodes, length in zip(tree.nodes, tree.tokens, strict=True):
        tokens += nodes * max(0, begin + length - max(begin, first))
        begin += length
    return Seen(tokens, tree.num_requests * (tree.seq_len - first))


def unique_tokens(batch: PagedBatch) -> int:
    """The KV tokens of a decode batch, those of a shared page counted once."""
    forest = Forest(*build_forest(batch.block_table, batch.seq_lens, batch.query_lens, batch.page_size, 1))
    return int((forest.token_end - forest.token_start).sum())


def sol_us(shape: Shape, tree: TreeLevels, limits: tuple[float, float]) -> float:
    """The speed of light: what the bytes take, or the arithmetic. limits: read bandwidth in bytes per µs, FLOP per µs
    of 16-bit matrices, in which keys and values of 8 bits are multiplied too."""
    seen = seen_by(tree, shape.window)
    of_queries = tree.num_requests * shape.num_qo_heads * shape.head_dim * shape.dtype.itemsize
    size = seen.tokens * shape.token_bytes + 2 * of_queries
    flops = 4 * shape.head_dim * shape.num_qo_heads * seen.pairs
    return max(size / limits[0], flops / limits[1])


def num_copies(shape: Shape, tree: TreeLevels, cache_bytes: int) -> int:
    """Copies of the cache, which take turns, so that each finds the L2 cache cold."""
    read = seen_by(tree, shape.window).tokens * shape.token_bytes
    return max(2, min(math.ceil(FLUSH_BYTES / read), MOST_COPIES, MOST_BYTES // cache_bytes))


def make_case(shape: Shape, tree: TreeLevels, device: str = "cuda", copies: int | None = None) -> Case:
    """Random q and a random cache, pages shuffled; rows stay in tree order, in which some peers want them.

    copies: of the cache; None: enough for a cold L2 cache. Sinks weigh about as much as all tokens that a query sees,
    and queries of a soft cap are larger, so that an output without either is wrong.
    """
    batch = tree_batch(tree, shape.page_size, page_seed=1)
    size = (batch.num_pages, shape.page_size, shape.num_kv_heads, shape.head_dim)
    if copies is None:
        copies = num_copies(shape, tree, batch.num_pages * shape.page_size * shape.token_bytes)
    torch.manual_seed(0)
    k, v = (torch.randn(size, device=device, dtype=shape.dtype).to(shape.kv_dtype) for _ in range(2))
    kv = [(k, v), *((k.clone(), v.clone()) for _ in range(copies - 1))]
    heads = (tree.num_requests, shape.num_qo_heads, shape.head_dim)
    q = torch.randn(heads, device=device, dtype=shape.dtype)
    sinks = None
    if shape.sinks:
        seen = seen_by(tree, shape.window).pairs // tree.num_requests
        sinks = (torch.randn(shape.num_qo_heads, device=device) + math.log(seen)).to(shape.dtype)
    features = Features(shape.window, shape.soft_cap, sinks)
    levels = list(zip(tree.nodes, tree.tokens, strict=True))
    return Case(batch, q * CAPPED_QUERIES if shape.soft_cap else q, kv, levels, features)


def expected(case: Case, rows: Sequence[int] | None = None) -> torch.Tensor:
    """[rows, Hq, D] outputs in float64, all heads of a request at once. rows: requests; None: all."""
    page, window, found = case.batch.page_size, case.features.window, []
    for row in range(len(case.q)) if rows is None else rows:
        length = int(case.batch.seq_lens[row])
        first = 0 if window is None else max(0, length - window)
        pages = torch.from_numpy(case.batch.block_table[row, first // page : -(-length // page)])
        begin = first // page * page
        k, v = (
            cache[pages.to(cache.device).long()].flatten(0, 1)[first - begin : length - begin].double()
            for cache in case.kv[0]
        )
        found.append(attend(case, case.q[row], k, v))
    return torch.stack(found)


def attend(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """[Hq, D] output in float64 of one query token [Hq, D] that sees these keys and values [tokens, Hkv, D]."""
    (hq, hkv, dim), (_, soft_cap, sinks) = case.heads, case.features
    logits = torch.einsum("hgd,lhd->hgl", q.double().view(hkv, hq // hkv, dim), k) / math.sqrt(dim)
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    norm = logits.logsumexp(-1)
    if sinks is not None:
        norm = torch.logaddexp(norm, sinks.double().view(hkv, hq // hkv))
    return torch.einsum("hgl,lhd->hgd", (logits - norm[..., None]).exp(), v).reshape(hq, dim)


def relative_error(out: torch.Tensor, truth: torch.Tensor) -> float:
    """Largest difference, in root mean squares of the truth, or for a larger number in that number, as it is rounded;
    NaN anywhere is an infinite error."""
    if out.shape != truth.shape:
        raise ValueError(f"the output has shape {tuple(out.shape)}: expected {tuple(truth.shape)}")
    size = truth.abs().clamp(min=float(truth.square().mean().sqrt()))
    worst = float(((out.double() - truth).abs() / size).max())
    return math.inf if math.isnan(worst) else worst


def ours(case: Case, fixed: bool = False) -> tuple[Run, trunkattn.Plan]:
    """This project, `auto`. fixed: the plan has a capacity, for twice as many requests of twice the length, so that a
    captured graph serves any batch within it."""
    hq, hkv, dim = case.heads
    window, soft_cap, sinks = case.features
    config = trunkattn.AttentionConfig(
        hq, hkv, dim, case.batch.page_size, case.q.dtype, kv_dtype=case.kv[0][0].dtype,
        logits_soft_cap=soft_cap, sinks=sinks is not None,
    )  # fmt: skip
    requests, pages = case.batch.block_table.shape
    capacity = trunkattn.Capacity(2 * requests, 2 * requests, 2 * pages, case.batch.num_pages, 1) if fixed else None
    attention = trunkattn.BatchAttention(config, case.q.device, capacity)
    tables = torch.from_numpy(case.batch.block_table), torch.from_numpy(case.batch.seq_lens)
    plan = attention.plan(*tables, sliding_window=window)
    out = torch.full_like(case.q, math.nan)
    return lambda copy: attention.run(plan, case.q, *case.kv[copy], out=out, sinks=sinks), plan
