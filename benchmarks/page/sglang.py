"""Time per token, serving, equal answers and steady steps in SGLang: of the results that there are."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.page.common import Loss, Section, card_of, folded, held, load, note_loss, percent, sources, table
from benchmarks.page.names import use_of
from benchmarks.page.vllm import NAMES, SERVING_HEAD, SHAPE, serving_rows

LATENT = "-mla16"  # ends the names of results of a latent cache


def sections() -> list[Callable[[], Section]]:
    """The sections that have a result."""
    parts = {
        "sglang-tpot-*": tpot, f"sglang-tpot-*{LATENT}": latent_tpot, "sglang-serving-*": sglang_serving,
        "sglang-equality-*": equality, "sglang-steady-*": steady,
    }  # fmt: skip
    return [part for pattern, part in parts.items() if held(pattern)]


def label(name: str) -> str:
    """The card of a result, and how many of them."""
    cards = re.search(r"-tp(\d+)$", name)
    return f"{cards[1]} × {card_of(name)}" if cards else card_of(name)


def tpot_table(name: str, losses: list[Loss]) -> str:
    """The times of a result, with its card and what it is compared with. losses: to which those of it are added."""
    first, *others = load(name)["runs"]
    stock_name = NAMES.get(first.partition("@")[0], first)
    head = ["workload", SHAPE, f"`{first}`"]
    head += [cell for backend in others for cell in (f"`{backend}`", "speed-up")]
    rows = []
    for row in load(name)["rows"]:
        use, stock = use_of(row["workload"]), row[first]["tpot_ms"]
        cells: list[object] = [use, f"`{row['workload']}`", f"{stock:.1f}"]
        for backend in others:
            ours = row[backend]["tpot_ms"]
            cells += [f"{ours:.1f}", f"{stock / ours:.2f}×"]
            note_loss(losses, f"SGLang, {label(name)}, `{backend}`: {use}", stock_name, ours / stock)
        rows.append(cells)
    return f"{label(name)}, beside {stock_name}:\n\n{table(head, rows, 2)}\n\n"


def tpot() -> Section:
    losses = list[Loss]()
    names = [name for name in held("sglang-tpot-*") if not name.endswith(LATENT)]
    tables = "".join(tpot_table(name, losses) for name in names)
    backends = dict.fromkeys(" ".join(load(name)["runs"]) for name in names)
    options = f"--backends {' or '.join(backends)} [--tensor-parallel 2]"
    text = f"""## Time per output token

Milliseconds, Llama-3-8B's shape with random weights, bf16, decode graphs and the radix cache, the same prompts for all
back ends. `fa3` is FlashAttention-3, SGLang's own choice on Hopper, with its own pages of one token; `fa3+trunk@16`
computes prompts with it and decodes here, in pages of 16 tokens; `trunk@16` does both here, and `fa3+trunk` has pages
of one token. The speed-up is the time of the first back end over that of the other.

{tables}{sources(f"python -m benchmarks.engines.tpot --engine sglang --model FOLDER {options}", *names)}
"""
    return Section(text, losses)


def latent_tpot() -> Section:
    losses, names = list[Loss](), held(f"sglang-tpot-*{LATENT}")
    tables = "".join(tpot_table(name, losses) for name in names)
    command = "python -m benchmarks.engines.tpot --engine sglang --model FOLDER --backends"
    backends = " or ".join(dict.fromkeys(" ".join(load(name)["runs"]) for name in names))
    text = f"""## Time per output token of latent attention

Milliseconds, the attention of DeepSeek-V3 with 16 heads (one of 8 ranks), 27 layers with dense MLPs, random weights,
bf16, decode graphs and the radix cache, pages of 64 tokens. SGLang's Triton back end computes the prompts of both, and
reads the cache request by request in `triton@64`; its FlashMLA and FlashAttention-3 were not at hand.
[Latent attention](latent.md) has both kernels beside ours.

{tables}{sources(f"{command} {backends}", *names)}
"""
    return Section(text, losses)


def sglang_serving() -> Section:
    names, losses, rows, pairs = held("sglang-serving-*"), list[Loss](), [], set()
    for name in names:
        first, *_, ours = load(name)["runs"]
        pairs.add(f"`{first}` → `{ours}`")
        rows += serving_rows(name, "SGLang", (first, ours), losses)
    runs = (" ".join(load(name)["runs"]) + " --parallel" * load(name).get("side_by_side", False) for name in names)
    backends = " or ".join(dict.fromkeys(runs))
    command = "python -m benchmarks.engines.serving --engine sglang --model FOLDER --trace FILE"
    text = f"""## Requests that arrive over time

Milliseconds, {"; ".join(sorted(pairs))}.

{table(SERVING_HEAD, rows, 2)}

{sources(f"{command} --backends {backends}", *names)}
"""
    return Section(text, losses)


def answers(row: Mapping[str, Any]) -> list[list[object]]:
    """A row of one case for each back end but the first."""
    if "failed" in row:
        reasons = "; ".join(f"{backend}: {lines[-1]}" for backend, lines in row["failed"].items())
        return [[row["case"], "", f"failed: {reasons}", "", "", "", ""]]
    own, found = row["same_backend_cold_and_cached"], []
    for backend in (name for name, part in row.items() if isinstance(part, dict) and "within_rounding" in part):
        both = [row[backend][each] for each in ("cold", "cached")]
        equal, of = (sum(each[part] for each in both) for part in ("equal_tokens", "of"))
        spread = max(each["logprob_difference"]["p99"] for each in both)
        gap = max((max(each["gaps"], default=0.0) for each in both), default=0.0)
        control = row["control"]
        found.append([
            row["case"], f"`{row['first']}`, `{backend}`", f"{equal} of {of}", f"{spread:.4f}", f"{gap:.4f}",
            f"{own['logprob_difference']['p99']:.4f}", percent(control["equal_tokens"] / control["of"]),
        ])  # fmt: skip
        if not row[backend]["within_rounding"]:
            found[-1][0] = f"{row['case']} (**differs**)"
    return found


def equality() -> Section:
    names = held("sglang-equality-*")
    rows = [[label(name), *cells] for name in names for row in load(name)["rows"] for cells in answers(row)]
    head = ["card", "case", "back ends", "equal tokens", "difference", "gap", "its own difference", "control"]
    text = f"""## Equal answers

Greedy answers of small models whose logits depend on far context. Two back ends that round in different ways part at
some token, so the table says how far they agree and how near they were where they part:

- *equal tokens*: tokens before the first that differs, of all requests and two rounds;
- *difference*: 99th percentile of the difference of log-probabilities before that token;
- *gap*: the widest gap that the first back end saw between the two tokens at which answers part;
- *its own difference*: the same percentile between two rounds of the first back end, compared with itself;
- *control*: the share of equal tokens if the shared prefix has other tokens.

In `mixed` the first round has no log-probabilities, because SGLang mixes no steps while they are asked for.

{folded(f"{len(rows)} cases", table(head, rows, 3))}

{sources("python -m benchmarks.engines.equality --engine sglang", *names)}
"""
    return Section(text, [])


def steady() -> Section:
    names, rows = held("sglang-steady-*"), []
    for name in names:
        result = load(name)
        waits = ", ".join(f"{call} {count}" for call, count in result["waits"].items()) or "none"
        copies = ", ".join(f"{copy} {count}" for copy, count in result["copies_to_host"].items()) or "none"
        first, last = result["memory_mb"][0], result["memory_mb"][-1]
        steps = f"{result['steps']:,}"
        rows.append([label(name), f"`{result['backend']}`", waits, copies, f"{first:,.0f} → {last:,.0f}", steps])
    text = f"""## Steady decode steps

Calls that wait for the device and copies to the host in 20 decode steps of 32 requests, SGLang's own included, and
memory in use after the first steps and after the last.

{table(["card", "back end", "waits", "copies to the host", "memory, MB", "steps"], rows, 4)}

{sources("python -m benchmarks.engines.steady --engine sglang --model FOLDER", *names)}
"""
    return Section(text, [])
