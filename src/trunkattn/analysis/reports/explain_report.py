"""An explanation of a batch for a terminal, as JSON, and its forest as SVG."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

import trunkattn.analysis.figures as figures
from trunkattn.analysis.explain import ExplainedLayers, Explanation
from trunkattn.analysis.pricing.prices import Prices
from trunkattn.analysis.records import TrieNode
from trunkattn.analysis.reports import charts
from trunkattn.analysis.reports.words import rates

JSON_VERSION: Final = 1
_MOST_LINES: Final = 60  # lines of the forest in a terminal
_FASTER: Final = 1.01  # from this ratio on, sharing is said to save time
_BAR: Final = 24  # characters of the longest node
_STYLES: Final = ("#f2b36b", "#a8ddb5", "#7bccc4", "#4eb3d3", "#1f78b0", "#08528f")  # by `charts.shade`
_Shape = tuple[int, int, tuple[Any, ...]]  # tokens and sequences of a node, and the shapes of its children


def explanation_dict(explanation: Explanation, prices: Prices) -> dict[str, Any]:
    """An explanation as JSON values. Times are in µs, of one layer on one card; bytes are of all layers and cards."""
    return {
        "version": JSON_VERSION,
        "card": prices.card.description,
        "model": prices.shape.name,
        "page_size": prices.page_size,
        "num_requests": explanation.num_requests,
        "kv_bytes": explanation.kv_bytes,
        "unique_kv_bytes": explanation.unique_kv_bytes,
        "alone": explanation.baseline,
        "forest": [
            {"parent": node.parent, "start": node.start, "tokens": node.tokens, "requests": node.sequences}
            for node in explanation.snapshot.nodes
        ],
        "layers": [_layers_dict(each) for each in explanation.layers],
        "assumptions": rates(prices),
    }


def _layers_dict(layers: ExplainedLayers) -> dict[str, Any]:
    return {
        "window": layers.window,
        "count": layers.count,
        "kv_bytes": layers.kv_bytes,
        "unique_kv_bytes": layers.unique_kv_bytes,
        "alone_us": layers.one_by_one_us,
        "policies": [
            {"policy": each.policy, "layer_us": each.layer_us, "kv_bytes": each.kv_bytes, **_stats(each.stats)}
            for each in layers.policies
        ],
    }


def _stats(stats: Any) -> dict[str, Any]:
    return {("chosen" if name == "policy" else name): value for name, value in asdict(stats).items()}


def print_explanation(explanation: Explanation, prices: Prices, console: Console) -> None:
    """Prints the forest, the policies, and why auto took what it took."""
    nodes, each = explanation.snapshot.nodes, prices.token_bytes
    longest = max((node.tokens for node in nodes), default=1)
    total = sum(node.sequences for node in nodes if node.parent < 0)
    decode = "decodes" if explanation.num_requests == 1 else "decode"
    words = f"{figures.plural(explanation.num_requests, 'request')} {decode}, with {figures.size(each)} of KV a token"
    tree = Tree(Text(f"{words} ({prices.shape.name})", style="bold"))
    lines = [_MOST_LINES]
    _grow(tree, _folded(_shapes(nodes)), (longest, total), lines)
    if lines[0] < 0:
        tree.add(Text(f"… and {figures.plural(-lines[0], 'line')} more", style="dim"))
    console.print(tree)
    console.line()
    for layers in explanation.layers:
        console.print(policy_table(explanation, layers, prices))
        console.line()
        auto = layers.auto.stats
        console.print(f"auto took {auto.policy}: {auto.reason}", markup=False, highlight=False)
        console.line()
    for sentence in rates(prices):
        console.print(sentence, style="dim", markup=False, highlight=False)
        console.line()
    console.print(verdict(explanation), style="bold green", markup=False, highlight=False)


def verdict(explanation: Explanation) -> str:
    """What sharing is worth for the batch, in one sentence."""
    reads = figures.saved(explanation.kv_bytes, explanation.unique_kv_bytes)
    one_by_one, shared = explanation.times_us
    if reads < 0.005:
        return "These requests share nothing, so reading it once saves nothing."
    span = "in all layers"
    if len(explanation.layers) == 1:
        span, one_by_one, shared = "a layer", explanation.layers[0].one_by_one_us, explanation.layers[0].auto.layer_us
    if one_by_one < _FASTER * shared:
        return (
            f"Sharing would save {figures.percent(reads)} of the KV reads from memory, and no time: attention takes "
            f"{shared:,.1f} µs {span} either way."
        )
    return (
        f"Sharing saves {figures.percent(reads)} of the KV reads from memory, and attention takes "
        f"{shared:,.1f} µs {span}, not {one_by_one:,.1f}: {one_by_one / shared:.1f} times as fast."
    )


def policy_table(explanation: Explanation, layers: ExplainedLayers, prices: Prices) -> Table:
    """Each policy's plan, bytes and time for layers that are alike."""
    which, read = "One layer's attention", "KV read\nall layers"
    if len(explanation.layers) > 1 or layers.window is not None:
        seen = "that see all" if layers.window is None else f"with a window of {layers.window:,} tokens"
        which, read = f"One of {figures.plural(layers.count, 'layer')} {seen}", "KV read\nthese layers"
    title = f"{which} on {escape(prices.card.description)}, predicted"
    table = Table("policy", title=title, title_style="bold", title_justify="left", box=None, header_style="bold")
    for column in ("µs a layer", read, "saved", "items", "tiles"):
        table.add_column(column, justify="left" if column == "tiles" else "right")
    cells = (f"{layers.one_by_one_us:,.1f}", figures.size(layers.kv_bytes), "0 %", "", "")
    table.add_row(explanation.baseline, *cells, style="dim")
    for each in layers.policies:
        tiles = ", ".join(f"{number:,} of {name}" for name, number in each.stats.tiles.items() if number)
        saved = figures.percent(figures.saved(layers.kv_bytes, each.kv_bytes))
        row = (f"{each.layer_us:,.1f}", figures.size(each.kv_bytes), saved, f"{each.stats.num_work_items:,}", tiles)
        table.add_row(each.policy, *row, style="bold" if each.policy == "auto" else "")
    if layers is explanation.layers[-1]:
        table.caption = "What two items read counts twice; the second one mostly finds it in the L2 cache."
        table.caption_justify = "left"
    return table


def _shapes(nodes: list[TrieNode]) -> list[_Shape]:
    """The shapes of the trees of a forest."""
    children: list[list[int]] = [[] for _ in nodes]
    for index, node in enumerate(nodes):
        if node.parent >= 0:
            children[node.parent].append(index)
    shapes: list[_Shape] = [(0, 0, ())] * len(nodes)
    for index in range(len(nodes) - 1, -1, -1):  # a node comes after its ancestors
        node = nodes[index]
        shapes[index] = (node.tokens, node.sequences, tuple(shapes[child] for child in children[index]))
    return [shapes[index] for index, node in enumerate(nodes) if node.parent < 0]


def _folded(shapes: list[_Shape] | tuple[_Shape, ...]) -> Iterator[tuple[int, _Shape]]:
    """Each shape once per run of equal shapes, with the length of the run."""
    found = 0
    for index, shape in enumerate(shapes):
        found += 1
        if index + 1 == len(shapes) or shapes[index + 1] != shape:
            yield found, shape
            found = 0


def _grow(tree: Tree, shapes: Iterator[tuple[int, _Shape]], most: tuple[int, int], lines: list[int]) -> None:
    """Adds shapes to a tree in a terminal. most: tokens of the longest node, and the number of all sequences. lines
    [1]: lines that may still be printed; a negative number counts those left out."""
    longest, total = most
    for number, (tokens, sequences, children) in shapes:
        lines[0] -= 1
        if lines[0] < 0 and children:
            _grow(tree, _folded(children), most, lines)
        if lines[0] < 0:
            continue
        whose = "its own" if sequences == 1 else f"read by {sequences:,}"
        alike = f"  × {number:,}" if number > 1 else ""
        bar = "█" * max(1, round(_BAR * tokens / max(longest, 1)))
        label = Text.assemble(
            (bar, _STYLES[charts.shade(sequences, total)]), f" {figures.plural(tokens, 'token')}, {whose}{alike}"
        )
        _grow(tree.add(label), _folded(children), most, lines)


def forest_svg(explanation: Explanation, prices: Prices) -> str:
    """The forest as an SVG file, for light and dark pages.

    Raises:
        ValueError: the batch has no token.
    """
    end = max((node.start + node.tokens for node in explanation.snapshot.nodes), default=0)
    icicle = charts.icicle(explanation.snapshot, prices.token_bytes, max(1, end), lambda node: "")
    if icicle is None:
        raise ValueError("the batch has no token: expected sequences to draw")
    environment = Environment(
        loader=PackageLoader("trunkattn.analysis.reports", "static"), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template("forest.svg").render(
        icicle=icicle, height=charts.ICICLE_PIXELS, title=verdict(explanation)
    )
