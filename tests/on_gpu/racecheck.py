"""compute-sanitizer's race checker over the tests named for it. Run by `make test-gpu`; ends with 1 if there is a race.

The checker (of CUDA 13.0) loses the order of a block some of whose warps met at a barrier of their own before: it
reports what one warp wrote ahead of a barrier of all warps and another read behind it, also in CUDA C++ with nothing
but `bar.sync 1, 256` between them. Triton hands the number and the arguments of a partition to its warps like this, by
accesses that belong to lines of the kernel on which nothing of ours is shared: its `def`, and where warp specialization
begins and ends. Such reports are counted and set aside if the checker makes them of `warp_specialized_kernel` too,
whose partitions share nothing but barriers.

It does not see what TMA writes: a producer that does not wait for the consumers is reported like one that waits. That
producers wait, `tests/gpu/test_compile.py` sees in the compiled code.
"""

import argparse
import ast
import re
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PYTEST = [sys.executable, "-m", "pytest", "-q", "-m", "gpu"]
OF_OTHERS = ["--kernel-name-exclude", "regex=^_Z|gemm|cutlass|cudnn|cublas"]  # PyTorch's kernels, which are in C++
CHECKER = ["compute-sanitizer", *OF_OTHERS, "--tool", "racecheck", "--racecheck-report", "hazard"]
CHECKER += ["--show-backtrace", "no"]
ALL = ["--print-limit", "100000000"]
CONTROL = "warp_specialized_kernel"
CONTROL_TEST = "tests/on_gpu/test_warp_specialization.py::test_partitions_alone_for_the_sanitizer"
MAIN_THREADS = 128  # of the warps that a kernel begins with; those of the other partitions come behind
ACCESS = r".*= +(\w+) Thread \((\d+),.* at (\w+)\S* .*in ([\w.]+):(\d+)\n"
HAZARD = re.compile(rf"(Potential \w+) hazard detected .*\n{ACCESS}{ACCESS}")
SUMMARY = re.compile(r"RACECHECK SUMMARY: .*\((\d+) errors?, (\d+) warnings?\)")


class Access(NamedTuple):
    """what: "Read" or "Write"."""

    what: str
    thread: int
    kernel: str
    file: str
    line: int


class Hazard(NamedTuple):
    """kind: such as "Potential RAW"."""

    kind: str
    first: Access
    second: Access

    @property
    def is_hand_over(self) -> bool:
        """Whether a partition's warp reads what Triton wrote for it."""
        write, read = self.first, self.second
        writes, reads = hand_over_lines(write.kernel, write.file)
        return (
            (self.kind, write.what, read.what) == ("Potential RAW", "Write", "Read")
            and (write.kernel, write.file) == (read.kernel, read.file)
            and write.thread < MAIN_THREADS <= read.thread
            and write.line in writes
            and read.line in reads
        )


@cache
def hand_over_lines(kernel: str, file: str) -> tuple[frozenset[int], frozenset[int]]:
    """Lines to which Triton's writes and reads belong; none if it is no warp-specialized kernel of ours. Files of one
    name lie in several folders; the kernel's name tells them apart."""
    for path in (*HERE.rglob(file), *(ROOT / "src/trunkattn").rglob(file)):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name == kernel and node.end_lineno:
                begins = [each.lineno for each in node.body if "warp_specialize(" in ast.unparse(each)]
                if begins:
                    reads = frozenset({node.lineno})
                    return reads | frozenset(range(begins[0], node.end_lineno + 1)), reads
    return frozenset(), frozenset()


def hazards_in(report: str) -> Counter[Hazard]:
    """All that the checker found, and how often.

    Raises:
        ValueError: if these are not as many as its summary counts, or there is none.
    """
    printed = Counter(match.groups() for match in HAZARD.finditer(report))
    found = Counter[Hazard]()
    for (kind, *accesses), count in printed.items():
        first, second = (
            Access(what, int(thread), kernel, file, int(line))
            for what, thread, kernel, file, line in (accesses[:5], accesses[5:])
        )
        found[Hazard(kind, first, second)] += count
    summary = SUMMARY.search(report)
    counted = sum(map(int, summary.groups())) if summary else None
    if counted != found.total():
        raise ValueError(f"the race checker counts {counted} hazards, {found.total()} were read from its report")
    return found


def verdict(hazards: Counter[Hazard]) -> tuple[list[str], bool]:
    """A line for each place, and whether all are Triton's hand-over."""
    control = any(hazard.first.kernel == CONTROL for hazard in hazards)
    places = Counter[tuple[Any, ...]]()
    for hazard, count in hazards.items():
        place = (hazard.kind, *hazard.first[2:], hazard.second[2:], control and hazard.is_hand_over)
        places[place] += count
    lines = []
    for (kind, kernel, file, line, (_, other_file, other_line), aside), count in sorted(places.items()):
        what = "Triton's hand-over to partitions" if aside else "a race"
        lines.append(f"{count} x {kind} in {kernel} ({file}:{line}, {other_file}:{other_line}): {what}")
    return lines, all(place[-1] for place in places)


def named(options: list[str]) -> list[str]:
    """The tests for it but the control. options: further ones of pytest, which collects them."""
    command = [*PYTEST, "--collect-only", "-k", "sanitizer", str(HERE), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if "::" in line and line != CONTROL_TEST]


def check(test: str, control: Counter[Hazard]) -> tuple[bool, Counter[Hazard]]:
    """Whether a test passed under the checker without a race, and what was found in it. Prints what pytest does, and
    the places of what was found; a report that cannot be read counts as a test that failed. control: what was found in
    the control, nothing for itself."""
    done = subprocess.run([*CHECKER, *ALL, *PYTEST, test], cwd=ROOT, capture_output=True, text=True, check=False)
    others = [line for line in done.stdout.splitlines() if "========= " not in line]  # pytest's
    hazards, clean = Counter[Hazard](), False
    try:
        hazards = hazards_in(done.stdout)
        lines, clean = verdict(hazards + control)
    except ValueError as reason:
        lines = [str(reason)]
    print(test, *others, done.stderr, *lines, sep="\n", flush=True)
    return done.returncode == 0 and clean, hazards


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description="further options are pytest's")
    parser.add_argument("-n", type=int, default=8, help="tests at once, each in a process of its own")
    arguments, options = parser.parse_known_args()
    passed, control = check(CONTROL_TEST, Counter())
    tests = named(options)
    with ThreadPoolExecutor(arguments.n) as pool:
        results = pool.map(lambda test: check(test, control)[0], tests)
        failed = [test for test, clean in zip(tests, results, strict=True) if not clean]
    print(*(f"failed: {test}" for test in failed), sep="\n")
    return int(not passed or bool(failed))


if __name__ == "__main__":
    sys.exit(main())
