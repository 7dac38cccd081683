"""The packages that commands need, and which of them are installed."""

from importlib.metadata import PackageNotFoundError, version
from typing import Final

ENGINE_PACKAGES: Final = ("transformers", "safetensors", "gguf", "accelerate", "jinja2")
ANALYSIS_PACKAGES: Final = ("jinja2",)  # a tokenizer needs those of the engine
SERVER_PACKAGES: Final = (*ENGINE_PACKAGES, "fastapi", "uvicorn", "prometheus-client", "llguidance")


def installed_version(package: str) -> str | None:
    """The version of a distribution; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def missing_packages(names: tuple[str, ...]) -> list[str]:
    """The distributions in `names` that are not installed."""
    return [name for name in names if installed_version(name) is None]
