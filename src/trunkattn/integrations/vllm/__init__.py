"""TrunkAttention inside vLLM: `vllm serve MODEL --attention-backend CUSTOM`, `LLM(..., attention_backend="CUSTOM")`.

vLLM finds `register` through the entry point group `vllm.general_plugins`. The plug-in runs on CPUs and on NVIDIA GPUs.
When CUSTOM is selected, anything unsupported is refused with one line; an engine that does not select CUSTOM is not
affected. On a GPU decoding runs on our kernels, also in full CUDA graphs, and prompts run on vLLM's FlashAttention.

A back end of vLLM is one for latent attention (MLA) or one for the rest. So there is a second name, TRUNK_MLA, where
vLLM has room for further names. CUSTOM means the one that fits the model.
"""

from typing import Any

from trunkattn.integrations.vllm import versions

NAME = "CUSTOM"
LATENT_NAME = "TRUNK_MLA"
ROUTE = "trunkattn.integrations.vllm.route"
OUR_PATH = f"{ROUTE}.{NAME}"


def register() -> None:
    """Registers TrunkAttention as CUSTOM and TRUNK_MLA. vLLM calls it in every process, perhaps more than once.

    It never raises, because that would stop engines that do not select this back end: `route` raises when CUSTOM is
    selected. If CUSTOM cannot be ours, one warning says why.
    """
    from vllm.logger import init_logger
    from vllm.platforms import current_platform

    logger = init_logger("vllm.trunkattn")
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError as error:
        logger.warning("TrunkAttention is not available: %s", versions.no_registry(versions.installed(), error))
        return
    if hasattr(AttentionBackendEnum, "register"):
        latent_member()
    names = [NAME]
    if current_platform.is_cpu():  # there vLLM never asks for CUSTOM, only for its own back ends
        names += [name for name in versions.CPU_BACKENDS if name in AttentionBackendEnum.__members__]
    for name in names:
        backend, path = AttentionBackendEnum[name], f"{ROUTE}.{name}"
        if backend.is_overridden() and backend.get_path() != path:
            logger.warning("TrunkAttention is not available: %s", taken(name, backend.get_path()))
        else:
            register_backend(backend, path)


def latent_member() -> Any:
    """The member TRUNK_MLA of vLLM's enum, which it registers when first asked.

    A process that vLLM starts unpickles its configuration before it loads plug-ins. So the member is pickled as a call
    of this function.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if LATENT_NAME not in AttentionBackendEnum.__members__:
        register_backend(LATENT_NAME, f"{ROUTE}.{LATENT_NAME}")
        AttentionBackendEnum[LATENT_NAME].__reduce_ex__ = lambda protocol: (latent_member, ())
    return AttentionBackendEnum[LATENT_NAME]


def latent_name() -> str:
    """The name of latent attention in this vLLM."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return LATENT_NAME if LATENT_NAME in AttentionBackendEnum.__members__ else NAME


def taken(name: str, path: str) -> str:
    """The message for a user with another plug-in that registered `path` as the back end `name`."""
    return (
        f"the attention back end {name} is registered by another plug-in, as {path}, and vLLM has room for one: "
        "name the plug-ins to load in the environment variable VLLM_PLUGINS, or uninstall one of the two"
    )
