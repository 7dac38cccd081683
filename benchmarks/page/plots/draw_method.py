"""The pictures of docs/how-it-works: what the method does, drawn.

    python -m benchmarks.page.plots.draw_method          # docs/pictures/method-*.png

They explain and measure nothing: the times in `cost_model` are those of the formulas on that page.
"""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Rectangle

PICTURES = Path(__file__).parents[3] / "docs" / "pictures"
INK, GREY, PALE = "#1f2d3a", "#8a94a0", "#eef1f4"
TRUNK, LEFT, RIGHT, OWN = "#0b4186", "#2283bb", "#3fa796", "#f2b266"


def canvas(width: float, height: float, right: float, top: float) -> tuple[Any, Axes]:
    """A picture of so many inches with plain coordinates from (0, 0) to (right, top), y downwards."""
    figure, axis = plt.subplots(figsize=(width, height))
    axis.set_xlim(0, right)
    axis.set_ylim(top, 0)
    axis.axis("off")
    return figure, axis


def box(axis: Axes, x: float, y: float, width: float, height: float, colour: str, text: str = "", **style: Any) -> None:
    dark = colour in (TRUNK, LEFT, RIGHT, INK)
    style = {"color": "white" if dark else INK, "fontsize": 10, "ha": "center", "va": "center", **style}
    axis.add_patch(Rectangle((x, y), width, height, facecolor=colour, edgecolor="white", linewidth=1.5))
    axis.text(x + width / 2, y + height / 2, text, **style)


def arrow(axis: Axes, start: tuple[float, float], end: tuple[float, float], **style: Any) -> None:
    style = {"arrowstyle": "-|>", "mutation_scale": 14, "color": INK, "linewidth": 1.2, **style}
    axis.add_patch(FancyArrowPatch(start, end, **style))


def title(axis: Axes, x: float, y: float, text: str, **style: Any) -> None:
    axis.text(x, y, text, **{"fontsize": 11, "fontweight": "bold", "color": INK, "va": "center", **style})


def save(figure: Any, name: str) -> None:
    figure.tight_layout(pad=0.4)
    figure.savefig(PICTURES / f"method-{name}.png", dpi=130)
    plt.close(figure)


def prefix_forest() -> None:
    figure, axis = canvas(11, 4.3, 22, 8.6)
    title(axis, 0, 0.4, "Block table: page ids of each request")
    rows = [[7, 3, 9, 1, 20], [7, 3, 9, 1, 21], [7, 3, 9, 1, 22], [7, 3, 5, 6, 23], [7, 3, 5, 6, 24], [7, 3, 30]]
    shades = {7: TRUNK, 3: TRUNK, 9: LEFT, 1: LEFT, 5: RIGHT, 6: RIGHT}
    for row, pages in enumerate(rows):
        axis.text(0, 1.5 + row, f"request {row}", va="center", fontsize=9, color=GREY)
        for column, page in enumerate(pages):
            box(axis, 2.3 + 1.25 * column, 1.05 + row, 1.2, 0.9, shades.get(page, OWN), str(page))
    arrow(axis, (9.2, 4), (10.6, 4))
    title(axis, 11.2, 0.4, "Prefix forest: one node per shared stretch")
    box(axis, 11.2, 1.05, 2.8, 5.9, TRUNK, "pages 7, 3\n\nshared by\nrequests 0 to 5")
    box(axis, 14.05, 1.05, 2.8, 2.9, LEFT, "pages 9, 1\n\nrequests 0, 1, 2")
    box(axis, 14.05, 4.05, 2.8, 1.9, RIGHT, "pages 5, 6\nrequests 3, 4")
    for row in range(5):
        box(axis, 16.9, 1.05 + row, 1.8, 0.9, OWN, f"page {20 + row}", fontsize=9)
    box(axis, 14.05, 6.05, 1.8, 0.9, OWN, "page 30", fontsize=9)
    axis.text(19, 4, "leaves: what each\nrequest has alone", va="center", fontsize=9, color=GREY)
    named, read = sum(map(len, rows)), len({page for pages in rows for page in pages})
    text = "Two rows share a node where their page ids agree in every column up to there. "
    text += f"{named} pages are named, {read} are read."
    axis.text(0, 8.1, text, fontsize=9.5, color=INK, va="center")
    save(figure, "prefix-forest")


def row_tiles() -> None:
    figure, axis = canvas(11, 4.9, 22, 9.8)
    title(axis, 0, 0.4, "Packs: one item per node, then a merge")
    nodes = [(1.4, 1.2, 2.6, 6.4, TRUNK), (4.05, 1.2, 2.2, 3.15, LEFT), (4.05, 4.45, 2.2, 3.15, RIGHT)]
    for index, (x, y, width, height, colour) in enumerate(nodes):
        box(axis, x, y, width, height, colour, f"item {index}\nread once")
    for row in range(8):
        box(axis, 6.3, 1.2 + 0.8 * row, 1.6, 0.75, OWN, f"item {3 + row}", fontsize=8)
        axis.text(1.2, 1.58 + 0.8 * row, f"query {row}", ha="right", va="center", fontsize=8, color=GREY)
    axis.text(1.4, 8.2, "3 partial results per query:\nwritten, read and merged", fontsize=9.5, color=INK, va="center")
    arrow(axis, (9, 4.4), (10.4, 4.4))
    title(axis, 11, 0.4, "Row tiles: neighbouring queries, whole paths")
    for tile, (y, colour) in enumerate(((1.2, LEFT), (4.6, RIGHT))):
        axis.add_patch(Rectangle((11.9, y - 0.12), 9.1, 3.4, facecolor=PALE, edgecolor=INK, linewidth=1.3))
        box(axis, 12, y, 2.6, 3.15, TRUNK, "trunk for\n4 rows")
        box(axis, 14.65, y, 2.2, 3.15, colour, "branch for\n4 rows")
        for row in range(4):
            for column in range(4):
                shade = OWN if row == column else "#ffffff"
                box(axis, 16.9 + column, y + 0.79 * row, 0.97, 0.76, shade, "", fontsize=8)
            axis.text(11.7, y + 0.4 + 0.79 * row, f"{4 * tile + row}", ha="right", va="center", fontsize=8, color=GREY)
        axis.text(21.15, y + 1.6, f"tile {tile}", va="center", fontsize=9, color=INK, rotation=90)
    axis.text(
        11.9, 8.7, "Each tile reads its path once and finishes its queries: no partials.\nThe suffixes are a "
        "block-diagonal mask. Tile 1 finds the trunk in the L2 cache.", fontsize=9.5, color=INK, va="center",
    )  # fmt: skip
    save(figure, "row-tiles")


def work_list() -> None:
    figure, axis = canvas(11, 5.1, 21.6, 10.2)
    title(axis, 0, 0.4, "segments: stretches of KV within one page, and the rows of the item that want them")
    segments = [(TRUNK, "page 7\n16 tokens\nrows 0 to 3"), (TRUNK, "page 3\n16 tokens\nrows 0 to 3"),
                (OWN, "page 20\n5 tokens\nrow 0"), (OWN, "page 21\n9 tokens\nrow 1"),
                (TRUNK, "page 7\n16 tokens\nrows 0, 1"), (TRUNK, "page 3\n16 tokens\nrows 0, 1"),
                (OWN, "page 24\n2 tokens\nrow 0")]  # fmt: skip
    for index, (colour, text) in enumerate(segments):
        box(axis, 3.05 * index, 1, 2.95, 1.9, colour, text, fontsize=9)
    for name, first, end in (("item 0", 0, 4), ("item 1", 4, 6), ("item 2", 6, 7)):
        axis.plot([3.05 * first + 0.1, 3.05 * end - 0.2], [3.15, 3.15], color=GREY, linewidth=1.5)
        axis.text(3.05 * (first + end) / 2 - 0.05, 3.5, name, ha="center", va="center", fontsize=9, color=GREY)
    title(axis, 0, 4.5, "items: one tile of query rows each, heaviest first")
    fields = ["first segment", "full until", "end", "first query", "end"]
    for nth, values in enumerate(([0, 2, 4, 0, 4], [4, 6, 6, 4, 6], [6, 7, 7, 6, 7])):
        axis.text(0, 5.95 + nth, f"item {nth}", va="center", fontsize=9, color=GREY)
        for column, value in enumerate(values):
            box(axis, 1.6 + 2.2 * column, 5.5 + nth, 2.1, 0.9, PALE, str(value))
    for column, name in enumerate(fields):
        axis.text(2.65 + 2.2 * column, 5.15, name, ha="center", va="center", fontsize=8, color=GREY)
    title(axis, 13.4, 4.5, "queries and their slots")
    for column, (query, slot) in enumerate(zip("0123455", ["out"] * 5 + ["0", "1"], strict=True)):
        box(axis, 13.4 + 1.15 * column, 5.5, 1.1, 0.9, PALE, query)
        box(axis, 13.4 + 1.15 * column, 6.5, 1.1, 0.9, PALE if slot == "out" else OWN, slot, fontsize=9)
    axis.text(13.4, 5.15, "query token of the step", fontsize=8, color=GREY, va="center")
    axis.text(13.4, 7.75, "straight to the output, or to a partial slot", fontsize=8, color=GREY, va="center")
    text = (
        "An item names its segments and its queries, and a kernel needs nothing else. Query 5 has its KV in two items: "
        "each writes a partial\nresult into a slot, and a merge adds slots 0 and 1 up by their log-sum-exps."
    )
    axis.text(0, 9.4, text, fontsize=9.5, color=INK, va="center")
    save(figure, "work-list")


def cost_model() -> None:
    """Llama-3-8B's heads on a card of 3 TB/s and 700 TFLOP/s: 4,096 shared and 128 private tokens."""
    shared, private, head_bytes, flops_per_pair = 4096, 128, 8 * 2 * 128 * 2, 32 * 4 * 128
    requests = [2**power for power in range(9)]
    alone = [n * (shared + private) * head_bytes / 3.0e6 for n in requests]
    once = [(shared + n * private) * head_bytes / 3.0e6 for n in requests]
    rows = [-(-4 * n // 64) * 64 / 4 for n in requests]  # query tokens that tiles of 64 rows are filled up to
    products = [n * (shared + 16 * private) * flops_per_pair / 700e6 for n in rows]  # suffixes: for 16 requests each
    figure, axis = plt.subplots(figsize=(8.5, 4.3))
    axis.plot(requests, alone, color=GREY, linewidth=2, label="memory, each request reads its own")
    axis.plot(requests, once, color=TRUNK, linewidth=2, label="memory, the trunk read once")
    axis.plot(requests, products, color=OWN, linewidth=2, label="arithmetic of 64-row tiles, padding included")
    chosen = [max(pair) + 5 for pair in zip(once, products, strict=True)]
    axis.plot(requests, chosen, "--", color=INK, linewidth=1.6, label="predicted: the larger of both, and launches")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(requests, [str(n) for n in requests])
    axis.set_xlabel("requests behind one prompt of 4,096 tokens, 128 tokens each")
    axis.set_ylabel("µs per layer")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=9, frameon=False)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    save(figure, "cost-model")


def planning_on_the_device() -> None:
    figure, axis = canvas(10, 4.9, 18, 9.4)
    title(axis, 0, 0.4, "Planned on the host: the GPU waits")
    for y, name in ((1.1, "host"), (2.2, "GPU")):
        axis.text(0, y + 0.45, name, va="center", fontsize=10, color=GREY)
    box(axis, 2, 1.1, 2.4, 0.9, PALE, "copy tables")
    box(axis, 4.45, 1.1, 4.6, 0.9, OWN, "forest, tiles, lists")
    box(axis, 9.1, 1.1, 2, 0.9, PALE, "upload")
    box(axis, 11.2, 2.2, 6.4, 0.9, TRUNK, "layers of this step")
    axis.text(6.6, 2.65, "idle", ha="center", va="center", fontsize=10, color=GREY)
    arrow(axis, (11.1, 1.9), (11.5, 2.3))
    title(axis, 0, 4.3, "Planned on the GPU: one CUDA graph, no wait")
    for y, name in ((5, "host"), (6.1, "GPU")):
        axis.text(0, y + 0.45, name, va="center", fontsize=10, color=GREY)
    box(axis, 2, 5, 2.4, 0.9, PALE, "launch graphs")
    box(axis, 4.5, 5, 12, 0.9, "#ffffff", "free: schedules the next step", color=GREY)
    stages = ["hash", "parent", "entries", "tiles", "choice", "items", "lists"]
    for index, name in enumerate(stages):
        box(axis, 2.6 + 1.15 * index, 6.1, 1.12, 0.9, OWN, name, fontsize=8.5)
    box(axis, 2.6 + 1.15 * len(stages), 6.1, 6.4, 0.9, TRUNK, "layers of this step")
    arrow(axis, (3, 5.9), (3, 6.1), mutation_scale=9)
    axis.text(
        0, 8.4, "hash: equal prefixes have equal hashes.  parent: the earlier row that shares most.  entries: queries "
        "in the order of the forest.\ntiles: the segments of every tile.  choice: the predicted time of every tiling.  "
        "items, lists: the work list of the fastest, in fixed arrays.", fontsize=9.5, color=INK, va="center",
    )  # fmt: skip
    save(figure, "planning-on-the-device")


def hopper_kernels() -> None:
    figure, axis = canvas(11, 4.9, 22.4, 10)
    title(axis, 0, 0.4, "One program: two producer warps, a pipeline in shared memory, one consumer warp group")
    for name, y in (("keys, by TMA", 1.1), ("values, by TMA", 2.2), ("tensor cores", 4), ("softmax", 5.1)):
        axis.text(0, y + 0.45, name, va="center", fontsize=10, color=GREY)
    unit, shades = 3.5, (LEFT, RIGHT)
    for block in range(5):
        x = 3.6 + unit * block
        begin = x + 1.9
        box(axis, x, 1.1, 1.8, 0.9, shades[block % 2], f"K{block}")
        if block < 4:
            box(axis, x + 0.9, 2.2, 1.8, 0.9, shades[block % 2], f"V{block}")
            box(axis, begin + 1.35, 5.1, 1.95, 0.9, OWN, f"softmax {block}", fontsize=9)
            arrow(axis, (x + 1.8, 2.0), (begin + 0.3, 4.0), color=GREY, mutation_scale=9)
            arrow(axis, (x + 2.7, 3.1), (begin + unit + 1.6, 4.0), color=GREY, mutation_scale=9)
            box(axis, begin, 4, 1.3, 0.9, TRUNK, f"Q·K{block}", fontsize=9)
            box(axis, begin + unit + 1.35, 4, 1.3, 0.9, INK, f"P{block}·V{block}", fontsize=9)
        else:
            box(axis, begin, 4, 1.3, 0.9, TRUNK, f"Q·K{block}", fontsize=9)
    title(axis, 0, 6.8, "The pipeline: a slot is filled again when its last reader has released it")
    states = (("K2: full", LEFT), ("K3: being filled", PALE), ("V1: being read", RIGHT), ("V2: full", LEFT))
    for slot, (state, colour) in enumerate(states):
        box(axis, 4.2 * slot, 7.3, 4, 0.9, colour, state)
    text = (
        "While a block's softmax runs, the tensor cores add the values of the block before. Two such programs share an "
        "SM. The prefill kernel has\ntwo consumer warp groups; the kernel for prompt chunks and decodes has a third, "
        "which decodes beside them."
    )
    axis.text(0, 9.2, text, fontsize=9.5, color=INK, va="center")
    save(figure, "hopper-kernels")


if __name__ == "__main__":
    for draw in (prefix_forest, row_tiles, work_list, cost_model, planning_on_the_device, hopper_kernels):
        draw()
        print(f"docs/pictures/method-{draw.__name__.replace('_', '-')}.png")
