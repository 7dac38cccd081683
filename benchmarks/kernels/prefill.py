"""Prompt chunks on a GPU: one request's chunks, short chunks after one prefix, and the peers that import.

    python -m benchmarks.kernels.prefill  # results/prefill-CARD.json
    python -m benchmarks.kernels.prefill --shapes  # results/prefill-shapes-CARD.json: the shapes of some models
    python -m benchmarks.kernels.prefill --tiles  # results/prefill-tiles-CARD.json: candidates for PREFILL_TILE

bf16, head_dim 128, 32/8 heads, pages of 16, or with --shapes those of `shape_table` that are named. A cell is one chunk
after a number of cached tokens, or a number of requests with a short chunk each after one shared prefix. `trunkattn`
is what a card gets, `trunkattn_portable` the kernel for any card, `trunkattn_hopper` the one for Hopper, also of shapes
with which it was not timed yet. Time is that of a CUDA graph of several runs, median of the replays. Some tokens of
every output are checked against float64. `trunkattn_one_graph` is what a card gets where only the lengths are known on
the host, as SGLang's prompts: a plan of fixed size, made on the device, in which as many CTAs as there are SMs take all
items.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import replace
from statistics import geometric_mean
from typing import Any

import numpy as np
import torch

import trunkattn
from benchmarks.kernels.decode import HEAD_DIM, PAGE_SIZE, TOLERANCE, microseconds
from benchmarks.kernels.decode_cases import CAPPED_QUERIES, Shape, attend
from benchmarks.lib.internals import take_prefill_tile
from benchmarks.lib.options import integer, need_gpu
from benchmarks.lib.report import short_name, write_result
from benchmarks.peers.gpu_kernels import Case, Features, Run
from benchmarks.peers.gpu_prefill import PREFILL_PEERS
from benchmarks.workloads.shape_table import SHAPES
from trunkattn.analysis.trees import TreeLevels, tree_batch
from trunkattn.gpu.hopper.spec import prefill_tile as hopper_prefill_tile
from trunkattn.gpu.portable.spec import prefill_tile
from trunkattn.gpu.tiles import PrefillTile

LLAMA = Shape("llama3-8b 32/8x128", 32, 8, HEAD_DIM)
# Those whose prompts the Hopper kernel computes: 16-bit caches, pages of whole 16 tokens, heads of 64, 128 or 256
PROMPT_SHAPES = tuple(
    shape
    for shape in SHAPES
    if shape.kv_dtype == shape.dtype and shape.page_size == PAGE_SIZE and shape.head_dim in (64, 128, 256)
)
MODELS = ("gpt-oss", "gemma3-12b")  # of --shapes without names
SHAPE_CELLS = ((1, 1024, 0), (1, 4096, 0), (1, 16384, 0), (1, 2048, 8192), (64, 64, 8192))
CHUNKS = (512, 1024, 2048, 4096, 8192, 16384)
CACHED = (0, 2048, 8192, 32768)
SHARED = [(requests, tokens, prefix) for prefix in (2048, 8192) for requests in (8, 64) for tokens in (24, 40, 64)]
SWEPT = ((512, 8192), (2048, 2048), (4096, 32768), (8192, 0))
TILES = ((64, 32, 4), (64, 64, 4), (128, 64, 4), (128, 64, 8), (128, 128, 8))  # rows, keys, warps
RUN_US = 2000  # of a graph, at least: what starts and ends one is then little


def make_case(requests: int, tokens: int, cached: int, shape: Shape = LLAMA, device: str = "cuda") -> Case:
    """Requests with a chunk of `tokens` each after `cached` tokens that all share; pages shuffled.

    Sinks weigh about as much as all tokens that the last query sees, and queries of a soft cap are larger, so that an
    output without either is wrong.
    """
    levels = [(1, cached), (requests, tokens)] if cached else [(requests, tokens)]
    nodes, lengths = zip(*levels, strict=True)
    batch = tree_batch(TreeLevels(nodes, lengths), shape.page_size, page_seed=1)
    batch = replace(batch, query_lens=np.full(requests, tokens, np.int32))
    torch.manual_seed(0)
    size = (batch.num_pages, shape.page_size, shape.num_kv_heads, shape.head_dim)
    keys, values = (torch.randn(size, device=device, dtype=shape.dtype) for _ in range(2))
    kv = [(keys, values)]
    q = torch.randn(requests * tokens, shape.num_qo_heads, shape.head_dim, device=device, dtype=shape.dtype)
    sinks = None
    if shape.sinks:
        seen = min(cached + tokens, shape.window or cached + tokens)
        sinks = (torch.randn(shape.num_qo_heads, device=device) + math.log(seen)).to(shape.dtype)
    features = Features(shape.window, shape.soft_cap, sinks)
    return Case(batch, q * CAPPED_QUERIES if shape.soft_cap else q, kv, [], features)


def flops(case: Case) -> int:
    """FLOPs of the pairs of a query token and a token that it sees."""
    (heads, _, dim), window, pairs = case.heads, case.features.window, 0
    for length, query_len in zip(case.batch.seq_lens.tolist(), case.batch.query_lens.tolist(), strict=True):
        seen = np.arange(length - query_len + 1, length + 1)
        pairs += int((seen if window is None else np.minimum(seen, window)).sum())
    return 4 * dim * heads * pairs


def largest_error(case: Case, out: torch.Tensor) -> float:
    """Against float64, on the first, middle and last tokens of the first and last request; NaN is an infinite error."""
    if out.isnan().any():
        return math.inf
    batch, window, worst = case.batch, case.features.window, 0.0
    for row in {0, len(batch.seq_lens) - 1}:
        first, last = batch.query_start_loc[row : row + 2].tolist()
        for token in {first, (first + last) // 2, last - 1}:
            end = int(batch.seq_lens[row]) - last + token + 1
            begin = 0 if window is None else max(0, end - window)
            pages = torch.from_numpy(batch.block_table[row, : -(-end // batch.page_size)]).to(out.device).long()
            k, v = (cache[pages].flatten(0, 1)[begin:end].double() for cache in case.kv[0])
            worst = max(worst, float((attend(case, case.q[token], k, v) - out[token].double()).abs().max()))
    return worst


def ours(case: Case, tile: PrefillTile | None = None) -> tuple[Run, trunkattn.Plan]:
    """This project, `auto`. tile: of the chunks, and by that which kernel computes them; None: what a card gets."""
    window, soft_cap, sinks = case.features
    config = trunkattn.AttentionConfig(
        *case.heads, case.batch.page_size, case.q.dtype, logits_soft_cap=soft_cap, sinks=sinks is not None
    )
    attention = trunkattn.BatchAttention(config, case.q.device)
    if tile:
        take_prefill_tile(attention, tile)
    batch = case.batch
    table, lens, starts = (torch.from_numpy(it) for it in (batch.block_table, batch.seq_lens, batch.query_start_loc))
    plan = attention.plan(table, lens, starts, sliding_window=window)
    out = torch.full_like(case.q, math.nan)
    return lambda copy: attention.run(plan, case.q, *case.kv[copy], out=out, sinks=sinks), plan


def made_with(tile: PrefillTile) -> Callable[[Case], Run]:
    """Makes runs of this project whose chunks have a tile."""
    return lambda case: ours(case, tile)[0]


def one_graph(case: Case) -> Run:
    """One graph of a plan of fixed size that is made on the device, where each prompt reads its own keys."""
    window, soft_cap, sinks = case.features
    config = trunkattn.AttentionConfig(
        *case.heads, case.batch.page_size, case.q.dtype,
        logits_soft_cap=soft_cap, sinks=sinks is not None, execution="serial",
    )  # fmt: skip
    batch = case.batch
    requests, pages = batch.block_table.shape
    capacity = trunkattn.Capacity(requests, 1, pages, len(case.kv[0][0]), 1, max_chunk_tokens=len(case.q))
    attention = trunkattn.BatchAttention(config, case.q.device, capacity)
    query_lens, lens = (torch.from_numpy(np.asarray(it, np.int32)) for it in (batch.query_lens, batch.seq_lens))
    table, device_lens, starts = (
        torch.from_numpy(it).to(case.q.device) for it in (batch.block_table, batch.seq_lens, batch.query_start_loc)
    )
    chunks = trunkattn.PromptChunks(0, query_lens, lens, 0)
    plan = attention.plan(table, device_lens, starts, sliding_window=window, chunks=chunks).only("chunks")
    out = torch.full_like(case.q, math.nan)
    return lambda copy: attention.run(plan, case.q, *case.kv[copy], out=out, sinks=sinks)


def measure(case: Case, make: Callable[[Case], Run]) -> dict[str, Any]:
    """Time, rate and error, or why there are none."""
    try:
        run = make(case)
        error = largest_error(case, run(0))
    except Exception as reason:  # a peer or a tile that cannot run here is reported, not fatal
        return {"missing": f"{type(reason).__name__}: {str(reason)[:200]}"}
    if error > TOLERANCE:
        return {"wrong": f"error {error:.3g}"}
    work = flops(case)
    runs = max(1, min(20, int(RUN_US / (work / 5e8))))  # at some 500 TFLOP/s
    us = microseconds(lambda _: run(0), runs)
    return {"us": round(us, 2), "tflops": round(work / us / 1e6, 1), "error": error}


def cell(requests: int, tokens: int, cached: int, peers: list[str], shape: Shape = LLAMA) -> dict[str, Any]:
    """One row of the result."""
    case = make_case(requests, tokens, cached, shape)
    _, plan = ours(case)
    stats = plan.stats
    row: dict[str, Any] = {"requests": requests, "tokens": tokens, "cached": cached}
    described = {"tiles": stats.tiles, "policy": stats.policy, "kv_tokens_read": stats.kv_tokens_read}
    row["trunkattn"] = measure(case, lambda case: ours(case)[0]) | described
    row["trunkattn_one_graph"] = measure(case, one_graph)
    row["trunkattn_portable"] = measure(case, lambda case: ours(case, prefill_tile(2, shape.head_dim))[0])
    if shape != LLAMA and torch.cuda.get_device_capability() == (9, 0):
        row["trunkattn_hopper"] = measure(case, lambda case: ours(case, hopper_prefill_tile(shape.head_dim))[0])
    for name in peers:
        row[name] = measure(case, PREFILL_PEERS[name])
    return row


def show(row: dict[str, Any]) -> None:
    """One line."""
    cells = {name: (it.get("us"), it.get("tflops")) if "us" in it else it for name, it in row.items() if _measured(it)}
    print(f"{row['requests']} x {row['tokens']} @ {row['cached']}: {cells}", flush=True)


def _measured(value: object) -> bool:
    return isinstance(value, dict)


def speedups(rows: list[dict[str, Any]], peers: list[str], ours: str = "trunkattn") -> dict[str, float]:
    """Geometric mean of a peer's time over ours, where both were measured."""
    found = {}
    for name in peers:
        both = [(row[name], row[ours]) for row in rows if ours in row]
        ratios = [peer["us"] / our["us"] for peer, our in both if "us" in peer and "us" in our]
        if ratios:
            found[name] = round(geometric_mean(ratios), 3)
    return found


def sweep(card: str) -> None:
    """Every candidate tile on a few cells."""
    rows = []
    cases = {each: make_case(1, *each) for each in SWEPT}
    for m, n, warps in TILES:
        for stages in (2, 3, 4):
            tile = PrefillTile(m, n, warps, stages, ctas_per_sm=2 if warps == 4 else 1)
            row: dict[str, Any] = {"tile": f"{m}x{n}, {warps} warps, {stages} stages"}
            for (tokens, cached), case in cases.items():
                row[f"{tokens} @ {cached}"] = measure(case, made_with(tile))
                if "missing" in row[f"{tokens} @ {cached}"]:
                    break  # so it will be in the other cells
            rows.append(row)
            print(row["tile"], {name: it.get("tflops", it) for name, it in row.items() if _measured(it)}, flush=True)
    write_result(f"prefill-tiles-{card}", {"card": torch.cuda.get_device_name(), "rows": rows}, "triton")


def shapes(card: str, chosen: list[Shape], peers: list[str]) -> None:
    """Some cells of every shape."""
    found = []
    for shape in chosen:
        print(shape.name, flush=True)
        rows = []
        for each in SHAPE_CELLS:
            rows.append(cell(*each, peers, shape))
            show(rows[-1])
            torch.cuda.empty_cache()
        ways = ("trunkattn", "trunkattn_one_graph", "trunkattn_portable", "trunkattn_hopper")
        speed = {name: speedups(rows, peers, name) for name in ways}
        print(speed, flush=True)
        found.append({"shape": shape.name, "speedup": speed, "rows": rows})
    figures = {"card": torch.cuda.get_device_name(), "dtype": "bfloat16", "page_size": PAGE_SIZE, "shapes": found}
    write_result(f"prefill-shapes-{card}", figures, "triton")


def prompt_shapes(names: list[str]) -> list[Shape]:
    """The shapes of prompts whose names hold one of some texts; none: those of `MODELS`.

    Raises:
        ValueError: a text is in no such name.
    """
    for text in names:
        if not any(text in shape.name for shape in PROMPT_SHAPES):
            known = ", ".join(repr(shape.name) for shape in PROMPT_SHAPES)
            raise ValueError(f"no shape has {text!r} in its name: expected a part of one of {known}")
    return [shape for shape in PROMPT_SHAPES if any(text in shape.name for text in names or MODELS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--peers", nargs="*", default=list(PREFILL_PEERS), choices=list(PREFILL_PEERS), help="default: all"
    )
    parser.add_argument(
        "--chunks", nargs="+", type=integer(1, 1_000_000), default=CHUNKS, help="query tokens of the one request"
    )
    parser.add_argument("--cached", nargs="+", type=integer(0, 1_000_000), default=CACHED, help="tokens before them")
    parser.add_argument("--tiles", action="store_true", help="time candidate tiles instead")
    parser.add_argument("--shapes", nargs="*", help=f"time models' shapes instead; without names {MODELS}")
    arguments = parser.parse_args()
    try:
        chosen = prompt_shapes(arguments.shapes or [])
    except ValueError as error:
        parser.error(f"argument --shapes: {error}")
    need_gpu()
    name = torch.cuda.get_device_name()
    card = short_name(name)
    if arguments.tiles:
        return sweep(card)
    if arguments.shapes is not None:
        return shapes(card, chosen, arguments.peers)
    chunks, shared = [], []
    for tokens in arguments.chunks:
        for cached in arguments.cached:
            chunks.append(cell(1, tokens, cached, arguments.peers))
            show(chunks[-1])
            torch.cuda.empty_cache()
    for requests, tokens, prefix in SHARED:
        shared.append(cell(requests, tokens, prefix, arguments.peers))
        show(shared[-1])
    figures = {
        "card": name, "heads": "32/8", "head_dim": HEAD_DIM, "page_size": PAGE_SIZE, "dtype": "bfloat16",
        "speedup_chunks": speedups(chunks, arguments.peers), "speedup_shared": speedups(shared, arguments.peers),
        "chunks": chunks, "shared": shared,
    }  # fmt: skip
    print(figures["speedup_chunks"], figures["speedup_shared"])
    write_result(f"prefill-{card}", figures, "triton")


if __name__ == "__main__":
    main()
