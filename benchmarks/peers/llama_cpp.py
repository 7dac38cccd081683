"""Decode speed of llama.cpp on the batches of `engines/cpu_streams.py`, by its own tool, `llama-batched-bench`.

It computes with the quantised weights of the GGUF file as they are; this project's engine widens them to float32.
"""

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.workloads.offline_batches import WorkloadShape


def command(binary: Path, model: Path, shape: WorkloadShape, threads: int) -> list[str]:
    """The tool's command for a batch. A prompt that all requests share is computed and kept once."""
    prompt = shape.shared_tokens or shape.private_tokens
    own = shape.max_tokens * shape.num_requests
    context = own + prompt * (1 if shape.shared_tokens else shape.num_requests)
    shared = ["-pps"] if shape.shared_tokens else []
    sizes = ["-npp", str(prompt), "-ntg", str(shape.max_tokens), "-npl", str(shape.num_requests)]
    options = ["-c", str(context + 256), "-t", str(threads), "-kvu", "--output-format", "jsonl"]
    return [str(binary), "-m", str(model), *sizes, *shared, *options]


def measure(binary: Path, model: Path, shape: WorkloadShape, threads: int, repeats: int = 3) -> dict[str, Any]:
    """Decode tokens/s of the fastest of some runs, and what the tool was told.

    Raises:
        RuntimeError: with the end of what the tool printed.
    """
    arguments = command(binary, model, shape, threads)
    speeds = [_speed(subprocess.run(arguments, capture_output=True, text=True)) for _ in range(repeats)]
    return {"decode_tokens_per_s": round(max(speeds), 1), "options": arguments[3:]}


def _speed(done: subprocess.CompletedProcess[str]) -> float:
    rows: Sequence[Mapping[str, Any]] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not rows:
        raise RuntimeError(f"llama-batched-bench ended with {done.returncode}: {done.stderr[-1000:]}")
    return float(rows[-1]["speed_tg"])
