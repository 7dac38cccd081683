"""Writes docs/performance.md, and the figures in README.md, from the files in benchmarks/results/.

    python -m benchmarks.page.performance_page            # write both
    python -m benchmarks.page.performance_page --check    # only say whether they are as the results have them

No figure is copied by hand. tests/docs/test_performance_page.py fails while a page differs from what the results say.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.page import chunks, cpu, decode, engine, host, server, sglang, shapes, training, vllm
from benchmarks.page.common import ROOT, load, percent, span, table, versions_of

PAGE = ROOT / "docs" / "performance.md"
README = ROOT / "README.md"
BEGIN, END = "<!-- written by benchmarks/page/performance_page.py -->", "<!-- end -->"

METHOD = """\
Every figure on this page comes from a file in `benchmarks/results/`, from which `benchmarks/page/performance_page.py`
writes the page. Each table names its files with the date, device, versions and commit, and the command that makes them.

Kernel times are medians of CUDA-graph replays on a cold L2 cache, with the host's queue filled before the clock starts.
Peers run in the same process on the same batch, and outputs are checked. SOL (speed of light) is max(unique bytes /
read bandwidth, FLOPs / matrix rate), with both rates measured on the same card in the same run. Losses are listed with
the wins and [together at the end](#where-it-loses). How the kernels got there, what was tried and what failed is in the
[lab notes](lab/index.md)."""


def page() -> str:
    parts = (
        vllm.tpot,
        vllm.models,
        vllm.invariance,
        vllm.ranks,
        vllm.start,
        vllm.vllm_serving,
        *sglang.sections(),
        decode.decode,
        shapes.shapes,
        decode.workloads,
        chunks.prefill,
        chunks.shapes,
        chunks.hybrid,
        decode.device_planner,
        server.server,
        host.host,
        training.training,
        engine.engine,
        cpu.cpu,
    )
    sections = [section for part in parts if (section := part())]
    losses = [loss for section in sections for loss in section.losses]
    body = "\n".join([*(section.text for section in sections), cpu.relay()])
    return f"""<!-- Written by benchmarks/page/performance_page.py: do not edit. -->

# Performance

{METHOD}

{body}
## Where it loses

Every row above in which something else is at least 1 % faster; for ranges the worst case.

{table(["case", "what is faster", "TrunkAttention takes"], losses, 3)}
"""


def readme() -> str:
    """The few figures that README.md shows."""
    rows = []
    names = {"H100": "vllm-tpot-h100", "H200": "vllm-tpot-h200"}
    for hopper, larger in vllm.tpot_rows(*names.values()):
        cells: list[object] = [vllm.USES[hopper["workload"]]]
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
    cudnn = span(training.over_cudnn())
    head = ["use", "H100: FlashAttention-3", "TrunkAttention", "H200: FlashAttention-3", "TrunkAttention"]
    return f"""Time per output token in vLLM {versions_of("vllm", names)}, ms (Llama-3-8B's shape, bf16):

{table(head, rows)}

Where it loses: nothing shared on two H200s costs {percent(loss)}. One of six batches in GPT-OSS's shape takes
{slowest:.2f} times as long on an H100. With an fp8 cache, shared batches take {min(eight):.2f} to
{max(eight):.2f} times as long as with bf16 on average. Training runs at {cudnn} of the speed of PyTorch's
cuDNN back end on an H100. The engine on a CPU is {percent(cpu_loss)} behind vLLM's where nothing is shared."""


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
    return {PAGE: page(), README: between(README.read_text(), readme())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file is stale")
    options = parser.parse_args()
    stale = {path: text for path, text in expected().items() if not path.exists() or path.read_text() != text}
    for path, text in stale.items():
        print(f"{path.relative_to(ROOT)} {'is stale' if options.check else 'written'}")
        if not options.check:
            path.write_text(text)
    sys.exit(options.check and bool(stale))


if __name__ == "__main__":
    main()
