"""What vllm_equality.py and sglang_equality.py share: models, prompts, how answers are compared, and how all cases are
run side by side."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

DENSE = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 32000, "max_position_embeddings": 16384,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SHARED, LARGEST_TOKEN = 1040, 30000


def save_model(folder: Path, shape: dict[str, Any], dtype: str = "bfloat16") -> None:
    """A model of random weights that let attention matter: logits of attention that are far from even."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    kind = dict(shape)
    config = AutoConfig.for_model(kind.pop("model_type"), **(DENSE | kind))
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            fill(name, weight, config)
    model.save_pretrained(folder)


def fill(name: str, weight: Any, config: Any) -> None:
    """Random numbers with which attention and the answer are far from even."""
    gemma = config.model_type.startswith("gemma")  # its norms scale by 1 + weight, and one matrix embeds and predicts
    if "sinks" in name:
        weight.normal_(7.0, 2.0)  # beside the logits of some hundred keys
    elif name.endswith("bias"):
        weight.normal_(0.0, 0.1)
    elif "q_norm" in name or "k_norm" in name:
        weight.fill_(1.6 - gemma)
    elif gemma and ("post_attention_layernorm" in name or "post_feedforward_layernorm" in name):
        weight.fill_(8.0)  # or each token would predict itself
    elif weight.dim() < 2:
        weight.fill_(1.0 - gemma)
    else:
        own = "embed" in name and not config.tie_word_embeddings  # a tied one makes the logits
        scale = 1.0 if own else weight.shape[1] ** -0.5
        weight.normal_(0.0, scale * (1.6 if "q_proj" in name or "k_proj" in name else 1.0))


def prompts(changed: bool) -> list[list[int]]:
    """24 prompts, 16 of them behind one prefix. changed: the first half of each is made of other tokens."""
    rng = np.random.default_rng(0)
    shared = rng.integers(3, LARGEST_TOKEN, SHARED).tolist()
    found = [shared + rng.integers(3, LARGEST_TOKEN, 5 + 37 * i).tolist() for i in range(16)]
    found += [rng.integers(3, LARGEST_TOKEN, 300 + 31 * i).tolist() for i in range(8)]
    return with_other_tokens(found) if changed else found


def with_other_tokens(found: list[list[int]]) -> list[list[int]]:
    """The prompts, with other tokens in the first half of each."""
    rng = np.random.default_rng(1)
    for prompt in found:
        half = len(prompt) // 2
        prompt[:half] = rng.integers(3, LARGEST_TOKEN, half).tolist()
    return found


def parted_at(ours: list[int], theirs: list[int]) -> int:
    """First step in which two answers differ, or their length."""
    return next((step for step, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours))


def compare(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> dict[str, Any]:
    """Answers to the same requests: each with its `tokens` and, if these were asked for, the `best` log-probabilities
    of each step by token.

    gaps: log-probability of theirs less that of ours, by theirs, where answers part. logprob_difference: of the tokens
    before, which are equal: a gap no wider than that is rounding.
    """
    equal, parted, gaps, noise = 0, 0, [], []
    for mine, other in zip(ours, theirs, strict=True):
        step = parted_at(mine["tokens"], other["tokens"])
        equal += step
        parted += step < len(other["tokens"])
        if not (mine["best"] and other["best"]):
            continue
        for before in range(step):
            token = str(other["tokens"][before])
            noise.append(abs(mine["best"][before][token] - other["best"][before][token]))
        if step < len(other["tokens"]):
            best = sorted(other["best"][step].values(), reverse=True)
            near = other["best"][step].get(str(mine["tokens"][step]), best[1])
            gaps.append(round(best[0] - near, 4))
    total = sum(len(answer["tokens"]) for answer in theirs)
    differences = np.array(noise or [0.0])
    spread = {"mean": differences.mean(), "p99": np.quantile(differences, 0.99), "max": differences.max()}
    return {
        "equal_tokens": equal, "of": total, "parted": parted, "gaps": sorted(gaps),
        "logprob_difference": {name: round(float(value), 7) for name, value in spread.items()},
    }  # fmt: skip


def within_rounding(compared: dict[str, Any], own: dict[str, Any], step: float) -> bool:
    """Whether a difference between two back ends is no more than rounding makes: of 99 % of the tokens, and of the one
    that differs most, or an answer that is wrong from its first tokens would hide among the others.

    Args:
        compared: what `compare` says of them.
        own: what it says of two rounds of the first back end, which batches them in two ways.
        step: between two logits, in the model's dtype.
    """
    spread, usual = compared["logprob_difference"], own["logprob_difference"]
    allowed, most = max(3 * usual["p99"], step), 3 * max(usual["max"], step)
    widest = max(compared["gaps"], default=0.0)
    return spread["p99"] <= allowed and spread["max"] <= most and widest <= max(allowed, spread["max"])


class Job(NamedTuple):
    """One case with one back end, in a process of its own.

    Attributes:
        case, backend: names.
        arguments: further ones of the script.
        environment: variables that the process gets beside ours.
    """

    case: str
    backend: str
    arguments: Sequence[str]
    environment: Mapping[str, str]


def run_jobs(
    script: str, jobs: Sequence[Job], folder: Path, at_once: int, limit: float | None = None
) -> dict[str, dict[str, Any]]:
    """What each job answers, by case and back end; for one that fails, why.

    Args:
        script: it gets `--work CASE BACKEND FILE` and writes its answer to the file, as JSON.
        jobs: in the order in which they start.
        folder: for answers and logs.
        at_once: as many jobs run side by side.
        limit: seconds after which a job is ended.
    """

    def run(job: Job) -> dict[str, Any]:
        answer = folder / f"{job.case}-{job.backend}.json"
        log = answer.with_suffix(".log")
        command = [sys.executable, script, "--work", job.case, job.backend, str(answer), *job.arguments]
        environment = {**os.environ, **job.environment}
        try:
            with log.open("w") as lines:
                done = subprocess.run(command, stdout=lines, stderr=lines, env=environment, timeout=limit)
        except subprocess.TimeoutExpired:
            return {"failed": [f"no answer after {limit:.0f} s"]}
        if answer.exists():
            return json.loads(answer.read_text())
        said = log.read_text().splitlines()
        errors = [line for line in said if "Error" in line or "error" in line]
        return {"failed": errors[-3:] or [f"ended with status {done.returncode} after: {''.join(said[-1:])}"]}

    with ThreadPoolExecutor(at_once) as pool:
        answers = list(pool.map(run, jobs))
    found: dict[str, dict[str, Any]] = {}
    for job, answer in zip(jobs, answers, strict=True):
        found.setdefault(job.case, {})[job.backend] = answer
    return found
