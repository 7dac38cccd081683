"""Whether decode steps of vLLM or SGLang wait for the device with a back end, and whether memory grows over many steps.

    python -m benchmarks.engines.steady --engine sglang --model FOLDER  # results/sglang-steady-CARD-trunk-16.json
    python -m benchmarks.engines.steady --engine sglang --model FOLDER --backend fa3@16  # what SGLang's own does
    python -m benchmarks.engines.steady --engine sglang --model FOLDER --device cpu --steps 60
    python -m benchmarks.engines.steady --engine vllm --model FOLDER  # results/vllm-steady-CARD-CUSTOM.json

32 requests share a prefix and decode --steps tokens. 20 steps are traced by the engine's own profiler: calls that wait
for the device and copies to the host, by name. Memory in use on the card (on a CPU: of the engine's processes) is
looked at every second from the end of the trace on. FOLDER needs a config.json only, as in tpot.py.
"""

import argparse
import json
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engines.adapters import add_engine, add_model, card_name, need_device, parse
from benchmarks.engines.counters import counted
from benchmarks.engines.interface import Adapter, Span, vocabulary
from benchmarks.engines.traces import events_in
from benchmarks.lib.options import integer
from benchmarks.lib.report import short_name, write_result

REQUESTS, SHARED, CPU_SHARED = 32, 1040, 256
BEGUN, TRACED = 8, 20  # tokens of each request before the trace, and steps of it


def prompts(shared: int, vocabulary: int) -> list[list[int]]:
    """Random tokens after one prefix."""
    rng = np.random.default_rng(0)
    common = rng.integers(3, vocabulary, shared).tolist()
    return [common + rng.integers(3, vocabulary, 16 + number).tolist() for number in range(REQUESTS)]


def used_mb(device: str) -> float:
    """Memory in use on the card, or of all processes that this one has started."""
    if device != "cpu":
        import torch

        card = f"--id=GPU-{torch.cuda.get_device_properties(0).uuid}"  # of several, the one that this process sees
        query = ["nvidia-smi", card, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        return float(subprocess.run(query, capture_output=True, text=True, check=True).stdout)
    import psutil

    return sum(child.memory_info().rss for child in psutil.Process().children(recursive=True)) / 2**20


def summarize(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Calls of CUDA's runtime, and copies to the host, by name."""
    calls = Counter(event["name"] for event in events if event.get("cat") == "cuda_runtime")
    copies = Counter(event["name"] for event in events if "DtoH" in str(event.get("name")))
    waits = {name: count for name, count in calls.items() if "Synchronize" in name}
    ours = Counter(event["name"] for event in events if event.get("cat") == "kernel" and "_kernel" in event["name"])
    return {
        "events": len(events),
        "waits": waits,
        "copies_to_host": dict(copies),
        "calls": dict(calls),
        "kernels": dict(ours.most_common(20)),
    }


def watch(engine: Adapter, arguments: argparse.Namespace) -> dict[str, Any]:
    """Generates, traces some steps on the way, and watches memory."""
    asked = prompts(CPU_SHARED if arguments.device == "cpu" else SHARED, vocabulary(arguments.model))
    memory: list[float] = []
    with counted(), tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ready = engine.offline(engine.steady_start(arguments), folder)
        span = Span(BEGUN, TRACED, arguments.steps)
        done = ready.trace(asked, span, folder, lambda: memory.append(round(used_mb(arguments.device), 1)))
        found = {"tokens": done.tokens, "memory_mb": memory} | summarize(events_in(folder))
        ready.shutdown()
    return found


def read_arguments(given: Sequence[str] | None = None) -> tuple[Adapter, argparse.Namespace]:
    """The engine, and the command's arguments, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine(parser)
    add_model(parser)
    parser.add_argument("--backend", help="as in tpot.py; default: ours")
    parser.add_argument(
        "--steps", type=integer(30, 1_000_000), default=10_000, help="tokens that each request decodes; default: 10000"
    )
    parser.add_argument("--output", type=Path, help="write here instead of into results/")
    engine, arguments = parse(parser, given)
    arguments.backend = arguments.backend or engine.STEADY
    return engine, arguments


def main() -> None:
    engine, arguments = read_arguments()
    need_device(engine, arguments.device)
    found, card = watch(engine, arguments), card_name(arguments.device)
    facts = {"card": card, "backend": arguments.backend, "requests": REQUESTS, "steps": arguments.steps}
    print(json.dumps({key: found[key] for key in ("tokens", "memory_mb", "events", "waits", "copies_to_host")}))
    name = f"{engine.PACKAGE}-steady-{short_name(card)}-{arguments.backend.replace('@', '-')}"
    print(write_result(name, facts | found, engine.PACKAGE, "triton", path=arguments.output))


if __name__ == "__main__":
    main()
