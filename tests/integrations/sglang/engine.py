"""Runs a tiny model in SGLang and tells what it generated, and what our back end counted.

SGLang's processes are forks of this one, so that a second engine starts in two seconds, and what a test patches is
patched there too. `test_process` starts them as SGLang does.
"""

import itertools
import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sglang
from prometheus_client import CollectorRegistry, multiprocess

from ..vllm.prompts import equal, prompts

MAX_TOKENS = 24
GREEDY = {"temperature": 0.0, "max_new_tokens": MAX_TOKENS, "ignore_eos": True}
OPTIONS = {
    "device": "cpu", "dtype": "float32", "context_length": 640, "max_total_tokens": 8192, "max_running_requests": 16,
    "skip_tokenizer_init": True, "disable_cuda_graph": True, "mem_fraction_static": 0.3, "grammar_backend": "none",
    "random_seed": 0, "log_level": "error",
}  # fmt: skip
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_PORTS = itertools.count(20000 + 1000 * _WORKER)


def start(model: Path, backend: str, **options: Any) -> sglang.Engine:
    """An engine with a port that no other worker takes: SGLang would choose one now and bind it later."""
    options = {**OPTIONS, "nccl_port": next(_PORTS), **options}
    return sglang.Engine(model_path=str(model), attention_backend=backend, **options)


@dataclass(frozen=True)
class Run:
    """tokens: of each round, prompt and sample. beams: the same of each beam. steps: those of our back end, by path."""

    tokens: list[list[list[int]]]
    beams: list[list[list[list[int]]]]
    cached_tokens: int
    retractions: int
    steps: Counter[str]
    kv_bytes_saved: int


def generate(model: Path, backend: str, sampling: dict[str, Any] | None = None, rounds: int = 2, **options: Any) -> Run:
    """Generates for all prompts, `rounds` times: the second finds the prompts in the radix cache."""
    with tempfile.TemporaryDirectory() as counted:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = counted
        engine = start(model, backend, **options)
        try:
            answers = [engine.generate(input_ids=prompts(), sampling_params=sampling or GREEDY) for _ in range(rounds)]
        finally:
            engine.shutdown()
        steps, saved = counters(counted)
    facts = [answer["meta_info"] for answers in answers for answer in answers]
    return Run(
        tokens=[[list(answer["output_ids"]) for answer in each] for each in answers],
        beams=[[_beams(answer) for answer in each] for each in answers],
        cached_tokens=sum(fact["cached_tokens"] for fact in facts),
        retractions=sum(fact["num_retractions"] for fact in facts),
        steps=steps,
        kv_bytes_saved=saved,
    )


def _beams(answer: dict[str, Any]) -> list[list[int]]:
    return [list(beam["output_ids"]) for beam in answer["meta_info"].get("beam_results", ())]


def counters(folder: str) -> tuple[Counter[str], int]:
    """(steps by path, KV bytes saved), which the schedulers left in a folder, as SGLang's /metrics finds them."""
    registry, steps, saved = CollectorRegistry(), Counter[str](), 0
    multiprocess.MultiProcessCollector(registry, folder)
    for metric in registry.collect():
        for sample in metric.samples:
            if not sample.value:
                continue  # a counter of this process, whose other tests name models as they like
            if sample.name == "trunkattn_steps_total":
                assert Path(sample.labels["model_name"]).is_dir(), "SGLang names a model by its folder"
                steps[sample.labels["path"]] += int(sample.value)
            elif sample.name == "trunkattn_kv_bytes_saved_total":
                saved += int(sample.value)
    return +steps, saved


def equal_rounds(ours: Run, theirs: Run) -> list[int]:
    """How many sequences of each round have the same tokens."""
    pairs: Sequence[tuple[Any, Any]] = list(zip(ours.tokens, theirs.tokens, strict=True))
    return [equal(a, b) for a, b in pairs]
