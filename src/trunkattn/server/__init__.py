"""`trunkattn serve`: OpenAI-compatible HTTP in front of the embedded engine, with metrics and a live page."""

from trunkattn.server.app import create_app
from trunkattn.server.engine_loop import EngineLoop
from trunkattn.server.options import ServerOptions
from trunkattn.server.running import AppServer

__all__ = ["AppServer", "EngineLoop", "ServerOptions", "create_app"]
