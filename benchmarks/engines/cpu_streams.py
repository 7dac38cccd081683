"""One request and many on this CPU: decode speed of SmolLM2 in float32, bfloat16 and int8, beside llama.cpp.

    python -m benchmarks.engines.cpu_streams --llama-bench FILE     # writes results/cpu-streams.json

FILE is llama.cpp's `llama-batched-bench`, built as peers/README.md says. All engines run the same GGUF file with as
many threads and take turns, because what other machines do on the same host changes the speed of memory within minutes.
A case of one request has several rounds, and the fastest counts for each engine. What narrower weights cost is measured
on the log-probabilities that float32's own greedy answers get with them.
"""

import argparse
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.engines.embedded_cpu import VOCABULARY, measure
from benchmarks.lib.options import existing
from benchmarks.lib.report import with_earlier, write_result
from benchmarks.lib.smollm2 import model_file
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
RESULT: Final = "cpu-streams"
ROUNDS: Final = 3  # of a case of one request
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


def in_turn(llms: dict[str, LLM], shape: WorkloadShape, llama_bench: Path | None) -> dict[str, dict[str, Any]]:
    """Figures of each engine on a batch, measured one after the other."""
    workload = make_workload(shape, VOCABULARY)
    figures = {f"trunkattn {weights}": measure(llm, workload)[0] for weights, llm in llms.items()}
    if llama_bench:
        figures["llama.cpp"] = llama_cpp.measure(llama_bench, model_file(), shape, torch.get_num_threads())
    return figures


def fastest(rounds: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Each engine's figures in the round in which it was the fastest."""
    return {
        engine: max((figures[engine] for figures in rounds), key=itemgetter("decode_tokens_per_s"))
        for engine in rounds[0]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--llama-bench", type=existing, help="llama-batched-bench; without it llama.cpp is not measured"
    )
    parser.add_argument(
        "--weights", nargs="+", choices=OPTIONS, default=list(OPTIONS), help="float32 always comes first"
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="batches to measure")
    arguments = parser.parse_args()
    llms = {weights: load(weights) for weights in dict.fromkeys(("float32", *arguments.weights))}
    sequences = answers(llms["float32"])
    exact = log_probabilities(llms["float32"], sequences)
    accuracy: dict[str, dict[str, float]] = {}
    for weights, llm in llms.items():
        apart = (log_probabilities(llm, sequences) - exact).abs()
        accuracy[weights] = {"mean": float(apart.mean()), "max": float(apart.max()), "tokens": len(apart)}
    rows: list[dict[str, Any]] = []
    for name in arguments.cases:
        shape = CASES[name]
        rounds = [in_turn(llms, shape, arguments.llama_bench) for _ in range(ROUNDS if shape.num_requests == 1 else 1)]
        rows.append({"case": name, "runs": fastest(rounds)})
        print(rows[-1], flush=True)
        merged = {"rows": with_earlier(RESULT, rows, ("case",)), "logprob_differences": accuracy}
        figures = {"model": model_file().stem, "threads": torch.get_num_threads(), **merged}
        print(write_result(RESULT, figures, "transformers"))


if __name__ == "__main__":
    main()
