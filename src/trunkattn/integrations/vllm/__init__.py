"""TrunkAttention inside vLLM: `vllm serve MODEL --attention-backend CUSTOM`, `LLM(..., attention_backend="CUSTOM")`.

vLLM finds `register` through the entry point group `vllm.general_plugins`. The plug-in runs on CPUs and on NVIDIA GPUs.
When CUSTOM is selected, anything unsupported is refused with one line; an engine that does not select CUSTOM is not
affected. On a GPU decoding runs on our kernels, also in full CUDA graphs, and prompts run on vLLM's FlashAttention.
"""

from trunkattn.integrations.vllm import versions

ROUTE = "trunkattn.integrations.vllm.route"
OUR_PATH = f"{ROUTE}.CUSTOM"


def register() -> None:
    """Registers TrunkAttention as CUSTOM. vLLM calls it in every process, perhaps more than once.

    It never raises, because that would stop engines that do not select this back end: `route` raises when CUSTOM is
    selected. If CUSTOM cannot be ours, one warning says why.
    """
    from vllm.logger import init_logger
    from vllm.platforms import current_platform

    logger = init_logger("vllm.trunkattn")
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError:
        version = versions.installed()
        logger.warning("TrunkAttention is not available: %s", versions.refusal(version) or versions.caution(version))
        return
    names = ["CUSTOM"]
    if current_platform.is_cpu():  # there vLLM never asks for CUSTOM, only for its own back ends
        names += [name for name in versions.CPU_BACKENDS if name in AttentionBackendEnum.__members__]
    for name in names:
        backend, path = AttentionBackendEnum[name], f"{ROUTE}.{name}"
        if backend.is_overridden() and backend.get_path() != path:
            logger.warning("TrunkAttention is not available: %s", taken(name, backend.get_path()))
        else:
            register_backend(backend, path)


def taken(name: str, path: str) -> str:
    """The message for a user with another plug-in that registered `path` as the back end `name`."""
    return (
        f"the attention back end {name} is registered by another plug-in, as {path}, and vLLM has room for one: "
        "name the plug-ins to load in the environment variable VLLM_PLUGINS, or uninstall one of the two"
    )
