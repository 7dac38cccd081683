"""What every section needs: results, tables, and where figures come from."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("torch", "triton", "vllm", "sglang", "transformers")  # whose versions are named
MOST_OF_NUMBERS: Final = 24  # characters of a table's cell that holds numbers, not a sentence
NOTICEABLE = 1.01  # a ratio of times from which the page calls a difference a loss


class Loss(NamedTuple):
    """One place where something else is faster.

    Attributes:
        where: the case.
        than: what is faster.
        ratio: our time over the time of that.
        note: what else the reader must know, such as a range.
    """

    where: str
    than: str
    ratio: float
    note: str = ""

    @property
    def by(self) -> str:
        """The ratio in words."""
        return f"{self.ratio:.2f}×{self.note and f' ({self.note})'}"


class Section(NamedTuple):
    text: str
    losses: list[Loss]


def load(name: str) -> dict[str, Any]:
    """A result file by its name."""
    return json.loads(read(RESULTS / f"{name}.json"))


def exists(name: str) -> bool:
    """Whether there is a result file of this name."""
    return (RESULTS / f"{name}.json").exists()


def held(pattern: str) -> list[str]:
    """Names of the results of a card that match a pattern, in order."""
    return sorted(path.stem for path in RESULTS.glob(f"{pattern}.json") if is_card(path.stem))


def read(path: Path) -> str:
    """The text of a file."""
    return path.read_text()


def table(head: Sequence[str], rows: Iterable[Sequence[object]], left: int = 1) -> str:
    """A Markdown table: the first `left` columns and those with sentences to the left, numbers to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    columns = zip(*cells, strict=True) if cells else ([] for _ in head)
    longest = (max(map(len, column), default=0) for column in columns)
    rule = "|".join("---" if at < left or length > MOST_OF_NUMBERS else "--:" for at, length in enumerate(longest))
    lines = [f"| {' | '.join(row)} |" for row in (head, *cells)]
    return "\n".join([lines[0], f"|{rule}|", *lines[1:]])


def sources(command: str, *names: str, part: str | None = None) -> str:
    """Where a table's figures come from, folded: file, date, device, versions, commit and the command that makes them.

    part: of the results, which may be older than what else they hold.
    """
    outside = [load(name)["source"] for name in names if "source" in load(name)]
    made = f"Made by {outside[0]}. The nearest command here is" if outside else "Made by"
    lines = [*(source(name, part) for name in names), f"{made} `{command}`"]
    return folded("Source", "\n".join(f"- {line}" for line in lines), kind="source")


def folded(summary: str, text: str, kind: str = "note") -> str:
    """Text that a click unfolds, on the site and where the repository is read. kind: its class for the site's style."""
    return f'<details class="{kind}" markdown="1"><summary>{summary}</summary>\n\n{text}\n\n</details>'


def source(name: str, part: str | None = None) -> str:
    result = load(name)
    if part:
        result = {**result, "rows": ()} | {key: result[part][key] for key in ("date", "commit") if key in result[part]}
    date = f"{result['date']} ({result['date_is']})" if "date_is" in result else result["date"]
    device = result.get("card") or (card_of(name) if is_card(name) else result["device"])
    versions = [f"{package} {result['versions'][package]}" for package in PACKAGES if package in result["versions"]]
    return f"`{name}.json`: {', '.join([date, device, *versions, commits_of(result)])}"


def commits_of(result: Mapping[str, Any]) -> str:
    """The commit of a result. Some keep a row until it is measured again: then how many rows are of which commit."""
    rows = result.get("rows", ())
    counts = Counter(row["commit"] for row in rows if "commit" in row) if isinstance(rows, list) else Counter()
    if len(counts) < 2:
        return f"commit {result['commit']}"
    return "rows by commit: " + and_(f"{count} of {commit}" for commit, count in counts.items())


def versions_of(package: str, names: Mapping[str, str]) -> str:
    """The versions of a package: one for all results, or each with what it is of. names: of results, by what they are
    of."""
    found: dict[str, list[str]] = {}
    for of, name in names.items():
        found.setdefault(load(name)["versions"][package], []).append(of)
    return next(iter(found)) if len(found) == 1 else and_(f"{version} ({and_(of)})" for version, of in found.items())


def and_(parts: Iterable[str]) -> str:
    """ "a, b and c"."""
    *before, last = parts
    return f"{', '.join(before)} and {last}" if before else last


def is_card(name: str) -> bool:
    return "h100" in name or "h200" in name


def card_of(name: str) -> str:
    return next(card.upper() for card in ("h100", "h200") if card in name)


def note_loss(losses: list[Loss], where: str, than: str, ratio: float) -> None:
    """Adds a loss if a ratio of times is one."""
    if ratio > NOTICEABLE:
        losses.append(Loss(where, than, ratio))


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def span(values: Iterable[float]) -> str:
    values = list(values)
    return f"{min(values):.2f} to {max(values):.2f}"
