"""The back end behind a name: vLLM looks up a name in this module when a layer selects it.

On a CPU vLLM ignores the user's choice and asks for its own back end (`CpuPlatform.get_attn_backend_cls`). `register`
routes those names here too, so that the user gets the chosen one: ours for CUSTOM, otherwise vLLM's.
"""

from importlib import import_module
from typing import Any

from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from trunkattn.integrations.vllm import LATENT_NAME, NAME, OUR_PATH, taken, versions

logger = init_logger("vllm.trunkattn")


def __getattr__(name: str) -> Any:
    if name == NAME:
        return _ours(_means_latent(get_current_vllm_config()))
    if name == LATENT_NAME:
        return _ours(latent=True)
    if name in versions.CPU_BACKENDS:
        return _ours_or_stock(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _means_latent(vllm_config: Any) -> bool:
    """Whether CUSTOM is latent attention: the model has it, and no other back end is named for such layers."""
    options, model = vllm_config.attention_config, vllm_config.model_config
    chosen = options.backend_per_kind.get(versions.LATENT_KIND, options.backend)
    return bool(getattr(model, "use_mla", False)) and chosen is AttentionBackendEnum.CUSTOM


def _ours(latent: bool) -> Any:
    """Our back end of latent attention, or the other. Raises ValueError with the reason if it cannot run."""
    version = versions.installed()
    refusal = versions.refusal(version)
    if refusal:
        raise ValueError(refusal)
    if not (current_platform.is_cpu() or current_platform.is_cuda()):
        raise ValueError(
            "attention_backend=CUSTOM: TrunkAttention runs on NVIDIA GPUs and on CPUs, and this platform is neither; "
            "leave attention_backend out"
        )
    caution = versions.TESTED.caution(version)
    if caution:
        logger.warning_once(caution)
    try:
        return _latent_class() if latent else _class_for_this_platform()
    except (ImportError, AttributeError) as error:
        if latent:
            raise ValueError(versions.no_latent(version, error)) from error
        if not caution:
            raise
        raise ValueError(versions.broken_contract(version, error)) from error


def _latent_class() -> Any:
    if current_platform.is_cpu():
        raise ValueError(versions.NO_LATENT_ON_CPU)
    from trunkattn.integrations.vllm.mla import TrunkMlaBackend

    return TrunkMlaBackend


def _class_for_this_platform() -> Any:
    if current_platform.is_cuda():
        from trunkattn.integrations.vllm.cuda import TrunkAttentionCudaBackend

        return TrunkAttentionCudaBackend
    versions.hide_numba_from_look_ups()
    from trunkattn.integrations.vllm.backend import TrunkAttentionBackend

    return TrunkAttentionBackend


def _ours_or_stock(name: str) -> Any:
    """The back end that the engine's configuration selects, on a CPU."""
    vllm_config, custom = get_current_vllm_config(), AttentionBackendEnum.CUSTOM
    is_latent = name != "CPU_ATTN"
    chosen = _chosen(is_latent, vllm_config)
    if chosen is None or chosen.name not in (NAME, LATENT_NAME):
        module, _, attribute = AttentionBackendEnum[name].value.rpartition(".")
        return getattr(import_module(module), attribute)
    if chosen is custom and custom.get_path() != OUR_PATH:
        raise ValueError(f"attention_backend=CUSTOM: {taken(NAME, custom.get_path())}")
    if is_latent:
        raise ValueError(versions.NO_LATENT_ON_CPU)
    if chosen is not custom:
        raise ValueError(
            "attention_backend=TRUNK_MLA: these layers have keys and values, and TRUNK_MLA is latent attention (MLA); "
            "choose CUSTOM, or name each kind in attention_config.backend_per_kind"
        )
    logger.info_once("CUSTOM is used on this CPU: TrunkAttention replaces vLLM's own CPU_ATTN.")
    return _ours(latent=False)


def _chosen(is_latent: bool, vllm_config: Any) -> Any:
    """The back end that the user chose for the layers that ask for one, which on a CPU do not say whether they have a
    window; None: none. Linear-attention and Mamba layers do not ask here."""
    options, model = vllm_config.attention_config, vllm_config.model_config
    full, windowed = versions.chosen_kinds(vllm_config)
    if not is_latent and full != windowed:
        if model is not None and model.get_sliding_window() is not None:
            raise ValueError(
                "attention_config.backend_per_kind names CUSTOM for some of full_attention and sliding_window: on a "
                "CPU layers of this model cannot be told apart by these; name CUSTOM for both or for neither"
            )
        if windowed:
            logger.warning_once(versions.WINDOWS_UNKNOWN)
    return options.backend_per_kind.get(versions.LATENT_KIND if is_latent else "full_attention", options.backend)
