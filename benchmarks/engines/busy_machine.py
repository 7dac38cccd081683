"""The engine on a CPU that does other things: 16 prompts × 24 tokens on an idle machine, and beside one busy loop.

    python -m benchmarks.engines.busy_machine     # writes results/cpu-busy.json

The busy loop is this script's own. Each setting runs in a process of its own, because OpenMP reads its settings when it
is loaded. By default threads spin for a while when they wait for each other, and the engine takes fewer beside other
work. `active` lets them spin for ever, `passive` lets them sleep, and `one thread` has nobody to wait for.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from benchmarks.lib.report import write_result

NUM_PROMPTS, PROMPT_TOKENS, OUTPUT_TOKENS = 16, 64, 24
REPEATS: Final = 5
SETTINGS: Final = {
    "default": {},
    "active": {"OMP_WAIT_POLICY": "ACTIVE"},
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}


@contextmanager
def busy_loop() -> Iterator[None]:
    """Another program that computes on one core."""
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        other.kill()
        other.wait()


def run(setting: str, most_seconds: float = 600.0) -> list[float]:
    """Seconds of each run of a setting, in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    command = [sys.executable, "-m", "benchmarks.engines.busy_machine", "--inside"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment | SETTINGS[setting], timeout=most_seconds
    )
    if done.returncode:
        raise RuntimeError(f"{setting} ended with {done.returncode}: {done.stderr[-1000:]}")
    seconds: list[float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def measure_here() -> list[float]:
    """Seconds of each run in this process."""
    from benchmarks.lib.smollm2 import model_file
    from trunkattn import LLM, SamplingParams

    llm = LLM(model_file(), page_size=16, max_model_len=1024, device="cpu")
    prompts = np.random.default_rng(0).integers(10, 40_000, (NUM_PROMPTS, PROMPT_TOKENS)).tolist()
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    seconds = []
    for _ in range(REPEATS + 1):  # the first compiles
        llm.engine.reset_prefix_cache()
        start = time.perf_counter()
        llm.generate(prompts, params)
        seconds.append(round(time.perf_counter() - start, 3))
    return seconds[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="how threads wait; default: all"
    )
    arguments = parser.parse_args()
    if arguments.inside:
        print(json.dumps(measure_here()))
        return
    settings: dict[str, dict[str, Any]] = {}
    for setting in arguments.settings:
        idle = run(setting)
        with busy_loop():
            busy = run(setting)
        settings[setting] = {"idle_s": idle, "beside_a_loop_s": busy}
        print(setting, settings[setting])
    batch = f"{NUM_PROMPTS} × {PROMPT_TOKENS}, {OUTPUT_TOKENS} tokens"
    print(write_result("cpu-busy", {"batch": batch, "settings": settings}, "transformers"))


if __name__ == "__main__":
    main()
