"""The planner's growth as a picture: a cold build against the table's entries."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def draw(result: dict[str, Any], target: Path) -> None:
    """Writes the picture of a result."""
    points = result["growth"]
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    entries = [point["entries"] / 1e3 for point in points]
    for policy, style in (("auto", "o-"), ("pat", "s-")):
        axes.plot(entries, [point[f"{policy}_ms"] for point in points], style, label=policy)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlabel("block table entries (thousands)")
    axes.set_ylabel("cold build (ms, one core)")
    axes.plot(
        entries,
        [entries_k * points[3]["auto_ms"] / entries[3] for entries_k in entries],
        ":",
        color="grey",
        label="linear",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(target, dpi=150)
