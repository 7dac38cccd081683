"""Models with latent attention (MLA): absorbed heads and one latent cache, against transformers' own answers."""

import json
import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from trunkattn.engine import LLM, RequestOutput, SamplingParams
from trunkattn.engine.model.hf_masks import UnsupportedAttention
from trunkattn.engine.model.latent import LatentHeads, absorb_heads, latent_heads
from trunkattn.engine.model.packed_linear import PackedHeadLinear, PackedLinear
from trunkattn.engine.model.support import probe_attention

from ..conftest import tiny_config
from ..scenarios import GREEDY, NUM_TOKENS, SCENARIOS, prompts, run_twice

NAMES = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "minicpm3")
LATENT, ROPE = 48, 16
MakeModel = Callable[[str], Any]
AssertGreedy = Callable[[Any, Sequence[RequestOutput], int], None]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_greedy_answers_equal_those_of_transformers(
    tiny_model: MakeModel, assert_greedy: AssertGreedy, name: str, scenario: str
) -> None:
    model = tiny_model(name)
    options = {"page_size": 4, "num_pages": 300, "max_num_seqs": 16, **SCENARIOS[scenario]}
    llm = LLM(model.path, **options)
    outputs = run_twice(llm)
    assert_greedy(model, outputs, NUM_TOKENS)
    assert (llm.stats.preemptions > 0) == ("preemption" in scenario)
    caching = options.get("enable_prefix_caching", True)
    assert all((output.num_cached_tokens > 0) == caching for output in outputs[8:13])


def assert_logprobs(model: Any, reference: Any, **options: Any) -> None:
    """The engine's log-probabilities of a prompt, computed in chunks, equal those of a model of transformers."""
    prompt, params = prompts()[-1], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=256)
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0].log_softmax(-1)
    llm = LLM(model.path, num_pages=40, max_num_seqs=4, max_num_batched_tokens=23, **options)
    found = llm.generate([prompt], params)[0].prompt_logprobs
    assert found is not None and len(found) == len(prompt)
    for position, logprobs in enumerate(found[1:]):
        values = torch.tensor([logprobs[token].logprob for token in range(256)])
        torch.testing.assert_close(values, expected[position], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_within_rounding(tiny_model: MakeModel, name: str) -> None:
    model = tiny_model(name)
    assert_logprobs(model, model.reference)


@pytest.mark.parametrize(("kv_cache_dtype", "dtype"), [("fp8", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)])
def test_an_fp8_cache_rounds_the_rows_and_nothing_else(
    tiny_model: MakeModel, kv_cache_dtype: str, dtype: torch.dtype
) -> None:
    model = tiny_model("minicpm3")
    reference = deepcopy(model.reference)
    for layer in reference.model.layers:
        expand = layer.self_attn.expand_kv
        layer.self_attn.expand_kv = lambda *rows, expand=expand: expand(*(row.to(dtype).float() for row in rows))
    assert_logprobs(model, reference, kv_cache_dtype=kv_cache_dtype)


def test_several_answers_share_the_pages_of_a_prompt(tiny_model: MakeModel, assert_greedy: AssertGreedy) -> None:
    model = tiny_model("deepseek_v3")
    llm = LLM(model.path, page_size=4, num_pages=40, max_num_seqs=5)
    outputs = llm.generate(prompts(), SamplingParams(temperature=0, max_tokens=NUM_TOKENS, n=3))
    assert_greedy(model, outputs, NUM_TOKENS)
    assert all(len(output.outputs) == 3 for output in outputs) and llm.engine.usage().pages_held == 0
    assert llm.stats.preemptions > 0


def test_the_cache_holds_one_row_a_token_and_a_budget_counts_its_bytes(tiny_model: MakeModel) -> None:
    path = tiny_model("deepseek_v3").path
    llm = LLM(path, page_size=4, num_pages=30)
    rows, values = llm.kv_cache.layer(0)
    assert rows.shape == (30, 4, LATENT + ROPE) and values is None
    assert llm.kv_cache.bytes_per_token == 2 * (LATENT + ROPE) * 4
    assert llm.kv_cache.num_bytes == 30 * 4 * llm.kv_cache.bytes_per_token
    budget = 55 * 4 * llm.kv_cache.bytes_per_token
    assert LLM(path, page_size=4, kv_cache_bytes=budget + 3).kv_cache.num_pages == 55


def test_a_folder_of_kimi_k2_is_a_deepseek_v3_and_runs_no_code_of_its_own(
    tiny_model: MakeModel, assert_greedy: AssertGreedy, tmp_path: Path
) -> None:
    model = tiny_model("deepseek_v3")
    copytree(model.path, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "kimi_k2", "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for trusted in (False, True):
        llm = LLM(tmp_path, num_pages=40, trust_remote_code=trusted)
        assert llm.info.config.model_type == "deepseek_v3"
        assert_greedy(model, llm.generate(prompts(), GREEDY), NUM_TOKENS)


def test_shared_prefixes_are_read_once(tiny_model: MakeModel) -> None:
    trunk = list(range(1, 129))
    reads = {}
    for policy in ("per_query", "auto"):
        llm = LLM(tiny_model("glm4_moe_lite").path, num_pages=300, policy=policy)
        llm.generate([[*trunk, 200 + i] for i in range(8)], GREEDY)
        reads[policy] = llm.stats.kv_tokens_read
    assert reads["auto"] < 0.4 * reads["per_query"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_latent_model_answers_in_types_of_16_bits(tiny_model: MakeModel, dtype: str) -> None:
    outputs = LLM(tiny_model("deepseek_v2").path, dtype=dtype, num_pages=60).generate(prompts(), GREEDY)
    assert all(len(output.outputs[0].token_ids) == NUM_TOKENS for output in outputs)


def test_the_probe_finds_the_latent_cache_and_the_scale_before_any_weight() -> None:
    config = tiny_config("deepseek_v3")
    geometry, reasons = probe_attention(config)
    assert geometry is not None and reasons == []
    layer = geometry.layer
    sizes = (layer.num_qo_heads, layer.num_kv_heads, layer.head_dim, layer.head_dim_v, layer.latent_dim)
    assert sizes == (4, 1, LATENT + ROPE, LATENT, LATENT)
    yarn = 0.1 * torch.tensor(8.0).log().item() + 1
    assert layer.sm_scale == pytest.approx((24 + ROPE) ** -0.5 * yarn**2)


DEEPSEEK_V3: dict[str, Any] = {
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "num_hidden_layers": 2,
    "hidden_size": 2048, "moe_intermediate_size": 1408, "n_routed_experts": 8, "num_experts_per_tok": 6, "n_group": 1,
    "topk_group": 1,
}  # fmt: skip
YARN = {"type": "yarn", "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707, "beta_fast": 32, "beta_slow": 1}
YARN |= {"original_max_position_embeddings": 4096}
RELEASED: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepSeek-V2-Lite": (
        "deepseek_v2",
        {"num_attention_heads": 16, "q_lora_rank": None, "topk_method": "greedy", "rope_scaling": YARN},
    ),
    "DeepSeek-V3": ("deepseek_v3", {"num_attention_heads": 128}),
    "Kimi-K2": ("deepseek_v3", {"num_attention_heads": 64}),
    "GLM-4.7-Flash": ("glm4_moe_lite", {"num_attention_heads": 20, "qk_nope_head_dim": 192, "v_head_dim": 256}),
}


@pytest.mark.parametrize("released", RELEASED)
def test_the_probe_finds_the_cache_of_released_models(released: str) -> None:
    model_type, sizes = RELEASED[released]
    options = {**DEEPSEEK_V3, **sizes, "num_key_value_heads": sizes["num_attention_heads"]}
    geometry, reasons = probe_attention(AutoConfig.for_model(model_type, **options))
    assert geometry is not None and reasons == []
    layer = geometry.layer
    assert (layer.num_qo_heads, layer.num_kv_heads) == (sizes["num_attention_heads"], 1)
    assert (layer.head_dim, layer.latent_dim) == (576, 512)
    mscale = 1 + 0.0707 * math.log(40) if "rope_scaling" in options else 1.0
    assert layer.sm_scale == pytest.approx((options["qk_nope_head_dim"] + 64) ** -0.5 * mscale**2)


def attention_of(name: str = "deepseek_v3") -> Any:
    model = AutoModelForCausalLM.from_config(tiny_config(name))
    return model.model.layers[0].self_attn


def test_heads_multiply_as_the_expanded_rows_do() -> None:
    """q · (W_UK c) = (W_UKᵀ q) · c, and W_UV (p c) = p (W_UV c)."""
    attention = attention_of().double()
    latent, rope = torch.randn(1, 1, 5, LATENT).double(), torch.randn(1, 1, 5, ROPE).double()
    keys, values = attention.expand_kv(latent, rope)
    q, p = torch.randn(7, 4, 24 + ROPE).double(), torch.rand(4, 7, 5).double()
    heads = LatentHeads(attention)
    absorbed, of_rope = heads.queries(q)
    found = torch.einsum("thl,kl->htk", absorbed, latent[0, 0]) + torch.einsum("thr,kr->htk", of_rope, rope[0, 0])
    torch.testing.assert_close(found, torch.einsum("thd,hkd->htk", q, keys[0]))
    out = heads.expand(torch.einsum("htk,kl->thl", p, latent[0, 0]))
    torch.testing.assert_close(out, torch.einsum("htk,hkv->thv", p, values[0]))


def test_heads_keep_no_copy_of_the_weight() -> None:
    attention = attention_of()
    storage = attention.kv_b_proj.weight.untyped_storage().data_ptr()
    absorb_heads(attention)
    heads = latent_heads(attention)
    assert heads is not None and not hasattr(attention, "kv_b_proj")
    assert {each.weight.untyped_storage().data_ptr() for each in (heads.absorb, heads.expand)} == {storage}


class WithBias(DeepseekV3Attention):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.kv_b_proj = nn.Linear(self.kv_b_proj.in_features, self.kv_b_proj.out_features)


class ValuesFirst(DeepseekV3Attention):
    def expand_kv(self, kv_nope: torch.Tensor, k_rot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        columns = self.kv_b_proj(kv_nope).unflatten(-1, (-1, 44)).transpose(1, 3).squeeze(1)
        return torch.cat((columns[..., 20:], k_rot.expand(-1, 4, -1, -1)), -1), columns[..., :20]


class Gated(DeepseekV3Attention):
    def expand_kv(self, kv_nope: torch.Tensor, k_rot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().expand_kv(kv_nope, k_rot)
        return keys, values.sigmoid()


@pytest.mark.parametrize("attention", [WithBias, ValuesFirst, Gated])
def test_rows_that_are_expanded_in_another_way_are_refused(attention: Any) -> None:
    with pytest.raises(UnsupportedAttention, match="its latent attention expands its cache in a way of its own"):
        absorb_heads(attention(tiny_config("deepseek_v3"), 0))


def test_packed_heads_equal_plain_ones_and_do_not_depend_on_their_neighbours() -> None:
    heads = LatentHeads(attention_of())
    q, out = torch.randn(9, 4, 24), torch.randn(9, 4, LATENT)
    for linear, x in ((heads.absorb, q), (heads.expand, out)):
        packed = PackedHeadLinear(linear)
        together = packed(x)
        torch.testing.assert_close(together, linear(x), rtol=1e-5, atol=1e-5)
        assert torch.equal(packed(x[3:5]), together[3:5])
        assert packed(x[:0]).shape == linear(x[:0]).shape


def test_logprobs_have_the_same_bits_alone_and_in_any_batch(tiny_model: MakeModel) -> None:
    path = tiny_model("minicpm3").path
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=3, ignore_eos=True)

    def answers(llm: LLM, batch: list[list[int]]) -> list[Any]:
        outputs = [output.outputs[0] for output in llm.generate(batch, params)]
        return [
            (out.token_ids, [{t: p.logprob for t, p in step.items()} for step in out.logprobs or ()]) for out in outputs
        ]

    alone = LLM(path, batch_invariant=True, num_pages=60, enable_prefix_caching=False)
    expected = [answers(alone, [prompt])[0] for prompt in prompts()]
    for options in ({}, {"max_num_batched_tokens": 37, "max_num_seqs": 9}, {"max_num_seqs": 2}):
        llm = LLM(path, batch_invariant=True, num_pages=60, **options)
        assert answers(llm, prompts()) == expected
        assert answers(llm, prompts()[::-1]) == expected[::-1], "the prefixes are cached now"
    assert isinstance(alone.model.lm_head, PackedLinear)


def test_experts_are_not_batch_invariant(tiny_model: MakeModel) -> None:
    with pytest.raises(ValueError, match=r"batch_invariant=True: .*mlp.* is multiplied by the model's own code"):
        LLM(tiny_model("deepseek_v3").path, batch_invariant=True, num_pages=20)
