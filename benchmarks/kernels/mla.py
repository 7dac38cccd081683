"""Latent attention (MLA) on a GPU, in its absorbed form, beside FlashMLA and FlashAttention-3: one layer, decoding.

    python -m benchmarks.kernels.mla                                             # all cells; results/mla-CARD.json
    python -m benchmarks.kernels.mla --heads 16 --batches "64 x (8192 + 512)"
    python -m benchmarks.kernels.mla --fp8 --heads 8 16 32 128                   # results/mla-fp8-CARD.json

Times are measured as in decode.py: CUDA graphs over copies of the cache that each find the L2 cache cold, medians. A
batch is REQUESTS x (tokens of each level, from what all share to a request's own), or one of two whose requests have
each a length of its own: users of a chat, and agents in the middle of an answer. SOL = max(unique bytes / read
bandwidth, FLOPs / bf16 matrix rate), both measured here. Outputs are compared with float64, those of peers too.
`trunkattn` has a plan of its own, `trunkattn_one_graph` one of fixed size, which serves any batch. Peers are measured
if they import: `flashmla` and `fa3` of vLLM's wheels. With `--fp8` ours is measured with a cache of 8 bits (e4m3)
beside one of 16 bits, and beside FlashMLA over 8 bits, which rounds queries and probabilities to e4m3 too.
"""

import argparse
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch

from benchmarks.kernels.calibration_families import LATENT_SCALE
from benchmarks.kernels.decode import ceilings, microseconds
from benchmarks.kernels.decode_cases import unique_tokens
from benchmarks.lib.options import accepted_by, integer, need_gpu
from benchmarks.lib.report import short_name, with_earlier, write_result
from benchmarks.workloads.arrivals import LONGEST_PRIVATE
from benchmarks.workloads.serving import agent_batch, conversation_batch, conversation_lengths
from benchmarks.workloads.shape_table import batch_name, parse_batch
from trunkattn import AttentionConfig, BatchAttention, Capacity
from trunkattn.analysis.batch import PagedBatch
from trunkattn.analysis.trees import TreeLevels, tree_batch

HEADS = (8, 12, 16, 20, 32, 64, 96, 128)
BATCHES = (
    "64 x (8192 + 512)", "64 x (4 groups x 12032 + 256)", "128 x (896 + 320)", "128 x (8 groups x 1216 + 512)",
    "64 x (4096)", "8 x (8192)", "1 x (4096)",
    "96 x (2048 + 8 groups x 512 + 128)", "32 x (16384 + 64)", "256 x (512 + 64)", "48 x (6 groups x 3072 + 704)",
    "17 x (2944)", "5 x (20032 + 1344)",
)  # fmt: skip
SEED = 0
LATENT, ROPE, PAGE_SIZE, SCALE = 512, 64, 64, LATENT_SCALE
FLUSH_BYTES, MOST_COPIES = 300_000_000, 24
TOLERANCE = 0.1  # of the largest output: bf16 probabilities
NARROW_TOLERANCE = 0.2  # queries and probabilities of e4m3
Run = Callable[[int], Any]  # copy of the cache -> output [T, Hq, latent]


class Case(NamedTuple):
    """One cell. caches: copies of one, which take turns."""

    batch: PagedBatch
    q: torch.Tensor
    caches: list[torch.Tensor]

    @property
    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """block_table and seq_lens."""
        return torch.from_numpy(self.batch.block_table), torch.from_numpy(self.batch.seq_lens)


def conversations() -> PagedBatch:
    """64 users of one chat: a system prompt of three levels, then a text of their own of up to 4,096 tokens."""
    own = conversation_lengths(64, SEED)[:, 0].clip(max=LONGEST_PRIVATE)
    return conversation_batch(own.tolist(), PAGE_SIZE, SEED)


def agents() -> PagedBatch:
    """64 agents in the middle of an answer: a prompt and tools that some share, then their earlier turns."""
    return agent_batch(64, PAGE_SIZE, SEED)


RAGGED: Final[Mapping[str, Callable[[], PagedBatch]]] = MappingProxyType(
    {"64 conversations": conversations, "64 agents": agents}
)


def read_batch(text: str) -> tuple[str, PagedBatch]:
    """The name and the requests of a batch: one of `RAGGED`, or a tree as `parse_batch` reads it."""
    if text in RAGGED:
        return text, RAGGED[text]()
    tree = parse_batch(text)
    return batch_name(tree), paged(tree)


def paged(tree: TreeLevels) -> PagedBatch:
    """The requests of a tree, pages shuffled."""
    return tree_batch(tree, PAGE_SIZE, page_seed=1)


def make_case(batch: PagedBatch, heads: int) -> Case:
    """Random queries and rows."""
    torch.manual_seed(0)
    q = torch.randn(len(batch.seq_lens), heads, LATENT + ROPE, dtype=torch.bfloat16, device="cuda")
    cache = torch.randn(batch.num_pages, PAGE_SIZE, LATENT + ROPE, dtype=torch.bfloat16, device="cuda")
    copies = max(2, min(math.ceil(FLUSH_BYTES / (unique_tokens(batch) * (LATENT + ROPE) * 2)), MOST_COPIES))
    return Case(batch, q, [cache, *(cache.clone() for _ in range(copies - 1))])


def sol_us(batch: PagedBatch, heads: int, limits: tuple[float, float]) -> float:
    """The speed of light: what the bytes take that are read once, or the arithmetic."""
    size = 2 * (unique_tokens(batch) * (LATENT + ROPE) + len(batch.seq_lens) * heads * (2 * LATENT + ROPE))
    flops = 2 * (2 * LATENT + ROPE) * heads * int(batch.seq_lens.sum())
    return max(size / limits[0], flops / limits[1])


def error_of(case: Case, out: torch.Tensor) -> float:
    """Largest difference from float64 on rows from everywhere, of the largest output; NaN is an infinite error."""
    if out.isnan().any():
        return math.inf
    worst, cache = 0.0, case.caches[0].to(case.q.dtype)
    for row in sorted({0, len(out) // 3, len(out) // 2, len(out) - 1}):
        length = int(case.batch.seq_lens[row])
        pages = torch.from_numpy(case.batch.block_table[row, : -(-length // PAGE_SIZE)]).to(out.device).long()
        rows = cache[pages].flatten(0, 1)[:length].double()
        want = (case.q[row].double() @ rows.T * SCALE).softmax(-1) @ rows[:, :LATENT]
        worst = max(worst, float((out[row].double() - want).abs().max() / want.abs().max()))
    return worst


def ours(case: Case, fixed: bool = False) -> tuple[Run, str]:
    """This project, and the tiling that it takes. fixed: the plan has a capacity, for twice as many requests of twice
    the length."""
    config = AttentionConfig(
        case.q.shape[1], 1, LATENT + ROPE, PAGE_SIZE, case.q.dtype, kv_dtype=case.caches[0].dtype, sm_scale=SCALE,
        latent_dim=LATENT,
    )  # fmt: skip
    requests, pages = case.batch.block_table.shape
    capacity = Capacity(2 * requests, 2 * requests, 2 * pages, case.batch.num_pages, 1) if fixed else None
    attention = BatchAttention(config, "cuda", capacity)
    plan = attention.plan(*case.tables)
    out = torch.full((*case.q.shape[:2], LATENT), math.nan, dtype=torch.bfloat16, device="cuda")

    def run(copy: int) -> torch.Tensor:
        result = attention.run(plan, case.q, case.caches[copy], None, out)
        assert isinstance(result, torch.Tensor)
        return result

    return run, plan.stats.policy


def flashmla(case: Case) -> Run:
    """FlashMLA's dense decode, its schedule made before."""
    import flashmla as peer

    q, (table, lens) = case.q[:, None].contiguous(), (table.cuda() for table in case.tables)
    schedule = peer.decode(q, case.caches[0][:, :, None], table, lens, SCALE)[2]
    return lambda copy: peer.decode(q, case.caches[copy][:, :, None], table, lens, SCALE, schedule)[0][:, 0]


def fa3(case: Case) -> Run:
    """FlashAttention-3 with values of 512 dims (`q_v`), its schedule made before."""
    import fa3 as peer

    table, lens = (table.cuda() for table in case.tables)
    latent, rope = case.q[..., :LATENT].contiguous(), case.q[..., LATENT:].contiguous()
    requests, heads, longest = len(case.q), case.q.shape[1], int(lens.max())
    starts = torch.arange(requests + 1, dtype=torch.int32, device="cuda")
    schedule = peer.get_scheduler_metadata(
        requests, 1, longest, heads, 1, ROPE, lens, headdim_v=LATENT, cu_seqlens_q=starts, page_size=PAGE_SIZE,
        causal=True, qkv_dtype=torch.bfloat16,
    )  # fmt: skip

    def run(copy: int) -> torch.Tensor:
        cache = case.caches[copy][:, :, None]
        return peer.flash_attn_varlen_func(
            rope, cache[..., LATENT:], cache[..., :LATENT], 1, starts, longest, seqused_k=lens, block_table=table,
            causal=True, softmax_scale=SCALE, q_v=latent, scheduler_metadata=schedule,
        )  # fmt: skip

    return run


def flashmla_fp8(case: Case) -> Run:
    """FlashMLA's dense decode over a cache of e4m3, its schedule made before. Queries are rounded to e4m3."""
    from flashmla import _flashmla_extension_C  # noqa: F401

    peer, heads = torch.ops._flashmla_extension_C, case.q.shape[1]
    q, (table, lens) = case.q[:, None].to(torch.float8_e4m3fn), (table.cuda() for table in case.tables)
    scale, schedule = torch.ones(1, device="cuda"), peer.get_mla_decoding_metadata_dense_fp8(lens, heads, 1)

    def run(copy: int) -> torch.Tensor:
        cache = case.caches[copy][:, :, None]
        out, _ = peer.fwd_kvcache_mla_fp8(q, cache, LATENT, lens, table, SCALE, True, *schedule, scale, scale)
        result: torch.Tensor = out[:, 0]
        return result

    return run


PEERS = {"flashmla": flashmla, "fa3": fa3}


def measure(case: Case, run: Run, tolerance: float = TOLERANCE) -> dict[str, Any]:
    """Time and error, or why there is none."""
    error = error_of(case, run(0))
    if error > tolerance:
        return {"wrong": f"error {error:.3g}"}
    return {"us": round(microseconds(run, len(case.caches)), 2), "error": round(error, 4)}


def row_of(name: str, batch: PagedBatch, heads: int, limits: tuple[float, float]) -> dict[str, Any]:
    """One cell: SOL, ours and the peers."""
    case = make_case(batch, heads)
    row: dict[str, Any] = {"batch": name, "heads": heads, "sol_us": round(sol_us(batch, heads, limits), 2)}
    run, tiling = ours(case)
    row["trunkattn"] = measure(case, run) | {"tiling": tiling}
    row["trunkattn_one_graph"] = measure(case, ours(case, fixed=True)[0])
    return row | {name: measure_peer(case, peer) for name, peer in PEERS.items()}


def measure_peer(case: Case, peer: Callable[[Case], Run], tolerance: float = TOLERANCE) -> dict[str, Any]:
    """Time and error of a peer. One that cannot run here is reported, not fatal."""
    try:
        return measure(case, peer(case), tolerance)
    except Exception as reason:
        return {"missing": f"{type(reason).__name__}: {str(reason)[:200]}"}


def fp8_row(name: str, batch: PagedBatch, heads: int, limits: tuple[float, float]) -> dict[str, Any]:
    """One cell: ours with a cache of 16 bits and with one of 8, and FlashMLA with one of 8."""
    case = make_case(batch, heads)
    narrow = case._replace(caches=[cache.to(torch.float8_e4m3fn) for cache in case.caches])
    row: dict[str, Any] = {"batch": name, "heads": heads}
    row |= {"bf16": measure(case, ours(case)[0]), "fp8": measure(narrow, ours(narrow)[0])}
    return row | {"flashmla_fp8": measure_peer(narrow, flashmla_fp8, NARROW_TOLERANCE)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--heads", nargs="+", type=integer(1, 1024), default=HEADS, help=f"query heads; default: {HEADS}"
    )
    parser.add_argument(
        "--batches",
        nargs="+",
        type=accepted_by(read_batch),
        default=(*BATCHES, *RAGGED),
        help=f'such as "64 x (8192 + 512)" or "64 agents"; default: {len(BATCHES) + len(RAGGED)}',
    )
    parser.add_argument("--fp8", action="store_true", help="a cache of 8 bits beside one of 16")
    arguments = parser.parse_args()
    need_gpu()
    limits, card, rows = ceilings(), torch.cuda.get_device_name(), list[dict[str, Any]]()
    kind, measured_row = ("mla-fp8", fp8_row) if arguments.fp8 else ("mla", row_of)
    name = f"{kind}-{short_name(card)}"
    figures = {"card": card, "read_tb_per_s": round(limits[0] / 1e6, 3), "bf16_tflops": round(limits[1] / 1e6, 1)}
    for heads in arguments.heads:
        for text in arguments.batches:
            rows.append(measured_row(*read_batch(text), heads, limits))
            torch.cuda.empty_cache()
            print({key: cell.get("us", cell) if isinstance(cell, dict) else cell for key, cell in rows[-1].items()})
            write_result(name, figures | {"rows": with_earlier(name, rows, ("batch", "heads"))}, "triton")


if __name__ == "__main__":
    main()
