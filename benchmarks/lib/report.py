"""Where and with what a benchmark ran, and the JSON that keeps its figures."""

import json
import os
import platform
import re
import subprocess
from collections.abc import Callable
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"


def _commit() -> str:
    """Short hash of HEAD, with "+" if the source differs from it; BENCHMARK_COMMIT where the tree came without git."""
    if "BENCHMARK_COMMIT" in os.environ:
        return os.environ["BENCHMARK_COMMIT"]

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "src", "benchmarks")
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    return next(iter(names), platform.processor())


def _installed(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


def environment(*packages: str) -> dict[str, Any]:
    """Date, commit, device and versions."""
    import torch  # not above: processes of engines import this file, and start seconds sooner without

    return {
        "date": date.today().isoformat(),
        "commit": _commit(),
        "device": f"{_cpu_name()}, {torch.get_num_threads()} threads",
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "numba", "numpy", *packages) if _installed(name)},
    }


def read_result(name: str, path: Path | None = None) -> dict[str, Any]:
    """What results/NAME.json holds, or the path that is given; nothing if there is no such file, or an empty one."""
    path = path or RESULTS / f"{name}.json"
    found: dict[str, Any] = json.loads((path.read_text() if path.is_file() else "") or "{}")
    return found


def date_and_commit() -> dict[str, str]:
    """The fields that tell when a row of a result was measured, where its rows are of several runs."""
    return {key: value for key, value in environment().items() if key in ("date", "commit")}


def write_result(name: str, figures: dict[str, Any], *packages: str, path: Path | None = None) -> Path:
    """Writes the environment and the figures to results/NAME.json, or to the path that is given. A run that is ended
    meanwhile leaves the old file. A path such as /dev/stdout is written to where it leads."""
    path = (path or RESULTS / f"{name}.json").resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**environment(*packages), **figures}, indent=1) + "\n"
    if path.exists() and not path.is_file():  # a pipe or a device, whose place no file may take
        path.write_text(text)
        return path
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(text)
    return unfinished.replace(path)


def with_earlier(name: str, rows: list[dict[str, Any]], keys: tuple[str, ...]) -> list[dict[str, Any]]:
    """The rows of results/NAME.json, with these in place of those that have the same `keys`, or after them. Those that
    do not name their commit and their date get them."""
    now = date_and_commit()
    merged = {tuple(row[key] for key in keys): row for row in read_result(name).get("rows", ())}
    merged |= {tuple(row[key] for key in keys): row if "date" in row else row | now for row in rows}
    return list(merged.values())


def short_name(card: str) -> str:
    """What CUDA calls a card, as in the names of results: "h100" for "NVIDIA H100 80GB HBM3", "rtx-4090"."""
    model = card.removeprefix("NVIDIA ").removeprefix("GeForce ")
    return "-".join(re.sub(r"\s\d+GB.*", "", model).lower().split())


def time_ms(call: Callable[[], object], repeats: int = 50, warm_up: int = 5) -> dict[str, float]:
    """Median and least milliseconds of a call."""
    for _ in range(warm_up):
        call()
    times = []
    for _ in range(repeats):
        start = perf_counter()
        call()
        times.append((perf_counter() - start) * 1e3)
    return {"median_ms": round(median(times), 4), "min_ms": round(min(times), 4)}
