"""Time per token and serving in vLLM."""

import re
from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Any

from benchmarks.page.common import (
    Loss,
    Section,
    card_of,
    folded,
    held,
    load,
    note_loss,
    sources,
    table,
    versions_of,
)
from benchmarks.page.names import traffic, use_of

FA3 = "FlashAttention-3"
NAMES = {
    "FLASH_ATTN": FA3,
    "fa3": FA3,
    "fa3@16": f"{FA3}, pages of 16",
    "triton": "SGLang's Triton kernels",
}  # of engines' own back ends
BOTH = ("FLASH_ATTN", "CUSTOM")
MODELS = {
    "gpt-oss": "GPT-OSS", "gemma-3": "Gemma 3", "qwen2.5-7b": "Qwen2.5-7B", "qwen3-next": "Qwen3-Next",
}  # fmt: skip
FP8 = {"fp8": "fp8 cache", "fp8_e5m2": "fp8 cache (e5m2)"}
# Names of results of other models, and of other caches
OTHER = re.compile(rf"vllm-tpot-h\d+(-(?P<shape>{'|'.join(map(re.escape, MODELS))}))?(-(?P<cache>{'|'.join(FP8)}))?")
LATENT = {"FLASH_ATTN_MLA": FA3, "FLASHMLA@64": "FlashMLA", "TRUNK_MLA@64": "TrunkAttention"}  # back ends of MLA
SHAPE = "requests × (shared + private tokens)"
SERVING_HEAD = ("card", "requests", "first token, mean", "per token, mean", "per token, P99", "latency, mean")


def tpot_rows(*names: str) -> list[list[dict[str, Any]]]:
    """Rows of the same batch in several results: of those that all of them have."""
    first, *others = ({row["workload"]: row for row in load(name)["rows"]} for name in names)
    return [[row, *(rows[name] for rows in others)] for name, row in first.items() if all(name in it for it in others)]


def speed_up(row: Mapping[str, Any]) -> float:
    """FlashAttention-3's time per token over ours."""
    return row["FLASH_ATTN"]["tpot_ms"] / row["CUSTOM"]["tpot_ms"]


def busy_text(names: Mapping[str, str]) -> str:
    """How long a GPU is busy for a token, where that was traced; empty: nowhere.

    names: results, and what each is of.
    """
    rows = [
        [card_of(name), what, use_of(row["workload"]), *(f"{row[each]['busy_ms']:.1f}" for each in BOTH)]
        for name, what in names.items()
        for row in load(name)["rows"]
        if all("busy_ms" in row[each] for each in BOTH)
    ]
    if not rows:
        return ""
    return f"""
These are the milliseconds per token for which the GPU is busy, where that was traced. For the rest it is idle.

{table(["card", "model", "workload", "FlashAttention-3", "TrunkAttention"], rows, 3)}
"""


def tpot() -> Section:
    losses = list[Loss]()
    newest = tpot_table({"H100": "vllm-tpot-h100", "H200": "vllm-tpot-h200"}, losses)
    older = tpot_table({"H200": "vllm-tpot-h200-0.26", "two H200s": "vllm-tpot-h200-tp2"}, losses)
    text = f"""## Time per output token

Milliseconds, Llama-3-8B's shape with random weights, bf16, full CUDA graphs, the same prompts for both back ends. FA3
is FlashAttention-3, vLLM's own choice. The speed-up is FlashAttention-3's time over ours.

{newest}
{older}"""
    return Section(text, losses)


def tpot_table(results: Mapping[str, str], losses: list[Loss]) -> str:
    """The batches of the first result, with where they come from. results: names, by what they are of."""
    labels, names = list(results), list(results.values())
    version = versions_of("vllm", results)
    rows = []
    for workload in (row["workload"] for row in load(names[0])["rows"]):
        cells: list[object] = [use_of(workload), f"`{workload}`"]
        for label, name in results.items():
            row = next((row for row in load(name)["rows"] if row["workload"] == workload), None)
            if row is None:
                cells += ["", "", ""]
                continue
            stock, ours = row["FLASH_ATTN"]["tpot_ms"], row["CUSTOM"]["tpot_ms"]
            cells += [f"{stock:.1f}", f"{ours:.1f}", f"{stock / ours:.2f}×"]
            where = f"vLLM {load(results[label])['versions']['vllm']}, {label}"
            note_loss(losses, f"{where}: {use_of(workload)}", FA3, ours / stock)
        rows.append(cells)
    command = "python -m benchmarks.engines.tpot --engine vllm --model FOLDER"
    command += " [--turns FILE --kv-gib 14] [--tensor-parallel 2]"
    head = ["workload", SHAPE]
    for label in labels:
        head += [f"{label}: FA3", f"{label}: ours", "speed-up"]
    return f"""In vLLM {version}:

{table(head, rows, 2)}

{sources(command, *names)}
"""


def of_both(pattern: str, figure: str = "card") -> list[str]:
    """Results whose names match, and that have a figure of both back ends: one that was cut may lack it."""
    names = [name for name in held("vllm-tpot-*") if re.fullmatch(pattern, name)]
    return [name for name in names if all(figure in load(name)["runs"].get(each, {}) for each in BOTH)]


def other_models() -> dict[str, str]:
    """Results of models of other shapes and of other caches, and what each is of."""
    found = {}
    for name in of_both(OTHER.pattern):
        shape, cache = OTHER.fullmatch(name).group("shape", "cache")  # type: ignore[union-attr]  # as `of_both` found
        if shape or cache:
            found[name] = MODELS.get(shape, "Llama-3-8B's shape") + (f", {FP8[cache]}" if cache else "")
    return found


def rows_beside(name: str, what: str, losses: list[Loss]) -> list[list[object]]:
    """Rows of a result: card, what it is of, batch, both back ends and our speed."""
    rows, where = list[list[object]](), f"vLLM {load(name)['versions']['vllm']}, {card_of(name)}: {what}"
    for row in load(name)["rows"]:
        stock, ours = row["FLASH_ATTN"]["tpot_ms"], row["CUSTOM"]["tpot_ms"]
        rows.append(
            [card_of(name), what, use_of(row["workload"]), f"{stock:.1f}", f"{ours:.1f}", f"{stock / ours:.2f}×"]
        )
        note_loss(losses, f"{where}, {use_of(row['workload'])}", FA3, ours / stock)
    return rows


def models() -> Section | None:
    """Models of other shapes, and other caches."""
    losses, found = list[Loss](), other_models()
    rows = [row for name, what in found.items() for row in rows_beside(name, what, losses)]
    command = "python -m benchmarks.engines.tpot --engine vllm --shape NAME, or --model FOLDER,"
    text = f"""## Other models and caches

Time per output token in milliseconds, random weights in each model's shape.

{folded(f"{len(rows)} batches", table(["card", "model", "workload", "FA3", "ours", "speed-up"], rows, 3))}
{busy_text(found)}
{sources(f"{command} [--kv-cache-dtype fp8] --turns FILE --kv-gib N", *found)}
"""
    return Section(text, losses) if found else None


def latent() -> Section | None:
    """Latent attention, beside both of vLLM's own back ends."""
    losses, rows = list[Loss](), list[list[object]]()
    names = [name for end in ("", "-alone") for name in held(f"vllm-tpot-h*-deepseek-v3-16{end}")]
    *peers, ours = LATENT
    for name in names:
        card = card_of(name) + (", one engine at a time" if name.endswith("-alone") else "")
        for row in load(name)["rows"]:
            times = [row[each]["tpot_ms"] for each in LATENT]
            gain = min(times[:-1]) / times[-1]
            rows.append([card, use_of(row["workload"]), *(f"{time:.1f}" for time in times), f"{gain:.2f}×"])
            where = f"vLLM {load(name)['versions']['vllm']}, {card}: latent attention, {use_of(row['workload'])}"
            for peer in peers:
                note_loss(losses, where, LATENT[peer], row[ours]["tpot_ms"] / row[peer]["tpot_ms"])
    text = f"""## Latent attention

Time per output token in milliseconds of DeepSeek-V3's attention with 16 heads, the rank of one of 8 cards, in 27 layers
with dense MLPs and random weights. `TRUNK_MLA` computes the decodes. The speed-up is over the faster of vLLM's own.
Engines take turns on a card, or run one after the other.

{fill(_scatter(names), 120)}

{table(["card", "workload", *LATENT.values(), "speed-up"], rows, 2)}

{sources("python -m benchmarks.engines.tpot --engine vllm --shape deepseek-v3-16 --turns FILE --kv-gib 5", *names)}
"""
    return Section(text, losses) if names else None


def _scatter(names: Sequence[str]) -> str:
    """How far repeats differ where a step waits for the host, and what the card has to do in one of those batches."""
    spreads = dict.fromkeys((True, False), 0.0)
    for row in (row for name in names for row in load(name)["rows"]):
        for times in (row[each]["tpot_ms_each"] for each in LATENT):
            of_many = row["workload"].startswith("128 ")
            spreads[of_many] = max(spreads[of_many], max(times) / min(times) - 1)
    text = (
        f"Batches of 128 requests wait for vLLM's scheduler on the host: their repeats differ by up to "
        f"{spreads[True]:.0%}, those of others by up to {spreads[False]:.0%}."
    )
    for name in held("vllm-tpot-h*-deepseek-v3-16-busy"):
        (row,) = load(name)["rows"]
        ours, theirs = row["TRUNK_MLA@64"], row["FLASH_ATTN_MLA"]
        text += (
            f" Where 128 requests share nothing, an {card_of(name)} is busy for {ours['busy_ms']:.2f} ms a token, and "
            f"for {theirs['busy_ms']:.2f} ms with FlashAttention-3."
        )
    return text


def ranks() -> Section | None:
    """Decode context parallelism."""
    losses, names = list[Loss](), of_both(r"vllm-tpot-h\d+-dcp\d+")
    rows = [row for name in names for row in rows_beside(name, f"{load(name)['cards']} cards", losses)]
    text = f"""## Cards that share each request

Time per output token in milliseconds under decode context parallelism: each card holds a part of each request's keys.
Llama-3-8B's query heads, with one KV head.

{table(["card", "number", "workload", "FA3", "ours", "speed-up"], rows, 3)}

{sources("python -m benchmarks.engines.tpot --engine vllm --model FOLDER --dcp 2", *names)}
"""
    return Section(text, losses) if names else None


def start() -> Section | None:
    """The time until an engine is ready."""
    losses, rows = list[Loss](), list[list[object]]()
    names = of_both(r"vllm-tpot-h\d+-cold", "ready_s")
    for name in names:
        stock, ours = (load(name)["runs"][backend]["ready_s"] for backend in BOTH)
        rows.append([card_of(name), f"{stock:.0f}", f"{ours:.0f}", f"{ours - stock:+.0f}"])
        note_loss(losses, f"vLLM, {card_of(name)}: start with empty caches", FA3, ours / stock)
    text = f"""## Start

Seconds until an engine is ready that finds no compiled code, neither vLLM's nor ours.

{table(["card", "FA3", "ours", "difference"], rows)}

{sources("python -m benchmarks.engines.tpot --engine vllm --model FOLDER --cold", *names)}
"""
    return Section(text, losses) if names else None


def invariance() -> Section:
    name, losses, rows = "vllm-tpot-h100-invariant", list[Loss](), list[list[object]]()
    for row in load(name)["rows"]:
        stock, ours, other = (row[each]["tpot_ms"] for each in ("FLASH_ATTN", "CUSTOM", "CUSTOM (not invariant)"))
        cells = [f"{stock:.1f}", f"{ours:.1f}", f"{stock / ours:.2f}×", f"{other:.1f}", f"{ours / other:.2f}"]
        rows.append([use_of(row["workload"]), f"`{row['workload']}`", *cells])
        note_loss(losses, f"vLLM, batch invariance: {use_of(row['workload'])}", FA3, ours / stock)
    (equal,) = load("vllm-equality-h100-invariant")["rows"]
    bits = equal["same_bits_CUSTOM"]
    head = ["workload", SHAPE, "FA3", "ours", "speed-up", "ours without it", "price"]
    text = f"""## Batch invariance

Milliseconds per token with `VLLM_BATCH_INVARIANT=1` on an H100, 16 layers of Llama-3-8B's shape. The price is our time
over our time without it; what vLLM's linear layers pay is part of it. The tokens and log-probabilities of
{bits["cold"]} of {bits["of"]} requests have the same bits by themselves and batched, and those of {bits["cached"]}
also with a cached prefix.

{table(head, rows, 2)}

{sources("python -m benchmarks.engines.tpot --engine vllm --model FOLDER --invariant", name)}

{sources("python -m benchmarks.engines.equality --engine vllm --cases invariant", "vllm-equality-h100-invariant")}
"""
    return Section(text, losses)


def serving_rows(name: str, engine: str, backends: tuple[str, str], losses: list[Loss]) -> list[list[object]]:
    """Rows of SERVING_HEAD for a result. backends: the engine's own and ours, by their names there."""
    stock, ours = backends
    runs, rows = load(name)["runs"], []
    for workload, theirs in runs[stock].items():
        mine = runs[ours][workload]
        cells: list[object] = [card_of(name), traffic(workload)]
        for figure, part in (("ttft", "mean"), ("tpot", "mean"), ("tpot", "p99"), ("latency", "mean")):
            digits = 1 if figure == "tpot" else 0
            cells.append(f"{theirs[figure][part]:.{digits}f} → {mine[figure][part]:.{digits}f}")
            what = {"ttft": "first token", "tpot": "time per token", "latency": "latency"}[figure]
            where = f"{engine}, {card_of(name)}, {traffic(workload)}: {what}, {part.replace('p99', 'P99')}"
            note_loss(losses, where, NAMES.get(stock, stock), mine[figure][part] / theirs[figure][part])
        rows.append(cells)
    return rows


def vllm_serving() -> Section:
    names, losses = ("vllm-serving-h100", "vllm-serving-h200"), list[Loss]()
    rows = [row for name in names for row in serving_rows(name, "vLLM", ("FLASH_ATTN", "CUSTOM"), losses)]
    text = f"""## Requests that arrive over time

Milliseconds, FlashAttention-3 → TrunkAttention. Questions on documents share most of what they read. In the other
workloads few requests decode at once and they share little, so little can be gained.

{table(SERVING_HEAD, rows, 2)}

{sources("python -m benchmarks.engines.serving --engine vllm --model FOLDER --trace FILE --parallel", *names)}
"""
    return Section(text, losses)
