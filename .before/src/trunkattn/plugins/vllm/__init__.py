"""TrunkAttention inside vLLM: `vllm serve MODEL --attention-backend CUSTOM`, `LLM(..., attention_backend="CUSTOM")`.

vLLM finds `register` through the entry point group `vllm.general_plugins`. On CPUs and on NVIDIA GPUs; what is not
supported is refused with one line when CUSTOM is selected, and an engine that does not select CUSTOM never meets this
package. On a GPU decoding runs on our kernels, under full CUDA graphs too, and prompts on vLLM's FlashAttention.
"""

from trunkattn.plugins.vllm import versions

ROUTE = "trunkattn.plugins.vllm.route"
OUR_PATH = f"{ROUTE}.CUSTOM"


def register() -> None:
    """Makes CUSTOM stand for TrunkAttention. vLLM calls it in every process, perhaps more than once.

    Nothing is raised here, where it would stop engines that do not want this back end: `route` raises once CUSTOM is
    selected, and what keeps CUSTOM from being ours is logged as one warning.
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
    if current_platform.is_cpu():  # there vLLM never asks for CUSTOM, only for the back ends of its own
        names += [name for name in versions.CPU_BACKENDS if name in AttentionBackendEnum.__members__]
    for name in names:
        backend, path = AttentionBackendEnum[name], f"{ROUTE}.{name}"
        if backend.is_overridden() and backend.get_path() != path:
            logger.warning("TrunkAttention is not available: %s", taken(name, backend.get_path()))
        else:
            register_backend(backend, path)


def taken(name: str, path: str) -> str:
    """What to tell a user whose other plug-in registered `path` as the back end `name`."""
    return (
        f"the attention back end {name} is registered by another plug-in, as {path}, and vLLM has room for one: "
        "name the plug-ins to load in the environment variable VLLM_PLUGINS, or uninstall one of the two"
    )
