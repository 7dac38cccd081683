"""The packages that the engine needs, and which of them are missing."""

from importlib.metadata import PackageNotFoundError, distribution
from typing import Final

ENGINE_PACKAGES: Final = ("transformers", "safetensors", "gguf", "accelerate", "jinja2")
ANALYSIS_PACKAGES: Final = ("jinja2",)  # a tokenizer needs those of the engine
SERVER_PACKAGES: Final = (*ENGINE_PACKAGES, "fastapi", "uvicorn", "prometheus-client", "llguidance")


def missing_packages(names: tuple[str, ...]) -> list[str]:
    """The distributions in `names` that are not installed."""
    missing = []
    for name in names:
        try:
            distribution(name)
        except PackageNotFoundError:
            missing.append(name)
    return missing
