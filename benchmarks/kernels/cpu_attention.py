"""Decode attention of one layer on this CPU: the executor against other ways to do the same work.

    python -m benchmarks.kernels.cpu_attention            # writes benchmarks/results/cpu-attention.json

Ways: `sdpa`, torch's scaled_dot_product_attention per request over gathered pages (no packing); `torch_products`, packs
as batched matrix products over gathered pages, merged from their log-sum-exps; `torch_flash`, the same packs through
torch's own CPU flash kernel; `trunkattn`, under policy per_query and auto. Each is checked against the float64 oracle.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.lib.options import no_options
from benchmarks.lib.report import time_ms, write_result
from trunkattn import AttentionConfig, BatchAttention, merge_states
from trunkattn.reference import paged_attention

PAGE = 16
CASES = {
    # requests, shared tokens, private tokens, num_qo_heads, num_kv_heads, head_dim
    "32 × (2048 + 64), SmolLM2": (32, 2048, 64, 9, 3, 64),
    "32 × 2112 unshared, SmolLM2": (32, 0, 2112, 9, 3, 64),
    "32 × 256 unshared, SmolLM2": (32, 0, 256, 9, 3, 64),
    "8 × (1024 + 64), SmolLM2": (8, 1024, 64, 9, 3, 64),
    "1 × 8192, SmolLM2": (1, 0, 8192, 9, 3, 64),
    "16 × (2048 + 128), 32/8 heads of 128": (16, 2048, 128, 32, 8, 128),
}


@dataclass
class Case:
    """One decode batch: `shared` pages, then private pages per request."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    shared_pages: int

    @property
    def scale(self) -> float:
        return self.q.shape[2] ** -0.5


def make_case(requests: int, shared: int, private: int, heads: tuple[int, int, int]) -> Case:
    num_qo_heads, num_kv_heads, head_dim = heads
    generator = torch.Generator().manual_seed(0)
    shared_pages, private_pages = shared // PAGE, private // PAGE
    num_pages = shared_pages + requests * private_pages
    pages = torch.randperm(num_pages, generator=generator).to(torch.int32)
    own = pages[shared_pages:].view(requests, private_pages)
    table = torch.cat([pages[:shared_pages].expand(requests, -1), own], dim=1).contiguous()
    cache = (num_pages, PAGE, num_kv_heads, head_dim)
    return Case(
        torch.randn(requests, num_qo_heads, head_dim, generator=generator),
        torch.randn(cache, generator=generator),
        torch.randn(cache, generator=generator),
        table,
        torch.full((requests,), shared + private, dtype=torch.int32),
        shared_pages,
    )


def gathered(cache: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """[..., n] pages -> [..., num_kv_heads, n · page_size, head_dim]."""
    tokens = cache.index_select(0, pages.reshape(-1).long()).view(*pages.shape[:-1], -1, *cache.shape[2:])
    return tokens.transpose(-3, -2)


def sdpa(case: Case) -> torch.Tensor:
    out = torch.empty_like(case.q)
    for i, pages in enumerate(case.block_table):
        keys, values = gathered(case.k_cache, pages)[None], gathered(case.v_cache, pages)[None]
        query = case.q[i, None, :, None]
        out[i] = torch.nn.functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)[0, :, 0]
    return out


def _products(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> tuple:
    """[..., rows, D] × [..., tokens, D]: output and lse."""
    logits = torch.matmul(q * scale, keys.transpose(-1, -2))
    top = logits.amax(-1, keepdim=True)
    weights = logits.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)
    return torch.matmul(weights, values) / total, (top + total.log()).squeeze(-1)


def _flash(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> tuple:
    flat = [x.reshape(-1, *x.shape[-3:]) for x in (q, keys, values)]
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*flat, scale=scale)
    return out.reshape(*q.shape[:-1], -1), lse.reshape(q.shape[:-1])


def packed(case: Case, attend: Callable) -> torch.Tensor:
    """The trunk as one pack, the private suffixes as a batch, merged."""
    requests, num_qo_heads, head_dim = case.q.shape
    num_kv_heads = case.k_cache.shape[2]
    rows = case.q.view(requests, num_kv_heads, -1, head_dim)
    own = case.block_table[:, case.shared_pages :]
    state = attend(rows, gathered(case.k_cache, own), gathered(case.v_cache, own), case.scale)
    if case.shared_pages:
        trunk = case.block_table[0, : case.shared_pages]
        together = rows.transpose(0, 1).reshape(num_kv_heads, -1, head_dim)
        out, lse = attend(together, gathered(case.k_cache, trunk), gathered(case.v_cache, trunk), case.scale)
        group = num_qo_heads // num_kv_heads
        out = out.view(num_kv_heads, requests, group, head_dim).transpose(0, 1)
        state = merge_states(out, lse.view(num_kv_heads, requests, group).transpose(0, 1), *state)
    return state[0].reshape(requests, num_qo_heads, head_dim)


def ways(case: Case) -> dict[str, Callable[[], Any]]:
    calls: dict[str, Callable[[], Any]] = {
        "sdpa": lambda: sdpa(case),
        "torch_products": lambda: packed(case, _products),
        "torch_flash": lambda: packed(case, _flash),
    }
    for policy in ("per_query", "auto"):
        shape = (case.q.shape[1], case.k_cache.shape[2], case.q.shape[2], PAGE, torch.float32)
        attention = BatchAttention(AttentionConfig(*shape, policy=policy), device="cpu")
        plan = attention.plan(case.block_table, case.seq_lens)
        out = torch.empty_like(case.q)
        calls[f"trunkattn {policy}"] = partial(attention.run, plan, case.q, case.k_cache, case.v_cache, out)
    return calls


def main() -> None:
    results = {}
    for name, (requests, shared, private, num_qo_heads, num_kv_heads, head_dim) in CASES.items():
        case = make_case(requests, shared, private, (num_qo_heads, num_kv_heads, head_dim))
        expected, _ = paged_attention(case.q, case.k_cache, case.v_cache, case.block_table, case.seq_lens)
        rows = {}
        for way, call in ways(case).items():
            error = (call().double() - expected).abs().max().item()
            assert error < 1e-5, f"{name}, {way}: error {error}"
            rows[way] = time_ms(call) | {"max_error": error}
        results[name] = rows
        base = rows["sdpa"]["median_ms"]
        print(
            name,
            *(f"{way} {r['median_ms']:.2f} ms ({base / r['median_ms']:.1f}×)" for way, r in rows.items()),
            sep="\n  ",
        )
    print(write_result("cpu-attention", {"page_size": PAGE, "dtype": "float32", "cases": results}))


if __name__ == "__main__":
    no_options(__doc__)
    with torch.inference_mode():
        main()
