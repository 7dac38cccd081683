"""compute-sanitizer's checkers of memory and of races over the tests named for it, each in a process of its own. Run by
`make test-gpu`; ends with 1 if a test fails or a checker finds anything.

The race checker (of CUDA 13.0) orders accesses of shared memory by how many barriers each warp has met. Warps that met
at a barrier of their own count more than others, and `bar.arrive` and one thread's arrival at an mbarrier give that
count to nobody. So it reports a value that partitions hand over rightly if the partition that wrote it had met at more
barriers than the one that read it, and misses a race if it had met at fewer. Both were seen in CUDA C++, and in the
latent kernel reports change sides with further barriers in the reading partition (docs/lab/2026-11-27-race-checker.md).
Reports of three kinds are counted and set aside, each only if the checker makes them of a control, too, a kernel that
has no race: one of test_warp_specialization.py for the first, of race_controls.cu for the others.

- Triton hands the number and the arguments of a partition to its warps by accesses that belong to lines on which
  nothing of ours is shared: the `def` of the kernel, and where warp specialization begins and ends. The write can also
  belong to the last `mbarrier.init` ahead of it, in another file too: ptxas gives it the line of what it follows.
- A partition hands a value to another by shared memory and a named barrier, and the source shows it: the barrier that
  comes behind the write is the one ahead of the read.
- Another one does so by an mbarrier.

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
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PYTEST = [sys.executable, "-m", "pytest", "-q", "-m", "gpu"]
OF_OTHERS = ["--kernel-name-exclude", "regex=^_Z|gemm|cutlass|cudnn|cublas"]  # PyTorch's kernels, which are in C++
CHECKER = ["compute-sanitizer", *OF_OTHERS, "--show-backtrace", "no", "--tool"]
RACECHECK = ["racecheck", "--racecheck-report", "hazard", "--print-limit", "100000000"]
MEMCHECK = ["memcheck", "--error-exitcode", "1"]
CONTROL_TEST = "tests/on_gpu/test_warp_specialization.py::test_partitions_alone_for_the_sanitizer"
CUDA_CONTROLS = HERE / "race_controls.cu"
HAND_OVER, NAMED, MBARRIER = "Triton's hand-over to partitions", "ordered by a named barrier", "ordered by an mbarrier"
CONTROLS = {"warp_specialized_kernel": HAND_OVER, "named_barrier_kernel": NAMED, "mbarrier_kernel": MBARRIER}
BARRIERS = {"barrier_sync": NAMED, "barrier_arrive": NAMED}
BARRIERS |= {f"mbarrier.{name}": MBARRIER for name in ("arrive", "expect", "wait")}
MBARRIER_INIT = "mbarrier.init"
MAIN_THREADS = 128  # of the warps that a kernel begins with; those of the other partitions come behind
ACCESS = r".*= +(\w+) Thread \((\d+),.* at (\w+)\S* .*in (?:\S*/)?([\w.]+):(\d+)\n"
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
    def order(self) -> str | None:
        """What orders the two accesses, as far as the source tells; None if it is a race."""
        write, read = self.first, self.second
        if (self.kind, write.what, read.what) != ("Potential RAW", "Write", "Read") or write.kernel != read.kernel:
            return None
        if write.file == read.file == CUDA_CONTROLS.name:
            return CONTROLS.get(write.kernel)
        writes, reads = hand_over_lines(read.kernel, read.file)
        across = write.thread < MAIN_THREADS <= read.thread
        begins = (write.file == read.file and write.line in writes) or initializes_a_barrier(write.file, write.line)
        if across and begins and read.line in reads:
            return HAND_OVER
        behind = barriers_around(write.kernel, write.file, write.line)[1]
        ahead = barriers_around(read.kernel, read.file, read.line)[0]
        return behind.kind if behind is not None and behind == ahead else None


class Barrier(NamedTuple):
    """kind: NAMED or MBARRIER; name: as its calls have it."""

    kind: str
    name: str


@cache
def sources(file: str) -> tuple[ast.Module, ...]:
    """Files of ours of a name; several folders may have one."""
    return tuple(ast.parse(path.read_text()) for path in (*HERE.rglob(file), *(ROOT / "src/trunkattn").rglob(file)))


@cache
def barriers_around(kernel: str, file: str, line: int) -> tuple[Barrier | None, Barrier | None]:
    """The last barrier ahead of a line, and the first one behind it, in the function that has the line; None where
    there is none, or several files of that name have a function there.

    kernel: tells files apart where it is in one of them.
    """
    trees = sources(file)
    own = tuple(tree for tree in trees if any(getattr(node, "name", None) == kernel for node in tree.body))
    around = [
        node
        for tree in own or trees
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    if len(around) != 1:
        return None, None
    calls = sorted((node for node in ast.walk(around[0]) if isinstance(node, ast.Call)), key=lambda node: node.lineno)
    found = [
        (node.lineno, Barrier(BARRIERS[name], ast.unparse(node.args[0])))
        for node in calls
        if (name := ast.unparse(node.func)) in BARRIERS
    ]
    ahead = [barrier for at, barrier in found if at < line]
    behind = [barrier for at, barrier in found if at > line]
    return ahead[-1] if ahead else None, behind[0] if behind else None


@cache
def hand_over_lines(kernel: str, file: str) -> tuple[frozenset[int], frozenset[int]]:
    """Lines to which Triton's writes and reads belong; none if it is no warp-specialized kernel of ours. Files of one
    name lie in several folders; the kernel's name tells them apart."""
    for tree in sources(file):
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name == kernel and node.end_lineno:
                begins = [each.lineno for each in node.body if "warp_specialize(" in ast.unparse(each)]
                if begins:
                    reads = frozenset({node.lineno})
                    return reads | frozenset(range(begins[0], node.end_lineno + 1)), reads
    return frozenset(), frozenset()


@cache
def initializes_a_barrier(file: str, line: int) -> bool:
    """Whether every file of ours of that name calls `mbarrier.init` in this line."""
    inits = [
        {
            node.lineno
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == MBARRIER_INIT
        }
        for tree in sources(file)
    ]
    return bool(inits) and all(line in lines for lines in inits)


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
    """A line for each place, and whether no place is a race. hazards: those of the controls among them."""
    wrong = {hazard.order for hazard in hazards if CONTROLS.get(hazard.first.kernel, "") == hazard.order}
    places = Counter[tuple[Any, ...]]()
    for hazard, count in hazards.items():
        order = hazard.order if hazard.order in wrong else "a race"
        place = (hazard.kind, *hazard.first[2:], hazard.second[2:], order)
        places[place] += count
    lines = []
    for (kind, kernel, file, line, (_, other_file, other_line), what), count in sorted(places.items()):
        lines.append(f"{count} x {kind} in {kernel} ({file}:{line}, {other_file}:{other_line}): {what}")
    return lines, not any(place[-1] == "a race" for place in places)


def named(options: list[str]) -> list[str]:
    """The tests for it but the controls. options: further ones of pytest, which collects them."""
    command = [*PYTEST, "--collect-only", "-k", "sanitizer", str(HERE), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if "::" in line and line != CONTROL_TEST]


def run(checker: list[str], test: str) -> tuple[bool, str, str]:
    """Whether a test passed under a checker, what both printed, and of this what is not the checker's."""
    done = subprocess.run([*CHECKER, *checker, *PYTEST, test], cwd=ROOT, capture_output=True, text=True, check=False)
    others = [line for line in done.stdout.splitlines() if "========= " not in line]
    return done.returncode == 0, done.stdout, "\n".join([*others, done.stderr])


def check_races(test: str, control: Counter[Hazard]) -> tuple[bool, Counter[Hazard]]:
    """Whether a test passed without a race, and what was found in it. Prints what pytest does, and the places of what
    was found; a report that cannot be read counts as a test that failed. control: what was found in the controls,
    nothing for themselves."""
    passed, report, others = run(RACECHECK, test)
    hazards, clean = Counter[Hazard](), False
    try:
        hazards = hazards_in(report)
        lines, clean = verdict(hazards + control)
    except ValueError as reason:
        lines = [str(reason)]
    print(test, others, *lines, sep="\n", flush=True)
    return passed and clean, hazards


def cuda_controls() -> Counter[Hazard]:
    """What is found in the controls in CUDA C++, of which nothing may be wrong."""
    with TemporaryDirectory() as folder:
        program = str(Path(folder) / "controls")
        subprocess.run(["nvcc", "-arch=sm_90", "-lineinfo", "-o", program, str(CUDA_CONTROLS)], check=True)
        done = subprocess.run([*CHECKER, *RACECHECK, program], capture_output=True, text=True, check=False)
    found = hazards_in(done.stdout)
    lines, clean = verdict(found)
    print(CUDA_CONTROLS.name, *lines, sep="\n", flush=True)
    if ", 0 wrong" not in done.stdout or not clean:
        raise ValueError(f"the controls went wrong: {done.stdout[-1000:]}{done.stderr[-1000:]}")
    return found


def check_memory(test: str) -> bool:
    """Whether a test passed without an access outside of what is allocated. Prints what it and the checker print."""
    passed, report, others = run(MEMCHECK, test)
    print(test, others if passed else report + others, sep="\n", flush=True)
    return passed


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description="further options are pytest's")
    parser.add_argument("tool", choices=("memcheck", "racecheck"), help="what to look for")
    parser.add_argument("-n", type=int, default=8, help="tests at once")
    arguments, options = parser.parse_known_args()
    passed, check = True, check_memory
    if arguments.tool == "racecheck":
        passed, control = check_races(CONTROL_TEST, Counter())
        control += cuda_controls()

        def check(test: str) -> bool:
            return check_races(test, control)[0]

    tests = named(options)
    with ThreadPoolExecutor(arguments.n) as pool:
        failed = [test for test, clean in zip(tests, pool.map(check, tests), strict=True) if not clean]
    print(*(f"failed: {test}" for test in failed), sep="\n")
    return int(not passed or bool(failed))


if __name__ == "__main__":
    sys.exit(main())
