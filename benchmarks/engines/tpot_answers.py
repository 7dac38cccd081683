"""What the processes of back ends answer, kept as it comes: a result is written before the last one has ended."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.engines.pace import table
from benchmarks.engines.processes import collect, start
from benchmarks.workloads.decode_batches import Workload

Results = dict[str, dict[str, Any]]  # figures by back end and workload; "": facts of the run


@dataclass
class Answers:
    """What back ends have answered so far, and why some have not.

    Attributes:
        workloads: how many each one answers.
        keep: see `run_backends`.
        found: of those that have started, in their order.
        finished: those that have answered all.
        lost: those that ended before, and why.
    """

    workloads: int
    keep: Callable[[Results, Sequence[str]], object]
    found: Results = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)
    lost: dict[str, str] = field(default_factory=dict)

    def receive(self, name: str, answer: tuple[str, dict[str, Any]] | None) -> None:
        """Receives what a process answers: first ("card", its name), then (workload, figures) each, then ("",
        facts of the run); None when the process has ended."""
        if answer is None:
            self._end(name)
            return
        subject, figures = answer
        self.found[name]["" if subject == "card" else subject] = figures
        if subject == "":
            self.finished.add(name)
            self._keep()
        elif subject != "card":
            shown = "".join(f", {key} {value}" for key, value in figures.items() if key.startswith("busy"))
            print(f"{name} {subject}: {figures['tpot_ms']} ms, each {figures['tpot_ms_each']}{shown}", flush=True)
            if all(subject in other for other in self._left().values()):
                self._keep()

    def _end(self, name: str) -> None:
        if name in self.finished:
            return
        answered = len(self.found[name].keys() - {""})
        self.lost[name] = f"{name}: the process ended after {answered} of {self.workloads} workloads"
        print(self.lost[name], flush=True)
        # What the others have is kept with their next answer: where all are lost together, what all had stays kept.
        if self._left().keys() <= self.finished:
            self._keep()

    def _left(self) -> Results:
        """Answers of those that are not lost; the first is what the others are compared with."""
        return {name: found for name, found in self.found.items() if name not in self.lost}

    def _keep(self) -> None:
        left = self._left()
        results = {name: found for name, found in left.items() if found.keys() - {""}}
        if results and next(iter(results)) == next(iter(left)):
            self.keep(results, list(self.lost))


def run_backends(
    target: Callable[..., None],
    runs: Mapping[str, tuple[Any, ...]],
    workloads: int,
    together: bool,
    keep: Callable[[Results, Sequence[str]], object],
) -> Results:
    """Figures of all back ends.

    Args:
        target: the function of a process, which gets arguments and a connection for its answers.
        runs: the arguments of each back end's, by name.
        workloads: how many each one answers.
        together: all start at once, and one that is lost does not end the others; else one after the other.
        keep: called after each workload that all that have started have answered, and when one has finished: with the
            figures of those that have any, and the names of the lost, for which nobody waits.

    Raises:
        RuntimeError: if a process ended before it had answered. The others' figures have been kept.
    """
    answers = Answers(workloads, keep)
    for group in [list(runs)] if together else [[name] for name in runs]:
        answers.found |= {name: {} for name in group}
        collect([start(name, target, *runs[name]) for name in group], answers.receive)
        if answers.lost:
            raise RuntimeError("; ".join(answers.lost.values()))
    return answers.found


def outcome(results: Results, workloads: Sequence[Workload], turns: bool, lost: Sequence[str]) -> dict[str, Any]:
    """What a result says of its runs, and which workloads it lacks. lost: back ends that ended before they had
    answered."""
    rows = table(results, workloads)
    found: dict[str, Any] = {"turns": turns, "rows": rows}
    found |= {"runs": {name: figures[""] for name, figures in results.items()}}
    unfinished = [name for name in map(str, workloads) if name not in {row["workload"] for row in rows}]
    return found | ({"unfinished": unfinished} if unfinished else {}) | ({"lost": list(lost)} if lost else {})
