"""The differences between vLLM 0.26 and 0.33 that the plug-in meets. This module does not import vLLM by itself.

Differences that need no code here: the default of a layer's `supports_dcp` was True before 0.30, so ours sets False;
`get_supported_kernel_block_sizes` gets an argument from 0.31 on, and ours has it with a default; `seq_lens_cpu`
disappeared in 0.30, and ours does not read it; from 0.32 on a back end may have its own name, so TRUNK_MLA is one, and
before that latent attention has only CUSTOM; `_build_decode` of latent attention has further arguments after 0.26, and
ours takes any.
"""

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from types import MappingProxyType
from typing import Any, Final

import torch

from trunkattn.gpu.cards import card_at
from trunkattn.integrations.version_range import VersionRange
from trunkattn.names import FP8_CACHES

# `make test-vllm-all` runs 0.27 to 0.32 from vLLM's packages for CPUs, and the Python of 0.33 over the compiled parts
# of 0.32. On GPUs the oldest and the newest have run.
TESTED: Final = VersionRange("vLLM", (0, 26), (0, 33))

# Back ends that vLLM asks for on a CPU, independent of the selection. CPU_MLA and AMX_MLA do not exist in 0.27; they do
# in 0.32.
CPU_BACKENDS: Final = ("CPU_ATTN", "CPU_MLA", "AMX_MLA")

# The kinds of layers that `attention_config.backend_per_kind` names, of keys and values and of latent attention.
LATENT_KIND: Final = "mla_attention"

# Kinds of KV cache of an attention group, by the exact class name, because subclasses change what is stored. The
# unsupported ones vary: RSWASpec is in 0.27, CircularBufferSpec is from 0.32 on. For layers that attend within chunks
# of a request vLLM makes a row of each chunk, so that a builder plans them as any other.
SUPPORTED_SPECS: Final = frozenset({"FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec"})
LATENT_SPECS: Final = frozenset({"MLAAttentionSpec"})

# kv_cache_dtype -> dtype; "auto" is the model's. vLLM allocates fp8 caches as bytes.
KV_DTYPES: Final = MappingProxyType(
    {
        "auto": None,
        "float16": torch.float16,
        "bfloat16": torch.bfloat16,
        **{name: getattr(torch, dtype) for name, dtype in FP8_CACHES.items()},
    }
)

# The same of latent attention, whose layer reads every 8-bit cache as e4m3; and caches whose rows hold scales, too.
LATENT_KV_DTYPES: Final = MappingProxyType({name: KV_DTYPES[name] for name in KV_DTYPES if name != "fp8_e5m2"})
PACKED_LATENT_DTYPES: Final = ("fp8_ds_mla", "nvfp4_ds_mla")

NO_LATENT_ON_CPU: Final = (
    "attention_backend=TRUNK_MLA or CUSTOM: TrunkAttention decodes the latent attention (MLA) that this model has only "
    "on NVIDIA GPUs; leave attention_backend out"
)

# On a CPU vLLM does not tell a back end by the kind of layer.
ONE_KIND_OF_TWO: Final = (
    "attention_config.backend_per_kind with CUSTOM for full_attention alone, as this model has layers with a sliding "
    "window, which vLLM does not tell from the others on a CPU"
)
WINDOWS_UNKNOWN: Final = (
    "attention_config.backend_per_kind names CUSTOM for sliding_window alone, and this model's configuration has no "
    "sliding_window: on a CPU all its layers run in vLLM's CPU_ATTN; to run them here, name CUSTOM for full_attention "
    "too"
)

# vLLM's back end that selects keys for each query.
SPARSE_LATENT: Final = "FLASHMLA_SPARSE"
_BOTH_KINDS: Final = '{"mla_attention": "TRUNK_MLA", "full_attention": "CUSTOM"}'
_WITHOUT_WINDOW: Final = '{"mla_attention": "TRUNK_MLA"}'

# The option with which a model that takes images serves only text. Then its attention is causal.
TEXT_ALONE: Final = "language_model_only=True"

# Options of the engine that change the attention: their path, the value that means off, their name. On GPUs vLLM asks
# the back end about them, with more arguments in each version up to 0.33; on a CPU it does not ask.
REFUSED_OPTIONS: Final = (
    ("parallel_config.prefill_context_parallel_size", 1, "prefill context parallelism"),
    ("attention_config.use_non_causal", False, "non-causal attention"),
    ("model_config.is_mm_prefix_lm", False, f"attention in both directions over image tokens, unless {TEXT_ALONE}"),
    ("model_config.rswa_window", None, "reference sliding-window attention"),
    ("model_config.is_diffusion", False, "diffusion language models"),
)

# Further options that are refused on a CPU.
REFUSED_CPU_OPTIONS: Final = (("parallel_config.decode_context_parallel_size", 1, "decode context parallelism"),)

# Further options that are refused on a GPU. CUDA graphs would be captured before the first step measures the scales.
REFUSED_GPU_OPTIONS: Final = (("cache_config.calculate_kv_scales", False, "fp8 scales measured while running"),)

# The order of the axes of `kv_cache_shape` in memory, by (vLLM's layout, whether a layer axis comes first).
STRIDE_ORDERS: Final = MappingProxyType(
    {
        ("NHD", False): (0, 2, 1, 3),
        ("NHD", True): (1, 0, 3, 2, 4),
        ("HND", False): (0, 1, 2, 3),
        ("HND", True): (1, 2, 0, 3, 4),
    }
)

# Arguments that models pass to a layer although they are off. False and None always mean off.
OFF_VALUES: Final = MappingProxyType({"chunk_lookback": -1})


def installed() -> str:
    """vLLM's version. It is not read from package metadata, because the distribution has several names."""
    import vllm

    return str(vllm.__version__)


def refusal(version: str) -> str | None:
    """The reason why this version cannot be used, and what to do; None if it can."""
    release = TESTED.parse(version)
    if release is None or release >= TESTED.oldest:
        return None
    return f"vLLM {version} is older than the versions that TrunkAttention supports ({TESTED}): upgrade vLLM"


def served(on_cpu: bool) -> str:
    """What the plug-in serves and refuses here, in words."""
    has_all = on_cpu or card_at("cuda").has_e4m3
    caches = ", ".join(name for name, dtype in KV_DTYPES.items() if has_all or dtype != torch.float8_e4m3fn)
    options = (*REFUSED_OPTIONS, *(REFUSED_CPU_OPTIONS if on_cpu else REFUSED_GPU_OPTIONS))
    latent = "" if on_cpu else " and latent attention (MLA)"
    first = "multi-head latent attention (MLA)" if on_cpu else "sparse attention"
    refused = ", ".join((first, *(name for *_, name in options)))
    return (
        f"It serves full and sliding-window attention{latent} with kv_cache_dtype {caches}, "
        f"and refuses, among others, {refused}"
    )


def instead(options: Mapping[str, Any]) -> str:
    """What to do about options that our back end refuses, by those that vLLM's `validate_configuration` has."""
    if options.get("use_mm_prefix"):
        return f"serve text alone, with {TEXT_ALONE}, or leave attention_backend out"
    if options.get("use_per_head_quant_scales"):
        return "choose kv_cache_dtype=bfloat16, which has no scales, or leave attention_backend out"
    return "turn this off or leave attention_backend out"


def instead_of_separate(options: Mapping[str, Any]) -> str:
    """What to choose instead of our back end of keys and values, by the same options."""
    if not options.get("use_mla"):
        return instead(options)
    if options.get("has_sliding_window"):
        return instead_of_latent(options)
    return f"these layers are latent attention (MLA): choose TRUNK_MLA for them, with backend_per_kind={_BOTH_KINDS}"


def instead_of_latent(options: Mapping[str, Any]) -> str:
    """What to choose instead of our latent attention, by the options that vLLM's `validate_configuration` has."""
    if not options.get("use_mla", True):
        return f"these layers have keys and values: choose CUSTOM for them, with backend_per_kind={_BOTH_KINDS}"
    if options.get("use_sparse"):
        return f"leave attention_backend out, or choose {SPARSE_LATENT}, which selects keys for each query"
    if options.get("kv_cache_dtype") in PACKED_LATENT_DTYPES:
        return f"choose kv_cache_dtype={' or '.join(LATENT_KV_DTYPES)}, or leave attention_backend out"
    if options.get("has_sliding_window"):
        return f"leave attention_backend out, and choose backend_per_kind={_WITHOUT_WINDOW} for the other layers"
    return instead(options)


def has_scales(kv_cache_dtype: str | None) -> bool:
    """Whether a layer multiplies what it stores with this kv_cache_dtype by scales."""
    dtype = KV_DTYPES.get(kv_cache_dtype or "auto")
    return dtype is not None and dtype.itemsize == 1


def no_latent(version: str, error: Exception) -> str:
    """The message for a version whose latent attention has not what ours is made of."""
    return (
        f"attention_backend=TRUNK_MLA: the latent attention (MLA) of vLLM {version} on this platform lacks something "
        f"that TrunkAttention needs ({' '.join(str(error).split())}): leave attention_backend out, or use a newer vLLM"
    )


def no_registry(version: str, error: ImportError) -> str:
    """The reason why the plug-in cannot even register, and what to do."""
    return refusal(version) or (
        f"vLLM {version} takes no attention back end from a plug-in ({' '.join(str(error).split())}): install one of "
        f"{TESTED}"
    )


def broken_contract(version: str, error: Exception) -> str:
    """The message for a version that lacks something that the plug-in needs."""
    return (
        f"vLLM {version} is not a version that TrunkAttention is tested with ({TESTED}), and it lacks something that "
        f"TrunkAttention needs ({' '.join(str(error).split())}): install a vLLM of these versions, or a newer trunkattn"
    )


def has_triton() -> bool:
    """Whether vLLM finds Triton, which its packages for CPUs do not need."""
    from vllm.triton_utils import HAS_TRITON

    return bool(HAS_TRITON)


def hide_numba_from_look_ups() -> None:
    """Lets further engines start in this process.

    A worker of vLLM from 0.32 on a CPU looks into the `__dict__` of everything in every module, and takes it for a
    dictionary. The library object of Numba's compiler answers that name, as any, with a function, and keeps its
    answers: here it gets one that is a dictionary.
    """
    answers = getattr(import_module("llvmlite.binding.ffi").lib, "_fntab", None)
    if isinstance(answers, dict):
        answers["__dict__"] = {}


def refused_options(vllm_config: Any, options: Iterable[tuple[str, Any, str]] = REFUSED_OPTIONS) -> list[str]:
    """Unsupported options of the engine that are on. An option that the version does not have is off."""
    found = []
    for path, off, name in options:
        value = vllm_config
        for attribute in path.split("."):
            value = getattr(value, attribute, None)
        if value is not None and value != off:
            found.append(f"{name} ({path}={value})")
    return found


def is_off(name: str, value: Any) -> bool:
    """Whether an argument that a model passes to its layers has no effect."""
    return value is None or value is False or (name in OFF_VALUES and value == OFF_VALUES[name])


def kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, ...]:
    """The shape of one layer's cache, with keys and values in the last axis. vLLM asks for it up to 0.28 and has the
    same shape itself from 0.29 on."""
    return num_blocks, num_kv_heads, block_size, 2 * head_size


def typed_cache(kv_cache: torch.Tensor, kv_dtype: torch.dtype) -> torch.Tensor:
    """A cache as numbers. vLLM allocates those of 8 bits as bytes; any other keeps its type, for the library to check
    it, since the bits of one 16-bit type are other numbers in another."""
    return kv_cache.view(kv_dtype) if kv_cache.dtype == torch.uint8 else kv_cache


def split_cache(kv_cache: torch.Tensor, head_size: int, kv_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(keys, values) [num_blocks, block_size, num_kv_heads, head_size]: views of a cache of `kv_cache_shape`, in any
    memory layout."""
    keys, values = typed_cache(kv_cache, kv_dtype).transpose(1, 2).split(head_size, -1)
    return keys, values


def kv_cache_stride_order(with_layers: bool) -> tuple[int, ...]:
    """The axes of `kv_cache_shape`, or of the same after a layer axis, from the outermost in memory. Up to 0.28 vLLM
    chooses one of two layouts for all back ends and asks each for this order; from 0.29 on it does not ask."""
    from vllm.v1.attention.backends.utils import get_kv_cache_layout

    return STRIDE_ORDERS[get_kv_cache_layout(), with_layers]


def num_blocks(layers: Iterable[Any]) -> int:
    """Kernel blocks in the KV caches of one group's layers.

    The configuration has other numbers: it counts blocks of the KV-cache manager, which can be larger, and layers can
    share an allocation. The caches exist before the first step is planned: both of vLLM's model runners bind them in
    `initialize_kv_cache`, after they make the builders.
    """
    return min(int(layer.kv_cache.shape[0]) for layer in layers)


def scale_of(layer: Any, name: str) -> Any:
    """What kernels on a GPU multiply a layer's stored keys or values by. That is a tensor, which weights that are
    loaded again change in its place, where CUDA graphs read it. It is 1, which costs no launch, for a layer whose
    weights have no scales.

    Args:
        layer: vLLM's layer.
        name: "k_scale" or "v_scale".
    """
    number = getattr(layer, f"_{name}_float")
    is_loaded = getattr(layer, "quant_method", None) is not None
    return getattr(layer, f"_{name}") if is_loaded or number != 1 else number


def draft_tag() -> str | None:
    """vLLM's name for the kind of draft model whose layers it makes now; None: they are the model's own."""
    tag = getattr(import_module("vllm.compilation.backends"), "model_tag", None)
    return tag if tag in ("draft_model", "eagle_head") else None


def has_model_runner_v1(vllm_config: Any) -> bool:
    """Whether vLLM runs the model with its older model runner."""
    return getattr(vllm_config, "use_v2_model_runner", None) is False


def runs_only_drafts(tag: str | None, vllm_config: Any) -> bool:
    """Whether a layer of a draft model runs only the steps that are planned for drafting. vLLM nevertheless puts it
    into a group with the model's own layers. With model runner V2 an EAGLE or MTP head drafts its first token in the
    step of the model.

    Args:
        tag: the layer's `draft_tag`.
        vllm_config: the engine's configuration.
    """
    return tag == "draft_model" or (tag is not None and has_model_runner_v1(vllm_config))


def chosen_kinds(vllm_config: Any) -> tuple[bool, bool]:
    """Whether CUSTOM is chosen for layers of full attention, and for those with a sliding window."""
    options = vllm_config.attention_config
    chosen = (options.backend_per_kind.get(kind, options.backend) for kind in ("full_attention", "sliding_window"))
    full, windowed = (getattr(backend, "name", None) == "CUSTOM" for backend in chosen)
    return full, windowed


def decode_query_len(vllm_config: Any) -> int:
    """Query tokens of a request that verifies all its drafts."""
    speculative = getattr(vllm_config, "speculative_config", None)
    return 1 + (getattr(speculative, "num_speculative_tokens", None) or 0)


def merges_all_to_all(vllm_config: Any) -> bool:
    """Whether the ranks of decode context parallelism send all to all; otherwise they gather and reduce-scatter."""
    return bool(getattr(vllm_config.parallel_config, "dcp_comm_backend", "ag_rs") == "a2a")


def context_combine(vllm_config: Any) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """vLLM's function that merges the outputs of the ranks of decode context parallelism. It gives each rank its own
    heads. Both kinds moved to a common module between 0.27 and 0.32."""
    all_to_all = merges_all_to_all(vllm_config)
    name = "dcp_a2a_lse_reduce" if all_to_all else "cp_lse_ag_out_rs"
    before = "dcp_alltoall" if all_to_all else "common"
    home = "dcp" if find_spec("vllm.v1.attention.ops.dcp") else before
    combine: Callable[..., Any] = getattr(import_module(f"vllm.v1.attention.ops.{home}"), name)
    return combine


def merge_attention_states() -> Callable[..., None]:
    """vLLM's function that merges two outputs by their log-sum-exps into the first argument."""
    merge: Callable[..., None] = import_module("vllm.v1.attention.ops.merge_attn_states").merge_attn_states
    return merge


def call_with_known(function: Callable[..., Any], **arguments: Any) -> Any:
    """Calls a function with those arguments that it has: `get_flash_attn_version` has more since 0.26."""
    known = signature(function).parameters
    return function(**{name: value for name, value in arguments.items() if name in known})
