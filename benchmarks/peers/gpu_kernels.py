"""Attention kernels of other projects on a paged decode batch; each is left out, with the reason, if it cannot run."""

import io
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from trunkattn.analysis.batch import PagedBatch
from trunkattn.planner.prefix_forest import Forest, build_forest

Run = Callable[[int], Any]  # copy of the cache -> output [T, Hq, D]


class Features(NamedTuple):
    """Options of an attention. window: tokens that a query sees, itself included; sinks [Hq] in q's dtype."""

    window: int | None = None
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None


NO_FEATURES = Features()


@dataclass(frozen=True)
class Case:
    """A decode batch on the device. kv: copies of (k_cache, v_cache) [pages, page_size, Hkv, D]; q [T, Hq, D]."""

    batch: PagedBatch
    q: torch.Tensor
    kv: list[tuple[torch.Tensor, torch.Tensor]]
    levels: list[tuple[int, int]]  # nodes and tokens of each level of a tree; empty: no tree
    features: Features = NO_FEATURES

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, KV heads, head_dim."""
        return self.q.shape[1], self.kv[0][0].shape[2], self.q.shape[2]

    @property
    def device_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """block_table and seq_lens on the device."""
        block_table, seq_lens = torch.from_numpy(self.batch.block_table), torch.from_numpy(self.batch.seq_lens)
        return block_table.to(self.q.device), seq_lens.to(self.q.device)

    def require_plain(self) -> None:
        """Raises ValueError if it has what most peers are not told of here."""
        has_features = any(feature is not None for feature in self.features)
        if has_features or self.kv[0][0].dtype != self.q.dtype:
            raise ValueError("it is run here on caches of the queries' dtype, without window, soft cap and sinks alone")


@dataclass(frozen=True)
class PlannedRun:
    """A kernel ready to run the layers of a batch; `plan` repeats what it does once per step before them."""

    run: Run
    plan: Callable[[], object]

    def __call__(self, copy: int) -> torch.Tensor:
        return self.run(copy)


def flash_attention_3(case: Case) -> PlannedRun:
    """FlashAttention-3's paged decode; the number of splits is its own choice. Its plan is the scheduler metadata.

    8-bit caches take queries of 8 bits, as in vLLM; what rounds the queries is not part of its time.
    """
    import fa3

    table, lens = case.device_batch
    (hq, hkv, dim), (window, soft_cap, sinks) = case.heads, case.features
    device, q, scales = case.q.device, case.q, {}
    if (kv_dtype := case.kv[0][0].dtype) != q.dtype:
        q = q.to(kv_dtype)
        ones = torch.ones(len(lens), hkv, device=device)
        scales = {"q_descale": ones, "k_descale": ones, "v_descale": ones}
    starts = torch.arange(len(lens) + 1, device=device, dtype=torch.int32)
    longest, page = int(case.batch.seq_lens.max()), case.batch.page_size
    masks: dict[str, Any] = {"causal": True, "window_size": (-1, -1) if window is None else (window - 1, 0)}

    def plan() -> torch.Tensor:
        return fa3.get_scheduler_metadata(
            len(lens), 1, longest, hq, hkv, dim, lens, qkv_dtype=q.dtype, cu_seqlens_q=starts, page_size=page,
            has_softcap=soft_cap is not None, **masks,
        )  # fmt: skip

    metadata = plan()

    def run(copy: int) -> torch.Tensor:
        return fa3.flash_attn_varlen_func(
            q, *case.kv[copy], 1, starts, longest, seqused_k=lens, block_table=table,
            scheduler_metadata=metadata, softcap=soft_cap or 0.0, s_aux=sinks, **masks, **scales,
        )  # fmt: skip

    return PlannedRun(run, plan)


def page_lists(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """indptr, indices and tokens on the last page, as FlashInfer takes a block table.

    What its plan reads is on the CPU, so that the plan need not wait for the device.
    """
    lens, page = case.batch.seq_lens, case.batch.page_size
    used = -(-lens // page)
    indptr = np.concatenate([[0], np.cumsum(used)]).astype(np.int32)
    table = case.batch.block_table
    indices = table[np.arange(table.shape[1]) < used[:, None]]
    return torch.from_numpy(indptr), torch.from_numpy(indices).cuda(), torch.from_numpy((lens - 1) % page + 1)


def _flashinfer_decode(case: Case, tensor_cores: bool) -> PlannedRun:
    import flashinfer

    case.require_plain()
    workspace = torch.empty(512 << 20, device="cuda", dtype=torch.uint8)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=tensor_cores)
    dtypes = {"q_data_type": case.q.dtype, "kv_data_type": case.q.dtype}
    pages = page_lists(case)

    def plan() -> None:
        wrapper.plan(*pages, *case.heads, case.batch.page_size, **dtypes)

    plan()
    return PlannedRun(lambda copy: wrapper.run(case.q, case.kv[copy]), plan)


def flashinfer_decode(case: Case) -> PlannedRun:
    """FlashInfer's batch decode on tensor cores."""
    return _flashinfer_decode(case, True)


def flashinfer_decode_cuda_cores(case: Case) -> PlannedRun:
    """FlashInfer's decode on CUDA cores, which can be faster for one query head a KV head."""
    return _flashinfer_decode(case, False)


def flashinfer_cascade(case: Case) -> PlannedRun:
    """FlashInfer's multi-level cascade, told the tree's levels."""
    import flashinfer

    case.require_plain()
    if len(case.levels) < 2:
        raise ValueError("it takes whole levels of one tree, and this batch is given without levels")
    table, _ = case.device_batch
    page, requests = case.batch.page_size, len(table)
    order = torch.arange(requests, device="cuda")
    q_indptr, kv_indptr, indices, last = [], [], [], []
    column = 0
    for nodes, tokens in case.levels:
        used = -(-tokens // page)
        node = order * nodes // requests
        first = torch.searchsorted(node, torch.arange(nodes, device="cuda"))
        q_indptr.append(torch.cat([first, torch.tensor([requests], device="cuda")]).int())
        kv_indptr.append(torch.arange(nodes + 1, device="cuda", dtype=torch.int32) * used)
        indices.append(table[first, column : column + used].reshape(-1))
        last.append(torch.full((nodes,), (tokens - 1) % page + 1, device="cuda", dtype=torch.int32))
        column += used
    workspace = torch.empty(512 << 20, device="cuda", dtype=torch.uint8)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(len(case.levels), workspace, "NHD")
    dtypes = {"q_data_type": case.q.dtype, "kv_data_type": case.q.dtype}

    def plan() -> None:
        wrapper.plan(q_indptr, kv_indptr, indices, last, *case.heads, page, **dtypes)

    plan()
    return PlannedRun(lambda copy: wrapper.run(case.q, case.kv[copy]), plan)


@dataclass
class TreeNode:
    """What FastTree reads of a node: its parent in the list, its tokens, its children, the requests below it."""

    parent: int
    seqlen: int
    requests: list[int]
    num_children: int = 0


def fasttree_nodes(batch: PagedBatch) -> tuple[list[TreeNode], NDArray[np.int64]]:
    """A decode batch's prefix forest as FastTree's nodes, level by level, and in their order the slots of their tokens.

    FastTree takes one tree, not a forest: node 0 is an empty root, as a radix tree has, and adds no work. A slot is
    page * page_size + offset in the cache.
    """
    page, table = batch.page_size, batch.block_table
    forest = Forest(*build_forest(table, batch.seq_lens, batch.query_lens, page, 1))
    by_level = np.argsort(forest.depth, kind="stable")
    number = np.zeros(len(by_level) + 1, np.int64)  # the last entry is that of ROOT = -1: node 0
    number[by_level] = np.arange(1, len(by_level) + 1)
    tree, slots = [TreeNode(-1, 0, forest.order.tolist())], [np.empty(0, np.int64)]
    for node in by_level.tolist():
        requests = forest.order[forest.row_start[node] : forest.row_end[node]].tolist()
        positions = np.arange(forest.token_start[node], forest.token_end[node])
        slots.append(table[requests[0], positions // page].astype(np.int64) * page + positions % page)
        parent = int(number[forest.parent[node]])
        tree[parent].num_children += 1
        tree.append(TreeNode(parent, len(positions), requests))
    return tree, np.concatenate(slots)


def fasttree(case: Case) -> PlannedRun:
    """FastTree's kernel benchmark, told the tree, on contiguous copies of the cache, with its settings for an H100.

    Its plan is `fasttree_preparation`, which begins with a tree; finding the tree is not part of it.
    """
    import fasttree

    case.require_plain()
    hq, hkv, dim = case.heads
    tree, places = fasttree_nodes(case.batch)
    if len(places) * hkv * dim >= 2**31:
        raise ValueError("FastTree's offsets are int32; K has 2**31 elements or more")
    ends = np.cumsum([0] + [node.seqlen for node in tree]).tolist()

    def plan() -> tuple[Any, list[int], list[int]]:
        params = fasttree.FastTreeParams()
        params.set_kv_group_num(hq // hkv)
        params.set_q_tile_sizes([64 * hkv // hq, 16 * hkv // hq])
        params.set_kv_tile_sizes([32, 32])
        with redirect_stdout(io.StringIO()):  # it reports its plan
            prepared, _ = fasttree.fasttree_preparation(
                tree, ends, len(case.q), hq, hkv, dim, [1024, 128], [132, 528], [132, 132], params
            )
        return prepared, params.TSQs, params.TSKs  # after the preparation, which may change the tile sizes

    prepared, *tiles = plan()
    slots = torch.from_numpy(places).to(case.q.device)
    kv = [(k.flatten(0, 1)[slots], v.flatten(0, 1)[slots]) for k, v in case.kv]
    out = torch.empty_like(case.q)

    def run(copy: int) -> torch.Tensor:
        fasttree.fasttree_decode(case.q, *kv[copy], out, *prepared, *tiles, dim**-0.5)
        return out

    return PlannedRun(run, plan)


def torch_sdpa(case: Case) -> PlannedRun:
    """What plain PyTorch does with a paged cache: a copy of each request's pages, then scaled_dot_product_attention.

    The query heads of a KV head are its query rows, so that no head is copied.
    """
    case.require_plain()
    table, lens = case.device_batch
    hq, hkv, dim = case.heads
    longest = int(case.batch.seq_lens.max())
    pages = table[:, : -(-longest // case.batch.page_size)].long()
    seen = None
    if longest != int(case.batch.seq_lens.min()):
        seen = (torch.arange(longest, device="cuda") < lens[:, None])[:, None, None]
    q = case.q.view(-1, hkv, hq // hkv, dim)

    def run(copy: int) -> torch.Tensor:
        k, v = (cache[pages].flatten(1, 2)[:, :longest].transpose(1, 2) for cache in case.kv[copy])
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, seen).reshape(-1, hq, dim)

    return PlannedRun(run, lambda: None)


PEERS: dict[str, Callable[[Case], PlannedRun]] = {
    "flash_attention_3": flash_attention_3,
    "flashinfer_decode": flashinfer_decode,
    "flashinfer_decode_cuda_cores": flashinfer_decode_cuda_cores,
    "flashinfer_cascade": flashinfer_cascade,
    "fasttree": fasttree,
    "torch_sdpa": torch_sdpa,
}
