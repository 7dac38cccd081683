"""The library on a CPU: 32 requests that share a prompt, each new token's attention in one plan and one run per layer.

    python examples/library_cpu.py

The first run compiles kernels. NUMBA_CACHE_DIR says where they are kept.
"""

import argparse

import torch

from trunkattn import AttentionConfig, BatchAttention, write_kv
from trunkattn.reference import paged_attention

PAGE, REQUESTS, SHARED, LAYERS = 16, 32, 512, 2


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.manual_seed(0)
    config = AttentionConfig(num_qo_heads=9, num_kv_heads=3, head_dim=64, page_size=PAGE, dtype=torch.float32)
    attn = BatchAttention(config, device="cpu")

    # Pages 0 to 31 hold the prompt. Each request has one page of its own, with 3 tokens in it so far.
    prompt = torch.arange(SHARED // PAGE).expand(REQUESTS, -1)
    own = SHARED // PAGE + torch.arange(REQUESTS).view(-1, 1)
    block_table = torch.cat([prompt, own], dim=1).to(torch.int32)
    seq_lens = torch.full((REQUESTS,), SHARED + 3, dtype=torch.int32)
    caches = [[torch.randn(64, PAGE, 3, 64) for _ in range(2)] for _ in range(LAYERS)]

    for _ in range(4):  # decode steps
        seq_lens += 1  # the new token's key and value are in the cache when attention runs
        position = seq_lens.long() - 1
        slots = block_table[torch.arange(REQUESTS), position // PAGE].long() * PAGE + position % PAGE
        plan = attn.plan(block_table, seq_lens)  # once per step
        for k_cache, v_cache in caches:  # once per layer
            q, k, v = (torch.randn(REQUESTS, heads, 64) for heads in (9, 3, 3))
            write_kv(k, v, k_cache, v_cache, slots)
            out = attn.run(plan, q, k_cache, v_cache)

    stats = plan.stats
    print(f"{stats.kv_tokens_read} KV tokens read instead of {stats.kv_tokens_per_query}")
    exact, _ = paged_attention(q, k_cache, v_cache, block_table, seq_lens)
    print(f"largest error against float64: {(out - exact).abs().max():.1e}")


if __name__ == "__main__":
    main()
