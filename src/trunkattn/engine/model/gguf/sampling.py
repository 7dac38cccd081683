"""The sampling parameters in a GGUF file, which a Hugging Face folder has in its generation_config.json.

llama.cpp's converter copies them from there, and llama.cpp uses them unless a request has its own.

Source: https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/metadata.py
"""

from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, Final

from trunkattn.engine.model.gguf.header import GgufHeader
from trunkattn.engine.sampling_params import default_sampling_params

PREFIX: Final = "general.sampling."
# A key -> the name that transformers has for it.
FIELDS: Final[Mapping[str, str]] = MappingProxyType(
    {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
)
# Keys of parameters that do not exist here -> the values that change nothing.
NEUTRAL: Final[Mapping[str, tuple[float, ...]]] = MappingProxyType(
    {"penalty_repeat": (1.0,), "xtc_probability": (0.0,), "mirostat": (0,)}
)
# Further numbers of these parameters, which change nothing without them.
DETAILS: Final = frozenset({"penalty_last_n", "xtc_threshold", "mirostat_tau", "mirostat_eta"})


def gguf_sampling(header: GgufHeader) -> dict[str, Any]:
    """The sampling parameters of a file, under the names of a generation configuration.

    Raises:
        ValueError: naming a key that asks for a parameter that does not exist here, or whose value is out of range.
    """
    given = {key.removeprefix(PREFIX): value for key, value in header.keys.items() if key.startswith(PREFIX)}
    for name, value in given.items():
        if name not in FIELDS and name not in DETAILS and value not in NEUTRAL.get(name, ()):
            raise ValueError(
                f"its key {PREFIX}{name}={value!r} changes which tokens are drawn, and nothing here follows it; remove "
                f"it (gguf-new-metadata --remove-metadata), and give SamplingParams what it is for"
            )
    found = {FIELDS[name]: value for name, value in given.items() if name in FIELDS}
    try:
        default_sampling_params(SimpleNamespace(**found))
    except (TypeError, ValueError) as error:
        raise ValueError(f"of its keys {PREFIX}*: {error}") from error
    return found
