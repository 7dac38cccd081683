"""Time per token and serving in vLLM."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.page.common import (
    Loss,
    Section,
    and_,
    card_of,
    cut_text,
    held,
    load,
    note_loss,
    percent,
    sources,
    table,
    versions_of,
)

FA3 = "FlashAttention-3"
NAMES = {"FLASH_ATTN": FA3, "fa3": FA3, "triton": "SGLang's Triton kernels"}  # of engines' own back ends
BOTH = ("FLASH_ATTN", "CUSTOM")
MODELS = {
    "gpt-oss": "GPT-OSS", "gemma-3": "Gemma 3", "qwen2.5-7b": "Qwen2.5-7B", "qwen3-next": "Qwen3-Next",
}  # fmt: skip
FP8 = {"fp8": "fp8 cache", "fp8_e5m2": "fp8 cache (e5m2)"}
# Names of results of other models, and of other caches
OTHER = re.compile(rf"vllm-tpot-h\d+(-(?P<shape>{'|'.join(map(re.escape, MODELS))}))?(-(?P<cache>{'|'.join(FP8)}))?")
FAR = 0.1  # of a run from the median of all
SERVING_HEAD = ("card", "workload", "first token, mean", "per token, mean", "per token, P99", "latency, mean")

# What the batches of vllm_tpot.py stand for.
USES = {
    "64 x (8192 + 512)": "64 questions on one long document",
    "64 x (1024 + 8 groups x 3072 + 256)": "a system prompt, 8 documents, 8 questions on each",
    "256 x (1024 + 128)": "256 requests with the same few-shot prompt",
    "64 x (2048 + 256)": "64 samples of one prompt (rollouts)",
    "8 x (4096 + 128)": "8 samples of one prompt",
    "32 x (2048)": "nothing shared",
    "64 x (4 groups x 12000 + 64)": "16 questions on each of 4 documents",
    "128 x (8 groups x 512 + 128)": "16 samples of each of 8 prompts (rollouts)",
    "128 x (640 + 64)": "128 requests with the same few-shot prompt",
    "128 x (704)": "nothing shared, many requests",
    "8 x (8192)": "nothing shared, long texts",
    "1 x (2048)": "one request",
}


def tpot_rows(*names: str) -> list[list[dict[str, Any]]]:
    """Rows of the same batch in several results: of those that all of them have."""
    first, *others = ({row["workload"]: row for row in load(name)["rows"]} for name in names)
    return [[row, *(rows[name] for rows in others)] for name, row in first.items() if all(name in it for it in others)]


def timing_text(names: Sequence[str]) -> str:
    """How runs were timed where it was not as the script does now, and how far they scatter; empty: all were so."""
    others = [name for name in names if "timed" in load(name)]
    if not others:
        return ""
    runs = [
        time / found["tpot_ms"]
        for name in others
        for row in load(name)["rows"]
        for found in row.values()
        if isinstance(found, dict)
        for time in found["tpot_ms_each"]
    ]
    far = sum(abs(ratio - 1) > FAR for ratio in runs)
    below = f" and {sum(ratio <= 0 for ratio in runs)} not over 0" if min(runs) <= 0 else ""
    how = and_(dict.fromkeys(load(name)["timed"] for name in others))
    return f"""
In {and_(f"`{name}`" for name in others)} time per token is {how}.
It has in it what is left of the prompts, which differs from run to run: {far} of {len(runs)} runs are more than
{percent(FAR)} from their median{below}.
"""


def busy_text(names: Sequence[str]) -> str:
    """How long something is under way on the card in a step, where that was traced; empty: nowhere."""
    rows = [
        [card_of(name), f"`{row['workload']}`", *(f"{row[each]['busy_ms']:.1f}" for each in BOTH)]
        for name in names
        for row in load(name)["rows"]
        if all("busy_ms" in row[each] for each in BOTH)
    ]
    if not rows:
        return ""
    return f"""
In about how many of these milliseconds something is under way on the card; in the others it is idle:

{table(["card", "requests × (shared + private tokens)", "FA3", "ours"], rows, 2)}
"""


def tpot() -> Section:
    losses = list[Loss]()
    newest = tpot_table({"H100": "vllm-tpot-h100", "H200": "vllm-tpot-h200"}, losses)
    older = tpot_table({"H200": "vllm-tpot-h200-0.26", "two H200s": "vllm-tpot-h200-tp2"}, losses)
    text = f"""## In vLLM: time per output token

Milliseconds, Llama-3-8B's shape with random weights, bf16, full CUDA graphs, the same prompts for both back ends. FA3
is FlashAttention-3, vLLM's own choice; the last column of each card is our speed over it. On one card each figure is
the median of three runs.

{newest}
{older}"""
    return Section(text, losses)


def tpot_table(results: Mapping[str, str], losses: list[Loss]) -> str:
    """The batches of the first result, with where they come from. results: names, by what they are of."""
    labels, names = list(results), list(results.values())
    version = versions_of("vllm", results)
    rows = []
    for workload in (row["workload"] for row in load(names[0])["rows"]):
        cells: list[object] = [USES[workload], f"`{workload}`"]
        for label, name in results.items():
            row = next((row for row in load(name)["rows"] if row["workload"] == workload), None)
            if row is None:
                cells += ["", "", ""]
                continue
            stock, ours = row["FLASH_ATTN"]["tpot_ms"], row["CUSTOM"]["tpot_ms"]
            cells += [f"{stock:.1f}", f"{ours:.1f}", f"{stock / ours:.2f}×"]
            where = f"vLLM {load(results[label])['versions']['vllm']}, {label}"
            note_loss(losses, f"{where}: {USES[workload]}, `{workload}`", FA3, ours / stock)
        rows.append(cells)
    head = ["use", "requests × (shared + private tokens)"]
    for label in labels:
        head += [f"{label}: FA3", "ours", ""]
    command = "python -m benchmarks.engines.vllm_tpot --model FOLDER [--turns FILE --kv-gib 14] [--tensor-parallel 2]"
    return f"""In vLLM {version}:
{timing_text(names)}{cut_text(names)}
{table(head, rows, 2)}
{busy_text(names)}
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
            [card_of(name), what, f"`{row['workload']}`", f"{stock:.1f}", f"{ours:.1f}", f"{stock / ours:.2f}×"]
        )
        note_loss(losses, f"{where}, `{row['workload']}`", FA3, ours / stock)
    return rows


def models() -> Section | None:
    """Models of other shapes, and other caches."""
    losses, found = list[Loss](), other_models()
    rows = [row for name, what in found.items() for row in rows_beside(name, what, losses)]
    command = "python -m benchmarks.engines.vllm_tpot --shape NAME, or --model FOLDER,"
    text = f"""## In vLLM: other models and caches

As above.
{cut_text(list(found))}
{table(["card", "model", "requests × (shared + private tokens)", "FA3", "ours", ""], rows, 3)}
{busy_text(list(found))}
{sources(f"{command} [--kv-cache-dtype fp8] --turns FILE --kv-gib N", *found)}
"""
    return Section(text, losses) if found else None


def ranks() -> Section | None:
    """Decode context parallelism."""
    losses, names = list[Loss](), of_both(r"vllm-tpot-h\d+-dcp\d+")
    rows = [row for name in names for row in rows_beside(name, f"{load(name)['cards']} cards", losses)]
    text = f"""## In vLLM: cards that share each request

Decode context parallelism: each card holds a part of each request's keys. Heads as of Llama-3-8B, but one KV head.
{cut_text(names)}
{table(["card", "", "requests × (shared + private tokens)", "FA3", "ours", ""], rows, 3)}

{sources("python -m benchmarks.engines.vllm_tpot --model FOLDER --dcp 2", *names)}
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
    text = f"""## In vLLM: start

Seconds until an engine is ready that finds no compiled code, neither vLLM's nor ours.

{table(["card", "FA3", "ours", "more"], rows)}

{sources("python -m benchmarks.engines.vllm_tpot --model FOLDER --cold", *names)}
"""
    return Section(text, losses) if names else None


def invariance() -> Section:
    name, losses, rows = "vllm-tpot-h100-invariant", list[Loss](), list[list[object]]()
    for row in load(name)["rows"]:
        stock, ours, other = (row[each]["tpot_ms"] for each in ("FLASH_ATTN", "CUSTOM", "CUSTOM (not invariant)"))
        cells = [f"{stock:.1f}", f"{ours:.1f}", f"{stock / ours:.2f}×", f"{other:.1f}", f"{ours / other:.2f}"]
        rows.append([USES[row["workload"]], f"`{row['workload']}`", *cells])
        note_loss(losses, f"vLLM, batch invariance: `{row['workload']}`", FA3, ours / stock)
    (equal,) = load("vllm-equality-h100-invariant")["rows"]
    bits = equal["same_bits_CUSTOM"]
    head = ["use", "requests × (shared + private tokens)", "FA3", "ours", "", "ours without it", "price"]
    text = f"""## In vLLM: batch invariance

Milliseconds per token with `VLLM_BATCH_INVARIANT=1`, model `{load(name)["model"]}`, on an H100. The price is the time
over that of ours without it; vLLM's own part of it, in the linear layers, is in it. The tokens and log-probabilities of
{bits["cold"]} of {bits["of"]} requests have the same bits alone and batched, and of {bits["cached"]} with a cached
prefix.

{table(head, rows, 2)}

{sources("python -m benchmarks.engines.vllm_tpot --model FOLDER --invariant", name)}

{sources("python -m benchmarks.engines.vllm_equality --cases invariant", "vllm-equality-h100-invariant")}
"""
    return Section(text, losses)


def serving_rows(name: str, engine: str, backends: tuple[str, str], losses: list[Loss]) -> list[list[object]]:
    """Rows of SERVING_HEAD for a result. backends: the engine's own and ours, by their names there."""
    stock, ours = backends
    runs, rows = load(name)["runs"], []
    for workload, theirs in runs[stock].items():
        mine = runs[ours][workload]
        cells: list[object] = [card_of(name), workload]
        for figure, part in (("ttft", "mean"), ("tpot", "mean"), ("tpot", "p99"), ("latency", "mean")):
            digits = 1 if figure == "tpot" else 0
            cells.append(f"{theirs[figure][part]:.{digits}f} → {mine[figure][part]:.{digits}f}")
            what = {"ttft": "first token", "tpot": "time per token", "latency": "latency"}[figure]
            where = f"serving in {engine}, {card_of(name)}, {workload}: {what}, {part.replace('p99', 'P99')}"
            note_loss(losses, where, NAMES.get(stock, stock), mine[figure][part] / theirs[figure][part])
        rows.append(cells)
    return rows


def vllm_serving() -> Section:
    names, losses = ("vllm-serving-h100", "vllm-serving-h200"), list[Loss]()
    rows = [row for name in names for row in serving_rows(name, "vLLM", ("FLASH_ATTN", "CUSTOM"), losses)]
    text = f"""## In vLLM: requests that arrive

Milliseconds, FlashAttention-3 → TrunkAttention. Questions on documents share most of what they read. In the other
workloads few requests decode at once and they share little, so little can be gained.

{table(SERVING_HEAD, rows, 2)}

{sources("python -m benchmarks.engines.vllm_serving --model FOLDER --trace FILE --parallel", *names)}
"""
    return Section(text, losses)
