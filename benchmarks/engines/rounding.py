"""Answers of two back ends compared: which tokens are equal, and whether the rest is rounding."""

from typing import Any

import numpy as np


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
