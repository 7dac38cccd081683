"""Prefill kernels of other projects on a paged batch of prompt chunks; see `gpu_kernels`."""

from collections.abc import Callable

import torch

from benchmarks.peers.gpu_kernels import Case, PlannedRun, page_lists


def _starts(case: Case) -> torch.Tensor:
    return torch.from_numpy(case.batch.query_start_loc).cuda()


def flash_attention_3(case: Case) -> PlannedRun:
    """FlashAttention-3 over the paged cache; the number of splits is its own choice. It has no plan of its own."""
    import fa3

    (table, lens), starts = case.device_batch, _starts(case)
    longest, most = int(case.batch.seq_lens.max()), int(case.batch.query_lens.max())
    window, soft_cap, sinks = case.features
    sizes = (-1, -1) if window is None else (window - 1, 0)

    def run(copy: int) -> torch.Tensor:
        return fa3.flash_attn_varlen_func(
            case.q, *case.kv[copy], most, starts, longest, seqused_k=lens, block_table=table, causal=True,
            window_size=sizes, softcap=soft_cap or 0.0, s_aux=sinks,
        )  # fmt: skip

    return PlannedRun(run, lambda: None)


def flash_attention_3_contiguous(case: Case) -> PlannedRun:
    """FlashAttention-3 on contiguous copies of every request's keys and values: what paging costs it."""
    import fa3

    case.require_plain()
    batch, starts = case.batch, _starts(case)
    longest, most = int(batch.seq_lens.max()), int(batch.query_lens.max())
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), torch.from_numpy(batch.seq_lens).long().cumsum(0)])
    table = torch.from_numpy(batch.block_table).cuda().long()
    copies = [
        tuple(
            torch.cat(
                [cache[pages].flatten(0, 1)[:length] for pages, length in zip(table, batch.seq_lens, strict=True)]
            )
            for cache in caches
        )
        for caches in case.kv
    ]
    kv_starts = ends.int().cuda()

    def run(copy: int) -> torch.Tensor:
        return fa3.flash_attn_varlen_func(
            case.q, *copies[copy], most, starts, longest, cu_seqlens_k=kv_starts, causal=True
        )

    return PlannedRun(run, lambda: None)


def flashinfer_prefill(case: Case) -> PlannedRun:
    """FlashInfer's batch prefill over the paged cache."""
    import flashinfer

    case.require_plain()
    workspace = torch.empty(512 << 20, device="cuda", dtype=torch.uint8)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
    starts, pages = torch.from_numpy(case.batch.query_start_loc), page_lists(case)

    def plan() -> None:
        wrapper.plan(
            starts, *pages, *case.heads, case.batch.page_size, causal=True,
            q_data_type=case.q.dtype, kv_data_type=case.q.dtype,
        )  # fmt: skip

    plan()
    return PlannedRun(lambda copy: wrapper.run(case.q, case.kv[copy]), plan)


PREFILL_PEERS: dict[str, Callable[[Case], PlannedRun]] = {
    "flash_attention_3": flash_attention_3,
    "flash_attention_3_contiguous": flash_attention_3_contiguous,
    "flashinfer_prefill": flashinfer_prefill,
}
