"""Pictures as SVG: shapes and text with coordinates, and one file that fits a light and a dark page.

Text stays text, so that it is sharp at any size and can be searched. The file has the colours of both themes: browsers
show those of the `color-scheme` of the element that the picture stands in. Pictures are 600 wide and their text is 15
or larger, so that they can be read on a phone too, where they are 360 pixels wide. Of those that are 400 wide three
stand beside each other on a page.

    drawing = Drawing(600, 100, "A trunk")
    drawing.box(10, 10, 200, 80, "trunk", "pages 7, 3", "read once")
    path.write_text(drawing.svg())
"""

from collections.abc import Iterable, Sequence
from html import escape
from types import MappingProxyType
from typing import Final, NamedTuple

WIDTH: Final = 600
THIRD: Final = 400  # width of a picture with two others beside it
SMALL, NORMAL, LARGE = 15, 16, 18  # sizes of text
LINE: Final = 1.3  # lines of text, in sizes


class Shade(NamedTuple):
    """A colour on a light page and on a dark one, and the shade of text that can be read on it."""

    light: str
    dark: str
    text: str = "ink"


SHADES: Final = MappingProxyType(
    {
        "card": Shade("#ffffff", "#1e2129"),
        "ink": Shade("#1f2d3a", "#e9eef4"),
        "soft": Shade("#51606e", "#aab6c3"),
        "rule": Shade("#c9d1d9", "#4a5362"),
        "pale": Shade("#e9eef3", "#343c4a"),
        "trunk": Shade("#0b4186", "#2f63ad", "white"),
        "left": Shade("#1c76ab", "#2580b6", "white"),
        "right": Shade("#26786d", "#2b8477", "white"),
        "own": Shade("#f2b266", "#e0a155", "black"),
        "other": Shade("#aeb8c2", "#78838f", "black"),
        "white": Shade("#ffffff", "#ffffff"),
        "black": Shade("#26190a", "#1c1206"),
    }
)
_FONT: Final = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
# Widths of characters, in sizes of the text, of a wide font: text that fits by them fits in others too.
_NARROW: Final = frozenset("ijlrtfI.,:;'|!()[]/ ")
_BROAD: Final = frozenset("mwMW@%—→×")
_BOLD: Final = 1.12  # times as wide


def width_of(text: str, size: float, bold: bool = False) -> float:
    """Width of a text in a wide sans-serif font, about."""
    return (_BOLD if bold else 1) * size * sum(0.36 if c in _NARROW else 0.92 if c in _BROAD else 0.62 for c in text)


def wrap(text: str, width: float, size: float) -> list[str]:
    """The lines of a text that is broken between words to fit a width."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if width_of(longer, size) > width and lines[-1]:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


class Drawing:
    """A picture in the making. x goes to the right and y down, both in units of a pixel at full size.

    Args:
        width, height: of the picture.
        title: what it shows, for readers who do not see it.
    """

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self._parts: list[str] = []
        self._used, self._heads = {"card"}, set[str]()  # shades, and those of arrows' heads

    def rectangle(self, x: float, y: float, width: float, height: float, shade: str, *, border: str = "card") -> None:
        """A filled rectangle with a border."""
        self._used |= {shade, border}
        place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        self._parts.append(f'<rect class="{shade} edge-{border}" {place} rx="3"/>')

    def box(
        self, x: float, y: float, width: float, height: float, shade: str, *lines: str, size: float = NORMAL,
        border: str = "card",
    ) -> None:  # fmt: skip
        """A rectangle with lines of text in its middle.

        Raises:
            ValueError: a line is wider than the rectangle.
        """
        self.rectangle(x, y, width, height, shade, border=border)
        top = y + height / 2 - LINE * size * (len(lines) - 1) / 2
        for number, line in enumerate(lines):
            if width_of(line, size) > width + 2:
                raise ValueError(f"{line!r} at size {size} does not fit {width:g}: widen the box or shorten the text")
            middle = (x + width / 2, top + LINE * size * number)
            self.text(*middle, line, size=size, anchor="middle", shade=SHADES[shade].text)

    def text(
        self, x: float, y: float, text: str, *, size: float = NORMAL, anchor: str = "start", shade: str = "ink",
        bold: bool = False,
    ) -> None:  # fmt: skip
        """One line of text whose middle is at height y.

        Raises:
            ValueError: it is not inside the picture.
        """
        width = width_of(text, size, bold)
        left = {"start": x, "middle": x - width / 2, "end": x - width}[anchor]
        if left < -4 or left + width > self.width + 4:
            raise ValueError(f"{text!r} reaches from {left:g} to {left + width:g}: expected inside 0 to {self.width:g}")
        self._used.add(shade)
        look = f'class="{shade}" font-size="{size:g}" text-anchor="{anchor}"' + (' font-weight="600"' if bold else "")
        self._parts.append(f'<text x="{x:g}" y="{y + 0.35 * size:g}" {look}>{escape(text)}</text>')

    def heading(self, x: float, y: float, text: str) -> None:
        """A line of bold text."""
        self.text(x, y, text, size=LARGE, bold=True)

    def note(self, x: float, y: float, width: float, text: str, *, shade: str = "soft", size: float = NORMAL) -> float:
        """Text in as many lines as it needs from height y on; returns the height where the next could stand."""
        for number, line in enumerate(wrap(text, width, size)):
            self.text(x, y + LINE * size * number, line, size=size, shade=shade)
        return y + LINE * size * (number + 1)

    def line(
        self, points: Sequence[tuple[float, float]], shade: str = "soft", *, width: float = 1.5, dashed: bool = False,
        arrow: bool = False,
    ) -> None:  # fmt: skip
        """A line through points, with an arrow's head at its end if asked for."""
        way = " ".join(f"{x:g},{y:g}" for x, y in points)
        look = f'stroke-width="{width:g}"' + (' stroke-dasharray="7 5"' if dashed else "")
        head = f' marker-end="url(#head-{shade})"' if arrow else ""
        self._used.add(shade)
        self._heads |= {shade} if arrow else set()
        self._parts.append(f'<polyline class="line-{shade}" points="{way}" {look}{head}/>')

    def arrow(self, start: tuple[float, float], end: tuple[float, float], shade: str = "soft") -> None:
        """A straight arrow."""
        self.line([start, end], shade, width=2, arrow=True)

    def svg(self) -> str:
        """The picture as the text of a file."""
        used = [name for name in SHADES if name in self._used]
        markers = "".join(_marker(name) for name in used if name in self._heads)
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}" '
                f'width="{self.width:g}" height="{self.height:g}" font-family="{_FONT}" role="img">',
                f"<title>{escape(self.title)}</title>",
                f"<style>\npolyline{{fill:none;stroke-linejoin:round}}\n{_rules(used, dark=False)}",
                f"@media (prefers-color-scheme: dark) {{\n{_rules(used, dark=True)}\n}}\n</style>",
                *([f"<defs>{markers}</defs>"] if markers else []),
                f'<rect class="card" width="{self.width:g}" height="{self.height:g}" rx="6"/>',
                *self._parts,
                "</svg>\n",
            ]
        )


def _rules(used: Iterable[str], dark: bool) -> str:
    """Style rules of the shades of one theme."""
    rules = []
    for name in used:
        colour = SHADES[name].dark if dark else SHADES[name].light
        rules.append(f".{name}{{fill:{colour}}}.edge-{name},.line-{name}{{stroke:{colour}}}")
    return "\n".join(rules)


def _marker(shade: str) -> str:
    """The head of an arrow."""
    return (
        f'<marker id="head-{shade}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="9" markerHeight="9" '
        f'markerUnits="userSpaceOnUse" orient="auto"><path class="{shade}" d="M0,0 L10,5 L0,10 z"/></marker>'
    )
