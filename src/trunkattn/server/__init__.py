"""`trunkattn serve`: OpenAI-compatible HTTP in front of the embedded engine, with metrics and a live page."""

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from trunkattn.server.app import create_app
    from trunkattn.server.engine_loop import EngineLoop
    from trunkattn.server.options import ServerOptions
    from trunkattn.server.running import AppServer

__all__ = ["AppServer", "EngineLoop", "ServerOptions", "create_app"]

# Imported when they are asked for: options check themselves before torch and transformers are loaded.
_HOMES: Final = MappingProxyType(
    {
        "AppServer": "trunkattn.server.running",
        "EngineLoop": "trunkattn.server.engine_loop",
        "ServerOptions": "trunkattn.server.options",
        "create_app": "trunkattn.server.app",
    }
)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
