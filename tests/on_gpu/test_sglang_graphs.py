"""SGLang's decode graphs on a card, without SGLang: one launch fills tables, and a graph plans and attends."""

from contextlib import nullcontext

import pytest
import torch

from trunkattn import AttentionConfig, BatchAttention, Capacity, PromptChunks
from trunkattn.integrations.prompt_plans import PromptRoom
from trunkattn.integrations.sglang.device_tables import DeviceTables
from trunkattn.reference import paged_attention

from .sglang_requests import DIM, HEADS, KV_HEADS, ROWS, padding, place, setting
from .watching import no_waits

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("window", [None, 100])
def test_a_graph_plans_and_attends(page: int, window: int | None) -> None:
    requests, caches = setting(page)
    tables = DeviceTables(requests, ROWS)
    config = AttentionConfig(HEADS, KV_HEADS, DIM, page_size=page, dtype=torch.bfloat16)
    attention = BatchAttention(config, "cuda", Capacity(ROWS, ROWS, requests.max_pages, len(caches[0]), 1))
    q = torch.randn(ROWS, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(q)
    step = tables.tables[False], tables.seq_lens

    tables.fill(*padding([]), None)
    plan = attention.plan(*step, sliding_window=window)
    for _ in range(2):
        attention.plan(*step, sliding_window=window, into=plan)
        attention.run(plan, q, *caches, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention.plan(*step, sliding_window=window, into=plan)
        attention.run(plan, q, *caches, out=out)
    for lens, shared in (([640] * 16, 512), ([600 + i for i in range(9)], 592), ([5], 0), ([300, 17, 650], 0)):
        place(requests.req_to_token, lens, page, shared // page)
        q.normal_()
        rows, padded = padding(lens)
        with no_waits():  # a step does not wait for the device
            tables.fill(rows, padded, None)
            graph.replay()
        attention.check()
        expected, _ = paged_attention(q, *caches, *step, sliding_window=window)
        assert float((out.double() - expected).abs().max()) < 0.03
        assert out.isfinite().all(), "padded rows are harmless"


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("window", [None, 100])
def test_prompts_are_planned_without_a_wait(page: int, window: int | None) -> None:
    """Steps of prompts alone, in a plan that has room for no decode to speak of."""
    requests, caches = setting(page)
    tables = DeviceTables(requests, ROWS)
    config = AttentionConfig(HEADS, KV_HEADS, DIM, page_size=page, dtype=torch.bfloat16)
    decodes = Capacity(ROWS, ROWS, requests.max_pages, len(caches[0]), 1)
    attention, plan = PromptRoom(8, 1300).attention(config, torch.device("cuda"), decodes), None
    steps = [([640], [640]), ([5, 640, 1], [300, 640, 17]), ([64] * 8, [600 + i for i in range(8)]), ([1], [1])]
    for queries, lens in (*steps, *steps):
        place(requests.req_to_token, lens, page, 0)
        rows, count = torch.arange(1, len(lens) + 1, device="cuda"), len(lens)
        chunks = PromptChunks(0, *(torch.tensor(each, dtype=torch.int32) for each in (queries, lens)), 0)
        on_device = torch.tensor(lens, device="cuda"), torch.tensor(queries, dtype=torch.int32, device="cuda")
        q = torch.randn(sum(queries), HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        out = torch.full_like(q, torch.nan)
        torch.cuda.synchronize()
        with no_waits() if plan else nullcontext():
            tables.fill(rows, on_device[0], None, on_device[1])
            step = tables.tables[False][:count], tables.seq_lens[:count], tables.query_start_loc[: count + 1]
            plan = attention.plan(*step, sliding_window=window, into=plan, chunks=chunks)
            attention.run(plan.only("chunks"), q, *caches, out=out)
        attention.check()
        expected, _ = paged_attention(q, *caches, *step, sliding_window=window)
        assert float((out.double() - expected).abs().max()) < 0.03
