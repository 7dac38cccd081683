"""Whether vLLM on a GPU answers with ours as it does with its own attention, and whether a step waits for the device.

    python -m benchmarks.engines.vllm_equality                       # results/vllm-equality-CARD.json

Small models with random weights, scaled so that the answer hangs on what is far back (a control with other tokens in
the shared prefix shows it), in one process per case and back end, --at-once of them side by side. Requests are greedy
and share a prefix; each is generated twice, the second time from the prefix cache. Compared are the tokens up to the
first that differs; there, how far apart the first back end saw the two candidates, against how much the
log-probabilities of equal tokens differ between the back ends: a gap no wider than that is rounding. A row is
`within_rounding` by the measure of sglang_equality.py. An fp8 cache need not be: FLASH_ATTN rounds queries to fp8 then.

Cases: context-parallel (two cards share each request; the model has one KV head, and so has one-kv-head, on one card);
invariant (VLLM_BATCH_INVARIANT=1: also whether each request's tokens and log-probabilities alone have the same bits);
bf16; mixed (long prompts that arrive in chunks while others decode, heads as of Llama-3-8B); fp8 (KV cache); drafts
(n-gram speculation, several query tokens); window (a sliding window, Mistral); soft-cap (Gemma2, windows in every other
layer); gpt-oss (sinks, windows in every other layer, heads of 64, experts) and gpt-oss-fp8; gemma-3 (heads of 256,
windows in five of six layers); group-7 (seven query heads per KV head, as in Qwen2.5-7B); tensor-parallel (two cards,
if there are two). Each case of the same model as bf16, one-kv-head or gpt-oss is also compared with that, by the same
back end: `alone`.

The case `steady` traces 20 decode steps of 32 requests (calls that wait for the device, by name) and compares memory
after the first steps with memory after --steps of them.
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

BACKENDS = ("FLASH_ATTN", "CUSTOM")
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, "hidden_act": "silu"}
MANY_HEADS = LLAMA | {"num_attention_heads": 32, "num_key_value_heads": 8}
ONE_KV_HEAD = LLAMA | {"num_key_value_heads": 1}
MISTRAL = {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "sliding_window": 512,
}  # fmt: skip
GEMMA = {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "rms_norm_eps": 1e-6, "sliding_window": 512,
    "attn_logit_softcapping": 20.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 128,
    "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
}  # fmt: skip
GEMMA_3 = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "rms_norm_eps": 1e-6, "sliding_window": 512,
    "num_hidden_layers": 6, "layer_types": ["sliding_attention"] * 5 + ["full_attention"], "num_attention_heads": 4,
    "head_dim": 256, "query_pre_attn_scalar": 256, "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}  # fmt: skip
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "rms_norm_eps": 1e-5, "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "num_attention_heads": 16, "head_dim": 64,
    "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 512,
}  # fmt: skip
GROUP_7 = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "num_attention_heads": 14, "hidden_size": 1792,
}  # fmt: skip
# vLLM's other merge needs NCCL 2.29.7; with an older one it leaves results unmerged and does not say so.
ALL_TO_ALL = {"dcp_comm_backend": "a2a"}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bf16": (LLAMA, {}),
    "mixed": (MANY_HEADS, {"max_num_batched_tokens": 2048}),
    "fp8": (LLAMA, {"kv_cache_dtype": "fp8"}),
    "drafts": (LLAMA, {"speculative_config": DRAFTS}),
    "window": (MISTRAL, {}),
    "soft-cap": (GEMMA, {}),
    "gpt-oss": (GPT_OSS, {}),
    "gpt-oss-fp8": (GPT_OSS, {"kv_cache_dtype": "fp8"}),
    "gemma-3": (GEMMA_3, {}),
    "group-7": (GROUP_7, {}),
    "tensor-parallel": (LLAMA, {"tensor_parallel_size": 2}),
    "one-kv-head": (ONE_KV_HEAD, {}),
    "context-parallel": (ONE_KV_HEAD, {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, **ALL_TO_ALL}),
    "invariant": (LLAMA, {}),
    "steady": (LLAMA, {}),
}
# What `alone` compares with, by the model's folder.
PLAIN = {"llama": "bf16", "llama-one-kv-head": "one-kv-head", "gpt_oss": "gpt-oss"}
TOKENS, SHARED, NUM_PROMPTS, STEADY_REQUESTS = 48, 1040, 24, 32
STEP = 2**-4  # between two logits of 8 to 16 in bfloat16
CACHE_BYTES, GRAPHS = 3 << 30, [1, 2, 4, 8, 16, 24, 32, 64, 96, 128]


def folder_name(case: str) -> str:
    """Of the case's model."""
    shape = CASES[case][0]
    kv_heads = shape.get("num_key_value_heads")
    return shape["model_type"] + {1: "-one-kv-head", 8: "-many-heads"}.get(kv_heads, "")


def start(folder: Path, case: str, backend: str) -> Any:
    """An engine with the case's model."""
    from vllm import LLM

    return LLM(
        str(folder), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=12288,
        gpu_memory_utilization=0.05, kv_cache_memory_bytes=CACHE_BYTES, attention_backend=backend,
        enable_prefix_caching=True, max_num_seqs=32, seed=0,
        compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": GRAPHS},
        **{"max_num_batched_tokens": 1024} | CASES[case][1],
    )  # fmt: skip


def prompts(changed: bool, case: str) -> list[list[int]]:
    """24 prompts that share. changed: the first half of each is made of other tokens."""
    from benchmarks.engines import engine_equality

    if case != "mixed":
        return engine_equality.prompts(changed)
    rng = np.random.default_rng(0)
    found = [rng.integers(3, engine_equality.LARGEST_TOKEN, 3000 + 37 * i).tolist() for i in range(24)]
    return engine_equality.with_other_tokens(found) if changed else found


def answers(llm: Any, asked: list[list[int]], only: int | None = None) -> list[dict[str, Any]]:
    """Each request's tokens, and its steps' two best log-probabilities by token. only: of this prompt, with an empty
    prefix cache."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False, logprobs=2)
    if only is not None:
        asked = asked[only : only + 1]
        llm.reset_prefix_cache()
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in asked], sampling, use_tqdm=False)
    return [
        {
            "tokens": list(output.outputs[0].token_ids),
            "best": [
                {str(token): value.logprob for token, value in step.items()} for step in output.outputs[0].logprobs
            ],
        }
        for output in outputs
    ]


def steady(llm: Any, steps: int) -> dict[str, Any]:
    """What decode steps wait for, and what they keep."""
    import torch
    from torch.profiler import ProfilerActivity, profile
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True, detokenize=False)
    rng = np.random.default_rng(0)
    shared = rng.integers(3, 30000, SHARED).tolist()
    for number in range(STEADY_REQUESTS):
        prompt = shared + rng.integers(3, 30000, 40 + number).tolist()
        llm.llm_engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
    memory, done = {}, 0

    def go_on(until: int) -> None:
        nonlocal done
        while done < until and llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
            done += 1
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        memory[str(done)] = {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved(),
                             "used_on_card": total - free}  # fmt: skip

    go_on(300)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        go_on(320)
    calls = Counter(event.name for event in trace.events() if event.name.startswith("cuda"))
    kernels = Counter(event.name for event in trace.events() if event.device_type == torch.autograd.DeviceType.CUDA)
    copies = {name: count for name, count in kernels.items() if "Memcpy DtoH" in name}
    go_on(1000)
    go_on(steps - 10)
    return {
        "traced_steps": 20, "calls": dict(calls), "copies_to_host": copies, "memory": memory, "steps": done,
        "kernels": {name[:60]: count for name, count in kernels.most_common(40)},
    }  # fmt: skip


def work(case: str, backend: str, steps: int, answer: Path) -> None:
    """One case with one back end, in a process of its own."""
    from benchmarks.engines.vllm_tpot import hide_benchmarks

    asked, others = prompts(False, case), prompts(True, case)
    hide_benchmarks(sys.path)
    from prometheus_client import REGISTRY

    llm = start(answer.parent / folder_name(case), case, backend)
    import torch

    found: dict[str, Any] = {"card": torch.cuda.get_device_name()}
    if case == "steady":
        found["steady"] = steady(llm, steps)
    else:
        found["rounds"] = [answers(llm, asked) for _ in range(2)]
        found["control"] = answers(llm, others)
        if case == "invariant":
            found["alone"] = [answers(llm, asked, only=number)[0] for number in range(NUM_PROMPTS)]
    found["counters"] = {
        f"{sample.name} {' '.join(sample.labels.get(key, '') for key in ('path', 'reason'))}".strip(): sample.value
        for metric in REGISTRY.collect() for sample in metric.samples
        if sample.name.startswith("trunkattn_") and "created" not in sample.name and sample.value
    }  # fmt: skip
    answer.write_text(json.dumps(found))


def run_cases(cases: list[str], steps: int, at_once: int) -> dict[str, dict[str, Any]]:
    """By case and back end; a case that fails has its log's last lines instead."""
    from benchmarks.engines.engine_equality import Job, run_jobs, save_model

    always = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    jobs = []
    for case in cases:
        environment = always | {"VLLM_BATCH_INVARIANT": str(int(case == "invariant"))}
        jobs += [Job(case, backend, ["--steps", str(steps)], environment) for backend in BACKENDS]
    with tempfile.TemporaryDirectory() as folder:
        for name, shape in {folder_name(case): CASES[case][0] for case in cases}.items():
            save_model(Path(folder, name), shape)
        return run_jobs("benchmarks.engines.vllm_equality", jobs, Path(folder), at_once)


def summarize(case: str, found: dict[str, Any], alone: dict[str, Any] | None) -> dict[str, Any]:
    """A row of the result. alone: what bf16 on one card found, for cases of the same model."""
    from benchmarks.engines.engine_equality import compare, within_rounding

    first, other = (found[backend] for backend in BACKENDS)
    failed = {backend: run["failed"] for backend, run in found.items() if "failed" in run}
    if failed:
        return {"case": case, "failed": failed}
    row: dict[str, Any] = {"case": case, "counters": other["counters"]}
    if case == "steady":
        return row | {backend: run["steady"] for backend, run in found.items()}
    for number, name in enumerate(("cold", "cached")):
        row[name] = compare(other["rounds"][number], first["rounds"][number])
    if alone is not None and not any("failed" in run for run in alone.values()):
        row["alone"] = {name: compare(run["rounds"][0], alone[name]["rounds"][0]) for name, run in found.items()}
    if case == "invariant":
        for name, run in found.items():
            same = [[a == b for a, b in zip(run["alone"], batched, strict=True)] for batched in run["rounds"]]
            row[f"same_bits_{name}"] = {"cold": sum(same[0]), "cached": sum(same[1]), "of": NUM_PROMPTS}
    row["control"] = compare(first["control"], first["rounds"][0])
    own = row["same_backend_cold_and_cached"] = compare(first["rounds"][1], first["rounds"][0])
    row["within_rounding"] = all(within_rounding(row[name], own, STEP) for name in ("cold", "cached"))
    return row


def main() -> None:
    from benchmarks.lib.options import integer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    alone = [case for case in CASES if case not in ("tensor-parallel", "context-parallel")]
    parser.add_argument("--cases", nargs="+", default=alone, choices=list(CASES))
    parser.add_argument("--suffix", default="", help="of the result's name")
    parser.add_argument("--steps", type=int, default=10_000, help="decode steps of the case steady")
    parser.add_argument("--at-once", type=integer(1, 64), default=10, help="processes that run side by side")
    parser.add_argument("--work", nargs=3, metavar=("CASE", "BACKEND", "FILE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        case, backend, answer = arguments.work
        return work(case, backend, arguments.steps, Path(answer))
    from benchmarks.lib.report import short_name, write_result

    found = run_cases(arguments.cases, arguments.steps, arguments.at_once)
    rows = []
    for case in arguments.cases:
        plain = PLAIN.get(folder_name(case), case)
        rows.append(summarize(case, found[case], found.get(plain) if plain != case else None))
    for row in rows:
        print(json.dumps(row)[:1500], flush=True)
    cards = [run["card"] for case in found.values() for run in case.values() if "card" in run]
    card = cards[0] if cards else "none"
    print(
        write_result(
            f"vllm-equality-{short_name(card)}{arguments.suffix}",
            {"card": card, "rows": rows},
            "vllm",
            "triton",
        )
    )


if __name__ == "__main__":
    main()
