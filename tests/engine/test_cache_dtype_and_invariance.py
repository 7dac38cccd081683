"""`kv_cache_dtype` and `batch_invariant`: what they promise of a whole engine, and what they refuse."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from trunkattn.engine import LLM, EngineConfig, SamplingParams
from trunkattn.engine.assembly import attention_config
from trunkattn.engine.model.inspection import inspect_model
from trunkattn.engine.model.packed_linear import PackedLinear
from trunkattn.gpu.cards import GpuFacts, card_of

PROMPTS = [
    torch.randint(1, 256, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (300, 5, 40, 41)
]
PARAMS = SamplingParams(temperature=0, max_tokens=6, logprobs=3, ignore_eos=True)
GEOMETRIES = ("llama", "mistral", "gemma2")
MakeModel = Callable[[str], Any]


def answers(llm: LLM, prompts: list[list[int]]) -> list[tuple[list[int], Any]]:
    outputs = [output.outputs[0] for output in llm.generate(prompts, PARAMS)]
    return [
        (output.token_ids, [{t: p.logprob for t, p in step.items()} for step in output.logprobs]) for output in outputs
    ]


@pytest.mark.parametrize("name", GEOMETRIES)
def test_logprobs_have_the_same_bits_alone_and_in_any_batch(tiny_model: MakeModel, name: str) -> None:
    path = tiny_model(name).path
    shared = [[*PROMPTS[0], 7], [*PROMPTS[0], 8, 9], PROMPTS[0]]
    prompts = [*PROMPTS, *shared]
    alone = LLM(path, batch_invariant=True, num_pages=200, enable_prefix_caching=False)
    expected = [answers(alone, [prompt])[0] for prompt in prompts]
    for options in ({}, {"max_num_batched_tokens": 37, "max_num_seqs": 9}, {"max_num_seqs": 2}, {"policy": "pat"}):
        llm = LLM(path, batch_invariant=True, num_pages=200, **options)
        assert answers(llm, prompts) == expected
        assert answers(llm, prompts[::-1]) == expected[::-1], "the prefixes are cached now"


def test_a_model_that_multiplies_by_itself_is_not_batch_invariant(tiny_model: MakeModel) -> None:
    with pytest.raises(ValueError, match=r"batch_invariant=True: .*mlp.* is multiplied by the model's own code"):
        LLM(tiny_model("gpt_oss").path, batch_invariant=True, num_pages=20)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_batch_invariance_needs_float32(tiny_model: MakeModel, dtype: str) -> None:
    with pytest.raises(ValueError, match=rf"batch_invariant=True: expected dtype float32 on a CPU, not torch.{dtype}"):
        LLM(tiny_model("llama").path, batch_invariant=True, dtype=dtype)


@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize(("kv_cache_dtype", "tolerance"), [("fp8", 0.35), ("fp8_e4m3", 0.35), ("fp8_e5m2", 0.7)])
def test_an_fp8_cache_changes_answers_a_little(
    tiny_model: MakeModel, name: str, kv_cache_dtype: str, tolerance: float
) -> None:
    path = tiny_model(name).path
    exact, llm = LLM(path, num_pages=60), LLM(path, num_pages=60, kv_cache_dtype=kv_cache_dtype)
    assert llm.kv_cache.num_bytes * 4 == exact.kv_cache.num_bytes
    assert llm.kv_cache.layer(0)[0].dtype == getattr(
        torch, "float8_e5m2" if "e5m2" in kv_cache_dtype else "float8_e4m3fn"
    )
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=256)
    differences = []
    for found, expected in zip(llm.generate(PROMPTS, params), exact.generate(PROMPTS, params), strict=True):
        first, second = ({t: p.logprob for t, p in out.outputs[0].logprobs[0].items()} for out in (found, expected))
        differences += [abs(first[token] - second[token]) for token in second]
    assert 0 < sum(differences) / len(differences) < tolerance


def test_an_fp8_cache_takes_half_of_a_16_bit_one(tiny_model: MakeModel) -> None:
    path = tiny_model("llama").path
    sizes = {
        kv_cache_dtype: LLM(path, dtype="bfloat16", num_pages=20, kv_cache_dtype=kv_cache_dtype).kv_cache.num_bytes
        for kv_cache_dtype in ("auto", "fp8")
    }
    assert sizes["fp8"] * 2 == sizes["auto"]


def test_a_budget_in_bytes_holds_more_tokens_in_fp8(tiny_model: MakeModel) -> None:
    path, options = tiny_model("llama").path, {"kv_cache_bytes": 200_000, "max_num_seqs": 256}
    exact, fp8 = LLM(path, **options), LLM(path, **options, kv_cache_dtype="fp8")
    assert fp8.kv_cache.num_pages // 4 == exact.kv_cache.num_pages


def test_an_fp8_cache_may_be_batch_invariant(tiny_model: MakeModel) -> None:
    llm = LLM(tiny_model("llama").path, num_pages=60, kv_cache_dtype="fp8", batch_invariant=True)
    assert answers(llm, PROMPTS) == [answers(llm, [prompt])[0] for prompt in PROMPTS]


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"kv_cache_dtype='int8': expected one of auto, fp8, fp8_e4m3, fp8_e5m2"):
        EngineConfig(kv_cache_dtype="int8")
    with pytest.raises(TypeError, match=r"batch_invariant=1: expected True or False"):
        EngineConfig(batch_invariant=1)  # type: ignore[arg-type]


def test_int8_weights_answer_as_the_model_with_the_rounded_weights(tiny_model: MakeModel) -> None:
    path = tiny_model("llama").path
    llm = LLM(path, num_pages=64, quantization="int8", batch_invariant=True)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for name, layer in llm.model.named_modules():
        if isinstance(layer, PackedLinear):
            model.get_submodule(name).weight = torch.nn.Parameter(layer.weight, requires_grad=False)
    prompt = list(range(5, 45))
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    output, *_ = llm.generate([prompt, prompt[:9]], params)
    assert output.prompt_logprobs == llm.generate([prompt], params)[0].prompt_logprobs
    expected = model(torch.tensor([prompt])).logits[0].detach().double().log_softmax(-1)
    for place, each in enumerate(output.prompt_logprobs or ()):
        if each is not None:
            assert abs(each[prompt[place]].logprob - float(expected[place - 1, prompt[place]])) < 1e-4


def test_int8_weights_need_float32_on_a_cpu(tiny_model: MakeModel) -> None:
    with pytest.raises(ValueError, match=r"quantization='int4': expected int8; leave it out to keep"):
        EngineConfig(quantization="int4")
    with pytest.raises(ValueError, match=r"quantization='int8': expected dtype float32 on a CPU, not torch.bfloat16"):
        LLM(tiny_model("llama").path, quantization="int8", dtype="bfloat16")


def test_a_gpu_without_e4m3_is_refused_by_name(tiny_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    info = inspect_model(tiny_model("llama").path, device="cuda", kv_cache_dtype="fp8")
    a100 = card_of(GpuFacts("NVIDIA A100-SXM4-80GB", 108, 80, 40 << 20))
    monkeypatch.setattr("trunkattn.gpu.kernel.card_at", lambda device: a100)
    with pytest.raises(ValueError, match=r"kv_dtype=torch\.float8_e4m3fn: expected compute capability 8\.9"):
        attention_config(info, EngineConfig(device="cuda", kv_cache_dtype="fp8"))
