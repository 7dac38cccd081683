"""The embedded engine on an NVIDIA GPU: answers under CUDA graphs and eagerly, beside transformers' own in float32."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
)

from trunkattn import LLM, SamplingParams
from trunkattn.engine import RequestOutput
from trunkattn.engine.graphs import CudaCapture

pytestmark = pytest.mark.gpu
VOCAB, NUM_TOKENS = 512, 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
MAX_TIE_GAP = 1e-3  # logits closer than this may swap places: float32 sums in another order
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 1024, "tie_word_embeddings": False,
    "eos_token_id": None, "bos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SHAPE, head_dim=64),
    "wide": lambda: LlamaConfig(**SHAPE, head_dim=128),
    "mistral": lambda: MistralConfig(**SHAPE, head_dim=64, sliding_window=50),
    "gemma2": lambda: Gemma2Config(
        **SHAPE, head_dim=64, sliding_window=50, query_pre_attn_scalar=8, attn_logit_softcapping=10.0
    ),
    # rows of 512 + 64 numbers, as the Hopper kernel reads them, and no experts
    "latent": lambda: DeepseekV3Config(
        **{**SHAPE, "num_key_value_heads": 8}, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=32,
        v_head_dim=48, q_lora_rank=64, first_k_dense_replace=2,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Saved:
    """A model folder, and transformers' model of it on the CPU."""

    path: Path
    reference: Any

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[len(token_ids), vocab_size] float32."""
        with torch.inference_mode():
            return self.reference(torch.tensor([list(token_ids)])).logits[0].float()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    """Random weights, with logits that differ from token to token, and attention that matters."""
    made: dict[str, Saved] = {}

    def make(name: str) -> Saved:
        if name not in made:
            torch.manual_seed(0)
            config = CONFIGS[name]()  # eagerly: elsewhere some versions leave out the soft cap
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
            with torch.no_grad():
                for parameter_name, parameter in model.named_parameters():
                    if "norm" not in parameter_name and "embed" not in parameter_name:
                        parameter.mul_(6.0)
            path = tmp_path_factory.mktemp(name)
            model.save_pretrained(path)
            made[name] = Saved(path, model)
        return made[name]

    return make


def prompts() -> list[list[int]]:
    """A tree of prefixes, equal prompts, a prompt that is a prefix of others, and strangers, up to 330 tokens."""
    generator = torch.Generator().manual_seed(5)

    def tokens(count: int) -> list[int]:
        return torch.randint(1, VOCAB, (count,), generator=generator).tolist()

    trunk, branch = tokens(133), tokens(70)
    tree = [[*trunk, *tokens(3)], [*trunk, *branch, *tokens(1)], [*trunk, *branch, *tokens(90)], trunk[:128]]
    return [*tree, tree[0], tokens(1), tokens(330)]


def assert_greedy(model: Saved, outputs: Sequence[RequestOutput]) -> None:
    """Every token of every answer is the most likely one after those before it, or ties with it."""
    for output in outputs:
        for answer in output.outputs:
            assert len(answer.token_ids) == NUM_TOKENS
            logits = model.logits([*output.prompt_token_ids, *answer.token_ids])[len(output.prompt_token_ids) - 1 : -1]
            chosen = logits.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
            gap = float((logits.amax(1) - chosen).max())
            assert gap < MAX_TIE_GAP, f"a token's logit is {gap:.2e} below the largest in {answer.token_ids}"


SCENARIOS: dict[str, dict[str, Any]] = {
    "graphs": {},
    "eager": {"enforce_eager": True},
    "chunks": {"max_num_batched_tokens": 50},
    "preemption": {"num_pages": 26, "max_model_len": 400, "max_num_batched_tokens": 200},
    "prefill first": {"scheduler_policy": "prefill_first", "max_num_batched_tokens": 100},
    "side by side": {"execution": "streams", "max_num_batched_tokens": 100},
    "pat": {"policy": "pat", "max_num_batched_tokens": 100},
}


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("name", ["llama", "latent"])
def test_answers_are_those_of_transformers(saved: Callable[[str], Saved], name: str, scenario: str) -> None:
    model = saved(name)
    options = {"num_pages": 400, "max_num_seqs": 13, **SCENARIOS[scenario]}
    llm = LLM(model.path, device="cuda", **options)
    outputs = llm.generate(prompts(), GREEDY) + llm.generate(prompts(), GREEDY)  # the prefixes are cached by then
    several = llm.generate(prompts()[:3], SamplingParams(temperature=0, max_tokens=NUM_TOKENS, n=3))
    assert_greedy(model, outputs + several)
    assert len({token for output in outputs for token in output.outputs[0].token_ids}) > 30, "the answers are dull"
    assert (llm.stats.preemptions > 0) == (scenario == "preemption")
    assert llm.stats.prefix_cache_hits > 0 and llm.engine.usage().pages_held == 0


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_windows_have_plans_of_their_own(saved: Callable[[str], Saved], name: str) -> None:
    model = saved(name)
    llm = LLM(model.path, device="cuda", num_pages=400, max_num_seqs=8, max_num_batched_tokens=100)
    assert_greedy(model, llm.generate(prompts(), GREEDY))


def likely(llm: LLM) -> tuple[list[list[int]], torch.Tensor]:
    """Greedy tokens, and the log-probabilities of each prompt's five most likely first tokens."""
    outputs = llm.generate(prompts(), SamplingParams(temperature=0, max_tokens=2, logprobs=5))
    rows = [output.outputs[0].logprobs[0] for output in outputs]  # type: ignore[index]
    best = [sorted(row.values(), key=lambda one: one.rank)[:5] for row in rows]
    return [output.outputs[0].token_ids for output in outputs], torch.tensor(
        [[one.logprob for one in row] for row in best]
    )


@pytest.mark.parametrize("budget", [64, 1024])
@pytest.mark.parametrize("name", ["wide", "latent"])
def test_bfloat16_is_near_float32_with_graphs_and_without(
    saved: Callable[[str], Saved], name: str, budget: int
) -> None:
    model = saved(name)
    options: dict[str, Any] = {"num_pages": 400, "max_num_seqs": 8, "max_num_batched_tokens": budget}
    expected = torch.stack([model.logits(prompt)[-1].log_softmax(0).topk(5).values for prompt in prompts()])
    for eager in (False, True):
        llm = LLM(model.path, device="cuda", dtype="bfloat16", enforce_eager=eager, **options)
        for _ in range(2):  # then as graphs, on cached prefixes
            error = float((likely(llm)[1] - expected).abs().max())
            assert error < 0.15, f"log-probabilities differ by {error:.3f}"


def test_dummy_weights_and_a_cache_of_the_free_memory(saved: Callable[[str], Saved], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((saved("llama").path / "config.json").read_text())
    options: dict[str, Any] = {"device": "cuda", "load_format": "dummy", "max_num_seqs": 4}
    llm, other = (LLM(tmp_path, gpu_memory_utilization=0.5, **options) for _ in range(2))
    assert llm.model.device.type == "cuda" and llm.kv_cache.num_pages == 4 * 1024 // 16
    llm.warm_up()
    answers = [[output.outputs[0].token_ids for output in one.generate(prompts(), GREEDY)] for one in (llm, llm, other)]
    assert answers[0] == answers[1] == answers[2]
    with pytest.raises(ValueError, match=r"num_pages=.*: expected at most the free memory of cuda"):
        LLM(tmp_path, num_pages=1 << 40, **options)
    with pytest.raises(ValueError, match=r"device='cuda:99' cannot run .* torch finds \d+ CUDA devices"):
        LLM(tmp_path, **{**options, "device": "cuda:99"})


def test_work_that_waits_for_the_device_is_not_captured() -> None:
    capture = CudaCapture(torch.device("cuda"))
    number = torch.ones(1, device="cuda")
    with pytest.raises(ValueError, match=r"^enforce_eager=False: expected True for this model.*captured"):
        capture(lambda: number.item())  # type: ignore[arg-type, return-value]
    replay = CudaCapture(torch.device("cuda"))(lambda: number.add_(1))  # type: ignore[arg-type, return-value]
    replay()
    assert number.item() == 2
