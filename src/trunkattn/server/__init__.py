"""`trunkattn serve`: OpenAI-compatible HTTP in front of the embedded engine, with metrics and a live page."""

from trunkattn.server.app import create_app
from trunkattn.server.engine_loop import EngineLoop
from trunkattn.server.options import ServerOptions

__all__ = ["EngineLoop", "ServerOptions", "create_app"]
