"""Hybrid batches on a GPU: one prompt chunk and many decodes, serial or at once, and the peers (POD-Attention §5.1).

    python -m benchmarks.kernels.hybrid  # all parts; results/hybrid-CARD.json
    python -m benchmarks.kernels.hybrid --part table chunks  # these; the file keeps what it has of the others
    python -m benchmarks.kernels.hybrid --part sweep --quick  # 30 batches; results/hybrid-quick-CARD.json

table: six batches. sweep: random batches in which prefill and decode are each 20 % or more of FlashAttention-3's serial
time (POD's Figure 11). chunks: a prompt of 16k in 32 chunks beside decodes that fill two waves of CTAs, and one
decode more (its Figure 6). splits: prefill cut less and more than by default (its Table 8). on_device: batches of
the sweep, planned on the device without a wait (`PromptChunks`), beside the way of engines that do not overlap: decodes
by our kernels and prompts by FlashAttention-3.

bf16, head_dim 128, pages of 16, shuffled, none shared. Times are of CUDA graphs (of FlashInfer's POD, whose launches a
graph does not capture, of the calls), a run on each of several copies of the cache, together several times the L2
cache; the ways to run a batch take turns, and the median counts. All outputs are compared with FlashAttention-3's, in
the table also with float64. `trunkattn` is execution="auto".
"""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

import trunkattn
from benchmarks.kernels.decode import HEAD_DIM, PAGE_SIZE
from benchmarks.lib.internals import backend_of, execution_of, step_of
from benchmarks.lib.options import integer, need_gpu
from benchmarks.lib.report import environment, read_result, short_name, write_result
from benchmarks.peers.gpu_hybrid import HYBRID_PEERS, HybridRun, halves, on_two_streams
from benchmarks.peers.gpu_kernels import Case
from benchmarks.workloads.hybrid_batches import (
    EXECUTIONS,
    MODELS,
    MOST_DECODES,
    SPLITS,
    TABLE,
    HybridBatch,
    chunk_batches,
    limits,
    summary,
    sweep_batches,
)
from trunkattn.analysis.batch import pages_for
from trunkattn.gpu.cards import card_at
from trunkattn.gpu.chunk_planner import ChunkPlanner
from trunkattn.gpu.tiles import prefill_device
from trunkattn.planner.from_config import make_planner

CUTS = {"uncut": 0, "default": 1, "twice": 2, "fourfold": 4}  # slots that prefill is cut for, in those of the card
FLUSH_BYTES = 200_000_000
TOLERANCE = 0.02  # see `difference`
SAVED_EVERY = 30  # rows
NOT_CAPTURED = ("flashinfer_pod",)
QUICK = 30  # batches of the sweep

Makers = dict[str, Callable[[Case], HybridRun]]  # ways to run a batch, by name


def make_case(batch: HybridBatch, pool: Sequence[torch.Tensor]) -> Case:
    """Makes a case. pool: flat keys and values, of which a case's copies of the cache are parts."""
    copies = max(2, math.ceil(FLUSH_BYTES / (4 * batch.elements)))
    copies = min(copies, pool[0].numel() // batch.elements)
    if copies == 0:
        raise ValueError(f"{batch} needs {batch.elements} elements of keys: expected at most {pool[0].numel()}")
    shape = (copies, batch.pages, PAGE_SIZE, batch.heads[1], HEAD_DIM)
    k, v = (flat[: copies * batch.elements].view(shape) for flat in pool)
    paged = batch.paged()
    q = torch.randn(int(paged.query_start_loc[-1]), batch.heads[0], HEAD_DIM, device=k.device, dtype=k.dtype)
    return Case(paged, q, list(zip(k, v, strict=True)), [])


class Ours:
    """This project. Each use has a BatchAttention of its own, so that the plans of a batch live side by side."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, tuple[int, int]], trunkattn.BatchAttention] = {}
        self.plans: dict[str, trunkattn.Plan] = {}  # of each use, the latest

    def _attention(self, use: str, heads: tuple[int, int], execution: str, cut: int) -> trunkattn.BatchAttention:
        if (use, heads) not in self._made:
            config = trunkattn.AttentionConfig(*heads, HEAD_DIM, PAGE_SIZE, torch.bfloat16, execution=execution)
            made = trunkattn.BatchAttention(config, "cuda")
            if cut != 1:
                backend, num_sms = backend_of(made), card_at("cuda").num_sms
                device = prefill_device(num_sms, backend._chunks.tile)
                device = replace(device, num_workers=max(1, cut * device.num_workers))
                chunks = ChunkPlanner(config, backend._chunks.tile, num_sms)
                chunks._planner = make_planner(replace(config, policy="per_query"), device)
                chunks._uncut = chunks._planner.spec
                backend._chunks = chunks
            self._made[use, heads] = made
        return self._made[use, heads]

    def run(self, use: str, case: Case, execution: str, cut: int = 1) -> HybridRun:
        """Plans a case. cut: prefill is cut for so many times the card's slots; 0: not at all."""
        attention = self._attention(use, case.heads[:2], execution, cut)
        batch = case.batch
        table, lens, starts = map(torch.from_numpy, (batch.block_table, batch.seq_lens, batch.query_start_loc))
        plan = self.plans[use] = attention.plan(table, lens, starts)
        out = torch.full_like(case.q, math.nan)

        def once(copy: int) -> tuple[torch.Tensor, ...]:
            attention.run(plan, case.q, *case.kv[copy], out=out)
            return (out,)

        return once

    def on_device(self, case: Case) -> HybridRun:
        """Plans a case on the device, decodes first; the host knows only the chunk's lengths."""
        batch, chunk = case.batch, int(case.batch.query_lens[0])
        config = trunkattn.AttentionConfig(*case.heads[:2], HEAD_DIM, PAGE_SIZE, torch.bfloat16)
        capacity = trunkattn.Capacity(MOST_DECODES, MOST_DECODES, 2048, len(case.kv[0][0]), 1, max_chunk_tokens=chunk)
        attention = trunkattn.BatchAttention(config, "cuda", capacity)
        rows = [*range(1, len(batch.seq_lens)), 0]
        table, lens, query_lens = (each[rows] for each in (batch.block_table, batch.seq_lens, batch.query_lens))
        starts = np.append(0, np.cumsum(query_lens)).astype(np.int32)
        its_queries, its_tokens = (torch.from_numpy(each[-1:].copy()) for each in (query_lens, lens))
        chunks = trunkattn.PromptChunks(len(rows) - 1, its_queries, its_tokens, int(lens[:-1].sum()))
        on_card = [torch.from_numpy(each).cuda() for each in (table, lens, starts)]
        plan = self.plans["device"] = attention.plan(on_card[0], on_card[1], on_card[2], chunks=chunks)
        q = torch.cat([case.q[chunk:], case.q[:chunk]])
        out = torch.full_like(q, math.nan)

        def once(copy: int) -> tuple[torch.Tensor, ...]:
            attention.run(plan, q, *case.kv[copy], out=out)
            return out[len(rows) - 1 :], out[: len(rows) - 1]

        return once

    def makers(self) -> Makers:
        """Makers by name."""
        found: Makers = {name: partial(self.run, name, execution=execution) for name, execution in EXECUTIONS.items()}
        found["trunkattn_prefill"] = lambda case: self.run("prefill", halves(case)[0], "serial")
        found["trunkattn_decode"] = lambda case: self.run("decode", halves(case)[1], "serial")
        found["trunkattn_streams"] = lambda case: on_two_streams(
            found["trunkattn_prefill"](case), found["trunkattn_decode"](case)
        )
        return found


def tokens_of(name: str, chunk: int) -> slice:
    """Query tokens that a way to run a batch computes."""
    return {"prefill": slice(0, chunk), "decode": slice(chunk, None)}.get(name.split("_")[-1], slice(None))


def difference(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest |out - expected| / (|expected| + 0.25): beside thousands of keys outputs are below that, beside few about
    1. NaN is an infinite one."""
    worst = float(((out - expected).abs() / (expected.abs() + 0.25)).max())
    return math.inf if math.isnan(worst) else worst


def oracle(case: Case) -> tuple[list[int], torch.Tensor]:
    """Some query tokens, of the chunk and of decodes, and their outputs in float64."""
    batch, (hq, hkv, dim) = case.batch, case.heads
    chunk, total = int(batch.query_lens[0]), int(batch.query_start_loc[-1])
    tokens = sorted({0, chunk // 2, chunk - 1, chunk, (chunk + total) // 2, total - 1})
    found = []
    for token in tokens:
        row = max(0, token - chunk + 1)
        seen = int(batch.seq_lens[row] - (chunk - 1 - token if row == 0 else 0))
        pages = torch.from_numpy(batch.block_table[row, : pages_for(seen, PAGE_SIZE)]).to(case.q.device).long()
        k, v = (cache[pages].flatten(0, 1)[:seen].double() for cache in case.kv[0])
        q = case.q[token].double().view(hkv, hq // hkv, dim)
        weights = (torch.einsum("hgd,lhd->hgl", q, k) / math.sqrt(dim)).softmax(-1)
        found.append(torch.einsum("hgl,lhd->hgd", weights, v).reshape(hq, dim))
    return tokens, torch.stack(found)


def _run_copies(run: HybridRun, copies: int) -> None:
    for copy in range(copies):
        run(copy)


def time_together(runs: dict[str, HybridRun], copies: int, budget_us: float) -> dict[str, float | str]:
    """µs of a run of each, or why there are none. budget_us: of all replays."""
    replays, found = dict[str, Callable[[], object]](), dict[str, float | str]()
    for name, run in runs.items():
        if name in NOT_CAPTURED:
            replays[name] = partial(_run_copies, run, copies)
            continue
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                for copy in range(copies):
                    run(copy)
        except Exception as reason:  # what cannot be captured is reported, not fatal
            found[name] = f"{type(reason).__name__}: {str(reason)[:200]}"
        else:
            replays[name] = graph.replay

    def turn() -> list[torch.cuda.Event]:
        """Queues all without waiting: between two events there is nothing but one way to run the batch."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(replays) + 1)]
        marks[0].record()
        for replay, mark in zip(replays.values(), marks[1:], strict=True):
            replay()
            mark.record()
        return marks

    warm_up = turn()
    torch.cuda.synchronize()
    turns = max(5, min(25, int(budget_us / (1 + 1e3 * warm_up[0].elapsed_time(warm_up[-1])))))
    marked = [turn() for _ in range(turns)]
    torch.cuda.synchronize()
    for number, name in enumerate(replays):
        times = [marks[number].elapsed_time(marks[number + 1]) for marks in marked]
        found[name] = round(median(times) * 1e3 / copies, 2)
    return found


def measure(batch: HybridBatch, case: Case, makers: Makers, budget_us: float, exact: bool) -> dict[str, Any]:
    """One row: µs of every way to run a batch, the largest difference from the first that computes all of it, and what
    was not measured. exact: also from float64."""
    row: dict[str, Any] = {"batch": str(batch), **asdict(batch), "heads": "{}/{}".format(*batch.heads), "us": {}}
    row |= {"difference": 0.0, "missing": {}}
    runs, reference = dict[str, HybridRun](), None
    tokens, truth = oracle(case) if exact else ([], torch.empty(0))
    for name, make in makers.items():
        try:
            run = make(case)
            out = torch.cat(run(0)).float()
            span = tokens_of(name, batch.chunk)
            if reference is None and span == slice(None):
                reference, row["reference"] = out, name
            if reference is None:
                raise ValueError("nothing to compare it with")
            apart = difference(out, reference[span])
            if exact:
                complete = reference.clone()
                complete[span] = out
                apart = max(apart, difference(complete[tokens].double(), truth))
            if apart > TOLERANCE:
                raise ValueError(f"wrong by {apart:.3g}")
        except Exception as reason:  # what cannot run here is reported, not fatal
            row["missing"][name] = f"{type(reason).__name__}: {str(reason)[:200]}"
            continue
        runs[name], row["difference"] = run, max(row["difference"], round(apart, 5))
    for name, us in time_together(runs, len(case.kv), budget_us).items():
        row["missing" if isinstance(us, str) else "us"][name] = us
    return row | limits(row["us"])


class Session:
    """What the parts share: the pool, this project's attentions, the chosen peers, and the result so far."""

    def __init__(self, arguments: argparse.Namespace, card: str) -> None:
        self.arguments, self.ours = arguments, Ours()
        self.name = f"hybrid-{'quick-' if arguments.quick else ''}{short_name(card)}"
        kept = read_result(self.name)
        self.result: dict[str, Any] = {"card": card, "head_dim": HEAD_DIM, "page_size": PAGE_SIZE, "dtype": "bfloat16"}
        self.result |= {part: kept[part] for part in PARTS if part in kept}
        self._pool: list[torch.Tensor] = []

    def peers(self, *names: str) -> Makers:
        """The chosen ones of these."""
        return {name: HYBRID_PEERS[name] for name in names if name in self.arguments.peers}

    def run(
        self, part: str, batches: list[HybridBatch], makers: Callable[[int], Makers], budget_us: float,
        exact: bool = False, seconds: float = math.inf, show: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:  # fmt: skip
        """Measures batches; makers: for the number of a batch, the first of which computes all of it. seconds: after
        which no batch is begun. Saves now and then, and what there is if something ends it."""
        self._prepare(batches)
        begun, rows = perf_counter(), list[dict[str, Any]]()
        try:
            for number, batch in enumerate(batches):
                if perf_counter() - begun > seconds:
                    print(f"{part}: stopped after {len(rows)} of {len(batches)} batches, {seconds:.0f} s", flush=True)
                    break
                rows.append(measure(batch, make_case(batch, self._pool), makers(number), budget_us, exact))
                if "trunkattn" in rows[-1]["us"]:
                    rows[-1]["auto"] = execution_of(self.ours.plans["trunkattn"])
                if show:
                    show(rows[-1])
                if (number + 1) % SAVED_EVERY == 0:
                    self._save(part, rows, begun)
                    print(f"{part}: {number + 1} batches, {perf_counter() - begun:.0f} s", flush=True)
        finally:
            self._save(part, rows, begun)

    def _prepare(self, batches: list[HybridBatch]) -> None:
        """A pool that holds two copies of every batch, or more of small ones."""
        largest = max(batch.elements for batch in batches)
        elements = largest + max(largest, FLUSH_BYTES // 4)
        torch.manual_seed(0)
        if not self._pool or self._pool[0].numel() < elements:
            self._pool.clear()
            torch.cuda.empty_cache()
            self._pool += [torch.empty(elements, device="cuda", dtype=torch.bfloat16).normal_() for _ in range(2)]

    def _save(self, part: str, rows: list[dict[str, Any]], begun: float) -> None:
        """Writes the result, other parts as they are."""
        where = {name: value for name, value in environment().items() if name in ("date", "commit")}
        self.result[part] = where | {
            "seconds": round(perf_counter() - begun, 1),
            "summary": summary(rows),
            "rows": rows,
        }
        write_result(self.name, self.result, "triton")


def print_row(row: dict[str, Any]) -> None:
    """One line."""
    times = ", ".join(f"{name} {us:.0f}" for name, us in (*row["us"].items(), *_oracles(row)))
    print(f"{row['batch']}: {times} µs", *(f"[{name}: {why}]" for name, why in row["missing"].items()), flush=True)


def _oracles(row: dict[str, Any]) -> list[tuple[str, float]]:
    return [(f"max(p, d) of {owner}", us) for owner, us in row["oracle_us"].items()]


def table(session: Session) -> None:
    """All ways to run six batches."""
    makers = session.peers(*HYBRID_PEERS) | session.ours.makers()
    session.run("table", list(TABLE), lambda _: makers, 500_000, exact=True, show=print_row)


def sweep(session: Session) -> None:
    """Random batches; FlashInfer's POD on some of each model."""
    makers = session.peers("fa3_serial", "fa3_prefill", "fa3_decode") | session.ours.makers()
    del makers["trunkattn_streams"]
    pod, every = session.peers("flashinfer_pod"), session.arguments.pod_every
    count = QUICK if session.arguments.quick else session.arguments.batches

    def chosen(number: int) -> Makers:
        return makers | pod if number // len(MODELS) % every == 0 else makers

    session.run("sweep", sweep_batches(count), chosen, 60_000, seconds=session.arguments.seconds)


def on_device(session: Session) -> None:
    """Planned on the device; `fa3_prefill` and `trunkattn_decode` one after the other are the way without overlap."""
    makers = session.peers("fa3_serial", "fa3_prefill", "fa3_decode") | session.ours.makers()
    makers["trunkattn_on_device"] = session.ours.on_device
    for name in ("trunkattn_streams", "trunkattn_overlapped", "trunkattn_serial"):
        del makers[name]
    session.run("on_device", sweep_batches(session.arguments.batches), lambda _: makers, 60_000, show=print_row)


def chunks(session: Session) -> None:
    """The 32 chunks of a prompt beside two numbers of decodes."""
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    makers = session.peers(*HYBRID_PEERS) | session.ours.makers()
    session.run("chunks", chunk_batches(num_sms), lambda _: makers, 60_000)


def splits(session: Session) -> None:
    """Prefill cut for other numbers of slots."""
    ours, names = session.ours, dict[str, str]()
    makers = session.peers("fa3_serial", "flashinfer_pod")
    for execution in ("serial", "overlapped"):
        for cut, slots in CUTS.items():
            name = f"trunkattn_{execution}_{cut}"
            makers[name] = partial(ours.run, name, execution=execution, cut=slots)
            names[cut] = f"trunkattn_serial_{cut}"

    def show(row: dict[str, Any]) -> None:
        works = {cut: step_of(ours.plans[name]).chunks.planned.work for cut, name in names.items() if name in row["us"]}
        row["prefill_items"] = {cut: len(work.items) for cut, work in works.items()}
        row["prefill_partials"] = {cut: work.num_slots for cut, work in works.items()}
        print_row(row)

    session.run("splits", list(SPLITS), lambda _: makers, 300_000, show=show)


PARTS = {"table": table, "sweep": sweep, "chunks": chunks, "splits": splits, "on_device": on_device}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    count = integer(1, 1_000_000)
    parser.add_argument("--part", nargs="+", default=list(PARTS), choices=list(PARTS), help="default: all")
    parser.add_argument(
        "--peers", nargs="*", default=list(HYBRID_PEERS), choices=list(HYBRID_PEERS), help="default: all"
    )
    parser.add_argument("--batches", type=count, default=330, help="of the sweep")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} batches, in a result file of its own")
    parser.add_argument("--pod-every", type=count, default=4, help="FlashInfer's POD on every so many of a model")
    parser.add_argument("--seconds", type=count, default=240, help="after which the sweep begins no batch")
    arguments = parser.parse_args()
    need_gpu()
    session = Session(arguments, torch.cuda.get_device_name())
    for part in arguments.part:
        PARTS[part](session)
        done = session.result[part]
        print(f"{part}, {done['seconds']} s:", json.dumps(done["summary"].get("all", {})), flush=True)


if __name__ == "__main__":
    main()
