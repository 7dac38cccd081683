"""Attention kernels of other projects on a paged decode batch; each is left out, with the reason, if it cannot run."""

from collections.abc import Callable
from dataclasses import dataclass

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


PEERS: dict[str, Callable[[Case], Run]] = {
    "flash_attention_3": flash_attention_3,
    "flashinfer_decode": flashinfer_decode,
    "flashinfer_decode_cuda_cores": flashinfer_decode_cuda_cores,
    "flashinfer_cascade": flashinfer_cascade,
}
