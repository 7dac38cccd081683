"""Runs a tiny model in vLLM, in this process, and tells what it generated and which classes did it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

from .prompts import NUM_PROMPTS, equal, prompts  # noqa: F401

MAX_TOKENS = 24
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False)


@dataclass(frozen=True)
class Run:
    """tokens: of each round, prompt and sample. backends, impls: class names in use, of builders and of layers."""

    tokens: list[list[list[int]]]
    cached_tokens: int
    preemptions: int
    drafts: int
    accepted_drafts: int
    backends: set[str]
    impls: set[str]
    specs: set[str]
    block_sizes: set[int]
    steps: int
    kv_bytes_saved: int


def _counter(llm: LLM, name: str) -> int:
    return sum(int(metric.value) for metric in llm.get_metrics() if metric.name == f"vllm:{name}")


def make_llm(model: Path, **options: Any) -> LLM:
    """To be followed by `shut_down`."""
    defaults: dict[str, Any] = {"dtype": "float32", "max_model_len": 640, "max_num_seqs": 16, "enforce_eager": True}
    # Without it vLLM wants 92 % of the machine's memory to be free, even where the number of blocks is given.
    defaults |= {"kv_cache_memory_bytes": 64 << 20}
    defaults |= {"enable_prefix_caching": True, "skip_tokenizer_init": True, "disable_log_stats": False}
    return LLM(str(model), **{**defaults, **options})


def shut_down() -> None:
    cleanup_dist_env_and_memory()


def generate(
    model: Path,
    sampling: SamplingParams = GREEDY,
    rounds: int = 2,
    asked: list[list[int]] | None = None,
    **options: Any,
) -> Run:
    """Generates for all prompts, or those that are `asked`, `rounds` times: the second finds them in the prefix
    cache."""
    try:
        return _run(make_llm(model, **options), sampling, rounds, prompts() if asked is None else asked)
    finally:
        shut_down()


def _runner(llm: LLM) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def traffics(llm: LLM) -> list[Any]:
    """Of each attention group that is ours."""
    groups = [group for groups in _runner(llm).attn_groups for group in groups]
    return [getattr(group.get_metadata_builder(), "traffic", None) for group in groups]


def _run(llm: LLM, sampling: SamplingParams, rounds: int, asked: list[list[int]]) -> Run:
    tokens, cached = [], 0
    for _ in range(rounds):
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in asked], sampling, use_tqdm=False)
        tokens.append([list(sample.token_ids) for output in outputs for sample in output.outputs])
        cached += sum(output.num_cached_tokens or 0 for output in outputs)
    runner = _runner(llm)
    groups = [group for groups in runner.attn_groups for group in groups]
    layers = runner.vllm_config.compilation_config.static_forward_context
    found = traffics(llm)
    return Run(
        tokens=tokens,
        cached_tokens=cached,
        preemptions=_counter(llm, "num_preemptions"),
        drafts=_counter(llm, "spec_decode_num_draft_tokens"),
        accepted_drafts=_counter(llm, "spec_decode_num_accepted_tokens"),
        backends={group.backend.__name__ for group in groups},
        impls={
            type(getattr(layers[name], "impl", layers[name])).__name__ for group in groups for name in group.layer_names
        },
        specs={type(group.kv_cache_spec).__name__ for group in groups},
        block_sizes={group.kv_cache_spec.block_size for group in groups},
        steps=max(traffic.steps if traffic else 0 for traffic in found),
        kv_bytes_saved=sum(traffic.saved for traffic in found if traffic),
    )
