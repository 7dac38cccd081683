"""The options of an engine, which check themselves, and the checks that a scheduler and an analysis share with them."""

import re
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from trunkattn.names import EXECUTIONS, FP8_CACHES, POLICIES
from trunkattn.validate import check_bool, check_int, check_real, keep_int

DTYPES = ("auto", "float32", "bfloat16", "float16")
SCHEDULER_POLICIES = ("chunked_prefill", "prefill_first")
OLDER_POLICY_NAMES: Final = MappingProxyType({"hybrid": "chunked_prefill"})  # still accepted
KV_CACHE_DTYPES = ("auto", *FP8_CACHES)
LOAD_FORMATS = ("auto", "dummy")
QUANTIZATIONS = ("int8",)
DEVICE: Final = re.compile(r"auto|cpu|cuda(:[0-9]+)?")
MAX_NUM_SEQS = 1 << 16  # each has a row of the block table from the start
DEFAULT_CACHE_BYTES = 1 << 30  # on a CPU
DEFAULT_GPU_SHARE = 0.9  # of the free memory


def check_scheduler_policy(name: str, value: object) -> str:
    """The scheduler policy that `value` names, by its present name; raises ValueError if there is none."""
    if isinstance(value, str):
        value = OLDER_POLICY_NAMES.get(value, value)
    if value not in SCHEDULER_POLICIES:
        raise ValueError(f"{name}={value!r}: expected one of {', '.join(SCHEDULER_POLICIES)}")
    return str(value)


def check_budget(max_num_seqs: int, max_num_batched_tokens: int) -> None:
    """Raises TypeError or ValueError unless a step's token budget has one token for each running sequence."""
    check_int("max_num_seqs", max_num_seqs, 1)
    check_int("max_num_batched_tokens", max_num_batched_tokens, 1)
    if max_num_batched_tokens < max_num_seqs:
        raise ValueError(
            f"max_num_batched_tokens={max_num_batched_tokens!r}: expected at least max_num_seqs={max_num_seqs!r}, so "
            f"that every running answer gets a token in each step; raise max_num_batched_tokens or lower max_num_seqs"
        )


@dataclass(frozen=True)
class EngineConfig:
    """Options of an engine. `LLM` accepts each of them as a keyword.

    Attributes:
        page_size: tokens per KV page.
        num_pages: KV pages; None: the cache is sized in bytes. Of `num_pages`, `kv_cache_bytes` and
            `gpu_memory_utilization` at most one can be given.
        kv_cache_bytes: bytes of the KV cache, on a CPU at most half of the machine's memory. None: 1 GiB on a CPU; on a
            GPU `gpu_memory_utilization` decides.
        max_num_seqs: sequences that run at once, at most 65,536.
        max_num_batched_tokens: token budget of a step, at least `max_num_seqs`.
        scheduler_policy: how the tokens of a step are shared out. "chunked_prefill": each running answer gets one
            token, and prompts get the rest of the budget, long ones in chunks (Sarathi-Serve's stall-free batching,
            https://arxiv.org/abs/2403.02310, §4); the times between tokens are steady. Its older name "hybrid" is
            accepted too. "prefill_first": steps with whole prompts come first, each with at least one prompt of any
            length and no decode (as in the first vLLM); first tokens are early, but each new prompt stalls the running
            answers.
        max_step_seconds: the time that a step should take at most, with "chunked_prefill": while steps take longer,
            prompts get fewer tokens of each, and no more answers start, so that those which run pause for a shorter
            time. None: any time.
        max_model_len: most tokens of a sequence, prompt and output; None: the lower of the model's limit and the
            cache's.
        policy: packing policy of `AttentionConfig`.
        enable_prefix_caching: reuse the KV pages of equal prefixes.
        dtype: type of weights, activations and KV: "auto" (float32 on a CPU, else the checkpoint's), "float32",
            "bfloat16", "float16" or the torch dtype of that name.
        device: "auto" (the first GPU that can compute attention, else the CPU), "cpu", "cuda", or one GPU such as
            "cuda:1".
        gpu_memory_utilization: the KV cache's share, in (0, 1], of the GPU memory that the weights and a step leave
            free; None: 0.9.
        enforce_eager: on a GPU, launch every kernel of each step and capture no CUDA graphs. On a CPU there are none.
        load_format: "auto" loads the model's weights. "dummy" makes random ones only from config.json, the same each
            time, to measure speed.
        execution: execution of `AttentionConfig`: how a GPU launches the kernels.
        trust_remote_code: run the Python that a model's folder brings. Without it nothing of the folder runs, and
            nobody is asked.
        kv_cache_dtype: type of the KV cache: "auto" (that of the weights), "fp8" or "fp8_e4m3" (float8_e4m3fn), or
            "fp8_e5m2". An 8-bit cache holds twice the tokens of a 16-bit one, and answers change a little.
        quantization: "int8": on a CPU, weights of linear layers are rounded to 255 steps as they are loaded, with a
            scale for 32 inputs of an output, as in GGUF's Q8_0, and a decode step reads a quarter of the bytes. None:
            they stay as they are.
        batch_invariant: a request's logits have the same bits by itself and in any batch. It needs float32 on a CPU and
            a model whose products are all plain linear layers, and costs some speed.
        seed: seeds the random numbers of requests without a seed of their own, so that the same calls in the same order
            give the same answers in each run; None: they differ from run to run.

    Raises:
        TypeError, ValueError: naming the option, its value and what is expected.

    Example:
        >>> EngineConfig(page_size=32, max_num_seqs=8).scheduler_policy
        'chunked_prefill'
    """

    page_size: int = 16
    num_pages: int | None = None
    kv_cache_bytes: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    scheduler_policy: str = "chunked_prefill"
    max_step_seconds: float | None = None
    max_model_len: int | None = None
    policy: str = "auto"
    enable_prefix_caching: bool = True
    dtype: object = "auto"
    device: str = "auto"
    gpu_memory_utilization: float | None = None
    enforce_eager: bool = False
    load_format: str = "auto"
    execution: str = "auto"
    trust_remote_code: bool = False
    kv_cache_dtype: str = "auto"
    quantization: str | None = None
    batch_invariant: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in ("page_size", "max_num_batched_tokens"):
            keep_int(self, name, 1)
        keep_int(self, "max_num_seqs", 1, MAX_NUM_SEQS)
        check_budget(self.max_num_seqs, self.max_num_batched_tokens)
        policy = check_scheduler_policy("scheduler_policy", self.scheduler_policy)
        object.__setattr__(self, "scheduler_policy", policy)
        if self.max_step_seconds is not None:
            self._check_step_seconds(self.max_step_seconds)
        for name in ("num_pages", "kv_cache_bytes"):
            if getattr(self, name) is not None:
                keep_int(self, name, 1)
        if self.max_model_len is not None:
            keep_int(self, "max_model_len", 2)
        if self.gpu_memory_utilization is not None:
            expected = "a number in (0, 1]"
            if not 0 < check_real("gpu_memory_utilization", self.gpu_memory_utilization, expected) <= 1:
                raise ValueError(f"gpu_memory_utilization={self.gpu_memory_utilization!r}: expected {expected}")
        sizes = [name for name in ("num_pages", "kv_cache_bytes", "gpu_memory_utilization") if getattr(self, name)]
        if len(sizes) > 1:
            given = " and ".join(f"{name}={getattr(self, name)}" for name in sizes)
            raise ValueError(f"{given}: expected at most one of them; leave the others out")
        if self.seed is not None:
            keep_int(self, "seed", 0, 2**63 - 1)
        check_bool("enable_prefix_caching", self.enable_prefix_caching)
        check_bool("enforce_eager", self.enforce_eager)
        check_bool("trust_remote_code", self.trust_remote_code)
        check_bool("batch_invariant", self.batch_invariant)
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ValueError(f"kv_cache_dtype={self.kv_cache_dtype!r}: expected one of {', '.join(KV_CACHE_DTYPES)}")
        if self.quantization is not None and self.quantization not in QUANTIZATIONS:
            expected = f"{' or '.join(QUANTIZATIONS)}; leave it out to keep the weights as they are"
            raise ValueError(f"quantization={self.quantization!r}: expected {expected}")
        for name, known in (("policy", POLICIES), ("execution", EXECUTIONS)):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise TypeError(f"{name}={value!r}: expected one of {', '.join(known)}")
            if value not in known:
                raise ValueError(f"{name}={value!r}: expected one of {', '.join(known)}")
        if not DEVICE.fullmatch(str(self.device)):
            raise ValueError(f"device={self.device!r}: expected auto, cpu, cuda, or one GPU such as cuda:1")
        if self.load_format not in LOAD_FORMATS:
            raise ValueError(f"load_format={self.load_format!r}: expected one of {', '.join(LOAD_FORMATS)}")
        if self.dtype_name not in DTYPES:
            raise ValueError(
                f"dtype={self.dtype!r}: expected one of {', '.join(DTYPES)}, or a torch dtype of that name"
            )

    def _check_step_seconds(self, seconds: object) -> None:
        expected = "a finite number of seconds above 0"
        if check_real("max_step_seconds", seconds, expected) <= 0:
            raise ValueError(f"max_step_seconds={seconds!r}: expected {expected}")
        if self.scheduler_policy != "chunked_prefill":
            raise ValueError(
                f"max_step_seconds={seconds!r}: expected None with scheduler_policy={self.scheduler_policy!r}, which "
                'computes prompts whole; leave it out, or use "chunked_prefill"'
            )

    @property
    def dtype_name(self) -> str:
        """`dtype` without torch: "float32" for both "float32" and torch.float32."""
        return str(self.dtype).removeprefix("torch.")
