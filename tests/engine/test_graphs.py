"""Steps padded to the sizes of graphs: tokens, plans refilled in place, and logits, on a CPU, where a replay computes
the captured work anew on the same tensors."""

from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from trunkattn import AttentionConfig
from trunkattn.attention import BatchAttention, Plan
from trunkattn.config import Capacity
from trunkattn.engine import LLM, RequestOutput, SamplingParams
from trunkattn.engine.assembly import attention_config
from trunkattn.engine.graphs import EagerForward, ForwardInputs, GraphedForward, Graphs, StepArrays, Work, graph_sizes
from trunkattn.engine.runner import ModelRunner
from trunkattn.kv_cache.tensors import KVCache

NUM_TOKENS = 12
CPU = torch.device("cpu")


@pytest.mark.parametrize("largest", [1, 5, 16, 17, 256, 2048])
def test_sizes_pad_little(largest: int) -> None:
    sizes = graph_sizes(largest)
    assert list(sizes) == sorted(set(sizes)) and sizes[-1] == largest
    for tokens in range(1, largest + 1):
        size = next(size for size in sizes if size >= tokens)
        assert size - tokens < max(16, tokens / 8)
    assert {size for size in (64, 512, 1024, 2048) if size <= largest} <= set(sizes)


def step(tokens: list[int], rows: list[int], has_chunks: bool = False) -> StepArrays:
    return StepArrays(np.array(tokens), np.array(tokens) + 100, np.array(tokens) + 200, np.array(rows), has_chunks)


def test_padding_writes_nothing_and_is_forgotten() -> None:
    inputs = ForwardInputs(4, 3, CPU)
    inputs.fill(step([7, 8, 9, 10], [3, 1, 2]))
    inputs.fill(step([5, 6], [1]))
    assert inputs.token_ids.tolist() == [5, 6, 0, 0] and inputs.positions.tolist() == [105, 106, 0, 0]
    assert inputs.slots.tolist() == [205, 206, -1, -1] and inputs.logits_rows.tolist() == [1, 0, 0]


def forward(inputs: ForwardInputs) -> torch.Tensor:
    """Logits that name the token and the padded size they were computed at."""
    return torch.stack(
        [inputs.token_ids[inputs.logits_rows], torch.full_like(inputs.logits_rows, len(inputs.slots))], 1
    )


def test_a_size_is_captured_once_and_larger_steps_run_as_they_are() -> None:
    captures, replays = [], []

    def capture(work: Work) -> Work:
        captures.append(work)

        def replay() -> None:
            replays.append(work)
            work()

        return replay

    graphed = GraphedForward(forward, CPU, Graphs((2, 4), 3, capture))
    assert graphed(step([11, 12, 13], [2, 0])).tolist() == [[13, 4], [11, 4]]
    assert (len(captures), len(replays)) == (1, 0)
    assert graphed(step([21, 22, 23, 24], [0, 1, 3])).tolist() == [[21, 4], [22, 4], [24, 4]]
    assert graphed(step([31], [])).tolist() == []
    assert graphed(step([41, 42], [1])).tolist() == [[42, 2]]
    assert (len(captures), len(replays)) == (2, 2) and replays == captures
    assert graphed(step([1, 2, 3, 4, 5], [4])).tolist() == [[5, 5]]
    assert graphed(step([1, 2, 3, 4], [0, 1, 2, 3])).tolist() == [[token, 4] for token in (1, 2, 3, 4)], "4 rows, not 3"
    assert EagerForward(forward, CPU)(step([1, 2, 3, 4, 5], [4])).tolist() == [[5, 5]]
    assert (len(captures), len(replays)) == (2, 2)


def test_steps_with_prompt_chunks_have_graphs_of_their_own() -> None:
    captures: list[Work] = []
    graphed = GraphedForward(
        lambda inputs: torch.full((len(inputs.logits_rows), 1), int(inputs.has_chunks)),
        CPU,
        Graphs((2, 4, 8), 3, lambda work: captures.append(work) or work),
    )
    for has_chunks in (True, False, True, False):
        assert graphed(step([1, 2, 3], [2], has_chunks)).tolist() == [[has_chunks]]
        assert graphed(step([1, 2, 3, 4, 5, 6], [4], has_chunks)).tolist() == [[1]], "more tokens than decodes have"
        assert graphed(step([0] * 9, [4], has_chunks)).tolist() == [[has_chunks]], "too large for a graph"
    assert len(captures) == 3


def test_warm_up_captures_with_chunks_and_as_far_as_decodes_go_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def another(plan: Plan, part: str) -> Plan:
        """As if there were launches for chunks."""
        return Plan(plan.step, plan.owner, plan.last_page, plan.window, plan.refills)

    monkeypatch.setattr(Plan, "only", another)
    config = AttentionConfig(2, 1, 16, 4, torch.float32)
    sizes: list[int] = []

    def model(*, input_ids: torch.Tensor, logits_to_keep: torch.Tensor, **_: Any) -> SimpleNamespace:
        sizes.append(input_ids.shape[1])
        return SimpleNamespace(logits=torch.zeros(1, len(logits_to_keep), 7))

    attention = BatchAttention(config, "cpu", Capacity(5, 24, 6, 30))
    cache = KVCache(
        num_layers=1, num_pages=30, page_size=4, num_kv_heads=1, head_dim=16, dtype=torch.float32, device=CPU
    )
    captures: list[Work] = []
    graphs = Graphs((2, 4, 8, 24), 5, lambda work: captures.append(work) or work)
    ModelRunner(model, attention, [None], cache, 5, 24, graphs).warm_up()
    assert sizes == [24, 8, 8, 4, 4, 2, 2] and len(captures) == len(sizes)


@pytest.mark.parametrize("max_num_seqs, budget", [(1, 1), (1, 24), (3, 3), (3, 24), (64, 64), (64, 2000)])
def test_warm_up_plans_steps_of_every_kind(monkeypatch: pytest.MonkeyPatch, max_num_seqs: int, budget: int) -> None:
    """What the planner compiles for chunks, for decodes, for both and for shared pages is not left to a user's step."""
    kinds = set()
    plan = BatchAttention.plan

    def noted(self: BatchAttention, table: torch.Tensor, lens: torch.Tensor, starts: torch.Tensor, **given: Any) -> Any:
        query_lens = starts.diff().tolist()
        alike = len(table) > 1 and bool((table[0] == table[1]).all())
        kinds.add((alike, max(query_lens, default=0) > 1, 1 in query_lens))
        return plan(self, table, lens, starts, **given)

    monkeypatch.setattr(BatchAttention, "plan", noted)
    cache = KVCache(
        num_layers=1, num_pages=30, page_size=4, num_kv_heads=1, head_dim=16, dtype=torch.float32, device=CPU
    )
    attention = BatchAttention(
        AttentionConfig(2, 1, 16, 4, torch.float32), "cpu", Capacity(max_num_seqs, budget, 6, 30)
    )
    ModelRunner(None, attention, [None, 7], cache, max_num_seqs, 24).warm_up()
    kinds -= {(False, False, False)}  # of no requests
    chunks = {(True, False), (True, True)} if max_num_seqs > 1 else {(True, False)}
    want = {(False, True)} | (chunks if budget >= 2 * max_num_seqs or budget >= 8 else set())
    assert kinds == {(alike, *kind) for kind in want for alike in ((False, True) if max_num_seqs > 1 else (False,))}


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(1)
    trunk = rng.integers(1, 256, 37).tolist()
    return [[*trunk, *rng.integers(1, 256, length).tolist()] for length in (1, 4, 30)] + [
        rng.integers(1, 256, length).tolist() for length in (1, 9, 61)
    ]


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("budget", [9, 40])
def test_answers_from_padded_steps_and_refilled_plans(
    tiny_model: Callable[[str], Any],
    assert_greedy: Callable[[Any, Sequence[RequestOutput], int], None],
    name: str,
    budget: int,
) -> None:
    model = tiny_model(name)
    llm = LLM(model.path, page_size=4, num_pages=44, max_num_seqs=8, max_num_batched_tokens=max(8, budget))
    limits = llm.engine.limits
    replayed: Counter[Work] = Counter()

    def capture(work: Work) -> Work:
        def replay() -> None:
            replayed[work] += 1
            work()

        return replay

    capacity = Capacity(8, budget, -(-limits.max_model_len // 4), 44)
    attention = BatchAttention(attention_config(llm.info, llm.config), "cpu", capacity)
    graphs = Graphs(graph_sizes(budget), 8, capture)
    windows = llm.info.geometry.windows
    runner = ModelRunner(llm.model, attention, windows, llm.kv_cache, 8, limits.max_model_len, graphs)
    llm.engine.runner = runner
    runner.warm_up()
    outputs = llm.generate(prompts(), SamplingParams(temperature=0, max_tokens=NUM_TOKENS))
    several = llm.generate(prompts(), SamplingParams(temperature=0, max_tokens=NUM_TOKENS, n=2))
    assert_greedy(model, outputs + several, NUM_TOKENS)
    assert llm.stats.preemptions > 0 and llm.stats.prefix_cache_hits > 0
    assert len(replayed) > 3 and replayed.total() == llm.stats.steps, "every step replays what warm_up captured"
