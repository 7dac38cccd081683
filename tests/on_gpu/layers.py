"""Layers of real sizes on the card: batches, tensors with NaN where no plan reads, the oracle, and captured graphs."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from trunkattn import AttentionConfig, BatchAttention, Capacity
from trunkattn.analysis.batch import PagedBatch
from trunkattn.analysis.trees import parse_tree, tree_batch
from trunkattn.reference import paged_attention

GOOD = AttentionConfig(num_qo_heads=32, num_kv_heads=8, head_dim=128, page_size=16, dtype=torch.bfloat16)
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 127, 128, 129, 200, 255, 256, 500, 1000)


@dataclass(frozen=True)
class Layer:
    """One layer's tensors on the card; pages outside the tables hold NaN."""

    batch: PagedBatch
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor

    @property
    def step(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The arguments of `plan`."""
        batch = self.batch
        arrays = (batch.block_table, batch.seq_lens, batch.query_start_loc)
        return tuple(torch.from_numpy(array) for array in arrays)


def make_layer(config: AttentionConfig, batch: PagedBatch, seed: int = 0) -> Layer:
    torch.manual_seed(seed)
    shape = (batch.num_pages + 3, config.page_size, config.num_kv_heads)
    caches = [torch.randn(*shape, dim, device="cuda") for dim in (config.head_dim, config.value_dim)]
    for cache in caches:
        cache[batch.num_pages :] = math.nan
    q = torch.randn(int(batch.query_start_loc[-1]), config.num_qo_heads, config.head_dim, device="cuda")
    return Layer(batch, q.to(config.dtype), *(cache.to(config.cache_dtype) for cache in caches))


def poisoned(config: AttentionConfig, batch: PagedBatch) -> Layer:
    """A layer with NaN behind the last token of every request's last page, too."""
    layer = make_layer(config, batch)
    for row, length in enumerate(batch.seq_lens.tolist()):
        page, offset = divmod(length, config.page_size)
        if offset:
            for cache in (layer.k_cache, layer.v_cache):
                cache[int(batch.block_table[row, page]), offset:] = math.nan
    return layer


def ragged(tree: str, page_size: int, seed: int = 0) -> PagedBatch:
    """A tree with uneven tails and query lengths 0 to 40."""
    batch = tree_batch(parse_tree(tree), page_size, row_seed=seed, page_seed=seed)
    rng = np.random.default_rng(seed)
    seq_lens = batch.seq_lens - rng.integers(0, 17, len(batch.seq_lens)).astype(np.int32)
    lengths = np.where(rng.random(len(seq_lens)) < 0.7, 1, rng.integers(0, 41, len(seq_lens)))
    return replace(batch, seq_lens=seq_lens, query_lens=np.minimum(lengths, seq_lens).astype(np.int32))


def chunks(tree: str, query_lens: list[int], page_size: int = 16) -> PagedBatch:
    """The query lengths again and again over the tree's requests."""
    batch = tree_batch(parse_tree(tree), page_size, row_seed=0, page_seed=0)
    return replace(batch, query_lens=np.resize(np.array(query_lens, np.int32), len(batch.seq_lens)))


def mixed(page_size: int = 16, several: bool = False) -> PagedBatch:
    """204 decodes, 24 of which share trunks, a row of padding, and chunks, two of which share them too; rows in random
    order. several: the decodes have 1, 2 and 3 query tokens."""
    tree = tree_batch(parse_tree("1,4,26_512,128,90"), page_size)
    alone = np.array([*np.resize(LENGTHS, 181), 300, 1324, 700])
    lens = np.append(tree.seq_lens, alone).astype(np.int32)
    pages = -(-alone // page_size)
    num_pages, columns = tree.num_pages + int(pages.sum()), -(-int(lens.max()) // page_size)
    table = np.zeros((len(lens), columns), np.int32)
    table[:26, : tree.block_table.shape[1]] = tree.block_table
    table[26:] = (tree.num_pages + (np.cumsum(pages) - pages)[:, None] + np.arange(columns)) % num_pages
    query_lens = np.minimum(np.resize([1, 2, 3] if several else [1], len(lens)), lens)
    query_lens[[3, 14, 40, -3, -2, -1]] = 80, 80, 0, 300, 200, 70
    rows = np.random.default_rng(0).permutation(len(lens))
    table = np.random.default_rng(1).permutation(num_pages)[table]
    return PagedBatch(table[rows].astype(np.int32), lens[rows], query_lens[rows].astype(np.int32), page_size, num_pages)


def expected(layer: Layer, config: AttentionConfig, rows: list[int], **options: Any) -> torch.Tensor:
    """float64 outputs of some requests' query tokens, one after the other."""
    starts, outputs = layer.batch.query_start_loc, []
    for row in rows:
        length = int(layer.batch.seq_lens[row])
        pages = torch.from_numpy(layer.batch.block_table[row, : -(-length // config.page_size)])
        k, v = (cache[pages.to(cache.device).long()].flatten(0, 1)[:length] for cache in (layer.k_cache, layer.v_cache))
        q = layer.q[starts[row] : starts[row + 1]]
        heads = q.unflatten(1, (config.num_kv_heads, -1)).unbind(1)  # one at a time: logits of all are gigabytes
        sinks = options["sinks"].view(config.num_kv_heads, -1) if "sinks" in options else [None] * config.num_kv_heads
        window = options.get("window", 1 << 30)
        each = zip(heads, k.unbind(1), v.unbind(1), sinks, strict=True)
        outputs.append(torch.cat([expected_of_head(config, *one, window) for one in each], 1))
    return torch.cat(outputs)


def expected_of_head(
    config: AttentionConfig, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, window: int
) -> torch.Tensor:
    """[Q, G, Dv] in float64, for one KV head: q [Q, G, D], the last tokens' queries; k [L, D], v [L, Dv]; sinks [G]."""
    scale = 1 / math.sqrt(config.head_dim) if config.sm_scale is None else config.sm_scale
    logits = torch.einsum("qgd,ld->gql", q.double(), k.double()) * scale
    if config.logits_soft_cap:
        logits = config.logits_soft_cap * torch.tanh(logits / config.logits_soft_cap)
    token = torch.arange(len(k), device=q.device)
    position = token[len(k) - len(q) :, None]
    logits = logits.masked_fill((token > position) | (token <= position - window), -math.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks.double()[:, None, None].expand(-1, len(q), 1)], -1)
    return torch.einsum("gql,ld->qgd", logits.softmax(-1)[..., : len(k)], v.double())


def assert_right(
    layer: Layer, out: torch.Tensor, lse: torch.Tensor | None = None, tolerance: float = 0.01, **options: Any
) -> None:
    """All chunks, and every seventh decode, against the oracle. options: of the oracle."""
    assert not out.isnan().any()
    lens, starts = layer.batch.query_lens, layer.batch.query_start_loc
    rows = [*np.flatnonzero(lens > 3), *np.flatnonzero((lens > 0) & (lens <= 3))[::7]]
    tokens = np.concatenate([np.arange(starts[row], starts[row + 1]) for row in rows])
    table, seq_lens = (array[rows] for array in layer.step[:2])
    of_rows = torch.from_numpy(np.append(0, np.cumsum(lens[rows])))
    caches = layer.k_cache, layer.v_cache
    want, want_lse = paged_attention(layer.q[tokens], *caches, table, seq_lens, of_rows, **options)
    torch.testing.assert_close(out[tokens].double(), want, rtol=tolerance, atol=tolerance)
    if lse is not None:
        torch.testing.assert_close(lse[tokens].double(), want_lse, rtol=0, atol=1e-3)


def assert_repeats(config: AttentionConfig, batch: PagedBatch) -> None:
    """A thousand runs are equal, bit for bit."""
    layer, attention = make_layer(config, batch), BatchAttention(config)
    plan = attention.plan(*layer.step)
    first, first_lse = attention.run(plan, layer.q, layer.k_cache, layer.v_cache, return_lse=True)
    for _ in range(1000):
        out, lse = attention.run(plan, layer.q, layer.k_cache, layer.v_cache, return_lse=True)
        assert torch.equal(out, first) and torch.equal(lse, first_lse)


def captured(config: AttentionConfig, capacity: Capacity, layers: list[Layer]) -> tuple[BatchAttention, list, Any]:
    """Captured with a plan of no request: attention, tensors as large as any layer's, (graph, plan)."""
    pages = max(len(layer.k_cache) for layer in layers)
    attention = BatchAttention(config, "cuda", replace(capacity, num_pages=pages))
    caches = [
        torch.full(
            (pages, config.page_size, config.num_kv_heads, dim), math.nan, device="cuda", dtype=config.cache_dtype
        )
        for dim in (config.head_dim, config.value_dim)
    ]
    q = torch.zeros(capacity.max_query_tokens, config.num_qo_heads, config.head_dim, device="cuda", dtype=config.dtype)
    out = torch.full((len(q), config.num_qo_heads, config.value_dim), math.nan, device="cuda", dtype=config.dtype)
    empty = torch.zeros(0, 1, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    plan = attention.plan(*empty)
    attention.run(plan, q, *caches, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention.run(plan, q, *caches, out=out)
    return attention, [q, *caches, out], (graph, plan)


def replay(layer: Layer, attention: BatchAttention, tensors: list[torch.Tensor], graph: Any, plan: Any) -> torch.Tensor:
    q, k_cache, v_cache, out = tensors
    for target, source in ((q, layer.q), (k_cache, layer.k_cache), (v_cache, layer.v_cache)):
        target[: len(source)] = source
    out.fill_(math.nan)
    assert attention.plan(*layer.step, into=plan) is plan
    plan.check()
    graph.replay()
    assert out[len(layer.q) :].isnan().all(), "rows beyond the plan's are left as they are"
    return out[: len(layer.q)]


def is_hopper() -> bool:
    return torch.cuda.get_device_capability() == (9, 0)
