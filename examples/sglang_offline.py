"""Questions about one document, answered by SGLang: with TrunkAttention the document's KV cache is read once a step.

pip install -e ".[sglang]"                        # in TrunkAttention's folder
python examples/sglang_offline.py MODEL           # add --stock for the attention that SGLang chooses, to compare
"""

import argparse
import sys
import time

try:
    import sglang
except ImportError:
    sys.exit('SGLang is not installed: pip install -e ".[sglang]" in TrunkAttention\'s folder.')

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
    parser.add_argument("--stock", action="store_true", help="use the attention back end that SGLang chooses itself")
    parser.add_argument("--page-size", type=int, default=16, help="tokens of a page (default: 16; SGLang's own is 1)")
    parser.add_argument("--dtype", default="auto", help="of the model (default: auto)")
    parser.add_argument("--max-tokens", type=int, default=32, help="tokens of an answer (default: 32)")
    arguments = parser.parse_args()
    chosen = {} if arguments.stock else {"attention_backend": "trunk"}
    sizes = {"context_length": 2048, "max_total_tokens": 16384, "page_size": arguments.page_size}
    engine = sglang.Engine(model_path=arguments.model, dtype=arguments.dtype, log_level="info", **sizes, **chosen)
    prompts = [f"{DOCUMENT}\nQuestion: {question}\nAnswer:" for question in QUESTIONS]
    sampling = {"temperature": 0, "max_new_tokens": arguments.max_tokens}
    engine.generate(DOCUMENT, {"max_new_tokens": 1})  # the document is in the cache when the questions come
    start = time.perf_counter()
    answers = engine.generate(prompts, sampling)
    seconds = time.perf_counter() - start
    for question, answer in zip(QUESTIONS, answers, strict=True):
        print(f"{question} {answer['text']!r}")
    print(f"{sum(answer['meta_info']['completion_tokens'] for answer in answers)} tokens in {seconds:.1f} s")
    engine.shutdown()


if __name__ == "__main__":  # SGLang starts processes that import this file
    main()
