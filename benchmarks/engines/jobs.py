"""A case with a back end in a process of its own, which may fail; several side by side."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple


class Job(NamedTuple):
    """One case with one back end, in a process of its own.

    Attributes:
        case, backend: names.
        arguments: further ones of the script.
        environment: variables that the process gets beside ours.
    """

    case: str
    backend: str
    arguments: Sequence[str]
    environment: Mapping[str, str]


def run_jobs(
    program: Sequence[str], jobs: Sequence[Job], folder: Path, at_once: int, limit: float | None = None
) -> dict[str, dict[str, Any]]:
    """What each job answers, by case and back end; for one that fails, why.

    Args:
        program: what Python runs: it gets `--work CASE BACKEND FILE` and writes its answer to the file, as JSON.
        jobs: in the order in which they start.
        folder: for answers and logs.
        at_once: as many jobs run side by side.
        limit: seconds after which a job is ended.
    """

    def run(job: Job) -> dict[str, Any]:
        answer = folder / f"{job.case}-{job.backend}.json"
        log = answer.with_suffix(".log")
        command = [sys.executable, *program, "--work", job.case, job.backend, str(answer), *job.arguments]
        environment = {**os.environ, **job.environment}
        try:
            with log.open("w") as lines:
                done = subprocess.run(command, stdout=lines, stderr=lines, env=environment, timeout=limit)
        except subprocess.TimeoutExpired:
            return {"failed": [f"no answer after {limit:.0f} s"]}
        if answer.exists():
            return json.loads(answer.read_text())
        said = log.read_text().splitlines()
        errors = [line for line in said if "Error" in line or "error" in line]
        return {"failed": errors[-3:] or [f"ended with status {done.returncode} after: {''.join(said[-1:])}"]}

    with ThreadPoolExecutor(at_once) as pool:
        answers = list(pool.map(run, jobs))
    found: dict[str, dict[str, Any]] = {}
    for job, answer in zip(jobs, answers, strict=True):
        found.setdefault(job.case, {})[job.backend] = answer
    return found
