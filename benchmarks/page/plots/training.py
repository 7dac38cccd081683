"""The training benchmark as a picture: TFLOP/s of both passes by length, and peak memory."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.kernels.flash_training import GRID, LENGTHS
from benchmarks.kernels.training_peers import parse_shape


def draw(result: dict[str, Any], target: Path) -> None:
    """Writes the picture of a result."""
    speeds = {parse_shape(row["shape"]): row for row in result["rows"]}
    speeds = {shape: speeds[shape] for shape in GRID[: 2 * len(LENGTHS)] if shape in speeds}  # 32/32 heads of 128
    panels = [(causal, part) for causal in (True, False) for part in ("forward", "backward")] if speeds else []
    figure, axes = plt.subplots(1, len(panels) + 1, figsize=(4.2 * (len(panels) + 1), 3.8), squeeze=False)
    for axis, (causal, part) in zip(axes[0], panels, strict=False):
        rows = {shape.length: row for shape, row in speeds.items() if shape.causal == causal}
        for name in dict.fromkeys(name for row in rows.values() for name in row):
            there = {length: row[name][part]["tflops"] for length, row in rows.items() if part in row.get(name, ())}
            if there:
                axis.plot(list(there), list(there.values()), "o-", label=name)
        axis.set_title(f"{part}, {'causal' if causal else 'not causal'}")
        axis.set_ylabel("TFLOP/s")
        axis.set_ylim(bottom=0)
    for name in ("own", "torch_flash", "torch_math"):
        rows = result["checks"]["memory"]
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
