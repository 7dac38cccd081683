"""Whether SGLang answers with our attention as it does with its own.

    python -m benchmarks.engines.sglang_equality                                   # results/sglang-equality-CARD.json
    python -m benchmarks.engines.sglang_equality --cases tensor-parallel --suffix=-tp2
    python -m benchmarks.engines.sglang_equality --device cpu --quick --output FILE

Small models with random weights, scaled so that the answer hangs on what is far back (a control with other tokens in
the shared prefix shows it), in one process per case and back end, --at-once of them side by side on one card. Requests
are greedy and share a prefix; each is generated twice, the second time from the radix cache.

Each case runs SGLang's own back end and ours in pages of 16 tokens; bf16, page-1 and hybrid-pools also its own for
prompts with ours for decoding. Compared with the first are the tokens up to the first that differs; there, how far
apart the first saw the two candidates; and the log-probabilities of equal tokens. They are `within_rounding` if 99 % of
the log-probabilities differ by no more than three times as much as between the first back end's own two rounds, or than
one step of a logit in the model's dtype; the largest by no more than three times the largest there, or three steps; and
no gap is wider than both. `plain` compares with the first back end of the plainest case of the same model.

A case fails if an engine does, if a back end is not within rounding, or if ours has not counted the steps that it
should have computed. The script then ends with 1.

bf16; page-1 (pages of one token, SGLang's own size); fp8 (KV cache; beside SGLang's Triton kernels, which keep queries
in 16 bits as ours do); window (every other layer, Cohere2: SGLang runs Mistral without its window); hybrid-pools (the
same, with a KV pool of its own for the layers with a window); soft-cap (Gemma2, with windows); chunked (prompts in
chunks of 512 tokens); mixed (and decodes in the same step); n-samples (four of each prompt); retraction (every eighth
step throws requests back into the queue); tensor-parallel (two cards, if there are two). GPT-OSS is left out: SGLang
takes only attention back ends that it knows by name for it.

On a CPU, SGLang needs what `make test-sglang` sets, and its own back end there ignores soft caps and misreads window
pools: these cases and fp8 are for GPUs. --quick takes smaller models, fewer prompts and fewer tokens.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

# What lies beside this file is imported by functions alone: see sglang_tpot.py

TOKENS, QUICK_TOKENS, QUICK_PROMPTS = 48, 16, slice(None, None, 3)
STEPS = {"cuda": 2**-4, "cpu": 1e-4}  # between two logits of 8 to 16 in bfloat16; float32 is not what limits there
PATHS, LEAST_MIXED = ("decode", "full_graph", "prefill", "mixed"), 5
PLAIN = {"llama": "bf16", "cohere2": "window"}  # by model
OPTIONS = {
    "load_format": "auto", "max_total_tokens": 65536, "max_running_requests": 32, "mem_fraction_static": 0.9,
    "log_level": "info",
}  # fmt: skip
ON_GPU = {"cuda_graph_max_bs_decode": 32}
ON_CPU = {"context_length": 2048}
QUICK = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32}
RETRACTION = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "8"}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 512}
COHERE = WINDOWS | {
    "architectures": ["Cohere2ForCausalLM"], "model_type": "cohere2", "layer_norm_eps": 1e-5, "hidden_act": "silu",
    "logit_scale": 1.0, "tie_word_embeddings": True,
}  # fmt: skip
HYBRID = COHERE | {"is_hybrid_swa": True, "hybrid_layer_pattern": [1, 0, 1, 0]}
Answers = list[dict[str, Any]]


class Case(NamedTuple):
    """One comparison.

    Attributes:
        shape: of the model.
        options: the engine's.
        environment: of the process.
        samples: of each prompt.
        page: tokens of a page.
        split: also with SGLang's own back end for prompts and ours for decoding.
        first: SGLang's own back end on a GPU.
        cards: that the model is spread over.
        on_cpu: whether SGLang's own back end for CPUs is right.
        mixes: prompts and decodes in one step. SGLang does not while log-probabilities are asked for, so the first
            round has none.
    """

    shape: Mapping[str, Any]
    options: Mapping[str, Any] = MappingProxyType({})
    environment: Mapping[str, str] = MappingProxyType({})
    samples: int = 1
    page: int = 16
    split: bool = False
    first: str = "fa3"
    cards: int = 1
    on_cpu: bool = True
    mixes: bool = False

    def backends(self, device: str) -> list[str]:
        """SGLang's own, ours, and each for one kind of step, named as in sglang_tpot.py."""
        first = "torch_native" if device == "cpu" else self.first
        names = [first, "trunk"] + ([f"{first}+trunk"] if self.split else [])
        return [f"{name}@{self.page}" for name in names]


def all_cases() -> dict[str, Case]:
    """See above."""
    from benchmarks.engines.vllm_equality import GEMMA, LLAMA

    chunks = {"chunked_prefill_size": 512}
    return {
        "bf16": Case(LLAMA, split=True),
        "page-1": Case(LLAMA, page=1, split=True),
        "fp8": Case(LLAMA, {"kv_cache_dtype": "fp8_e4m3"}, first="triton", on_cpu=False),
        "window": Case(COHERE),
        "hybrid-pools": Case(HYBRID, split=True, on_cpu=False),
        "soft-cap": Case(GEMMA | {"hidden_act": GEMMA["hidden_activation"]}, on_cpu=False),
        "chunked": Case(LLAMA, chunks),
        "mixed": Case(LLAMA, chunks | {"enable_mixed_chunk": True}, mixes=True),
        "n-samples": Case(LLAMA, samples=4),
        "retraction": Case(LLAMA, environment=RETRACTION),
        "tensor-parallel": Case(LLAMA, cards=2, on_cpu=False),
    }


def engine_options(folder: Path, case: Case, backend: str, device: str) -> dict[str, Any]:
    """The engine's."""
    from benchmarks.engines.sglang_tpot import Task

    own = Task(backend, folder, device, case.cards, (), 1).options()
    return {**own, **OPTIONS, **(ON_CPU if device == "cpu" else ON_GPU), **case.options, "model_path": str(folder)}


def answers(
    engine: Any, asked: list[list[int]], tokens: int, samples: int = 1, logprobs: bool = True
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """(each answer's tokens, and its steps' best log-probabilities by token; tokens found in the cache, retractions)"""
    sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True, "n": samples}
    wanted = {"return_logprob": True, "top_logprobs_num": 2} if logprobs else {}
    found, facts = [], {"cached_tokens": 0, "retractions": 0}
    for output in engine.generate(input_ids=asked, sampling_params=sampling, **wanted):
        told = output["meta_info"]
        steps = zip(told["output_top_logprobs"], told["output_token_logprobs"], strict=True) if logprobs else ()
        best = [{str(token): logprob for logprob, token, _ in (*two, drawn)} for two, drawn in steps]
        found.append({"tokens": list(output["output_ids"]), "best": best})
        facts["cached_tokens"] += told["cached_tokens"]
        facts["retractions"] += told.get("num_retractions") or 0
    return found, facts


def work(case: Case, backend: str, given: argparse.Namespace, answer: Path) -> None:
    """One case with one back end, in a process of its own."""
    from benchmarks.engines.engine_equality import prompts
    from benchmarks.engines.vllm_tpot import counters, hide_benchmarks

    options = engine_options(answer.parent / folder_name(case.shape), case, backend, given.device)
    which, tokens = (QUICK_PROMPTS, QUICK_TOKENS) if given.quick else (slice(None), TOKENS)
    asked, others = (prompts(changed)[which] for changed in (False, True))
    hide_benchmarks(sys.path)
    with tempfile.TemporaryDirectory() as counted:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = counted  # before SGLang is imported
        import sglang
        import torch

        engine = sglang.Engine(nccl_port=given.port, **options)
        card = "cpu" if given.device == "cpu" else torch.cuda.get_device_name()
        rounds = [answers(engine, asked, tokens, case.samples, logprobs) for logprobs in (not case.mixes, True)]
        control, _ = answers(engine, others, tokens, case.samples)
        found = {
            "card": card, "rounds": [each for each, _ in rounds], "control": control,
            "facts": [facts for _, facts in rounds],
            "counters": {name: count for name, count in counters().items() if count and "created" not in name},
        }  # fmt: skip
        engine.shutdown()
    answer.write_text(json.dumps(found))


def folder_name(shape: Mapping[str, Any]) -> str:
    """Of a model."""
    return shape["model_type"] + ("-hybrid" if "is_hybrid_swa" in shape else "")


def run_cases(cases: Mapping[str, Case], given: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """By case and back end."""
    from benchmarks.engines.engine_equality import Job, run_jobs, save_model
    from benchmarks.engines.sglang_tpot import own_ports

    wanted = [(name, case, backend) for name, case in cases.items() for backend in case.backends(given.device)]
    with tempfile.TemporaryDirectory() as folder, own_ports(len(wanted)) as ports:
        own = ["--device", given.device] + (["--quick"] if given.quick else [])
        jobs = [
            Job(name, backend, [*own, "--port", str(port)], case.environment)
            for (name, case, backend), port in zip(wanted, ports, strict=True)
        ]
        for case in {folder_name(case.shape): case for case in cases.values()}.values():
            shape = {**case.shape, **(QUICK if given.quick else {})}
            save_model(Path(folder, folder_name(shape)), shape, "float32" if given.device == "cpu" else "bfloat16")
        found = run_jobs("benchmarks.engines.sglang_equality", jobs, Path(folder), given.at_once, given.limit)
        if given.logs:
            given.logs.mkdir(parents=True, exist_ok=True)
            for log in Path(folder).glob("*.log"):
                shutil.copy(log, given.logs)
        return found


def lacks(case: Case, backend: str, run: Mapping[str, Any]) -> list[str]:
    """What should have happened in a process and has not."""
    steps = {path: run["counters"].get(f"trunkattn_steps_total {path}", 0.0) for path in PATHS}
    prompts, _, decoding = backend.partition("@")[0].partition("+")
    found = []
    if "trunk" in (prompts, decoding) and not steps["decode"] + steps["full_graph"]:
        found.append("our back end has counted no step of decodes")
    if prompts == "trunk" and not steps["prefill"]:
        found.append("our back end has counted no step of prompts")
    if prompts == "trunk" and case.mixes and steps["mixed"] < LEAST_MIXED:
        found.append(f"our back end has counted {steps['mixed']:.0f} mixed steps: expected {LEAST_MIXED} or more")
    if case.environment and not sum(facts["retractions"] for facts in run["facts"]):
        found.append("SGLang has retracted no request")
    return found


def failures(case: Case, found: Mapping[str, Any]) -> dict[str, list[str]]:
    """By back end, why a case has no result."""
    failed = {backend: run["failed"] for backend, run in found.items() if "failed" in run}
    if not failed:
        failed = {backend: lacks(case, backend, run) for backend, run in found.items()}
    return {backend: reasons for backend, reasons in failed.items() if reasons}


def summarize(name: str, case: Case, found: Mapping[str, Any], plain: Mapping[str, Any], step: float) -> dict[str, Any]:
    """A row of the result. plain: what the plainest case of the same model found. step: see `within_rounding`."""
    from benchmarks.engines.engine_equality import compare, within_rounding

    if failed := failures(case, found):
        return {"case": name, "failed": failed}
    (first, theirs), *others = found.items()
    own = compare(theirs["rounds"][1], theirs["rounds"][0])
    row: dict[str, Any] = {"case": name, "first": first}
    for backend, run in others:
        compared = {
            each: compare(run["rounds"][number], theirs["rounds"][number])
            for number, each in enumerate(("cold", "cached"))
        }
        row[backend] = compared | {
            "within_rounding": all(within_rounding(each, own, step) for each in compared.values()),
            "facts": run["facts"], "counters": run["counters"],
        }  # fmt: skip
        if plain and not any("failed" in each for each in plain.values()):
            row[backend]["plain"] = compare(run["rounds"][1], next(iter(plain.values()))["rounds"][1])
    row |= {"facts": theirs["facts"], "control": compare(theirs["control"], theirs["rounds"][0])}
    return row | {"same_backend_cold_and_cached": own}


def plain_of(name: str, cases: Mapping[str, Case]) -> str | None:
    """The plainest other case of the same model that asks for the same answers."""
    plain = PLAIN.get(cases[name].shape["model_type"])
    return plain if plain != name and cases[name].samples == 1 else None


def has_failed(row: Mapping[str, Any]) -> bool:
    """Whether a row says that a case did not work, or that its answers differ by more than rounding."""
    return "failed" in row or not all(each.get("within_rounding", True) for each in row.values() if type(each) is dict)


def parse(cases: Mapping[str, Case], arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    from benchmarks.lib.options import integer, positive

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=list(cases), help="by default all that one card or a CPU has")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="with smaller models, fewer prompts and tokens")
    parser.add_argument("--at-once", type=integer(1, 64), default=12, help="processes that run side by side")
    parser.add_argument("--limit", type=positive, default=400.0, help="seconds that a process may take")
    parser.add_argument("--logs", type=Path, help="a folder for what each process says")
    parser.add_argument("--suffix", default="", help="of the result's name")
    parser.add_argument("--output", type=Path, help="write here instead of into results/")
    parser.add_argument("--work", nargs=3, metavar=("CASE", "BACKEND", "FILE"), help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    on_cpu = given.device == "cpu"
    given.cases = given.cases or [name for name, case in cases.items() if case.cards == 1 and case.on_cpu >= on_cpu]
    if on_cpu and (wrong := [name for name in given.cases if not cases[name].on_cpu]):
        parser.error(f"argument --cases: {', '.join(wrong)} cannot be judged on a CPU; leave it out")
    return given


def main() -> None:
    cases = all_cases()
    given = parse(cases)
    if given.work:
        name, backend, answer = given.work
        return work(cases[name], backend, given, Path(answer))
    from benchmarks.lib.report import short_name, write_result

    found = run_cases({name: cases[name] for name in given.cases}, given)
    step = STEPS[given.device]
    rows = [
        summarize(name, cases[name], found[name], found.get(plain_of(name, cases), {}), step) for name in given.cases
    ]
    for row in rows:
        print(json.dumps(row)[:1500], flush=True)
    card = next((run["card"] for case in found.values() for run in case.values() if "card" in run), "none")
    name = f"sglang-equality-{short_name(card)}{given.suffix}"
    print(write_result(name, {"card": card, "rows": rows}, "sglang", "triton", path=given.output))
    sys.exit(any(map(has_failed, rows)))


if __name__ == "__main__":
    main()
