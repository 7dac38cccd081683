"""Latent attention on a card as plug-ins run it, without their engines: in an engine's decode graph, and a layer by
itself."""

import math
from typing import Any

import pytest
import torch

from trunkattn import AttentionConfig, BatchAttention, Capacity
from trunkattn.gpu.mla import spec
from trunkattn.integrations.captured_run import CapturedRun
from trunkattn.integrations.sglang.device_tables import DeviceTables
from trunkattn.integrations.sglang.tables import pages
from trunkattn.reference import latent_attention

from .sglang_requests import ROWS, SLOTS, padding, place, setting
from .watching import no_waits

pytestmark = pytest.mark.gpu
HEADS, ROW, PAGE, PAGES, COLUMNS = 16, spec.LATENT_DIM + spec.ROPE_DIM, 64, 200, 12
SCALE = 192**-0.5


def config_of(page: int) -> AttentionConfig:
    options = {"dtype": torch.bfloat16, "sm_scale": SCALE, "latent_dim": spec.LATENT_DIM}
    return AttentionConfig(HEADS, 1, ROW, page, **options)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(torch.bfloat16)


def on_card(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def oracle(q: torch.Tensor, cache: torch.Tensor, *tables: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return latent_attention(q, cache, *tables, latent_dim=spec.LATENT_DIM, sm_scale=SCALE)


def batch_of(lens: list[int], shared: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """vLLM's tables of requests with so many pages in common, and behind them rows of padding without a token."""
    table = torch.zeros(ROWS, COLUMNS, dtype=torch.int32)
    for row, length in enumerate(lens):
        used = -(-length // PAGE)
        table[row, :used] = torch.arange(used) + 1 + row * (COLUMNS - 1)
        table[row, :shared] = torch.arange(shared) + 1
    padded = [*lens, *[0] * (ROWS - len(lens))]
    starts = [min(row, len(lens)) for row in range(ROWS + 1)]
    return table.cuda(), on_card(padded), on_card(starts)


@pytest.mark.parametrize("merges", [False, True])
def test_a_full_graph_of_vllm_writes_zeros_to_padding(merges: bool) -> None:
    """merges: ranks share each request, so that the graph gives log-sum-exps too."""
    torch.manual_seed(0)
    attention = BatchAttention(config_of(PAGE), "cuda", Capacity(ROWS, ROWS, COLUMNS, PAGES, 1))
    q, cache = (random(ROWS, HEADS, spec.LATENT_DIM), random(ROWS, HEADS, spec.ROPE_DIM)), random(PAGES, PAGE, ROW)
    tables = batch_of([1] * ROWS, 0)
    plan, nothing = attention.plan(*tables), torch.zeros(ROWS, 1, dtype=torch.bool, device="cuda")

    def layer() -> tuple[torch.Tensor, torch.Tensor | None]:
        out = q[0].new_zeros(ROWS, HEADS, spec.LATENT_DIM)
        if not merges:
            attention.run(plan, q, cache, None, out=out)
            return out, None
        _, lse = attention.run(plan, q, cache, None, out=out, return_lse=True)
        return out.masked_fill_(nothing[..., None], 0), lse.masked_fill_(nothing, -math.inf)

    layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = layer()
    for lens, shared in (([700, 650, 600], 8), ([5], 0), ([640] * ROWS, 9)):
        step = batch_of(lens, shared)
        for buffer, values in zip(tables, step, strict=True):
            buffer.copy_(values)
        nothing.copy_(tables[1][:, None] == 0)
        with no_waits():  # a step does not wait for the device
            attention.plan(*tables, into=plan)
            graph.replay()
        attention.check()
        count = len(lens)
        whole = torch.cat(q, -1)[:count]
        right, right_lse = oracle(whole, cache, step[0][:count], step[1][:count], step[2][: count + 1])
        torch.testing.assert_close(out[:count].double(), right, rtol=0.1, atol=0.05)
        assert (out[count:] == 0).all()
        if lse is not None:
            torch.testing.assert_close(lse[:count].double(), right_lse, rtol=1e-3, atol=1e-3)
            assert (lse[count:] == -torch.inf).all()


def test_a_layer_by_itself_takes_a_pair_of_queries() -> None:
    """In steps without an engine's graph."""
    torch.manual_seed(0)
    attention = BatchAttention(config_of(PAGE), "cuda", Capacity(ROWS, ROWS, COLUMNS, PAGES, 1))
    run, plan = CapturedRun(attention), None
    caches = [random(PAGES, PAGE, ROW) for _ in range(2)]
    for lens, shared in (([700, 650, 600], 8), ([5], 0), ([640] * ROWS, 9)):
        step = tuple(each[: len(lens) + extra] for each, extra in zip(batch_of(lens, shared), (0, 0, 1), strict=True))
        plan = attention.plan(*step, into=plan)
        q = random(len(lens), HEADS, ROW)
        for cache in caches * 3:
            out = torch.full((len(lens), HEADS, spec.LATENT_DIM), math.nan, dtype=torch.bfloat16, device="cuda")
            run(plan, (q[..., : spec.LATENT_DIM], q[..., spec.LATENT_DIM :]), cache, None, out)
            torch.testing.assert_close(out.double(), oracle(q, cache, *step)[0], rtol=0.1, atol=0.05)


@pytest.mark.parametrize("page", [1, 64])
def test_a_graph_of_sglang_plans_and_attends(page: int) -> None:
    """Over its pool of rows, with tables that one launch fills; rows of padding have a token in the page of none."""
    requests, _ = setting(page)
    tables, pool = DeviceTables(requests, ROWS), random(SLOTS, 1, ROW)
    cache = pages(pool, page)[:, :, 0]
    attention = BatchAttention(config_of(page), "cuda", Capacity(ROWS, ROWS, requests.max_pages, len(cache), 1))
    q = random(ROWS, HEADS, ROW)
    out = q.new_empty(ROWS, HEADS, spec.LATENT_DIM)
    step = tables.tables[False], tables.seq_lens
    tables.fill(*padding([]), None)
    plan = attention.plan(*step)
    for _ in range(2):
        attention.plan(*step, into=plan)
        attention.run(plan, q, cache, None, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention.plan(*step, into=plan)
        attention.run(plan, q, cache, None, out=out)
    for lens, shared in (([640] * 8, 512), ([600 + i for i in range(9)], 576), ([5], 0), ([300, 17, 650], 0)):
        place(requests.req_to_token, lens, page, shared // page)
        q.normal_()
        rows, padded = padding(lens)
        with no_waits():
            tables.fill(rows, padded, None)
            graph.replay()
        attention.check()
        torch.testing.assert_close(out.double(), oracle(q, cache, *step)[0], rtol=0.1, atol=0.05)
        assert out.isfinite().all(), "padded rows are harmless"
