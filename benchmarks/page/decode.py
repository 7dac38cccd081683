"""Decode kernels, ragged batches, and planning on the device."""

from statistics import geometric_mean
from typing import Any

from benchmarks.page.common import NOTICEABLE, Loss, Section, card_of, load, sources, span, table
from benchmarks.page.names import heads as heads_of
from benchmarks.page.names import traffic, tree

HEADS = ("32/8", "16/8", "64/8", "32/32")
PEERS = ("flash_attention_3", "flashinfer_decode", "flashinfer_decode_cuda_cores", "flashinfer_cascade", "fasttree")


def best_peer(row: dict[str, Any]) -> float:
    return min(row[peer]["us"] for peer in PEERS if "us" in row.get(peer, {}))


def decode() -> Section:
    names = ("kernels-h100-bfloat16", "kernels-h200-bfloat16")
    columns = {
        "flash_attention_3": "FlashAttention-3", "flashinfer_decode": "FlashInfer decode",
        "flashinfer_cascade": "FlashInfer cascade", "fasttree": "FastTree",
        "trunkattn": "TrunkAttention", "trunkattn_one_graph": "the same, one graph for any batch",
    }  # fmt: skip
    rows: list[list[object]] = []
    ahead = shared = 0
    for name in names:
        result = load(name)
        for heads in HEADS:
            means = dict(result["times_sol"][heads])
            means["flashinfer_decode"] = min(means["flashinfer_decode"], means["flashinfer_decode_cuda_cores"])
            rows.append([card_of(name), heads_of(heads), *(f"{means[column]:.2f}" for column in columns)])
        for row in result["rows"]:
            if not is_unshared(row["tree"]):
                shared += 1
                ahead += row["trunkattn"]["us"] < best_peer(row)
    text = f"""## Batches that share prefixes

One layer, bf16, head_dim 128, pages of 16, cold L2 cache. Time as a multiple of the speed of light (SOL: what the
bytes or the arithmetic take at the rates measured on the same card), geometric mean over PAT's 18 trees with shared
prefixes; lower is better. TrunkAttention is faster than every peer on {ahead} of {shared} shared cells.

{table(["card", "query / KV heads", *columns.values()], rows, 2)}

{sources("python -m benchmarks.kernels.decode", *names)}
"""
    return Section(text, [])


def unshared() -> Section:
    """Batches that share nothing."""
    rows, losses = unshared_rows()
    options = f"--name long --heads 32/8 --trees {trees_of('kernels-h100-long')}"
    text = f"""## Batches that share nothing

Our time over that of the fastest peer on the same batch; lower is better.

{table(["card", "batch", "plan", "batches", "mean", "range"], rows, 3)}

{sources(f"python -m benchmarks.kernels.decode {options}", "kernels-h100-long", "kernels-h200-long")}
"""
    return Section(text, losses)


def portable_fp8() -> Section:
    """fp8 caches in the portable kernel."""
    rows, losses = fp8_rows()
    options, names = "--name fp8 --kv-dtype float8_e4m3fn", ("kernels-h100-fp8", "kernels-h200-fp8")
    text = f"""## fp8 caches in the portable kernel

Speed with an e4m3 cache over that with a bf16 cache. The fast kernels' figures for fp8 are on the page of
[models' shapes](shapes.md).

{table(["card", "query / KV heads", "nothing shared", "shared trees, mean"], rows, 2)}

{sources(f"python -m benchmarks.kernels.decode {options}", *names)}
"""
    return Section(text, losses)


def unshared_rows() -> tuple[list[list[object]], list[Loss]]:
    """Batches that share nothing: our time over the fastest peer's."""
    unshared: list[list[object]] = []
    losses = []
    for name in ("kernels-h100-bfloat16", "kernels-h200-bfloat16", "kernels-h100-long", "kernels-h200-long"):
        batches = [row for row in load(name)["rows"] if is_unshared(row["tree"])]
        for way, label in (("trunkattn", "plan of its own"), ("trunkattn_one_graph", "one graph for any batch")):
            ratios = {(row["tree"], row["heads"]): row[way]["us"] / best_peer(row) for row in batches}
            about = "1 to 12 long requests" if "long" in name else "256 requests"
            mean = geometric_mean(ratios.values())
            unshared.append([card_of(name), about, label, len(ratios), f"{mean:.2f}", span(ratios.values())])
            (batch, heads), worst = max(ratios.items(), key=lambda item: item[1])
            if worst > NOTICEABLE:
                where = f"decode kernel, {card_of(name)}, nothing shared, {label}: {tree(batch)} at {heads} heads"
                losses.append(Loss(where, "the fastest peer", worst))
    return unshared, losses


def fp8_rows() -> tuple[list[list[object]], list[Loss]]:
    """Speeds of an fp8 cache over a bf16 one in the portable kernel, and losses."""
    eight: list[list[object]] = []
    losses = []
    for card in ("h100", "h200"):
        for heads in HEADS:
            speeds = fp8_speeds(card, heads)
            alone = [speed for tree, speed in speeds.items() if is_unshared(tree)]
            trees = fp8_shared(card, heads)
            eight.append([card.upper(), heads_of(heads), span(alone), f"{trees:.2f}"])
            if 1 / trees > NOTICEABLE:
                where = f"portable decode kernel, {card.upper()}, fp8 cache, shared trees at {heads} heads, mean"
                losses.append(Loss(where, "the same with a bf16 cache", 1 / trees))
    return eight, losses


def fp8_shared(card: str, heads: str) -> float:
    """Mean speed of an fp8 cache over that of a bf16 cache on trees that share."""
    return geometric_mean([speed for tree, speed in fp8_speeds(card, heads).items() if not is_unshared(tree)])


def fp8_speeds(card: str, heads: str) -> dict[str, float]:
    """Speed with an fp8 cache over that with a bf16 cache, by tree."""
    times = [
        {
            row["tree"]: row["trunkattn"]["us"]
            for row in load(f"kernels-{card}-{dtype}")["rows"]
            if row["heads"] == heads
        }
        for dtype in ("bfloat16", "fp8")
    ]
    return {batch: times[0][batch] / times[1][batch] for batch in times[1]}


def trees_of(name: str) -> str:
    return " ".join(dict.fromkeys(row["tree"] for row in load(name)["rows"]))


def is_unshared(tree: str) -> bool:
    """Whether a tree has one level: requests that share nothing."""
    return "," not in tree


def workloads() -> Section:
    names = ("workloads-h100-bfloat16", "workloads-h200-bfloat16")
    rows, losses = [], []
    for name in names:
        for row in load(name)["rows"]:
            ours, peer = row["trunkattn"], row[row["best_peer"]]
            alone = best_peer(row)
            workload = f"{row['requests']} requests, {traffic(row['workload'])}"
            layer, step = ours["us"] / alone, ours["step_us"] / peer["step_us"]
            cells: list[object] = [card_of(name), workload, f"{row['tokens'] / row['unique_tokens']:.2f}"]
            cells += [f"{ours['us']:.0f}", f"{alone:.0f}"]
            cells += [f"{ours['step_us'] / 1e3:.1f}", f"{peer['step_us'] / 1e3:.1f}", f"{1 / step:.2f}×"]
            rows.append(cells)
            for what, ratio in (("a layer without the plan", layer), ("plan and 32 layers", step)):
                if ratio > NOTICEABLE:
                    losses.append(Loss(f"ragged batch, {card_of(name)}, {workload}: {what}", "the fastest peer", ratio))
    head = ["card", "batch", "tokens per unique token", "a layer, µs", "fastest peer, µs",
            "plan and 32 layers, ms", "fastest peer, ms", "speed-up"]  # fmt: skip
    text = f"""## Ragged batches

Requests that decode together: from a Mooncake trace, conversations with PAT's system prompts, sessions of tool
agents. The speed-up counts the plan and 32 layers.

{table(head, rows, 2)}

{sources("python -m benchmarks.kernels.ragged_batches --trace FILE", *names)}
"""
    return Section(text, losses)


def device_planner() -> Section:
    names = ("device-planner-h100", "device-planner-h200")
    rows = []
    for name in names:
        for row in load(name)["rows"]:
            cells: list[object] = [card_of(name), tree(row["tree"]), f"{row['requests']:,} × {row['pages']}"]
            cells += [f"{row[time]:,.0f}" for time in ("device_us", "in_a_row_us", "call_us", "host_us")]
            rows.append(cells)
    head = [
        "card",
        "batch, in tokens",
        "requests × pages",
        "on an idle GPU",
        "on a busy GPU",
        "host, to launch it",
        "on the host instead",
    ]
    text = f"""## On the device

Microseconds from tables on the GPU to a plan there. Every array equals the host planner's, bit for bit.

{table(head, rows, 3)}

{sources("python -m benchmarks.host.device_planner", *names)}
"""
    return Section(text, [])
