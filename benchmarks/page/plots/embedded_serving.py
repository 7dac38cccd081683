"""Table and picture of `serving.py`."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np


def print_table(rows: dict[str, dict[str, Any]]) -> None:
    """POD's Table 5; on a CPU with the stalls scaled."""
    print(f"{'':28}{'TTFT s':>14}{'between ms':>22}{'latency s':>14}{'stalled %':>14}{'busy':>7}")
    print(f"{'':28}{'P50':>7}{'P99':>7}{'P50':>7}{'P99':>7}{'max':>8}{'P50':>7}{'P99':>7}{'200':>7}{'500':>7}")
    for name, row in rows.items():
        between = row["between_tokens_ms"]
        print(
            f"{name:28}{row['ttft_s']['p50']:7.2f}{row['ttft_s']['p99']:7.2f}{between['p50']:7.1f}{between['p99']:7.1f}"
            f"{between['max']:8.1f}{row['latency_s']['p50']:7.2f}{row['latency_s']['p99']:7.2f}"
            f"{row['stalled_200_percent']:7.1f}{row['stalled_500_percent']:7.1f}{row['busy_share']:7.2f}"
        )


def draw(result: dict[str, Any], gaps: dict[str, list[float]], target: Path) -> None:
    """Distribution of the times between tokens, first tokens, and throughput by mix."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    for name, values in gaps.items():
        ordered = np.sort(values)
        left.step(1e3 * ordered, 100 * (1 - np.arange(len(ordered)) / len(ordered)), label=name)
    for name, longest in result["stall_ms"].items():
        left.axvline(longest, color="black", linewidth=0.8, linestyle="--")
        scaled = "" if longest == float(name) else ", scaled"
        left.text(longest, 0.04, f" POD's {name} ms{scaled}", rotation=90, fontsize=8)
    left.set(xscale="log", yscale="log", ylim=(0.03, 110), xlabel="time between tokens, ms", ylabel="% that are longer")
    left.legend(fontsize=8)
    left.set_title(f"Stalls ({result['requests_per_second']} requests/s)")
    places = np.arange(len(gaps))
    for shift, key in ((-0.2, "p50"), (0.2, "p99")):
        middle.bar(places + shift, [row["ttft_s"][key] for row in result["arrivals"].values()], 0.4, label=key.upper())
    middle.set_xticks(places, gaps, rotation=20, fontsize=8, ha="right")
    middle.set(ylabel="s", title="Time to the first token")
    middle.legend(fontsize=8)
    for name in gaps:
        points = [(row["prompt_to_output"], row[name]["requests_per_minute"]) for row in result["mixes"]]
        right.plot(*zip(*points, strict=True), marker="o", label=name)
    right.set(
        xlabel="prompt tokens per output token",
        ylabel="requests per minute",
        title=f"All waiting, {result['mix_at_once']} at a time",
    )
    right.legend(fontsize=8)
    figure.savefig(target, dpi=110)
