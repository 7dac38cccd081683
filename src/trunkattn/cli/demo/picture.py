"""The picture of a prefix forest: which requests share which tokens, and what one decode step reads."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Polygon, Rectangle

from trunkattn.cli.demo.measure import megabytes
from trunkattn.planner.prefix_forest import ROOT, Forest

PRIVATE_COLOUR: Final = "#f2b36b"
PER_QUERY_COLOUR: Final = "#b5b5b5"
INK: Final = "#20303a"
TRUNK_WIDTH: Final = 0.25  # share of the width for tokens that all requests share; the rest has one scale
LABEL_ROWS: Final = 4  # a node with fewer rows has no room for a label


@dataclass(frozen=True)
class ForestPicture:
    """The content of a picture.

    Attributes:
        forest: the forest of a block table whose rows are the requests.
        names: name of each row.
        groups: group of each row. A node with exactly one group's rows has the group as its label.
        trunk_name: label of a node with all rows.
        tokens_read: KV tokens that the decode step reads.
        tokens_per_query: KV tokens that it would read with one query at a time.
        token_bytes: bytes of one token's KV over all layers.
        num_layers: layers of the model.
    """

    forest: Forest
    names: Sequence[str]
    groups: Sequence[str]
    trunk_name: str
    tokens_read: float
    tokens_per_query: float
    token_bytes: int
    num_layers: int

    @property
    def bytes_read(self) -> float:
        return self.tokens_read * self.token_bytes

    @property
    def bytes_per_query(self) -> float:
        return self.tokens_per_query * self.token_bytes

    def rows(self, node: int) -> list[int]:
        """Rows of the block table that share a node."""
        rows: list[int] = self.forest.order[self.forest.row_start[node] : self.forest.row_end[node]].tolist()
        return rows

    def label(self, node: int) -> str | None:
        """Label of a node: the trunk's name, a group, or None."""
        rows = self.rows(node)
        if len(rows) == len(self.names):
            return self.trunk_name
        groups = {self.groups[row] for row in rows}
        return groups.pop() if len(groups) == 1 and len(rows) == self.groups.count(self.groups[rows[0]]) else None

    def is_read_once(self, node: int) -> bool:
        """Whether the step read the node once: it read fewer extra tokens in all than the node has."""
        lengths = self.forest.token_end - self.forest.token_start
        return self.tokens_read - int(lengths.sum()) < int(lengths[node])


class TokenScale:
    """Maps tokens to horizontal positions in [0, 1]. A long common trunk is compressed to leave room for the leaves."""

    def __init__(self, forest: Forest) -> None:
        self.end = int(forest.token_end.max())
        trunk = forest.token_end[(forest.parent == ROOT) & (forest.row_end - forest.row_start == len(forest.order))]
        common = int(trunk.max(initial=0))
        self.trunk_end = common if common > TRUNK_WIDTH * self.end else 0

    def __call__(self, token: float) -> float:
        return float(np.interp(token, [0, self.trunk_end, self.end], [0, TRUNK_WIDTH if self.trunk_end else 0, 1]))

    def ticks(self) -> list[int]:
        """Tokens with a mark: round numbers, and the trunk's end."""
        span = self.end - self.trunk_end
        step = next(size for size in (5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10**9) if span / size <= 8)
        first = self.trunk_end + step // 2
        later = [token for token in range(0, self.end + 1, step) if token > first]
        return [0, *([self.trunk_end] if self.trunk_end else []), *later]


def draw_forest(picture: ForestPicture, path: Path) -> None:
    """Writes the picture as a PNG."""
    figure = Figure(figsize=(14, 3.6 + 0.29 * max(len(picture.names), 8)), dpi=110, facecolor="white")
    heights = [0.29 * max(len(picture.names), 8), 1.35]
    top, bottom = figure.subplots(2, 1, height_ratios=heights)
    saved = 1 - picture.bytes_read / picture.bytes_per_query
    figure.suptitle(
        f"One decode step of {len(picture.names)} customers: attention reads {saved:.0%} fewer KV bytes",
        fontsize=17, fontweight="bold", color=INK, x=0.02, ha="left",
    )  # fmt: skip
    _draw_nodes(top, picture)
    _draw_bytes(bottom, picture)
    figure.tight_layout(rect=(0, 0, 1, 0.995), h_pad=2.0)
    figure.savefig(path)


def _draw_nodes(axes: Axes, picture: ForestPicture) -> None:
    """Draws the forest as an icicle: a node's width is its tokens, its height the requests that share it."""
    forest, scale = picture.forest, TokenScale(picture.forest)
    sharing = (forest.row_end - forest.row_start).tolist()
    for node, count in enumerate(sharing):
        start, end = int(forest.token_start[node]), int(forest.token_end[node])
        left, width = scale(start), scale(end) - scale(start)
        row = int(forest.row_start[node])
        colour = _colour(count, len(picture.names))
        axes.add_patch(Rectangle((left, row), width, count, facecolor=colour, edgecolor="white", linewidth=1.2))
        if count >= LABEL_ROWS and (label := picture.label(node)):
            text = f"{_wrap(label)}\n\n{end - start:,} tokens\n{megabytes((end - start) * picture.token_bytes)}"
            text += f"\n\nread once\nfor {count}" if picture.is_read_once(node) else f"\n\nshared by {count}"
            style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 13, "fontweight": "bold"}
            axes.text(left + width / 2, row + count / 2, text, color="white", **style)
        if forest.is_leaf[node]:
            name = picture.names[picture.rows(node)[0]]
            axes.text(scale(end) + 0.006, row + 0.5, name, va="center", fontsize=10.5, color=INK)
            own = f"{end - start}"
            axes.text(left + width / 2, row + 0.5, own, va="center", ha="center", fontsize=9, color=INK)
    if scale.trunk_end:
        _draw_break(axes, 0.016, len(picture.names))
    axes.set(xlim=(0, 1.08), ylim=(len(picture.names), 0), yticks=[])
    axes.set_xticks([scale(token) for token in scale.ticks()], [f"{token:,}" for token in scale.ticks()])
    axes.set_xlabel("tokens from the start of the conversation (the shared guide is drawn shorter)", color=INK)
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.legend(
        handles=[Patch(color=_colour(count, len(picture.names)), label=_legend(count)) for count in _counts(sharing)],
        ncols=8, loc="lower left", bbox_to_anchor=(0, 1.0), frameon=False, fontsize=11, borderaxespad=0.2,
        handlelength=1.2,
    )  # fmt: skip


def _draw_break(axes: Axes, x: float, rows: int) -> None:
    """Draws two slanted white lines where the trunk is compressed."""
    for shift in (0.0, 0.010):
        corners = [(x + shift, rows), (x + shift + 0.004, rows), (x + shift + 0.024, 0), (x + shift + 0.020, 0)]
        axes.add_patch(Polygon(corners, closed=True, facecolor="white", edgecolor="none"))


def _draw_bytes(axes: Axes, picture: ForestPicture) -> None:
    """Draws two bars to one scale: the bytes read with one query at a time, and with sharing."""
    bars = (
        ("one query\nat a time", picture.bytes_per_query, PER_QUERY_COLOUR),
        ("trunkattn", picture.bytes_read, _colour(len(picture.names), len(picture.names))),
    )
    for row, (name, count, colour) in enumerate(bars):
        axes.barh(row, count, height=0.62, color=colour)
        axes.text(-0.008 * picture.bytes_per_query, row, name, ha="right", va="center", fontsize=12, color=INK)
    each, layers = megabytes(picture.bytes_per_query), picture.num_layers
    inside: dict[str, Any] = {"va": "center", "fontsize": 12, "color": INK}
    per_layer = megabytes(picture.bytes_per_query / layers)
    axes.text(picture.bytes_per_query * 0.01, 0, f"{each} per step: {per_layer} in each of {layers} layers", **inside)
    saved = megabytes(picture.bytes_per_query - picture.bytes_read)
    text = f"{megabytes(picture.bytes_read)} per step: {megabytes(picture.bytes_read / layers)} in each layer; "
    axes.text(picture.bytes_read + picture.bytes_per_query * 0.01, 1, f"{text}{saved} saved", **inside)
    axes.set(xlim=(-0.09 * picture.bytes_per_query, picture.bytes_per_query), ylim=(1.5, -0.5))
    axes.set_title("KV bytes that attention reads in this step", loc="left", fontsize=13, color=INK)
    axes.axis("off")


def _colour(count: int, total: int) -> Any:
    """The colour of a node: the more requests share it, the darker. Private tokens have their own colour."""
    if count == 1:
        return PRIVATE_COLOUR
    return colormaps["GnBu"](0.40 + 0.60 * (np.log(count) / np.log(total)) ** 2)


def _counts(sharing: Sequence[int]) -> list[int]:
    return sorted(set(sharing), reverse=True)


def _legend(count: int) -> str:
    return "one customer's own: question, and answer so far" if count == 1 else f"shared by {count}"


def _wrap(label: str) -> str:
    """Breaks a label after every second word."""
    words = label.split()
    return "\n".join(" ".join(words[at : at + 2]) for at in range(0, len(words), 2))
