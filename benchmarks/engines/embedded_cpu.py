"""Decode speed of the whole engine on this CPU, SmolLM2 in float32, 32 requests; beside vLLM's CPU engine if measured.

    python -m benchmarks.engines.embedded_cpu [--vllm-shared FILE --vllm-unshared FILE]   # results/cpu-engine.json

The vLLM files come from peers/vllm_cpu.py (peers/README.md), run on the same machine just before. Both engines are
measured alike: same weights, token ids and threads, prefixes cached, and the time of a short run subtracted from a
long one, so that only decode steps are left.
"""

import argparse
import json
import time
from typing import Any

from benchmarks.lib.options import existing
from benchmarks.lib.report import write_result
from benchmarks.lib.smollm2 import model_file
from benchmarks.workloads.offline_batches import SHARED, UNSHARED, Workload, make_workload
from trunkattn import LLM, SamplingParams

FEW = 8
REPEATS = 2
VOCABULARY = 49152


def run(llm: LLM, workload: Workload, max_tokens: int) -> tuple[float, list[list[int]]]:
    """Seconds and output tokens of one greedy batch."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    start = time.perf_counter()
    outputs = llm.generate(workload.prompts, params)
    return time.perf_counter() - start, [list(output.outputs[0].token_ids) for output in outputs]


def measure(llm: LLM, workload: Workload) -> tuple[dict[str, Any], list[list[int]]]:
    """Decode tokens/s from the fastest short and the fastest long run, prefixes cached."""
    run(llm, workload, FEW)
    before = llm.stats
    few = min(run(llm, workload, FEW)[0] for _ in range(REPEATS))
    full = [run(llm, workload, workload.max_tokens) for _ in range(REPEATS)]
    after = llm.stats
    seconds = min(elapsed for elapsed, _ in full)
    steps = after.steps - before.steps
    figures = {
        "decode_tokens_per_s": round(len(workload.prompts) * (workload.max_tokens - FEW) / (seconds - few), 1),
        "tokens_per_s": round(len(workload.prompts) * workload.max_tokens / seconds, 1),
        "few_s": round(few, 4),
        "full_s": round(seconds, 4),
        "kv_tokens_read_per_step": round((after.kv_tokens_read - before.kv_tokens_read) / steps),
        "kv_tokens_per_query_per_step": round((after.kv_tokens_per_query - before.kv_tokens_per_query) / steps),
    }
    return figures, full[-1][1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-shared", type=existing, help="result of peers/vllm_cpu.py on 32 × (2048 + 64)")
    parser.add_argument("--vllm-unshared", type=existing, help="the same on 32 × 256, nothing shared")
    arguments = parser.parse_args()
    cases = {
        "32 × (2048 + 64)": (make_workload(SHARED, VOCABULARY), arguments.vllm_shared),
        "32 × 256 unshared": (make_workload(UNSHARED, VOCABULARY), arguments.vllm_unshared),
    }
    results: dict[str, Any] = {name: {} for name in cases}
    for policy in ("auto", "per_query"):
        for name, (workload, peer_file) in cases.items():
            llm = LLM(model_file(), policy=policy, page_size=16, max_model_len=4096, device="cpu")
            figures, tokens = measure(llm, workload)
            if peer_file:
                peer = json.loads(peer_file.read_text())
                equal = sum(ours == theirs for ours, theirs in zip(tokens, peer["outputs"], strict=True))
                results[name]["vllm"] = {key: value for key, value in peer.items() if key != "outputs"}
                figures["outputs_equal_to_vllm"] = equal
            results[name][f"trunkattn {policy}"] = figures
            print(name, policy, figures)
    print(write_result("cpu-engine", {"model": "SmolLM2-135M-Instruct, float32", "cases": results}, "transformers"))


if __name__ == "__main__":
    main()
