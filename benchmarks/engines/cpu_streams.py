"""One request and many on this CPU: decode speed of SmolLM2 in float32, bfloat16 and int8, beside llama.cpp.

    python -m benchmarks.engines.cpu_streams --llama-bench FILE     # writes results/cpu-streams.json

FILE is llama.cpp's `llama-batched-bench`, built as peers/README.md says. All engines run the same GGUF file with as
many threads, one after the other. What narrower weights cost is measured on the log-probabilities that float32's own
greedy answers get with them.
"""

import argparse
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.engines.embedded_cpu import VOCABULARY, measure, model_file
from benchmarks.lib.report import write_result
from benchmarks.peers import llama_cpp
from benchmarks.workloads.offline_batches import SHARED, UNSHARED, WorkloadShape, make_workload
from trunkattn import LLM, SamplingParams

CASES: Final = {
    "1 × 256": WorkloadShape(1, 0, 256),
    "1 × 2048": WorkloadShape(1, 0, 2048),
    "32 × 256 unshared": UNSHARED,
    "32 × (2048 + 64)": SHARED,
}
OPTIONS: Final[dict[str, dict[str, str]]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
}
TEXTS: Final = (
    "The library opens at nine and closes at six. On Sundays it",
    "def mean(values):\n    total = 0\n    for value in values:",
    "Dear customer, thank you for your order of three lamps. We",
    "Water boils at a lower temperature on a mountain because",
)


def load(weights: str) -> LLM:
    """The engine with weights of a type."""
    return LLM(model_file(), page_size=16, max_model_len=4096, device="cpu", **OPTIONS[weights])


def answers(llm: LLM) -> list[list[int]]:
    """Token ids of greedy answers to some texts, prompts included."""
    outputs = llm.generate(list(TEXTS), SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))
    return [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]


def log_probabilities(llm: LLM, sequences: list[list[int]]) -> torch.Tensor:
    """Log-probabilities of every token of some sequences but the first."""
    outputs = llm.generate(sequences, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))
    found = []
    for output in outputs:
        assert output.prompt_logprobs is not None
        ids = output.prompt_token_ids[1:]
        found += [each[token].logprob for token, each in zip(ids, output.prompt_logprobs[1:], strict=True) if each]
    return torch.tensor(found, dtype=torch.float64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-bench", type=Path, help="llama-batched-bench; without it llama.cpp is not measured")
    parser.add_argument(
        "--weights", nargs="+", choices=OPTIONS, default=list(OPTIONS), help="float32 always comes first"
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="batches to measure")
    arguments = parser.parse_args()
    threads = torch.get_num_threads()
    shapes = {name: CASES[name] for name in arguments.cases}
    cases: dict[str, dict[str, Any]] = {name: {} for name in shapes}
    accuracy: dict[str, dict[str, float]] = {}
    sequences: list[list[int]] = []
    exact = torch.empty(0)
    for weights in ["float32", *(each for each in arguments.weights if each != "float32")]:
        llm = load(weights)
        if not sequences:
            sequences = answers(llm)
            exact = log_probabilities(llm, sequences)
        apart = (log_probabilities(llm, sequences) - exact).abs()
        accuracy[weights] = {"mean": float(apart.mean()), "max": float(apart.max()), "tokens": len(apart)}
        for name, shape in shapes.items():
            cases[name][f"trunkattn {weights}"] = measure(llm, make_workload(shape, VOCABULARY))[0]
            print(name, weights, cases[name][f"trunkattn {weights}"], flush=True)
        del llm
    if arguments.llama_bench:
        for name, shape in shapes.items():
            cases[name]["llama.cpp"] = llama_cpp.measure(arguments.llama_bench, model_file(), shape, threads)
            print(name, cases[name]["llama.cpp"])
    figures = {"model": model_file().stem, "threads": threads, "cases": cases, "logprob_differences": accuracy}
    print(write_result("cpu-streams", figures, "transformers"))


if __name__ == "__main__":
    main()
