"""The oracle against torch's own attention in float64, and its options against their definitions."""

import math
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from trunkattn.reference import paged_attention

PAGE_SIZE, NUM_KV_HEADS, GROUP_SIZE, HEAD_DIM, HEAD_DIM_V = 4, 2, 3, 8, 6
NUM_QO_HEADS = NUM_KV_HEADS * GROUP_SIZE
LENS = (9, 1, 16)


def case(query_lens: tuple[int, ...]) -> dict[str, Any]:
    """Three requests of 9, 1 and 16 tokens, with NaN in every slot that none of them has."""
    generator = torch.Generator().manual_seed(0)
    k_cache, v_cache = (
        torch.randn(10, PAGE_SIZE, NUM_KV_HEADS, d, generator=generator) for d in (HEAD_DIM, HEAD_DIM_V)
    )
    block_table = torch.tensor([[7, 2, 5, -1], [0, 99, -1, -1], [7, 4, 9, 1]], dtype=torch.int32)
    used = torch.zeros(10, PAGE_SIZE, dtype=torch.bool)
    for row, length in enumerate(LENS):
        for token in range(length):
            used[block_table[row, token // PAGE_SIZE], token % PAGE_SIZE] = True
    k_cache[~used], v_cache[~used] = math.nan, math.nan
    return {
        "q": torch.randn(sum(query_lens), NUM_QO_HEADS, HEAD_DIM, generator=generator),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "block_table": block_table,
        "seq_lens": torch.tensor(LENS, dtype=torch.int32),
        "query_start_loc": torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0),
    }


def gathered(inputs: dict[str, Any], row: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [Hq, queries, D], k and v [Hq, tokens, D] of one request in float64, KV heads repeated for their groups."""
    begin, end = inputs["query_start_loc"][row : row + 2].tolist()
    pages = inputs["block_table"][row][: -(-LENS[row] // PAGE_SIZE)].long()
    q = inputs["q"][begin:end].transpose(0, 1).double()
    k, v = (inputs[name][pages].flatten(0, 1)[: LENS[row]].transpose(0, 1).double() for name in ("k_cache", "v_cache"))
    return q, k.repeat_interleave(GROUP_SIZE, 0), v.repeat_interleave(GROUP_SIZE, 0)


def visible(num_queries: int, length: int, window: int | None = None) -> torch.Tensor:
    """[num_queries, length]: a causal band along the diagonal that ends in the last corner."""
    seen = torch.ones(num_queries, length, dtype=torch.bool).tril(length - num_queries)
    return seen if window is None else seen.triu(length - num_queries - window + 1)


@pytest.mark.parametrize("query_lens", [(1, 1, 1), (4, 1, 16), (9, 0, 5)])
@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("sm_scale", [None, 0.7])
def test_the_oracle_equals_torch(query_lens: tuple[int, ...], window: int | None, sm_scale: float | None) -> None:
    inputs = case(query_lens)
    out, lse = paged_attention(**inputs, sm_scale=sm_scale, sliding_window=window)
    assert (out.dtype, lse.dtype) == (torch.float64, torch.float64)
    for row, count in enumerate(query_lens):
        begin = int(inputs["query_start_loc"][row])
        q, k, v = gathered(inputs, row)
        mask = visible(count, LENS[row], window)
        expected = scaled_dot_product_attention(q, k, v, mask, scale=sm_scale).transpose(0, 1)
        torch.testing.assert_close(out[begin : begin + count], expected, rtol=1e-13, atol=1e-13)
        scale = HEAD_DIM**-0.5 if sm_scale is None else sm_scale
        logits = (q @ k.mT * scale).masked_fill(~mask, -math.inf)
        torch.testing.assert_close(lse[begin : begin + count], logits.logsumexp(-1).T, rtol=1e-13, atol=1e-13)


def test_without_query_starts_each_request_decodes_one_token() -> None:
    inputs = case((1, 1, 1))
    expected = paged_attention(**inputs)
    del inputs["query_start_loc"]
    assert all(torch.equal(a, b) for a, b in zip(paged_attention(**inputs), expected, strict=True))


def test_one_token_sees_itself() -> None:
    inputs = case((1, 1, 1))
    out, lse = paged_attention(**inputs)
    value, key = inputs["v_cache"][0, 0].double(), inputs["k_cache"][0, 0].double()
    torch.testing.assert_close(out[1], value.repeat_interleave(GROUP_SIZE, 0))
    logits = (inputs["q"][1].double() * key.repeat_interleave(GROUP_SIZE, 0)).sum(-1) / math.sqrt(HEAD_DIM)
    torch.testing.assert_close(lse[1], logits)


def test_a_soft_cap_bends_the_logits() -> None:
    inputs = case((3, 1, 5))
    out, lse = paged_attention(**inputs, logits_soft_cap=0.5)
    q, k, v = gathered(inputs, 2)
    logits = 0.5 * torch.tanh(q @ k.mT / math.sqrt(HEAD_DIM) / 0.5)
    logits = logits.masked_fill(~visible(5, LENS[2]), -math.inf)
    torch.testing.assert_close(out[4:], (logits.softmax(-1) @ v).transpose(0, 1))
    torch.testing.assert_close(lse[4:], logits.logsumexp(-1).T)


def test_a_sink_takes_weight_and_has_no_value() -> None:
    inputs = case((3, 1, 5))
    sinks = torch.randn(NUM_QO_HEADS, generator=torch.Generator().manual_seed(1))
    plain, plain_lse = paged_attention(**inputs)
    out, lse = paged_attention(**inputs, sinks=sinks)
    assert torch.equal(lse, plain_lse), "sinks are not in the log-sum-exp"
    q, k, v = gathered(inputs, 2)
    logits = (q @ k.mT / math.sqrt(HEAD_DIM)).masked_fill(~visible(5, LENS[2]), -math.inf)
    extra = sinks.double()[:, None, None].expand(-1, 5, 1)
    weights = torch.cat([logits, extra], dim=-1).softmax(-1)[..., :-1]
    torch.testing.assert_close(out[4:], (weights @ v).transpose(0, 1))
    assert not torch.allclose(out, plain)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"block_table": [[7, -2, 5, -1]]}, r"block_table\[0, 1\]=-2: expected a page id from 0 to 9"),
        ({"block_table": [[7, 2, 10, -1]]}, r"block_table\[0, 2\]=10: expected a page id from 0 to 9"),
        ({"seq_lens": [2]}, r"seq_lens\[0\]=2: expected its 3 query tokens to 16, block_table's columns × page_size"),
        ({"seq_lens": [17]}, r"seq_lens\[0\]=17: expected its 3 query tokens to 16"),
        ({"query_start_loc": [-3, 3]}, r"query_start_loc\[0:2\]=\[-3, 3\]: expected ascending numbers from 0 to 3"),
        ({"query_start_loc": [0, 4]}, r"query_start_loc\[0:2\]=\[0, 4\]: expected ascending numbers from 0 to 3"),
    ],
)
def test_what_is_out_of_bounds_is_refused(changed: dict[str, list[Any]], message: str) -> None:
    """torch would count negative pages, lengths and starts from the end."""
    inputs = case((3, 1, 1))
    one = {"q": inputs["q"][:3], "block_table": inputs["block_table"][:1], "seq_lens": torch.tensor([9])}
    one["query_start_loc"] = torch.tensor([0, 3])
    paged_attention(**(inputs | one))
    with pytest.raises(ValueError, match=message):
        paged_attention(**(inputs | one | {name: torch.tensor(value) for name, value in changed.items()}))


def test_a_window_of_no_token_is_refused() -> None:
    with pytest.raises(ValueError, match="sliding_window=0: expected an integer of at least 1"):
        paged_attention(**case((1, 1, 1)), sliding_window=0)
