"""The embedded engine under load: how long users wait, and for which token, by scheduler policy (POD-Attention §5.3).

    python -m benchmarks.engines.embedded_serving [--trace FILE]  # results/serving-cpu.json and its picture
    python -m benchmarks.engines.embedded_serving --device cuda [--trace FILE]  # named by the card, 4 minutes

Arrivals (Tables 5 to 7): lengths come from a trace in Mooncake's format or are drawn like them, and `SCALES` shortens
them. Requests arrive by a Poisson process, at 85 % of the rate at which the engine completes requests (on a GPU: starts
them) if all arrive at once. The same requests at the same moments run under `prefill_first`, and under
`chunked_prefill` with several token budgets. On a GPU each of these runs twice: with attention of prompts and decodes
one after the other (`serial`), and as `auto` chooses. Mixes (Figure 15): requests of equal length all wait from the
beginning and run a few at a time, with 8 to 24 prompt tokens per output token. Prompts share nothing and prefixes are
not cached, because this is only about scheduling.

On a GPU the model is POD's, Llama-3-8B, with random weights, and stalls are those of POD's Table 5, of 200 and 500 ms:
what a person notices is no shorter on a faster card. On a CPU all is scaled to the machine: POD's decode step takes
40 ms (the median under vLLM in its Table 5), so its stalls of 200 and 500 ms are 5 and 12.5 decode steps, and its
steps with chunks of 1,536 tokens 2.5 to 3.75. There the unit is a step of a single decode, and the budget that makes a
step with a chunk so long is 96 tokens: a CPU is bound by compute from fewer tokens on.
"""

import argparse
import gc
import json
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.lib.options import existing, integer, positive, usable_device
from benchmarks.lib.report import short_name, write_result
from benchmarks.lib.smollm2 import model_file
from benchmarks.page.plots.embedded_serving import draw, print_table
from benchmarks.workloads.serving import conversation_lengths, poisson_arrivals
from benchmarks.workloads.traces import read_trace
from trunkattn import LLM, SamplingParams
from trunkattn.config import EXECUTIONS
from trunkattn.engine import Engine
from trunkattn.engine.assembly import make_runner
from trunkattn.engine.engine import Runner
from trunkattn.engine.scheduling.scheduler import Scheduler
from trunkattn.kv_cache.manager import CacheManager

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
PAGE_SIZE, PREFILL_BUDGET = 16, 2048
UTILISATION = 0.85
CALIBRATION = 24


@dataclass(frozen=True)
class Scale:
    """How large the benchmark is on a kind of device.

    Attributes:
        max_num_seqs: answers at once.
        capacity_token: of the last answer, when all are there at once, whose time tells the engine's capacity: -1, the
            last one. Or 0, the first one, where the last answers by themselves take longer than many prompts do.
        divisor, shortest, longest: of the trace's (prompt, output) tokens.
        budgets: of `chunked_prefill`, in tokens.
        executions: of the attention under `chunked_prefill`; `prefill_first`, whose steps are of one kind, takes the
            first.
        mix_tokens, mix_at_once, mix_requests: prompt and output tokens, answers at once and requests of a mix.
        stalls: POD's milliseconds, and what they are here.
        in_steps: whether that is decode steps; if not, milliseconds.
    """

    max_num_seqs: int
    capacity_token: int
    divisor: tuple[int, int]
    shortest: tuple[int, int]
    longest: tuple[int, int]
    budgets: tuple[int, ...]
    executions: tuple[str, ...]
    mix_tokens: int
    mix_at_once: int
    mix_requests: int
    stalls: Mapping[str, float]
    in_steps: bool

    @property
    def max_model_len(self) -> int:
        return sum(self.longest)


SCALES = MappingProxyType(
    {
        "cpu": Scale(
            32, -1, (16, 8), (256, 16), (1024, 64), (96, 256, 512, 1024), ("auto",), 528, 4, 8,
            MappingProxyType({"200": 5.0, "500": 12.5}), in_steps=True,
        ),
        "cuda": Scale(
            64, 0, (1, 2), (512, 16), (8192, 256), (512, 1024, 2048), ("serial", "auto"), 2112, 8, 16,
            MappingProxyType({"200": 200.0, "500": 500.0}), in_steps=False,
        ),
    }
)  # fmt: skip
LLAMA_3_8B = MappingProxyType(
    {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "num_hidden_layers": 32,
        "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
        "vocab_size": 128256, "rope_theta": 500000.0, "max_position_embeddings": 8448, "rms_norm_eps": 1e-5,
        "bos_token_id": 128000, "eos_token_id": 128001, "tie_word_embeddings": False,
    }
)  # fmt: skip


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
    """A scheduler policy, its token budget and, if not the only one, the attention's execution."""

    policy: str
    budget: int
    execution: str = "auto"
    several: bool = False

    @property
    def name(self) -> str:
        name = f"{self.policy} {self.budget}" if self.policy == "chunked_prefill" else self.policy
        return f"{name} {self.execution}" if self.several else name


@dataclass
class Server:
    """The loaded model under one setting after another."""

    llm: LLM
    scale: Scale
    runners: dict[str, Runner] = field(default_factory=dict)  # by execution; they share weights and KV cache

    def __post_init__(self) -> None:
        self.runners[self.llm.config.execution] = self.llm.engine.runner

    def use(self, setting: Setting, max_num_seqs: int | None = None) -> Engine:
        """The engine with an empty cache and another scheduler and execution."""
        llm, engine = self.llm, self.llm.engine
        num_pages = llm.kv_cache.num_pages
        cache = CacheManager(num_pages, PAGE_SIZE, enable_prefix_caching=False)
        engine.scheduler = Scheduler(cache, max_num_seqs or self.scale.max_num_seqs, setting.budget, setting.policy)
        if setting.execution not in self.runners:
            config = replace(llm.config, execution=setting.execution)
            runner = make_runner(llm.model, llm.info, config, llm.kv_cache, engine.limits.max_model_len)
            runner.warm_up()
            self.runners[setting.execution] = runner
        engine.runner = self.runners[setting.execution]
        return engine


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


def run(
    engine: Engine, requests: Sequence[TimedRequest], stalls: Mapping[str, float]
) -> tuple[dict[str, Any], list[float]]:
    """Figures of one run, and all its times between tokens in seconds. stalls: seconds of each by name."""
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
    for name, longest in stalls.items():
        stalled = [max(answer.between_tokens) > longest for answer in answers]
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


def scaled_lengths(trace: Path | None, num_requests: int, seed: int, scale: Scale) -> NDArray[np.int64]:
    """[num_requests, 2] prompt and output tokens: requests drawn from the trace, shortened to fit this benchmark."""
    lengths = conversation_lengths(num_requests, seed)
    if trace is not None:
        recorded = np.array([(request.num_prompt_tokens, request.num_output_tokens) for request in read_trace(trace)])
        lengths = np.random.default_rng(seed).choice(recorded, num_requests)
    return np.clip(lengths // np.array(scale.divisor), scale.shortest, scale.longest)


def calibrate(server: Server, lengths: NDArray[np.int64], setting: Setting, seed: int) -> tuple[float, float]:
    """Seconds of a step of one decode, and requests per second when all are there at once."""
    engine = server.use(setting)
    (alone,) = replay(engine, prompts(engine, np.array([[512, 40]]), np.zeros(1), seed))
    together = replay(engine, prompts(engine, lengths, np.zeros(len(lengths)), seed))
    end = max(answer.token_times[server.scale.capacity_token] for answer in together)
    return median(alone.between_tokens), len(lengths) / end


def mixes(
    server: Server, settings: Sequence[Setting], ratios: Sequence[int], count: int, stalls: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Figure 15: requests of equal length, all waiting, by prompt tokens per output token."""
    rows = []
    tokens = server.scale.mix_tokens
    for ratio in ratios:
        output = round(tokens / (ratio + 1))
        row: dict[str, Any] = {"prompt_to_output": ratio, "prompt_tokens": tokens - output, "output_tokens": output}
        for setting in settings:
            engine = server.use(setting, server.scale.mix_at_once)
            lengths = np.array([[tokens - output, output]] * count)
            row[setting.name], _ = run(engine, prompts(engine, lengths, np.zeros(count), ratio), stalls)
            print(f"{ratio} : 1", setting.name, row[setting.name]["requests_per_minute"], "requests/min", flush=True)
        rows.append(row)
    return rows


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    count, budget = integer(1, 100_000), integer(1, 1_000_000)
    parser.add_argument(
        "--model", type=existing, help="folder or GGUF file; default: SmolLM2-135M, on a GPU Llama-3-8B's shape"
    )
    parser.add_argument(
        "--device", type=usable_device, choices=list(SCALES), default="cpu", help="where the model runs; default: cpu"
    )
    parser.add_argument(
        "--trace", type=existing, help="JSON lines in Mooncake's format; default: lengths drawn like them"
    )
    parser.add_argument("--requests", type=count, help="that arrive in each run; default: 60, on a GPU 40")
    parser.add_argument("--rate", type=positive, help=f"requests per second; default: {UTILISATION} of what completes")
    parser.add_argument("--budgets", type=budget, nargs="+", help="of chunked_prefill, in tokens")
    parser.add_argument("--executions", nargs="+", choices=EXECUTIONS, help="of the attention on a GPU")
    parser.add_argument("--ratios", type=integer(1, 100), nargs="+", default=[8, 16, 24], help="prompt / output tokens")
    parser.add_argument("--mix-requests", type=count, help="in each run of a ratio")
    parser.add_argument("--mix-tokens", type=count, help="prompt and output tokens of a mix's request")
    parser.add_argument("--mix-at-once", type=count, help="answers of a mix at once")
    parser.add_argument("--seed", type=integer(0, 2**32 - 1), default=0, help="of lengths and arrivals; default: 0")
    parser.add_argument("--suffix", default="", help="of the result's name")
    options = parser.parse_args()
    scale = SCALES[options.device]
    options.requests = options.requests or (60 if options.device == "cpu" else 40)
    options.mix_requests = options.mix_requests or scale.mix_requests
    for name, longest in (("mix_tokens", scale.max_model_len), ("mix_at_once", scale.max_num_seqs)):
        given = getattr(options, name) or getattr(scale, name)
        if given > longest:
            parser.error(f"argument --{name.replace('_', '-')}: expected at most {longest}, got {given}")
        scale = replace(scale, **{name: given})
    options.scale = scale
    options.executions = options.executions or list(scale.executions)
    options.budgets = options.budgets or list(scale.budgets)
    for given in options.budgets:
        if given < scale.max_num_seqs:
            parser.error(f"argument --budgets: expected at least {scale.max_num_seqs}, got {given}")
    return options


def load(options: argparse.Namespace) -> LLM:
    """The engine with the model that was asked for, or the device's own."""
    scale: Scale = options.scale
    sizes: dict[str, Any] = {
        "page_size": PAGE_SIZE,
        "max_num_seqs": scale.max_num_seqs,
        "max_model_len": scale.max_model_len,
    }
    if options.device == "cpu":
        num_pages = scale.max_num_seqs * scale.max_model_len // PAGE_SIZE
        path = options.model or model_file()
        return LLM(path, enable_prefix_caching=False, num_pages=num_pages, **sizes)
    # `prefill_first` computes the longest prompt in one step, so that this runner has room for every setting
    sizes |= {"max_num_batched_tokens": max(PREFILL_BUDGET, *options.budgets), "scheduler_policy": "prefill_first"}
    sizes |= {"device": "cuda", "enable_prefix_caching": False, "execution": options.executions[0]}
    if options.model:
        return LLM(options.model, **sizes)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(dict(LLAMA_3_8B)))
        return LLM(folder, load_format="dummy", **sizes)


def settings_of(options: argparse.Namespace) -> list[Setting]:
    """What is compared."""
    several = len(options.executions) > 1
    chunked = [
        Setting("chunked_prefill", budget, execution, several)
        for budget in options.budgets
        for execution in options.executions
    ]
    return [Setting("prefill_first", PREFILL_BUDGET, options.executions[0]), *chunked]


def describe(options: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Name of the result, and what it says of the model and the card."""
    own = {"cpu": "SmolLM2-135M-Instruct, float32", "cuda": "Llama-3-8B, bfloat16, random weights"}[options.device]
    said = {"model": options.model.name if options.model else own}
    if options.device == "cpu":
        return "serving-cpu", {**said, "stall_decode_steps": dict(SCALES["cpu"].stalls)}
    card = torch.cuda.get_device_name()
    return f"serving-{short_name(card)}", {"card": card, **said}


def main() -> None:
    options = arguments()
    scale: Scale = options.scale
    llm = load(options)
    llm.warm_up()
    gc.collect()
    gc.freeze()  # what a collection would look through in vain, in the middle of a step
    server = Server(llm, scale)
    lengths = scaled_lengths(options.trace, options.requests, options.seed, scale)
    settings = settings_of(options)
    step, capacity = calibrate(server, lengths[:CALIBRATION], settings[1], options.seed)
    stalls = {name: value * (step if scale.in_steps else 1e-3) for name, value in scale.stalls.items()}
    rate = UTILISATION * capacity if options.rate is None else options.rate
    print(f"decode step {1e3 * step:.1f} ms, {capacity:.2f} requests/s complete, {rate:.2f} arrive", flush=True)
    arrivals = poisson_arrivals(options.requests, rate, options.seed)
    rows, gaps = {}, {}
    for setting in settings:
        engine = server.use(setting)
        requests = prompts(engine, lengths, arrivals, options.seed)
        rows[setting.name], gaps[setting.name] = run(engine, requests, stalls)
        print(setting.name, rows[setting.name], flush=True)
    name, said = describe(options)
    name += options.suffix
    result = {
        **said, "lengths": "trace" if options.trace else "generated", "seed": options.seed,
        "prompt_tokens": int(lengths[:, 0].sum()), "output_tokens": int(lengths[:, 1].sum()),
        "decode_step_ms": round(1e3 * step, 2), "capacity_requests_per_second": round(capacity, 3),
        "requests_per_second": round(rate, 3),
        "stall_ms": {name: round(1e3 * longest, 2) for name, longest in stalls.items()}, "arrivals": rows,
        "mix_at_once": scale.mix_at_once,
        "mixes": mixes(server, settings, options.ratios, options.mix_requests, stalls),
    }  # fmt: skip
    print_table(rows)
    print(write_result(name, result, "transformers", *(() if options.device == "cpu" else ("triton",))))
    draw(result, gaps, PICTURES / f"{name}.png")


if __name__ == "__main__":
    main()
