"""A batch explained: each policy's plan reads what the planner says, and its time is the planner's own prediction."""

import io
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console

from benchmarks.workloads.pat_trees import PAT_TREES
from trunkattn.analysis.batch import PagedBatch
from trunkattn.analysis.explain import Explanation, explain
from trunkattn.analysis.explain_report import explanation_dict, forest_svg, print_explanation, verdict
from trunkattn.analysis.list_price import list_ns
from trunkattn.analysis.model_shape import model_shape
from trunkattn.analysis.prices import Prices
from trunkattn.analysis.trees import parse_tree, tree_batch
from trunkattn.gpu.attention import GpuBackend
from trunkattn.gpu.cards import card_named
from trunkattn.gpu.kernel import kernels_of
from trunkattn.gpu.step_choice import StepChoice
from trunkattn.gpu.steps import make_step_planner
from trunkattn.names import POLICIES
from trunkattn.planner.planner import StepTables

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def prices() -> Prices:
    return Prices(model_shape("llama-3-8b"), card_named("H100"))


def explained(tree: str, prices: Prices) -> tuple[PagedBatch, Explanation]:
    batch = tree_batch(parse_tree(tree), prices.page_size)
    return batch, explain((batch.block_table, batch.seq_lens), prices)


@pytest.mark.parametrize("tree", PAT_TREES)
def test_a_tile_list_is_priced_as_the_planner_prices_it(tree: str, prices: Prices) -> None:
    batch = tree_batch(parse_tree(tree), 16)
    planner = make_step_planner(prices.config, kernels_of(prices.config, prices.card), prices.card, CPU, None)
    planned = planner.plan(StepTables(batch.block_table, batch.seq_lens, batch.query_start_loc), None)
    assert isinstance(planned.choice, StepChoice)
    predicted = int(planned.choice.times_ns.min())
    assert list_ns(planner.rule, planned.tiles) == pytest.approx(predicted, rel=0.12)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_plans_as_the_back_end_of_a_gpu_does(policy: str, prices: Prices) -> None:
    batch, explanation = explained("1,4,16,64_256,64,32,33", prices)
    config = replace(prices.config, policy=policy)
    backend = GpuBackend(config, CPU, facts=prices.card.facts)
    stats = backend.plan(StepTables(batch.block_table, batch.seq_lens, batch.query_start_loc)).stats()
    (found,) = (each for each in explanation.policies if each.policy == policy)
    assert found.stats == stats and found.kv_bytes == stats.kv_tokens_read * prices.token_bytes


def test_bytes_and_forest(prices: Prices) -> None:
    _, explanation = explained("1,4,64_1024,512,128", prices)
    assert explanation.num_requests == 64
    assert explanation.kv_bytes == 64 * 1664 * prices.token_bytes
    assert explanation.unique_kv_bytes == (1024 + 4 * 512 + 64 * 128) * prices.token_bytes
    assert [node.sequences for node in explanation.snapshot.nodes[:2]] == [64, 16]
    assert len(explanation.snapshot.nodes) == 1 + 4 + 64
    assert explanation.auto.layer_us < explanation.policies[0].layer_us
    assert "3.0 times as fast" in verdict(explanation)


def test_nothing_shared_is_said(prices: Prices) -> None:
    _, explanation = explained("8_512", prices)
    assert verdict(explanation) == "These requests share nothing, so reading it once saves nothing."


def test_a_latent_cache_is_compared_with_its_own_kernel() -> None:
    prices = Prices(model_shape("deepseek-v3"), card_named("H200"), tensor_parallel=8)
    _, explanation = explained("1,32_1024,64", prices)
    text = printed(explanation, prices)
    assert "one by one" in text and "FlashAttention" not in text
    found = re.search(r"per query ([\d.]+) µs", text)
    assert found and float(found[1]) == pytest.approx(explanation.alone_us, rel=0.01)


@pytest.mark.parametrize(
    ("table", "lens", "message"),
    [
        ([[0, 1]], [33], "seq_lens"),
        ([[0, -1]], [32], "block_table"),
        ([0, 1], [32], "block_table"),
        ([[0, 1]], [32, 32], "seq_lens"),
    ],
)
def test_a_bad_table_is_named(table: list[object], lens: list[int], message: str, prices: Prices) -> None:
    with pytest.raises(ValueError, match=message):
        explain((np.array(table, np.int32), np.array(lens, np.int32)), prices)


def printed(explanation: Explanation, prices: Prices) -> str:
    console = Console(file=io.StringIO(), width=110)
    print_explanation(explanation, prices, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_terminal_folds_what_is_alike(prices: Prices) -> None:
    _, explanation = explained("1,4,64_1024,512,128", prices)
    text = printed(explanation, prices)
    assert "1,024 tokens, read by 64" in text and "512 tokens, read by 16  × 4" in text
    assert "128 tokens, its own  × 16" in text
    assert all(policy in text for policy in POLICIES) and "auto took 32x64: least predicted time" in text


def test_a_wide_forest_is_cut(prices: Prices) -> None:
    lens = np.arange(100, 300, dtype=np.int32)
    table = np.arange(200 * 19, dtype=np.int32).reshape(200, 19)
    explanation = explain((table, lens), prices)
    text = printed(explanation, prices)
    assert "… and 140 lines more" in text and len(text.splitlines()) < 90


def test_json_and_svg(prices: Prices) -> None:
    _, explanation = explained("1,4,64_1024,512,128", prices)
    written = explanation_dict(explanation, prices)
    assert written["version"] == 1 and [each["policy"] for each in written["policies"]] == list(POLICIES)
    assert written["forest"][1] == {"parent": 0, "start": 1024, "tokens": 512, "requests": 16}
    assert written["policies"][-1]["chosen"] == "32x64"
    svg = forest_svg(explanation, prices)
    names = [element.tag.rpartition("}")[2] for element in ElementTree.fromstring(svg).iter()]
    assert names.count("rect") == 1 + 4 and "script" not in names
