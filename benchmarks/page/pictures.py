"""Writes the drawn pictures into docs/pictures.

    python -m benchmarks.page.pictures

tests/docs/test_pictures.py fails while one differs from what is drawn.
"""

from collections.abc import Mapping

from benchmarks.page.common import ROOT
from benchmarks.page.demo_forest import demo_forest
from benchmarks.page.method_pictures import METHOD

PICTURES = ROOT / "docs" / "pictures"


def drawn() -> Mapping[str, str]:
    """Text of every picture of the method, by its file's name."""
    return {f"method-{draw.__name__.replace('_', '-')}.svg": draw().svg() for draw in METHOD}


def main() -> None:
    pictures = {**drawn(), "demo-forest.svg": demo_forest().svg()}
    for name, text in pictures.items():
        path = PICTURES / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"docs/pictures/{name}")


if __name__ == "__main__":
    main()
