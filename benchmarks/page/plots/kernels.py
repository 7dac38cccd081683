"""The decode benchmark as a picture in the manner of PAT's Figure 9: time over SOL, per tree and head setting."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

STYLES = {
    "trunkattn": ("TrunkAttention", "#d62728"),
    "fasttree": ("FastTree", "#2ca02c"),
    "flashinfer_decode": ("FlashInfer decode", "#1f77b4"),
    "flash_attention_3": ("FlashAttention-3", "#7f7f7f"),
}


def draw(result: dict[str, Any], target: Path) -> None:
    """Writes the picture of a result."""
    heads = list(dict.fromkeys(row["heads"] for row in result["rows"]))
    figure, axes = plt.subplots(len(heads), 1, figsize=(13, 2.6 * len(heads)), sharex=True)
    for axis, setting in zip(axes, heads, strict=True):
        rows = [row for row in result["rows"] if row["heads"] == setting]
        for index, (name, (label, colour)) in enumerate(STYLES.items()):
            times = [row[name].get("us", float("nan")) / row["sol_us"] for row in rows]
            places = [place + (index - 1.5) * 0.2 for place in range(len(rows))]
            axis.bar(places, times, 0.2, label=label, color=colour)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_yscale("log")
        axis.set_ylim(0.8, 45)
        axis.set_xlim(-0.6, len(rows) - 0.4)
        axis.set_ylabel(f"heads {setting}\ntime / SOL")
        axis.grid(axis="y", alpha=0.3)
    axes[0].legend(ncols=4, loc="upper right", fontsize=9)
    axes[0].set_title(f"Decode attention, {result['card']}, {result['dtype']}, head_dim 128, page 16 (lower is better)")
    axes[-1].set_xticks(
        range(len(rows)), [row["tree"].replace("_", "\n") for row in rows], rotation=60, ha="right", fontsize=7
    )
    figure.tight_layout()
    figure.savefig(target, dpi=110)
