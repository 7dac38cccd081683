"""Prompt chunks, by themselves and with decodes."""

from statistics import geometric_mean

from benchmarks.page.common import (
    NOTICEABLE,
    Loss,
    Section,
    card_of,
    folded,
    held,
    load,
    percent,
    sources,
    span,
    table,
)

PROMPT_WAYS = {
    "trunkattn": "own plan", "trunkattn_one_graph": "plan made on the device", "trunkattn_portable": "portable kernel",
}  # fmt: skip


def prefill() -> Section:
    names = ("prefill-h100", "prefill-h200")
    rows, losses = [], []
    for name in names:
        result = load(name)
        for part, label in (("chunks", "one chunk of 512 to 16k tokens"), ("shared", "short chunks after one prefix")):
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
                    losses.append(Loss(f"{where}, {what}", "FlashAttention-3", 1 / speed))
    head = ["card", "batch", "cells", "speed over FlashAttention-3", "range", "over FlashInfer",
            "portable kernel over FlashAttention-3"]  # fmt: skip
    text = f"""## Prompt chunks

Speed over a peer's on the same batch, geometric mean; bf16, 32/8 heads of 128. 1 is equal, higher is better.

{table(head, rows, 2)}

{sources("python -m benchmarks.kernels.prefill", *names)}
"""
    return Section(text, losses)


def shapes() -> Section | None:
    """Prompts of other heads, with sinks and windows; None: there is no result."""
    names = held("prefill-shapes-*")
    if not names:
        return None
    rows, losses = list[list[object]](), list[Loss]()
    measured = [row for name in names for shape in load(name)["shapes"] for row in shape["rows"]]
    ways = [way for way in PROMPT_WAYS if any("us" in row.get(way, {}) for row in measured)]
    for name in names:
        for shape in load(name)["shapes"]:
            for row in shape["rows"]:
                cells = [card_of(name), shape["shape"], f"{row['requests']} × {row['tokens']} after {row['cached']:,}"]
                peer = row["flash_attention_3"]["us"]
                speeds = [peer / row[way]["us"] if "us" in row.get(way, {}) else None for way in ways]
                rows.append([*cells, f"{peer:,.0f}", *(f"{it:.2f}" if it else "" for it in speeds)])
            for way in ways:
                of_way = [row for row in shape["rows"] if "us" in row.get(way, {})]
                slow = [row[way]["us"] / row["flash_attention_3"]["us"] for row in of_way]
                count = sum(each > NOTICEABLE for each in slow)
                if count and way != "trunkattn_portable":
                    where = f"prompts, {card_of(name)}, {shape['shape']}, {PROMPT_WAYS[way]}: {count} of {len(slow)}"
                    losses.append(Loss(f"{where} batches, worst", "FlashAttention-3", max(slow)))
    head = [
        "card",
        "model: query / KV heads x head_dim",
        "prompts × tokens",
        "FlashAttention-3, µs",
        *(PROMPT_WAYS[way] for way in ways),
    ]
    text = f"""## Prompts of other models

Speed over FlashAttention-3's with a plan that the host makes, with one that the device makes from the prompts' lengths,
and with the portable kernel. bf16, pages of 16 tokens. 1 is equal, higher is better.

{folded(f"{len(rows)} batches", table(head, rows, 3))}

{sources("python -m benchmarks.kernels.prefill --shapes", *names)}
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
                longest = max(ours_over_pod(name))
                losses.append(
                    Loss(f"prompt chunk and decodes, {card_of(name)}, worst of {wins}", "FlashInfer's POD", longest)
                )
        worst = summary["all"]["trunkattn"]["worst_over_own_serial"]
        if worst > NOTICEABLE:
            where = f"prompt chunk and decodes, {card_of(name)}, worst batch"
            losses.append(Loss(where, "our own serial path", worst))
    head = ["card", "model's heads", "batches", "speed over FlashAttention-3, mean", "range",
            "within 10 % of max(prefill, decode)", "speed over FlashInfer's POD (batches)"]  # fmt: skip
    text = f"""## Prompt chunks and decodes in one step

Random batches of a prompt chunk and many decodes (POD-Attention's Figure 11). TrunkAttention runs both in one launch;
FlashAttention-3 runs one after the other. The times of its two parts bound what any overlap can reach: the longer of
them, max(prefill, decode).

{table(head, rows, 2)}

{sources("python -m benchmarks.kernels.hybrid --pod-every 8", *names, part="sweep")}
"""
    return Section(text, losses)


def ours_over_pod(name: str) -> list[float]:
    """Our time over FlashInfer's POD on each batch that both computed."""
    times = [row["us"] for row in load(name)["sweep"]["rows"]]
    return [each["trunkattn"] / each["flashinfer_pod"] for each in times if "flashinfer_pod" in each]
