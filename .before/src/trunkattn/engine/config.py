"""What the engine can be told: `EngineConfig` once per engine, `SamplingParams` per request; validated when made."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral, Real

DTYPES = ("auto", "float32", "bfloat16", "float16")
SCHEDULER_POLICIES = ("hybrid", "prefill_first")
GREEDY_BELOW = 1e-5  # a smaller temperature is 0: its softmax is one-hot in float32 anyway
LOAD_FORMATS = ("auto", "dummy")
DEFAULT_CACHE_BYTES = 1 << 30  # on a CPU
DEFAULT_GPU_SHARE = 0.9  # of the memory that is free


def check_int(name: str, value: object, low: int, high: int | None = None) -> int:
    """`value` as an int within [low, high].

    Raises:
        TypeError: not an integer (a bool is not one).
        ValueError: out of range.
    """
    expected = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}={value!r}: expected {expected}")
    number = int(value)
    if number < low or (high is not None and number > high):
        raise ValueError(f"{name}={value!r}: expected {expected}")
    return number


def check_real(name: str, value: object, expected: str) -> float:
    """`value` as a finite float; the caller checks the range that `expected` words."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}={value!r}: expected {expected}")
    if not math.isfinite(value):
        raise ValueError(f"{name}={value!r}: expected {expected}")
    return float(value)


def check_bool(name: str, value: object) -> None:
    """Raises TypeError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: expected True or False")


def check_budget(max_num_seqs: int, max_num_batched_tokens: int) -> None:
    """Raises TypeError or ValueError unless each of the sequences can decode a token within the budget of a step."""
    check_int("max_num_seqs", max_num_seqs, 1)
    check_int("max_num_batched_tokens", max_num_batched_tokens, 1)
    if max_num_batched_tokens < max_num_seqs:
        raise ValueError(
            f"max_num_batched_tokens={max_num_batched_tokens!r}: expected at least max_num_seqs={max_num_seqs!r}, so "
            f"that every running decode gets its token in each step; raise the one or lower the other"
        )


@dataclass(frozen=True)
class EngineConfig:
    """Options of an engine.

    Attributes:
        page_size: tokens per KV page.
        num_pages: KV pages; None sizes the cache by bytes.
        kv_cache_bytes: bytes of the KV cache, on a CPU at most half of the machine's. None: on a CPU 1 GiB, on a GPU by
            `gpu_memory_utilization`.
        gpu_memory_utilization: share for the KV cache of the GPU memory that is free beside the weights and what a step
            takes; None: 0.9. At most one of these three is given.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: token budget of a step, at least `max_num_seqs`.
        scheduler_policy: who gets a step's tokens. "hybrid": every decode one, then prompts, a long one in chunks, the
            rest of the budget (Sarathi-Serve's stall-free batching): steady times between tokens. "prefill_first":
            whole prompts while any can start, one at least however long, and no decode beside them (the first vLLM):
            early first tokens, but each new prompt stalls the running answers.
        max_model_len: tokens of a sequence, prompt and output; None: the model's limit or the cache's, the lower.
        policy, execution: packing policy, and on a GPU the way of launching kernels, of `AttentionConfig`.
        enable_prefix_caching: reuse the KV pages of equal prefixes.
        dtype: weights, activations and KV: "auto" (float32 on a CPU, else the checkpoint's), "float32", "bfloat16",
            "float16" or the torch dtype of that name.
        device: "cpu", "cuda", or one GPU such as "cuda:1".
        enforce_eager: on a GPU, launch every kernel of each step rather than replay CUDA graphs; on a CPU it is so
            anyway.
        load_format: "auto" loads the model's weights. "dummy" makes random ones, the same each time, from config.json
            alone: for measuring speed.

    Raises:
        TypeError, ValueError: naming the option, its value and what was expected.
    """

    page_size: int = 16
    num_pages: int | None = None
    kv_cache_bytes: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    scheduler_policy: str = "hybrid"
    max_model_len: int | None = None
    policy: str = "auto"
    enable_prefix_caching: bool = True
    dtype: object = "auto"
    device: str = "cpu"
    gpu_memory_utilization: float | None = None
    enforce_eager: bool = False
    load_format: str = "auto"
    execution: str = "auto"

    def __post_init__(self) -> None:
        check_int("page_size", self.page_size, 1)
        check_budget(self.max_num_seqs, self.max_num_batched_tokens)
        if self.scheduler_policy not in SCHEDULER_POLICIES:
            raise ValueError(
                f"scheduler_policy={self.scheduler_policy!r}: expected one of {', '.join(SCHEDULER_POLICIES)}"
            )
        for name in ("num_pages", "kv_cache_bytes"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 1)
        if self.max_model_len is not None:
            check_int("max_model_len", self.max_model_len, 2)
        if self.gpu_memory_utilization is not None:
            expected = "a number in (0, 1]"
            if not 0 < check_real("gpu_memory_utilization", self.gpu_memory_utilization, expected) <= 1:
                raise ValueError(f"gpu_memory_utilization={self.gpu_memory_utilization!r}: expected {expected}")
        sizes = [name for name in ("num_pages", "kv_cache_bytes", "gpu_memory_utilization") if getattr(self, name)]
        if len(sizes) > 1:
            given = " and ".join(f"{name}={getattr(self, name)}" for name in sizes)
            raise ValueError(f"{given}: expected at most one of them")
        check_bool("enable_prefix_caching", self.enable_prefix_caching)
        check_bool("enforce_eager", self.enforce_eager)
        for name in ("policy", "execution"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"{name}={getattr(self, name)!r}: expected its name")
        if self.load_format not in LOAD_FORMATS:
            raise ValueError(f"load_format={self.load_format!r}: expected one of {', '.join(LOAD_FORMATS)}")
        if self.dtype_name not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r}: expected one of {', '.join(DTYPES)}, or the torch dtype")

    @property
    def dtype_name(self) -> str:
        """`dtype` without torch: "float32" for both "float32" and torch.float32."""
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled; the names and defaults are vLLM's.

    Attributes:
        n: answers for the prompt, which is computed once.
        temperature: divides the logits; below 1e-5 the most likely token is taken (greedy).
        top_p: keep the fewest most likely tokens whose probabilities sum to at least this, 0 < top_p <= 1.
        top_k: keep this many most likely tokens; 0 or -1 keeps all. Applied before top_p.
        seed: the same seed gives the same answers whatever else is in the batch; answer i uses the stream (seed, i).
        stop: string or strings that end the answer; the text ends before the string.
        stop_token_ids: token ids that end the answer; they stay in `token_ids`, not in the text.
        max_tokens: most tokens of an answer; None: up to the engine's `max_model_len`.
        ignore_eos: go on after the end-of-sequence token.
        logprobs: log-probabilities reported per token: this many most likely tokens and the sampled one, from the
            unmodified logits; None: none.

    Raises:
        TypeError, ValueError: naming the parameter, its value and what was expected.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: str | Iterable[str] = ()
    stop_token_ids: Iterable[int] = ()
    max_tokens: int | None = 16
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        check_int("n", self.n, 1)
        if check_real("temperature", self.temperature, "a finite number >= 0") < 0:
            raise ValueError(f"temperature={self.temperature!r}: expected a finite number >= 0")
        if not 0 < check_real("top_p", self.top_p, "a number in (0, 1]") <= 1:
            raise ValueError(f"top_p={self.top_p!r}: expected a number in (0, 1]")
        check_int("top_k", self.top_k, -1)
        if self.seed is not None:
            check_int("seed", self.seed, 0, 2**63 - 1)
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 1)
        check_bool("ignore_eos", self.ignore_eos)
        if self.logprobs is not None:
            check_int("logprobs", self.logprobs, 0)
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _stop_token_ids(self.stop_token_ids))

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return tuple(self.stop)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """`stop_token_ids` as a tuple."""
        return tuple(self.stop_token_ids)


def _stop_strings(stop: object) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else stop
    if strings is None:
        return ()
    if not isinstance(strings, Iterable):
        raise TypeError(f"stop={stop!r}: expected a string or several strings")
    strings = tuple(strings)
    for string in strings:
        if not isinstance(string, str):
            raise TypeError(f"stop={stop!r}: expected a string or several strings")
        if not string:
            raise ValueError(f"stop={stop!r}: expected strings that are not empty")
    return strings


def _stop_token_ids(token_ids: object) -> tuple[int, ...]:
    if token_ids is None:
        return ()
    if isinstance(token_ids, str) or not isinstance(token_ids, Iterable):
        raise TypeError(f"stop_token_ids={token_ids!r}: expected several token ids")
    return tuple(check_int("stop_token_ids", token_id, 0) for token_id in token_ids)
