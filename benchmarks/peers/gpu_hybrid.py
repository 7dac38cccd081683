"""Other projects on a hybrid batch: row 0 is a prompt chunk, all others are decodes; see `gpu_kernels`."""

from collections.abc import Callable
from dataclasses import replace

import torch

from benchmarks.peers.gpu_kernels import Case, page_lists

HybridRun = Callable[[int], tuple[torch.Tensor, ...]]  # copy of the cache -> outputs, in the order of the query tokens


def halves(case: Case) -> tuple[Case, Case]:
    """The chunk by itself, and the decodes by themselves, on the same cache."""
    batch, tokens = case.batch, int(case.batch.query_lens[0])

    def part(rows: slice, q: torch.Tensor) -> Case:
        table, lens, query_lens = batch.block_table[rows], batch.seq_lens[rows], batch.query_lens[rows]
        taken = replace(batch, block_table=table, seq_lens=lens, query_lens=query_lens)
        return replace(case, batch=taken, q=q)

    return part(slice(0, 1), case.q[:tokens]), part(slice(1, None), case.q[tokens:])


def one_after_other(first: HybridRun, second: HybridRun) -> HybridRun:
    """Both on the current stream."""
    return lambda copy: (*first(copy), *second(copy))


def on_two_streams(first: HybridRun, second: HybridRun) -> HybridRun:
    """The second on a side stream that is forked from the current one, and joined to it."""
    side = torch.cuda.Stream()

    def run(copy: int) -> tuple[torch.Tensor, ...]:
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        begun = first(copy)
        with torch.cuda.stream(side):
            beside = second(copy)
        main.wait_stream(side)
        return (*begun, *beside)

    return run


def fa3_batched(case: Case) -> HybridRun:
    """FlashAttention-3, all requests in one call of ragged queries; the number of splits is its own choice, and what it
    plans once per step is not part of its time."""
    import fa3

    batch, (table, lens) = case.batch, case.device_batch
    starts = torch.from_numpy(batch.query_start_loc).cuda()
    most, longest = int(batch.query_lens.max()), int(batch.seq_lens.max())
    metadata = fa3.get_scheduler_metadata(
        len(lens), most, longest, *case.heads, lens, cu_seqlens_q=starts, page_size=batch.page_size, causal=True
    )

    def run(copy: int) -> tuple[torch.Tensor, ...]:
        out = fa3.flash_attn_varlen_func(
            case.q, *case.kv[copy], most, starts, longest, seqused_k=lens, block_table=table, causal=True,
            scheduler_metadata=metadata,
        )  # fmt: skip
        return (out,)

    return run


def fa3_prefill(case: Case) -> HybridRun:
    """FlashAttention-3 on only the chunk."""
    return fa3_batched(halves(case)[0])


def fa3_decode(case: Case) -> HybridRun:
    """FlashAttention-3 on only the decodes."""
    return fa3_batched(halves(case)[1])


def fa3_serial(case: Case) -> HybridRun:
    """FlashAttention-3, a call for the chunk and one for the decodes."""
    return one_after_other(fa3_prefill(case), fa3_decode(case))


def fa3_streams(case: Case) -> HybridRun:
    """Both calls on two streams."""
    return on_two_streams(fa3_prefill(case), fa3_decode(case))


def flashinfer_pod(case: Case) -> HybridRun:
    """FlashInfer's POD-Attention. It takes the chunk's keys and values contiguous: the copy is not part of its time."""
    import flashinfer

    chunk, decodes = halves(case)
    page, length = case.batch.page_size, int(chunk.batch.seq_lens[0])
    pages = torch.from_numpy(chunk.batch.block_table[0, : -(-length // page)]).cuda().long()
    contiguous = [tuple(cache[pages].flatten(0, 1)[:length] for cache in caches) for caches in case.kv]
    workspace = torch.empty(512 << 20, device="cuda", dtype=torch.uint8)
    wrapper = flashinfer.PODWithPagedKVCacheWrapper(workspace, "NHD")
    dtypes = {"q_data_type": case.q.dtype, "kv_data_type": case.q.dtype}
    wrapper.plan(*page_lists(decodes), *case.heads, page, **dtypes)
    return lambda copy: wrapper.run(chunk.q, *contiguous[copy], decodes.q, case.kv[copy], causal_p=True)


HYBRID_PEERS: dict[str, Callable[[Case], HybridRun]] = {
    "fa3_serial": fa3_serial,
    "fa3_prefill": fa3_prefill,
    "fa3_decode": fa3_decode,
    "fa3_streams": fa3_streams,
    "fa3_batched": fa3_batched,
    "flashinfer_pod": flashinfer_pod,
}
