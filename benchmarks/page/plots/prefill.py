"""The prefill benchmark as a picture: TFLOP/s of chunks by what is cached before them, and after one prefix."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

STYLES = {
    "trunkattn": ("TrunkAttention", "#d62728", "-"),
    "trunkattn_portable": ("TrunkAttention, portable kernel", "#d62728", ":"),
    "flash_attention_3": ("FlashAttention-3, paged", "#7f7f7f", "-"),
    "flash_attention_3_contiguous": ("FlashAttention-3, contiguous", "#7f7f7f", ":"),
    "flashinfer_prefill": ("FlashInfer, paged", "#1f77b4", "-"),
}


def draw(result: dict[str, Any], target: Path) -> None:
    """Writes the picture of a result."""
    cached = sorted({row["cached"] for row in result["chunks"]})
    panels = [(f"after {tokens:,} cached tokens", [row for row in result["chunks"] if row["cached"] == tokens])
              for tokens in cached]  # fmt: skip
    panels.append(("after one prefix", result["shared"]))
    figure, axes = plt.subplots(1, len(panels), figsize=(3.3 * len(panels), 3.6), sharey=True)
    for axis, (title, rows) in zip(axes, panels, strict=True):
        for name, (label, colour, line) in STYLES.items():
            rates = [row.get(name, {}).get("tflops", float("nan")) for row in rows]
            if any(rate == rate for rate in rates):
                axis.plot(range(len(rows)), rates, line, color=colour, label=label, marker="o", markersize=3)
        names = [
            f"{row['tokens']:,}" if row["requests"] == 1 else f"{row['requests']} × {row['tokens']} @ {row['cached']:,}"
            for row in rows
        ]
        axis.set_xticks(range(len(rows)), names, rotation=60, ha="right", fontsize=7)
        axis.set_title(title, fontsize=9)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("TFLOP/s")
    axes[0].set_ylim(bottom=0)
    axes[2].legend(fontsize=7)
    figure.suptitle(
        f"Prompt chunks, {result['card']}, bf16, 32/8 heads of 128, pages of 16 (commit {result['commit']})"
    )
    figure.tight_layout()
    figure.savefig(target, dpi=110)
