"""The chart of what the analysis predicts, over what was measured."""

import math
from typing import Final

from benchmarks.page.common import load
from benchmarks.page.pictures.chart import key
from benchmarks.page.pictures.drawing import WIDTH, Drawing

_TICKS: Final = (4, 6, 8, 12, 16, 24)  # ms
_LOW, _HIGH = 3.2, 26.0
_LEFT, _RIGHT, _HEIGHT = 60.0, WIDTH - 28.0, 380.0
_MARK: Final = 9.0  # side of a square
_OFF: Final = 0.15  # that the dashed lines show


def predictions() -> Drawing:
    """Predicted time per token over the measured one, of all batches and arrivals."""
    result = load("analysis-predictions")
    drawing = Drawing(WIDTH, 0, "Predicted time per token over measured, ms")
    drawing.heading(10, 22, drawing.title)
    names = (("other", "one by one"), ("trunk", "shared"), ("own", "requests that arrive, both ways"))
    top = key(drawing, 54, names) + 4
    bottom = top + _HEIGHT
    scale = math.log(_HIGH / _LOW)

    def x_of(value: float) -> float:
        return round(_LEFT + (_RIGHT - _LEFT) * math.log(value / _LOW) / scale, 1)

    def y_of(value: float) -> float:
        return round(bottom - _HEIGHT * math.log(value / _LOW) / scale, 1)

    for tick in _TICKS:
        drawing.line([(_LEFT, y_of(tick)), (_RIGHT, y_of(tick))], "rule", width=1)
        drawing.text(_LEFT - 8, y_of(tick), f"{tick}", anchor="end", shade="soft")
        drawing.text(x_of(tick), bottom + 20, f"{tick}", anchor="middle", shade="soft")
    drawing.text((_LEFT + _RIGHT) / 2, bottom + 44, "measured, ms", anchor="middle", shade="soft")
    for factor in (1.0, 1 + _OFF, 1 / (1 + _OFF)):
        low, high = max(_LOW, _LOW / factor), min(_HIGH, _HIGH / factor)
        ends = [(x_of(value), y_of(value * factor)) for value in (low, high)]
        drawing.line(ends, "soft", width=1.5, dashed=factor != 1.0)
    for part, shades in (("batches", ("other", "trunk")), ("serving", ("own", "own"))):
        for row in result[part]:
            for shade, measured, predicted in zip(shades, row["measured_ms"], row["predicted_ms"], strict=True):
                place = x_of(measured) - _MARK / 2, y_of(predicted) - _MARK / 2
                drawing.rectangle(*place, _MARK, _MARK, shade)
    note = f"vLLM and SGLang on H100 and H200. Dashed: {100 * _OFF:.0f} % off."
    drawing.height = drawing.note(10, bottom + 78, WIDTH - 20, note) + 4
    return drawing
