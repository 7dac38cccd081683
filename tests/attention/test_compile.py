"""Code around the library may be compiled by torch: the kernels stay as they are."""

import torch

from trunkattn import AttentionConfig, BatchAttention, merge_states, write_kv

TABLE = torch.tensor([[0, 1, 2, 3 + row] for row in range(6)], dtype=torch.int32)
LENS = torch.full((6,), 60, dtype=torch.int32)
SLOTS = torch.arange(6)


def test_a_step_within_compiled_code_gives_the_same() -> None:
    attention = BatchAttention(AttentionConfig(4, 2, 32, 16, torch.float32), "cpu")
    plan = attention.plan(TABLE, LENS)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(6, 4, 32, generator=generator)
    k_cache, v_cache = torch.randn(2, 9, 16, 2, 32, generator=generator)

    def layer(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        write_kv(q[:, :2] + 1.0, q[:, 2:], k_cache, v_cache, SLOTS)
        out, lse = attention.run(plan, q * 2.0, k_cache, v_cache, return_lse=True)
        again, other = attention.run(attention.plan(TABLE, LENS), q, k_cache, v_cache, return_lse=True)
        return merge_states(out + 1.0, lse, again, other)

    expected = layer(q, k_cache.clone(), v_cache.clone())
    found = torch.compile(layer, backend="eager")(q, k_cache.clone(), v_cache.clone())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
