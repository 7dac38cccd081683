"""What a plan reads, by packing policy: reading `plan.stats`.

    python examples/plan_stats.py

A step of 32 requests: a system prompt for all, two tool sets, four documents, and what each request has of its own.
"""

import argparse

import torch

from trunkattn import AttentionConfig, BatchAttention

PAGE, REQUESTS = 16, 32
LEVELS = ((1, 64), (2, 16), (4, 128), (32, 4))  # (prefixes, pages of each)


def block_table() -> torch.Tensor:
    """[32, 212]: at each level, requests of the same prefix have the same pages."""
    columns, first = [], 0
    for count, pages in LEVELS:
        prefix = torch.arange(REQUESTS) * count // REQUESTS  # of each request
        columns.append(first + prefix[:, None] * pages + torch.arange(pages))
        first += count * pages
    return torch.cat(columns, dim=1).to(torch.int32)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    table = block_table()
    seq_lens = torch.full((REQUESTS,), table.shape[1] * PAGE, dtype=torch.int32)
    print(f"{'policy':<10} {'KV tokens':>9} {'saved':>6} {'packs':>6} {'items':>6}")
    for policy in ("per_query", "relay", "cascade", "pat", "auto"):
        config = AttentionConfig(32, 8, 128, PAGE, torch.float32, policy=policy)
        stats = BatchAttention(config, device="cpu").plan(table, seq_lens).stats
        saved = 1 - stats.kv_tokens_read / stats.kv_tokens_per_query
        print(f"{policy:<10} {stats.kv_tokens_read:>9} {saved:>6.0%} {stats.num_packs:>6} {stats.num_work_items:>6}")
    print(f"auto took {stats.policy}: {stats.reason}")
    print(f"its items by tile: {stats.tiles}")


if __name__ == "__main__":
    main()
