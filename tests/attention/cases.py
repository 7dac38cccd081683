"""One step of one layer: a batch, caches of any layout with NaN in every slot that nothing may read, the oracle."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st

from benchmarks.workloads import PagedBatch
from trunkattn import AttentionConfig, BatchAttention, Plan
from trunkattn.reference import paged_attention

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
LAYOUTS = ("plain", "heads_first", "sliced", "k_and_v_in_one_row", "k_and_v_in_one_page")
Result = tuple[torch.Tensor, torch.Tensor]  # out, lse
SEEDS = st.integers(0, 2**32 - 1)


def fraction(divisor: int) -> int:
    """Examples of a slow property test: a fraction of what the loaded profile gives others."""
    assert settings.default is not None
    return max(10, settings.default.max_examples // divisor)


def scales(num_kv_heads: int, draw: st.DrawFn) -> dict[str, Any]:
    """For q, k and v: none, a number, a tensor of one element or one number per KV head."""
    number = st.floats(0.1, 4)
    kinds = st.one_of(
        st.none(),
        number,
        st.builds(torch.tensor, number),
        st.lists(number, min_size=num_kv_heads, max_size=num_kv_heads).map(torch.tensor),
    )
    drawn = {name: draw(kinds) for name in ("q_scale", "k_scale", "v_scale")}
    return {name: scale for name, scale in drawn.items() if scale is not None}


@dataclass(frozen=True)
class Step:
    """What `BatchAttention.plan` and `.run` are given. options: scales and sinks."""

    config: AttentionConfig
    batch: PagedBatch
    window: int | None
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def tables(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """block_table, seq_lens and query_start_loc."""
        batch = self.batch
        starts = torch.from_numpy(batch.query_start_loc)
        return torch.from_numpy(batch.block_table), torch.from_numpy(batch.seq_lens), starts

    def plan(self, attention: BatchAttention) -> Plan:
        return attention.plan(*self.tables, self.window, num_pages=self.batch.num_pages)

    @property
    def caches(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """k_cache and v_cache as `run` takes them: a latent cache is one."""
        return (self.k_cache, self.v_cache) if self.config.latent_dim is None else (self.k_cache[:, :, 0], None)

    def run(self, attention: BatchAttention, plan: Plan | None = None, out: torch.Tensor | None = None) -> Result:
        plan = self.plan(attention) if plan is None else plan
        result = attention.run(plan, self.q, *self.caches, out, return_lse=True, **self.options)
        assert isinstance(result, tuple)
        return result

    def scaled(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, keys and values in `dtype`, multiplied by their scales; 0 where the caches hold NaN."""
        heads, scaled = self.config.num_kv_heads, []
        for name, tensor in (("q_scale", self.q), ("k_scale", self.k_cache), ("v_scale", self.v_cache)):
            scale = torch.as_tensor(self.options.get(name, 1.0)).double().expand(heads)
            per_head = scale.repeat_interleave(tensor.shape[-2] // heads)
            scaled.append((tensor.double().nan_to_num(nan=0.0) * per_head[:, None]).to(dtype))
        return scaled[0], scaled[1], scaled[2]

    def oracle(self) -> Result:
        return paged_attention(
            *self.scaled(torch.float64),
            *self.tables,
            sm_scale=self.config.sm_scale,
            sliding_window=self.window,
            logits_soft_cap=self.config.logits_soft_cap,
            sinks=self.options.get("sinks"),
        )

    def plain(self, dtype: torch.dtype) -> Result:
        """The textbook formula in PyTorch, request by request, every intermediate in `dtype`."""
        q, keys, values = self.scaled(dtype)
        out = torch.zeros(len(q), self.config.num_qo_heads, self.config.value_dim, dtype=dtype)
        lse = torch.zeros(len(q), self.config.num_qo_heads, dtype=dtype)
        group = self.config.group_size
        starts = self.batch.query_start_loc.tolist()
        for row, length in enumerate(self.batch.seq_lens.tolist()):
            begin, end = starts[row : row + 2]
            if begin == end:
                continue
            pages = torch.from_numpy(self.batch.block_table[row][: -(-length // self.batch.page_size)]).long()
            k, v = (cache[pages].flatten(0, 1)[:length].transpose(0, 1) for cache in (keys, values))
            logits = self._logits(q[begin:end].transpose(0, 1), k.repeat_interleave(group, 0))
            lse[begin:end] = logits.logsumexp(-1).T
            if "sinks" in self.options:
                extra = self.options["sinks"].to(dtype)[:, None, None].expand(-1, end - begin, 1)
                logits = torch.cat([logits, extra], dim=-1)
            weights = logits.softmax(-1)[..., :length]
            out[begin:end] = _product(weights, v.repeat_interleave(group, 0)).transpose(0, 1)
        return out, lse

    def _logits(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """[num_qo_heads, queries, tokens] of one request."""
        count, length, cap = q.shape[1], k.shape[1], self.config.logits_soft_cap
        scale = 1 / math.sqrt(self.config.head_dim) if self.config.sm_scale is None else self.config.sm_scale
        logits = _product(q, k.mT) * scale
        if cap is not None:
            logits = cap * torch.tanh(logits / cap)
        seen = torch.ones(count, length, dtype=torch.bool).tril(length - count)
        if self.window is not None:
            seen = seen.triu(length - count - self.window + 1)
        return logits.masked_fill(~seen, -math.inf)

    def assert_accurate(self, out: torch.Tensor, lse: torch.Tensor, added: float = 0.0) -> None:
        """The error is at most twice that of plain PyTorch in the same dtype, plus what rounding costs: of the largest
        value once in that dtype, and of the largest logit there could be in float32, in which lse is computed. added:
        what is added to a logit and taken away again, so that it is rounded, too."""
        (q, keys, values), scale = self.scaled(torch.float64), self.config.sm_scale
        expected_out, expected_lse = self.oracle()
        assert (out.dtype, lse.dtype) == (self.config.dtype, torch.float32)
        logit = _largest_norm(q) * _largest_norm(keys) * (q.shape[-1] ** -0.5 if scale is None else scale) + added
        logit_error = torch.finfo(torch.float32).eps * (1 + logit)
        value_error = torch.finfo(out.dtype).eps + logit_error
        value_error *= float(values.abs().max()) if values.numel() else 0.0
        plain_out, plain_lse = self.plain(out.dtype)
        _assert_close("out", out, plain_out, expected_out, value_error)
        largest = float(expected_lse.abs().max()) if expected_lse.numel() else 0.0  # lse itself is rounded, too
        lse_error = logit_error + torch.finfo(torch.float32).eps * largest
        if out.dtype != torch.float32:
            plain_lse = self.plain(torch.float32)[1]
        _assert_close("lse", lse, plain_lse, expected_lse, lse_error)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b with float32 sums; torch's own 16-bit product does that too, but takes a hundred times as long on a CPU."""
    return a @ b if a.dtype == torch.float64 else (a.float() @ b.float()).to(a.dtype)


def _largest_norm(vectors: torch.Tensor) -> float:
    return float(vectors.norm(dim=-1).max()) if vectors.numel() else 0.0


def _assert_close(name: str, found: torch.Tensor, plain: torch.Tensor, expected: torch.Tensor, floor: float) -> None:
    assert found.shape == expected.shape
    if found.numel() == 0:
        return
    error, plain_error = float((found - expected).abs().max()), float((plain - expected).abs().max())
    allowed = 2 * plain_error + floor
    assert error <= allowed, f"{name}: error {error:.2g}, plain PyTorch {plain_error:.2g}, allowed {allowed:.2g}"


def random_step(
    seed: int,
    config: AttentionConfig,
    batch: PagedBatch,
    window: int | None = None,
    layout: str = "plain",
    **options: Any,
) -> Step:
    """Normally distributed q, keys and values; NaN in every slot outside the tables, and outside every window."""
    generator = torch.Generator().manual_seed(seed)
    num_tokens = int(batch.query_start_loc[-1])
    q = torch.randn(num_tokens, config.num_qo_heads, config.head_dim, generator=generator).to(config.dtype)
    caches = empty_caches(config, batch.num_pages, layout)
    readable = readable_slots(batch, window)
    for cache in caches:
        values = torch.randn(cache.shape, generator=generator)
        cache.copy_(values.masked_fill(~readable[..., None, None], math.nan).to(cache.dtype))
    return Step(config, batch, window, q, *caches, options)


def readable_slots(batch: PagedBatch, window: int | None) -> torch.Tensor:
    """[num_pages, page_size] bool: slots of tokens that a query sees."""
    readable = torch.zeros(batch.num_pages, batch.page_size, dtype=torch.bool)
    for row, (length, count) in enumerate(zip(batch.seq_lens.tolist(), batch.query_lens.tolist(), strict=True)):
        if count:
            first = 0 if window is None else max(0, length - count + 1 - window)
            tokens = torch.arange(first, length)
            pages = torch.from_numpy(batch.block_table[row])[tokens // batch.page_size].long()
            readable[pages, tokens % batch.page_size] = True
    return readable


def empty_caches(config: AttentionConfig, num_pages: int, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """[num_pages, page_size, num_kv_heads, head_dim or head_dim_v] views of storage full of NaN. The values of a latent
    cache are columns of its keys, and it has no layout of both."""
    page, heads, k_width, v_width = config.page_size, config.num_kv_heads, config.head_dim, config.value_dim

    def full(*shape: int) -> torch.Tensor:
        return torch.full(shape, math.nan).to(config.cache_dtype)

    shapes = {
        "plain": lambda width: full(num_pages, page, heads, width),
        "heads_first": lambda width: full(num_pages, heads, page, width).transpose(1, 2),
        "sliced": lambda width: full(2 * num_pages, page + 1, heads + 2, width + 3)[1::2, 1:, 1:-1, 2:-1],
    }
    if config.latent_dim is not None:
        rows = shapes.get(layout, shapes["plain"])(k_width)
        return rows, rows[..., :v_width]
    if layout == "k_and_v_in_one_row":
        both = full(num_pages, page, heads, k_width + v_width)
        return both[..., :k_width], both[..., k_width:]
    if layout == "k_and_v_in_one_page":
        width = max(k_width, v_width)
        both = full(num_pages, 2, page, heads, width)
        return both[:, 0, ..., :k_width], both[:, 1, ..., :v_width]
    return shapes[layout](k_width), shapes[layout](v_width)
