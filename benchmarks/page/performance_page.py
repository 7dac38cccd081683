"""Writes docs/performance.md, its topics and charts, and the figures in README.md from benchmarks/results/.

    python -m benchmarks.page.performance_page            # write all
    python -m benchmarks.page.performance_page --check    # only say whether they are as the results have them

No figure is copied by hand. tests/docs/test_performance_page.py fails while a page differs from what the results say.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import fill
from typing import NamedTuple

from benchmarks.page import (
    chunks,
    cpu,
    decode,
    engine,
    fleets,
    host,
    large_logs,
    latent,
    predictions,
    server,
    sglang,
    shapes,
    training,
    vllm,
)
from benchmarks.page.common import ROOT, Loss, Section, folded, load, percent, table, versions_of
from benchmarks.page.names import use_of
from benchmarks.page.pictures.performance import CHARTS, OTHER_CHARTS

DOCS = ROOT / "docs"
PAGE = DOCS / "performance.md"
README = ROOT / "README.md"
# Batches of vLLM which are like others that README.md shows.
SIMILAR = ("8 x (4096 + 128)", "128 x (640 + 64)", "128 x (704)", "8 x (8192)")
BEGIN, END = "<!-- written by benchmarks/page/performance_page.py -->", "<!-- end -->"
WRITTEN = "<!-- Written by benchmarks/page/performance_page.py: do not edit. -->"
SHOWN = 1.05  # the front page shows losses from this ratio on, the worst of each kind
UNFOLDED = 6  # losses that it shows at once, each of another topic

METHOD = """\
Every figure comes from a file in `benchmarks/results/`. "Source" under a table names the files with their date, device,
versions and commit, and the command that makes them. Kernel times are medians of CUDA-graph replays on a cold L2 cache,
with the host's queue filled before the clock starts. Peers run in the same process on the same batch, and outputs are
checked. SOL (speed of light) is max(unique bytes / read bandwidth, FLOPs / matrix rate), with both rates measured on
the same card in the same run. What was tried and how the runs went is in the [lab notes](lab/index.md)."""


class Topic(NamedTuple):
    """A page of figures: its file's name, its title, what it is about, and the functions that make its sections."""

    name: str
    title: str
    about: str
    sections: Sequence[Callable[[], Section | None]]

    @property
    def path(self) -> Path:
        """The file that the topic is written to."""
        return DOCS / "performance" / f"{self.name}.md"

    def made(self) -> list[Section]:
        """The sections that have a result."""
        return [section for make in self.sections if (section := make())]


def topics() -> tuple[Topic, ...]:
    """All pages of figures, in their order."""
    engines = (engine.engine, server.server)
    return (
        Topic(
            "decode", "Decode kernels", "PAT's prefix trees, batches that share nothing, ragged batches",
            (decode.decode, decode.unshared, decode.portable_fp8, decode.workloads, cpu.relay),
        ),
        Topic(
            "shapes", "Shapes that people serve", "decoding with the heads, caches and windows of 21 models",
            (shapes.shapes,),
        ),
        Topic(
            "latent", "Latent attention", "decoding over a latent cache (MLA), beside FlashMLA and FlashAttention-3",
            (latent.latent, latent.narrow),
        ),
        Topic(
            "prompts", "Prompts and mixed steps", "prompt chunks by themselves, and together with decodes",
            (chunks.prefill, chunks.shapes, chunks.hybrid),
        ),
        Topic(
            "vllm", "In vLLM", "time per token, models, batch invariance, several cards, arrivals",
            (vllm.tpot, vllm.models, vllm.latent, vllm.invariance, vllm.ranks, vllm.start, vllm.vllm_serving),
        ),
        Topic("sglang", "In SGLang", "time per token, arrivals, equal answers, steady steps", sglang.sections()),
        Topic("training", "Training", "forward and backward, prefix trees", training.SECTIONS),
        Topic(
            "cpu", "On a CPU, and the engine", "CPU kernels, the embedded engine, the server",
            (cpu.cpu, cpu.streams, cpu.busy, *engines),
        ),
        Topic(
            "planner", "The planner", "what a plan costs on a CPU and on a GPU",
            (cpu.planner, decode.device_planner, host.host),
        ),
        Topic(
            "predictions", "Predictions and fleets",
            "what `trunkattn analyze` predicts of engines, beside what was measured; what routing by prefix is worth; "
            "what large logs take",
            (predictions.predictions, fleets.fleets, large_logs.large_logs),
        ),
    )  # fmt: skip


def loss_table(losses: Sequence[Loss]) -> str:
    """Losses, the largest first."""
    rows = [[loss.where, loss.than, loss.by] for loss in sorted(losses, key=lambda loss: -loss.ratio)]
    return table(["case", "what is faster", "TrunkAttention's time over its"], rows, 2)


def topic_page(topic: Topic) -> str:
    """The page of a topic."""
    made = topic.made()
    losses = [loss for section in made for loss in section.losses]
    body = "\n".join(section.text for section in made)
    about = f"{topic.about[0].upper()}{topic.about[1:]}."
    others = "[Performance](../performance.md) has the method and the other topics."
    lost = f"\n## Where it loses\n\n{folded(f'{len(losses)} cases', loss_table(losses))}\n" if losses else ""
    return f"""# {topic.title}

{WRITTEN}

{fill(f"{about} {others}", 120, break_on_hyphens=False, break_long_words=False)}

{body}{lost}"""


def worst_losses(found: Sequence[tuple[Topic, list[Section]]]) -> list[tuple[Topic, Loss]]:
    """The worst loss of each section against each other, from SHOWN on, the largest first, with its topic."""
    worst: dict[tuple[str, int, str], tuple[Topic, Loss]] = {}
    for topic, sections in found:
        for number, section in enumerate(sections):
            for loss in section.losses:
                kind = (topic.name, number, loss.than)
                if kind not in worst or worst[kind][1].ratio < loss.ratio:
                    worst[kind] = (topic, loss)
    pairs = sorted(worst.values(), key=lambda pair: -pair[1].ratio)
    return [pair for pair in pairs if pair[1].ratio >= SHOWN]


def loss_tables(worst: Sequence[tuple[Topic, Loss]]) -> str:
    """The worst losses of the topics that have the largest, and all others folded; each with a link to its topic."""
    of_topic: dict[str, tuple[Topic, Loss]] = {}
    for topic, loss in worst:
        of_topic.setdefault(topic.name, (topic, loss))
    first = list(of_topic.values())[:UNFOLDED]
    rest = [pair for pair in worst if pair not in first]
    head = ["case", "what is faster", "our time over its"]
    shown, more = (
        table(head, ([f"[{loss.where}](performance/{topic.name}.md)", loss.than, loss.by] for topic, loss in pairs), 2)
        for pairs in (first, rest)
    )
    return f"{shown}\n\n{folded(f'{len(rest)} more', more)}" if rest else shown


def use_rows() -> list[list[object]]:
    """Time per token in vLLM by workload: FlashAttention-3, ours and the speed-up on both cards, the largest first."""
    rows = []
    pairs = vllm.tpot_rows("vllm-tpot-h100", "vllm-tpot-h200")
    for hopper, larger in sorted(pairs, key=lambda pair: -vllm.speed_up(pair[0])):
        cells: list[object] = [use_of(hopper["workload"])]
        for row in (hopper, larger):
            stock, ours = row["FLASH_ATTN"]["tpot_ms"], row["CUSTOM"]["tpot_ms"]
            cells += [f"{stock:.1f}", f"{ours:.1f}", f"{stock / ours:.2f}×"]
        rows.append(cells)
    return rows


def page() -> str:
    """The front page."""
    found = [(topic, topic.made()) for topic in topics()]
    links = [f"[{topic.title}](performance/{topic.name}.md)" for topic, _ in found]
    head = ["workload"] + [f"{card}: {what}" for card in ("H100", "H200") for what in ("FA3", "ours", "speed-up")]
    versions = versions_of("vllm", {"H100": "vllm-tpot-h100", "H200": "vllm-tpot-h200"})
    pictures = "\n\n".join(f"![{draw().title}](pictures/{name}.svg)" for name, draw in CHARTS.items())
    return f"""---
hide: [toc]
---
# Performance

{WRITTEN}

The longer the prefixes that requests share, the faster decoding is than with kernels that read each request for itself.
Where requests share nothing, it is about as fast as the fastest peer. What is slower stands below, the largest loss
first.

<div class="charts" markdown="1">

{pictures}

</div>

## Time per token, by workload

Milliseconds in vLLM {versions}, Llama-3-8B's shape, bf16. FA3 is FlashAttention-3, vLLM's own choice.

{table(head, use_rows())}

## Where it loses

These are the worst cases of the {UNFOLDED} topics that lose most, the largest first. Folded below is the worst of every
other kind from {SHOWN:.2f}× on. The page of a topic lists all of its losses. "From" is the best case of the same kind;
below 1× it is a gain.

{loss_tables(worst_losses(found))}

## Every figure

{fill(" · ".join(links), 120, break_on_hyphens=False, break_long_words=False)}

{folded("How it is measured", METHOD)}
"""


def readme() -> str:
    """The few figures that README.md shows."""
    rows = []
    names = {"H100": "vllm-tpot-h100", "H200": "vllm-tpot-h200"}
    for hopper, larger in vllm.tpot_rows(*names.values()):
        if hopper["workload"] in SIMILAR:
            continue
        cells: list[object] = [use_of(hopper["workload"])]
        for row in (hopper, larger):
            stock, ours = row["FLASH_ATTN"]["tpot_ms"], row["CUSTOM"]["tpot_ms"]
            cells += [f"{stock:.1f}", f"**{ours:.1f}**" if stock / ours > 1.02 else f"{ours:.1f}"]
        rows.append(cells)
    pair = vllm.tpot_rows("vllm-tpot-h200-tp2")[-1][0]
    loss = pair["CUSTOM"]["tpot_ms"] / pair["FLASH_ATTN"]["tpot_ms"] - 1
    slowest = max(
        row["CUSTOM"]["tpot_ms"] / row["FLASH_ATTN"]["tpot_ms"] for row in load("vllm-tpot-h100-gpt-oss")["rows"]
    )
    cpu_engine = load("cpu-engine")["cases"]["32 × 256 unshared"]
    cpu_loss = cpu_engine["vllm"]["decode_tokens_per_second"] / cpu_engine["trunkattn auto"]["decode_tokens_per_s"] - 1
    eight = [1 / speed for speed in shapes.over_bfloat16("shapes-h200")]
    head = ["workload", "H100: FlashAttention-3", "TrunkAttention", "H200: FlashAttention-3", "TrunkAttention"]
    (narrow,) = [max(loss.ratio for loss in made.losses) for made in [latent.narrow()] if made]
    alone = max(loss.ratio for loss in cpu.streams().losses)
    where = f"""**Where it loses.** One request on a CPU takes {alone:.1f}× llama.cpp's time. {training.in_words()}
One batch in GPT-OSS's shape takes {slowest:.2f}× FlashAttention-3's time in vLLM, and an fp8 latent cache up
to {narrow:.2f}× FlashMLA's. With an fp8 cache, shared batches take {min(eight):.2f} to {max(eight):.2f}× bf16's time on
average. Where nothing is shared, two H200s are {percent(loss)} slower, and the engine on a CPU {percent(cpu_loss)}
behind vLLM's."""
    return f"""Time per output token in vLLM {versions_of("vllm", names)}, ms (Llama-3-8B's shape, bf16):

{table(head, rows)}

{fill(where, 120, break_on_hyphens=False)}"""


def between(text: str, inner: str) -> str:
    """`text` with `inner` between the two markers."""
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(
            f"{README.name} has no pair of markers: expected {BEGIN} and {END}; put them where the figures go"
        )
    return f"{before}{BEGIN}\n\n{inner}\n\n{end}{after}"


def expected() -> dict[Path, str]:
    """The text of every file that is written here."""
    pages = {PAGE: page(), **{topic.path: topic_page(topic) for topic in topics()}}
    charts = {DOCS / "pictures" / f"{name}.svg": draw().svg() for name, draw in {**CHARTS, **OTHER_CHARTS}.items()}
    return {**pages, **charts, README: between(README.read_text(), readme())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file is stale")
    options = parser.parse_args()
    stale = {path: text for path, text in expected().items() if not path.exists() or path.read_text() != text}
    for path, text in stale.items():
        print(f"{path.relative_to(ROOT)} {'is stale' if options.check else 'written'}")
        if not options.check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
    sys.exit(options.check and bool(stale))


if __name__ == "__main__":
    main()
