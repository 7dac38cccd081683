"""The hybrid benchmark as a picture: the sweep's speed-ups by model, a prompt's chunks, and six batches."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from benchmarks.workloads.hybrid_batches import MODELS

STYLES = {
    "fa3_serial": ("FlashAttention-3, serial", "#7f7f7f"),
    "fa3_streams": ("FlashAttention-3, two streams", "#bcbd22"),
    "flashinfer_pod": ("FlashInfer POD", "#1f77b4"),
    "trunkattn_serial": ("TrunkAttention, serial", "#ff9896"),
    "trunkattn_overlapped": ("TrunkAttention, overlapped", "#9467bd"),
    "trunkattn": ("TrunkAttention, auto", "#d62728"),
}
ORACLE = ("max(prefill, decode) of FlashAttention-3", "black")


def measured_names(rows: list[dict[str, Any]], *names: str) -> list[str]:
    """Names among `names` (of all, if none is given) that some row has."""
    return [name for name in names or STYLES if any(name in row["us"] for row in rows)]


def distribution(axis: Axes, rows: list[dict[str, Any]]) -> None:
    """Boxes of the speed-up over FlashAttention-3 serial, whiskers to the extremes."""
    counted = [row for row in rows if row["counted"]]
    names = measured_names(counted, "flashinfer_pod", "trunkattn_serial", "trunkattn_overlapped", "trunkattn")
    for group, (hq, hkv) in enumerate(MODELS.values()):
        times = [row["us"] for row in counted if row["heads"] == f"{hq}/{hkv}"]
        for number, name in enumerate(names):
            gains = [us["fa3_serial"] / us[name] for us in times if name in us]
            if gains:
                place = group + 0.2 * (number - (len(names) - 1) / 2)
                box = axis.boxplot(
                    [gains], positions=[place], widths=0.16, whis=(0, 100), patch_artist=True,
                    medianprops={"color": "black"}, manage_ticks=False,
                )  # fmt: skip
                box["boxes"][0].set_facecolor(STYLES[name][1])
    axis.axhline(1, color="grey", linewidth=0.8)
    labels = [f"{model}\n{hq}/{hkv} heads" for model, (hq, hkv) in MODELS.items()]
    axis.set_xticks(range(len(MODELS)), labels, fontsize=8)
    axis.set_title(f"{len(counted)} batches, prefill and decode each ≥ 20 %", fontsize=9)
    axis.set_ylabel("speed-up over FlashAttention-3 serial")
    axis.set_ylim(top=axis.get_ylim()[1] + 0.3)  # for the legend
    axis.legend(handles=[Patch(color=STYLES[name][1], label=STYLES[name][0]) for name in names], fontsize=7)


def prompt(axis: Axes, rows: list[dict[str, Any]]) -> None:
    """Time of each chunk of a prompt, for two numbers of decodes beside it."""
    counts = sorted({row["decodes"] for row in rows})
    for decodes, line in zip(counts, ("-", ":"), strict=False):
        chosen = [row for row in rows if row["decodes"] == decodes]
        for name in measured_names(chosen):
            label, colour = STYLES[name]
            times = [row["us"].get(name, float("nan")) / 1e3 for row in chosen]
            ends = [row["context"] / 1024 for row in chosen]
            axis.plot(ends, times, line, color=colour, label=label if line == "-" else None)
        bounds = [row["oracle_us"].get("fa3", float("nan")) / 1e3 for row in chosen]
        axis.plot([row["context"] / 1024 for row in chosen], bounds, line, color=ORACLE[1], linewidth=0.8)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("end of the chunk, thousands of tokens")
    axis.set_ylabel("ms")
    beside = " or ".join(map(str, counts)) + " (dotted)" * (len(counts) > 1)
    axis.set_title(f"chunks of 512 of a prompt of 16k, 32/4 heads, {beside} decodes at 16k", fontsize=9)
    axis.legend(fontsize=7)


def table(axis: Axes, rows: list[dict[str, Any]]) -> None:
    """Times as multiples of max(prefill, decode) of FlashAttention-3."""
    measured = [row for row in rows if "fa3" in row["oracle_us"]]
    names = measured_names(measured)
    for number, name in enumerate(names):
        label, colour = STYLES[name]
        heights = [row["us"].get(name, float("nan")) / row["oracle_us"]["fa3"] for row in measured]
        places = [at + 0.14 * (number - (len(names) - 1) / 2) for at in range(len(measured))]
        axis.bar(places, heights, 0.13, color=colour, label=label)
    axis.axhline(1, color=ORACLE[1], linewidth=0.8, label=ORACLE[0])
    labels = [
        f"{row['heads']}\n{row['chunk'] / 1024:g}k @ {row['context'] / 1024:g}k\n"
        f"+ {row['decodes']} × {row['decode_context'] / 1024:g}k"
        for row in measured
    ]
    axis.set_xticks(range(len(measured)), labels, fontsize=7)
    axis.set_ylim(top=1.35 * axis.get_ylim()[1])
    axis.set_ylabel("time, multiple of max(prefill, decode)")
    axis.set_title("heads: chunk @ context + decodes × context", fontsize=9)
    axis.legend(fontsize=7, loc="upper right", ncols=2)


def draw(result: dict[str, Any], target: Path) -> None:
    """Writes the picture of a result."""
    panels = [(part, panel) for part, panel in (("sweep", distribution), ("chunks", prompt), ("table", table))
              if part in result]  # fmt: skip
    figure, axes = plt.subplots(1, len(panels), figsize=(5.6 * len(panels), 4.4), squeeze=False)
    for axis, (part, panel) in zip(axes[0], panels, strict=True):
        panel(axis, result[part]["rows"])
        axis.grid(alpha=0.3, axis="y")
    commits = ", ".join(dict.fromkeys(result[part]["commit"] for part, _ in panels))
    figure.suptitle(f"Hybrid batches, {result['card']}, bf16, heads of 128, pages of 16 (commit {commits})")
    figure.tight_layout()
    figure.savefig(target, dpi=110)
