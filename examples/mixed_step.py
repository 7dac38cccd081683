"""One plan for everything in a step: decodes, speculative tokens to verify, and a chunk of a prompt.

    python examples/mixed_step.py [--device cuda]

`query_start_loc` says how many query tokens each request has. They are the last tokens of its sequence, and each sees
what stands before it.
"""

import argparse

import torch

from trunkattn import AttentionConfig, BatchAttention
from trunkattn.reference import paged_attention

PAGE, SHARED_PAGES = 16, 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="(default: cpu)")
    device = parser.parse_args().device
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU; expected cpu")
    torch.manual_seed(0)
    config = AttentionConfig(num_qo_heads=8, num_kv_heads=2, head_dim=64, page_size=PAGE, dtype=torch.float32)
    attn = BatchAttention(config, device=device)

    # All five requests begin with the same 640 tokens, and have 4 pages of their own.
    query_lens = torch.tensor([1, 1, 1, 5, 48], dtype=torch.int32)  # 3 decodes, 4 drafts and a token, a prompt's chunk
    own_tokens = torch.tensor([7, 30, 12, 20, 48], dtype=torch.int32)
    table = torch.cat(
        [
            torch.arange(SHARED_PAGES).expand(5, -1),
            SHARED_PAGES + torch.arange(20).view(5, 4),
        ],
        dim=1,
    )
    seq_lens = SHARED_PAGES * PAGE + own_tokens
    query_start_loc = torch.zeros(6, dtype=torch.int32)
    query_start_loc[1:] = query_lens.cumsum(0)
    step = [tensor.to(device, torch.int32) for tensor in (table, seq_lens, query_start_loc)]

    plan = attn.plan(*step)
    k_cache, v_cache = torch.randn(2, 100, PAGE, 2, 64, device=device)
    q = torch.randn(int(query_start_loc[-1]), 8, 64, device=device)
    out, lse = attn.run(plan, q, k_cache, v_cache, return_lse=True)

    stats = plan.stats
    print(f"{len(q)} query tokens of 5 requests in one plan, policy {stats.policy}")
    print(f"{stats.kv_tokens_read} KV tokens read instead of {stats.kv_tokens_per_query}")
    exact, exact_lse = paged_attention(q, k_cache, v_cache, *step)
    print(f"largest error: {(out - exact).abs().max():.1e} of out, {(lse - exact_lse).abs().max():.1e} of lse")


if __name__ == "__main__":
    main()
