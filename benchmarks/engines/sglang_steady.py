"""Whether decode steps of SGLang wait for the device with a back end, and whether memory grows over many steps.

    python -m benchmarks.engines.sglang_steady --model FOLDER  # results/sglang-steady-CARD-trunk-16.json
    python -m benchmarks.engines.sglang_steady --model FOLDER --backend fa3@16 # what SGLang's own does
    python -m benchmarks.engines.sglang_steady --model FOLDER --device cpu --steps 60

32 requests share a prefix and decode --steps tokens. 20 steps are traced by SGLang's own profiler: calls that wait for
the device and copies to the host, by name. Memory in use on the card (on a CPU: of the scheduler's process tree) is
looked at every second; the first figure is of the first trace. FOLDER needs a config.json only, as in sglang_tpot.py.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

# What lies beside this file is imported by functions alone: see sglang_tpot.py

REQUESTS, SHARED, TRACED = 32, 1040, 20
CPU_SHARED = 256


def prompts(shared: int, vocabulary: int) -> list[list[int]]:
    """Random tokens behind one prefix."""
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


async def work(engine: Any, asked: list[list[int]], steps: int, device: str, folder: Path) -> dict[str, Any]:
    """Generates, traces some steps on the way, and watches memory."""
    from benchmarks.engines.sglang_tpot import profile_request

    sampling = {"temperature": 0.0, "max_new_tokens": steps, "ignore_eos": True}
    running = asyncio.ensure_future(engine.async_generate(input_ids=asked, sampling_params=sampling))
    await asyncio.sleep(1 if device == "cpu" else 10)  # until all decode
    await engine.tokenizer_manager.start_profile(profile_request(folder, device, TRACED))
    memory: list[float] = []
    while not running.done():
        if memory or any(folder.rglob("*.json*")):
            memory.append(round(used_mb(device), 1))
        await asyncio.wait({running}, timeout=1)
    answers = await running
    return {"tokens": sum(len(answer["output_ids"]) for answer in answers), "memory_mb": memory}


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


def main() -> None:
    from benchmarks.lib.options import integer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a folder with the config.json of a model")
    parser.add_argument("--backend", default="trunk@16", help="as in sglang_tpot.py")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=integer(30, 1_000_000), default=10_000)
    arguments = parser.parse_args()
    if not (arguments.model / "config.json").is_file():
        parser.error(f"argument --model: {arguments.model} has no config.json")
    from benchmarks.engines.sglang_tpot import Task
    from benchmarks.engines.traces import events_in
    from benchmarks.engines.vllm_tpot import hide_benchmarks
    from benchmarks.lib.report import short_name, write_result

    task = Task(arguments.backend, arguments.model, arguments.device, 1, (), 1)
    hide_benchmarks(sys.path)
    import sglang
    import torch

    vocabulary = json.loads((arguments.model / "config.json").read_text())["vocab_size"]
    asked = prompts(CPU_SHARED if arguments.device == "cpu" else SHARED, vocabulary)
    engine = sglang.Engine(model_path=str(arguments.model), **task.options())
    with tempfile.TemporaryDirectory() as folder:
        run = work(engine, asked, arguments.steps, arguments.device, Path(folder))
        found = engine.loop.run_until_complete(run)
        found |= summarize(events_in(Path(folder)))
    engine.shutdown()
    card = "cpu" if arguments.device == "cpu" else torch.cuda.get_device_name()
    facts = {"card": card, "backend": arguments.backend, "requests": REQUESTS, "steps": arguments.steps}
    print(json.dumps({key: found[key] for key in ("tokens", "memory_mb", "events", "waits", "copies_to_host")}))
    name = f"sglang-steady-{short_name(card)}-{arguments.backend.replace('@', '-')}"
    print(write_result(name, facts | found, "sglang", "triton"))


if __name__ == "__main__":
    main()
