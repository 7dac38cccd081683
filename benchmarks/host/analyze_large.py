"""Time and memory of `trunkattn analyze` on a large log, with the settings that it has by default.

    python -m benchmarks.host.analyze_large                        # 100,000 requests: results/analyze-large.json
    python -m benchmarks.host.analyze_large --requests 3000 --result /tmp/small.json

Two logs of one workload, written to a temporary folder: `hashes`, a Mooncake trace, and `text`, the prompts' messages.
Requests arrive by a Poisson process. Prompts have 4,096 tokens on average, which begin with an instruction that all
share and one of an application, of which a few have most requests. `seconds` are those of the whole command, `cpu_s` is
what all of its processes compute, which other load changes less, and `peak_gb` is the most memory that they have at
once, where what they share counts once.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from tempfile import TemporaryDirectory
from time import perf_counter, sleep
from typing import Any, Final, NamedTuple

import numpy as np

from benchmarks.lib.options import integer
from benchmarks.lib.report import write_result
from trunkattn.analysis.formats.mooncake import BLOCK_SIZE

RATE: Final = 4.0  # requests per second
APPLICATIONS: Final = 64
SHARED_BLOCKS, APPLICATION_BLOCKS = 2, 2
PROMPT_TOKENS: Final = (3584, 4609)  # least, and the first that is too many
ANSWER_TOKENS: Final = (32, 289)
BYTES_PER_TOKEN: Final = 4
EVERY_S: Final = 1.0
SEED: Final = 0


class Row(NamedTuple):
    """A request of the workload. at_ms: its time; application: whose instruction it has."""

    at_ms: int
    application: int
    prompt_tokens: int
    answer_tokens: int


def rows(count: int) -> Iterator[Row]:
    """The workload's first requests."""
    rng = np.random.default_rng(SEED)
    times = np.cumsum(rng.exponential(1e3 / RATE, count)).astype(int)
    weights = 1.0 / np.arange(1, APPLICATIONS + 1)
    applications = rng.choice(APPLICATIONS, count, p=weights / weights.sum())
    prompts, answers = rng.integers(*PROMPT_TOKENS, count), rng.integers(*ANSWER_TOKENS, count)
    for fields in zip(times.tolist(), applications.tolist(), prompts.tolist(), answers.tolist(), strict=True):
        yield Row(*fields)


def hash_line(number: int, row: Row) -> dict[str, Any]:
    """A line of a Mooncake trace. Its hashes number blocks together with all that precedes them."""
    begin = [*range(SHARED_BLOCKS)]
    begin += [SHARED_BLOCKS + row.application * APPLICATION_BLOCKS + place for place in range(APPLICATION_BLOCKS)]
    private = -(-row.prompt_tokens // BLOCK_SIZE) - len(begin)
    first = (number + 1) << 16
    return {
        "timestamp": row.at_ms,
        "input_length": row.prompt_tokens,
        "output_length": row.answer_tokens,
        "hash_ids": [*begin, *range(first, first + private)],
    }


class Words:
    """Texts of random words, the same for the same number."""

    def __init__(self) -> None:
        rng = np.random.default_rng(SEED)
        letters = rng.integers(ord("a"), ord("z") + 1, (1 << 14, 5)).astype(np.uint8)
        self._words = np.array([bytes(word).decode() for word in letters])

    def text(self, number: int, num_tokens: int) -> str:
        """A text of about `num_tokens` tokens."""
        drawn = np.random.default_rng(number).integers(0, len(self._words), num_tokens)
        return " ".join(self._words[drawn].tolist())[: num_tokens * BYTES_PER_TOKEN]


def text_line(number: int, row: Row, words: Words) -> dict[str, Any]:
    """A line of messages. The application's instruction begins with the one that all share."""
    shared, own = SHARED_BLOCKS * BLOCK_SIZE, APPLICATION_BLOCKS * BLOCK_SIZE
    instruction = words.text(0, shared) + words.text(1 + row.application, own)
    question = words.text(1 + APPLICATIONS + number, row.prompt_tokens - shared - own)
    return {
        "timestamp": row.at_ms / 1e3,
        "messages": [{"role": "system", "content": instruction}, {"role": "user", "content": question}],
        "output_tokens": row.answer_tokens,
    }


def write_log(path: Path, kind: str, count: int) -> None:
    """Writes a log of `count` requests."""
    words = Words()
    with path.open("w") as file:
        for number, row in enumerate(rows(count)):
            line = hash_line(number, row) if kind == "hashes" else text_line(number, row, words)
            file.write(json.dumps(line) + "\n")


def children_cpu_s() -> float:
    """What processes that have ended computed, those that they started with them."""
    used = getrusage(RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measured(arguments: list[str]) -> dict[str, Any]:
    """Time and memory of a command and the processes that it starts.

    Raises:
        RuntimeError: it fails.
    """
    import psutil

    start, cpu_s, peak = perf_counter(), children_cpu_s(), 0
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    whole = psutil.Process(process.pid)
    while process.poll() is None:
        held = 0
        with suppress(psutil.Error):  # one has ended meanwhile
            for each in (whole, *whole.children(recursive=True)):
                held += each.memory_full_info().pss
        peak = max(peak, held)
        sleep(EVERY_S)
    assert process.stderr is not None
    if process.returncode:
        raise RuntimeError(f"{' '.join(arguments)}: {process.stderr.read()[-2000:]}")
    seconds, cpu_s = perf_counter() - start, children_cpu_s() - cpu_s
    return {"seconds": round(seconds, 1), "cpu_s": round(cpu_s, 1), "peak_gb": round(peak / 1e9, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=integer(100, 10**7), default=100_000, help="of each log; default: 100000")
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=("hashes", "text"),
        default=("hashes", "text"),
        help="the logs to analyze; default: both",
    )
    parser.add_argument("--result", type=Path, help="default: benchmarks/results/analyze-large.json")
    options = parser.parse_args()
    measurements = []
    with TemporaryDirectory() as folder:
        for kind in options.kinds:
            log = Path(folder) / f"{kind}.jsonl"
            write_log(log, kind, options.requests)
            found = {"kind": kind, "requests": options.requests, "log_gb": round(log.stat().st_size / 1e9, 3)}
            found |= measured([sys.executable, "-m", "trunkattn", "analyze", str(log)])
            measurements.append(found)
            print(found, flush=True)
            log.unlink()
    cores = len(os.sched_getaffinity(0))
    print(write_result("analyze-large", {"cores": cores, "rows": measurements}, path=options.result))


if __name__ == "__main__":
    main()
