"""Serving through vLLM as a picture like PAT's Figure 10: mean (bar) and P99 (line) by workload and rate."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

FIELDS = {"ttft": "time to first token, ms", "tpot": "time per output token, ms", "latency": "request latency, ms"}
COLOURS = {"FLASH_ATTN": "#7f7f7f", "CUSTOM": "#d62728"}


def draw(result: dict[str, Any], target: Path) -> None:
    """Writes the picture of a result."""
    runs = list(next(iter(result["runs"].values())))
    figure, axes = plt.subplots(1, len(FIELDS), figsize=(14, 4))
    for axis, (field, label) in zip(axes, FIELDS.items(), strict=True):
        for index, (backend, found) in enumerate(result["runs"].items()):
            places = [place + (index - 0.5) * 0.36 for place in range(len(runs))]
            figures = [found[run][field] for run in runs]
            axis.bar(places, [value["mean"] for value in figures], 0.36, label=backend, color=COLOURS[backend])
            axis.vlines(places, [value["mean"] for value in figures], [value["p99"] for value in figures],
                        color=COLOURS[backend], linewidth=2)  # fmt: skip
            axis.plot(places, [value["p99"] for value in figures], "_", color=COLOURS[backend], markersize=12)
        axis.set_ylabel(label)
        slant = {"rotation": 40, "ha": "right"} if len(runs) > 5 else {}  # where words would touch
        texts = [run if slant else run.replace(" ", "\n") for run in runs]
        axis.set_xticks(range(len(runs)), texts, fontsize=8, **slant)
        axis.grid(axis="y", alpha=0.3)
    axes[0].legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, fontsize=9, frameon=False)  # above the bars
    axes[1].set_title(f"vLLM, {result['model']} shape, {result['card']}: mean (bar) and P99 (line); lower is better")
    figure.tight_layout()
    figure.savefig(target, dpi=110)
