"""compute-sanitizer's race checker over the tests named for it. Run by `make test-gpu`; ends with 1 if there is a race.

The checker (of CUDA 13.0) does not follow a block whose warps meet at different barriers: it reports what one warp
wrote before a barrier of all warps and another read behind it, also in a CUDA C++ kernel with `bar.sync 1, 256` between
them. Triton hands roles to warps in this way: their numbers and arguments, by reads that belong to the line of the
kernel's `def`, where nothing else is. Such reports are counted and set aside, if the checker makes them of
`roles_kernel` too, in whose roles nothing is shared but barriers.
"""

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
CONTROL = "roles_kernel"  # of test_roles.py
HAZARD = re.compile(
    r"(?P<kind>Potential \w+) hazard detected .*\n"
    r"=+ +\w+ Thread .* at (?P<kernel>\w+).* in (?P<file>[\w.]+):(?P<line>\d+)\n"
    r"=+ +(?P<access>\w+) Thread .* at (?P<other_kernel>\w+).* in (?P<other_file>[\w.]+):(?P<other_line>\d+)\n"
)
SUMMARY = re.compile(r"RACECHECK SUMMARY: .*\((\d+) errors?, (\d+) warnings?\)")


class Hazard(NamedTuple):
    """kind, such as "Potential RAW". place, read: file and line of both accesses; access: what the second is."""

    kind: str
    kernel: str
    place: tuple[str, int]
    access: str
    read: tuple[str, int]

    @property
    def is_hand_over(self) -> bool:
        """Whether it is a read of what Triton hands to a role, written by the kernel itself."""
        lines = lines_with_roles(self.kernel, self.place[0])
        return (
            (self.kind, self.access) == ("Potential RAW", "Read")
            and self.read == (self.place[0], lines.start)
            and self.place[1] in lines
        )


def lines_with_roles(function: str, file: str) -> range:
    """From the line of its `def` to its last; none if it is not one of ours that gives roles to warps."""
    for path in (HERE / file, HERE.parents[1] / "src/trunkattn/kernels" / file):
        for node in ast.walk(ast.parse(path.read_text())) if path.exists() else ():
            if isinstance(node, ast.FunctionDef) and node.name == function and "warp_specialize" in ast.unparse(node):
                return range(node.lineno, (node.end_lineno or node.lineno) + 1)
    return range(0)


def hazards_in(report: str) -> list[Hazard]:
    """All that the checker found.

    Raises:
        ValueError: if these are not as many as its summary counts, or there is none.
    """
    found = [
        Hazard(
            each["kind"], each["kernel"], (each["file"], int(each["line"])), each["access"],
            (each["other_file"], int(each["other_line"])),
        )
        for each in HAZARD.finditer(report)
    ]  # fmt: skip
    summary = SUMMARY.search(report)
    counted = sum(map(int, summary.groups())) if summary else None
    if counted != len(found):
        raise ValueError(f"the race checker counts {counted} hazards, {len(found)} were read from its report")
    return found


def verdict(hazards: list[Hazard]) -> tuple[list[str], bool]:
    """A line for each place, and whether all are Triton's hand-over."""
    control = any(hazard.kernel == CONTROL for hazard in hazards)
    lines, clean = [], True
    for hazard, count in sorted(Counter(hazards).items()):
        aside = control and hazard.is_hand_over
        clean &= aside
        where = ", ".join(f"{file}:{line}" for file, line in (hazard.place, hazard.read))
        what = "Triton's hand-over of roles" if aside else "a race"
        lines.append(f"{count} x {hazard.kind} in {hazard.kernel} ({where}): {what}")
    return lines, clean


def main() -> int:
    """The exit status."""
    checker = "compute-sanitizer --tool racecheck --racecheck-report hazard --show-backtrace no --print-limit 1000000"
    tests = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-k", "sanitizer", str(HERE), *sys.argv[1:]]
    done = subprocess.run([*checker.split(), *tests], capture_output=True, text=True, check=False)
    others = [line for line in done.stdout.splitlines() if not line.startswith("=========")]
    print("\n".join(others), done.stderr, sep="\n")
    lines, clean = verdict(hazards_in(done.stdout))
    print("\n".join(lines) or "no hazard")
    return int(done.returncode != 0 or not clean)


if __name__ == "__main__":
    sys.exit(main())
