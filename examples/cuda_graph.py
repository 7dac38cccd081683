"""One CUDA graph for any batch: plans of a fixed size, which the GPU refills in each step.

    python examples/cuda_graph.py            # needs an NVIDIA GPU

A `Capacity` bounds the steps. The plan's arrays then have a fixed size, so `run` is captured once, and
`plan(..., into=plan)` puts the next batch where the graph reads it. The tables are on the GPU, so planning neither
copies nor waits.
"""

import argparse
import sys

import torch

from trunkattn import AttentionConfig, BatchAttention, Capacity
from trunkattn.reference import paged_attention

PAGE, NUM_PAGES, MAX_REQUESTS = 16, 4096, 64


def batch(requests: int, shared_pages: int, own_pages: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Block table and lengths on the GPU: a shared prompt, then pages of each request's own."""
    trunk = torch.arange(shared_pages, device="cuda").expand(requests, -1)
    own = shared_pages + torch.arange(requests * own_pages, device="cuda").view(requests, -1)
    table = torch.cat([trunk, own], dim=1).to(torch.int32)
    lens = torch.full((requests,), table.shape[1] * PAGE - 5, dtype=torch.int32, device="cuda")
    return table, lens


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    if not torch.cuda.is_available():
        sys.exit("This example needs an NVIDIA GPU and a CUDA build of torch; examples/library_cpu.py runs on a CPU.")
    torch.manual_seed(0)
    config = AttentionConfig(num_qo_heads=32, num_kv_heads=8, head_dim=128, page_size=PAGE, dtype=torch.bfloat16)
    capacity = Capacity(
        max_requests=MAX_REQUESTS,
        max_query_tokens=MAX_REQUESTS,
        max_pages_per_request=256,
        num_pages=NUM_PAGES,
        max_query_len=1,  # only decoding
    )
    attn = BatchAttention(config, device="cuda", capacity=capacity)
    k_cache, v_cache = torch.randn(2, NUM_PAGES, PAGE, 8, 128, dtype=torch.bfloat16, device="cuda")
    q = torch.randn(MAX_REQUESTS, 32, 128, dtype=torch.bfloat16, device="cuda")
    out = torch.zeros_like(q)

    plan = attn.plan(*batch(4, 8, 2))
    attn.run(plan, q, k_cache, v_cache, out=out)  # compiles the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attn.run(plan, q, k_cache, v_cache, out=out)

    for shape in ((64, 100, 2), (10, 40, 20), (1, 200, 1)):
        table, lens = batch(*shape)
        attn.plan(table, lens, into=plan)
        graph.replay()
        exact, _ = paged_attention(q[: shape[0]], k_cache, v_cache, table, lens)
        error = (out[: shape[0]] - exact).abs().max().item()
        print(f"{shape[0]:>3} requests: {plan.stats.kv_tokens_read} KV tokens read, largest error {error:.1e}")
    attn.check()  # raises if a table held something out of bounds


if __name__ == "__main__":
    main()
