"""Draws results into docs/pictures.

python -m benchmarks.page.plots                  # all
python -m benchmarks.page.plots kernels-h100     # docs/pictures/kernels-h100.png
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from benchmarks.page.common import ROOT, load
from benchmarks.page.plots import hybrid, kernels, planner, prefill, training, vllm

PICTURES = ROOT / "docs" / "pictures"


class Plot(NamedTuple):
    """What draws a picture, and the name of the result that it shows."""

    draw: Callable[[dict[str, Any], Path], None]
    result: str


PLOTS = MappingProxyType(
    {
        "kernels-h100": Plot(kernels.draw, "kernels-h100-bfloat16"),
        "kernels-h200": Plot(kernels.draw, "kernels-h200-bfloat16"),
        "planner-linear": Plot(planner.draw, "planner-cpu"),
        **{f"flash-training-{card}": Plot(training.draw, f"flash-training-{card}") for card in ("h100", "h200")},
        **{f"hybrid-{card}": Plot(hybrid.draw, f"hybrid-{card}") for card in ("h100", "h200")},
        **{f"prefill-{card}": Plot(prefill.draw, f"prefill-{card}") for card in ("h100", "h200")},
        **{f"vllm-serving-{card}": Plot(vllm.draw, f"vllm-serving-{card}") for card in ("h100", "h200")},
    }
)
# A result does not keep what these show, so the run itself draws them.
DRAWN_BY_RUNS = MappingProxyType(
    {
        "serving-cpu": "python -m benchmarks.engines.embedded_serving",
        "serving-h200": "python -m benchmarks.engines.embedded_serving --device cuda",
        "analyze-report": "python -m benchmarks.page.report_example",
    }
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(PLOTS)}")
    names = parser.parse_args().names or list(PLOTS)
    for name in names:
        if name not in PLOTS:
            parser.error(f"argument NAME: {name!r}: expected some of {', '.join(PLOTS)}")
    for name in names:
        PLOTS[name].draw(load(PLOTS[name].result), PICTURES / f"{name}.png")
        print(f"docs/pictures/{name}.png")


if __name__ == "__main__":
    main()
