"""What `trunkattn doctor` finds, and how that is shown: as tables, or as lines where nothing draws tables."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trunkattn.cli.doctor.kernels import KernelsInWords

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Way:
    """One way to use trunkattn.

    Attributes:
        name: the way.
        runs: whether it runs here.
        detail: how to use it, or why it does not run.
        get: how to install what is missing; None if nothing is, or if there is no command for it.
    """

    name: str
    runs: bool
    detail: str
    get: str | None = None

    @classmethod
    def works(cls, name: str, detail: str, get: str | None = None) -> "Way":
        """A way that runs here."""
        return cls(name, runs=True, detail=detail, get=get)

    @classmethod
    def fails(cls, name: str, detail: str, get: str | None = None) -> "Way":
        """A way that does not run here."""
        return cls(name, runs=False, detail=detail, get=get)


@dataclass(frozen=True)
class Report:
    """The result of `doctor`. `kernels`: on the first GPU; empty if none runs. `healthy`: the library and the engine
    work on this CPU."""

    machine: Mapping[str, str]
    packages: Mapping[str, str | None]
    ways: tuple[Way, ...]
    kernels: tuple[KernelsInWords, ...]
    healthy: bool


def print_report(report: Report, console: "Console") -> None:
    """Prints the machine, the packages and the ways as tables, then the verdict."""
    from rich.table import Table
    from rich.text import Text

    machine = Table("This machine", "", title_justify="left", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for key, value in report.machine.items():
        machine.add_row(key, Text(value))
    installed = [f"{name} {number}" for name, number in report.packages.items() if number is not None]
    absent = [name for name, number in report.packages.items() if number is None]
    machine.add_row("packages", ", ".join(installed))
    machine.add_row("not installed", ", ".join(absent) or "none")
    ways = Table("What runs here", "", "", "How to get it", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for way in report.ways:
        mark = "[green]yes[/]" if way.runs else "[red]no[/]"
        ways.add_row(way.name, mark, Text(way.detail), Text(way.get or ""))
    console.print(machine)
    console.print()
    console.print(ways)
    console.print()
    if report.kernels:
        kernels = Table(
            "Kernels on the first GPU", "Decoding", "Prompts", box=None, header_style="bold", padding=(0, 2, 0, 0)
        )
        alike: dict[tuple[str, str], list[str]] = {}
        for each in report.kernels:
            alike.setdefault((each.decodes, each.prompts), []).append(each.attention)
        for cells, names in alike.items():
            kernels.add_row("; ".join(names), *map(Text, cells))
        console.print(kernels)
        console.print()
    console.print(_verdict(report), style="bold green" if report.healthy else "bold red")


def plain_lines(report: Report) -> list[str]:
    """The report as lines of text: the machine, the packages, each way, and the verdict."""
    lines = [f"{key}: {value}" for key, value in report.machine.items()]
    lines += [f"{name}: {number or 'not installed'}" for name, number in report.packages.items()]
    for way in report.ways:
        how = f" ({way.get})" if way.get else ""
        lines.append(f"{way.name}: {'yes' if way.runs else 'no'}, {way.detail}{how}")
    lines += [f"{one.attention}: decoding {one.decodes}, prompts {one.prompts}" for one in report.kernels]
    return [*lines, _verdict(report)]


def _verdict(report: Report) -> str:
    return "The library and the engine work here." if report.healthy else "The library or the engine does not work."
