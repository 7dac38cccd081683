"""Writes the pictures that explain into docs/pictures; `benchmarks.page.performance_page` writes those of measurements.

    python -m benchmarks.page.pictures

tests/docs/test_pictures.py fails while one differs from what is drawn.
"""

from collections.abc import Callable, Mapping

from benchmarks.lib.options import no_options
from benchmarks.page.common import ROOT
from benchmarks.page.pictures.demo_forest import demo_forest
from benchmarks.page.pictures.drawing import Drawing
from benchmarks.page.pictures.method import METHOD

PICTURES = ROOT / "docs" / "pictures"
DRAWN: Mapping[str, Callable[[], Drawing]] = {
    "demo-forest.svg": demo_forest,
    **{f"method-{draw.__name__.replace('_', '-')}.svg": draw for draw in METHOD},
}


def main() -> None:
    for name, draw in DRAWN.items():
        path, text = PICTURES / name, draw().svg()
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"docs/pictures/{name}")


if __name__ == "__main__":
    no_options(__doc__)
    main()
