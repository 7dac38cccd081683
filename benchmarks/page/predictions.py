"""What `trunkattn analyze` predicts, beside what was measured."""

from benchmarks.page.common import Section, folded, load, percent, sources, table

RESULT = "analysis-predictions"
COMMAND = "python -m benchmarks.host.analysis_predictions --trace FILE"
OFF = 0.15  # from which a row says why
WHY = {
    "gpt-oss 128 x (8 groups x 512 + 128)": "measured slower shared than one by one, which the cost model does not see",
    "gpt-oss": "its small layers take less besides their weights than the larger ones of the fit",
    "gemma-3": "FlashAttention with heads of 256 is slower than its rates with heads of 128 say",
    "tp2": "two cards wait for each other, which differs from run to run",
    "documents 6/s": "the first run of its process was measured slower than twice the rate after it, shared or not, "
    "which no load explains",
    "sglang-serving": "SGLang computes prompt chunks in steps of their own, in which decodes wait",
    "conversation": "steps with many small prompt chunks take engines longer than their arithmetic",
}


def _why(row: dict) -> str:
    """Why a row is likely to be off. No profile was taken."""
    off = max(abs(p / m - 1) for p, m in zip(row["predicted_ms"], row["measured_ms"], strict=True))
    if off < OFF:
        return ""
    of = f"{row['result']} {row['workload']}"
    return next((why for part, why in WHY.items() if part in of), "not known")


def _rows(part: str) -> list[list[object]]:
    """Each batch or workload: measured and predicted times, ratios, and why it is likely to be off."""
    rows = []
    for row in load(RESULT)[part]:
        (alone, shared), (predicted, predicted_shared) = row["measured_ms"], row["predicted_ms"]
        name = f"{row['result'].replace('-tpot', '').replace('-serving', '')}: {row['workload']}"
        cells: list[object] = [name, f"{alone:.1f}", f"{predicted:.1f}", f"{shared:.1f}", f"{predicted_shared:.1f}"]
        rows.append([*cells, f"{row['measured_ratio']:.2f}×", f"{row['predicted_ratio']:.2f}×", _why(row)])
    return rows


def predictions() -> Section:
    result = load(RESULT)
    batches, serving = result["summary"], result["serving_summary"]
    head = ["batch", "one by one", "predicted", "shared", "predicted", "ratio", "predicted", "likely why it is off"]
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

Not in the predictions: the time of the host where it bounds a step, other programs on the card, and prompts that stall
decodes for a whole step, as SGLang's do. They make an engine slower in both ways.

{sources(COMMAND, RESULT)}
"""
    return Section(text, [])
