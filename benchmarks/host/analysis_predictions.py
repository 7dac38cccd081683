"""What `trunkattn analyze` predicts of engines, beside what was measured of them: time per token, shared and not.

    python -m benchmarks.host.analysis_predictions [--trace FILE]   # results/analysis-predictions.json; needs no GPU
    python -m benchmarks.host.analysis_predictions --fit            # prints the constants of `gpu/cards.py`

Batches are those of `engines/tpot.py`, priced as they are when a request has 72 tokens of its answer. Arrivals are
those of `engines/serving.py`, replayed through the analysis with the engine's bounds and its way to compute prompts;
--trace as there. `terms_ms` says what a predicted time is made of; that of arrivals is a step without prompts, with the
mean number of decodes. The constants of a card are fitted only to its batches of Llama-3-8B on one card: all other
models, caches and numbers of cards, and all arrivals, are predictions.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from types import MappingProxyType
from typing import Any

import numpy as np

from benchmarks.lib.options import existing
from benchmarks.lib.report import read_result, write_result
from benchmarks.workloads import arrivals
from benchmarks.workloads.decode_batches import WORKLOADS, Workload
from benchmarks.workloads.model_shapes import SHAPES
from benchmarks.workloads.serving import batch_of_prefixes
from trunkattn.analysis.pricing.memory import cache_pages
from trunkattn.analysis.pricing.model_configs import CONFIGS
from trunkattn.analysis.pricing.model_shape import ModelShape, model_shape, shape_of
from trunkattn.analysis.pricing.prices import DecodeBatch, Prices
from trunkattn.analysis.reading.tokens import chained
from trunkattn.analysis.records import LoggedRequest
from trunkattn.analysis.settings import Settings
from trunkattn.analysis.simulation.engine import EngineSize
from trunkattn.analysis.simulation.load import Load
from trunkattn.analysis.simulation.load import Workload as Requests
from trunkattn.analysis.simulation.replay import run
from trunkattn.analysis.simulation.timed_engine import ONE_BY_ONE, SHARED
from trunkattn.gpu.cards import EngineTimes, card_named

PAGE = 16
ANSWERED = 72  # tokens of its answer that a request has in the middle of what is timed
LLAMA = "llama-3-8b"
STOCK = ("FLASH_ATTN", "fa3", "fa3@16")
OURS = ("CUSTOM", "trunk@16", "fa3+trunk@16")  # the first that a result has
# Results, and the model of each
BATCHES = MappingProxyType(
    {
        "vllm-tpot-h100": LLAMA,
        "sglang-tpot-h100": LLAMA,
        "vllm-tpot-h100-gpt-oss": "gpt-oss",
        "vllm-tpot-h200": LLAMA,
        "sglang-tpot-h200": LLAMA,
        "vllm-tpot-h200-fp8": LLAMA,
        "vllm-tpot-h200-tp2": LLAMA,
        "vllm-tpot-h200-gemma-3": "gemma-3",
        "vllm-tpot-h200-gpt-oss": "gpt-oss",
        "vllm-tpot-h200-qwen2.5-7b": "qwen2.5-7b",
    }
)
SERVING = ("vllm-serving-h100", "sglang-serving-h100", "vllm-serving-h200", "sglang-serving-h200")
# SGLang computes prompts in steps of their own, while decodes wait.
POLICIES = MappingProxyType({"vllm": "chunked_prefill", "sglang": "prefill_first"})
FITTED_TO = ("vllm-tpot", "sglang-tpot")
FITTED = ("flops_per_us", "layer_us", "sequence_us", "flash_us", "flash_bytes_per_us", "flash_keys_per_us")
ROUNDS = 40
SECONDS = 30.0  # for which requests arrive


@dataclass(frozen=True)
class Case:
    """A batch that was measured. measured: ms, one by one and shared."""

    result: str
    workload: Workload
    measured: tuple[float, float]
    batch: DecodeBatch

    @property
    def card(self) -> str:
        return "H100" if "h100" in self.result else "H200"

    @property
    def prices(self) -> Prices:
        """What prices it."""
        cards = 2 if self.result.endswith("tp2") else 1
        cache = "float8_e4m3fn" if self.result.endswith("fp8") else "auto"
        return Prices(shape_named(BATCHES[self.result]), card_named(self.card), PAGE, cards, cache)

    def predicted(self, prices: Prices) -> tuple[float, float]:
        """ms, one by one and shared."""
        attention = prices.attention(self.batch)
        other = prices.other_us(self.workload.requests, self.workload.requests)
        return (attention.one_by_one_us + other) / 1e3, (attention.shared_us + other) / 1e3

    def terms(self, prices: Prices) -> dict[str, Any]:
        """The parts of the prediction in ms; of attention, one by one and shared."""
        return terms(prices, self.workload.requests, prices.attention(self.batch))


def terms(prices: Prices, num_decodes: float, attention: Sequence[float]) -> dict[str, Any]:
    """The parts of a decode step in ms. attention: in µs, one by one and shared."""
    other = prices.other(round(num_decodes), round(num_decodes))
    parts = {"weights": other.weights, "layers": other.layers, "sampling": other.sampling}
    found: dict[str, Any] = {name: round(part / 1e3, 3) for name, part in parts.items()}
    return found | {"attention": [round(part / 1e3, 3) for part in attention]}


def shape_named(name: str) -> ModelShape:
    """A model of the analysis, or of the benchmarks."""
    return model_shape(name) if name in CONFIGS else shape_of(name, SHAPES[name].config)


def batch_of(workload: Workload) -> DecodeBatch:
    """The decode batch of a workload's requests in the middle of their answers."""
    *shared, (groups, tokens) = workload.levels
    if groups != workload.requests:
        shared, tokens = [*shared, (groups, tokens)], 0
    numbers = range(workload.requests)
    parts = [[((level, i % groups), size) for level, (groups, size) in enumerate(shared)] for i in numbers]
    batch = batch_of_prefixes(parts, [tokens + ANSWERED] * workload.requests, PAGE)
    return DecodeBatch.of(batch.block_table, batch.seq_lens, PAGE)


def cases() -> Iterator[Case]:
    """All batches that were measured both ways."""
    batches = {str(workload): (workload, batch_of(workload)) for workload in WORKLOADS}
    for result in BATCHES:
        for row in read_result(result)["rows"]:
            stock, ours = (next((row[name] for name in names if name in row), None) for names in (STOCK, OURS))
            if stock and ours:
                workload, batch = batches[row["workload"]]
                yield Case(result, workload, (stock["tpot_ms"], ours["tpot_ms"]), batch)


def logged(found: Sequence[arrivals.Arrival]) -> list[LoggedRequest]:
    """Arrivals as a log."""
    requests = []
    for line, arrival in enumerate(found, start=1):
        tokens = np.array(arrival.prompt(1 << 20), np.int64)
        blocks = chained(tokens, PAGE)
        requests.append(LoggedRequest(line, arrival.at, len(tokens), arrival.output_tokens, blocks, PAGE))
    return requests


def serving_rows(trace: Path | None) -> list[dict[str, Any]]:
    """Replays of the arrivals that were measured: median time per token, one by one and shared."""
    rows, logs = [], dict[str, list[LoggedRequest]]()
    for result in SERVING:
        measured = read_result(result)
        stock, ours = (next(name for name in names if name in measured["runs"]) for names in (STOCK, OURS))
        prices = Prices(model_shape(LLAMA), card_named("H100" if "h100" in result else "H200"), PAGE)
        policy = POLICIES[result.partition("-")[0]]
        pages = cache_pages(Settings(page_size=PAGE), prices.shape, prices.card)
        size = EngineSize(pages, PAGE, 256, max_num_batched_tokens=2048, scheduler_policy=policy)
        for name in measured["runs"][stock]:
            workload, rate = name.removesuffix("/s").split()
            scale = float(rate) / arrivals.RATES[workload][0]
            options = {"trace": trace, "workloads": [workload], "scale": scale, "seconds": SECONDS, "quick": False}
            if name not in logs:
                logs[name] = logged(next(iter(arrivals.wanted_runs(argparse.Namespace(**options)).values()), []))
            if not logs[name] or name not in measured["runs"][ours]:
                continue
            requests = Requests.of(logs[name], size, 1)
            each = [run(requests, size, prices, Load(), clock) for clock in (ONE_BY_ONE, SHARED)]
            paces = [
                1e3 * np.array(each[clock].answers.paces).reshape(-1, 2)[:, clock] for clock in (ONE_BY_ONE, SHARED)
            ]
            runs = [measured["runs"][side][name] for side in (stock, ours)]
            row = {"result": result, "workload": name, "card": prices.card.model.name}
            row |= figures([one["tpot"]["median"] for one in runs], [float(median(pace)) for pace in paces])
            waits = [round(each[clock].ttft_ms(clock), 2) for clock in (ONE_BY_ONE, SHARED)]
            row |= {"measured_ttft_ms": [one["ttft"]["mean"] for one in runs], "predicted_ttft_ms": waits}
            sums = [each[clock].sums for clock in (ONE_BY_ONE, SHARED)]
            decoding = [one.decoding / one.decode_steps for one in sums]
            attention = [sums[ONE_BY_ONE].attention_us, sums[SHARED].shared_attention_us]
            per_step = [us / one.decode_steps for us, one in zip(attention, sums, strict=True)]
            row["terms_ms"] = terms(prices, decoding[SHARED], per_step)
            row |= {"measured_decodes": decodes_a_step(runs[1]), "predicted_decodes": round(decoding[SHARED], 1)}
            rows.append(row)
            print(result, name, row)
    return rows


def decodes_a_step(run: Mapping[str, Any]) -> float:
    """Tokens that a measured step with decodes gave on average, but for the first of each answer, which its prompt
    gives."""
    counted = [run["counters"].get(f"trunkattn_steps_total {kind}", 0.0) for kind in ("decode", "mixed", "full_graph")]
    return round((run["output_tokens"] - run["requests"]) / sum(counted), 1)


def figures(measured: Sequence[float], predicted: Sequence[float]) -> dict[str, Any]:
    """Times one by one and shared, in ms, and the ratio of the two."""
    return {
        "measured_ms": [round(value, 3) for value in measured],
        "predicted_ms": [round(value, 3) for value in predicted],
        "measured_ratio": round(measured[0] / measured[1], 3),
        "predicted_ratio": round(predicted[0] / predicted[1], 3),
    }


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """How far predictions are off: shares of what was measured."""
    pairs = [pair for row in rows for pair in zip(row["predicted_ms"], row["measured_ms"], strict=True)]
    times = [abs(predicted / measured - 1) for predicted, measured in pairs]
    ratios = [abs(row["predicted_ratio"] / row["measured_ratio"] - 1) for row in rows]
    return {
        "mean": round(fmean(times), 4),
        "worst": round(max(times), 4),
        "ratio_mean": round(fmean(ratios), 4),
        "ratio_worst": round(max(ratios), 4),
    }


def fitted(found: Sequence[Case], names: Sequence[str], start: EngineTimes) -> EngineTimes:
    """The constants of least squared error of the logarithms, by Gauss and Newton's method, damped."""

    def errors(times: EngineTimes) -> np.ndarray:
        errors = []
        for case in found:
            prices = case.prices
            card = replace(prices.card, model=replace(prices.card.model, engine=times))
            errors += list(np.log(np.array(case.predicted(replace(prices, card=card))) / case.measured))
        return np.array(errors)

    def moved(times: EngineTimes, steps: Mapping[str, float]) -> EngineTimes:
        return replace(times, **{name: getattr(times, name) * float(np.exp(step)) for name, step in steps.items()})

    times, damping = start, 1e-3
    now = errors(times)
    for _ in range(ROUNDS):
        slopes = np.array([(errors(moved(times, {name: 1e-3})) - now) / 1e-3 for name in names]).T
        step = np.linalg.solve(slopes.T @ slopes + damping * np.eye(len(names)), -slopes.T @ now)
        tried = moved(times, dict(zip(names, np.clip(step, -0.5, 0.5).tolist(), strict=True)))
        after = errors(tried)
        better = float(after @ after) < float(now @ now)
        times, now, damping = (tried, after, damping / 2) if better else (times, now, damping * 4)
    return times


def fit(found: Sequence[Case], say: Callable[[str], None] = print) -> None:
    """Prints the constants of each card."""
    for card in ("H100", "H200"):
        start = card_named(card).model.engine
        assert start
        names = [f"{engine}-{card.lower()}" for engine in FITTED_TO]
        say(f"{card}: {fitted([case for case in found if case.result in names], FITTED, start)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=existing, help="Mooncake's conversation trace, for the runs that take it")
    parser.add_argument("--fit", action="store_true", help="print the constants that fit best, and write nothing")
    arguments = parser.parse_args()
    found = list(cases())
    if arguments.fit:
        return fit(found)
    rows = []
    for case in found:
        row = {"result": case.result, "workload": str(case.workload), "card": case.prices.card.model.name}
        row |= {"model": case.prices.shape.name} | figures(case.measured, case.predicted(case.prices))
        rows.append(row | {"terms_ms": case.terms(case.prices)})
    served = serving_rows(arguments.trace)
    result = {"batches": rows, "serving": served, "summary": summary(rows), "serving_summary": summary(served)}
    print(result["summary"], result["serving_summary"])
    print(write_result("analysis-predictions", result))
    return None


if __name__ == "__main__":
    main()
