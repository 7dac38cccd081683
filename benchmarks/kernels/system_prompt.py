"""RelayAttention's Figure 5: what a shared system prompt saves one attention layer, in theory and measured.

    python -m benchmarks.kernels.system_prompt  # results/relay-cpu.json; with an NVIDIA GPU relay-CARD.json

Batch 32, 128 private tokens each, a system prompt of 64 to 8,192 tokens, 32 heads of 128 (Llama-2-7B's). Theory counts
the memory traffic of the paper's section 3.3: (s + c + 2) / (s / b + c + 7) for b requests, s shared and c private
tokens. Measured: the time of policy `per_query` over that of `relay` and of `auto`; on a GPU each run finds an L2
cache without its keys, but CTAs of one run that read the same prompt find it there.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.lib.options import no_options
from benchmarks.lib.report import short_name, time_ms, write_result
from benchmarks.workloads import parse_tree, tree_batch
from trunkattn import AttentionConfig, BatchAttention
from trunkattn.reference import paged_attention

BATCH, PRIVATE, HEADS, HEAD_DIM, PAGE = 32, 128, 32, 128, 16
PROMPTS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
FLUSH_BYTES = 400_000_000
POLICIES = ("per_query", "relay", "auto")


def theory(shared: int) -> float:
    """RelayAttention's speed-up by memory traffic."""
    return (shared + PRIVATE + 2) / (shared / BATCH + PRIVATE + 7)


def measure(shared: int, device: str) -> dict[str, float]:
    """Milliseconds of a layer under each policy; the first rows checked against float64."""
    batch = tree_batch(parse_tree(f"1,{BATCH}_{shared},{PRIVATE}"), PAGE, page_seed=0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    torch.manual_seed(0)
    shape = (batch.num_pages, PAGE, HEADS, HEAD_DIM)
    copies = 1 if device == "cpu" else max(2, FLUSH_BYTES // (2 * dtype.itemsize * math.prod(shape)))
    caches = [tuple(torch.randn(shape, device=device, dtype=dtype) for _ in range(2)) for _ in range(copies)]
    q = torch.randn(BATCH, HEADS, HEAD_DIM, device=device, dtype=dtype)
    table, lens = torch.from_numpy(batch.block_table), torch.from_numpy(batch.seq_lens)
    some = (q[:1].cpu(), *(cache.cpu() for cache in caches[0]), table[:1], lens[:1])
    expected, _ = paged_attention(*some)
    times = {}
    for policy in POLICIES:
        attention = BatchAttention(AttentionConfig(HEADS, HEADS, HEAD_DIM, PAGE, dtype, policy=policy), device)
        plan = attention.plan(table, lens)
        out = torch.empty_like(q)

        def run(copy: int, attention: Any = attention, plan: Any = plan, out: torch.Tensor = out) -> torch.Tensor:
            return attention.run(plan, q, *caches[copy], out=out)

        error = float((run(0)[:1].cpu().double() - expected).abs().max())
        assert error < (1e-5 if device == "cpu" else 0.02), f"{policy}: error {error:.3g}"
        times[policy] = _milliseconds(run, copies, device)
    return times


def _milliseconds(run: Callable[[int], torch.Tensor], copies: int, device: str) -> float:
    if device == "cpu":
        return time_ms(lambda: run(0))["median_ms"]
    from benchmarks.kernels.decode import microseconds  # needs Triton

    return microseconds(run, copies) / 1e3


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    for shared in PROMPTS:
        times = measure(shared, device)
        row = {"shared_tokens": shared, "theory": round(theory(shared), 2)}
        row |= {f"{policy}_ms": round(time, 4) for policy, time in times.items()}
        row |= {f"{policy}_speedup": round(times["per_query"] / times[policy], 2) for policy in POLICIES[1:]}
        rows.append(row)
        print(row, flush=True)
    name = "cpu" if device == "cpu" else short_name(torch.cuda.get_device_name())
    print(write_result(f"relay-{name}", {"batch": BATCH, "private_tokens": PRIVATE, "rows": rows}))


if __name__ == "__main__":
    no_options(__doc__)
    main()
