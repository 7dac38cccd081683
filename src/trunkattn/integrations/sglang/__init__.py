"""TrunkAttention inside SGLang: `--attention-backend trunk`, `Engine(attention_backend="trunk")`.

SGLang finds `register` through the entry point group `sglang.srt.plugins`. The plug-in runs on CPUs and on NVIDIA GPUs,
for prompts and decoding, or only for decoding beside another back end for prompts, which models with latent attention
(MLA) need. What it cannot serve is refused with one line when the engine starts. An engine that does not select it is
not affected.
"""

from typing import Any

from trunkattn.integrations.sglang import versions
from trunkattn.integrations.sglang.name import NAME, logger

MAKER = "trunkattn.integrations.sglang"  # the module of the function that SGLang's registry holds for our name


def register() -> None:
    """Adds `trunk` to SGLang's attention back ends. SGLang calls it in every process, perhaps more than once.

    It never raises, because SGLang logs a failed plug-in and goes on: one line says why the name is missing.
    """
    try:
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
        from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
    except ImportError as error:
        logger.error("TrunkAttention is not available: %s", versions.no_registry(error))
        return
    holder = getattr(ATTENTION_BACKENDS.get(NAME), "__module__", MAKER)
    if holder != MAKER:
        logger.error("TrunkAttention is not available: %s", taken(holder))
        return
    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(create)


def create(runner: Any) -> Any:
    """The back end for a model runner. Raises ValueError with one line if it cannot serve the model."""
    from trunkattn.integrations.sglang.route import choose

    return choose(runner)


def taken(holder: str) -> str:
    """The message for a user with another plug-in that registered the same name."""
    return (
        f"the attention back end {NAME} is registered by another plug-in, in {holder}: name the plug-ins to load in "
        "the environment variable SGLANG_PLUGINS, or uninstall one of the two"
    )
