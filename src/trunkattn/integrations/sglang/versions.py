"""The differences between SGLang 0.5.17 and 0.5.23 that the plug-in meets. This module does not import SGLang by
itself.

Differences that need no code here: `set_kv_buffer` takes a `KVWriteLoc` in both; prompt graphs that are compiled in
pieces are gone in 0.5.23, and ours runs between the pieces anyway; the padded rows of a decode graph are row 0 of the
request table in both.
"""

from collections.abc import Iterable
from types import MappingProxyType
from typing import Any, Final

import torch

from trunkattn.dtypes import KV_KINDS, dtype_name
from trunkattn.gpu.cards import card_at
from trunkattn.integrations.version_range import VersionRange

# 0.5.17 is the newest that pins torch 2.11. `make test-sglang` runs 0.5.23 on a CPU.
TESTED: Final = VersionRange("SGLang", (0, 5, 17), (0, 5, 23))

# What the plug-in needs of SGLang's base class. A version outside of the tested ones is used if it has them.
CONTRACT: Final = (
    "init_forward_metadata",
    "init_forward_metadata_out_graph",
    "init_forward_metadata_in_graph",
    "init_cuda_graph_state",
    "get_cuda_graph_seq_len_fill_value",
    "forward_decode",
    "forward_extend",
)
# What it needs of a model runner.
RUNNER: Final = (
    "model", "model_config", "server_args", "device", "dtype", "kv_cache_dtype", "page_size", "req_to_token_pool",
    "token_to_kv_pool", "spec_algorithm", "use_mla_backend",
)  # fmt: skip

# Types of KV cache, by SGLang's names for them; the runner has the dtype.
KV_DTYPES: Final = tuple(KV_KINDS)

# Pools of keys and values, by the exact class name, because subclasses change what is stored.
PLAIN_POOL: Final = "MHATokenToKVPool"
LATENT_POOL: Final = "MLATokenToKVPool"
WINDOW_POOL: Final = "SWAKVPool"  # one pool for the layers with a window, one for the others
LINEAR_POOL: Final = "HybridLinearKVPool"  # of a model with linear attention: holds the pool of the other layers

# What leaves the prompts of latent attention to a back end of SGLang's own.
OTHER_PROMPTS: Final = "prefill_attention_backend=fa3 (or another of SGLang's)"

# Options that change the attention: their name, and the values that mean off. None always does. An option that the
# version does not have is off.
REFUSED_OPTIONS: Final = MappingProxyType(
    {
        "speculative_algorithm": ((), "speculative decoding"),
        "dllm_algorithm": ((), "diffusion language models"),
        "enable_deterministic_inference": ((False,), "deterministic inference"),
        "enable_two_batch_overlap": ((False,), "two-batch overlap"),
        "enable_pdmux": ((False,), "multiplexing prompts and decoding on one GPU"),
        "dcp_size": ((1,), "decode context parallelism"),
        "attn_cp_size": ((1,), "context parallelism"),
        "enable_unified_memory": ((False,), "the unified memory pool"),
        "enable_page_major_kv_layout": ((False,), "the page-major KV layout"),
        "prefill_only_disable_kv_cache": ((False,), "prompts without a KV cache"),
    }
)


def installed() -> str:
    """SGLang's version."""
    import sglang

    return str(sglang.__version__)


def served(on_cpu: bool) -> str:
    """What the plug-in serves and refuses here, in words."""
    dtypes = [dtype for dtype in KV_DTYPES if on_cpu or dtype != torch.float8_e4m3fn or card_at("cuda").has_e4m3]
    caches = ", ".join(dtype_name(dtype) for dtype in dtypes)
    refused = ", ".join(("sparse attention", *(name for _, name in REFUSED_OPTIONS.values())))
    return (
        f"It serves full and sliding-window attention and decoding of latent attention (MLA) with caches of {caches}, "
        f"and refuses, among others, {refused}"
    )


def missing(base: type, runner: Any) -> list[str]:
    """What this version lacks of what the plug-in needs; empty if nothing."""
    found = [f"{base.__name__}.{name}" for name in CONTRACT if not hasattr(base, name)]
    return found + [f"{type(runner).__name__}.{name}" for name in RUNNER if not hasattr(runner, name)]


def refusal(version: str, lacks: Iterable[str]) -> str:
    """The reason why this version cannot be used, and what to do."""
    return (
        f"attention_backend=trunk: SGLang {version} has no {', '.join(lacks)}, which TrunkAttention needs: install one "
        f"of {TESTED}, or choose another attention back end"
    )


def no_registry(error: ImportError) -> str:
    """The reason why the plug-in cannot even register."""
    return f"SGLang {installed()} takes no attention back end from a plug-in ({error}): install one of {TESTED}"


def options_in_effect(runner: Any) -> Any:
    """The engine's options, as SGLang decided. Newer versions keep in `server_args` what the user gave, and the
    defaults, what other options imply and what a model needs beside it."""
    try:
        from sglang.srt.arg_groups.model_override_base import resolved_view
    except ImportError:
        return runner.server_args
    return resolved_view(runner.server_args)


def refused_options(options: Any) -> list[str]:
    """Unsupported options of the engine that are on."""
    found = []
    for name, (off, words) in REFUSED_OPTIONS.items():
        value = getattr(options, name, None)
        if value is not None and value not in off:
            found.append(f"{words} ({name}={value})")
    return found


def backends(runner: Any) -> tuple[str, str]:
    """The names of the back ends (of prompts, of decoding). From 0.5.18 on the runner keeps them."""
    names = (getattr(runner, f"{phase}_attention_backend_str", None) for phase in ("prefill", "decode"))
    prefill, decode = names
    if prefill is None or decode is None:
        prefill, decode = runner.server_args.get_attention_backends()
    return str(prefill), str(decode)


def is_prompts(mode: Any) -> bool:
    """Whether a step of this mode is of prompts, with or without decodes. SGLang's `is_extend` is true also of modes
    whose tokens do not all see causally, such as drafts to verify and diffusion."""
    return mode.name in ("EXTEND", "MIXED")


def most_prompt_tokens(options: Any) -> int:
    """Most query tokens of a step of prompts, but for single prompts that are longer and are not cut; 0: not known."""
    sizes = (getattr(options, name, None) for name in ("chunked_prefill_size", "max_prefill_tokens"))
    return next((int(size) for size in sizes if size is not None and size > 0), 0)


def prompt_graphs(options: Any) -> str | None:
    """How prompts are captured in CUDA graphs: "breakable", "tc_piecewise", "full" or "disabled"."""
    config = getattr(options, "cuda_graph_config", None)
    return getattr(getattr(config, "prefill", None), "backend", None)


def rank(runner: Any) -> int:
    """The number of the runner's worker. Up to 0.5.17 the runner has it by itself, or in its parallel state."""
    state = getattr(runner, "ps", None)
    for holder in (runner, state):
        found = getattr(holder, "tp_rank", None)
        if found is not None:
            return int(found)
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().tp_rank)


def data_rank(runner: Any) -> int:
    """The number of the data-parallel engine."""
    for holder in (runner, getattr(runner, "ps", None)):
        found = getattr(holder, "dp_rank", None)
        if found is not None:
            return int(found)
    return 0


def needs_triton(name: str) -> bool:
    """Whether SGLang prepares the steps of a back end of this name with Triton on any device. From 0.5.18 on it knows
    that a CPU has none."""
    from sglang.srt.utils import common

    return bool(common.support_triton(name))


def reads_end_before_replay() -> Any:
    """What to answer when SGLang asks where reads of the request table end; None: this version does not ask.

    The block table is made before a decode graph is replayed. Up to 0.5.17 SGLang assumes that of every back end.
    """
    from sglang.srt.layers.attention import base_attn_backend

    ends = getattr(base_attn_backend, "SharedReadEnds", None)
    return None if ends is None else ends.PRE_REPLAY
