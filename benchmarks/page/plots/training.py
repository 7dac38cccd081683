"""The training benchmark as a picture: TFLOP/s of both passes by length, and peak memory."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def draw(result: dict[str, Any], target: Path) -> None:
    """Writes the picture of a result."""
    speeds = result.get("speeds", [])
    panels = [(causal, part) for causal in (True, False) for part in ("forward", "backward")] if speeds else []
    figure, axes = plt.subplots(1, len(panels) + 1, figsize=(4.2 * (len(panels) + 1), 3.8), squeeze=False)
    for axis, (causal, part) in zip(axes[0], panels, strict=False):
        rows = [row for row in speeds if row["causal"] == causal]
        for name in dict.fromkeys(name for row in rows for name in row if isinstance(row[name], dict)):
            there = [row for row in rows if name in row]
            axis.plot([row["length"] for row in there], [row[name][part]["tflops"] for row in there], "o-", label=name)
        axis.set_title(f"{part}, {'causal' if causal else 'not causal'}")
        axis.set_ylabel("TFLOP/s")
        axis.set_ylim(bottom=0)
    for name in ("one_pass", "torch_flash", "torch_math"):
        rows = result["memory"]
        axes[0][-1].plot([row["length"] for row in rows], [row[name] / 1e6 for row in rows], "o-", label=name)
    axes[0][-1].set_title("peak memory, forward and backward")
    axes[0][-1].set_ylabel("MB")
    axes[0][-1].set_yscale("log")
    for axis in axes[0]:
        axis.set_xscale("log", base=2)
        axis.set_xlabel("tokens of a sequence")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(target, dpi=110)
