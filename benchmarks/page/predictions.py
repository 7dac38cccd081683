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
    "vllm-serving-h200 documents 6/s": "the host: first tokens came half as late again as on an H100, which computes "
    "prompts as fast, and steps took longer than those of 12/s with more decodes; other engines used the host meanwhile",
    "sglang-serving": "short prompts in steps of their own take what the host takes: first tokens are later, too",
    "conversation": "steps with many small prompt chunks take engines longer than their arithmetic",
}


def _is_off(row: dict) -> bool:
    return max(abs(p / m - 1) for p, m in zip(row["predicted_ms"], row["measured_ms"], strict=True)) >= OFF


def _why(row: dict) -> str:
    """Why a row is likely to be off."""
    of = f"{row['result']} {row['workload']}"
    return next((why for part, why in WHY.items() if part in of), "not known") if _is_off(row) else ""


def _name(row: dict) -> str:
    return f"{row['result'].replace('-tpot', '').replace('-serving', '')}: {row['workload']}"


def _terms() -> list[list[object]]:
    """What the predictions that are off are made of."""
    rows: list[list[object]] = []
    for row in [*load(RESULT)["batches"], *load(RESULT)["serving"]]:
        if not _is_off(row):
            continue
        terms, decodes = row["terms_ms"], ""
        steady = terms["weights"] + terms["layers"] + terms["sampling"]
        pairs = zip(row["predicted_ms"], terms["attention"], strict=True)
        prompts = [max(0.0, predicted - steady - attention) for predicted, attention in pairs]
        if "measured_decodes" in row:
            decodes = f"{row['predicted_decodes']:.1f}, {row['measured_decodes']:.1f}"
        cells = [f"{terms[name]:.1f}" for name in ("weights", "layers", "sampling")]
        both = [", ".join(f"{value:.1f}" for value in values) for values in (terms["attention"], prompts)]
        measured = ", ".join(f"{value:.1f}" for value in row["measured_ms"])
        rows.append([_name(row), *cells, *both, measured, decodes])
    return rows


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
decodes alone, with as many decodes as a step of the replay has on average.

Arrivals at SGLang are replayed with `--scheduler-policy prefill_first`, because it computes prompts in steps of their
own. Not in the predictions: the time of the host where it bounds a step, and other programs on the card. They make an
engine slower in both ways.

{sources(COMMAND, RESULT)}
"""
    return Section(text, [])
