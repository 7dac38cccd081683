"""`trunkattn serve`: the model behind HTTP until SIGTERM or SIGINT."""

import sys

import uvicorn
from rich.console import Console

from trunkattn.cli.models import working
from trunkattn.cli.options import ServeOptions, fields_of, reported_by_option
from trunkattn.engine import LLM, EngineConfig
from trunkattn.server import ServerOptions, create_app


def run_serve(options: ServeOptions) -> None:
    """Checks the options, loads the model, and serves it."""
    errors = Console(file=sys.stderr)
    with reported_by_option(ServeOptions):
        given = fields_of(ServerOptions, options)
        given["served_model_name"] = options.served_model_name or options.model.stem
        given["api_keys"] = tuple(options.api_key or ())
        given["allowed_origins"] = tuple(options.allowed_origin or ())
        server = ServerOptions(**given)
        with working(errors, f"Loading {options.model.name}"):
            llm = LLM(options.model, **fields_of(EngineConfig, options))
            llm.warm_up()
    errors.print(f"Serving {server.served_model_name} on http://{server.host}:{server.port}", highlight=False)
    config = uvicorn.Config(
        create_app(llm, server),
        host=server.host,
        port=server.port,
        log_level="warning" if options.quiet else "info",
        timeout_graceful_shutdown=max(1, round(server.shutdown_seconds)),
    )
    uvicorn.Server(config).run()
