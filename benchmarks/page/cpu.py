"""Kernels on a CPU."""

from statistics import median

from benchmarks.page.common import NOTICEABLE, Loss, Section, and_, load, note_loss, sources, table
from benchmarks.page.names import offline


def cpu() -> Section:
    rows, losses = [], []
    for case, ways in load("cpu-attention")["cases"].items():
        ours = ways["trunkattn auto"]["median_ms"]
        others = {way: figures["median_ms"] for way, figures in ways.items() if not way.startswith("trunkattn")}
        alone, best = ways["trunkattn per_query"]["median_ms"], min(others.values())
        rows.append(
            [
                offline(case),
                *(f"{time:.2f}" for time in (others["sdpa"], best, alone, ours)),
                f"{others['sdpa'] / ours:.1f}×",
            ]
        )
        if ours / min(others.values()) > NOTICEABLE:
            losses.append(Loss(f"CPU, {offline(case)}", "the fastest way in torch", ours / min(others.values())))
    text = f"""## Kernels

Attention of one layer on two cores, float32, ms:

{table(["batch", "torch SDPA, per request", "fastest in torch", "sharing off", "TrunkAttention", "over SDPA"], rows)}

{sources("python -m benchmarks.kernels.cpu_attention", "cpu-attention")}
"""
    return Section(text, losses)


STREAMS, BUSY = "cpu-streams", "cpu-busy"


def streams() -> Section:
    """One request and many beside llama.cpp."""
    found = load(STREAMS)
    rows, losses = [], []
    weights = [name.removeprefix("trunkattn ") for name in found["rows"][0]["runs"] if " " in name]
    for case, runs in ((row["case"], row["runs"]) for row in found["rows"]):
        speeds = {name: figures["decode_tokens_per_s"] for name, figures in runs.items()}
        ours, theirs = speeds["trunkattn float32"], speeds["llama.cpp"]
        rows.append([offline(case), *(f"{speeds[f'trunkattn {each}']:.0f}" for each in weights), f"{theirs:.0f}"])
        if theirs / ours > NOTICEABLE:
            losses.append(Loss(f"engine on a CPU, {offline(case)}", "llama.cpp", theirs / ours))
    apart = {name: each for name, each in found["logprob_differences"].items() if name != "float32"}
    moves = ", in ".join(f"{name} by {each['mean']:.3f}" for name, each in apart.items())
    text = f"""## One request and many, beside llama.cpp

Tokens per second of decode steps, {found["model"]}, {found["threads"]} threads. llama.cpp computes with the file's
quantised weights. Here they are widened to the dtype, and with `quantization="int8"` rounded to 8 bits again. The
log-probability of a token of float32's greedy answers moves on average, in {moves}, over
{next(iter(apart.values()))["tokens"]} tokens.

{table(["batch", *weights, "llama.cpp"], rows)}

{sources("python -m benchmarks.engines.cpu_streams --llama-bench FILE", STREAMS)}
"""
    return Section(text, losses)


def busy() -> Section:
    """A machine that does other things."""
    found = load(BUSY)
    words = {
        "default": "spin for 3 ms (default)",
        "active": "spin for ever",
        "passive": "sleep",
        "one thread": "one thread",
    }
    rows = []
    for setting, runs in found["settings"].items():
        idle, beside = median(runs["idle_s"]), median(runs["beside_a_loop_s"])
        rows.append([words[setting], f"{idle:.2f}", f"{beside:.2f}", f"{beside / idle:.1f}×"])
    text = f"""## Beside another program

Median seconds of the engine on two cores, by itself and beside one busy loop, for {found["batch"]} (prompts × the
tokens of each, then the tokens of each answer). Beside the loop the engine lets one thread compute, because the other
would wait for a processor:

{table(["threads that wait", "idle machine", "beside a loop", "ratio"], rows)}

{sources("python -m benchmarks.engines.busy_machine", BUSY)}
"""
    return Section(text, [])


def planner() -> Section:
    """What a plan costs on one core."""
    policies = load("planner-cpu")["policies_ms"]
    plans = [
        [f"`{policy}`", f"{times['cold']['median_ms']:.2f}", f"{times['patch']['median_ms']:.3f}"]
        for policy, times in policies.items()
    ]
    batch, _, nodes = load("planner-cpu")["batch"].partition(", tree ")
    text = f"""## On one core of a CPU

Milliseconds for {batch}, in a tree with {and_(nodes.split(","))} nodes on its levels.
The next step has a token more in each request, and its plan is a patch of the last one.

{table(["policy", "first plan", "plan of the next step"], plans)}

{sources("python -m benchmarks.host.planner", "planner-cpu")}
"""
    return Section(text, [])


RELAY = {"CPU": "relay-cpu", "H100": "relay-h100", "H200": "relay-h200"}


def relay() -> Section:
    """A growing shared prompt."""
    results = {card: load(name) for card, name in RELAY.items()}
    shared = [row["shared_tokens"] for row in results["CPU"]["rows"]]
    losses: list[Loss] = []
    rows: list[list[object]] = [["theory", *(f"{row['theory']:.2f}" for row in results["CPU"]["rows"])]]
    for card, result in results.items():
        rows.append([card, *(f"{row['auto_speedup']:.2f}" for row in result["rows"])])
        for row in result["rows"]:
            where = f"{card}, a shared prompt of {row['shared_tokens']:,} tokens"
            note_loss(losses, where, "the same without sharing", 1 / row["auto_speedup"])
    text = f"""## A growing shared prompt

32 requests with 128 private tokens each after a shared prompt (RelayAttention's Figure 5), 32 heads of 128: speed of
`auto` over `per_query`, which reads the prompt for each request. Theory counts memory traffic; a GPU's L2 cache already
saves `per_query` a part. A CPU computes in float32, a GPU in bf16.

{table(["tokens shared", *(f"{tokens:,}" for tokens in shared)], rows)}

{sources("python -m benchmarks.kernels.system_prompt", *RELAY.values())}
"""
    return Section(text, losses)
