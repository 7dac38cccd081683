"""Writes docs/performance.md, and the figures in README.md, from the files in benchmarks/results/.

    python benchmarks/performance_page.py            # write both
    python benchmarks/performance_page.py --check    # only say whether they are as the results have them

No figure is copied by hand. tests/docs/test_performance_page.py fails while a page differs from what the results say.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance.md"
README = ROOT / "README.md"
BEGIN, END = "<!-- written by benchmarks/performance_page.py -->", "<!-- end -->"
PEERS = ("flash_attention_3", "flashinfer_decode", "flashinfer_decode_cuda_cores", "flashinfer_cascade", "fasttree")
TRAINING_WAYS = ("trunkattn", "torch_flash", "torch_cudnn", "flex_attention")
PACKAGES = ("torch", "triton", "vllm", "transformers")  # whose versions are named
NOTICEABLE = 1.01  # a ratio of times from which the page calls a difference a loss

# What the batches of vllm_tpot.py stand for.
USES = {
    "64 x (8192 + 512)": "64 questions on one long document",
    "64 x (1024 + 8 groups x 3072 + 256)": "a system prompt, 8 documents, 8 questions on each",
    "256 x (1024 + 128)": "256 requests with the same few-shot prompt",
    "64 x (2048 + 256)": "64 samples of one prompt (rollouts)",
    "8 x (4096 + 128)": "8 samples of one prompt",
    "32 x (2048)": "nothing shared",
}


class Loss(NamedTuple):
    """One place where something else is faster."""

    where: str
    than: str
    by: str


class Section(NamedTuple):
    text: str
    losses: list[Loss]


def load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def table(head: Sequence[str], rows: Iterable[Sequence[object]], left: int = 1) -> str:
    """A Markdown table: the first `left` columns to the left, numbers to the right."""
    rule = "|".join(["---"] * left + ["--:"] * (len(head) - left))
    lines = [f"| {' | '.join(map(str, row))} |" for row in (head, *rows)]
    return "\n".join([lines[0], f"|{rule}|", *lines[1:]])


def sources(command: str, *names: str) -> str:
    """Where a table's figures come from: file, date, device, versions, commit and the command that makes them."""
    outside = [load(name)["source"] for name in names if "source" in load(name)]
    made = f"Made by {outside[0]}. The nearest command here is" if outside else "Made by"
    return f"<small>{'<br>'.join(map(source, names))}<br>{made} `{command}`</small>"


def source(name: str) -> str:
    result = load(name)
    date = f"{result['date']} ({result['date_is']})" if "date_is" in result else result["date"]
    device = result.get("card") or (card_of(name) if is_card(name) else result["device"])
    versions = [f"{package} {result['versions'][package]}" for package in PACKAGES if package in result["versions"]]
    return f"`{name}.json`: {', '.join([date, device, *versions, 'commit ' + result['commit']])}"


def is_card(name: str) -> bool:
    return "h100" in name or "h200" in name


def card_of(name: str) -> str:
    return next(card.upper() for card in ("h100", "h200") if card in name)


def slower(ratio: float) -> str:
    return f"{ratio:.2f}× the time"


def best_peer(row: dict[str, Any]) -> float:
    return min(row[peer]["us"] for peer in PEERS if "us" in row.get(peer, {}))


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def span(values: Iterable[float]) -> str:
    values = list(values)
    return f"{min(values):.2f} to {max(values):.2f}"


def tpot_rows(*names: str) -> list[list[dict[str, Any]]]:
    """Rows of the same batch in several results."""
    return [list(rows) for rows in zip(*(load(name)["rows"] for name in names), strict=True)]


def tpot() -> Section:
    names = ("vllm-tpot-h100", "vllm-tpot-h200", "vllm-tpot-h200-tp2")
    labels = ("H100", "H200", "two H200s")
    rows, losses = [], []
    for group in tpot_rows(*names):
        workload = group[0]["workload"]
        cells: list[object] = [USES[workload], f"`{workload}`"]
        for label, row in zip(labels, group, strict=True):
            stock, ours = row["FLASH_ATTN"]["tpot_ms"], row["CUSTOM"]["tpot_ms"]
            cells += [f"{stock:.1f}", f"{ours:.1f}", f"{stock / ours:.2f}×"]
            if ours / stock > NOTICEABLE:
                where = f"vLLM, {label}: {USES[workload]}, `{workload}`"
                losses.append(Loss(where, "FlashAttention-3", slower(ours / stock)))
        rows.append(cells)
    head = ["use", "requests × (shared + private tokens)"]
    for label in labels:
        head += [f"{label}: FA3", "ours", ""]
    each = [row["CUSTOM"]["tpot_ms_each"] for name in names[:2] for row in load(name)["rows"]]
    spread = percent(max(max(times) / min(times) for times in each) - 1)
    text = f"""## In vLLM: time per output token

Milliseconds, Llama-3-8B's shape with random weights, bf16, full CUDA graphs, the same prompts for both back ends.
FA3 is FlashAttention-3, vLLM's own choice; the last column of each card is our speed over it. On one card each figure
is the median of three runs; runs of TrunkAttention differ by up to
{spread} of each other, so that small differences mean little.

{table(head, rows, 2)}

{sources("python benchmarks/vllm_tpot.py --model FOLDER [--tensor-parallel 2]", *names)}
"""
    return Section(text, losses)


def vllm_serving() -> Section:
    names = ("vllm-serving-h100", "vllm-serving-h200")
    rows, losses = [], []
    for name in names:
        runs = load(name)["runs"]
        for workload, stock in runs["FLASH_ATTN"].items():
            ours = runs["CUSTOM"][workload]
            cells: list[object] = [card_of(name), workload]
            for figure, part in (("ttft", "mean"), ("tpot", "mean"), ("tpot", "p99"), ("latency", "mean")):
                digits = 1 if figure == "tpot" else 0
                cells.append(f"{stock[figure][part]:.{digits}f} → {ours[figure][part]:.{digits}f}")
                ratio = ours[figure][part] / stock[figure][part]
                if ratio > NOTICEABLE:
                    what = {"ttft": "first token", "tpot": "time per token", "latency": "latency"}[figure]
                    where = f"serving in vLLM, {card_of(name)}, {workload}: {what}, {part.replace('p99', 'P99')}"
                    losses.append(Loss(where, "FlashAttention-3", slower(ratio)))
            rows.append(cells)
    text = f"""## In vLLM: requests that arrive

Milliseconds, FlashAttention-3 → TrunkAttention. Few requests decode at once here and they share little, so little can
be gained.

{table(["card", "workload", "first token, mean", "per token, mean", "per token, P99", "latency, mean"], rows, 2)}

{sources("python benchmarks/vllm_serving.py --model FOLDER --trace FILE --parallel", *names)}
"""
    return Section(text, losses)


def decode() -> Section:
    names = ("kernels-h100-bfloat16", "kernels-h200-bfloat16")
    columns = {
        "flash_attention_3": "FlashAttention-3", "flashinfer_decode": "FlashInfer decode",
        "flashinfer_cascade": "FlashInfer cascade", "fasttree": "FastTree",
        "trunkattn": "TrunkAttention", "trunkattn_one_graph": "with one graph for any batch",
    }  # fmt: skip
    rows: list[list[object]] = []
    ahead = shared = 0
    for name in names:
        result = load(name)
        for heads in ("32/8", "16/8", "64/8", "32/32"):
            means = dict(result["times_sol"][heads])
            means["flashinfer_decode"] = min(means["flashinfer_decode"], means["flashinfer_decode_cuda_cores"])
            rows.append([card_of(name), heads, *(f"{means[column]:.2f}" for column in columns)])
        for row in result["rows"]:
            if not is_unshared(row["tree"]):
                shared += 1
                ahead += row["trunkattn"]["us"] < best_peer(row)
    unshared, losses = [], []
    for name in ("kernels-h100-bfloat16", "kernels-h200-bfloat16", "kernels-h100-long", "kernels-h200-long"):
        batches = [row for row in load(name)["rows"] if is_unshared(row["tree"])]
        for way, label in (("trunkattn", "plan of its own"), ("trunkattn_one_graph", "one graph for any batch")):
            ratios = {(row["tree"], row["heads"]): row[way]["us"] / best_peer(row) for row in batches}
            about = "1 to 12 long requests" if "long" in name else "256 requests"
            mean = geometric_mean(ratios.values())
            unshared.append([card_of(name), about, label, len(ratios), f"{mean:.2f}", span(ratios.values())])
            (tree, heads), worst = max(ratios.items(), key=lambda item: item[1])
            if worst > NOTICEABLE:
                where = f"decode kernel, {card_of(name)}, {about}, nothing shared, {label}; worst: `{tree}` at {heads}"
                losses.append(Loss(where, "the fastest peer", slower(worst)))
    eight = []
    for card in ("h100", "h200"):
        for heads in ("32/8", "16/8", "64/8", "32/32"):
            speeds = fp8_speeds(card, heads)
            alone = [speed for tree, speed in speeds.items() if is_unshared(tree)]
            trees = geometric_mean([speed for tree, speed in speeds.items() if not is_unshared(tree)])
            eight.append([card.upper(), heads, span(alone), f"{trees:.2f}"])
            if 1 / trees > NOTICEABLE:
                where = f"decode kernel, {card.upper()}, fp8 cache, shared trees at {heads}, mean"
                losses.append(Loss(where, "the same with a bf16 cache", slower(1 / trees)))
    text = f"""## Decode kernels

One layer, bf16, head_dim 128, pages of 16, cold L2 cache. Time as a multiple of the speed of light (SOL: what the
bytes or the arithmetic take at the rates measured on the same card), geometric mean over PAT's 18 trees with shared
prefixes; lower is better. TrunkAttention is faster than every peer on {ahead} of {shared} shared cells.

{table(["card", "query / KV heads", *columns.values()], rows, 2)}

{sources("python benchmarks/kernels.py", *names)}

![Time over SOL for 20 prefix trees (nodes per level _ tokens per level) and 4 head settings](pictures/kernels-h100.png)

Nothing shared: time over that of the fastest peer in the same cell.

{table(["card", "batch", "", "cells", "mean", "range"], unshared, 3)}

{
        sources(
            f"python benchmarks/kernels.py --name long --heads 32/8 --trees {trees_of('kernels-h100-long')}",
            "kernels-h100-long",
            "kernels-h200-long",
        )
    }

fp8 (e4m3) caches: speed over that of a bf16 cache. Shared trees lose, because 8-bit caches run the portable kernel.

{table(["card", "query / KV heads", "nothing shared", "shared trees, mean"], eight, 2)}

{sources("python benchmarks/kernels.py --name fp8 --kv-dtype float8_e4m3fn", "kernels-h100-fp8", "kernels-h200-fp8")}
"""
    return Section(text, losses)


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
    return {tree: times[0][tree] / times[1][tree] for tree in times[1]}


def trees_of(name: str) -> str:
    return " ".join(dict.fromkeys(row["tree"] for row in load(name)["rows"]))


def is_unshared(tree: str) -> bool:
    """A tree of one level: so many requests of so many tokens."""
    return "," not in tree


def workloads() -> Section:
    names = ("workloads-h100-bfloat16", "workloads-h200-bfloat16")
    rows, losses = [], []
    for name in names:
        for row in load(name)["rows"]:
            ours, peer = row["trunkattn"], row[row["best_peer"]]
            alone = best_peer(row)
            workload = f"{row['workload']}, {row['requests']}"
            layer, step = ours["us"] / alone, ours["step_us"] / peer["step_us"]
            cells: list[object] = [card_of(name), workload, f"{row['tokens'] / row['unique_tokens']:.2f}"]
            cells += [f"{ours['us']:.0f}", f"{alone:.0f}"]
            cells += [f"{ours['step_us'] / 1e3:.1f}", f"{peer['step_us'] / 1e3:.1f}", f"{1 / step:.2f}×"]
            rows.append(cells)
            for what, ratio in (("a layer without the plan", layer), ("plan and 32 layers", step)):
                if ratio > NOTICEABLE:
                    where = f"ragged batch, {card_of(name)}, {workload} requests, {what}"
                    losses.append(Loss(where, "the fastest peer", slower(ratio)))
    head = ["card", "workload, requests", "tokens / unique tokens", "a layer, µs", "fastest peer",
            "plan and 32 layers, ms", "fastest peer", ""]  # fmt: skip
    text = f"""## Decode: ragged batches

Requests in decode together: a Mooncake trace, conversations behind PAT's system prompts, sessions of tool agents.

{table(head, rows, 2)}

{sources("python benchmarks/workloads_gpu.py --trace FILE", *names)}
"""
    return Section(text, losses)


def prefill() -> Section:
    names = ("prefill-h100", "prefill-h200")
    rows, losses = [], []
    for name in names:
        result = load(name)
        for part, label in (("chunks", "one chunk of 512 to 16k tokens"), ("shared", "short chunks behind one prefix")):
            cells = result[part]
            speeds = {
                peer: [row[peer]["us"] / row["trunkattn"]["us"] for row in cells]
                for peer in ("flash_attention_3", "flashinfer_prefill")
            }
            portable = geometric_mean(row["flash_attention_3"]["us"] / row["trunkattn_portable"]["us"] for row in cells)
            third, infer = speeds["flash_attention_3"], speeds["flashinfer_prefill"]
            means = [geometric_mean(third), geometric_mean(infer)]
            cells_of = [card_of(name), label, len(cells), f"{means[0]:.2f}", span(third), f"{means[1]:.2f}"]
            rows.append([*cells_of, f"{portable:.2f}"])
            where = f"prefill kernel, {card_of(name)}, {label}"
            for what, speed in (("mean", means[0]), ("worst cell", min(third)), ("mean, portable kernel", portable)):
                if 1 / speed > NOTICEABLE:
                    losses.append(Loss(f"{where}, {what}", "FlashAttention-3", slower(1 / speed)))
    head = ["card", "batch", "cells", "speed over FlashAttention-3", "range", "over FlashInfer",
            "portable kernel over FlashAttention-3"]  # fmt: skip
    text = f"""## Prompt chunks

Speed over a peer's on the same batch, geometric mean; bf16, 32/8 heads of 128. 1 is equal, higher is better.

{table(head, rows, 2)}

{sources("python benchmarks/prefill.py", *names)}
"""
    return Section(text, losses)


def hybrid() -> Section:
    names = ("hybrid-h100", "hybrid-h200")
    rows, losses = [], []
    models = {"all": "all", "32/4": "Yi-6B, 32/4", "32/8": "Llama-3-8B, 32/8", "32/32": "Llama-2-7B, 32/32"}
    for name in names:
        summary = load(name)["sweep"]["summary"]
        for key, label in models.items():
            ours = summary[key]["trunkattn"]
            pod = summary[key].get("over_flashinfer_pod", {})
            cells: list[object] = [card_of(name), label, ours["cells"], f"{ours['mean']:.2f}"]
            cells += [f"{ours['worst']:.2f} to {ours['best']:.2f}", percent(ours["near_oracle_of_fa3"])]
            rows.append([*cells, f"{pod['mean']:.2f} ({pod['cells']})" if pod else ""])
            if pod.get("cells_pod_wins") and key == "all":
                wins = f"{pod['cells_pod_wins']} of {pod['cells']} batches"
                losses.append(Loss(f"prompt chunk and decodes, {card_of(name)}, {wins}", "FlashInfer's POD", "longer"))
        worst = summary["all"]["trunkattn"]["worst_over_own_serial"]
        if worst > NOTICEABLE:
            where = f"prompt chunk and decodes, {card_of(name)}, worst batch"
            losses.append(Loss(where, "our own serial path", slower(worst)))
    head = ["card", "model's heads", "batches", "speed over FlashAttention-3, mean", "range",
            "within 10 % of max(prefill, decode)", "speed over FlashInfer's POD (batches)"]  # fmt: skip
    text = f"""## Prompt chunks and decodes in one step

Random batches of a prompt chunk and many decodes (POD-Attention's Figure 11). TrunkAttention runs both in one launch;
FlashAttention-3 runs one after the other. Its two parts alone bound what any overlap can reach: the longer of them,
max(prefill, decode).

{table(head, rows, 2)}

{sources("python benchmarks/hybrid.py --pod-every 8", *names)}

![Hybrid batches on an H100](pictures/hybrid-h100.png)
"""
    return Section(text, losses)


def device_planner() -> Section:
    names = ("device-planner-h100", "device-planner-h200")
    rows = []
    for name in names:
        for row in load(name)["rows"]:
            cells: list[object] = [card_of(name), f"{row['requests']:,} × {row['pages']}", f"`{row['tree']}`"]
            cells += [f"{row[time]:,.0f}" for time in ("device_us", "in_a_row_us", "call_us", "host_us")]
            rows.append(cells)
    head = [
        "card",
        "requests × pages",
        "tree",
        "idle device",
        "busy device",
        "host, to launch it",
        "on the host instead",
    ]
    text = f"""## Planning on the device

Microseconds from tables on the GPU to a plan there. Every array equals the host planner's, bit for bit.

{table(head, rows, 3)}

{sources("python benchmarks/device_planner.py", *names)}
"""
    return Section(text, [])


def engine() -> Section:
    rows = []
    names = ("serving-cpu", "serving-h200", "serving-h200-trace")
    labels = {"serving-cpu": "CPU, SmolLM2, a trace", "serving-h200": "H200, Llama-3-8B",
              "serving-h200-trace": "H200, Llama-3-8B, a trace"}  # fmt: skip
    for name in names:
        for setting, run in load(name)["arrivals"].items():
            gaps, first = run["between_tokens_ms"], run["ttft_s"]
            cells: list[object] = [labels[name], setting.replace("hybrid", "chunked")]
            cells += [f"{first['p50']:.2f} / {first['p99']:.2f}"]
            cells += [f"{gaps['p50']:.0f} / {gaps['p99']:,.0f} / {gaps['max']:,.0f}", f"{run['latency_s']['p50']:.1f}"]
            cells += [f"{run[f'stalled_{limit}_percent']:.0f} %" for limit in (200, 500)]
            rows.append(cells)
    losses = []
    cases = load("cpu-engine")["cases"]
    speeds = []
    for case, run in cases.items():
        theirs, ours = run["vllm"]["decode_tokens_per_second"], run["trunkattn auto"]["decode_tokens_per_s"]
        unshared = run["trunkattn per_query"]["decode_tokens_per_s"]
        speeds.append([case, f"{theirs:.0f}", f"{ours:.0f}", f"{unshared:.0f}"])
        if theirs / ours > NOTICEABLE:
            losses.append(Loss(f"engine on a CPU, {case}", "vLLM's CPU engine", slower(theirs / ours)))
    for name in names:
        runs = load(name)["arrivals"]
        before = runs["prefill_first"]["ttft_s"]["p50"]
        later = {setting: run["ttft_s"]["p50"] / before for setting, run in runs.items()}
        setting, worst = max(later.items(), key=lambda item: item[1])
        if worst > NOTICEABLE:
            where = f"engine, {labels[name]}: first token (P50) with {setting.replace('hybrid', 'chunked')}"
            losses.append(Loss(where, "`prefill_first`", slower(worst)))
    equal = load("equality-cpu")["scenarios"]
    text = f"""## The embedded engine

Under load (POD-Attention's Tables 5 to 7): `prefill_first` computes whole prompts while decodes wait; `chunked` is
Sarathi-Serve's chunked prefill with a budget of tokens per step, and on a GPU with attention one after the other
(`serial`) or overlapped (`auto`). A request counts as stalled if one of its gaps is longer than 200 or 500 ms; on the
CPU, than the same number of decode steps as in POD's setting.

{
        table(
            [
                "machine",
                "scheduler, budget",
                "first token s, P50 / P99",
                "between tokens ms, P50 / P99 / max",
                "latency s, P50",
                "stalled, 200 ms",
                "500 ms",
            ],
            rows,
            2,
        )
    }

{sources("python benchmarks/serving.py [--device cuda] [--trace FILE]", *names)}

Decode speed on two CPU cores, SmolLM2-135M in float32, 32 requests, tokens per second:

{table(["batch", "vLLM's CPU engine", "TrunkAttention", "sharing off"], speeds)}

{sources("python benchmarks/cpu_engine.py", "cpu-engine")}

Greedy answers equal to transformers' `generate`, over {len(equal)} settings (every policy, chunked prefill, preemption,
a prefix-cache hit): {sum(row["equal"] for row in equal)} of {sum(row["of"] for row in equal)} answers.

{sources("python benchmarks/equality.py", "equality-cpu")}
"""
    return Section(text, losses)


def forward_and_backward(times: dict[str, Any]) -> float:
    return times["forward"]["ms"] + times["backward"]["ms"]


def over_cudnn() -> list[float]:
    """Our training speed over cuDNN's: forward, backward and both, of each batch."""
    speeds = []
    for row in load("flash-training-cudnn-h100")["rows"]:
        ours, theirs = row["trunkattn"], row["torch_cudnn"]
        speeds += [theirs[part]["ms"] / ours[part]["ms"] for part in ("forward", "backward")]
        speeds.append(forward_and_backward(theirs) / forward_and_backward(ours))
    return speeds


def training() -> Section:
    names = ("flash-training-h100", "flash-training-h200")
    rows, losses = [], []
    for name in names:
        ratios = load(name)["speed_over_torch_flash"]
        for way in ("one_pass", "deterministic"):
            for masks in ("causal", "full"):
                parts = [ratios[f"{way} {part} {masks}"] for part in ("forward", "backward", "both")]
                rows.append([card_of(name), way.replace("_", " "), masks, *(f"{part:.2f}" for part in parts)])
                if 1 / min(parts) > NOTICEABLE:
                    where = f"training, {card_of(name)}, {way.replace('_', ' ')}, {masks}, worst part"
                    losses.append(Loss(where, "PyTorch's flash back end", slower(1 / min(parts))))
    cudnn = load("flash-training-cudnn-h100")
    against = []
    speeds = over_cudnn()
    for index, row in enumerate(cudnn["rows"]):
        times = [forward_and_backward(row[way]) for way in TRAINING_WAYS]
        third = row["flash_attention_3"]["forward"]["ms"] / row["trunkattn"]["forward"]["ms"]
        figures = [*times, *speeds[3 * index : 3 * index + 3], third]
        against.append([row["batch"], *(f"{figure:.2f}" for figure in figures)])
    longest = f"{1 / max(speeds):.2f} to {1 / min(speeds):.2f}× the time"
    losses.append(Loss("training, H100, forward, backward and both", "PyTorch's cuDNN back end", longest))
    trees, longer = [], []
    for row in cudnn["trees"]:
        flex, ours = (sum(row[way].values()) for way in ("flex", "ours_repeated"))
        trees.append([row["tree"], f"{flex:.1f}", f"{ours:.1f}"])
        longer.append(ours / flex)
    where = "training on a prefix tree, H100: the prefix is repeated for each branch"
    losses.append(Loss(where, "FlexAttention with a tree mask", f"{span(longer)}× the time"))
    text = f"""## Training

**`flash_attention` is slower than cuDNN.** On an H100 it reaches {span(speeds)} of the speed of the same PyTorch's
cuDNN back end. If cuDNN takes your shapes, use it. Forward and backward, ms; the last four columns are our speed over
cuDNN's forward, backward and both, and over FlashAttention-3's forward:

{
        table(
            [
                "batch × length, heads",
                "TrunkAttention",
                "PyTorch flash",
                "PyTorch cuDNN",
                "FlexAttention",
                "forward",
                "backward",
                "both",
                "forward over FA3",
            ],
            against,
        )
    }

Sequences that share a prefix, forward and backward, ms. FlexAttention computes the prefix once; we compute it for each
branch:

{table(["prefix + branches", "FlexAttention, tree mask", "TrunkAttention, repeated"], trees)}

{sources("python benchmarks/flash_training.py", "flash-training-cudnn-h100")}

Against PyTorch's flash back end it is about even: speed over that back end's, geometric mean over lengths of 512 to
16,384 tokens, bf16, 32 heads of 128.

{table(["card", "", "mask", "forward", "backward", "both"], rows, 3)}

{sources("python benchmarks/flash_training.py", *names)}
"""
    return Section(text, losses)


def cpu() -> Section:
    rows, losses = [], []
    for case, ways in load("cpu-attention")["cases"].items():
        ours = ways["trunkattn auto"]["median_ms"]
        others = {way: figures["median_ms"] for way, figures in ways.items() if not way.startswith("trunkattn")}
        alone, best = ways["trunkattn per_query"]["median_ms"], min(others.values())
        rows.append(
            [case, *(f"{time:.2f}" for time in (others["sdpa"], best, alone, ours)), f"{others['sdpa'] / ours:.1f}×"]
        )
        if ours / min(others.values()) > NOTICEABLE:
            losses.append(Loss(f"CPU, {case}", "the fastest way in torch", slower(ours / min(others.values()))))
    policies = load("planner-cpu")["policies_ms"]
    plans = [
        [f"`{policy}`", f"{times['cold']['median_ms']:.2f}", f"{times['patch']['median_ms']:.3f}"]
        for policy, times in policies.items()
    ]
    text = f"""## On a CPU

Attention of one layer on two cores, float32, ms:

{table(["batch", "torch SDPA, per request", "fastest in torch", "sharing off", "TrunkAttention", "over SDPA"], rows)}

{sources("python benchmarks/cpu_attention.py", "cpu-attention")}

The planner on one core, {load("planner-cpu")["batch"]}, ms:

{table(["policy", "first plan", "plan of the next step"], plans)}

{sources("python benchmarks/planner.py", "planner-cpu")}
"""
    return Section(text, losses)


def relay() -> str:
    results = {name: load(name) for name in ("relay-cpu", "relay-h100", "relay-h200")}
    shared = [row["shared_tokens"] for row in results["relay-cpu"]["rows"]]
    rows: list[list[object]] = [["theory", *(f"{row['theory']:.1f}" for row in results["relay-cpu"]["rows"])]]
    for name, result in results.items():
        rows.append([name.removeprefix("relay-").upper(), *(f"{row['auto_speedup']:.1f}" for row in result["rows"])])
    return f"""## A growing shared prompt

32 requests with 128 private tokens each behind a shared prompt of s tokens (RelayAttention's Figure 5): speed of `auto`
over `per_query`, which reads the prompt for each request. Theory counts memory traffic; a GPU's L2 cache already saves
`per_query` a part.

{table(["s", *(f"{tokens:,}" for tokens in shared)], rows)}

{sources("python benchmarks/relay.py", *results)}
"""


METHOD = """\
Every figure on this page comes from a file in `benchmarks/results/`, from which `benchmarks/performance_page.py` writes
the page. Each table names its files with the date, device, versions and commit, and the command that makes them.

Kernel times are medians of CUDA-graph replays on a cold L2 cache, with the host's queue filled before the clock starts.
Peers run in the same process on the same batch, and outputs are checked. SOL (speed of light) is max(unique bytes /
read bandwidth, FLOPs / matrix rate), with both rates measured on the same card in the same run. Losses are listed with
the wins and [together at the end](#where-it-loses). How the kernels got there, what was tried and what failed is in the
[lab notes](lab/index.md)."""


def page() -> str:
    parts = (tpot, vllm_serving, decode, workloads, prefill, hybrid, device_planner, training, engine, cpu)
    sections = [part() for part in parts]
    losses = [loss for section in sections for loss in section.losses]
    body = "\n".join([*(section.text for section in sections), relay()])
    return f"""<!-- Written by benchmarks/performance_page.py: do not edit. -->

# Performance

{METHOD}

{body}
## Where it loses

Every row above in which something else is at least 1 % faster; for ranges the worst case.

{table(["case", "what is faster", "TrunkAttention takes"], losses, 3)}
"""


def readme() -> str:
    """The few figures that README.md shows."""
    rows = []
    for hopper, larger in tpot_rows("vllm-tpot-h100", "vllm-tpot-h200"):
        cells: list[object] = [USES[hopper["workload"]]]
        for row in (hopper, larger):
            stock, ours = row["FLASH_ATTN"]["tpot_ms"], row["CUSTOM"]["tpot_ms"]
            cells += [f"{stock:.1f}", f"**{ours:.1f}**" if stock / ours > 1.02 else f"{ours:.1f}"]
        rows.append(cells)
    pair = tpot_rows("vllm-tpot-h200-tp2")[-1][0]
    loss = pair["CUSTOM"]["tpot_ms"] / pair["FLASH_ATTN"]["tpot_ms"] - 1
    cpu_engine = load("cpu-engine")["cases"]["32 × 256 unshared"]
    cpu_loss = cpu_engine["vllm"]["decode_tokens_per_second"] / cpu_engine["trunkattn auto"]["decode_tokens_per_s"] - 1
    eight = [
        geometric_mean([speed for tree, speed in fp8_speeds(card, heads).items() if not is_unshared(tree)])
        for card in ("h100", "h200")
        for heads in ("32/8", "16/8", "64/8", "32/32")
    ]
    vllm = load("vllm-tpot-h100")["versions"]["vllm"]
    head = ["use", "H100: FlashAttention-3", "TrunkAttention", "H200: FlashAttention-3", "TrunkAttention"]
    return f"""Time per output token in vLLM {vllm}, ms (Llama-3-8B's shape, bf16):

{table(head, rows)}

Where it loses: nothing shared on two H200s costs {percent(loss)}. With an fp8 cache, shared trees take
{1 / max(eight):.1f} to {1 / min(eight):.1f} times as long as with bf16. Training runs at {span(over_cudnn())} of the
speed of PyTorch's cuDNN back end on an H100. The engine on a CPU is {percent(cpu_loss)} behind vLLM's where nothing is
shared."""


def between(text: str, inner: str) -> str:
    """`text` with `inner` between the two markers."""
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(
            f"{README.name} has no pair of markers: expected {BEGIN} and {END}; put them where the figures go"
        )
    return f"{before}{BEGIN}\n\n{inner}\n\n{end}{after}"


def expected() -> dict[Path, str]:
    return {PAGE: page(), README: between(README.read_text(), readme())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file is stale")
    options = parser.parse_args()
    stale = {path: text for path, text in expected().items() if not path.exists() or path.read_text() != text}
    for path, text in stale.items():
        print(f"{path.relative_to(ROOT)} {'is stale' if options.check else 'written'}")
        if not options.check:
            path.write_text(text)
    sys.exit(options.check and bool(stale))


if __name__ == "__main__":
    main()
