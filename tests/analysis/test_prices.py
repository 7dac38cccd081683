"""What a step costs: models' sizes, cards, and predictions held to what was measured."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, DynamicCache
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.host.analysis_predictions import cases, summary
from benchmarks.page.common import load
from benchmarks.workloads import random_forest
from tests.analysis.replays import PRICES
from tests.attention.cases import fraction
from trunkattn.analysis.pricing.memory import cache_pages
from trunkattn.analysis.pricing.model_configs import CONFIGS
from trunkattn.analysis.pricing.model_shape import model_shape, shape_of
from trunkattn.analysis.pricing.prices import DecodeBatch, Prices, seen_tokens
from trunkattn.analysis.settings import MOST_PAGES, Settings
from trunkattn.gpu.cards import card_named
from trunkattn.planner.work_list import UNLIMITED

LLAMA = dict(CONFIGS["llama-3-8b"])


@pytest.mark.parametrize(
    ("name", "billions", "layers"),
    [
        ("llama-3-8b", 8.03, 32),
        ("llama-3-70b", 70.6, 80),
        ("qwen2.5-7b", 7.6, 28),
        ("qwen3-30b-a3b", 30.5, 48),
        ("gemma-3-12b", 11.8, 48),
        ("gpt-oss-20b", 20.9, 24),
        ("gpt-oss-120b", 116.8, 36),
        ("deepseek-v2-lite", 15.7, 27),
        ("deepseek-v3", 671, 61),
    ],
)
def test_models_have_as_many_weights_as_they_are_said_to_have(name: str, billions: float, layers: int) -> None:
    shape = model_shape(name)
    experts = sum(each.count * each.numbers for each in shape.experts)
    assert (shape.dense_numbers + shape.table_numbers + experts) / 1e9 == pytest.approx(billions, rel=0.01)
    assert shape.num_layers == layers


@pytest.mark.parametrize(("name", "gigabytes"), [("gpt-oss-20b", 13.8), ("gpt-oss-120b", 65.2)])
def test_experts_of_4_bits_take_as_much_as_their_files(name: str, gigabytes: float) -> None:
    assert model_shape(name).total_bytes() / 1e9 == pytest.approx(gigabytes, rel=0.01)


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [("llama-3-8b", 131_072), ("qwen2.5-7b", 57_344), ("gpt-oss-20b", 49_152), ("deepseek-v3", 70_272)],
)
def test_a_token_takes_its_bytes_of_the_cache(name: str, num_bytes: int) -> None:
    assert Prices(model_shape(name), PRICES.card).token_bytes == num_bytes
    assert Prices(model_shape(name), PRICES.card, kv_cache_dtype="float8_e4m3fn").token_bytes == num_bytes // 2


@pytest.mark.parametrize(("dtype", "width"), [("float16", 2), ("bfloat16", 2), ("float32", 4)])
def test_a_weight_takes_the_bytes_of_its_dtype(dtype: str, width: int) -> None:
    for field in ("dtype", "torch_dtype"):
        assert shape_of("a", {**LLAMA, field: dtype}).total_bytes() == pytest.approx(width * 8.03e9, rel=1e-3)


def test_experts_are_read_as_far_as_tokens_choose_them() -> None:
    shape = model_shape("qwen3-30b-a3b")
    assert shape.numbers_used() / 1e9 == pytest.approx(3.0, rel=0.05)
    assert shape.bytes_read(1) == pytest.approx(2 * shape.numbers_used())
    assert shape.bytes_read(10_000) == pytest.approx(shape.total_bytes() - 2 * shape.table_numbers)


@pytest.mark.parametrize(
    ("change", "windows"),
    [
        ({}, {None: 32}),
        ({"sliding_window": 4096}, {4096: 32}),
        ({"sliding_window": 4096, "use_sliding_window": False}, {None: 32}),
        ({"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"] * 16}, {512: 16, None: 16}),
        ({"sliding_window": 512, "sliding_window_pattern": 4}, {512: 24, None: 8}),
        ({"sliding_window": 512, "model_type": "gemma2"}, {512: 16, None: 16}),
        ({"sliding_window": 512, "model_type": "gemma3_text"}, {512: 27, None: 5}),
        ({"sliding_window": 512, "use_sliding_window": True, "max_window_layers": 20}, {None: 20, 512: 12}),
    ],
)
def test_windows_are_those_of_each_layer(change: dict[str, Any], windows: dict[int | None, int]) -> None:
    assert shape_of("a", {**LLAMA, **change}).layers_by_window == windows


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "its config gives none as hidden_size: expected an integer above 0"),
        ({"sliding_window": True}, "its config gives True as sliding_window"),
        ({"vocab_size": "many"}, "its config gives 'many' as vocab_size"),
        ({"layer_types": ["linear_attention"] * 32}, "layers of type linear_attention, which are no attention"),
        ({"quantization_config": {"quant_method": "odd"}}, "quantized by 'odd', whose size is not known"),
        ({"torch_dtype": "int3"}, "its dtype is none of bfloat16"),
        ({"num_kv_shared_layers": 20}, "its num_kv_shared_layers tells of layers that do not cache what others do"),
        ({"global_head_dim": 512}, "its global_head_dim tells of layers that do not cache what others do"),
        ({"head_dim": None, "hidden_size": 16}, "its heads have no elements"),
        ({"v_head_dim": 64}, "its values have another head_dim"),
        ({"index_topk": 2048}, "its layers attend only to chosen tokens"),
        ({"mamba_d_state": 128, "attn_layer_period": 8}, "its mamba_d_state tells of layers that are no attention"),
        ({"linear_num_key_heads": 16, "full_attention_interval": 4}, "its linear_num_key_heads tells of layers"),
        ({"hybrid_override_pattern": "M-M*"}, "its hybrid_override_pattern tells of layers"),
        ({"attention_chunk_size": 8192}, "its layers attend within chunks"),
        ({"is_encoder_decoder": True}, "it has an encoder"),
        ({"architectures": ["BertForMaskedLM"]}, "it has an encoder"),
        ({"type_vocab_size": 2}, "it has an encoder"),
        ({"use_bidirectional_attention": True}, "it has an encoder"),
        ({"keep_window_size": 2048}, "its layers attend only to chosen tokens"),
        (
            {"cross_attention_layers": [3, 8]},
            "its cross_attention_layers tells of layers that do not cache what others",
        ),
        (
            {"full_attn_idxs": [2, 5], "conv_L_cache": 3},
            "its conv_L_cache tells of layers that do not cache what others",
        ),
        ({"num_attention_heads_per_layer": [32, 48] * 16}, "its layers have different numbers of heads"),
        ({"model_type": "hrm_text"}, "a token passes its layers several times; name a model like it"),
        ({"model_type": "jetmoe"}, "its attention has experts"),
        (
            {"intermediate_size": None},
            "expected an integer above 0, or the name of a model like it, such as llama-3-8b",
        ),
        ({"num_local_experts": 4, "num_experts_per_tok": 8}, "a token chooses 8 of its 4 experts"),
        ({"layer_types": ["full_attention"] * 31}, "gives a long value as layer_types: expected a list of 32 names"),
        ({"layer_types": ["sliding_attention"] * 32}, "its sliding_window is not told"),
        ({"quantization_config": {"quant_method": "awq", "bits": 0}}, "quantized by 'awq', whose size is not known"),
        ({"quantization_config": {"quant_method": "awq", "bits": 10**400}}, "quantized by 'awq', whose size is not"),
        ({"sliding_window": 2**31}, "its config gives 2147483648 as sliding_window: expected at most 2147483647"),
        ({"hidden_size": 10**400}, "its config gives a long value as hidden_size: expected at most 2147483647"),
    ],
)
def test_a_model_that_cannot_be_priced_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shape_of("a", {**LLAMA, **change})


STRANGE: tuple[Any, ...] = ("128", -1, 1.5, True, [8], [[8]], {"a": 1}, "many", ["a"], [None], 0, None)
FIELDS = (
    *("text_config", "quantization_config", "layer_types", "architectures", "model_type", "mlp_only_layers"),
    *("head_dim", "num_key_value_heads", "kv_lora_rank", "sliding_window", "sliding_window_pattern", "torch_dtype"),
    *(
        "mlp_layer_types",
        "num_local_experts",
        "moe_layer_freq",
        "first_k_dense_replace",
        "max_window_layers",
        "intermediate_size",
    ),
)


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_of_a_wrong_type_is_named_or_without_effect(field: str) -> None:
    for value in STRANGE:
        for experts in ({}, {"num_experts": 8, "num_experts_per_tok": 2}):
            try:
                shape = shape_of("a", {**LLAMA, **experts, field: value})
            except ValueError as error:
                assert str(error).startswith("model a") and "object has no" not in str(error)
            else:
                assert shape.head_dim >= 1 and shape.num_layers == LLAMA["num_hidden_layers"]


def test_layers_with_experts_are_told_by_a_flag_each_or_from_one_on() -> None:
    experts = {**LLAMA, "num_experts": 8, "moe_k": 2, "moe_intermediate_size": 512}
    kinds = ["dense", "dense", *["sparse"] * 30]
    for change in ({"moe_layer_freq": [0, 0] + [1] * 30}, {"moe_layer_start_index": 2}, {"mlp_layer_types": kinds}):
        assert len(shape_of("a", {**experts, **change}).experts) == 30


@pytest.mark.parametrize(
    ("quantization", "share"), [({"quant_method": "fp8"}, 0.5), ({"quant_method": "awq", "bits": 4}, 0.25)]
)
def test_quantized_weights_are_smaller(quantization: dict[str, Any], share: float) -> None:
    """Those of layers: the output layer and the token table keep their 16 bits."""
    small, plain = shape_of("a", {**LLAMA, "quantization_config": quantization}), model_shape("llama-3-8b")
    output = 2 * 4096 * 128_256
    assert small.bytes_read(1) - output == share * (plain.bytes_read(1) - output)
    assert small.total_bytes() - small.bytes_read(1) == plain.total_bytes() - plain.bytes_read(1) == output


# Types that have a price, among others.
PRICED = (
    *("llama", "gemma2", "qwen2_moe", "deepseek_v3", "glm4_moe_lite", "granitemoeshared", "exaone_moe", "afmoe"),
    *("ernie4_5_moe", "starcoder2", "gpt_neox", "phi", "persimmon", "biogpt", "apertus", "arcee", "nanochat", "jais2"),
    *("qwen3", "qwen3_moe", "mistral", "mixtral", "gemma3_text", "gpt_oss", "glm4_moe", "minicpm3", "phi3", "olmo3"),
)
# What the default configuration of a type leaves out, without which transformers makes no model.
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
ASKED: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 16, "num_experts_per_tok": 4, "n_shared_experts": 2},
    "hunyuan_v1_dense": {"head_dim": 128},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
}


@pytest.mark.parametrize("model_type", sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - {"gemma4_assistant"}))
def test_a_model_is_refused_or_has_the_weights_and_windows_that_transformers_makes(model_type: str) -> None:
    """Weights that read images or sound are no part of a step."""
    try:
        config = CONFIG_MAPPING[model_type](**ASKED.get(model_type, {}))
        shape = shape_of("a", json.loads(config.to_json_string()))
    except ValueError as error:
        assert model_type not in PRICED
        assert "name a model like it" in str(error) or "the name of a model like it" in str(error)
        return
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    others = re.compile("vision|visual|image|audio|multi_modal")
    made = sum(weight.numel() for name, weight in model.named_parameters() if not others.search(name))
    experts = sum(each.count * each.numbers for each in shape.experts)
    assert shape.dense_numbers + shape.table_numbers + experts == pytest.approx(made, rel=0.01)
    layers = DynamicCache(config=config.get_text_config(decoder=True)).layers
    assert shape.windows == tuple(getattr(layer, "sliding_window", None) for layer in layers)


def test_experts_end_at_the_layer_that_a_config_names() -> None:
    config = CONFIG_MAPPING["ernie4_5_moe"](num_hidden_layers=6, moe_layer_end_index=2)
    with torch.device("meta"):
        made = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    shape = shape_of("a", json.loads(config.to_json_string()))
    experts = sum(each.count * each.numbers for each in shape.experts)
    assert shape.dense_numbers + experts == pytest.approx(made, rel=0.01)


@pytest.mark.parametrize(
    "model_type", ["cosmos3_edge", "internvl", "mistral3", "muse_glimmer", "muse_spark", "qwen3_vl_moe"]
)
def test_a_model_that_sees_images_has_the_weights_of_its_text_model(model_type: str) -> None:
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    config = CONFIG_MAPPING[model_type]()
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    made = sum(weight.numel() for weight in {*model.get_decoder().parameters(), *model.lm_head.parameters()})
    shape = shape_of("a", json.loads(config.to_json_string()))
    experts = sum(each.count * each.numbers for each in shape.experts)
    assert shape.dense_numbers + shape.table_numbers + experts == pytest.approx(made, rel=0.01)


@pytest.mark.parametrize("model_type", ["gemma", "gemma2", "gemma3_text"])
def test_a_text_config_may_leave_out_the_defaults_of_its_type(model_type: str) -> None:
    """transformers leaves them out, and neither the number of heads nor hidden_size tells them."""
    sizes = {"hidden_size": 3840, "num_hidden_layers": 12, "intermediate_size": 15_360}
    whole = json.loads(CONFIG_MAPPING[model_type](**sizes).to_json_string())
    given = ("vocab_size", "num_attention_heads", "num_key_value_heads") if model_type != "gemma3_text" else ()
    left = {name: whole[name] for name in (*sizes, *given, "sliding_window", "model_type") if name in whole}
    assert shape_of("a", {"text_config": left}) == shape_of("a", whole)


def test_a_token_table_is_the_output_layer_unless_a_config_tells_otherwise() -> None:
    """transformers leaves out what is its default."""
    tied = {name: value for name, value in LLAMA.items() if name != "tie_word_embeddings"}
    assert (shape_of("a", tied).table_numbers, shape_of("a", LLAMA).table_numbers) == (0, 4096 * 128_256)


def test_a_config_is_read_from_a_file_or_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": LLAMA}))
    for path in (tmp_path, tmp_path / "config.json"):
        shape = model_shape(str(path))
        assert (shape.name, shape.total_bytes()) == (tmp_path.name, model_shape("llama-3-8b").total_bytes())
    (tmp_path / "mine.json").write_text(json.dumps(LLAMA))
    assert model_shape(str(tmp_path / "mine.json")).name == "mine"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert model_shape("~/mine.json").name == "mine"
    monkeypatch.chdir(tmp_path)
    assert model_shape(".").name == model_shape("config.json").name == tmp_path.name
    for wrong, message in (("[", "is not JSON"), ("[" * 100_000, "is not JSON"), ("[1]", "holds no JSON object")):
        (tmp_path / "config.json").write_text(wrong)
        with pytest.raises(ValueError, match=message):
            model_shape(str(tmp_path))
    with pytest.raises(ValueError, match=r"model='lama': expected one of llama-3-8b, .*, or a config.json"):
        model_shape("lama")


def test_cards_are_found_by_their_names() -> None:
    assert card_named("h100").model is card_named("NVIDIA H100 80GB HBM3").model
    with pytest.raises(ValueError, match="gpu='A100': expected a card whose engines were measured: NVIDIA H100, "):
        card_named("A100")


def test_pages_fill_what_the_weights_leave_of_the_card() -> None:
    def pages(**options: Any) -> int:
        settings = Settings(**options)
        return cache_pages(settings, model_shape(settings.model), PRICES.card)

    page, memory = 16 * PRICES.token_bytes, PRICES.card.model.engine.memory_bytes
    for cards in (1, 2):  # an engine takes nine tenths of the memory, and 2 GB of it are for activations
        free = 0.9 * memory * cards - PRICES.shape.total_bytes() - 2e9
        assert 0 <= free - pages(tensor_parallel=cards) * page < page
    assert pages(num_pages=7) == 7 and pages(kv_cache_bytes=page) == 1 and pages(kv_cache_bytes=512 * page) == 512
    assert pages(model="llama-3-70b", kv_cache_bytes=MOST_PAGES * page * 80 // 32) == MOST_PAGES
    for options, message in (
        ({"model": "llama-3-70b"}, "llama-3-70b has 141 GB of weights, .* expected more cards, with --tp"),
        ({"kv_cache_bytes": 1}, "kv_cache_bytes=1: expected at least the 2097152 bytes of a page of 16 tokens"),
        ({"page_size": 10**9}, "page_size=1000000000: the cache has 0 pages"),
        ({"kv_cache_bytes": 1 << 50}, "kv_cache_bytes=1125899906842624: the cache has 536870912 pages"),
    ):
        with pytest.raises(ValueError, match=message):
            pages(**options)


@pytest.mark.parametrize("cards", [0, 3, 64])
def test_cards_divide_the_heads(cards: int) -> None:
    with pytest.raises(ValueError, match=f"tp={cards}: expected a number of cards that divides"):
        Prices(PRICES.shape, PRICES.card, tensor_parallel=cards)


def test_cards_that_share_a_kv_head_keep_a_copy_each() -> None:
    """28 query heads and 4 KV heads: 7 cards have 4 query heads each, of which some would need two KV heads."""
    shape = model_shape("qwen2.5-7b")
    with pytest.raises(ValueError, match="tp=7: expected a number of cards that divides the 28 query heads and"):
        Prices(shape, PRICES.card, tensor_parallel=7)
    bytes_of = [Prices(PRICES.shape, PRICES.card, tensor_parallel=cards).layer_token_bytes for cards in (1, 8, 16, 32)]
    assert bytes_of == [4096, 4096, 2 * 4096, 4 * 4096]


def test_an_unknown_cache_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match=r"kv_cache_dtype='int4': expected one of auto, float8_e4m3fn, float8_e5m2"):
        Prices(PRICES.shape, PRICES.card, kv_cache_dtype="int4")


def test_tokens_that_some_sequence_sees_are_counted_once() -> None:
    table = np.array([[0, 1, 2, 9], [0, 1, 3, 0], [5, 0, 0, 0]], np.int32)
    batch = DecodeBatch.of(table, np.array([50, 40, 10], np.int32), 16)
    assert seen_tokens(batch) == 32 + 18 + 8 + 10
    assert seen_tokens(batch, 20) == (32 - 20) + 18 + 8 + 10
    for window in (20, UNLIMITED):
        assert seen_tokens(DecodeBatch.of(table[:0], np.zeros(0, np.int32), 16), window) == 0


@settings(max_examples=fraction(3))
@pytest.mark.property
@given(seed=st.integers(0, 2**32 - 1), page_size=st.integers(1, 32), window=st.sampled_from([1, 3, 20, 300, UNLIMITED]))
def test_a_token_counts_if_any_window_holds_it(seed: int, page_size: int, window: int) -> None:
    paged = random_forest(np.random.default_rng(seed), page_size=page_size, max_own_tokens=60)
    batch = DecodeBatch.of(paged.block_table, paged.seq_lens, page_size)
    forest, seen = batch.forest, set[tuple[int, int]]()
    for node, (first, last) in enumerate(zip(forest.row_start, forest.row_end, strict=True)):
        for end in batch.seq_lens[forest.order[first:last]]:
            begin = max(end - window, forest.token_start[node])
            seen |= {(node, token) for token in range(begin, forest.token_end[node])}
    assert seen_tokens(batch, window) == len(seen)


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "gemma-3-12b", "gpt-oss-20b"])
def test_every_kind_of_attention_is_priced(name: str) -> None:
    table = np.stack([np.arange(200), np.arange(200)]).astype(np.int32)
    table[1, -4:] += 100
    batch = DecodeBatch.of(np.repeat(table, 8, axis=0), np.full(16, 3200, np.int32), 16)
    found = Prices(model_shape(name), PRICES.card).attention(batch)
    assert 0 < found.shared_us < found.one_by_one_us


def test_latent_attention_of_what_is_not_shared_takes_its_time_one_by_one() -> None:
    """Its baseline is our own kernel, of which the tilings that share nothing are compared."""
    table = np.arange(16 * 200, dtype=np.int32).reshape(16, 200)
    prices, lens = Prices(model_shape("deepseek-v2-lite"), PRICES.card), np.full(16, 3200, np.int32)
    apart = prices.layer(DecodeBatch.of(table, lens, 16))
    assert apart.one_by_one_us == apart.shared_us
    shared = prices.layer(DecodeBatch.of(np.hstack([np.repeat(table[:1, :190], 16, 0), table[:, 190:]]), lens, 16))
    assert shared.shared_us < shared.one_by_one_us <= apart.one_by_one_us


def test_predictions_are_those_of_the_result_and_close_to_what_was_measured() -> None:
    result = load("analysis-predictions")
    told = {(row["result"], row["workload"]): row["predicted_ms"] for row in result["batches"]}
    found = list(cases())
    assert len(found) == len(told) > 70
    for case in found[::5]:
        assert case.predicted(case.prices) == pytest.approx(told[case.result, str(case.workload)], abs=1e-3)
    assert summary(result["batches"]) == result["summary"]
    assert result["summary"]["mean"] < 0.15 and result["summary"]["worst"] < 0.30
    assert result["summary"]["ratio_mean"] < 0.10
    assert result["serving_summary"]["mean"] < 0.15 and result["serving_summary"]["ratio_mean"] < 0.10
