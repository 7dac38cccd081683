"""What `trunkattn analyze` predicts, beside what was measured."""

from benchmarks.page.common import Section, folded, load, percent, sources, table

RESULT = "analysis-predictions"
COMMAND = "python -m benchmarks.host.analysis_predictions --trace FILE"
OFF = 0.15  # from which a row says why
WHY = {
    "h100-gpt-oss 128 x (8 groups x 512 + 128)": "measured slower shared than one by one, which no term sees",
    "gpt-oss": "its small layers take less besides their weights than the larger ones of the fit",
    "gemma-3": "FlashAttention with heads of 256 is slower than its rates with heads of 128 say",
    "tp2": "sampling is priced as on one card, and two seem to share a part of it",
    "sglang-serving": "short prompts in steps of their own take what the host takes: first tokens are later, too",
    "conversation": "steps with many small prompt chunks take engines longer than their arithmetic",
}


def _off(row: dict) -> float:
    """How far a row is off, as a share of what was measured."""
    return max(abs(p / m - 1) for p, m in zip(row["predicted_ms"], row["measured_ms"], strict=True))


def _why(row: dict) -> str:
    """Why a row is likely to be off."""
    of = f"{row['result']} {row['workload']}"
    return next((why for part, why in WHY.items() if part in of), "not known") if _off(row) >= OFF else ""


def _name(row: dict) -> str:
    return f"{row['result'].replace('-tpot', '').replace('-serving', '')}: {row['workload']}"


def _terms() -> list[list[object]]:
    """What the predictions that are off are made of."""
    rows: list[list[object]] = []
    for row in [*load(RESULT)["batches"], *load(RESULT)["serving"]]:
        if _off(row) < OFF:
            continue
        terms, prompts, decodes = row["terms_ms"], "", ""
        if "measured_decodes" in row:
            steady = terms["weights"] + terms["layers"] + terms["sampling"]
            pairs = zip(row["predicted_ms"], terms["attention"], strict=True)
            prompts = _both([max(0.0, predicted - steady - attention) for predicted, attention in pairs])
            decodes = _both([row["predicted_decodes"], row["measured_decodes"]])
        cells = [f"{terms[name]:.1f}" for name in ("weights", "layers", "sampling")]
        rows.append([_name(row), *cells, _both(terms["attention"]), prompts, _both(row["measured_ms"]), decodes])
    return rows


def _both(values: list[float]) -> str:
    return ", ".join(f"{value:.1f}" for value in values)


def _rows(part: str) -> list[list[object]]:
    """Each batch or workload: measured and predicted times, ratios, and why it is likely to be off."""
    rows: list[list[object]] = []
    for row in load(RESULT)[part]:
        (alone, shared), (predicted, predicted_shared) = row["measured_ms"], row["predicted_ms"]
        cells = [f"{time:.1f}" for time in (alone, predicted, shared, predicted_shared)]
        rows.append([_name(row), *cells, f"{row['measured_ratio']:.2f}×", f"{row['predicted_ratio']:.2f}×", _why(row)])
    return rows


def predictions() -> Section:
    result = load(RESULT)
    batches, serving = result["summary"], result["serving_summary"]
    head = ["batch", "one by one", "predicted", "shared", "predicted", "ratio", "predicted", "likely why it is off"]
    parts = ["batch", "weights", "layers", "sampling", "attention", "prompts", "measured",
             "decodes a step, predicted, measured"]  # fmt: skip
    text = f"""## Predictions of `trunkattn analyze`

Times per token that the [analysis](../guide/analyze.md) predicts without a GPU, beside those of vLLM and SGLang on the
card. A card's constants are fitted to Llama-3-8B's batches on one card, and those of steps with prompt chunks to vLLM's
arrivals on an H200; other models, an 8-bit cache, two cards and all other arrivals are predictions.

- {len(result["batches"])} batches that decode: {percent(batches["mean"])} off on average and
  {percent(batches["worst"])} at worst; the ratio of one by one to shared {percent(batches["ratio_mean"])} on average.
- {len(result["serving"])} runs of requests that arrive, medians: {percent(serving["mean"])} off on average and
  {percent(serving["worst"])} at worst; the ratio {percent(serving["ratio_mean"])} on average.

![Predicted over measured time per token](../pictures/performance-predictions.svg)

{folded("Every batch, ms", table(head, _rows("batches")))}

{folded("Every run of arrivals, ms, medians", table(head, _rows("serving")))}

{folded(f"What the predictions are made of that are off by {percent(OFF)} or more, ms", table(parts, _terms()))}

Where two times stand together, they are one by one and shared. A run's prompts are what its median has over a step of
only decodes, with as many decodes as a step of the replay has on average.

Arrivals at SGLang are replayed with `--scheduler-policy prefill_first`, because it computes prompts in steps of their
own. Not in the predictions: the time of the host where it bounds a step, and other programs on the card. They make an
engine slower in both ways.

{sources(COMMAND, RESULT)}
"""
    return Section(text, [])
