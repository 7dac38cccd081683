"""What a report draws: curves and prefix trees, in percent of the picture, so that one drawing fits every width."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

import trunkattn.analysis.figures as figures
from trunkattn.analysis.records import Analysis, Moment, Snapshot, TrieNode

ICICLE_PIXELS: Final = 420  # height of a prefix tree
_SHADES: Final = 5  # colours of shared boxes, by the number of requests
_LABEL_PIXELS: Final = 17  # height of a line of a label
_EDGE_PIXELS: Final = 4  # the least height of a box with an edge: an edge would hide a lower one
_ROUND: Final = (1, 2, 5)


@dataclass(frozen=True)
class Tick:
    """A mark of an axis. place: percent from the left, or from the top."""

    place: float
    text: str


@dataclass(frozen=True)
class Dot:
    """A point of a curve, with its description."""

    x: float
    y: float
    text: str


@dataclass(frozen=True)
class Curve:
    """A curve of a chart. shade: class of its colour. path: of an SVG whose sides are 100."""

    name: str
    shade: str
    path: str
    dots: list[Dot]


@dataclass(frozen=True)
class Chart:
    """A chart. name: what is drawn over what, for those who do not see it."""

    name: str
    x_name: str
    curves: list[Curve]
    x_ticks: list[Tick]
    y_ticks: list[Tick]


@dataclass(frozen=True)
class Box:
    """A node of a prefix tree. All lengths are in percent. edged: it is high enough for an edge."""

    x: float
    y: float
    width: float
    height: float
    shade: int
    edged: bool
    text: str


@dataclass(frozen=True)
class Label:
    """Text in a box: one line, or two where there is room."""

    box: Box
    lines: list[str]
    prompt: str


@dataclass(frozen=True)
class Icicle:
    """A prefix tree at a moment.

    Attributes:
        time: of the moment, for people.
        sequences: that decode.
        boxes: of the nodes that several sequences read.
        leaves, thin_leaves: paths of all other nodes, with and without an edge.
        labels: of the boxes with room for one.
        ticks: of the tokens.
        legend: a class and a text for each colour.
    """

    time: str
    sequences: int
    boxes: list[Box]
    leaves: str
    thin_leaves: str
    labels: list[Label]
    ticks: list[Tick]
    legend: list[tuple[int, str]]


def round_step(span: float, most: int) -> float:
    """The smallest of the steps 1, 2, 5, 10, 20, ... with which `most` steps cover the span."""
    if span <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(span / most))
    return next((digit * power for digit in _ROUND if span / (digit * power) <= most), 10 * power)


def _ticks(top: float, most: int, text: Callable[[float], str]) -> list[tuple[float, str]]:
    step = round_step(top, most)
    return [(step * number, text(step * number)) for number in range(math.floor(top / step + 1e-9) + 1)]


def _path(points: Iterable[tuple[float, float] | None]) -> str:
    """Lines between points; None interrupts them."""
    parts, command = [], "M"
    for point in points:
        if point is None:
            command = "M"
            continue
        parts.append(f"{command}{point[0]:.4g} {point[1]:.4g}")
        command = "L"
    return "".join(parts)


def _over_time(
    moments: Sequence[Moment], value: Callable[[Moment], float | None], top: float
) -> list[tuple[float, float] | None]:
    end = moments[-1].start + moments[-1].seconds
    points: list[tuple[float, float] | None] = []
    for moment in moments:
        found = value(moment)
        at = 100 * (moment.start + moment.seconds / 2) / max(end, 1e-9)
        points.append(None if found is None else (at, 100 - 100 * found / top))
    return points


def _time_ticks(moments: Sequence[Moment]) -> list[Tick]:
    end = moments[-1].start + moments[-1].seconds
    unit = next((one for one in (86400, 3600, 60) if end >= 3 * one), 1)
    word = {86400: "d", 3600: "h", 60: "min", 1: "s"}[unit]
    return [Tick(100 * at * unit / end, f"{at:g} {word}") for at, _ in _ticks(end / unit, 5, str)]


def time_chart(moments: Sequence[Moment]) -> Chart | None:
    """The time of a step over the log's time, one by one and shared; None: there are fewer than two moments."""
    busy = [moment for moment in moments if moment.num_steps]
    if len(busy) < 2:
        return None
    top = 1.08 * max(moment.step_us for moment in busy) / 1000
    curves = [
        Curve(name, shade, _path(_over_time(moments, partial(_step_ms, field=field), top)), [])
        for name, shade, field in (("one by one", "unshared", "step_us"), ("shared", "read", "shared_step_us"))
    ]
    ticks = [Tick(100 - 100 * value / top, text) for value, text in _ticks(top, 5, lambda value: f"{value:g} ms")]
    return Chart("Time of a step over the time of the log", "time of the log", curves, _time_ticks(moments), ticks)


def _step_ms(moment: Moment, field: str) -> float | None:
    return float(getattr(moment, field)) / 1000 if moment.num_steps else None


def hits_chart(moments: Sequence[Moment]) -> Chart | None:
    """The cache's hit rate beside what decoding saves, over the log's time; None: there are fewer than two moments."""
    if sum(moment.num_steps > 0 for moment in moments) < 2:
        return None
    curves = [
        Curve("prompt tokens from the cache", "hits", _path(_over_time(moments, _hit_rate, 1.0)), []),
        Curve("KV reads saved", "reads", _path(_over_time(moments, _reads_saved, 1.0)), []),
        Curve("time saved", "read", _path(_over_time(moments, _time_saved, 1.0)), []),
    ]
    ticks = [Tick(100.0 - share, f"{share} %") for share in (0, 25, 50, 75, 100)]
    name = "Prompt tokens from the cache, KV reads saved and time saved over the time of the log"
    return Chart(name, "time of the log", curves, _time_ticks(moments), ticks)


def _hit_rate(moment: Moment) -> float | None:
    return moment.cached_tokens / moment.prompt_tokens if moment.prompt_tokens else None


def _reads_saved(moment: Moment) -> float | None:
    return max(0.0, figures.saved(moment.kv_bytes, moment.unique_kv_bytes)) if moment.num_steps else None


def _time_saved(moment: Moment) -> float | None:
    return max(0.0, figures.saved(moment.step_us, moment.shared_step_us)) if moment.num_steps else None


def concurrency_chart(analysis: Analysis) -> Chart | None:
    """The time per token against the requests at a time, one by one and shared; None: there are fewer than two."""
    loops = [replay for replay in figures.closed_loops(analysis) if replay.tpot_ms > 0]
    if len(loops) < 2:
        return None
    top = 1.08 * max(max(replay.tpot_ms, replay.shared_tpot_ms) for replay in loops)
    low, high = (math.log(loops[end].concurrency) for end in (0, -1))
    x = {replay.name: 4 + 92 * (math.log(replay.concurrency) - low) / max(high - low, 1e-9) for replay in loops}
    curves = []
    for name, shade, field in (("one by one", "unshared", "tpot_ms"), ("shared", "read", "shared_tpot_ms")):
        points = [(x[replay.name], 100 - 100 * float(getattr(replay, field)) / top) for replay in loops]
        dots = [
            Dot(*point, f"{replay.name}: {figures.milliseconds(getattr(replay, field))} {name}")
            for point, replay in zip(points, loops, strict=True)
        ]
        curves.append(Curve(name, shade, _path(points), dots))
    ticks = [Tick(100 - 100 * value / top, text) for value, text in _ticks(top, 5, lambda value: f"{value:g} ms")]
    marks = [Tick(x[replay.name], f"{replay.concurrency:,}") for replay in loops]
    return Chart("Time per token against the requests at a time", "requests at a time", curves, marks, ticks)


def shade(sequences: int, total: int) -> int:
    """The colour of a box: 0 for one sequence's own tokens, else from 1, the darkest for what all read."""
    if sequences <= 1:
        return 0
    return max(1, math.ceil(_SHADES * (math.log(sequences) / math.log(max(total, 2))) ** 2 - 1e-9))


def icicle(snapshot: Snapshot, token_bytes: int, end: int, prompt_of: Callable[[TrieNode], str]) -> Icicle | None:
    """The picture of a prefix tree; None: nothing decodes.

    A box is as long as its tokens, and as high as the KV bytes that its sequences read one by one.

    Args:
        snapshot: the tree.
        token_bytes: KV bytes of a token.
        end: tokens at the right edge.
        prompt_of: beginning of a node's text, or "".
    """
    nodes = snapshot.nodes
    total = sum(node.sequences for node in nodes if node.parent < 0)
    tops, heights = _stacked(nodes)
    if total == 0 or not any(heights):
        return None
    boxes: list[Box] = []
    labels: list[Label] = []
    leaves, counts = {True: "", False: ""}, dict[int, list[int]]()
    for node, top, height in zip(nodes, tops, heights, strict=True):
        if node.tokens <= 0 or node.sequences <= 0:
            continue
        pixels, colour = height * ICICLE_PIXELS / 100, shade(node.sequences, total)
        counts.setdefault(colour, []).append(node.sequences)
        x, width = 100 * node.start / end, 100 * node.tokens / end
        edged, words = pixels >= _EDGE_PIXELS, _words(node, token_bytes)
        box = Box(
            x=round(x, 3),
            y=round(top, 3),
            width=round(width, 3),
            height=round(height, 3),
            shade=colour,
            edged=edged,
            text=words.title,
        )
        if node.sequences > 1:
            boxes.append(box)
        else:
            leaves[edged] += f"M{x:.4g} {top:.5g}h{width:.4g}v{height:.4g}h{-width:.4g}z"
        if pixels >= _LABEL_PIXELS * len(words.lines):
            labels.append(Label(box, words.lines, prompt_of(node)))
        elif pixels >= _LABEL_PIXELS and node.sequences > 1:
            labels.append(Label(box, words.lines[:1], ""))
    ticks = [Tick(100 * token / end, f"{token:,.0f}") for token, _ in _ticks(end, 4, str)]
    legend = [(colour, _legend(colour, found)) for colour, found in sorted(counts.items(), reverse=True)]
    time = figures.moment(snapshot.time)
    return Icicle(
        time=time,
        sequences=total,
        boxes=boxes,
        leaves=leaves[True],
        thin_leaves=leaves[False],
        labels=labels,
        ticks=ticks,
        legend=legend,
    )


class _Words(NamedTuple):
    """The words for a node: its full description, and the lines of its label."""

    title: str
    lines: list[str]


def _words(node: TrieNode, token_bytes: int) -> _Words:
    once = node.tokens * token_bytes
    read, shared = figures.size(once * node.sequences), figures.size(once)
    tokens = figures.plural(node.tokens, "token")
    if node.sequences == 1:
        return _Words(f"{tokens} from {node.start:,} on, one request's own: {read}", [f"{tokens}, its own", read])
    title = f"{tokens} from {node.start:,} on, read by {node.sequences:,} requests: {read} one by one, {shared} shared"
    return _Words(title, [f"{tokens} × {node.sequences:,}", f"{shared}, not {read}"])


def _legend(colour: int, found: Sequence[int]) -> str:
    if colour == 0:
        return "one request's own"
    least, most = min(found), max(found)
    return f"read by {least:,}" + ("" if least == most else f" to {most:,}")


def _stacked(nodes: Sequence[TrieNode]) -> tuple[list[float], list[float]]:
    """Top and height of each node in percent. The height of a sequence is proportional to its number of tokens."""
    ending = [node.sequences for node in nodes]
    for node in nodes:
        if node.parent >= 0:
            ending[node.parent] -= node.sequences
    weights = [max(0, number) * (node.start + node.tokens) for number, node in zip(ending, nodes, strict=True)]
    for index in range(len(nodes) - 1, -1, -1):
        if nodes[index].parent >= 0:
            weights[nodes[index].parent] += weights[index]
    whole = max(1, sum(weight for weight, node in zip(weights, nodes, strict=True) if node.parent < 0))
    tops: list[float] = []
    next_top, root_top = [0.0] * len(nodes), 0.0
    for index, node in enumerate(nodes):
        height = 100 * weights[index] / whole
        top = root_top if node.parent < 0 else next_top[node.parent]
        tops.append(top)
        next_top[index] = top
        if node.parent < 0:
            root_top += height
        else:
            next_top[node.parent] += height
    return tops, [100 * weight / whole for weight in weights]
