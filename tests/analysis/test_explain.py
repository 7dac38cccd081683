"""A batch explained: each policy's plan reads what the planner says, and its time is the planner's own prediction."""

import io
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import DeepseekV3Config

from benchmarks.workloads.pat_trees import PAT_TREES
from trunkattn.analysis.batch import PagedBatch
from trunkattn.analysis.explain import Explanation, explain
from trunkattn.analysis.pricing.list_price import list_ns
from trunkattn.analysis.pricing.model_shape import model_shape
from trunkattn.analysis.pricing.prices import DecodeBatch, Prices
from trunkattn.analysis.reports.explain_report import explanation_dict, forest_svg, print_explanation, verdict
from trunkattn.analysis.trees import parse_tree, tree_batch
from trunkattn.gpu.attention import GpuBackend
from trunkattn.gpu.cards import card_named
from trunkattn.gpu.kernel import kernels_of
from trunkattn.gpu.mla import spec as mla
from trunkattn.gpu.step_choice import StepChoice
from trunkattn.gpu.step_planners import make_step_planner
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
    (found,) = (each for each in explanation.layers[0].policies if each.policy == policy)
    assert found.stats == stats and found.kv_bytes == stats.kv_tokens_read * prices.token_bytes


def test_bytes_and_forest_are_those_of_the_tree(prices: Prices) -> None:
    _, explanation = explained("1,4,64_1024,512,128", prices)
    assert explanation.num_requests == 64
    assert explanation.kv_bytes == 64 * 1664 * prices.token_bytes
    assert explanation.unique_kv_bytes == (1024 + 4 * 512 + 64 * 128) * prices.token_bytes
    assert [node.sequences for node in explanation.snapshot.nodes[:2]] == [64, 16]
    assert len(explanation.snapshot.nodes) == 1 + 4 + 64
    (layers,) = explanation.layers
    assert layers.auto.layer_us < layers.policies[0].layer_us
    assert explanation.times_us == (32 * layers.one_by_one_us, 32 * layers.auto.layer_us)
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
    assert found and float(found[1]) == pytest.approx(explanation.layers[0].one_by_one_us, rel=0.01)
    assert "fitted to no engine" in text.replace("\n", " ") and "was not timed" not in text


def test_a_latent_cache_of_e4m3_takes_longer_than_one_of_16_bits() -> None:
    took = []
    for cache in ("auto", "float8_e4m3fn"):
        prices = Prices(model_shape("deepseek-v3"), card_named("H200"), tensor_parallel=8, kv_cache_dtype=cache)
        _, explanation = explained("1,64_8192,512", prices)
        assert "was not timed" not in printed(explanation, prices)
        took.append(explanation.layers[0].auto.layer_us)
    assert took[0] < took[1]


def test_a_latent_cache_of_e5m2_says_that_its_kernel_was_not_timed() -> None:
    shape, card = model_shape("deepseek-v3"), card_named("H100")
    prices = Prices(shape, card, tensor_parallel=8, kv_cache_dtype="float8_e5m2")
    _, explanation = explained("1,4,64_1024,512,128", prices)
    text = printed(explanation, prices).replace("\n", " ")
    assert "The portable latent decode kernel computes it and was not timed" in text
    assert verdict(explanation).startswith(
        "Sharing would save 89 % of the KV reads from memory, and no time: attention "
    )
    assert any("was not timed" in sentence for sentence in explanation_dict(explanation, prices)["assumptions"])


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "float8_e4m3fn"])
def test_the_layers_of_each_window_are_explained_by_themselves(kv_cache_dtype: str) -> None:
    prices = Prices(model_shape("gpt-oss-20b"), card_named("H100"), kv_cache_dtype=kv_cache_dtype)
    batch, explanation = explained("1,4,64_1024,512,128", prices)
    near, far = explanation.layers
    assert (near.window, near.count, far.window, far.count) == (128, 12, None, 12)
    token_bytes = 2 * 8 * 64 * (2 if kv_cache_dtype == "auto" else 1)
    assert near.kv_bytes == near.unique_kv_bytes == 12 * 64 * 128 * token_bytes  # its own leaf alone is seen
    assert far.kv_bytes == 12 * 64 * 1664 * token_bytes
    assert far.unique_kv_bytes == 12 * (1024 + 4 * 512 + 64 * 128) * token_bytes
    assert all(each.kv_bytes >= near.unique_kv_bytes for each in near.policies)
    assert near.one_by_one_us < far.one_by_one_us and near.auto.layer_us < far.auto.layer_us
    forest = DecodeBatch.of(batch.block_table, batch.seq_lens, prices.page_size)
    assert explanation.times_us == pytest.approx(prices.attention(forest))
    text = printed(explanation, prices)
    assert "One of 12 layers with a window of 128 tokens on" in text and "One of 12 layers that see all on" in text
    assert "µs in all layers" in verdict(explanation) and text.count("auto took") == 2


def test_the_config_of_a_model_with_a_latent_cache_is_priced(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 4, "vocab_size": 32_000}
    DeepseekV3Config(**sizes).save_pretrained(tmp_path)
    shape = model_shape(str(tmp_path))
    assert (shape.latent_dim, shape.head_dim, shape.num_kv_heads, shape.num_layers) == (512, 576, 1, 4)
    prices = Prices(shape, card_named("H100"), tensor_parallel=8)
    assert prices.decode_kernel.name == mla.DECODE and prices.token_bytes == 8 * 4 * 576 * 2
    _, explanation = explained("1,4,64_1024,512,128", prices)
    one_by_one, shared = explanation.times_us
    assert 0 < shared < one_by_one and explanation.unique_kv_bytes == (1024 + 4 * 512 + 64 * 128) * prices.token_bytes


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


def test_one_request_and_one_token_are_no_several(prices: Prices) -> None:
    text = printed(explained("1_1", prices)[1], prices)
    assert "1 request decodes, with" in text and " 1 token, its own" in text


def test_a_wide_forest_is_cut(prices: Prices) -> None:
    lens = np.arange(100, 300, dtype=np.int32)
    table = np.arange(200 * 19, dtype=np.int32).reshape(200, 19)
    explanation = explain((table, lens), prices)
    text = printed(explanation, prices)
    assert "… and 140 lines more" in text and len(text.splitlines()) < 90


def test_json_and_svg_have_a_row_for_every_policy_and_node(prices: Prices) -> None:
    _, explanation = explained("1,4,64_1024,512,128", prices)
    written = explanation_dict(explanation, prices)
    (layers,) = written["layers"]
    assert written["version"] == 1 and [each["policy"] for each in layers["policies"]] == list(POLICIES)
    assert (layers["window"], layers["count"], written["assumptions"]) == (None, 32, [])
    assert written["forest"][1] == {"parent": 0, "start": 1024, "tokens": 512, "requests": 16}
    assert layers["policies"][-1]["chosen"] == "32x64"
    svg = forest_svg(explanation, prices)
    names = [element.tag.rpartition("}")[2] for element in ElementTree.fromstring(svg).iter()]
    assert names.count("rect") == 1 + 4 and "script" not in names
