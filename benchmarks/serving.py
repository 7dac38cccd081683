"""The embedded engine under load: how long users wait, and for which token, by scheduler policy (POD-Attention §5.3).

    python benchmarks/serving.py [--trace FILE]     # results/serving-cpu.json and docs/serving-cpu.png, 6 minutes

Arrivals (Tables 5 to 7): lengths of a trace in Mooncake's format, or drawn like them, inputs / 16 and outputs / 8, at
most 1024 + 64 tokens; Poisson arrivals at 85 % of the rate that the engine completes when all are there at once. The
same requests at the same moments run under `prefill_first` and under `hybrid` with several token budgets. Mixes
(Figure 15): requests of 528 tokens that all wait, four at a time, with 8 to 24 prompt tokens per output token.

Scaled to the machine: POD's decode step takes 40 ms (the median under vLLM in its Table 5), so its stalls of 200 and
500 ms are 5 and 12.5 decode steps, and its hybrid steps, with chunks of 1,536 tokens, 2.5 to 3.75. Here the unit is a
step of one decode alone, and the budget that makes a hybrid step so long is 96 tokens: a CPU is bound by compute from
fewer tokens on. Nothing is shared between the prompts, and prefixes are not cached: this is about scheduling alone.
"""

import argparse
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from cpu_engine import model_file
from numpy.typing import NDArray
from report import write_result

from trunkattn import LLM, SamplingParams
from trunkattn.cache.manager import CacheManager
from trunkattn.engine import Engine
from trunkattn.engine.scheduler import Scheduler
from trunkattn.workloads import conversation_lengths, poisson_arrivals, read_trace

DOCS = Path(__file__).parent.parent / "docs"
PAGE_SIZE, MAX_NUM_SEQS, PREFILL_BUDGET = 16, 32, 2048
SHORTEST, LONGEST = np.array([256, 16]), np.array([1024, 64])  # prompt and output tokens
SCALE = np.array([16, 8])
MAX_MODEL_LEN = int(LONGEST.sum())
UTILISATION = 0.85
STALLS = {"200": 5.0, "500": 12.5}  # POD's milliseconds, and how many of its decode steps they are
MIX_TOKENS, MIX_AT_ONCE = 528, 4
CALIBRATION = 24


@dataclass(frozen=True)
class TimedRequest:
    """A prompt that arrives `arrival` seconds after the beginning and is answered with `output_tokens` tokens."""

    arrival: float
    prompt_token_ids: list[int]
    output_tokens: int


@dataclass(frozen=True)
class Answered:
    """When a request arrived and when each of its tokens came, in seconds after the beginning."""

    arrival: float
    token_times: list[float]

    @property
    def time_to_first_token(self) -> float:
        return self.token_times[0] - self.arrival

    @property
    def latency(self) -> float:
        return self.token_times[-1] - self.arrival

    @property
    def between_tokens(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.token_times)]


@dataclass(frozen=True)
class Setting:
    """A scheduler policy and its token budget."""

    policy: str
    budget: int

    @property
    def name(self) -> str:
        return f"{self.policy} {self.budget}" if self.policy == "hybrid" else self.policy


def replay(engine: Engine, requests: Sequence[TimedRequest]) -> list[Answered]:
    """Runs the engine's steps, adds each request when it is due, and notes when each token is handed out."""
    due = deque(requests)
    answers: dict[str, Answered] = {}
    start = time.perf_counter()
    while due or engine.has_unfinished:
        now = time.perf_counter() - start
        while due and due[0].arrival <= now:
            request = due.popleft()
            params = SamplingParams(temperature=0, max_tokens=request.output_tokens, ignore_eos=True)
            answers[engine.add_request(request.prompt_token_ids, params)] = Answered(request.arrival, [])
        if not engine.has_unfinished:
            time.sleep(due[0].arrival - now)
            continue
        outputs = engine.step()
        now = time.perf_counter() - start
        for output in outputs:
            answers[output.request_id].token_times.append(now)
    return list(answers.values())


def use(llm: LLM, setting: Setting, max_num_seqs: int = MAX_NUM_SEQS) -> Engine:
    """The loaded engine with an empty cache and another scheduler."""
    cache = CacheManager(MAX_NUM_SEQS * MAX_MODEL_LEN // PAGE_SIZE, PAGE_SIZE, enable_prefix_caching=False)
    llm.engine.scheduler = Scheduler(cache, max_num_seqs, setting.budget, setting.policy)
    return llm.engine


def run(engine: Engine, requests: Sequence[TimedRequest], decode_step: float) -> tuple[dict[str, Any], list[float]]:
    """Figures of one run, and all its times between tokens in seconds."""
    before = engine.stats
    answers = replay(engine, requests)
    after = engine.stats
    seconds = max(answer.token_times[-1] for answer in answers)
    gaps = [gap for answer in answers for gap in answer.between_tokens]
    figures: dict[str, Any] = {
        "seconds": round(seconds, 2),
        "busy_share": round((after.busy_seconds - before.busy_seconds) / seconds, 3),
        "steps": after.steps - before.steps,
        "requests_per_minute": round(60 * len(answers) / seconds, 1),
        "ttft_s": percentiles([answer.time_to_first_token for answer in answers]),
        "between_tokens_ms": percentiles([1e3 * gap for gap in gaps]) | {"max": round(1e3 * max(gaps), 1)},
        "latency_s": percentiles([answer.latency for answer in answers]),
    }
    for name, steps in STALLS.items():
        stalled = [max(answer.between_tokens) > steps * decode_step for answer in answers]
        figures[f"stalled_{name}_percent"] = round(100 * sum(stalled) / len(stalled), 1)
    return figures, gaps


def percentiles(values: Sequence[float]) -> dict[str, float]:
    p50, p99 = np.percentile(values, [50, 99])
    return {"p50": round(float(p50), 3), "p99": round(float(p99), 3)}


def prompts(engine: Engine, lengths: NDArray[np.int64], arrivals: NDArray[np.float64], seed: int) -> list[TimedRequest]:
    """Requests of these [n, 2] prompt and output lengths; the tokens are drawn at random."""
    rng = np.random.default_rng(seed)
    return [
        TimedRequest(float(arrival), rng.integers(1, engine.limits.vocab_size, prompt).tolist(), int(output))
        for arrival, (prompt, output) in zip(arrivals, lengths, strict=True)
    ]


def scaled_lengths(trace: Path | None, num_requests: int, seed: int) -> NDArray[np.int64]:
    """[num_requests, 2] prompt and output tokens: requests drawn from the trace, shortened to fit this benchmark."""
    lengths = conversation_lengths(num_requests, seed)
    if trace is not None:
        recorded = np.array([(request.input_length, request.output_length) for request in read_trace(trace)])
        lengths = np.random.default_rng(seed).choice(recorded, num_requests)
    return np.clip(lengths // SCALE, SHORTEST, LONGEST)


def calibrate(llm: LLM, lengths: NDArray[np.int64], budget: int, seed: int) -> tuple[float, float]:
    """Seconds of a step of one decode, and requests per second when all are there at once."""
    engine = use(llm, Setting("hybrid", budget))
    (alone,) = replay(engine, prompts(engine, np.array([[512, 40]]), np.zeros(1), seed))
    together = replay(engine, prompts(engine, lengths, np.zeros(len(lengths)), seed))
    return median(alone.between_tokens), len(lengths) / max(answer.token_times[-1] for answer in together)


def mixes(
    llm: LLM, settings: Sequence[Setting], ratios: Sequence[int], count: int, step: float
) -> list[dict[str, Any]]:
    """Figure 15: requests of equal length, all waiting, by prompt tokens per output token."""
    rows = []
    for ratio in ratios:
        output = round(MIX_TOKENS / (ratio + 1))
        row: dict[str, Any] = {"prompt_to_output": ratio, "prompt_tokens": MIX_TOKENS - output, "output_tokens": output}
        for setting in settings:
            engine = use(llm, setting, MIX_AT_ONCE)
            lengths = np.array([[MIX_TOKENS - output, output]] * count)
            row[setting.name], _ = run(engine, prompts(engine, lengths, np.zeros(count), ratio), step)
            print(f"{ratio} : 1", setting.name, row[setting.name]["requests_per_minute"], "requests/min", flush=True)
        rows.append(row)
    return rows


def print_table(rows: dict[str, dict[str, Any]]) -> None:
    """POD's Table 5, with the stalls scaled."""
    print(f"{'':14}{'TTFT s':>14}{'between ms':>22}{'latency s':>14}{'stalled %':>14}{'busy':>7}")
    print(f"{'':14}{'P50':>7}{'P99':>7}{'P50':>7}{'P99':>7}{'max':>8}{'P50':>7}{'P99':>7}{'200':>7}{'500':>7}")
    for name, row in rows.items():
        between = row["between_tokens_ms"]
        print(
            f"{name:14}{row['ttft_s']['p50']:7.2f}{row['ttft_s']['p99']:7.2f}{between['p50']:7.0f}{between['p99']:7.0f}"
            f"{between['max']:8.0f}{row['latency_s']['p50']:7.2f}{row['latency_s']['p99']:7.2f}"
            f"{row['stalled_200_percent']:7.1f}{row['stalled_500_percent']:7.1f}{row['busy_share']:7.2f}"
        )


def draw(result: dict[str, Any], gaps: dict[str, list[float]], target: Path) -> None:
    """Distribution of the times between tokens, first tokens, and throughput by mix."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    for name, values in gaps.items():
        ordered = np.sort(values)
        left.step(1e3 * ordered, 100 * (1 - np.arange(len(ordered)) / len(ordered)), label=name)
    for name, steps in STALLS.items():
        left.axvline(steps * result["decode_step_ms"], color="black", linewidth=0.8, linestyle="--")
        left.text(steps * result["decode_step_ms"], 0.04, f" POD's {name} ms, scaled", rotation=90, fontsize=8)
    left.set(xscale="log", yscale="log", ylim=(0.03, 110), xlabel="time between tokens, ms", ylabel="% that are longer")
    left.legend(fontsize=8)
    left.set_title(f"Stalls ({result['requests_per_second']} requests/s)")
    places = np.arange(len(gaps))
    for shift, key in ((-0.2, "p50"), (0.2, "p99")):
        middle.bar(places + shift, [row["ttft_s"][key] for row in result["arrivals"].values()], 0.4, label=key.upper())
    middle.set_xticks(places, gaps, rotation=20, fontsize=8)
    middle.set(ylabel="s", title="Time to the first token")
    middle.legend(fontsize=8)
    for name in gaps:
        points = [(row["prompt_to_output"], row[name]["requests_per_minute"]) for row in result["mixes"]]
        right.plot(*zip(*points, strict=True), marker="o", label=name)
    right.set(
        xlabel="prompt tokens per output token", ylabel="requests per minute", title="All waiting, four at a time"
    )
    right.legend(fontsize=8)
    figure.savefig(target, dpi=110)


def integer(low: int, high: int) -> Callable[[str], int]:
    """Parses an option's value; the error names the option."""

    def parse(text: str) -> int:
        if not (text.isdecimal() and low <= int(text) <= high):
            raise argparse.ArgumentTypeError(f"expected an integer from {low} to {high}, got {text!r}")
        return int(text)

    return parse


def positive(text: str) -> float:
    """Parses a finite number above 0."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a finite number above 0, got {text!r}")
    return number


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    count, budget = integer(1, 100_000), integer(MAX_NUM_SEQS, 1_000_000)
    parser.add_argument("--model", type=Path, help="model folder or GGUF file; default: SmolLM2-135M")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--trace", type=Path, help="JSON lines in Mooncake's format; default: lengths drawn like them")
    parser.add_argument("--requests", type=count, default=60, help="that arrive in each run")
    parser.add_argument("--rate", type=positive, help=f"requests per second; default: {UTILISATION} of what completes")
    parser.add_argument("--budgets", type=budget, nargs="+", default=[96, 256, 512, 1024], help="of hybrid, in tokens")
    parser.add_argument("--ratios", type=integer(1, 100), nargs="+", default=[8, 16, 24], help="prompt / output tokens")
    parser.add_argument("--mix-requests", type=count, default=8, help="in each run of a ratio")
    parser.add_argument("--seed", type=integer(0, 2**32 - 1), default=0)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    llm = LLM(
        options.model or model_file(), device=options.device, page_size=PAGE_SIZE, max_model_len=MAX_MODEL_LEN,
        num_pages=MAX_NUM_SEQS * MAX_MODEL_LEN // PAGE_SIZE, max_num_seqs=MAX_NUM_SEQS, enable_prefix_caching=False,
    )  # fmt: skip
    lengths = scaled_lengths(options.trace, options.requests, options.seed)
    step, capacity = calibrate(llm, lengths[:CALIBRATION], options.budgets[0], options.seed)
    rate = UTILISATION * capacity if options.rate is None else options.rate
    print(f"decode step {1e3 * step:.1f} ms, {capacity:.2f} requests/s complete, {rate:.2f} arrive", flush=True)
    arrivals = poisson_arrivals(options.requests, rate, options.seed)
    settings = [Setting("prefill_first", PREFILL_BUDGET), *(Setting("hybrid", budget) for budget in options.budgets)]
    rows, gaps = {}, {}
    for setting in settings:
        engine = use(llm, setting)
        requests = prompts(engine, lengths, arrivals, options.seed)
        rows[setting.name], gaps[setting.name] = run(engine, requests, step)
        print(setting.name, rows[setting.name], flush=True)
    result = {
        "model": options.model.name if options.model else "SmolLM2-135M-Instruct, float32",
        "lengths": "trace" if options.trace else "generated", "seed": options.seed,
        "prompt_tokens": int(lengths[:, 0].sum()), "output_tokens": int(lengths[:, 1].sum()),
        "decode_step_ms": round(1e3 * step, 2), "capacity_requests_per_second": round(capacity, 3),
        "requests_per_second": round(rate, 3), "stall_decode_steps": STALLS, "arrivals": rows,
        "mixes": mixes(llm, settings, options.ratios, options.mix_requests, step),
    }  # fmt: skip
    print_table(rows)
    name = f"serving-{options.device}"
    draw(result, gaps, DOCS / f"{name}.png")
    print(write_result(name, result, "transformers"))


if __name__ == "__main__":
    main()
