"""`trunkattn serve`: OpenAI-compatible HTTP in front of the embedded engine, with metrics and a live page."""

from typing import TYPE_CHECKING

from trunkattn.lazy import lazy_names

if TYPE_CHECKING:
    from trunkattn.server.app import create_app
    from trunkattn.server.engine_loop import EngineLoop
    from trunkattn.server.options import ServerOptions
    from trunkattn.server.running import AppServer

__all__ = ["AppServer", "EngineLoop", "ServerOptions", "create_app"]

# Imported when they are asked for: options check themselves before torch and transformers are loaded.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "AppServer": "trunkattn.server.running",
        "EngineLoop": "trunkattn.server.engine_loop",
        "ServerOptions": "trunkattn.server.options",
        "create_app": "trunkattn.server.app",
    },
)
