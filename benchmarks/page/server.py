"""The HTTP server: robust under load, and how fast with sharing, without it, and beside another server."""

from statistics import median
from typing import Any

from benchmarks.page.common import Section, load, sources, table

LOAD, SPEED, START = "serve-load-cpu", "serve-throughput-cpu", "serve-start-cpu"
HOSTILE, HOSTILE_CARDS = "serve-hostile-cpu", ("serve-hostile-h200",)
LONGEST = 5  # rows of hostile kinds that are shown
KINDS = {
    "good: equal": "streamed to the end, equal to `LLM.generate`'s answer",
    "good: differs": "streamed to the end, another answer",
    "leaves: left": "the client went away in the middle",
    "bad: 400": "bad body, answered with 400",
    "huge: 400": "prompt too long, answered with 400",
    "wrong_key: 401": "wrong key, answered with 401",
}


def server() -> Section:
    found, speed = load(LOAD), load(SPEED)
    seen = found["seen"]
    rows = [[text, f"{seen[kind]:,}"] for kind, text in KINDS.items() if kind in seen]
    rows += [[kind, f"{count:,}"] for kind, count in seen.items() if kind not in KINDS]
    left, memory = found["left_over"], found["memory_mb"]
    servers = {"sharing": "trunkattn serve", "without sharing": "the same, `--policy per_query`", "vllm": "vLLM"}
    rates = [[text, f"{speed[name]['tokens_per_second']:,.0f}"] for name, text in servers.items() if name in speed]
    start = load(START)
    answered = median(each["answered"] for each in start["seconds"])
    text = f"""## The HTTP server

{found["clients"]} clients for {found["seconds"]} seconds on a CPU, SmolLM2-135M in float32. They leave
{left["kv_pages_in_use"]:.0f} pages and {left["running_sequences"]:.0f} requests behind, and memory goes from
{memory[1]:,.0f} MB after five seconds to {memory[-1]:,.0f} MB at the end.

{table(["requests", "count"], rows, 1)}

{sources("python -m benchmarks.engines.serve_load --part load", LOAD)}

{_hostile()}

This is the speed of each server for {speed["prompts"]} prompts, questions on four documents, which are cached. Answers
have {speed["answer_tokens"]} tokens, and {speed["at_once"]} run at once.

{table(["server", "tokens/s"], rates, 1)}

{sources("python -m benchmarks.engines.serve_load --part throughput --vllm PYTHON", SPEED)}

From the command line to the first answer of eight tokens, with compiled kernels in the cache, the server takes
{answered:.1f} seconds (`{start["model"]}`).

{sources("python -m benchmarks.engines.serve_load --part start", START)}
"""
    return Section(text, [])


def _hostile() -> str:
    """What a hostile client does to a stream of answers, on a CPU and on cards."""
    rows = load(HOSTILE)["rows"]
    alone, longest = _by_pause(rows)
    text = f"""A hostile client sends {len(longest)} kinds of what could stop, slow or fill a server, three requests
of a kind at once, beside a stream of answers. By itself the stream pauses for up to {alone["pause_s"]:.2f} s, and
beside the client for at most 0.5 s in {_short(longest)}. All of its answers are equal, and the server's
memory reaches {max(row["memory_mb"] for row in rows):,.0f} MB. The longest pauses, with the longest times of `/health`
meanwhile:

{_pauses(longest)}

{sources("python -m benchmarks.engines.serve_hostile", HOSTILE)}"""
    for name in HOSTILE_CARDS:
        found = load(name)
        alone, longest = _by_pause(found["rows"])
        text += f"""

The same with the model on an {found["card"]}, whose host of {found["device"].rpartition(", ")[2]} also runs the
hostile client. By itself the stream pauses for up to {alone["pause_s"]:.2f} s, and beside the client for at most 0.5 s
in {_short(longest)}:

{_pauses(longest)}

{sources("python -m benchmarks.engines.serve_hostile --device cuda", name)}"""
    return text


def _short(rows: list[dict[str, Any]]) -> str:
    """How many kinds have short enough pauses, in words."""
    found = sum(row["pause_s"] <= 0.5 for row in rows)
    return "all of them" if found == len(rows) else f"{found} of the {len(rows)} kinds"


def _by_pause(rows: list[dict[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The row of a stream by itself, and the others from the longest pause on."""
    alone = next(row for row in rows if row["kind"] == "nothing")
    return alone, sorted((row for row in rows if row is not alone), key=lambda row: -row["pause_s"])


def _pauses(longest: list[dict[str, Any]]) -> str:
    rows = [[row["kind"], f"{row['pause_s']:.2f}", f"{row['health_s']:.2f}"] for row in longest[:LONGEST]]
    return table(["kind", "pause, s", "/health, s"], rows)
