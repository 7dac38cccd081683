"""Charts as drawings: bars in groups, and curves."""

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from benchmarks.page.pictures.drawing import NORMAL, WIDTH, Drawing, width_of

_BAR: Final = 24  # height of a bar
_MARGIN: Final = 10
_MARK: Final = 12  # side of a square that marks a value


class Curve(NamedTuple):
    """A curve: name, shade and a value for each place of the axis; None: no value there. marks: places and values that
    are marked with squares of its shade."""

    name: str
    shade: str
    values: Sequence[float | None]
    dashed: bool = False
    marks: Sequence[tuple[float, float]] = ()


class Axis(NamedTuple):
    """Places on the horizontal axis, the text at each, and what it shows."""

    places: Sequence[float]
    texts: Sequence[str]
    name: str


class Bar(NamedTuple):
    """A bar: its shade, its value and the text after it."""

    shade: str
    value: float
    text: str


def key(drawing: Drawing, y: float, names: Sequence[tuple[str, str]], dashed: Sequence[str] = ()) -> float:
    """A line of text for each name, with a sample of its shade; side by side where they fit. Returns where it ends.

    names: shade and name of each. dashed: names whose sample is a dashed line.
    """
    x = float(_MARGIN)
    for shade, name in names:
        needed = 30 + width_of(name, NORMAL) + 24
        if x > _MARGIN and x + needed > drawing.width:
            x, y = _MARGIN, y + 26
        if name in dashed:
            drawing.line([(x, y), (x + 22, y)], shade, width=3, dashed=True)
        else:
            drawing.rectangle(x, y - 8, 22, 16, shade)
        drawing.text(x + 30, y, name)
        x += needed
    return y + 26


def bars(
    title: str,
    names: Sequence[tuple[str, str]],
    groups: Sequence[tuple[str, Sequence[Bar]]],
    note: str,
    width: float = WIDTH,
) -> Drawing:
    """Horizontal bars from 0 on, in groups, under a title and a key. The text of a group stands above its bars.

    names: shade and name for the key, or none. groups: the text of each group, and its bars.
    """
    drawing = Drawing(width, 0, title)
    drawing.heading(_MARGIN, 22, title)
    y = key(drawing, 54, names) if names else 44.0
    most = max(bar.value for _, group in groups for bar in group)
    room = width - 2 * _MARGIN - max(width_of(bar.text, NORMAL) for _, group in groups for bar in group) - 8
    for text, group in groups:
        drawing.text(_MARGIN, y + 6, text)
        y += 20
        for bar in group:
            length = max(room * bar.value / most, 2)
            drawing.rectangle(_MARGIN, y, length, _BAR - 2, bar.shade)
            drawing.text(_MARGIN + length + 8, y + _BAR / 2 - 1, bar.text)
            y += _BAR
        y += 12
    drawing.height = drawing.note(_MARGIN, y + 12, width - 2 * _MARGIN, note) + 4
    return drawing


def curves(
    title: str,
    found: Sequence[Curve],
    axis: Axis,
    ticks: Sequence[float],
    note: str,
    height: float = 300,
    width: float = WIDTH,
) -> Drawing:
    """Curves over an axis with a logarithmic scale upwards, under a title and a key.

    ticks: values that are marked, of which the first is the lower end of the scale.
    """
    drawing = Drawing(width, 0, title)
    drawing.heading(_MARGIN, 22, title)
    top = key(drawing, 54, [(curve.shade, curve.name) for curve in found], [c.name for c in found if c.dashed])
    left, right = 60.0, width - 28.0
    bottom = top + height
    first, last = axis.places[0], axis.places[-1]
    most = max(value for curve in found for value in curve.values if value is not None)
    low, high = math.log(ticks[0]), math.log(max(most, ticks[-1]))

    def x_of(place: float) -> float:
        return round(left + (right - left) * (place - first) / (last - first), 1)

    def y_of(value: float) -> float:
        return round(bottom - height * (math.log(value) - low) / (high - low), 1)

    for tick in ticks:
        drawing.line([(left, y_of(tick)), (right, y_of(tick))], "rule", width=1)
        drawing.text(left - 8, y_of(tick), f"{tick:,g}", anchor="end", shade="soft")
    for place, text in zip(axis.places, axis.texts, strict=True):
        drawing.text(x_of(place), bottom + 20, text, anchor="middle", shade="soft")
    drawing.text((left + right) / 2, bottom + 44, axis.name, anchor="middle", shade="soft")
    for curve in found:
        pairs = zip(axis.places, curve.values, strict=True)
        points = [(x_of(place), y_of(value)) for place, value in pairs if value is not None]
        drawing.line(points, curve.shade, width=3, dashed=curve.dashed)
        for place, value in curve.marks:
            drawing.rectangle(x_of(place) - _MARK / 2, y_of(value) - _MARK / 2, _MARK, _MARK, curve.shade)
    drawing.height = drawing.note(_MARGIN, bottom + 78, width - 2 * _MARGIN, note) + 4
    return drawing
