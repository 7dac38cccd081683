"""Attention kernels of other projects on a paged decode batch; each is left out, with the reason, if it cannot run."""

import io
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trunkattn.workloads.batch import PagedBatch

Run = Callable[[int], torch.Tensor]  # copy of the cache -> output [T, Hq, D]


@dataclass(frozen=True)
class Case:
    """A decode batch on the device. kv: copies of (k_cache, v_cache) [pages, page_size, Hkv, D]; q [T, Hq, D]."""

    batch: PagedBatch
    q: torch.Tensor
    kv: list[tuple[torch.Tensor, torch.Tensor]]
    levels: list[tuple[int, int]]  # nodes and tokens of each level of a tree; empty: no tree

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, KV heads, head_dim."""
        return self.q.shape[1], self.kv[0][0].shape[2], self.q.shape[2]

    @property
    def device_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """block_table and seq_lens on the device."""
        return torch.from_numpy(self.batch.block_table).cuda(), torch.from_numpy(self.batch.seq_lens).cuda()


def flash_attention_3(case: Case) -> Run:
    """FlashAttention-3's paged decode; the number of splits is its own choice."""
    import fa3

    table, lens = case.device_batch
    hq, hkv, dim = case.heads
    starts = torch.arange(len(lens) + 1, device="cuda", dtype=torch.int32)
    longest, page = int(case.batch.seq_lens.max()), case.batch.page_size
    plan = fa3.get_scheduler_metadata(
        len(lens), 1, longest, hq, hkv, dim, lens, cu_seqlens_q=starts, page_size=page, causal=True
    )

    def run(copy: int) -> torch.Tensor:
        return fa3.flash_attn_varlen_func(
            case.q, *case.kv[copy], 1, starts, longest, seqused_k=lens, block_table=table, causal=True,
            scheduler_metadata=plan,
        )  # fmt: skip

    return run


def _pages(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """indptr, indices and tokens on the last page, as FlashInfer takes a block table."""
    table, lens = case.device_batch
    page = case.batch.page_size
    used = (lens + page - 1) // page
    indptr = torch.cat([torch.zeros(1, device="cuda", dtype=torch.int32), used.cumsum(0).int()])
    columns = torch.arange(table.shape[1], device="cuda")
    return indptr, table[columns < used[:, None]], (lens - 1) % page + 1


def _flashinfer_decode(case: Case, tensor_cores: bool) -> Run:
    import flashinfer

    workspace = torch.empty(512 << 20, device="cuda", dtype=torch.uint8)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=tensor_cores)
    dtypes = {"q_data_type": case.q.dtype, "kv_data_type": case.q.dtype}
    wrapper.plan(*_pages(case), *case.heads, case.batch.page_size, **dtypes)
    return lambda copy: wrapper.run(case.q, case.kv[copy])


def flashinfer_decode(case: Case) -> Run:
    """FlashInfer's batch decode on tensor cores."""
    return _flashinfer_decode(case, True)


def flashinfer_decode_cuda_cores(case: Case) -> Run:
    """The same on CUDA cores, which can be faster for one query head a KV head."""
    return _flashinfer_decode(case, False)


def flashinfer_cascade(case: Case) -> Run:
    """FlashInfer's multi-level cascade, told the tree's levels."""
    import flashinfer

    if len(case.levels) < 2:
        raise ValueError("no shared level")
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
    wrapper.plan(
        q_indptr, kv_indptr, indices, last, *case.heads, page, q_data_type=case.q.dtype, kv_data_type=case.q.dtype
    )
    return lambda copy: wrapper.run(case.q, case.kv[copy])


def _fasttree_nodes(case: Case) -> tuple[list[Any], torch.Tensor]:
    """FastTree's nodes, level by level below an empty root, and in their order the slots of their tokens in the cache.

    FastTree takes one tree, not a forest; an empty root, as a radix tree has, adds no work.
    """
    from kv_tree_simple import KVTreeNode

    tree, begins = [KVTreeNode()], [0]
    above, above_begin = 1, 0
    for nodes, tokens in case.levels:
        parents = above_begin + np.arange(nodes) * above // nodes
        above, above_begin = nodes, len(tree)
        for parent in parents.tolist():
            node = KVTreeNode()
            node.id, node.parent, node.seqlen = len(tree), parent, tokens
            begins.append(begins[parent] + tree[parent].seqlen)
            tree[parent].num_children += 1
            tree.append(node)
    for request, leaf in enumerate(tree[above_begin:]):
        leaf.requests = [request]
    for node in reversed(tree[1:]):
        tree[node.parent].requests[:0] = node.requests
    page, slots = case.batch.page_size, []
    for node, begin in zip(tree, begins, strict=True):
        positions = np.arange(begin, begin + node.seqlen)
        slots.append(case.batch.block_table[node.requests[0], positions // page].astype(np.int64) * page)
        slots[-1] += positions % page
    return tree, torch.from_numpy(np.concatenate(slots)).to(case.q.device)


def fasttree(case: Case) -> Run:
    """FastTree's kernel benchmark, told the tree, on contiguous copies of the cache, with its settings for an H100."""
    import fasttree

    if not case.levels:
        raise ValueError("no tree")
    hq, hkv, dim = case.heads
    tree, slots = _fasttree_nodes(case)
    if len(slots) * hkv * dim >= 2**31:
        raise ValueError("FastTree's offsets are int32; K has 2**31 elements or more")
    params = fasttree.FastTreeParams()
    params.set_kv_group_num(hq // hkv)
    params.set_q_tile_sizes([64 * hkv // hq, 16 * hkv // hq])
    params.set_kv_tile_sizes([32, 32])
    ends = np.cumsum([0] + [node.seqlen for node in tree]).tolist()
    with redirect_stdout(io.StringIO()):  # it reports its plan
        plan, _ = fasttree.fasttree_preparation(
            tree, ends, len(case.q), hq, hkv, dim, [1024, 128], [132, 528], [132, 132], params
        )
    # The plan may have changed the tile sizes, so they are read from params after it.
    kv = [(k.flatten(0, 1)[slots], v.flatten(0, 1)[slots]) for k, v in case.kv]
    out = torch.empty_like(case.q)

    def run(copy: int) -> torch.Tensor:
        fasttree.fasttree_decode(case.q, *kv[copy], out, *plan, params.TSQs, params.TSKs, dim**-0.5)
        return out

    return run


PEERS: dict[str, Callable[[Case], Run]] = {
    "flash_attention_3": flash_attention_3,
    "flashinfer_decode": flashinfer_decode,
    "flashinfer_decode_cuda_cores": flashinfer_decode_cuda_cores,
    "flashinfer_cascade": flashinfer_cascade,
    "fasttree": fasttree,
}
