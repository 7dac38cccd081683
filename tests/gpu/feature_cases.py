"""Features of attention in a table that holds each pair of them."""

from dataclasses import dataclass, replace

import torch

from benchmarks.workloads import PagedBatch
from trunkattn import AttentionConfig

from ..attention.cases import Step, random_step


@dataclass(frozen=True)
class Features:
    """One row of the pairwise table."""

    head_dim: int
    head_dim_v: int
    group: int
    page_size: int
    several: bool  # query tokens of a request
    window: int | None
    soft_cap: float | None
    sinks: bool
    return_lse: bool
    dtype: torch.dtype
    kv_dtype: torch.dtype
    layout: str
    scales: bool

    def step(self, batch: PagedBatch) -> Step:
        config = AttentionConfig(
            2 * self.group,
            2,
            self.head_dim,
            self.page_size,
            self.dtype,
            head_dim_v=self.head_dim_v,
            kv_dtype=self.kv_dtype,
            logits_soft_cap=self.soft_cap,
            sinks=self.sinks,
        )
        options: dict[str, object] = {}
        if self.sinks:
            options["sinks"] = torch.linspace(-2, 3, config.num_qo_heads)
        if self.scales:
            options |= {"k_scale": torch.tensor([0.5, 1.5]), "v_scale": torch.tensor([1.25, 0.75])}
        step = random_step(5, config, batch, None, self.layout, **options)
        return replace(step, window=self.window)


F32, F16, B16 = torch.float32, torch.float16, torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# No bfloat16 q: the interpreter multiplies bit patterns of bfloat16 tiles as if they were integers.
# Each pair of values of any two columns is in at least one row (head_dim goes with head_dim_v, dtype with kv_dtype).
TABLE = (
    Features(192, 192, 16, 16, True, None, None, False, False, F16, B16, "plain", False),
    Features(96, 64, 1, 3, False, None, 5.0, True, True, F32, F16, "sliced", True),
    Features(64, 64, 5, 1, True, 21, None, True, False, F16, E4M3, "heads_first", True),
    Features(128, 128, 7, 128, False, 21, 5.0, False, True, F32, F32, "k_and_v_in_one_row", False),
    Features(256, 256, 16, 16, False, 21, 5.0, True, True, F32, E5M2, "plain", True),
    Features(80, 80, 7, 128, True, None, None, True, False, F16, F16, "k_and_v_in_one_row", True),
    Features(192, 128, 5, 1, False, None, 5.0, False, True, F16, F16, "heads_first", False),
    Features(256, 256, 1, 3, True, 21, None, False, False, F32, E5M2, "sliced", False),
    Features(96, 64, 7, 1, True, 21, None, False, True, F32, F16, "plain", False),
    Features(64, 64, 7, 16, False, None, 5.0, False, False, F16, E4M3, "sliced", False),
    Features(128, 128, 5, 3, True, None, None, True, False, F32, F32, "plain", True),
    Features(192, 192, 1, 1, False, 21, 5.0, True, True, F16, B16, "k_and_v_in_one_row", True),
    Features(80, 80, 1, 128, False, 21, None, True, True, F16, E4M3, "plain", False),
    Features(192, 128, 16, 3, True, 21, None, True, False, F16, E4M3, "k_and_v_in_one_row", True),
    Features(80, 80, 16, 1, True, None, 5.0, False, True, F32, F32, "sliced", True),
    Features(96, 64, 5, 16, True, None, None, True, False, F32, F16, "k_and_v_in_one_row", True),
    Features(192, 192, 7, 3, False, None, None, False, False, F32, E5M2, "heads_first", False),
    Features(64, 64, 16, 128, True, 21, 5.0, True, True, F32, F16, "heads_first", True),
    Features(256, 256, 5, 128, True, None, None, False, False, F16, B16, "sliced", True),
    Features(128, 128, 1, 16, False, 21, 5.0, False, False, F16, F16, "heads_first", True),
    Features(192, 128, 1, 16, True, 21, None, False, True, F32, F32, "sliced", False),
    Features(64, 64, 16, 3, False, None, None, True, False, F16, F16, "plain", False),
    Features(80, 80, 7, 3, True, 21, 5.0, True, True, F16, B16, "heads_first", True),
    Features(96, 64, 16, 128, False, 21, None, True, True, F32, F32, "heads_first", True),
    Features(64, 64, 1, 128, True, 21, None, True, True, F32, E5M2, "k_and_v_in_one_row", True),
    Features(192, 192, 5, 128, True, 21, 5.0, True, False, F16, F16, "sliced", True),
    Features(128, 128, 5, 1, False, None, None, False, True, F32, E5M2, "sliced", False),
    Features(192, 128, 7, 128, False, 21, None, True, True, F16, B16, "plain", False),
    Features(256, 256, 7, 1, True, 21, None, True, True, F32, F32, "k_and_v_in_one_row", False),
    Features(80, 80, 5, 16, True, 21, None, False, True, F32, E5M2, "plain", False),
    Features(256, 256, 7, 3, False, None, 5.0, True, True, F16, F16, "heads_first", False),
    Features(128, 128, 16, 16, True, 21, None, False, False, F16, B16, "k_and_v_in_one_row", True),
    Features(256, 256, 16, 3, False, 21, 5.0, False, True, F32, F16, "heads_first", True),
    Features(96, 64, 1, 1, False, 21, 5.0, True, True, F16, F16, "plain", False),
    Features(192, 128, 7, 128, True, 21, 5.0, False, False, F32, F16, "sliced", True),
    Features(80, 80, 7, 128, False, None, 5.0, True, False, F32, F16, "sliced", True),
    Features(96, 64, 5, 16, False, None, 5.0, True, True, F16, B16, "sliced", False),
    Features(192, 192, 5, 128, True, None, None, True, True, F32, F32, "sliced", True),
    Features(256, 256, 16, 3, True, 21, None, False, False, F16, E4M3, "k_and_v_in_one_row", False),
    Features(128, 128, 16, 1, False, 21, 5.0, False, True, F16, E4M3, "plain", True),
    Features(96, 64, 7, 3, False, None, None, True, True, F16, E4M3, "heads_first", True),
    Features(96, 64, 1, 1, False, None, 5.0, True, True, F32, E5M2, "k_and_v_in_one_row", True),
    Features(192, 192, 7, 1, True, None, 5.0, False, True, F16, E4M3, "sliced", True),
    Features(128, 128, 1, 128, False, 21, None, True, False, F32, F16, "heads_first", True),
    Features(64, 64, 5, 1, True, None, None, False, False, F32, F32, "heads_first", False),
    Features(192, 192, 5, 3, True, 21, 5.0, True, False, F32, F16, "sliced", True),
    Features(192, 128, 5, 3, True, None, None, False, True, F32, E5M2, "heads_first", False),
    Features(64, 64, 7, 16, True, None, None, False, True, F16, B16, "k_and_v_in_one_row", False),
)  # fmt: skip
