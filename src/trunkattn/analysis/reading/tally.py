"""Lines of a log that were seen, and those that were left out."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from trunkattn.analysis.figures import plural
from trunkattn.analysis.formats.base import Entry, Line, Repeated, Told
from trunkattn.analysis.records import SkippedLine

SKIPPED_KEPT: Final = 20


@dataclass
class Tally:
    """Lines that were seen and lines that were left out.

    With `strict`, reading ends at the first line with a fault. That line is reported only after all requests before it
    have been checked, because some of them still wait in a batch and may have a fault, too.
    """

    source: str
    unit: str
    strict: bool
    fault: SkippedLine | None = None
    num_lines: int = 0
    num_skipped: int = 0
    skipped: list[SkippedLine] = field(default_factory=list)
    repeated: list[Repeated] = field(default_factory=list)

    def skip(self, line: SkippedLine) -> None:
        """Counts a line that is left out."""
        self.find(line)
        self.num_skipped += 1
        if len(self.skipped) < SKIPPED_KEPT:
            self.skipped.append(line)

    def find(self, line: SkippedLine) -> None:
        """Notes a fault if reading is strict and no earlier line has one."""
        if self.strict and (self.fault is None or line.line < self.fault.line):
            self.fault = line

    def stop_at_fault(self) -> None:
        """Raises ValueError that names the first line with a fault and how many stand before it, if there is one."""
        if self.fault is not None:
            right = f"strict ends the reading here, after {plural(self.fault.line - 1, self.unit)} without a fault"
            raise ValueError(f"{self.source}, {self.unit} {self.fault.line}: {self.fault.reason}; {right}")

    def lines(self, lines: Iterable[Line | SkippedLine]) -> Iterator[Line]:
        """The lines that hold an object."""
        for line in lines:
            self.count(line)
            if self.fault is not None:
                return
            if isinstance(line, Line):
                yield line

    def count(self, line: Line | SkippedLine) -> None:
        """Counts a line."""
        self.num_lines += 1
        if isinstance(line, SkippedLine):
            self.skip(line)

    def entries(self, entries: Iterable[Told]) -> Iterator[Entry]:
        """The entries of lines without a fault. Iteration ends at a fault, so a format's final remarks about repeated
        calls, which need all lines, are not read then."""
        for entry in entries:
            if self.fault is not None:
                return
            if isinstance(entry, Entry):
                yield entry
            elif isinstance(entry, Repeated):
                self.repeated.append(entry)
            else:
                self.skip(entry)

    def nothing_taken(self) -> str:
        """Why there is no log, in a sentence."""
        if not self.num_lines:
            return f"{self.source}: it is empty; expected a log with a request on each line"
        units = plural(self.num_lines, self.unit)
        if not self.skipped:
            return f"{self.source}: none of its {units} holds a request"
        worst = self.skipped[0]
        count = f"none of its {units} could be taken" if self.num_lines > 1 else "nothing taken"
        return f"{self.source}: {count}; {self.unit} {worst.line}: {worst.reason}"
