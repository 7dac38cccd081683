"""The embedded engine."""

from benchmarks.page.common import NOTICEABLE, Loss, Section, load, sources, table
from benchmarks.page.names import offline

LABELS = {
    "serving-cpu": "CPU, SmolLM2, a trace",
    "serving-h200": "H200, Llama-3-8B",
    "serving-h200-trace": "H200, Llama-3-8B, a trace",
}


def scheduler(setting: str) -> str:
    """A setting in words; older results have the policy's older name, hybrid."""
    policy, *more = setting.split()
    if policy == "prefill_first":
        return "whole prompts first"
    ways = {"serial": "one after the other", "auto": "overlapped"}
    return ", ".join([f"chunks, {more[0]} tokens a step", *(ways[way] for way in more[1:])])


def engine() -> Section:
    rows = []
    for name in LABELS:
        for setting, run in load(name)["arrivals"].items():
            gaps, first = run["between_tokens_ms"], run["ttft_s"]
            cells: list[object] = [LABELS[name], scheduler(setting)]
            cells += [f"{first['p50']:.2f} / {first['p99']:.2f}"]
            cells += [f"{gaps['p50']:.0f} / {gaps['p99']:,.0f} / {gaps['max']:,.0f}", f"{run['latency_s']['p50']:.1f}"]
            cells += [f"{run[f'stalled_{limit}_percent']:.0f} %" for limit in (200, 500)]
            rows.append(cells)
    losses = []
    cases = load("cpu-engine")["cases"]
    speeds = []
    for case, run in cases.items():
        theirs, ours = run["vllm"]["decode_tokens_per_second"], run["trunkattn auto"]["decode_tokens_per_s"]
        unshared = run["trunkattn per_query"]["decode_tokens_per_s"]
        speeds.append([offline(case), f"{theirs:.0f}", f"{ours:.0f}", f"{unshared:.0f}"])
        if theirs / ours > NOTICEABLE:
            losses.append(Loss(f"engine on a CPU, {offline(case)}", "vLLM's CPU engine", theirs / ours))
    losses += later_first_tokens()
    equal = load("equality-cpu")["scenarios"]
    text = f"""## The embedded engine

Under load (POD-Attention's Tables 5 to 7). Decodes wait while whole prompts are computed, or prompts are computed in
chunks as in Sarathi-Serve, with a budget of tokens per step. On a GPU the attention of chunks and decodes runs one
after the other or overlapped. A request counts as stalled if one of its gaps is longer than 200 or 500 ms; on the CPU,
longer than the same number of decode steps as in POD's setting.

{
        table(
            [
                "machine",
                "scheduler",
                "first token s, P50 / P99",
                "between tokens ms, P50 / P99 / max",
                "latency s, P50",
                "stalled over 200 ms",
                "stalled over 500 ms",
            ],
            rows,
            2,
        )
    }

{sources("python -m benchmarks.engines.embedded_serving [--device cuda] [--trace FILE]", *LABELS)}

Decode speed on two CPU cores, SmolLM2-135M in float32, 32 requests, tokens per second:

{table(["batch", "vLLM's CPU engine", "TrunkAttention", "sharing off"], speeds)}

{sources("python -m benchmarks.engines.embedded_cpu", "cpu-engine")}

Greedy answers equal to transformers' `generate`, over {len(equal)} settings (every policy, chunked prefill, preemption,
a prefix-cache hit): {sum(row["equal"] for row in equal)} of {sum(row["of"] for row in equal)} answers.

{sources("python -m tests.models.demo_answers", "equality-cpu")}
"""
    return Section(text, losses)


def later_first_tokens() -> list[Loss]:
    """Settings whose first tokens come later than with whole prompts first."""
    losses = []
    for name in LABELS:
        runs = load(name)["arrivals"]
        before = runs["prefill_first"]["ttft_s"]["p50"]
        later = {setting: run["ttft_s"]["p50"] / before for setting, run in runs.items()}
        setting, worst = max(later.items(), key=lambda item: item[1])
        if worst > NOTICEABLE:
            where = f"engine, {LABELS[name]}: first token (P50), {scheduler(setting)}"
            losses.append(Loss(where, scheduler("prefill_first"), worst))
    return losses
